"""Graph mode: a model and its loss captured as one graph, cast once, and trained by an executor."""

from ..graph.capture import Program, Value, capture, load
from ..graph.executor import Executor
from . import amp, backend

__all__ = ["Executor", "Program", "Value", "amp", "backend", "capture", "load"]
