"""The reference backend: multi-tensor operations on ``torch._foreach`` and torch's own kernels, on any device.

Every function takes lists that may mix devices and dtypes and a ``Plan`` that sorts them; ``found_inf`` is a
0-dim float32 tensor that is set to 1.0 where a value is inf or NaN and is never read here. What is found of sharded
tensors is what all their processes find, so that these calls are collective operations there.
"""

from __future__ import annotations

import torch

from . import multi_tensor as ops
from .grouping import Plan
from .launch import backend_for
from .shards import Domain, complete_max, complete_sum

_LARGE = 2**16  # elements of a tensor, on average

__all__ = ["copy", "norm", "scale_", "unscale_", "unscale_into"]


def copy(plan: Plan, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """``target = source``, cast to the target's dtype, for each pair."""
    for src, dst in plan.split(sources, targets):
        torch._foreach_copy_(dst, src)


def unscale_(plan: Plan, tensors: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    """``tensor *= inv_scale`` in place, in fp32 arithmetic, looking for inf and NaN in the same pass.

    Args:
        plan: made for ``tensors``.
        tensors: real tensors of any float dtype.
        inv_scale: 0-dim float32 tensor on any device.
        found_inf: 0-dim float32 tensor on any device, set to 1.0 if a value is not finite.
    """
    for (group,) in plan.split(tensors):
        _unscale_group(group, inv_scale, found_inf)
    _complete(plan, found_inf)


def unscale_into(
    plan: Plan,
    sources: list[torch.Tensor],
    targets: list[torch.Tensor],
    inv_scale: torch.Tensor | None,
    found_inf: torch.Tensor,
    *,
    accumulate: bool,
) -> None:
    """``target = source * inv_scale``, or ``target += ...`` with ``accumulate``; the sources stay as they are.

    Args:
        plan: made for ``sources, targets``.
        sources: gradients, usually of 16 bits.
        targets: float32 tensors of the same shapes.
        inv_scale: 0-dim float32 tensor, or None to copy without scaling and without looking for overflow.
        found_inf: 0-dim float32 tensor, set to 1.0 if a source is not finite.
        accumulate: add to the targets instead of overwriting them.
    """
    for src, dst in plan.split(sources, targets):
        if accumulate and _worth_a_kernel(src, dst):
            factor = 1.0 if inv_scale is None else inv_scale
            ops.axpby(factor, src, 1.0, dst, dst, None if inv_scale is None else found_inf)
            continue
        if accumulate and inv_scale is None:
            torch._foreach_add_(dst, src)
            continue
        fresh = [torch.empty_like(t) for t in dst] if accumulate else dst
        torch._foreach_copy_(fresh, src)
        if inv_scale is not None:
            _unscale_group(fresh, inv_scale, found_inf)
        if accumulate:
            torch._foreach_add_(dst, fresh)
    if inv_scale is not None:
        _complete(plan, found_inf)


def norm(plan: Plan, tensors: list[torch.Tensor], p: float = 2.0) -> torch.Tensor:
    """The p-norm of all the tensors taken as one vector.

    Args:
        plan: made for ``tensors``.
        tensors: at least one; real, of any float dtype.
        p: above 0; ``float("inf")`` for the largest magnitude.

    Returns:
        A 0-dim tensor on the first tensor's device, float32, or float64 if one of them is.
    """
    first = tensors[0]
    norms = [torch.zeros((), device=first.device)]
    for (group,), domain in zip(plan.split(tensors), plan.domains, strict=True):
        wide = torch.promote_types(group[0].dtype, torch.float32)
        filled = [t for t in group if t.numel()]  # there is no largest element in nothing
        found = list(torch._foreach_norm(filled, p, dtype=wide)) if filled else []
        norms.extend([_complete_norm(found, p, domain, first.device)] if domain else found)
    dtype = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    total: torch.Tensor = torch.linalg.vector_norm(
        torch.stack([n.to(first.device, dtype, non_blocking=True) for n in norms]), p
    )
    return total


def scale_(plan: Plan, tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """``tensor *= factor`` in place; ``factor`` is a 0-dim tensor on any device."""
    for (group,) in plan.split(tensors):
        torch._foreach_mul_(group, factor.to(group[0].device, non_blocking=True))


def _worth_a_kernel(src: list[torch.Tensor], dst: list[torch.Tensor]) -> bool:
    """Whether one pass that reads 16 bits and adds in fp32 beats torch's two to four: for large tensors on a CPU."""
    elements = sum(t.numel() for t in src)
    return elements > _LARGE * len(src) and dst[0].device.type == "cpu" and backend_for("cpu") == "compiled"


def _complete(plan: Plan, found_inf: torch.Tensor) -> None:
    for domain in dict.fromkeys(plan.domains):
        complete_max(found_inf, domain)


def _complete_norm(norms: list[torch.Tensor], p: float, domain: Domain, device: torch.device) -> torch.Tensor:
    """The norm of all parts, from those of the parts that lie here."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    here = torch.linalg.vector_norm(torch.stack([zero, *(n.double() for n in norms)]), p)
    if p == float("inf"):
        return complete_max(here, domain)
    return complete_sum(here**p, domain) ** (1.0 / p)


def _unscale_group(group: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    device = group[0].device
    if inv_scale.device != device:
        inv_scale = inv_scale.to(device, non_blocking=True)
    if found_inf.device == device:
        torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, inv_scale)
        return
    local = torch.zeros((), device=device)
    torch._amp_foreach_non_finite_check_and_unscale_(group, local, inv_scale)
    found_inf.copy_(torch.maximum(found_inf, local.to(found_inf.device, non_blocking=True)))
