"""The moments in the state of a parameter: one tensor each, or 8-bit codes with the largest magnitude of each block.

In ``optimizer.state[p]`` codes and magnitudes are ``exp_avg_codes`` (uint8, like the parameter) and ``exp_avg_absmax``
(float32, one number per block of 256 elements, in the order of the codes in memory). They have separate names, because
torch's classes would silently cast codes to numbers. Blocks of a sharded parameter divide its local part.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import UsageError
from ..kernels.blockwise import blocks_of, dynamic_map, quantize, widened
from ..kernels.shards import local, rewrapped
from ..kernels.storage import Storage

__all__ = ["adapt", "keys", "parts", "value"]


def keys(name: str, storage: Storage) -> tuple[str, ...]:
    """Return the keys of a moment's tensors in the state of a parameter."""
    return (f"{name}_codes", f"{name}_absmax") if storage.kind == "blockwise" else (name,)


def adapt(
    param: torch.Tensor, state: dict[str, Any], name: str, initial: float, storage: Storage, coded: Storage
) -> None:
    """Convert a moment to the form of ``storage``, keeping its value.

    Args:
        param: the parameter.
        state: ``optimizer.state[param]``.
        name: the name of the moment.
        initial: the value of a new moment; 0 if it may be kept in 8 bits.
        storage: the target form.
        coded: the form of existing codes.

    Raises:
        UsageError: for codes whose blocks do not divide the local part of the parameter.
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
    """Read a moment from its codes as float32, sharded and laid out like the codes; quantizing restores the codes."""
    codes, absmax = (state[key] for key in keys(name, storage))
    return rewrapped(widened(local(codes), absmax.to(codes.device), storage), codes)


def parts(states: list[dict[str, Any]], name: str, storage: Storage) -> tuple[list[torch.Tensor], ...]:
    """Return the columns of a moment for a table."""
    tensors = [[state[key] for state in states] for key in keys(name, storage)]
    if storage.kind == "blockwise":
        tensors.append([dynamic_map(storage, states[0][keys(name, storage)[0]].device)] * len(states))
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
