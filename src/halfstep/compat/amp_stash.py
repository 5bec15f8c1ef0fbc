"""What Apex put on optimizers, such as ``_amp_stash.all_fp16_params`` and ``_prepare_amp_backward``, and on scalers.

Scripts that resume, average gradients or scale losses by hand use these names. Nothing in halfstep does.
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
from ..stepping.backward import any_overflow
from ..stepping.scaled_backward import record_pass
from .master_groups import MasterGroups
from .multi_tensor import multi_tensor_l2norm, multi_tensor_scale

__all__ = ["Methods", "Scaler", "Stash"]


class Stash(MasterGroups):
    """The fields of Apex's ``_amp_stash``, as they are now. Lists are made anew each time they are asked for.

    Args:
        attached: what is kept about the optimizer.
    """

    multi_tensor_scale = staticmethod(multi_tensor_scale)
    multi_tensor_l2norm = staticmethod(multi_tensor_l2norm)

    def __init__(self, attached: AttachedOptimizer) -> None:
        self._attached = attached

    @property
    def already_patched(self) -> bool:
        """Whether the next step will be skipped. Reads the device."""
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

    # What a block has set aside is not here: outside of blocks Apex had nothing in these lists either.
    all_fp16_grad_stash = property(lambda self: [None] * len(self.all_fp16_params))
    all_fp32_grad_stash = property(lambda self: [None] * len(self.all_fp32_params))
    all_fp32_from_fp32_grad_stash = property(lambda self: [None] * len(self.all_fp32_from_fp32_params))


class Methods:
    """The methods that Apex put on an optimizer.

    Args:
        optimizer: an attached one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        attached = attached_to(optimizer)
        assert attached is not None
        self._attached = attached

    def _lazy_init_maybe_master_weights(self) -> None:
        """Give masters to parameters that were put into a group by hand. Those that were there have them already."""
        self._attached.keeper.adopt()

    _amp_lazy_init = _lazy_init_maybe_master_weights

    def _master_params_to_model_params(self) -> None:
        """Round the masters into the model, with what was written into them."""
        for _ in self._attached.keeper.master_params():
            pass

    def _prepare_amp_backward(self) -> None:
        """Set aside the present gradients, before a backward pass."""
        window = self._attached.window
        scaler: Any = self._attached.session.loss_scalers[0]
        window.begin(scaler.scale(window.device), block=window)

    def _post_amp_backward(self, scaler: LossScaler) -> None:
        """Unscale what a backward pass brought, and add what was set aside.

        Args:
            scaler: whose scale the loss was multiplied by. Its ``update_scale`` moves it.
        """
        window = self._attached.window
        scale = scaler.scale(window.device)
        found_inf = scaler.flag(window.device)
        window.finish(scale, found_inf)
        record_pass([window], scaler, found_inf, scale, moves=False)


class Scaler:
    """The methods of a ``LossScaler`` by which a loop unscales gradients by hand.

    Args:
        scaler: whose scale it is, and whose flag is set at an overflow.
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
        """Write the model's gradients, divided by the scale, to those of the masters; note inf and NaN.

        Args:
            model_grads: read; they may be ``master_grads``.
            master_grads: written.
            unused_scale: kept for Apex.
            models_are_masters: kept for Apex.
            scale_override: divide by this and not by the scale.
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
        """Write ``new / scale + stashed``, and note inf and NaN in the new gradients.

        Args:
            model_grads: the new gradients.
            stashed_master_grads: what is added to them.
            master_grads: written.
            scale_override: (scale of the new gradients, scale of those stashed, scale of the result).
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
