"""The settings of ``amp.GradScaler`` under Paddle's and torch's names: get, set, save and load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ..core.checks import as_number, check_count, check_flag, check_kind, is_device
from ..core.errors import ArgumentValueError
from ..core.hardware import accelerator
from ..core.loss_scale import DynamicLossScale, LossScaleSpec, make_loss_scale
from ..parameters.loss_scaler import DeviceLossScaler

__all__ = ["ScalerSettings"]


def _getter(field: str, doc: str) -> Callable[[ScalerSettings], Any]:
    """Make a method that returns a field of the settings, with 0 for None (never)."""

    def get(self: ScalerSettings) -> Any:
        return getattr(self.loss_scaler.settings, field) or 0

    get.__doc__ = doc
    return get


_NAMES = {
    "growth_factor": ("incr_ratio", "growth_factor"),
    "backoff_factor": ("decr_ratio", "backoff_factor"),
    "growth_interval": ("incr_every_n_steps", "growth_interval"),
    "backoff_interval": ("decr_every_n_nan_or_inf",),
}
"""The names of settings in saved states: Paddle's name, then torch's."""

_Scaler = TypeVar("_Scaler", bound="ScalerSettings")


class ScalerSettings(torch.amp.GradScaler):
    """A ``torch.amp.GradScaler`` with Paddle's and torch's names for the settings of a ``DeviceLossScaler``.

    See ``GradScaler`` for the arguments.
    """

    def __init__(
        self,
        enable: bool | str | torch.device = True,
        init_loss_scaling: float = 2.0**15,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int | None = 1000,
        decr_every_n_nan_or_inf: int | None = 2,
        use_dynamic_loss_scaling: bool = True,
        *,
        min_loss_scaling: float | None = None,
        max_loss_scaling: float | None = None,
        collapse_after: int | None = 20,
        enabled: bool | None = None,
        init_scale: float | None = None,
        growth_factor: float | None = None,
        backoff_factor: float | None = None,
        growth_interval: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        check_count("incr_every_n_steps", incr_every_n_steps, never=True)
        check_count("decr_every_n_nan_or_inf", decr_every_n_nan_or_inf, never=True)
        rule = DynamicLossScale(
            init_scale=init_loss_scaling if init_scale is None else init_scale,
            growth_factor=incr_ratio if growth_factor is None else growth_factor,
            backoff_factor=decr_ratio if backoff_factor is None else backoff_factor,
            growth_interval=incr_every_n_steps if growth_interval is None else growth_interval,
            backoff_interval=decr_every_n_nan_or_inf,
            min_scale=min_loss_scaling,
            max_scale=max_loss_scaling,
            collapse_after=collapse_after,
        )
        if enabled is not None:
            enable = check_flag("enabled", enabled)
        elif isinstance(enable, torch.device) or is_device(enable):
            enable = True
        dynamic = check_flag("use_dynamic_loss_scaling", use_dynamic_loss_scaling)
        self._start(check_flag("enable", enable), rule, dynamic)

    @classmethod
    def from_loss_scale(cls: type[_Scaler], loss_scale: LossScaleSpec) -> _Scaler:
        """Build a scaler for a loss scale.

        Args:
            loss_scale: a number above zero, "dynamic", or a ``halfstep.DynamicLossScale`` or ``StaticLossScale``, as in
                a ``halfstep.Policy``.

        Returns:
            The scaler. It is disabled for a static scale of 1.0.

        Raises:
            ArgumentValueError: for any other value.
        """
        rule = make_loss_scale(loss_scale)
        scaler = cls(rule.dynamic or rule.init_scale != 1.0, rule.init_scale)
        scaler._scaler.rule = rule
        return scaler

    def _start(self, enabled: bool, rule: DynamicLossScale, dynamic: bool) -> None:
        # Do not call torch's constructor, which disables the scaler if there is no CUDA device.
        self._enabled = enabled
        self._scaler = DeviceLossScaler(rule, name="GradScaler")
        self._scaler.dynamic = dynamic
        self._home: torch.device | None = None  # the device of the first loss, on which the scale stays
        self._init_growth_tracker = 0

    def __repr__(self) -> str:
        return f"GradScaler(enable={self._enabled}, scale={self.get_scale():g}, overflows={self.overflows()})"

    @property
    def loss_scaler(self) -> DeviceLossScaler:
        """The current scale and the rule that changes it."""
        return self._scaler

    # ---- Paddle's names

    get_init_loss_scaling = _getter("init_scale", "Return the first scale, or the scale last set or loaded.")
    get_incr_ratio = _getter("growth_factor", "Return the factor by which the scale grows.")
    get_decr_ratio = _getter("backoff_factor", "Return the factor by which the scale shrinks.")
    get_incr_every_n_steps = _getter("growth_interval", "Return after how many finite steps it grows; 0 for never.")
    get_decr_every_n_nan_or_inf = _getter(
        "backoff_interval", "Return after how many overflows it shrinks; 0 for never."
    )

    def is_enable(self) -> bool:
        """True if the scaler is enabled."""
        return self._enabled

    def is_use_dynamic_loss_scaling(self) -> bool:
        """True if the scale can change."""
        return self._enabled and self._scaler.dynamic

    def set_init_loss_scaling(self, new_init_loss_scaling: float) -> None:
        """Set the first scale and the current scale.

        Raises:
            ArgumentValueError: unless the value is a finite number above zero.
        """
        self._scaler.change(init_scale=new_init_loss_scaling)
        self._scaler.set_scale(self._scaler.settings.init_scale)

    def set_incr_ratio(self, new_incr_ratio: float) -> None:
        """Set the factor by which the scale grows, above 1."""
        self._scaler.change(growth_factor=new_incr_ratio)

    def set_decr_ratio(self, new_decr_ratio: float) -> None:
        """Set the factor by which the scale shrinks, between 0 and 1."""
        self._scaler.change(backoff_factor=new_decr_ratio)

    def set_incr_every_n_steps(self, new_incr_every_n_steps: int | None) -> None:
        """Set the count of finite steps in a row before the scale grows; None for never."""
        self._scaler.change(growth_interval=new_incr_every_n_steps)

    def set_decr_every_n_nan_or_inf(self, new_decr_every_n_nan_or_inf: int | None) -> None:
        """Set the count of overflowing steps in a row before the scale shrinks; None for never."""
        self._scaler.change(backoff_interval=new_decr_every_n_nan_or_inf)

    # ---- torch's names: its other getters and setters use the private names below

    def get_scale(self) -> float:
        """Return the current scale; 1.0 if the scaler is disabled. Reads the device."""
        return self._scaler.loss_scale() if self._enabled else 1.0

    def overflows(self) -> int:
        """Return the count of updates with an overflow. Reads the device; does not count replays of a CUDA graph."""
        return self._scaler.overflows() if self._enabled else 0

    # ---- torch's private names, which trainers use

    @property
    def _scale(self) -> torch.Tensor | None:  # type: ignore[override]
        """The current scale as the tensor that ``update`` changes; None before the first loss, as in torch."""
        return None if self._home is None else self._scaler.state(self._home).scale

    @property
    def _growth_tracker(self) -> torch.Tensor | None:  # type: ignore[override]
        return None if self._home is None else self._scaler.state(self._home).good

    @property
    def _device(self) -> str:  # type: ignore[override]
        """The type of the scale's device; before the first loss, the type of the expected device."""
        return self._home.type if self._home is not None else accelerator() or "cpu"

    _init_scale = property(get_init_loss_scaling)
    _growth_factor = property(get_incr_ratio, set_incr_ratio)
    _backoff_factor = property(get_decr_ratio, set_decr_ratio)
    _growth_interval = property(get_incr_every_n_steps, set_incr_every_n_steps)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._home = torch.device(dev)  # Accelerate calls this when it loads a checkpoint of FSDP2

    # ---- saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Return settings and state as plain numbers under Paddle's and torch's names; empty if disabled.

        A ``torch.amp.GradScaler`` can also load it. Reads the device.
        """
        if not self._enabled:
            return {}
        good, bad = self._counts()
        settings = self._scaler.settings
        return {
            "scale": self.get_scale(),
            **{name: getattr(settings, field) or 0 for field, names in _NAMES.items() for name in names},
            "incr_count": good,
            "decr_count": bad,
            "use_dynamic_loss_scaling": self._scaler.dynamic,
            "_growth_tracker": good,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this scaler, Paddle's scaler or torch's scaler. A disabled scaler does nothing.

        A state dict of torch's scaler has no ``decr_every_n_nan_or_inf`` and ``use_dynamic_loss_scaling``, so these
        settings do not change.

        Args:
            state_dict: numbers by name; the scale may be an array or tensor with one element, as in Paddle.

        Raises:
            ArgumentValueError: if the dict is empty, lacks an entry, or has an invalid value. Nothing is loaded.
            ArgumentTypeError: if ``state_dict`` is not a dict.
        """
        if not self._enabled:
            return
        check_kind("state_dict", state_dict, Mapping, "what state_dict() of a GradScaler returned")
        if not state_dict:
            raise ArgumentValueError(
                "The input state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
            )
        scale = _entry(state_dict, "scale")
        there = {"decr_every_n_nan_or_inf": self._scaler.settings.backoff_interval or 0, **state_dict}
        found = {field: _entry(there, *names) for field, names in _NAMES.items()}
        intervals: dict[str, Any] = {
            field: int(found[field]) or None for field in ("growth_interval", "backoff_interval")
        }
        settings = replace(self._scaler.settings, init_scale=scale, **(found | intervals))
        good = int(_entry(state_dict, "incr_count", "_growth_tracker"))
        bad = int(as_number("decr_count", state_dict.get("decr_count", 0)))
        dynamic = bool(state_dict.get("use_dynamic_loss_scaling", self._scaler.dynamic))
        self._scaler.rule = settings
        self._scaler.dynamic = dynamic
        self._init_growth_tracker = good
        self._scaler.load_state_dict({"loss_scale": settings.init_scale, "unskipped": good, "bad": bad})

    def __getstate__(self) -> dict[str, Any]:
        """Return settings and state. The copy creates its tensors on the device of its first loss."""
        used = self._scaler
        return {"enabled": self._enabled, "rule": used.settings, "dynamic": used.dynamic, "now": used.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore settings and state from ``__getstate__``."""
        self._start(state["enabled"], state["rule"], state["dynamic"])
        self._scaler.load_state_dict(state["now"])
        self._init_growth_tracker = self._counts()[0]

    def _counts(self) -> tuple[int, int]:
        """Return the counts of finite and of overflowing steps in a row; 0 for a static scale."""
        if not self._scaler.dynamic:
            return 0, 0
        now = self._scaler.state_dict()
        return int(now["unskipped"]), int(now.get("bad", 0))


def _entry(state_dict: Mapping[str, Any], *names: str) -> float:
    """Return a number of a saved state by the first of ``names`` that the state has."""
    for name in names:
        if name in state_dict:
            return as_number(name, state_dict[name])
    raise ArgumentValueError(
        f"The state dict has no {' and no '.join(map(repr, names))}, only {', '.join(map(repr, state_dict))}; pass "
        "what state_dict() of a GradScaler returned. Nothing was loaded."
    )
