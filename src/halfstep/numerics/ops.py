"""Every op of a step, forward and backward, with the module that it belongs to, and every cast with who made it.

A dispatch mode sees the ops below autograd, as they run on the device. What is compiled runs eagerly meanwhile.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..casting.scope import active_casting
from ..core.torch_compat import (
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
)
from .compiled import compiled_code_eager
from .owners import Owners

__all__ = [
    "CASTING",
    "TORCH",
    "USER",
    "Cast",
    "Functions",
    "OpCall",
    "OpWatch",
    "entered",
    "op_name",
    "watching_ops",
]

CASTING, USER, TORCH = "casting", "user", "torch"
"""Who makes casts: halfstep or native autocast; a call such as ``x.float()`` in the user's code; torch by itself."""

_CONVERSIONS = frozenset(("to", "type", "type_as", "half", "bfloat16", "float", "double", "copy_", "_to_copy"))
"""Functions that a user casts with."""

_PASS_ON = ("torch.", "halfstep.numerics.", "halfstep.casting.dispatch")

_CASTS = frozenset(("_to_copy", "copy_"))


class OpCall(NamedTuple):
    """A call of an op.

    Attributes:
        op: as in ``torch.ops.aten.addmm.default``.
        args: its arguments.
        kwargs: its keyword arguments.
        result: what it returned.
        module: the qualified name of its module.
        backward: whether it was called by a backward pass.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    module: str
    backward: bool

    @property
    def name(self) -> str:
        """The name of the op, as in ``addmm``."""
        return op_name(self.op)

    @property
    def output(self) -> torch.Tensor | None:
        """The first tensor of the result; for an op that returns nothing and writes to tensors, the first of those."""
        return first_tensor(self.result if self.result is not None else self.args)


def op_name(op: OpOverload) -> str:
    """The name of an op without its namespace and overload."""
    return schema_of(op).name.rpartition(":")[2]


def first_tensor(values: Any) -> torch.Tensor | None:
    """The first tensor in a tree of lists and tuples."""
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, (list, tuple)):
        return next((found for value in values if (found := first_tensor(value)) is not None), None)
    return None


def _user_modes() -> list[Any]:
    """The dispatch modes of this thread, the top one last. torch keeps its own, such as FakeTensorMode, apart."""
    modes = (dispatch_mode_at(i) for i in range(dispatch_mode_count()))
    return [mode for mode in modes if not is_torchs_mode(mode)]


def _take_off(mode: Any, pop: Callable[[], object]) -> None:
    """Take a mode off the stack: those above it are off meanwhile, with the flags that torch keeps about them."""
    modes = _user_modes()
    above = modes[modes.index(mode) + 1 :]
    for each in reversed(above):
        TorchDispatchMode.__exit__(each, None, None, None)  # not what its class does besides
    pop()
    for each in above:
        TorchDispatchMode.__enter__(each)


class Cast(NamedTuple):
    """A cast of a floating tensor to another floating dtype.

    Attributes:
        source: the dtype that it had.
        target: the dtype that it got.
        made_by: ``CASTING``, ``USER`` or ``TORCH``. The gradient of a cast is made by who made the cast.
        asked_by: the function whose arguments were cast; empty for a cast of a user, or of a module's inputs.
        bytes: how many were read and written.
    """

    source: torch.dtype
    target: torch.dtype
    made_by: str
    asked_by: str
    bytes: int


class Functions(TorchFunctionMode):
    """Knows which function of torch is running, which may call several ops, and whether it began under autocast.

    Attributes:
        running: the function; None if none is.
        autocast: whether native autocast was on when it was called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: Callable[..., Any] | None = None
        self.autocast = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer = self.running, self.autocast
        self.running, self.autocast = func, is_any_autocast_enabled()
        try:
            return func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.running, self.autocast = outer


class _Noticing(threading.local):
    """Whether this thread is in a function that is told of an op. Its own ops are no ops of the step."""

    on = False


_noticing = _Noticing()


class OpWatch(TorchDispatchMode):
    """A dispatch mode that tells of each op. Enter it by ``watching_ops``.

    It may end before modes that were entered later: those stay.

    Args:
        notice: called after each op.
        owners: knows the module of an op.
    """

    only_watches = True

    def __init__(self, notice: Callable[[OpCall], object], owners: Owners) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notice = notice
        self.owners = owners
        self.functions = Functions()
        self._casts: dict[int, tuple[str, str]] = {}
        self._beneath: list[Any] = []

    def __enter__(self) -> OpWatch:
        self._beneath = _user_modes()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the stack of modes from whatever place. torch takes off the top one, whichever ends."""
        modes = _user_modes()
        if self not in modes:
            # A mode beneath has ended first, and torch has taken this one off in its place.
            left = [mode for mode in modes if mode in self._beneath]
            if left:
                _take_off(left[-1], lambda: pop_dispatch_mode(None))
            return
        _take_off(self, lambda: TorchDispatchMode.__exit__(self, None, None, None))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap the method below; nothing is compiled while this mode is on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.run(func, args, kwargs or {})
        if not _noticing.on:
            _noticing.on = True
            try:
                self._notice(OpCall(func, args, kwargs or {}, result, *self.owners.now()))
            finally:
                _noticing.on = False
        return result

    def run(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op."""
        return op(*args, **kwargs) if kwargs else op(*args)

    def cast_of(self, call: OpCall) -> Cast | None:
        """The cast that a call of an op is, if it is one. To be asked while the op is noticed.

        Args:
            call: what was noticed.
        """
        if call.name not in _CASTS:
            return None
        source, target = call.args[1 if call.name == "copy_" else 0], call.result
        if source.dtype is target.dtype or not (source.is_floating_point() and target.is_floating_point()):
            return None
        size = source.numel() * source.element_size() + target.numel() * target.element_size()
        return Cast(source.dtype, target.dtype, *self._maker(call.backward), size)

    def _maker(self, backward: bool) -> tuple[str, str]:
        node, caller = current_node(), _caller()
        if backward:
            number = -1 if node is None else node_sequence_number(node)
            return self._casts.get(number, (CASTING if caller == CASTING else TORCH, ""))
        recomputed = node is not None  # the function that runs is ``backward``
        function = "" if recomputed else getattr(self.functions.running, "__name__", "")
        if function in _CONVERSIONS:
            made = (caller, "")
        else:
            casting = caller == CASTING or recomputed or self.functions.autocast or active_casting() is not None
            made = (CASTING if casting else TORCH, function)
        return self._casts.setdefault(next_sequence_number() - 1, made)


def _caller() -> str:
    """Whose code has called torch: halfstep's (not the modes that pass calls on), FSDP2's, or the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torch.distributed."):
            return TORCH
        if not name.startswith(_PASS_ON):
            return CASTING if name.startswith("halfstep.") else USER
        frame = frame.f_back
    return USER


@contextmanager
def watching_ops(notice: Callable[[OpCall], object], model: nn.Module | None = None) -> Iterator[OpWatch]:
    """Within the block ``notice`` is called after each op that this thread, or a backward pass of its, runs.

    The ops run as they would without. Compiled modules run eagerly, so that their ops can be seen.

    Args:
        notice: a function that may look at tensors and must not change them. Ops that it calls are not noticed.
        model: whose modules are told apart; see ``Owners``.

    Yields:
        The mode, whose ``cast_of`` says of a call that is a cast who made it.
    """
    watch = OpWatch(notice, Owners(model))
    with entered(watch):
        yield watch


@contextmanager
def entered(watch: OpWatch) -> Iterator[None]:
    """Within the block a mode sees ops."""
    with compiled_code_eager, watch.owners.watching(), watch.functions, watch:
        yield
