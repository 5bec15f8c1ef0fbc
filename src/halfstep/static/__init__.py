"""Graph mode: a model and its loss captured as one graph, cast once, and trained by an executor."""

from . import amp, backend
from .executor import Executor
from .program import Program, Value, capture, load

__all__ = ["Executor", "Program", "Value", "amp", "backend", "capture", "load"]
