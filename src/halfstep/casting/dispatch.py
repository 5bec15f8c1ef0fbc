"""The function mode that casts ops: torch calls it for each op, and it looks the callable up in a table of rules.

The table contains only callables whose calls change. Any other call costs one dictionary lookup.
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
from torch.utils.weak import WeakIdKeyDictionary

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
    "changed_ops",
    "count_changed_op",
    "function_modes",
    "method_name",
    "place_mode",
    "set_function_modes",
]

Rule = Callable[["CastMode", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""A function that casts and runs one call of an op, given the mode, the op, its arguments and its keyword arguments."""

_Tensor, _OVERLOADS = torch.Tensor, {OpOverload, OpOverloadPacket}


ByNumbers = tuple[Rule, Rule | None, tuple[type, ...], int]
"""The rules of an op that takes Python numbers, some of which 16 bits cannot represent: the rule for numbers near 0, 1
or infinity, which checks them; the rule for any other number; the types of numbers to check; and the index of the first
argument that may be a number."""

_PYTHON_METHODS: dict[Any, str] = {m: n for n, m in vars(torch.Tensor).items() if isinstance(m, FunctionType)}


@traced_as_constant  # Dynamo calls this function while it traces
def method_name(func: Callable[..., Any]) -> str | None:
    """Return the name of a method that ``torch.Tensor`` defines in Python, such as ``norm``; None for anything else.

    Dynamo does not find such a method as a dictionary key if the tensor is an intermediate result (torch 2.13).
    """
    return _PYTHON_METHODS.get(func)


class _ChangedOps(threading.local):
    """The number of a thread's ops that ran otherwise than the model called them, because of dtypes or numbers.

    ``FirstPasses`` compares it before and after a pass to decide whether the model needs the mode.
    """

    count = 0


changed_ops = _ChangedOps()


@traced_as_constant  # a compiled op counts once, when Dynamo traces it in its first pass
def count_changed_op() -> None:
    """Count an op that torch would have refused, or whose numbers 16 bits cannot represent."""
    changed_ops.count += 1


class SessionEnd(Protocol):
    """The interface through which the mode learns that its session is over; the mode checks it before each op."""

    def is_over(self) -> bool:
        """True if Python has freed the session's models and optimizers."""

    def leave(self) -> None:
        """Make the next session or no casting current in this thread."""


class Plan(NamedTuple):
    """The rules by which the mode carries out a casting. They depend on the casting and on whether ops are recorded.

    Attributes:
        explicit: True if the tables do not rely on native autocast, so that its state and its lists do not matter.
        table: the rule of each callable; see ``build_table``.
        recorded: the rule of each callable in code that Dynamo traces, in which no op can be retried.
        call_again: a function that retries a call whose dtypes torch refused; see ``meeting.call_again``. With None the
            mode raises torch's error.
    """

    explicit: bool = False
    table: MutableMapping[Callable[..., Any] | str, Rule | ByNumbers] = types.MappingProxyType({})  # type: ignore[assignment]
    recorded: Mapping[Callable[..., Any] | str, Rule | ByNumbers] = types.MappingProxyType({})
    call_again: Callable[..., tuple[bool, Any]] | None = None


class CastMode(TorchFunctionMode):
    """The mode of one thread, which is on torch's stack while the current casting needs it.

    Args:
        close_interrupted: a function that closes the scopes of calls that a KeyboardInterrupt ended.

    Attributes:
        config: the current casting. On devices in ``config.native``, native autocast does part of the work; if the user
            turns it off there, the mode casts nothing.
        plan: the plan of the casting.
        cache: the cache of 16-bit weights, or None to cache none.
        session: the O1 session of the casting, which may be over at any op; None in a scope and in compiled code.
        frame: the frame of the model's call that entered the casting; None for a ``with`` block. The mode checks before
            each op that the call still runs, because a KeyboardInterrupt ends it without its second hook.
        logits: the arguments of the latest sigmoids; see ``logits``.
    """

    def __init__(self, close_interrupted: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.close_interrupted = close_interrupted
        self.config: CastingConfig = NOTHING
        self.plan = Plan()
        self.cache: WeightCache | None = None
        self.session: SessionEnd | None = None
        self.frame: FrameType | None = None
        self.logits: Any = WeakIdKeyDictionary()

    @property
    def is_needed(self) -> bool:
        """True if the mode must be on torch's stack."""
        return bool(self.plan.table) or self.session is not None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call of an op by its rule, and retry the call if torch refuses its dtypes."""
        if torch.compiler.is_dynamo_compiling():
            table = self.plan.recorded
            rule = table.get(method_name(func) or func)
        else:
            if self.frame is not None:
                try:
                    self.frame.clear()  # raises while the call runs
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
            count_changed_op()
            return result

    def casts(self, tensor: torch.Tensor) -> bool:
        """True if ops cast a tensor: the casting covers its device, and no inner block turned native autocast off."""
        return self.half_of(tensor) is not None

    def half_of(self, tensor: torch.Tensor) -> torch.dtype | None:
        """Return the 16-bit dtype to which a tensor is cast; None if it is not cast.

        On devices where native autocast is active, its dtype wins: the user may have nested another
        ``torch.autocast``.
        """
        kind, config = "cpu" if tensor.is_cpu else tensor.device.type, self.config
        if kind in config.native:
            return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return config.dtype if kind in config.devices else None

    def native_on(self) -> list[str]:
        """Return the device types on which native autocast is on."""
        return [device for device in self.config.devices if device in NATIVE and torch.is_autocast_enabled(device)]

    def weight(self, value: Any) -> Any:
        """Return the 16-bit copy of an fp32 weight, and any other value unchanged."""
        is_weight = type(value) is Parameter or (isinstance(value, _Tensor) and value.requires_grad and value.is_leaf)
        if not is_weight or value.dtype is not torch.float32 or self.cache is None:
            return value
        half = self.half_of(value)
        return value if half is None else self.cache.cast(value, half)


def function_modes() -> list[TorchFunctionMode]:
    """Return the function modes on this thread's stack, the innermost last, without a mode that is running an op."""
    return [function_mode_at(i) for i in range(function_mode_count())]


def set_function_modes(modes: list[TorchFunctionMode]) -> None:
    """Replace this thread's stack of function modes."""
    for _ in range(function_mode_count()):
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


def place_mode(mode: CastMode, wanted: bool) -> None:
    """Push a mode onto the stack or remove it, and remove the modes that compiled code pushed.

    The mode lies below every other mode, so that a user's ``with`` block does not pop it in place of its own mode. The
    exception is the context of ``torch.set_default_device``, which torch requires at the bottom of the stack.
    ``with torch.device`` pushes a context without entering it, and pops the top of the stack (torch 2.11 to 2.13); the
    entered context is the one with ``old_device``.
    """
    modes = [function_mode_at(i) for i in range(function_mode_count())]
    placed = [each for each in modes if not isinstance(each, CastMode)]
    if wanted:
        at = 1 if placed and isinstance(placed[0], DeviceContext) and hasattr(placed[0], "old_device") else 0
        placed.insert(at, mode)
    if placed != modes:
        set_function_modes(placed)
