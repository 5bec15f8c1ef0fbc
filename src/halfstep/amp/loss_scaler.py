"""``LossScaler``: the loss scaler of ``amp.initialize``, with the attributes that Apex scripts read and set."""

from __future__ import annotations

from typing import Any

import torch

from ..core.loss_scale import DynamicLossScale, LossScaleSpec, make_loss_scale
from ..parameters.loss_scaler import DeviceLossScaler
from ..stepping.dynamic_class import add_names_of_apex

__all__ = ["LossScaler"]


def _setting(field: str, *, zero_is_none: bool = False) -> Any:
    """Make a property that reads and sets a field of the scaler's ``settings`` under Apex's name."""

    def get(self: LossScaler) -> Any:
        return getattr(self.settings, field)

    def put(self: LossScaler, value: float | None) -> None:
        self.change(**{field: None if zero_is_none and not value else value})

    return property(get, put)


class LossScaler(DeviceLossScaler):
    """A loss scaler as in ``amp._amp_state.loss_scalers``.

    Scripts can read and set Apex's attributes, which begin with ``_``; the next update uses the new values, if the
    scale is dynamic. Reading ``loss_scale()``, ``_loss_scale``, ``_unskipped`` and ``_has_overflow`` reads the device.

    Args:
        loss_scale: a number above zero, "dynamic", or a ``DynamicLossScale`` or ``StaticLossScale``, which replaces the
            arguments ``init_scale`` to ``max_loss_scale``.
        init_scale: the first value of a dynamic scale.
        scale_factor: the factor by which a dynamic scale grows after ``scale_window`` good steps, and by which an
            overflow divides it. Apex ignored it.
        scale_window: the count of good steps in a row before a dynamic scale grows.
        min_loss_scale: the floor of a dynamic scale; None or 0 for none.
        max_loss_scale: the ceiling of a dynamic scale.
        name: the name of the scaler in messages.
        verbose: log overflows.

    Raises:
        ArgumentValueError: for a value that is not allowed.

    Source: Apex, ``apex.amp.scaler``.
    """

    has_fused_kernel = True
    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False

    def __init__(
        self,
        loss_scale: LossScaleSpec,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
        *,
        name: str = "the loss scaler",
        verbose: bool = True,
    ) -> None:
        settings = DynamicLossScale(
            init_scale=init_scale,
            growth_factor=scale_factor,
            backoff_factor=1.0 / scale_factor,
            growth_interval=scale_window,
            min_scale=min_loss_scale or None,
            max_scale=max_loss_scale,
        )
        rule = settings if loss_scale == "dynamic" else make_loss_scale(loss_scale)
        super().__init__(rule, name=name, verbose=verbose)
        if not isinstance(rule, DynamicLossScale):
            self.settings = settings

    # ---- attributes that scripts read and set

    _dynamic = DeviceLossScaler.dynamic

    _loss_scale = property(DeviceLossScaler.loss_scale, lambda self, scale: self.set_scale(float(scale)))
    _unskipped = property(DeviceLossScaler.good, lambda self, good: self.set_good(int(good)))
    _has_overflow = property(
        lambda self: self.overflowed() if self.found is None else bool(self.found),
        lambda self, value: vars(self).update(found=torch.tensor(float(value), dtype=torch.float32, device="cpu")),
    )
    # A flag that a multi-tensor operation has set, an int tensor of shape [1].
    _overflow_buf = property(
        lambda self: self.flag(torch.device("cpu")).int().reshape(1),
        lambda self, flag: vars(self).update(found=flag.detach().reshape(()).float()),
    )
    _scale_seq_len = _setting("growth_interval")
    _max_loss_scale = _setting("max_scale")
    _min_loss_scale = _setting("min_scale", zero_is_none=True)

    # ---- methods for loops that unscale manually

    def clear_overflow_state(self) -> None:
        """Clear the overflow flag of ``unscale``."""
        self.found = torch.tensor(0.0, dtype=torch.float32, device="cpu")

    def update_scale(self) -> bool:
        """Update the scale by the overflow flag that ``unscale`` has set since ``clear_overflow_state``.

        Reads the device.

        Returns:
            True if the caller should skip the step, because gradients overflowed under a dynamic scale.
        """
        found = self.found if self.found is not None else torch.tensor(0.0, dtype=torch.float32, device="cpu")
        self.update(found)
        return self.dynamic and bool(found)

    def flag(self, device: torch.device) -> torch.Tensor:
        """Return the overflow flag of ``unscale``, 1.0 after an overflow: a 0-dim float32 tensor on a device."""
        if self.found is None:
            self.found = torch.tensor(0.0, dtype=torch.float32, device="cpu")
        self.found = self.found.to(device)
        return self.found


add_names_of_apex(LossScaler, "Scaler", "unscale unscale_with_stashed")
