"""The modes that see torch functions and ops, forward and backward, and find the origin of each cast.

``CallWatch`` enters the modes. The dispatch mode sees the ops below autograd, as they run on the device.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from ...casting.rules import emulated
from ...casting.scope import active_casting
from ...core.oplists.names import spellings
from ...core.oplists.tables import row_of
from ...formats.products import OP, RoundedTo, rounded_to, unrounded
from ...torch_internals.torch_compat import (
    OpOverload,
    TorchDispatchMode,
    current_node,
    dispatch_mode_at,
    dispatch_mode_count,
    is_any_autocast_enabled,
    is_torchs_mode,
    next_sequence_number,
    node_sequence_number,
    pop_dispatch_mode,
    schema_of,
    tree_flatten,
    tree_unflatten,
)
from .names import canonical

__all__ = [
    "CASTING",
    "TORCH",
    "USER",
    "Cast",
    "FunctionCall",
    "FunctionMode",
    "OpCall",
    "OpMode",
    "tensors_in",
    "widened",
    "written",
]

CASTING, USER, TORCH = "casting", "user", "torch"
"""The origins of casts: halfstep or native autocast; a call such as ``x.float()`` in user code; torch itself."""

_CONVERSIONS = frozenset(("to", "type", "type_as", "half", "bfloat16", "float", "double", "copy_", "_to_copy"))
"""Functions by which user code casts."""

_PASS_ON = ("torch.", "halfstep.diagnostics.observe.", "halfstep.casting.dispatch")

_OBSERVERS = ("halfstep.diagnostics.numerics.s", "halfstep.diagnostics.findings.", "halfstep.formats.history")
"""Modules whose ops observe a step: ``survey``, ``sampled_step``, the modules of updates and of delayed scales."""

_CHECKS = tuple(f"halfstep.casting.{name}" for name in ("inputs", "finite", "buffers", "operands"))
_READS = frozenset(("abs", "aminmax", "equal", "max", "round", "_local_scalar_dense"))
"""The ops by which modules of ``casting`` read values without changing them."""

_COPIES = frozenset(("_to_copy", "copy_"))

_EMPTY = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_"))


class Cast(NamedTuple):
    """A cast of a floating tensor to another floating dtype.

    Attributes:
        source: the dtype before the cast.
        target: the dtype after the cast.
        made_by: ``CASTING``, ``USER`` or ``TORCH``. The gradient of a cast has the origin of the cast.
        asked_by: the function whose arguments were cast; empty for a cast by user code, or of a module's inputs.
        bytes: the number of bytes read and written.
    """

    source: torch.dtype
    target: torch.dtype
    made_by: str
    asked_by: str
    bytes: int


class FunctionCall(NamedTuple):
    """A finished call of a torch function."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class OpCall(NamedTuple):
    """A call of an op.

    Attributes:
        op: the overload, such as ``torch.ops.aten.addmm.default``.
        args: the arguments.
        kwargs: the keyword arguments.
        result: the return value.
        module: the qualified name of the module that ran the op.
        backward: True if a backward pass called the op.
        function: the torch function that called the op; None if there is none, or if functions are not watched.
        cast: the cast that the op makes; None for any other op. Its origin is known if functions are watched.
        emulates: the 16-bit dtype for which an emulated product stands, which computes in fp32, or the formats of a
            product with a recipe; None for any other op.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    module: str
    backward: bool
    function: Callable[..., Any] | None = None
    cast: Cast | None = None
    emulates: torch.dtype | RoundedTo | None = None

    @property
    def name(self) -> str:
        """The name of the op without its namespace and overload, such as ``addmm``; ``linear`` with a recipe."""
        return "linear" if self.op is OP else _name(self.op)

    @property
    def canonical(self) -> str:
        """The name of the torch function that runs such an op, such as ``linear``."""
        return canonical(self.name, self.dims)

    @property
    def dims(self) -> int:
        """The number of spatial dimensions of a convolution; 2 for any other op."""
        return self.args[0].dim() - 2 if "convolution" in self.name else 2

    @property
    def copies(self) -> bool:
        """True if the op copies a tensor, possibly to another dtype. ``torch.vmap`` also makes it of a number."""
        return self.name in _COPIES and isinstance(self.source, torch.Tensor)

    @property
    def is_empty(self) -> bool:
        """True if the op allocates its result without filling it."""
        return self.name in _EMPTY

    @property
    def computes(self) -> bool:
        """True if the op computes or copies numbers; views and empty allocations do not."""
        moves = self.op.is_view or self.is_empty or self.name == "_unsafe_view"
        return not moves and self.op.namespace != "profiler"

    @property
    def source(self) -> torch.Tensor:
        """The tensor that a copy or cast reads."""
        return self.args[1 if self.name == "copy_" else 0]  # type: ignore[no-any-return]

    @property
    def output(self) -> torch.Tensor | None:
        """The first tensor of the result; for an op that returns nothing, the first tensor of its arguments."""
        return next(tensors_in(self.result if self.result is not None else self.args), None)


def _name(op: OpOverload) -> str:
    return schema_of(op).name.rpartition(":")[2]


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a tree of lists, tuples, dicts and dataclasses, such as the arguments and results of ops."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))
    elif is_dataclass(values):
        yield from tensors_in([getattr(values, each.name, None) for each in fields(values)])


def _user_modes() -> list[Any]:
    """List the dispatch modes of this thread, the top one last. torch keeps its own, such as FakeTensorMode, apart."""
    return [mode for mode in (dispatch_mode_at(i) for i in range(dispatch_mode_count())) if not is_torchs_mode(mode)]


def _take_off(mode: Any, pop: Callable[[], object]) -> None:
    """Remove a mode from the stack: pop the modes above it, with torch's flags about them, and push them again."""
    modes = _user_modes()
    above = modes[modes.index(mode) + 1 :]
    for each in reversed(above):
        TorchDispatchMode.__exit__(each, None, None, None)  # without the extra work of its class's __exit__
    pop()
    for each in above:
        TorchDispatchMode.__enter__(each)


class FunctionMode(TorchFunctionMode):
    """Tracks the running torch function, which may call several ops, and whether it began under autocast.

    Args:
        notice: a function to call after each torch function; None for none.
        compute_in: see ``CallWatch``. Some functions refuse arguments of several dtypes before any op runs.

    Attributes:
        running: the running function; None if there is none.
        autocast: True if native autocast was on when that function was called.
    """

    def __init__(self, notice: Callable[[FunctionCall], object] | None, compute_in: torch.dtype | None) -> None:
        super().__init__()
        self._notice = notice
        self._dtype = compute_in
        self.running: Callable[..., Any] | None = None
        self.autocast = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._dtype is not None and kwargs.get("out") is None and not spellings().get(func, ("", True))[1]:
            args, kwargs = widened(args, kwargs, self._dtype)
        outer = self.running, self.autocast
        self.running, self.autocast = func, is_any_autocast_enabled()
        try:
            result = func(*args, **kwargs)
        finally:
            self.running, self.autocast = outer
        if self._notice is not None:
            self._notice(FunctionCall(func, args, kwargs, result))
        return result


class _Noticing(threading.local):
    """A flag that is set while this thread runs an observer; ops of an observer are not ops of the step."""

    on = False


_noticing = _Noticing()


class OpMode(TorchDispatchMode):
    """A dispatch mode that reports each op. It may end before modes that were entered later; these stay on.

    Args:
        notice: a function to call after each op, until it raises.
        where: a function that returns the name of the running module, and True in a backward pass.
        functions: the mode that tracks the running function.
        compute_in: see ``CallWatch``.

    Attributes:
        only_watches: True if the mode does not change results, so that cached casts of weights stay valid.
    """

    def __init__(
        self,
        notice: Callable[[OpCall], object],
        where: Callable[[], tuple[str, bool]],
        functions: FunctionMode | None,
        compute_in: torch.dtype | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.only_watches = compute_in is None
        self._notice: Callable[[OpCall], object] | None = notice
        self._where = where
        self._functions = functions
        self._dtype = compute_in
        self._casts: dict[int, tuple[str, str]] = {}
        self._emulated: dict[int, torch.dtype] = {}
        self._beneath: list[Any] = []

    def __enter__(self) -> OpMode:
        self._beneath = _user_modes()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the stack of modes from any position; torch would pop the top mode regardless of the mode that ends."""
        modes = _user_modes()
        if self not in modes:
            # A mode below ended first, and torch popped this mode instead.
            left = [mode for mode in modes if mode in self._beneath]
            if left:
                _take_off(left[-1], lambda: pop_dispatch_mode(None))
            return
        _take_off(self, lambda: TorchDispatchMode.__exit__(self, None, None, None))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would make torch wrap the method below, and nothing is compiled while this mode is on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._dtype is not None:  # tensors that the op writes to keep their dtype
            args, kwargs = widened(unrounded(func, args), kwargs, self._dtype, list(written(func, args, kwargs)))
        result = func(*args, **kwargs)
        if self._notice is None or _noticing.on:
            return result
        _noticing.on = True
        try:
            function = None if self._functions is None else self._functions.running
            call = OpCall(func, args, kwargs, result, *self._where(), function)
            if not _is_bookkeeping(call):
                cast = self._cast_of(call) if call.copies else None
                self._notice(call._replace(cast=cast, emulates=self._emulated_dtype(call)))
        except BaseException:
            self._notice = None  # the mode can leave the stack only while no op runs
            raise
        finally:
            _noticing.on = False
        return result

    def _cast_of(self, call: OpCall) -> Cast | None:
        source, target = call.source, call.result
        if source.dtype is target.dtype or not (source.is_floating_point() and target.is_floating_point()):
            return None
        size = source.numel() * source.element_size() + target.numel() * target.element_size()
        return Cast(source.dtype, target.dtype, *self._maker(call), size)

    def _emulated_dtype(self, call: OpCall) -> torch.dtype | RoundedTo | None:
        """Find the dtype that an emulated product emulates; in a backward pass, from the product's forward."""
        if call.op is OP or not row_of(call.canonical).kind:
            return rounded_to(call.args) if call.op is OP else None
        if call.backward and (node := current_node()) is not None:
            return self._emulated.get(node_sequence_number(node))
        rules = (frame.f_locals for frame in _frames() if frame.f_code is emulated.__code__)
        half: torch.dtype | None = next((rule["half"] for rule in rules if rule["listed"] != "wide"), None)
        if half is not None:
            self._emulated[next_sequence_number() - 1] = half
        return half

    def _maker(self, call: OpCall) -> tuple[str, str]:
        """Find the origin of a cast, and the function that needed it."""
        node, name = current_node(), _caller()
        caller = TORCH if name.startswith("torch.") else CASTING if name.startswith("halfstep.") else USER
        if call.backward:
            number = -1 if node is None else node_sequence_number(node)
            return self._casts.get(number, (CASTING if caller == CASTING else TORCH, ""))
        recomputed = node is not None  # the running function is ``backward``
        function = "" if recomputed else getattr(call.function, "__name__", "")
        if function in _CONVERSIONS:
            made = (caller, "")
        else:
            autocast = self._functions is not None and self._functions.autocast
            casting = caller == CASTING or recomputed or autocast or active_casting() is not None
            made = (CASTING if casting else TORCH, function)
        return self._casts.setdefault(next_sequence_number() - 1, made)


def _frames() -> Iterator[FrameType]:
    """Yield the running frames, the innermost first, up to the first of user code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        name = frame.f_globals.get("__name__", "")
        frame = frame.f_back if name.startswith(("torch.", "halfstep.")) else None


def _caller() -> str:
    """Return the name of the Python module that called torch (or FSDP2), skipping modes that forward the call."""
    names = (frame.f_globals.get("__name__", "") for frame in _frames())
    return next((n for n in names if n.startswith("torch.distributed.") or not n.startswith(_PASS_ON)), "")


def _is_bookkeeping(call: OpCall) -> bool:
    """True for an op by which halfstep observes a step, which is not an op of the step itself."""
    return _caller().startswith(_CHECKS + _OBSERVERS if call.name in _READS else _OBSERVERS)


def written(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an op writes to."""
    for i, each in enumerate(schema_of(op).arguments):
        if each.is_write:
            yield args[i] if i < len(args) else kwargs.get(each.name)


def widened(args: Any, kwargs: Any, dtype: torch.dtype, kept: Sequence[Any] = ()) -> tuple[Any, Any]:
    """Widen floating tensors and dtypes in arguments to ``dtype``, except wider ones and the tensors in ``kept``."""

    def is_narrow(value: Any) -> bool:
        found = value.dtype if isinstance(value, torch.Tensor) else value
        return isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize < dtype.itemsize

    leaves, tree = tree_flatten((args, kwargs))
    if not any(map(is_narrow, leaves)):
        return args, kwargs
    keep = set(map(id, tree_flatten(list(kept))[0]))
    for i, leaf in enumerate(leaves):
        if is_narrow(leaf) and id(leaf) not in keep:
            leaves[i] = leaf.to(dtype) if isinstance(leaf, torch.Tensor) else dtype
    return tree_unflatten(leaves, tree)  # type: ignore[no-any-return]
