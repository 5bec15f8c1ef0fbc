"""Findings: causes of lost precision in a model and its optimizer, found before or during training.

``check`` looks once, ``watch`` counts lost updates over steps. Every finding has a stable code. The files of rules
have one function per code, and a table with the fix for each.
"""

from .checking import check
from .finding import Finding
from .watching import Watch, watch

__all__ = ["Finding", "Watch", "check", "watch"]
