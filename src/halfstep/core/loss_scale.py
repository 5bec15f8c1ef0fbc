"""The rules that move a loss scale, as values.

A rule (``StaticLossScale``, ``DynamicLossScale``) is frozen; its ``update`` is a pure function from a
``LossScaleState`` and a ``found_inf`` flag to the next state. ``parameters.loss_scaler.DeviceLossScaler`` keeps a state
and updates it by a rule.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple

import torch

from ..torch_internals.torch_compat import update_scale_
from .checks import check_between, check_count, check_kind
from .errors import ArgumentValueError, UsageError

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "LossScaleSpec",
    "LossScaleState",
    "StaticLossScale",
    "check_loss_scale",
    "loss_scale_text",
    "make_loss_scale",
    "parse_loss_scale",
]

_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max
# No gradient worth having needs a scale this far below 1: at 2**-14 even an fp16 gradient of 1e9 fits.
_COLLAPSED = 2.0**-14


class LossScaleState(NamedTuple):
    """The state of a loss scale: three 0-dim tensors on one device."""

    scale: torch.Tensor
    """float32: the factor of the loss."""
    good: torch.Tensor
    """int32: finite backward passes in a row since the scale last moved."""
    bad: torch.Tensor
    """int32: overflowing backward passes in a row that have not lowered the scale yet."""


class LossScale:
    """The base class of the rules."""

    init_scale: float
    """The scale to start with."""
    dynamic: bool = False
    """True if the scale can change."""
    collapse_after: int | None = None
    """The count of overflows in a row, at ``collapse_scale`` or below, that raises an error; None for never."""
    collapse_scale: float = 0.0
    """The largest scale at which an overflow counts towards a collapse."""

    def update(self, state: LossScaleState, found_inf: torch.Tensor) -> LossScaleState:
        """Return the next state as new tensors. ``found_inf`` is 0-dim, nonzero if a gradient was inf or NaN."""
        after = LossScaleState(*(t.clone() for t in state))
        self.update_(after, found_inf.to(torch.float32))
        return after

    def update_(self, state: LossScaleState, found_inf: torch.Tensor) -> None:
        """Update in place. ``found_inf`` is a 0-dim float32 tensor on the state's device; the host does not read it."""


@dataclass(frozen=True)
class StaticLossScale(LossScale):
    """A constant scale. Steps are counted.

    Raises:
        ArgumentValueError: unless the scale is a finite number above zero.
    """

    init_scale: float = 1.0

    def __post_init__(self) -> None:
        check_between("loss_scale", self.init_scale, above=0.0)

    def update_(self, state: LossScaleState, found_inf: torch.Tensor) -> None:
        """Count a step, finite or not."""
        state.good.add_(1)


@dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """A scale that stays near the largest value without overflow (Micikevicius et al. 2018, section 3.2).

    ::

        if found_inf:
            good = 0;  bad += 1
            if bad == backoff_interval:
                scale = max(scale * backoff_factor, min_scale);  bad = 0
        else:
            bad = 0;  good += 1
            if good == growth_interval:
                good = 0
                if scale * growth_factor is finite:
                    scale = min(scale * growth_factor, max_scale)

    With ``sticky_backoff`` the count of overflows stays at its limit (``bad = backoff_interval - 1`` instead of 0)
    until a finite step, so that every further overflow in a row lowers the scale at once, as NVIDIA's hysteresis does
    (Megatron-LM, ``update_scale_hysteresis``). Without ``sticky_backoff`` the count restarts, as in Paddle.

    The scale is never 0, inf or NaN: ``min_scale`` is above zero and ``max_scale`` is finite.

    Attributes:
        init_scale: the first scale, clamped to [min_scale, max_scale].
        growth_factor: the factor of a growth, above 1.
        backoff_factor: the factor of a backoff, between 0 and 1.
        growth_interval: finite steps in a row before the scale grows; None for never.
        backoff_interval: overflows in a row before it shrinks (hysteresis); None for never.
        min_scale: the floor. None stands for the smallest normal float32 number.
        max_scale: the ceiling. None stands for the largest float32 number.
        sticky_backoff: lower the scale at every overflow after the first backoff, until a finite step.
        collapse_after: a ``DeviceLossScaler`` raises ``LossScaleCollapsed`` after this many overflows in a row at the
            floor, or at 2**-14 if the floor is lower. None for never.
        floor: the smallest possible scale.
        ceiling: the largest possible scale.
        collapse_scale: the floor, or 2**-14 if the floor is lower.

    Raises:
        ArgumentValueError: for a value outside these ranges.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int | None = 2000
    backoff_interval: int | None = 1
    min_scale: float | None = None
    max_scale: float | None = 2.0**24
    sticky_backoff: bool = False
    collapse_after: int | None = 20
    floor: float = field(init=False, repr=False, compare=False)
    ceiling: float = field(init=False, repr=False, compare=False)
    collapse_scale: float = field(init=False, repr=False, compare=False)

    dynamic = True

    def __post_init__(self) -> None:
        check_between("init_scale", self.init_scale, above=0.0)
        check_between("growth_factor", self.growth_factor, above=1.0)
        check_between("backoff_factor", self.backoff_factor, above=0.0, below=1.0)
        for name in ("min_scale", "max_scale"):
            if getattr(self, name) is not None:
                check_between(name, getattr(self, name), above=0.0)
        for name in ("growth_interval", "backoff_interval", "collapse_after"):
            check_count(name, getattr(self, name), never=True)
        check_kind("sticky_backoff", self.sticky_backoff, bool, "True or False")
        floor = _SMALLEST if self.min_scale is None else max(self.min_scale, _SMALLEST)
        ceiling = _LARGEST if self.max_scale is None else min(self.max_scale, _LARGEST)
        object.__setattr__(self, "floor", floor)
        object.__setattr__(self, "ceiling", ceiling)
        object.__setattr__(self, "collapse_scale", max(floor, _COLLAPSED))
        if floor > ceiling:
            raise ArgumentValueError(f"min_scale={self.min_scale} is above max_scale={self.max_scale}; swap them.")
        object.__setattr__(self, "init_scale", min(max(self.init_scale, self.floor), self.ceiling))

    def count(self, state: LossScaleState, found_inf: torch.Tensor) -> bool:
        """Count a finite step that neither follows an overflow nor changes the scale, without a kernel of the scale.

        Args:
            state: the state on the host, updated in place.
            found_inf: as in ``update_``, on the host.

        Returns:
            False for any other step: nothing is changed, and ``update_`` must run.
        """
        scale, good, bad = state
        changes, steps = found_inf.item() or bad.item(), good.item() + 1
        counts = not changes and steps != self.growth_interval and self.floor <= scale.item() <= self.ceiling
        if counts:
            good.fill_(steps)
        return counts

    def update_(self, state: LossScaleState, found_inf: torch.Tensor) -> None:
        """Run the algorithm above: one small torch kernel, or two with hysteresis, and a clamp."""
        scale, good, bad = state
        growth, backoff = self.growth_factor, self.backoff_factor
        every, hysteresis = self.growth_interval or 0, self.backoff_interval or 0  # the kernel never counts to 0
        if hysteresis == 1:
            update_scale_(scale, good, found_inf, growth, backoff, every)
        else:
            update_scale_(scale, good, found_inf, growth, 1.0, every)
            # The same kernel counts overflows if it gets the inverted flag.
            finite = torch.logical_not(found_inf, out=torch.empty_like(found_inf))
            update_scale_(scale, bad, finite, backoff, 1.0, hysteresis)
            if self.sticky_backoff and hysteresis:
                bad.add_((bad == 0).logical_and_(found_inf), alpha=hysteresis - 1)
        scale.clamp_(self.floor, self.ceiling)


LossScaleSpec = float | Literal["dynamic"] | StaticLossScale | DynamicLossScale
"""A loss scale as users give it: a number, "dynamic", or a rule."""

_MAX_LOSS_SCALE = 2.0**24


def check_loss_scale(value: object) -> LossScaleSpec:
    """Check a loss scale that user code gave, and return it; a number may be a string.

    Raises:
        ArgumentValueError: for anything else.
    """
    if isinstance(value, (StaticLossScale, DynamicLossScale)):
        return value
    if isinstance(value, str) and value == "dynamic":
        return "dynamic"
    try:
        scale = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        scale = math.nan
    if isinstance(value, bool) or not 0.0 < scale < math.inf:
        raise ArgumentValueError(
            f'loss_scale={value!r} must be "dynamic", a finite float above zero, such a number as a string, or a '
            "halfstep.DynamicLossScale or halfstep.StaticLossScale."
        )
    return scale


def make_loss_scale(
    spec: LossScaleSpec, min_loss_scale: float | None = None, max_loss_scale: float | None = _MAX_LOSS_SCALE
) -> StaticLossScale | DynamicLossScale:
    """Build the rule of Apex ``amp``: a number is static; "dynamic" starts at 2**16 and doubles after 2,000 good steps.

    A ``min_loss_scale`` of 0 means no minimum, as in Apex. A rule, which has its own bounds, is returned unchanged.

    Raises:
        ArgumentValueError: for an invalid scale or bound.
        UsageError: for a rule together with bounds.
    """
    spec = check_loss_scale(spec)
    if isinstance(spec, LossScale):
        if min_loss_scale or max_loss_scale != _MAX_LOSS_SCALE:
            name = f"min_loss_scale={min_loss_scale!r}" if min_loss_scale else f"max_loss_scale={max_loss_scale!r}"
            where = "put them into it as min_scale= and max_scale=" if spec.dynamic else "a static scale needs none"
            raise UsageError(f"{name} was given beside loss_scale={spec!r}, which has bounds of its own; {where}.")
        return spec
    if spec == "dynamic":
        return DynamicLossScale(min_scale=min_loss_scale or None, max_scale=max_loss_scale)
    return StaticLossScale(spec)


def loss_scale_text(spec: LossScaleSpec) -> str:
    """Format a loss scale as text without commas: ``1.0``, ``dynamic``, ``dynamic(init_scale=8.0;max_scale=None)``.

    The text of a rule names the fields that differ from their defaults.
    """
    if isinstance(spec, StaticLossScale):
        return f"static({spec.init_scale})"
    if isinstance(spec, DynamicLossScale):
        named = [(each.name, getattr(spec, each.name), each.default) for each in fields(spec) if each.init]
        return f"dynamic({';'.join(f'{name}={value}' for name, value, default in named if value != default)})"
    return str(spec)


def parse_loss_scale(text: str) -> LossScaleSpec:
    """Parse the text of a loss scale; the inverse of ``loss_scale_text``.

    Raises:
        ArgumentValueError: for a text of another form, or a value that does not fit its field.
    """
    kind, opened, inner = text.removesuffix(")").partition("(")
    if opened and text.endswith(")") and kind in ("static", "dynamic"):
        try:
            if kind == "static":
                return StaticLossScale(float(inner))
            pairs = [part.partition("=") for part in inner.split(";") if part]
            return DynamicLossScale(**{name: ast.literal_eval(value) for name, _, value in pairs})
        except (ValueError, TypeError, SyntaxError) as error:
            raise ArgumentValueError(f"loss_scale={text!r}: {error}") from None
    if text == "dynamic":
        return "dynamic"
    try:
        return float(text)
    except ValueError:
        raise ArgumentValueError(
            f'loss_scale={text!r} is neither a number nor "dynamic", nor a rule such as dynamic(init_scale=8.0).'
        ) from None
