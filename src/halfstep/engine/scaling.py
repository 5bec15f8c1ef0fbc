"""The loss scale: one state machine whose state lives on the device, and three rules that move it.

A rule (``NoLossScale``, ``StaticLossScale``, ``DynamicLossScale``) is a frozen value; its ``update`` is a pure
function from one ``LossScaleState`` and a ``found_inf`` flag to the next. ``LossScaler`` is the mutable holder
that the faces share; it moves its state in place, so that a CUDA graph captured around it goes on moving it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..core.errors import ArgumentValueError, LossScaleCollapsed
from ..core.policy import LossScaleSpec
from .late import LateReader, capturing

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "LossScaleState",
    "LossScaler",
    "NoLossScale",
    "StaticLossScale",
    "make_loss_scale",
]

logger = logging.getLogger("halfstep")

_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max
# No gradient worth having needs a scale this far below 1: at 2**-14 even an fp16 gradient of 1e9 fits.
_COLLAPSED = 2.0**-14


class LossScaleState(NamedTuple):
    """Where a loss scale stands: three 0-dim tensors on one device."""

    scale: torch.Tensor
    """float32: what the loss is multiplied by."""
    good: torch.Tensor
    """int32: finite backward passes in a row since the scale last moved."""
    bad: torch.Tensor
    """int32: overflowing backward passes in a row that have not lowered the scale yet."""


class LossScale:
    """A rule. This base never moves anything."""

    init_scale: float
    """The scale to start with."""
    dynamic: bool = False
    """Whether the scale ever moves."""
    collapse_after: int | None = None
    """How many overflows in a row at ``collapse_scale`` or below are too many; None for never."""

    @property
    def collapse_scale(self) -> float:
        """At this scale and below it an overflow counts towards a collapse."""
        return 0.0

    def update(self, state: LossScaleState, found_inf: torch.Tensor) -> LossScaleState:
        """The next state, as new tensors, given a 0-dim tensor that is nonzero when a gradient was inf or NaN."""
        after = LossScaleState(*(t.clone() for t in state))
        self.update_(after, found_inf.to(torch.float32))
        return after

    def update_(self, state: LossScaleState, found_inf: torch.Tensor) -> None:
        """``update`` in place; ``found_inf`` is a 0-dim float32 tensor on the device of the state, not read here."""


@dataclass(frozen=True)
class NoLossScale(LossScale):
    """The rule of losses that are not scaled: a scale of 1, and nothing is counted."""

    init_scale: float = 1.0


@dataclass(frozen=True)
class StaticLossScale(LossScale):
    """A scale that stays; the count of good steps runs on.

    Raises:
        ArgumentValueError: unless the scale is a finite number above zero.
    """

    init_scale: float = 1.0

    def __post_init__(self) -> None:
        _check("loss_scale", self.init_scale, above=0.0)

    def update_(self, state: LossScaleState, found_inf: torch.Tensor) -> None:
        """One more step counted, whatever was found."""
        state.good.add_(1)


@dataclass(frozen=True)
class DynamicLossScale(LossScale):
    """Ride the edge of the largest scale that does not overflow (Micikevicius et al. 2018, section 3.2).

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

    With ``sticky_backoff`` the count of overflows stays used up (``bad = backoff_interval - 1`` instead of 0) until
    a finite step, so that every further overflow in the row lowers the scale at once, as NVIDIA's hysteresis does
    (Megatron-LM, ``update_scale_hysteresis``). Without it the count starts over, as Paddle's does.

    The scale is never 0, inf or NaN: ``min_scale`` is above zero and ``max_scale`` is finite.

    Attributes:
        init_scale: where to start; brought into [min_scale, max_scale].
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: finite steps in a row before the scale grows; None for never.
        backoff_interval: overflows in a row before it shrinks (hysteresis); None for never.
        min_scale: the floor. None stands for the smallest normal float32 number.
        max_scale: the ceiling. None stands for the largest float32 number.
        sticky_backoff: whether hysteresis, once used up, stays so until a finite step.
        collapse_after: after so many overflows in a row at the floor, or at 2**-14 where the floor is lower, a
            ``LossScaler`` raises ``LossScaleCollapsed``. None for never.

    Raises:
        ArgumentValueError: for a value outside of these ranges.
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

    dynamic = True

    def __post_init__(self) -> None:
        _check("init_scale", self.init_scale, above=0.0)
        _check("growth_factor", self.growth_factor, above=1.0)
        _check("backoff_factor", self.backoff_factor, above=0.0, below=1.0)
        for name in ("min_scale", "max_scale"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), above=0.0)
        for name in ("growth_interval", "backoff_interval", "collapse_after"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.floor > self.ceiling:
            raise ArgumentValueError(f"min_scale={self.min_scale} is above max_scale={self.max_scale}; swap them.")
        object.__setattr__(self, "init_scale", min(max(self.init_scale, self.floor), self.ceiling))

    @property
    def floor(self) -> float:
        """The smallest scale there can be."""
        return _SMALLEST if self.min_scale is None else max(self.min_scale, _SMALLEST)

    @property
    def ceiling(self) -> float:
        """The largest scale there can be."""
        return _LARGEST if self.max_scale is None else min(self.max_scale, _LARGEST)

    @property
    def collapse_scale(self) -> float:
        """The floor, or 2**-14 where the floor is lower."""
        return max(self.floor, _COLLAPSED)

    def update_(self, state: LossScaleState, found_inf: torch.Tensor) -> None:
        """The algorithm above: one small kernel of torch's own, or two with hysteresis, and a clamp."""
        scale, good, bad = state
        growth, backoff = self.growth_factor, self.backoff_factor
        every, hysteresis = self.growth_interval or 0, self.backoff_interval or 0  # the kernel never counts to 0
        if hysteresis == 1:
            torch._amp_update_scale_(scale, good, found_inf, growth, backoff, every)
        else:
            torch._amp_update_scale_(scale, good, found_inf, growth, 1.0, every)
            # The same kernel counts overflows when it is told that they are the good steps.
            finite = torch.logical_not(found_inf, out=torch.empty_like(found_inf))
            torch._amp_update_scale_(scale, bad, finite, backoff, 1.0, hysteresis)
            if self.sticky_backoff and hysteresis:
                bad.add_((bad == 0).logical_and_(found_inf), alpha=hysteresis - 1)
        scale.clamp_(self.floor, self.ceiling)


def make_loss_scale(
    spec: LossScaleSpec, min_loss_scale: float | None = None, max_loss_scale: float | None = 2.0**24
) -> LossScale:
    """The rule of Apex ``amp``: a number is static; "dynamic" starts at 2**16, doubles after 2,000 good steps.

    A ``min_loss_scale`` of 0 counts as none, as in Apex.

    Raises:
        ArgumentValueError: for a scale or bound that cannot be used.
    """
    if spec == "dynamic":
        return DynamicLossScale(min_scale=min_loss_scale or None, max_scale=max_loss_scale)
    return StaticLossScale(float(spec))


class LossScaler:
    """A loss scale in use: a rule and its present state, kept on the device of the losses.

    Overflows are told of through ``logging``, at level INFO of the logger "halfstep", one update late: reading the
    flag at once would make the host wait for the device.

    Args:
        rule: how the scale moves.
        name: what messages call it.
        verbose: whether to log overflows.
    """

    def __init__(self, rule: LossScale, *, name: str = "the loss scaler", verbose: bool = True) -> None:
        self.rule = rule
        self.name = name
        self._verbose = verbose
        self._late = LateReader(2)
        self._present: torch.Tensor | None = None
        self._state = self._start(rule.init_scale, 0, 0, torch.device("cpu"))

    @property
    def dynamic(self) -> bool:
        """Whether the scale ever moves."""
        return self.rule.dynamic

    @property
    def neutral(self) -> bool:
        """Whether scaling by it does nothing at all: a static scale of 1."""
        return not self.rule.dynamic and self.rule.init_scale == 1.0

    def state(self, device: torch.device) -> LossScaleState:
        """The state, moved to ``device`` if it was elsewhere; ``update`` changes these very tensors."""
        if self._state.scale.device != device:
            self._state = LossScaleState(*(t.to(device, non_blocking=True) for t in self._state))
            self._present = None
        return self._state

    def scale(self, device: torch.device) -> torch.Tensor:
        """The scale on ``device`` as a tensor that keeps its value: after an ``update`` it is another object."""
        state = self.state(device)
        # A graph must copy the scale anew at each replay.
        if self._present is None or capturing(device):
            self._present = state.scale.clone()
        return self._present

    def update(self, found_inf: torch.Tensor, blame: Callable[[], str] | None = None) -> None:
        """Take one step of the rule.

        Args:
            found_inf: 0-dim float32 tensor, nonzero when a gradient was inf or NaN. It is read only while the scale
                is about to collapse.
            blame: says which gradient is not finite; asked only for the message of the error.

        Raises:
            LossScaleCollapsed: when the scale is at its floor and this is the last overflow in a row that
                ``collapse_after`` of the rule allows.
        """
        state = self.state(found_inf.device)
        self._pick_up()
        limit = self.rule.collapse_after
        if limit is not None and self._stuck >= limit - 1 and not capturing(found_inf.device):
            self._check_collapse(found_inf, limit, blame)
        self.rule.update_(state, found_inf)
        self._present = None
        self._late.post(found_inf, state.scale)

    def loss_scale(self) -> float:
        """The present scale as a number. Reads the device."""
        self._pick_up(wait=True)
        return float(self._state.scale)

    def set_scale(self, scale: float) -> None:
        """Set the present scale.

        Raises:
            ArgumentValueError: unless it is a finite number above zero.
        """
        self._pick_up(wait=True)
        _check("loss_scale", scale, above=0.0)
        self._state = self._start(scale, int(self._state.good), int(self._state.bad), self._state.scale.device)

    @property
    def _loss_scale(self) -> float:
        """Where scripts written for Apex read and set the scale."""
        return self.loss_scale()

    @_loss_scale.setter
    def _loss_scale(self, scale: float) -> None:
        self.set_scale(scale)

    def state_dict(self) -> dict[str, float | int]:
        """Plain numbers: ``loss_scale`` and ``unskipped`` as Apex wrote them, and ``bad`` when there are any."""
        entry: dict[str, float | int] = {"loss_scale": self.loss_scale(), "unskipped": int(self._state.good)}
        if bad := int(self._state.bad):
            entry["bad"] = bad
        return entry

    def load_state_dict(self, entry: dict[str, Any]) -> None:
        """Take over what ``state_dict`` of this or of Apex's scaler returned.

        Raises:
            ArgumentValueError: unless the scale in it is a finite number above zero.
        """
        scale, good, bad = float(entry["loss_scale"]), int(entry["unskipped"]), int(entry.get("bad", 0))
        _check("loss_scale", scale, above=0.0)
        self._pick_up(wait=True)
        self._state = self._start(scale, good, bad, self._state.scale.device)

    # ---- inside

    def _start(self, scale: float, good: int, bad: int, device: torch.device) -> LossScaleState:
        if not self.rule.dynamic and scale != self.rule.init_scale:
            self.rule = StaticLossScale(scale)
        self._present = None
        self._known_scale = scale  # the scale after the latest update that the host has heard of
        self._stuck = 0  # overflows in a row, up to that update, that began at or below the collapse scale
        return LossScaleState(
            torch.full((), scale, dtype=torch.float32, device=device),
            torch.full((), good, dtype=torch.int32, device=device),
            torch.full((), bad, dtype=torch.int32, device=device),
        )

    def _pick_up(self, *, wait: bool = False) -> None:
        """Tell of the updates that the host has heard of by now."""
        for found_inf, scale in self._late.poll(wait=wait):
            at_floor = self._known_scale <= self.rule.collapse_scale
            self._stuck = self._stuck + 1 if found_inf and at_floor else 0
            if found_inf and self._verbose:
                verb = "reducing" if scale < self._known_scale else "keeping"
                logger.info("Gradient overflow. Skipping step, %s %s loss scale to %g", self.name, verb, scale)
            self._known_scale = scale

    def _check_collapse(self, found_inf: torch.Tensor, limit: int, blame: Callable[[], str] | None) -> None:
        """The flag is read here: a scale this low is no steady state."""
        if not found_inf.item():
            return
        bad = blame() if blame is not None else "no gradient was looked at"
        raise LossScaleCollapsed(
            f"Gradients have overflowed {limit} times in a row at a loss scale of {self.rule.collapse_scale:g} or less "
            f"({self.name}, now at {self._known_scale:g}), so the scale is not what makes them inf or NaN. First "
            f"gradient that is not finite: {bad}. "
            "Look at the loss and the inputs of this batch, at a division, log or sqrt near zero in the forward pass, "
            "and at the learning rate; a missing zero_grad makes gradients grow too. collapse_after=None of the loss "
            "scale turns this check off."
        )


def _check(name: str, value: float, *, above: float, below: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < below:
        limits = f"above {above:g}" + ("" if below == math.inf else f" and below {below:g}")
        raise ArgumentValueError(f"{name}={value!r} must be a finite number {limits}.")


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentValueError(f"{name}={value!r} must be a whole number above 0, or None for never.")
