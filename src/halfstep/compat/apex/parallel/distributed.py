"""``apex.parallel.distributed``: the wrapper, and helpers that scripts import from the same module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....casting.containers import tensors_in
from ...parallel import DistributedDataParallel, Reducer
from ..apex_C import flatten, unflatten

__all__ = [
    "DistributedDataParallel",
    "Reducer",
    "apply_flat_dist_call",
    "extract_tensors",
    "flat_dist_call",
    "flatten",
    "split_by_type",
    "split_half_float_double",
    "unflatten",
]


def split_by_type(tensors: Iterable[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Group tensors by the name of their type (``torch.HalfTensor``...), in the order of first occurrence."""
    found: dict[str, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.type(), []).append(tensor)
    return found


def split_half_float_double(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors of float16, float32 and float64 by dtype, without empty groups."""
    given = list(tensors)
    kinds = (torch.float16, torch.float32, torch.float64)
    return [bucket for kind in kinds if (bucket := [t for t in given if t.dtype is kind])]


def extract_tensors(maybe_tensor: Any, tensor_list: list[torch.Tensor]) -> None:
    """Append the tensors in lists, tuples and dicts of any depth to ``tensor_list``."""
    tensor_list += tensors_in(maybe_tensor)


def apply_flat_dist_call(bucket: Sequence[torch.Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Run one collective call for tensors of one type, and copy the results back; an all-reduce gives means."""
    flat = flatten(bucket)
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    for tensor, result in zip(bucket, unflatten(flat, bucket), strict=True):
        tensor.copy_(result)


def flat_dist_call(tensors: Sequence[torch.Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Call ``apply_flat_dist_call`` for each type of tensor in a list."""
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)
