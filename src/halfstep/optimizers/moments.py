"""The moments in the state of a parameter: one tensor each, or 8-bit codes with the largest magnitude of each block.

In ``optimizer.state[p]`` codes and magnitudes are ``exp_avg_codes`` (uint8, like the parameter) and ``exp_avg_absmax``
(float32, one number for each block of 256 elements, in the order in which the codes lie in memory). They have names of
their own, because torch's classes would cast codes to numbers without a word. Of a sharded parameter the blocks are
those of the part that lies here.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import UsageError
from ..kernels.blockwise import blocks_of, dynamic_map, map_on, quantize, widened
from ..kernels.shards import local, rewrapped
from ..kernels.storage import Storage

__all__ = ["adapt", "keys", "parts", "value"]


def keys(name: str, storage: Storage) -> tuple[str, ...]:
    """Where the tensors of a moment are in the state of a parameter."""
    return (f"{name}_codes", f"{name}_absmax") if storage.kind == "blockwise" else (name,)


def adapt(
    param: torch.Tensor, state: dict[str, Any], name: str, initial: float, storage: Storage, coded: Storage
) -> None:
    """Give a moment the form that ``storage`` asks for, keeping the value of the one it has.

    Args:
        param: the parameter.
        state: ``optimizer.state[param]``.
        name: of the moment.
        initial: its value where there is none; 0 for one that may be kept in 8 bits.
        storage: how it is to be kept.
        coded: how codes that are there are to be read.

    Raises:
        UsageError: for codes whose blocks are not those of the part of the parameter that lies here.
    """
    dtype, (codes, absmax) = storage.dtypes[0], keys(name, coded)
    kept = state.get(name)
    if isinstance(state.get(codes), torch.Tensor) and not isinstance(kept, torch.Tensor):
        _check_blocks(param, state, codes, absmax)
        if storage.kind == "blockwise":
            for key in (codes, absmax):
                state[key] = state[key].to(param.device)
            return
        kept = value(state, name, coded)
    if storage.kind != "blockwise":
        state.pop(codes, None)
        state.pop(absmax, None)
        if isinstance(kept, torch.Tensor):
            state[name] = kept.to(param.device, dtype)
        else:
            state[name] = torch.full_like(param, initial, dtype=dtype, memory_format=torch.preserve_format)
        return
    state.pop(name, None)
    here = local(param.detach())
    if isinstance(kept, torch.Tensor):
        laid = torch.empty_like(here, dtype=torch.float32, memory_format=torch.preserve_format)
        new, state[absmax] = quantize(laid.copy_(local(kept)), storage)
    else:
        zero = dynamic_map(storage).tolist().index(0.0)
        new = torch.full_like(here, zero, dtype=torch.uint8, memory_format=torch.preserve_format)
        state[absmax] = torch.zeros(blocks_of(here.numel()), dtype=torch.float32, device=here.device)
    state[codes] = rewrapped(new, param)


def value(state: dict[str, Any], name: str, storage: Storage) -> torch.Tensor:
    """A moment that is kept as codes, as float32: cut and laid out as they are. Quantized again it gives the same."""
    codes, absmax = (state[key] for key in keys(name, storage))
    return rewrapped(widened(local(codes), absmax.to(codes.device), storage), codes)


def parts(states: list[dict[str, Any]], name: str, storage: Storage) -> tuple[list[torch.Tensor], ...]:
    """The columns of a moment in a table."""
    tensors = [[state[key] for state in states] for key in keys(name, storage)]
    if storage.kind == "blockwise":
        tensors.append([map_on(storage, states[0][keys(name, storage)[0]].device)] * len(states))
    return tuple(tensors)


def _check_blocks(param: torch.Tensor, state: dict[str, Any], codes: str, absmax: str) -> None:
    here, found = local(state[codes]), state.get(absmax)
    if here.dtype is torch.uint8 and isinstance(found, torch.Tensor) and found.numel() == blocks_of(here.numel()):
        return
    number = found.numel() if isinstance(found, torch.Tensor) else "no"
    raise UsageError(
        f"{codes} of a parameter of shape {tuple(param.shape)} has {here.numel()} elements of {here.dtype} here, which "
        f"need {blocks_of(here.numel())} numbers in {absmax}; it has {number}. 8-bit state cannot be cut anew. The "
        "state_dict() of an optimizer with sharded parameters has float32 moments, which can."
    )
