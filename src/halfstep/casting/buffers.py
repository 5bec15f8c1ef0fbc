"""Buffers that stay fp32 in a model of 16-bit weights, because a cast would destroy what they hold."""

from __future__ import annotations

import re

import torch
from torch import nn

from ..core.torch_compat import buffers_of

__all__ = ["POSITIONS", "buffers_to_keep"]

POSITIONS = re.compile(r"inv_freq|^(freqs?|positions?|timesteps?|timescale)$")
"""Names of buffers that hold frequencies or positions: an angle is off by their error times the position."""


def buffers_to_keep(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The buffers of one module that a cast to a 16-bit dtype would destroy. Reads the device.

    - A number would become 0 or inf.
    - It holds frequencies or positions, by its name, and is not saved.
    - The module has nothing but buffers that are not saved, such as the tables of rotary embeddings.
    """
    if dtype.itemsize != 2:
        return {}
    found = {name: b for name, b in buffers_of(module).items() if b is not None and b.dtype is torch.float32}
    if not found:
        return {}
    saved = module.state_dict()
    constant = not saved and next(module.parameters(), None) is None
    return {
        name: buffer
        for name, buffer in found.items()
        if constant or (name not in saved and POSITIONS.search(name)) or _is_destroyed(buffer, dtype)
    }


def _is_destroyed(buffer: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a number of a buffer becomes 0 or inf in a dtype."""
    if type(buffer) is not torch.Tensor or buffer.is_meta:
        return False
    cast = buffer.to(dtype)
    return bool((((cast == 0) & (buffer != 0)) | (cast.isinf() & buffer.isfinite())).any())
