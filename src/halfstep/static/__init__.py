"""Graph mode: a model and its loss captured as one graph, cast once, and trained by an executor."""

from ..paddle.building import (
    Scope,
    data,
    default_main_program,
    default_startup_program,
    disable_static,
    enable_static,
    global_scope,
    program_guard,
)
from ..paddle.capture import Program, Value, capture, load
from ..paddle.executor import Executor
from ..paddle.inference import load_inference_model, save_inference_model
from ..paddle.tape import Variable
from . import amp, backend

__all__ = [
    "Executor",
    "Program",
    "Scope",
    "Value",
    "Variable",
    "amp",
    "backend",
    "capture",
    "data",
    "default_main_program",
    "default_startup_program",
    "disable_static",
    "enable_static",
    "global_scope",
    "load",
    "load_inference_model",
    "program_guard",
    "save_inference_model",
]
__dir__ = __all__.copy
