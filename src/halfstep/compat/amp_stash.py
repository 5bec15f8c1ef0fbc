"""Apex's names on optimizers and scalers, such as ``_amp_stash.all_fp16_params`` and ``_prepare_amp_backward``.

Scripts that resume, average gradients or scale losses manually use these names. Halfstep does not use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from ..amp.loss_scaler import LossScaler
from ..core.dtypes import is_half
from ..core.scalars import in_scalar_dtype
from ..kernels import multi_tensor
from ..stepping.attached import AttachedOptimizer, attached_to
from ..stepping.backward import any_overflow, record_pass
from .master_groups import MasterGroups
from .multi_tensor import multi_tensor_l2norm, multi_tensor_scale

__all__ = ["Methods", "Scaler", "Stash"]


class Stash(MasterGroups):
    """The current fields of Apex's ``_amp_stash``. Each access builds a new list.

    Args:
        attached: the state of the attached optimizer.
    """

    multi_tensor_scale = staticmethod(multi_tensor_scale)
    multi_tensor_l2norm = staticmethod(multi_tensor_l2norm)

    def __init__(self, attached: AttachedOptimizer) -> None:
        self._attached = attached

    @property
    def already_patched(self) -> bool:
        """True if the next step will be skipped. Reads the device."""
        records = self._attached.window.records
        return bool(records) and bool(any_overflow(records))

    @property
    def dummy_overflow_buf(self) -> torch.Tensor:
        """A flag for multi-tensor operations: an int32 tensor of shape [1] on the device of the first parameter."""
        return torch.zeros(1, dtype=torch.int32, device=self._attached.window.device)

    @property
    def all_fp16_params(self) -> list[torch.Tensor]:
        """The trainable 16-bit parameters."""
        return [p for p in self._attached.window.params() if is_half(p) and p.requires_grad]

    @property
    def all_fp32_from_fp16_params(self) -> list[torch.Tensor]:
        """The masters."""
        return [*chain(*self.fp32_from_fp16_groups)]

    @property
    def all_fp32_from_fp32_params(self) -> list[torch.Tensor]:
        """The trainable parameters without a master at a level with masters."""
        return [p for p in chain(*self.fp32_from_fp32_groups) if p.requires_grad]

    @property
    def all_fp32_params(self) -> list[torch.Tensor]:
        """The trainable fp32 parameters."""
        return [p for p in self._attached.window.params() if not is_half(p) and p.requires_grad]

    # Gradients that a block has set aside are not listed: outside blocks, Apex's lists had none either.
    all_fp16_grad_stash = property(lambda self: [None] * len(self.all_fp16_params))
    all_fp32_grad_stash = property(lambda self: [None] * len(self.all_fp32_params))
    all_fp32_from_fp32_grad_stash = property(lambda self: [None] * len(self.all_fp32_from_fp32_params))


class Methods:
    """The methods that Apex put on an optimizer.

    Args:
        optimizer: an attached optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        attached = attached_to(optimizer)
        assert attached is not None
        self._attached = attached

    def _lazy_init_maybe_master_weights(self) -> None:
        """Give masters to parameters that user code put into a group directly; earlier parameters have masters."""
        self._attached.window.gradients.expect()

    _amp_lazy_init = _lazy_init_maybe_master_weights

    def _master_params_to_model_params(self) -> None:
        """Round the masters into the model, including values that user code wrote to the masters."""
        for _ in self._attached.master_params():
            pass

    def _prepare_amp_backward(self) -> None:
        """Set the current gradients aside before a backward pass."""
        window = self._attached.window
        scaler: Any = self._attached.session.loss_scalers[0]
        window.begin(scaler.scale(window.device), block=window)

    def _post_amp_backward(self, scaler: LossScaler) -> None:
        """Unscale the gradients of a backward pass, and add the gradients that were set aside.

        Args:
            scaler: the scaler of the loss. Its ``update_scale`` then changes the scale.
        """
        window = self._attached.window
        scale = scaler.scale(window.device)
        found_inf = scaler.flag(window.device)
        window.finish(scale, found_inf, scaler)
        record_pass([window], found_inf, scaler)


class Scaler:
    """The methods of a ``LossScaler`` by which a loop unscales gradients manually.

    Args:
        scaler: the scaler that has the scale, and that gets the overflow flag.
    """

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler

    @torch.no_grad()
    def unscale(
        self,
        model_grads: Sequence[torch.Tensor],
        master_grads: Sequence[torch.Tensor],
        unused_scale: float | None = None,
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Write the model's gradients, divided by the scale, to the masters' gradients; check for inf and NaN.

        Args:
            model_grads: the gradients to read; may be ``master_grads``.
            master_grads: the tensors to write.
            unused_scale: kept for Apex.
            models_are_masters: kept for Apex.
            scale_override: divide by this value instead of the scale.
        """
        grads = list(model_grads)
        if grads:
            found = self._scaler.flag(grads[0].device)
            multi_tensor.scale(grads, list(master_grads), self._inverse(grads[0].device, scale_override), found)

    @torch.no_grad()
    def unscale_with_stashed(
        self,
        model_grads: Sequence[torch.Tensor],
        stashed_master_grads: Sequence[torch.Tensor],
        master_grads: Sequence[torch.Tensor],
        scale_override: Sequence[float] | None = None,
    ) -> None:
        """Write ``new / scale + stashed``; check the new gradients for inf and NaN.

        Args:
            model_grads: the new gradients.
            stashed_master_grads: the gradients to add to the new gradients.
            master_grads: the tensors to write.
            scale_override: (scale of the new gradients, scale of the stashed gradients, scale of the result).
        """
        grads = list(model_grads)
        if not grads:
            return
        device = grads[0].device
        new, stashed, result = scale_override or (None, 1.0, 1.0)
        multi_tensor.l2norm(grads, found_inf=self._scaler.flag(device))
        factor = self._inverse(device, new) * result
        multi_tensor.axpby(factor, grads, result / stashed, list(stashed_master_grads), list(master_grads))

    def _inverse(self, device: torch.device, override: float | None) -> torch.Tensor | float:
        return in_scalar_dtype(self._scaler.scale(device)).reciprocal() if override is None else 1.0 / override
