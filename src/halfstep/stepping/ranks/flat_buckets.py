"""Collective operations on the tensors of many parameters, in a few flat buckets: masters, and gradients of a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...core.dtypes import is_half
from ...kernels.multi_tensor import group_rows
from ...parameters.held_masters import master_of, write_master
from ...parameters.ledger import get_grads, set_grads

__all__ = ["average_gradients", "share_masters"]

_BUCKET = 2**24  # elements in a flat bucket: 64 MiB of fp32


@torch.no_grad()
def share_masters(params: Sequence[torch.Tensor], group: dist.ProcessGroup, rank: int = 0) -> None:
    """Broadcast the masters of one rank of the group to all its ranks."""
    source = dist.get_global_rank(group, rank)
    owners = [p for p in params if master_of(p) is not None]
    for bucket in _chunks(owners):
        flat = torch.cat([master_of(p).flatten() for p in bucket])  # type: ignore[union-attr]
        dist.broadcast(flat, source, group=group)
        for param, values in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            values = values.view_as(param)
            rounded = write_master(param, values)
            assert rounded is not None
            # Write only a changed weight, because autograd refuses a backward pass through a weight written since the
            # forward pass. Two roundings of a tie count as equal.
            if not ((param == rounded) | (param == values.to(param.dtype))).all():
                param.copy_(rounded)


@torch.no_grad()
def average_gradients(
    params: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device, fp32: set[int]
) -> None:
    """Replace the gradients of parameters by their means over the ranks. A rank without a gradient counts as zero.

    Args:
        params: the parameters of one wrapper, the same on every rank.
        group: the process group of the wrapper.
        device: the device for numbers that the ranks exchange.
        fp32: the identities of the parameters whose gradients become fp32.
    """
    # 0 for no gradient, 1 for a dense gradient, 1 plus the count of sparse dimensions for a sparse gradient
    mine = [0 if (g := p.grad) is None else 1 + (g.sparse_dim() if g.is_sparse else 0) for p in params]
    kinds = torch.tensor(mine, dtype=torch.int64, device=device)
    dist.all_reduce(kinds, op=dist.ReduceOp.MAX, group=group)
    dense: list[torch.Tensor] = []
    for param, kind in zip(params, kinds.tolist(), strict=True):
        if kind > 1:
            _average_sparse(param, kind - 1, group, fp32)
        elif kind:
            dense.append(param)
    for bucket in _chunks(dense):
        _average(bucket, group, fp32)


def _chunks(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by device and dtype, in lists of at most ``_BUCKET`` elements or of one tensor."""
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


def _average_sparse(param: torch.Tensor, dims: int, group: dist.ProcessGroup, fp32: set[int]) -> None:
    """Average the gradient of one parameter, with ``dims`` sparse dimensions."""
    (grad,) = get_grads([param])
    if grad is None:
        grad = torch.zeros_like(param, dtype=torch.float32 if id(param) in fp32 else param.dtype)
    if not grad.is_sparse:
        grad = grad.to_sparse(dims)
    total = (grad.float() if is_half(grad) else grad).coalesce()
    dist.all_reduce(total, group=group)
    set_grads([param], [(total / dist.get_world_size(group)).to(grad.dtype)])


def _average(owners: list[torch.Tensor], group: dist.ProcessGroup, fp32: set[int]) -> None:
    """Average the gradients of one bucket of parameters."""
    dtype = torch.float32 if is_half(owners[0]) else owners[0].dtype
    pairs = zip(owners, get_grads(owners), strict=True)
    flat = torch.cat([(torch.zeros_like(p) if g is None else g).flatten().to(dtype) for p, g in pairs])
    dist.all_reduce(flat, group=group)
    world = dist.get_world_size(group)
    for param, values in zip(owners, flat.split([p.numel() for p in owners]), strict=True):
        mean = (values / world).view_as(param).to(torch.float32 if id(param) in fp32 else param.dtype)
        if param.grad is None or param.grad.dtype is not mean.dtype:
            set_grads([param], [mean])
        else:
            param.grad.copy_(mean)
