"""Buffers that stay fp32 among 16-bit weights: a cast would destroy their values, or the model updates them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from ..core.dtypes import is_half
from ..parameters.table import Master, record_of
from ..torch_internals.torch_compat import buffers_of
from .first_passes import FirstPasses

__all__ = ["POSITIONS", "UpdatedBuffers", "buffers_to_keep"]


POSITIONS = re.compile(r"inv_freq|^(freqs?|positions?|timesteps?|timescale)$")
"""Names of buffers that hold frequencies or positions, whose rounding error an angle multiplies by the position."""


def buffers_to_keep(module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the buffers of one module that a cast to a 16-bit dtype would destroy. Reads the device.

    A buffer is kept if one of these is true:

    - A value would become 0 or inf.
    - Its name says that it holds frequencies or positions, and it is not persistent.
    - The module has only buffers that are not persistent, such as the tables of rotary embeddings.
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
    """True if a value in a buffer becomes 0 or inf in a dtype."""
    if type(buffer) is not torch.Tensor or buffer.is_meta:
        return False
    cast = buffer.to(dtype)
    return bool((((cast == 0) & (buffer != 0)) | (cast.isinf() & buffer.isfinite())).any())


class _KeptBuffer(Master):
    """The fp32 value of a buffer from before its cast. A copy of the model copies both."""

    def __init__(self, buffer: torch.Tensor, value: torch.Tensor) -> None:
        super().__init__(buffer)
        self.value = value

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.param, self.value)

    def read(self) -> torch.Tensor:
        """Return the buffer in fp32: each element from the kept value, unless the buffer was written to."""
        return _widened(self.param, self.value)

    def write(self, value: torch.Tensor) -> torch.Tensor:
        """Keep a loaded value, and return its cast."""
        self.value = value.detach().float().clone()
        return value.to(self.param.dtype)


class UpdatedBuffers:
    """Finds the buffers that a model updates in its first training pass, such as running means and codebooks, and
    converts them to fp32.

    16 bits would lose updates of less than half an ulp. The buffers that the pass changes become fp32 when the next
    training pass begins, because the backward pass in between may need the 16-bit values. A buffer that was updated in
    place keeps its identity, for DistributedDataParallel. Until then this object keeps the fp32 values of all buffers
    that were cast (``master_registry``), so that ``state_dict`` saves and loads them.

    Attributes:
        kept: the fp32 value of each buffer from before the cast.
        before: the buffers at the begin of the first training pass, with their versions and values.
        changed: the buffers that the pass changed, as they were; None before its end.
    """

    replicated = False

    def __init__(self, kept: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self.kept = {buffer: _KeptBuffer(buffer, value) for buffer, value in kept.items()}
        self.before: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self.changed: dict[str, torch.Tensor] | None = None
        for buffer in self.kept:
            record_of(buffer).register(self)

    def find(self, buffer: torch.Tensor) -> Master | None:
        """Return the fp32 value of a buffer; None if it was not kept."""
        return self.kept.get(buffer)

    def begin(self, model: nn.Module, passes: FirstPasses) -> bool:
        """Begin a training pass; return True if the dtypes of all buffers are final from now on."""
        if self.changed is None:
            named = model.named_buffers(remove_duplicate=False)
            self.before = {path: (b, b._version, b.clone()) for path, b in named if b in self.kept and is_half(b)}
            return False
        for path, old in self.changed.items():
            buffer = model.get_buffer(path)
            wide = _widened(buffer, self.kept[old].value)
            if buffer is old:
                buffer.data = wide
            else:
                owner, _, name = path.rpartition(".")
                setattr(model.get_submodule(owner), name, wide)
            passes.ended.clear()  # ops may now meet new pairs of dtypes
        passes.fp32_buffers += tuple(self.changed)
        return True

    def end(self, model: nn.Module) -> None:
        """End the first training pass: find the buffers that it changed."""
        now = dict(model.named_buffers(remove_duplicate=False))
        self.changed = {
            path: b
            for path, (b, version, value) in self.before.items()
            if path in now and (now[path] is not b or b._version != version or not torch.equal(b, value))
        }
        self.before = {}


def _widened(buffer: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    if kept.shape != buffer.shape:
        return buffer.float()
    kept = kept.to(buffer.device)
    return torch.where(buffer == kept.to(buffer.dtype), kept, buffer.float())
