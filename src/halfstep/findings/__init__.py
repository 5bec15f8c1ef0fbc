"""Findings: what loses precision in a model and its optimizer, seen before or while it trains.

``check`` looks once, ``watch`` counts what steps change. Every finding has a stable code. The files of rules
have one function for each, and what to do about it.
"""

from .checking import check
from .finding import Finding
from .watching import Watch, watch

__all__ = ["Finding", "Watch", "check", "watch"]
