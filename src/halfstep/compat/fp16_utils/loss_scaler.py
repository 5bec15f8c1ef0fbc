"""The two loss scalers of fp16_utils: Apex's names over the rules of ``core.loss_scale``.

``FP16_Optimizer`` creates and uses them. Hand-written loops with ``prep_param_lists`` also use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import torch

from ...core.checks import check_count
from ...core.errors import ArgumentValueError
from ...core.loss_scale import DynamicLossScale, LossScale, StaticLossScale
from ...parameters.loss_scaler import DeviceLossScaler
from ...torch_internals.torch_compat import values_of

__all__ = ["DynamicLossScaler", "LossScaler", "saved_entry"]


class _CountingScaler(DeviceLossScaler):
    """A ``DeviceLossScaler`` that also counts iterations and remembers the last iteration that overflowed."""

    def __init__(self, rule: LossScale) -> None:
        super().__init__(rule, name="LossScaler" if not rule.dynamic else "DynamicLossScaler")
        self.cur_iter = 0
        self.last_overflow = torch.tensor(-1, dtype=torch.int64, device="cpu")

    def update(self, found_inf: torch.Tensor, blame: Callable[[], str] | None = None) -> None:
        """Update the state by the rule, and count the iteration."""
        super().update(found_inf, blame)
        self.last_overflow = torch.where(found_inf != 0, self.cur_iter, self.last_overflow.to(found_inf.device))
        self.cur_iter += 1

    @property
    def last_overflow_iter(self) -> int:
        """Return the index of the last iteration that overflowed, from 0; -1 if none did. Reads the device."""
        return int(self.last_overflow)

    @last_overflow_iter.setter
    def last_overflow_iter(self, iteration: int) -> None:
        self.last_overflow = torch.full_like(self.last_overflow, int(iteration))


class LossScaler:
    """A constant loss scale, which changes only if you set ``cur_scale``.

    Args:
        scale: a finite number above zero.

    Raises:
        ArgumentValueError: for any other scale.
    """

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.engine = _CountingScaler(StaticLossScale(scale))

    @property
    def loss_scale(self) -> float:
        """The current scale. Reads the device."""
        return self.engine.loss_scale()

    @property
    def cur_scale(self) -> float:
        """The current scale, under a name that can be set. Reads the device."""
        return self.engine.loss_scale()

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self.engine.set_scale(value)

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """False: with a static scale, user code must handle overflows."""
        return False

    def update_scale(self, overflow: bool | torch.Tensor) -> None:
        """Count one iteration.

        Args:
            overflow: True if the gradients of the iteration overflowed; the host does not read a 0-dim tensor.
        """
        device = getattr(overflow, "device", "cpu")
        self.engine.update(torch.as_tensor(overflow, dtype=torch.float32, device=device))

    def scale_gradient(self, module: torch.nn.Module, grad_in: Any, grad_out: Any) -> tuple[Any, ...]:
        """Multiply incoming gradients by the scale: a hook for ``module.register_full_backward_hook``."""
        return tuple(None if grad is None else grad * self.loss_scale for grad in grad_in)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        """Run ``(loss * loss_scale).backward()``, with a 16-bit loss in fp32. The gradients stay scaled."""
        wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
        (wide * self.engine.scale(loss.device)).backward(retain_graph=retain_graph)

    def state_dict(self) -> dict[str, float | int]:
        """Return plain numbers."""
        return {
            **self.engine.state_dict(),
            "cur_iter": self.engine.cur_iter,
            "last_overflow_iter": self.engine.last_overflow_iter,
        }

    def load_state_dict(self, state_dict: Mapping[str, float | int] | Any) -> None:
        """Load a state dict of this scaler, or a loss scaler that Apex pickled into a checkpoint.

        Raises:
            ArgumentValueError: for any other value; nothing is loaded.
        """
        entry = saved_entry(state_dict)
        self.engine.load_state_dict(entry)
        self.engine.cur_iter = int(entry.get("cur_iter", 0))
        self.engine.last_overflow_iter = entry.get("last_overflow_iter", -1)


class DynamicLossScaler(LossScaler):
    """A dynamic loss scale: lower after each overflow, higher after ``scale_window`` iterations without overflow.

    ::

        overflow = scaler.has_overflow(model_params)
        scaler.update_scale(overflow)
        if not overflow:
            ...

    Args:
        init_scale: the first scale.
        scale_factor: the divisor of the scale at an overflow, and its factor after ``scale_window`` good iterations.
        scale_window: iterations without overflow before the scale grows.
        min_loss_scale: the floor; None means 1, or ``init_scale`` if that is lower.
        max_loss_scale: the ceiling; None means the largest float32 number.

    Raises:
        ArgumentValueError: for a scale that is not above zero, a factor that is not above 1, a window below 1.

    Source: Apex, ``apex.fp16_utils``, https://nvidia.github.io/apex/fp16_utils.html;
    Micikevicius et al. 2018, section 3.2.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
    ) -> None:
        if isinstance(scale_factor, bool) or not isinstance(scale_factor, (int, float)) or not scale_factor > 1.0:
            raise ArgumentValueError(f"scale_factor={scale_factor!r} must be a number above 1.")
        check_count("scale_window", scale_window)
        rule = DynamicLossScale(
            init_scale=init_scale,
            growth_factor=scale_factor,
            backoff_factor=1.0 / scale_factor,
            growth_interval=scale_window,
            min_scale=min_loss_scale or min(1.0, init_scale),
            max_scale=max_loss_scale or None,
        )
        self.engine = _CountingScaler(rule)

    cur_iter = property(attrgetter("engine.cur_iter"), doc="How many iterations ``update_scale`` has seen.")
    last_overflow_iter = property(
        attrgetter("engine.last_overflow_iter"),
        doc="Which of them overflowed last, counted from 0; -1 if none did. Reads the device.",
    )
    # Attributes that scripts set when they resume.
    scale_factor = property(
        attrgetter("engine.settings.growth_factor"),
        lambda self, factor: self.engine.change(growth_factor=factor, backoff_factor=1.0 / factor),
    )
    scale_window = property(
        attrgetter("engine.settings.growth_interval"), lambda self, window: self.engine.change(growth_interval=window)
    )

    def has_overflow(self, params: Iterable[torch.Tensor]) -> bool:
        """True if the gradient of a parameter holds inf or NaN. Reads the device once.

        Args:
            params: parameters of any dtypes and devices; parameters without a gradient are ignored.
        """
        grads = [values_of(p.grad) if p.grad.is_sparse else p.grad for p in params if p.grad is not None]
        if not grads:
            return False
        flags = [torch.isfinite(grad).all().to(grads[0].device, non_blocking=True) for grad in grads]
        return not bool(torch.stack(flags).all())


def saved_entry(saved: Any) -> dict[str, Any]:
    """Return the numbers of a saved scaler: a state dict of ours or of amp's, or an object that Apex pickled.

    Raises:
        ArgumentValueError: for any other value.
    """
    if isinstance(saved, Mapping):
        entry = dict(saved)
    else:
        scale = getattr(saved, "_loss_scale", getattr(saved, "cur_scale", None))
        entry = {"loss_scale": scale, "unskipped": getattr(saved, "_unskipped", 0)}
        if hasattr(saved, "cur_iter") and hasattr(saved, "last_overflow_iter"):
            entry |= {"cur_iter": saved.cur_iter, "last_overflow_iter": saved.last_overflow_iter}
            entry["unskipped"] = (saved.cur_iter - saved.last_overflow_iter - 1) % getattr(saved, "scale_window", 1000)
    scale = entry.get("loss_scale")
    if not isinstance(scale, (int, float)) or not 0.0 < scale < math.inf or not isinstance(entry.get("unskipped"), int):
        raise ArgumentValueError(
            f"{saved!r} is no saved loss scaler: loss_scale must be a finite number above zero and unskipped a whole "
            "number."
        )
    return entry
