"""The loss scale: one state machine whose state lives on the device, and three rules that move it.

A rule (``NoLossScale``, ``StaticLossScale``, ``DynamicLossScale``) is a frozen value; its ``update`` is a pure
function from one ``LossScaleState`` and a ``found_inf`` flag to the next. ``LossScaler`` is the mutable holder
that the faces share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from ..core.errors import ArgumentValueError
from ..core.policy import LossScaleSpec

__all__ = ["DynamicLossScale", "LossScale", "LossScaleState", "LossScaler", "StaticLossScale", "make_loss_scale"]

_LARGEST = torch.finfo(torch.float32).max


class LossScaleState(NamedTuple):
    """Where a loss scale stands: three 0-dim tensors on one device."""

    scale: torch.Tensor
    """float32: what the loss is multiplied by."""
    good: torch.Tensor
    """int32: finite backward passes in a row since the scale last moved."""
    bad: torch.Tensor
    """int32: overflowing backward passes in a row that have not lowered the scale yet."""


class LossScale(Protocol):
    """What a rule offers."""

    @property
    def init_scale(self) -> float:
        """The scale to start with."""

    @property
    def dynamic(self) -> bool:
        """Whether the scale ever moves."""

    def update(self, state: LossScaleState, found_inf: torch.Tensor) -> LossScaleState:
        """The next state, given a 0-dim tensor that is nonzero when a gradient was inf or NaN."""


@dataclass(frozen=True)
class StaticLossScale:
    """A scale that stays; the count of good steps runs on.

    Raises:
        ArgumentValueError: unless the scale is a finite number above zero.
    """

    init_scale: float = 1.0

    def __post_init__(self) -> None:
        _check("loss_scale", self.init_scale, above=0.0)

    @property
    def dynamic(self) -> bool:
        """Never moves."""
        return False

    def update(self, state: LossScaleState, found_inf: torch.Tensor) -> LossScaleState:
        """One more step counted, whatever was found."""
        return state._replace(good=state.good + 1)


@dataclass(frozen=True)
class DynamicLossScale:
    """Ride the edge of the largest scale that does not overflow (Micikevicius et al. 2018, section 3.2).

    ::

        if found_inf:
            good = 0;  bad += 1
            if bad == backoff_interval:
                scale = max(scale * backoff_factor, min_scale);  bad = 0
        else:
            bad = 0;  good += 1
            if good == growth_interval:
                scale = min(scale * growth_factor, max_scale);  good = 0

    The scale is never 0, inf or NaN: ``min_scale`` is above zero and ``max_scale`` is finite.

    Attributes:
        init_scale: where to start; brought into [min_scale, max_scale].
        growth_factor: above 1.
        backoff_factor: between 0 and 1.
        growth_interval: finite steps in a row before the scale grows.
        backoff_interval: overflows in a row before it shrinks (hysteresis).
        min_scale: the floor. None stands for the smallest normal float32 number.
        max_scale: the ceiling. None stands for the largest float32 number.

    Raises:
        ArgumentValueError: for a value outside of these ranges.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    backoff_interval: int = 1
    min_scale: float | None = None
    max_scale: float | None = 2.0**24

    def __post_init__(self) -> None:
        _check("init_scale", self.init_scale, above=0.0)
        _check("growth_factor", self.growth_factor, above=1.0)
        _check("backoff_factor", self.backoff_factor, above=0.0, below=1.0)
        _check("growth_interval", self.growth_interval, above=0)
        _check("backoff_interval", self.backoff_interval, above=0)
        _check("min_scale", self.floor, above=0.0)
        _check("max_scale", self.ceiling, above=0.0)
        if self.floor > self.ceiling:
            raise ArgumentValueError(f"min_scale={self.min_scale} is above max_scale={self.max_scale}; swap them.")
        object.__setattr__(self, "init_scale", min(max(self.init_scale, self.floor), self.ceiling))

    @property
    def dynamic(self) -> bool:
        """Moves."""
        return True

    @property
    def floor(self) -> float:
        """The smallest scale there can be."""
        return torch.finfo(torch.float32).tiny if self.min_scale is None else self.min_scale

    @property
    def ceiling(self) -> float:
        """The largest scale there can be."""
        return _LARGEST if self.max_scale is None else self.max_scale

    def update(self, state: LossScaleState, found_inf: torch.Tensor) -> LossScaleState:
        """The algorithm above, as tensor operations without a read of the device."""
        overflow = found_inf != 0
        bad = torch.where(overflow, state.bad + 1, 0)
        good = torch.where(overflow, 0, state.good + 1)
        lower = bad == self.backoff_interval
        raise_ = good == self.growth_interval
        factor = torch.where(lower, self.backoff_factor, torch.where(raise_, self.growth_factor, 1.0))
        return LossScaleState(
            (state.scale * factor).clamp(self.floor, self.ceiling),
            torch.where(raise_, 0, good),
            torch.where(lower, 0, bad),
        )


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
    """A loss scale in use: a rule and its present state, made on the device of the first loss it sees."""

    def __init__(self, rule: LossScale) -> None:
        self.rule = rule
        self._state = _state(rule.init_scale, 0, 0, torch.device("cpu"))

    @property
    def dynamic(self) -> bool:
        """Whether the scale ever moves."""
        return self.rule.dynamic

    @property
    def neutral(self) -> bool:
        """Whether scaling by it does nothing at all: a static scale of 1."""
        return not self.rule.dynamic and self.rule.init_scale == 1.0

    def state(self, device: torch.device) -> LossScaleState:
        """The state, moved to ``device`` if it was elsewhere."""
        if self._state.scale.device != device:
            self._state = LossScaleState(*(t.to(device) for t in self._state))
        return self._state

    def update(self, found_inf: torch.Tensor) -> None:
        """Take one step of the rule; ``found_inf`` is a 0-dim tensor and is not read."""
        self._state = self.rule.update(self.state(found_inf.device), found_inf)

    def loss_scale(self) -> float:
        """The present scale as a number. Reads the device."""
        return float(self._state.scale)

    def set_scale(self, scale: float) -> None:
        """Set the present scale.

        Raises:
            ArgumentValueError: unless it is a finite number above zero.
        """
        _check("loss_scale", scale, above=0.0)
        self._state = self._state._replace(scale=torch.full_like(self._state.scale, scale))
        if not self.rule.dynamic:
            self.rule = StaticLossScale(scale)

    def state_dict(self) -> dict[str, float | int]:
        """Plain numbers: ``loss_scale`` and ``unskipped`` as Apex wrote them, and ``bad`` when there are any."""
        entry: dict[str, float | int] = {"loss_scale": self.loss_scale(), "unskipped": int(self._state.good)}
        if bad := int(self._state.bad):
            entry["bad"] = bad
        return entry

    def load_state_dict(self, entry: dict[str, float | int]) -> None:
        """Take over what ``state_dict`` of this or of Apex's scaler returned."""
        scale, good, bad = float(entry["loss_scale"]), int(entry["unskipped"]), int(entry.get("bad", 0))
        _check("loss_scale", scale, above=0.0)
        self._state = _state(scale, good, bad, self._state.scale.device)
        if not self.rule.dynamic:
            self.rule = StaticLossScale(scale)


def _state(scale: float, good: int, bad: int, device: torch.device) -> LossScaleState:
    return LossScaleState(
        torch.tensor(scale, dtype=torch.float32, device=device),
        torch.tensor(good, dtype=torch.int32, device=device),
        torch.tensor(bad, dtype=torch.int32, device=device),
    )


def _check(name: str, value: float, *, above: float, below: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < below:
        limits = f"above {above:g}" + ("" if below == math.inf else f" and below {below:g}")
        raise ArgumentValueError(f"{name}={value!r} must be a finite number {limits}.")
