"""Sharded tensors (``DTensor``, as FSDP2 makes them): the local part, and reductions over the processes of all parts.

Kernels work on local parts; a sum, maximum or flag of a whole tensor is completed over its processes. A list may mix
sharded and plain tensors, so each tensor is examined.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..core.errors import UsageError
from ..torch_internals.torch_compat import is_flattened

__all__ = [
    "FLATTENED",
    "ORDINARY",
    "Domain",
    "complete_max",
    "complete_sum",
    "domain_of",
    "is_sharded",
    "local",
    "locals_of",
    "placements_of",
    "rewrapped",
]

Domain = tuple[Any, ...]
"""The process groups over which a tensor is cut, one for each dimension of its mesh that cuts it."""

FLATTENED: Domain = ("FullyShardedDataParallel",)
"""The domain of a parameter of FSDP1, which is cut over unknown processes."""

ORDINARY = frozenset((torch.Tensor, torch.nn.Parameter))
"""The classes that are never sharded. Testing a whole list against them is faster than ``is_sharded`` per tensor."""


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a ``DTensor``. False as long as no code has imported this class."""
    if type(tensor) in ORDINARY:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor in this process, sharing its memory; a plain tensor itself."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[attr-defined,no-any-return]


def locals_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the local part of each tensor. A list of plain tensors, the usual case, is returned unchanged."""
    if isinstance(tensors, list) and ORDINARY.issuperset(map(type, tensors)):
        return tensors
    return [local(tensor) for tensor in tensors]


def placements_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the mesh and the placements of each tensor, None for a plain one; [] if all are plain.

    Tensors of equal shape, mesh and placements have local parts of equal shapes.
    """
    if ORDINARY.issuperset(map(type, tensors)):
        return []
    placed = [(t.device_mesh, t.placements) if is_sharded(t) else None for t in tensors]  # type: ignore[attr-defined]
    return placed if any(placed) else []


def rewrapped(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Wrap a local part as a sharded tensor that is cut like ``like``; unchanged if ``like`` is not sharded."""
    if not is_sharded(like):
        return value
    whole: Any = like
    wrapped: torch.Tensor = type(whole.data).from_local(
        value, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return wrapped


def domain_of(tensor: torch.Tensor) -> Domain:
    """Return the domain over which a tensor is cut; () if it is whole, ``FLATTENED`` if the processes are unknown.

    Raises:
        UsageError: if the processes hold summands of the tensor instead of parts.
    """
    if not is_sharded(tensor):
        return FLATTENED if is_flattened(tensor) and dist.is_initialized() and dist.get_world_size() > 1 else ()
    whole: Any = tensor
    if any(placement.is_partial() for placement in whole.placements):
        raise UsageError(
            f"A tensor of shape {tuple(tensor.shape)} is placed as {whole.placements}: its processes hold summands. "
            "Redistribute it to Shard or Replicate first."
        )
    return tuple(whole.device_mesh.get_group(i) for i, place in enumerate(whole.placements) if not place.is_replicate())


def complete_sum(values: torch.Tensor, domain: Domain) -> torch.Tensor:
    """Sum, in place, the values that the processes of a domain computed from their parts. A collective operation."""
    return _complete(values, domain, "SUM")


def complete_max(values: torch.Tensor, domain: Domain) -> torch.Tensor:
    """Take, in place, the maximum of the values of all processes of a domain. A collective operation."""
    return _complete(values, domain, "MAX")


def _complete(values: torch.Tensor, domain: Domain, reduction: str) -> torch.Tensor:
    if domain == FLATTENED:
        raise UsageError(
            "FullyShardedDataParallel (FSDP1) has cut these parameters, and halfstep cannot know over which processes. "
            "So each process would clip by the norm of its own part, or skip a step alone where only its part "
            "overflows. Use fully_shard (FSDP2), where loss scales, clipping and norms work. With FSDP1 use bfloat16 "
            "without a loss scale, clip with the clip_grad_norm_ method of the wrapper, and use an optimizer that "
            "takes no norms."
        )
    for group in domain:
        dist.all_reduce(values, op=getattr(dist.ReduceOp, reduction), group=group)
    return values
