"""What a loss scale does with an optimizer that has no ``Binding``: any torch optimizer, left as it is."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .unscaling import Unscaler, reciprocal

__all__ = ["Unbound"]


class Unbound:
    """What is kept about such an optimizer between steps; not the optimizer itself.

    Args:
        optimizer: any ``torch.optim.Optimizer``.

    Attributes:
        unscaler: unscales its gradients.
        takes_flags: whether its step reads ``optimizer.found_inf`` on the device, by torch's contract for scalers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.unscaler = Unscaler()
        # An older contract hands the scaler itself to ``step``; such an optimizer does not look at the attribute.
        older = "grad_scaler" in inspect.signature(optimizer.step).parameters
        self.takes_flags = bool(getattr(optimizer, "_step_supports_amp_scaling", False)) and not older

    def prepare_step(
        self, params: list[torch.Tensor], scale: torch.Tensor, found_inf: torch.Tensor, seen: set[int] | None
    ) -> torch.Tensor | None:
        """Look for inf and NaN and unscale, or leave the unscaling to the optimizer where it does that better.

        Args:
            params: those of the optimizer.
            scale: 0-dim float32 tensor, the scale of their gradients.
            found_inf: 0-dim float32 tensor, set to 1.0 if a gradient holds inf or NaN.
            seen: identities of parameters to leave out; None for none.

        Returns:
            What the optimizer has to divide the gradients by, None if that is done.
        """
        grads = self.unscaler.gather(params, seen)
        if self.unscaler.any_half and seen is None:
            # 16 bits would lose what is small; a fused step unscales in fp32.
            self.unscaler.unscale(grads, torch.ones_like(scale), found_inf)
            return scale
        self.unscaler.unscale(grads, reciprocal(scale), found_inf)
        return None

    def guarded_step(
        self, optimizer: Any, grad_scale: torch.Tensor | None, found_inf: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """A step that the optimizer itself skips on the device: nothing is read.

        Args:
            optimizer: one that takes flags.
            grad_scale: as ``prepare_step`` returned it; times what the user left in ``optimizer.grad_scale``.
            found_inf: 0-dim float32 tensor; the step changes nothing if it is 1.0.
            *args: for ``optimizer.step``.
            **kwargs: likewise.

        Returns:
            What ``optimizer.step`` returns.
        """
        given = getattr(optimizer, "grad_scale", None)
        if given is not None:
            grad_scale = given if grad_scale is None else grad_scale * given
        optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf
