"""The private names of torch's compilers that halfstep uses, under public names: Dynamo, Inductor and
``torch.export``, and tensors without values.

``torch_compat`` has all other private names.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
import torch.overrides
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast

from .torch_compat import functorch_level, jit_tracing_state

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=torch.Tensor)

__all__ = [
    "FakeMode",
    "as_subclass_without_numbers",
    "codegen_of",
    "compile_errors",
    "compile_with_autograd",
    "compile_with_inductor",
    "compiled_from",
    "enter_autocast",
    "exit_autocast",
    "export_errors",
    "inductor_options",
    "is_traced",
    "needs_values",
    "never_traced",
    "not_by_itself",
    "own_code",
    "register_backend",
    "restore_dtypes_after_trace",
    "show_to_modes",
    "size_expression",
    "size_value",
    "traced_as_constant",
    "tracer_follows_autocast",
]


def is_traced() -> bool:
    """True if tensors may have no values: a compiler, ``torch.jit.trace`` or ``torch.func`` runs this code."""
    return torch.compiler.is_compiling() or jit_tracing_state() is not None or functorch_level() is not None


codegen_of: Callable[[torch.fx.Graph], Any] = attrgetter("_codegen")
"""The code writer of a graph, which knows the names of its arguments and the form of its results."""


def compile_with_inductor(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph with Inductor, which is imported here."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(module, inputs)  # type: ignore[return-value]


def own_code(method: Any) -> Any:
    """Copy a method with a new code object and a unique name, for ``torch.compile``.

    Dynamo counts compilations by code object and gives up after eight. It also remembers sizes by the name of the code:
    a different size becomes a symbol, so a second model would be compiled for dynamic shapes.
    """
    name = f"{method.__name__}_{next(_SERIAL)}"
    code, plain = method.__code__.replace(co_name=name), method.__func__
    return MethodType(FunctionType(code, plain.__globals__, name, None, plain.__closure__), method.__self__)


_SERIAL = itertools.count()


def compile_with_autograd(method: F, backend: str = "inductor") -> F | None:
    """Compile a method that calls ``torch.autograd.grad`` as one graph; None if this torch version cannot.

    16-bit values between fused ops are rounded, as in eager mode. The first call of a new kind raises an error of
    ``compile_errors()`` if it cannot be one graph.
    """
    from torch._dynamo import config

    if not hasattr(config, "trace_autograd_ops"):
        return None
    options: dict[str, Any] | None = {"emulate_precision_casts": True} if backend == "inductor" else None
    compiled = torch.compile(own_code(method), fullgraph=True, backend=backend, options=options)

    def call(*args: Any) -> Any:
        # Any call may trace. Meanwhile no finalizer may change this thread's modes, which Dynamo checks.
        restore = gc.enable if gc.isenabled() else gc.disable
        gc.disable()
        try:
            with config.patch(trace_autograd_ops=True):
                return compiled(*args)  # type: ignore[no-untyped-call, unused-ignore]
        finally:
            restore()

    return call  # type: ignore[return-value]


def traced_as_constant(function: F) -> F:
    """Mark a function so that Dynamo calls it while tracing and treats its result as a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def show_to_modes(functions: Iterable[Callable[..., Any]]) -> None:
    """Let Dynamo give calls of functions to function modes, as eager mode does.

    Dynamo (torch 2.13) gives a mode only the calls of functions that ``torch.overrides`` lists. ``F.pad`` is one, but
    Dynamo traces into it, and the call of ``torch._C._nn.pad`` in it would run without its casts.
    """
    listed = torch.overrides.get_overridable_functions().setdefault(torch._C, [])
    listed.extend(set(functions).difference(listed))
    if (tracer := sys.modules.get("torch._dynamo.variables.torch")) is not None:  # has copied the lists
        tracer.get_overridable_functions().update(listed)


def not_by_itself(function: F) -> F:
    """Mark a function so that Dynamo traces it within a compiled call, but never compiles it or its callees alone.

    If a whole module call is compiled, its hooks are part of the graph. But for ``torch.compile(module)`` Dynamo
    compiles ``forward``, and each hook as a separate program (torch 2.13); there the hook must run in Python. The same
    holds for the methods of a scope, which Dynamo compiles one by one if it cannot compile the function around them.
    AOTAutograd drops the casting that such a program would turn on.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


@traced_as_constant
def tracer_follows_autocast() -> bool:
    """True if Dynamo, which calls this while tracing, follows ``enter_autocast``; torch 2.11's does not."""
    in_graph = sys.modules["torch._dynamo.trace_rules"].torch_non_c_binding_in_graph_functions
    return f"{enter_autocast.__module__}.{enter_autocast.__name__}" not in in_graph


def restore_dtypes_after_trace(devices: tuple[str, ...]) -> None:
    """Let Dynamo, which is tracing now, restore the dtypes of native autocast if it gives up the trace.

    Dynamo itself restores all other settings that ``enter_autocast`` changes (torch 2.13).
    """
    output = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output
    for device in devices:
        output.add_cleanup_hook(functools.partial(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device)))


def compile_errors() -> tuple[type[Exception], ...]:
    """Return the errors of ``torch.compile`` for a function that it cannot compile."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch._inductor.exc import InductorError

    return (TorchDynamoException, FailOnRecompileLimitHit, InductorError)


def compiled_from(module: Any) -> Any:
    """Return the original module of a compiled one; None for any other module."""
    return getattr(module, "_orig_mod", getattr(module, "_torchdynamo_orig_callable", None))


def inductor_options(compiled: Any) -> dict[str, Any] | None:
    """Return the options of a compiled module that differ from Inductor's; None if another backend compiled it."""
    config = getattr(compiled, "get_compiler_config", lambda: None)()
    if config is None:
        return None
    plain: Any = torch.compile(compiled_from(compiled))
    default = plain.get_compiler_config()
    return {name: value for name, value in config.items() if value != default[name]}


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """Register a backend of ``torch.compile``, unless the name is taken."""
    if name not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(backend, name=name)


def export_errors() -> tuple[type[Exception], ...]:
    """Return the errors of ``torch.export`` for a model that it cannot capture."""
    return (torch._dynamo.exc.UserError, RuntimeError)


def never_traced(function: F, why: str) -> F:
    """Mark a function so that Dynamo runs it without tracing.

    Equals ``torch.compiler.disable``, whose wrapper costs some microseconds per call (torch 2.13).
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]
    return function


class FakeMode:
    """A factory of tensors with shapes and dtypes but no values; sizes of dimensions may be unknown."""

    def __init__(self) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self._mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(duck_shape=False))

    def make(self, tensor: torch.Tensor, free: Sequence[bool] = ()) -> torch.Tensor:
        """Make a fake tensor like another tensor. ``free`` is True for dimensions of unknown size."""
        from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

        if not any(free):
            return self._mode.from_tensor(tensor, static_shapes=True)
        sizes = [DimDynamic.DYNAMIC if unknown else DimDynamic.STATIC for unknown in free]
        return self._mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function on fake tensors, without gradients."""
        from torch._dispatch.python import enable_python_dispatcher

        with self._mode, enable_python_dispatcher(), torch.no_grad():  # only Python splits an LSTM of any length
            return function(*args, **kwargs)


def as_subclass_without_numbers(tensor: torch.Tensor, kind: type[T]) -> T:
    """Make an instance of a Tensor subclass with the shape, dtype and device of a tensor, and no memory."""
    made: Any = torch.Tensor._make_wrapper_subclass(kind, tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return made  # type: ignore[no-any-return]


def size_expression(size: object) -> Any:
    """Return the expression of a number that depends on unknown sizes; None for other objects."""
    return size.node.expr if isinstance(size, (torch.SymInt, torch.SymFloat)) else None


def size_value(expression: Any, sizes: dict[Any, Any]) -> Any:
    """Evaluate an expression for given sizes."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    return sympy_interp(PythonReferenceAnalysis, sizes, expression)


def needs_values() -> tuple[type[Exception], ...]:
    """Return the errors of an op that needs values and gets a tensor without values."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
