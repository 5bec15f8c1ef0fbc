"""Graph mode: a model and its loss captured as one graph, cast once, and trained by an executor."""

from ..graph import compile_backend as backend
from ..graph.capture import Program, Value, capture, load
from ..graph.executor import Executor
from . import amp

__all__ = ["Executor", "Program", "Value", "amp", "backend", "capture", "load"]
