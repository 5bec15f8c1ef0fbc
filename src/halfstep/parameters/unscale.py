"""Unscaling of gradients in place, with a check for inf and NaN in the same pass, and clipping.

Gradients may have any floating or complex dtype, be sparse, have zero size, lie on several devices, or be sharded.
``ledger`` decides which gradients to unscale, and which gradients become fp32 first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter, is_

import torch

from ..core.scalars import in_scalar_dtype
from ..kernels import multi_tensor
from ..kernels.multi_tensor import TensorGroups
from ..torch_internals.torch_compat import values_of

__all__ = ["Unscaler", "clip_factor", "dense_view", "reciprocal", "widened"]


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return ``1 / scale`` rounded once to float32, as a tensor on the same device."""
    # Division on a GPU may be approximate in fp32.
    return scale.reciprocal() if scale.is_cpu else in_scalar_dtype(scale).reciprocal().float()


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor that limits the norm of gradients to ``max_norm``, as in ``torch.nn.utils.clip_grad_norm_``."""
    return (max_norm / (norm + 1e-6)).clamp_(max=1.0)


def widened(grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient in fp32, or unchanged if its dtype is at least as wide."""
    return grad.to(torch.promote_types(grad.dtype, torch.float32))


def dense_view(grad: torch.Tensor) -> torch.Tensor:
    """Return the values of a gradient as a real dense view; a sparse gradient must be coalesced."""
    values = values_of(grad) if grad.is_sparse else grad
    return torch.view_as_real(values) if values.is_complex() else values


_IS_SPARSE = attrgetter("is_sparse")


class Unscaler:
    """The unscaling of one list of parameters, which keeps the groups of their gradients between steps.

    It has one entry of groups per ``slot``, and replaces it when the list of owners changes, because a parameter has no
    gradient this time or user code has added a parameter group. An entry keeps the owners alive, so that later tensors
    cannot have the same identities.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[Sequence[torch.Tensor], TensorGroups]] = {}
        # The parameters of the latest ``gather`` that had gradients, and True if one of them is complex.
        self._owners: tuple[list[torch.Tensor], bool] = [], False

    def gather(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of parameters of any kind as real dense views.

        A list of parameters, such as ``OptimizerTable.params``, must not change afterwards: while it is the same object
        as in the last call, its parameters are the same.
        """
        owners = params if isinstance(params, list) else list(params)
        grads = [grad for p in owners if (grad := p.grad) is not None]
        owners = owners if len(grads) == len(owners) else [p for p in owners if p.grad is not None]
        if owners is not self._owners[0]:
            self._owners = owners, any(map(torch.is_complex, owners))
        if self._owners[1] or any(map(_IS_SPARSE, grads)):
            for i, param in enumerate(owners):
                if grads[i].is_sparse and not grads[i].is_coalesced():
                    # Add duplicate indices in fp32, where the sum cannot overflow.
                    param.grad = grads[i] = widened(grads[i]).coalesce().to(grads[i].dtype)
            grads = [dense_view(grad) for grad in grads]
        return grads

    def get(self, slot: Hashable, owners: Sequence[torch.Tensor], *columns: Sequence[torch.Tensor]) -> TensorGroups:
        """Return the groups of ``columns``, whose rows belong to ``owners``, a list that must not change afterwards."""
        before, groups = self._entries.get(slot, ((), None))
        same = before is owners or (len(before) == len(owners) and all(map(is_, before, owners)))
        if groups is None or not same:
            groups = TensorGroups(*columns, owners=owners)
            self._entries[slot] = owners, groups
        return groups

    @torch.no_grad()
    def clip(self, params: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
        """Scale gradients down so that their total norm is at most ``max_norm``.

        Args:
            params: the parameters, of any kind that ``gather`` takes.
            max_norm: the largest norm allowed.
            norm_type: the p of the p-norm; ``float("inf")`` for the largest magnitude.

        Returns:
            The norm before clipping, as a 0-dim tensor; 0 without gradients. If it is inf or NaN, clipping multiplies
            all gradients by 0 or NaN.
        """
        grads = self.gather(params)
        if not grads:
            return torch.zeros((), dtype=torch.float32, device="cpu")
        groups = self.get("clip", self._owners[0], grads)
        norm = multi_tensor.norm(grads, norm_type, groups=groups)
        multi_tensor.scale_(grads, clip_factor(norm, max_norm), groups=groups)
        return norm

    @torch.no_grad()
    def unscale_and_clip(
        self, grads: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor, max_norm: float
    ) -> torch.Tensor:
        """Unscale and clip to a 2-norm. One read of the gradients gives the norm and the check for inf and NaN.

        Args:
            grads: the result of the latest ``gather``.
            inv_scale: 0-dim float32 tensor.
            found_inf: 0-dim float32 tensor, set to 1.0 if the norm of the scaled gradients is not finite in fp32.
            max_norm: the largest norm allowed.

        Returns:
            The norm of the unscaled gradients, as a 0-dim tensor on the device of ``found_inf``.
        """
        if not grads:
            return torch.zeros_like(found_inf)
        groups = self.get("grads", self._owners[0], grads)
        norm = multi_tensor.norm(grads, groups=groups).to(found_inf.device) * inv_scale
        found_inf.logical_or_(norm.isfinite().logical_not_())
        multi_tensor.scale_(grads, inv_scale * clip_factor(norm, max_norm), groups=groups)
        return norm

    def unscale(
        self, grads: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor, *, groups_of: str = "grads"
    ) -> None:
        """Multiply gradients by ``inv_scale`` in place, in fp32 arithmetic.

        Args:
            grads: the result of the latest ``gather``.
            inv_scale: 0-dim float32 tensor on any device.
            found_inf: 0-dim float32 tensor on any device, set to 1.0 if a gradient holds inf or NaN.
            groups_of: a name for gradients that always have the same dtypes at the same parameters.
        """
        if grads:
            groups = self.get(groups_of, self._owners[0], grads)
            multi_tensor.unscale_(grads, inv_scale, found_inf, groups=groups)
