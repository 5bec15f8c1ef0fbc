"""The function mode that casts: torch hands it each call of an op, and it looks the callable up in a table of rules.

The table holds only the callables that need something. Any other call costs one dictionary lookup.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping, MutableMapping
from types import FrameType, FunctionType
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from ..core.errors import HalfstepError
from ..core.oplists.tables import NATIVE
from ..torch_internals.compiler_compat import traced_as_constant
from ..torch_internals.torch_compat import (
    DeviceContext,
    OpOverload,
    OpOverloadPacket,
    function_mode_at,
    function_mode_count,
    pop_function_mode,
    push_function_mode,
    qualified_name,
)
from .config import NOTHING, CastingConfig
from .weight_cache import WeightCache

__all__ = [
    "ByNumbers",
    "CastMode",
    "Plan",
    "Rule",
    "SessionEnd",
    "function_modes",
    "meetings",
    "method_name",
    "note_meeting",
    "place",
    "set_function_modes",
]

Rule = Callable[["CastMode", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""The casting of one call of an op: called with the mode, the op, its arguments and its keyword arguments."""

_Tensor, _OVERLOADS = torch.Tensor, {OpOverload, OpOverloadPacket}
_is_autocast_enabled = torch.is_autocast_enabled
_get_autocast_dtype = torch.get_autocast_dtype
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling


ByNumbers = tuple[Rule, Rule | None, tuple[type, ...], int]
"""The rules of an op that takes Python numbers, of which 16 bits may lack some: the rule for a number near 0, 1 or
infinity, which looks closer; the rule for any other; the types of numbers; and the first argument that may be one."""

_PYTHON_METHODS: dict[Any, str] = {m: n for n, m in vars(torch.Tensor).items() if isinstance(m, FunctionType)}


@traced_as_constant  # Dynamo calls it while it traces
def method_name(func: Callable[..., Any]) -> str | None:
    """The name of a method that ``torch.Tensor`` has in Python, such as ``norm``; None for anything else.

    Dynamo does not find such a method as a key of a dictionary if the tensor is an intermediate result (torch 2.13).
    """
    return _PYTHON_METHODS.get(func)


class _Meetings(threading.local):
    """Count of the ops of a thread that were cast because torch would have refused their dtypes."""

    count = 0


meetings = _Meetings()


@traced_as_constant  # a compiled op counts where it is traced, in its first pass
def note_meeting() -> None:
    """Count an op that was cast because torch would have refused its dtypes."""
    meetings.count += 1


class SessionEnd(Protocol):
    """The part of a session that a mode asks before each op."""

    def is_over(self) -> bool:
        """True if the session's models and optimizers are gone."""

    def leave(self) -> None:
        """Make something else current in this thread."""


class Plan(NamedTuple):
    """The rules by which a mode carries out a casting. They follow from the casting and from what records ops.

    Attributes:
        explicit: True if the tables leave nothing to native autocast, which may be on or off, for other lists.
        table: the rule of each callable; see ``build_table``.
        recorded: the same for code that Dynamo traces. There no op can be called again.
        call_again: a function that is called when torch has refused the dtypes of a call; see ``meeting.call_again``.
            With None the error of torch goes to the user.
    """

    explicit: bool = False
    table: MutableMapping[Callable[..., Any] | str, Rule | ByNumbers] = types.MappingProxyType({})  # type: ignore[assignment]
    recorded: Mapping[Callable[..., Any] | str, Rule | ByNumbers] = types.MappingProxyType({})
    call_again: Callable[..., tuple[bool, Any]] | None = None


class CastMode(TorchFunctionMode):
    """The mode of one thread. It follows one casting after another, and is on torch's stack while one of them needs it.

    Args:
        weights: copies of weights that may be kept.
        close_interrupted: closes the scopes of calls that have ended by Ctrl-C.

    Attributes:
        config: the casting. Of the devices in ``config.native`` native autocast does a part of the work; where a user
            turns it off, nothing is cast.
        plan: the plan by which it is carried out.
        cache: copies of weights, or None to keep none.
        session: the O1 session that the mode follows, which may be over at any op; None in a scope, and if compiled.
        frame: the call of a model whose casting it is; None for a ``with`` block. Ctrl-C ends it without a second hook.
        logits: the arguments of the latest sigmoids; see ``logits``.
    """

    def __init__(
        self, weights: WeightCache | None = None, close_interrupted: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.weights = weights
        self.close_interrupted = close_interrupted
        self.config: CastingConfig = NOTHING
        self.plan = Plan()
        self.cache: WeightCache | None = None
        self.session: SessionEnd | None = None
        self.frame: FrameType | None = None
        self.logits: dict[int, tuple[Any, ...]] = {}

    @property
    def is_needed(self) -> bool:
        """True if it must be on torch's stack."""
        return bool(self.plan.table) or self.session is not None or self.plan.call_again is not None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call of an op under its rule."""
        if _is_dynamo_compiling():
            table = self.plan.recorded
            rule = table.get(method_name(func) or func)
        else:
            if self.frame is not None:
                try:
                    self.frame.clear()  # fails while the call runs
                except RuntimeError:
                    pass
                else:
                    self.close_interrupted()
            if self.session is not None and self.session.is_over():
                self.session.leave()
            table = self.plan.table
            rule = table.get(func)
        if rule is None and type(func) in _OVERLOADS:
            rule = table.get(qualified_name(func))  # type: ignore[arg-type]
        if isinstance(rule, tuple):
            near, rule, kinds, first = rule
            values: tuple[Any, ...] = (*args, *kwargs.values()) if kwargs else args[first:] if first else args
            for each in values:
                if type(each) is not _Tensor and isinstance(each, kinds):
                    size: float = abs(each)  # type: ignore[arg-type]
                    if type(each) is complex or not (1.01 < size < 65504 or 1e-7 < size < 0.99 or size in (0, 1)):
                        rule = near
        try:
            if rule is None:
                return func(*args, **kwargs) if kwargs else func(*args)
            return rule(self, func, args, kwargs or {})
        except RuntimeError as error:
            call_again = self.plan.call_again
            if call_again is None or isinstance(error, (HalfstepError, torch.OutOfMemoryError)):
                raise
            rule = rule or (lambda _, func, args, kwargs: func(*args, **kwargs))
            taken, result = call_again(self, rule, func, args, kwargs or {})
            if not taken:
                raise
            note_meeting()
            return result

    def casts(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is cast: its device is one of ours, and native autocast was not turned off inside."""
        return self.half_of(tensor) is not None

    def half_of(self, tensor: torch.Tensor) -> torch.dtype | None:
        """The dtype that a tensor is lowered to; None if it is not cast.

        Where native autocast takes part, it is native autocast's: the user may have another one inside of ours.
        """
        kind, config = "cpu" if tensor.is_cpu else tensor.device.type, self.config
        if kind in config.native:
            return _get_autocast_dtype(kind) if _is_autocast_enabled(kind) else None
        return config.dtype if kind in config.devices else None

    def half(self) -> torch.dtype | None:
        """``half_of`` for any tensor; None where that depends on the device."""
        for kind in self.config.native:
            if _get_autocast_dtype(kind) is not self.config.dtype:
                return None
        return self.config.dtype

    def native_on(self) -> list[str]:
        """The device types on which native autocast is on at the moment."""
        return [device for device in self.config.devices if device in NATIVE and _is_autocast_enabled(device)]

    def on(self) -> bool:
        """True if anything may be cast on any device."""
        return len(self.config.native) < len(self.config.devices) or bool(self.native_on())

    def weight(self, value: Any) -> Any:
        """The 16-bit copy of an fp32 weight; anything else comes back as it is."""
        is_weight = type(value) is Parameter or (isinstance(value, _Tensor) and value.requires_grad and value.is_leaf)
        if not is_weight or value.dtype is not torch.float32 or self.cache is None:
            return value
        half = self.half_of(value)
        return value if half is None else self.cache.cast(value, half)


def function_modes() -> list[TorchFunctionMode]:
    """The function modes on this thread's stack, the innermost last. A mode that runs an op is not among them."""
    return [function_mode_at(i) for i in range(function_mode_count())]


def set_function_modes(modes: list[TorchFunctionMode]) -> None:
    """Replace the stack of this thread."""
    for _ in range(function_mode_count()):
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


def place(mode: CastMode, wanted: bool) -> None:
    """Put a mode on the stack, or take it off, and take off the modes that compiled code has put there.

    It goes under all modes but the default device, so that no other ``with`` block pops it for its own.
    ``torch.set_default_device`` enters its context, which insists on the bottom of the stack; ``with torch.device``
    pushes a context that was not entered, and takes off the top of the stack (torch 2.11 to 2.13).
    """
    modes = [function_mode_at(i) for i in range(function_mode_count())]
    placed = [each for each in modes if not isinstance(each, CastMode)]
    if wanted:
        at = 1 if placed and isinstance(placed[0], DeviceContext) and hasattr(placed[0], "old_device") else 0
        placed.insert(at, mode)
    if placed != modes:
        set_function_modes(placed)
