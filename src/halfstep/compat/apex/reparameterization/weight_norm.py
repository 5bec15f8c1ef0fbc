"""Weight normalization."""

from __future__ import annotations

from typing import Any

import torch

from .reparameterization import Reparameterization

__all__ = ["WeightNorm"]


def _norm(weight: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Compute the 2-norm in fp32 over all dimensions except ``dim``, or over all dimensions for None."""
    in_fp32 = weight.to(torch.promote_types(weight.dtype, torch.float32))
    others = None if dim is None else [i for i in range(weight.dim()) if i != dim % weight.dim()]
    norm: torch.Tensor = torch.linalg.vector_norm(in_fp32, dim=others, keepdim=dim is not None)
    return norm


class WeightNorm(Reparameterization):
    """The weight ``w = g * v / ||v||``, computed in fp32, with the dtype of v."""

    def compute_weight(self, module: Any = None, name: str | None = None) -> torch.Tensor:
        """Compute the weight from ``{name}_g`` and ``{name}_v`` of the module."""
        name = name or self.name
        g, v = getattr(module, f"{name}_g"), getattr(module, f"{name}_v")
        scale = g.to(torch.promote_types(g.dtype, torch.float32)) / _norm(v, self.dim)
        weight: torch.Tensor = (v * scale).to(v.dtype)
        return weight

    def reparameterize(self, name: str, weight: torch.Tensor, dim: int | None) -> tuple[list[str], list[torch.Tensor]]:
        """Return the names and values of the norm and the direction of a weight."""
        return [f"{name}_g", f"{name}_v"], [_norm(weight, dim).to(weight.dtype), weight]
