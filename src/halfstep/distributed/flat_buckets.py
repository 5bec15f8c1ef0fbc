"""Tensors of many parameters sent between the ranks in few flat buckets: masters, and gradients before a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from ..core.dtypes import is_half
from ..gradients.ledger import get_grads, set_grads
from ..gradients.master_registry import master_of, write_master
from ..kernels.multi_tensor import group_rows

__all__ = ["average_gradients", "share_masters", "share_sparse_dims", "sparse_dims"]

_BUCKET = 2**24  # elements in a flat bucket: 64 MiB of fp32


@torch.no_grad()
def share_masters(params: Sequence[torch.Tensor], group: dist.ProcessGroup, rank: int = 0) -> None:
    """Give every rank the masters of one rank of the group."""
    source = dist.get_global_rank(group, rank)
    owners = [p for p in params if master_of(p) is not None]
    for bucket in _chunks(owners):
        flat = torch.cat([master_of(p).flatten() for p in bucket])  # type: ignore[union-attr]
        dist.broadcast(flat, source, group=group)
        for param, values in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            values = values.view_as(param)
            rounded = write_master(param, values)
            assert rounded is not None
            # Writing would make a saved forward pass fail in backward. At a tie there are two ways to round.
            if not ((param == rounded) | (param == values.to(param.dtype))).all():
                param.copy_(rounded)


def sparse_dims(params: Iterable[torch.Tensor]) -> dict[int, int]:
    """The number of sparse dimensions of each sparse gradient, by the identity of the parameter."""
    return {id(p): p.grad.sparse_dim() for p in params if p.grad is not None and p.grad.is_sparse}


def share_sparse_dims(
    params: Sequence[torch.Tensor], sparse: dict[int, int], group: dist.ProcessGroup, device: torch.device
) -> dict[int, int]:
    """As ``sparse``, what ``sparse_dims`` has found here, with what it has found on other ranks."""
    trained = [p for p in params if p.requires_grad]
    shared = torch.tensor([sparse.get(id(p), 0) for p in trained], dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    return sparse | {id(p): dims for p, dims in zip(trained, shared.tolist(), strict=True) if dims}


@torch.no_grad()
def average_gradients(
    params: Sequence[torch.Tensor], group: dist.ProcessGroup, world: int, fp32: set[int], sparse: Mapping[int, int]
) -> None:
    """Replace the gradients of parameters by their means over the ranks. A rank without a gradient counts as zero.

    Args:
        params: those of one wrapper, the same on every rank.
        group: the processes of the wrapper.
        world: their number.
        fp32: identities of parameters whose gradients are fp32 afterwards.
        sparse: the number of sparse dimensions of sparse gradients, by the identity of the parameter.
    """
    for param in [p for p in params if id(p) in sparse]:
        _average_sparse(param, sparse[id(param)], group, world, fp32)
    for bucket in _chunks([p for p in params if id(p) not in sparse]):
        _average(bucket, group, world, fp32)


def _chunks(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors grouped by device and dtype, in lists of at most ``_BUCKET`` elements or of one tensor."""
    chunks: list[list[torch.Tensor]] = []
    for rows in group_rows(tensors):
        room = -1  # none yet
        for tensor in (tensors[i] for i in rows):
            if tensor.numel() > room:
                chunks.append([])
                room = _BUCKET
            chunks[-1].append(tensor)
            room -= tensor.numel()
    return chunks


def _average_sparse(param: torch.Tensor, dims: int, group: dist.ProcessGroup, world: int, fp32: set[int]) -> None:
    """``average_gradients`` for one parameter whose gradient has some sparse dimensions."""
    (grad,) = get_grads([param])
    if grad is None:
        grad = torch.zeros_like(param, dtype=torch.float32 if id(param) in fp32 else param.dtype)
    if not grad.is_sparse:
        grad = grad.to_sparse(dims)
    total = (grad.float() if is_half(grad) else grad).coalesce()
    dist.all_reduce(total, group=group)
    set_grads([param], [(total / world).to(grad.dtype)])


def _average(owners: list[torch.Tensor], group: dist.ProcessGroup, world: int, fp32: set[int]) -> None:
    """``average_gradients`` for one bucket."""
    grads = get_grads(owners)
    dtype = torch.float32 if is_half(owners[0]) else owners[0].dtype
    parts = [
        torch.zeros_like(p, dtype=dtype).flatten() if g is None else g.flatten().to(dtype)
        for p, g in zip(owners, grads, strict=True)
    ]
    present = torch.tensor([float(g is not None) for g in grads], dtype=dtype, device=owners[0].device)
    flat = torch.cat([*parts, present])
    dist.all_reduce(flat, group=group)
    *sums, present = flat.split([*(p.numel() for p in owners), len(owners)])
    for param, values, anyone in zip(owners, sums, present.real.tolist(), strict=True):
        if anyone:
            mean = (values / world).view_as(param)
            if id(param) not in fp32:
                mean = mean.to(param.dtype)
            if param.grad is None or param.grad.dtype is not mean.dtype:
                set_grads([param], [mean])
            else:
                param.grad.copy_(mean)
