"""The loss scaler: a loss scale in use, with its state on the device.

``amp.initialize``, ``GradScaler`` and ``fp16_utils`` use ``DeviceLossScaler`` and give its settings their own names.
The rules that change the scale are in ``core.loss_scale``. Updates are in place, so that replays of a captured CUDA
graph also update the scale.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..core.checks import as_number, check_between, check_count
from ..core.errors import ArgumentValueError, LossScaleCollapsed
from ..core.loss_scale import DynamicLossScale, LossScale, LossScaleState, StaticLossScale
from ..torch_internals.torch_compat import dispatch_mode_count
from .async_reader import AsyncReader, capturing

__all__ = ["DeviceLossScaler", "saved_numbers"]

logger = logging.getLogger("halfstep")
_FIVE_SKIPS = "Five skips in a row by %s. First gradient that is not finite: %s. halfstep.diagnose finds the cause."


class DeviceLossScaler:
    """A loss scale in use: a rule and its current state on the device of the losses.

    It logs overflows at level INFO of the logger "halfstep", one update late, because reading the flag at once would
    make the host wait for the device.

    Args:
        rule: the rule that changes the scale.
        name: the name of the scaler in messages.
        verbose: log overflows.

    Attributes:
        settings: the rule that changes the scale while it is dynamic. A static scale keeps the settings for the case
            that user code makes it dynamic later.
        neutral: True for a static scale of 1, with which scaling has no effect.
        found: the overflow flag of manual unscaling since the latest update; None if user code did not unscale.
    """

    def __init__(self, rule: LossScale, *, name: str = "the loss scaler", verbose: bool = True) -> None:
        self.settings = DynamicLossScale()
        self.rule = rule
        self.name = name
        self.verbose = verbose
        self._late = AsyncReader(2)
        self._overflows, self._stuck = 0, 0
        self._row: float = 0  # overflows in a row that the host has read; -inf after their report
        self.found: torch.Tensor | None = None
        self._state = self._start(rule.init_scale, 0, 0, torch.device("cpu"))

    @property
    def rule(self) -> LossScale:
        """The rule that changes the scale from the next update on."""
        return self._rule

    @rule.setter
    def rule(self, rule: LossScale) -> None:
        self._rule = rule
        self.neutral = not rule.dynamic and rule.init_scale == 1.0
        if isinstance(rule, DynamicLossScale):
            self.settings = rule

    @property
    def dynamic(self) -> bool:
        """True if the scale can change. Setting it to False keeps the current scale, and reads the device."""
        return self._rule.dynamic

    @dynamic.setter
    def dynamic(self, dynamic: bool) -> None:
        if dynamic and not self.dynamic:
            self._move_by(self.settings)
        elif self.dynamic and not dynamic:
            self.rule = StaticLossScale(self.loss_scale())

    def change(self, **settings: Any) -> None:
        """Change fields of ``settings``, a ``DynamicLossScale``. Reads the device.

        Raises:
            ArgumentValueError: for a value that the rule refuses; the settings are unchanged.
        """
        changed = replace(self.settings, **settings)
        if self.dynamic:
            self._move_by(changed)
        else:
            self.settings = changed

    def state(self, device: torch.device) -> LossScaleState:
        """Return the state, moved to ``device`` if needed; ``update`` changes these tensors in place."""
        if self._state.scale.device != device:
            self._state = LossScaleState(*(t.to(device, non_blocking=True) for t in self._state))
            self._present: torch.Tensor | None = None
        return self._state

    def scale(self, device: torch.device) -> torch.Tensor:
        """Return the scale on ``device`` as a tensor that updates do not change."""
        state = self._state if self._state.scale.device == device else self.state(device)
        # A graph must copy the scale at each replay.
        if self._present is None or capturing(device):
            self._present = state.scale.clone()
        return self._present

    def update(self, found_inf: torch.Tensor, blame: Callable[[], str] | None = None) -> None:
        """Update the state by the rule.

        Args:
            found_inf: 0-dim float32 tensor, nonzero if a gradient was inf or NaN. The host reads it only if the scale
                is about to collapse, and at the fifth overflow in a row.
            blame: a function that names the first gradient that is not finite, for the error message.

        Raises:
            LossScaleCollapsed: if the scale is at its floor and this overflow reaches the rule's ``collapse_after``.
        """
        self.found, device, rule = None, found_inf.device, self._rule
        state = self._state if self._state.scale.device == device else self.state(device)
        if self._late.queue:
            self._pick_up()
        limit = rule.collapse_after
        stuck = limit is not None and self._stuck >= limit - 1
        # The host reads the flag here, at most once in a row of skips and where the scale is about to collapse.
        if (stuck or (self.verbose and self._row >= 4)) and not capturing(device) and found_inf.item():
            self._report(limit if stuck else None, blame() if blame is not None else "unknown")
        # Ops that a dispatch mode records may run again, with other flags.
        on_host = device.type == "cpu" and not dispatch_mode_count()
        if on_host and isinstance(rule, DynamicLossScale) and rule.count(state, found_inf):
            self._row, self._stuck = 0, 0  # as `_pick_up` does for a finite step
            return
        rule.update_(state, found_inf)
        self._present = None
        self._late.post(found_inf, state.scale)

    def loss_scale(self) -> float:
        """Return the current scale as a number. Reads the device."""
        self._pick_up(wait=True)
        return float(self._state.scale)

    def overflows(self) -> int:
        """Return the count of updates with an overflow. Reads the device; does not count replays of a CUDA graph."""
        self._pick_up(wait=True)
        return self._overflows

    def set_scale(self, scale: float) -> None:
        """Set the current scale.

        Raises:
            ArgumentValueError: unless it is a finite number above zero.
        """
        check_between("loss_scale", scale, above=0.0)
        self._pick_up(wait=True)
        self._state = self._start(scale, self.good(), int(self._state.bad), self._state.scale.device)

    def overflowed(self) -> bool:
        """True if the latest update was for gradients with inf or NaN. Reads the device."""
        self._pick_up(wait=True)
        return bool(self._row)

    def good(self) -> int:
        """Return the count of good steps since the scale last changed. Reads the device."""
        return int(self._state.good)

    def set_good(self, good: int) -> None:
        """Set the count of good steps since the scale last changed."""
        self._pick_up(wait=True)
        self._state.good.fill_(good)

    def state_dict(self) -> dict[str, float | int]:
        """Return plain numbers: ``loss_scale`` and ``unskipped`` as in Apex, and ``bad`` if it is not 0."""
        entry: dict[str, float | int] = {"loss_scale": self.loss_scale(), "unskipped": self.good()}
        if bad := int(self._state.bad):
            entry["bad"] = bad
        return entry

    def load_state_dict(self, entry: dict[str, Any]) -> None:
        """Load a state dict of this scaler or of Apex's scaler.

        Raises:
            ArgumentValueError: unless the counts are whole numbers and the scale is finite and above zero.
        """
        scale, good, bad = saved_numbers(self.name, entry)
        self._pick_up(wait=True)
        self._state = self._start(scale, good, bad, self._state.scale.device)

    # ---- inside

    def _move_by(self, rule: DynamicLossScale) -> None:
        """Change the rule. If the count has reached the rule's interval, the scale grows at the next finite step."""
        self._pick_up(wait=True)  # overflows so far belong to the previous rule
        self.rule = rule
        if rule.growth_interval is not None and self.good() >= rule.growth_interval:
            self.set_good(rule.growth_interval - 1)

    def _start(self, scale: float, good: int, bad: int, device: torch.device) -> LossScaleState:
        if not self._rule.dynamic and scale != self._rule.init_scale:
            self.rule = StaticLossScale(scale)
        self._present = None
        self._known_scale = scale  # the scale after the latest update that the host has read
        self._stuck = 0  # overflows in a row, up to that update, that began at or below the collapse scale
        counts = [torch.full((), count, dtype=torch.int32, device=device) for count in (good, bad)]
        return LossScaleState(torch.full((), scale, dtype=torch.float32, device=device), *counts)

    def _pick_up(self, *, wait: bool = False) -> None:
        """Log and count the updates whose results have arrived on the host."""
        for found_inf, scale in self._late.poll(wait=wait):
            self._overflows += bool(found_inf)
            self._row = self._row + 1 if found_inf else 0
            self._stuck = self._stuck + 1 if found_inf and self._known_scale <= self._rule.collapse_scale else 0
            if found_inf and self.verbose and (self._overflows <= 5 or self._overflows % 100 == 0):
                verb = "reducing" if scale < self._known_scale else "keeping"
                more = f"; skipped step {self._overflows}, then every hundredth is logged" * (self._overflows >= 5)
                logger.info("Gradient overflow. Skipping step, %s %s loss scale to %g%s", self.name, verb, scale, more)
            self._known_scale = scale

    def _report(self, limit: int | None, bad: str) -> None:
        """Log the first bad gradient of several overflows in a row; raise an error if they reach the limit."""
        if limit is None:
            self._row = -math.inf
            logger.warning(_FIVE_SKIPS, self.name, bad)
            return
        raise LossScaleCollapsed(
            f"Gradients have overflowed {limit} times in a row at a loss scale of {self._rule.collapse_scale:g} or "
            f"less ({self.name}, now at {self._known_scale:g}), so the loss scale is not the cause. First gradient "
            f"that is not finite: {bad}. If the loss grew before, lower the learning rate, and make sure that "
            "zero_grad is called. Otherwise check the loss, the inputs, and divisions, log or sqrt near zero. "
            "halfstep.diagnose finds the first inf or NaN; collapse_after=None of the loss scale disables this check."
        )


def saved_numbers(name: str, entry: Any) -> tuple[float, int, int]:
    """Return the scale, and the counts of finite and of overflowing steps in a row, of a saved loss scaler.

    Args:
        name: the name of the scaler in messages.
        entry: a state dict of a ``DeviceLossScaler`` or of Apex's scaler.

    Raises:
        ArgumentValueError: for any other value.
    """
    if not isinstance(entry, Mapping) or not {"loss_scale", "unskipped"} <= set(entry):
        raise ArgumentValueError(f"{name} was saved as {entry!r}; it must have loss_scale and unskipped.")
    scale = as_number(f"loss_scale of {name}", entry["loss_scale"])
    check_between(f"loss_scale of {name}", scale, above=0.0)
    counts = [entry["unskipped"], entry.get("bad", 0)]
    for count in counts:
        check_count(f"a count of {name}", count, least=0)
    return scale, counts[0], counts[1]
