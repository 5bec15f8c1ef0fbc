"""Buffers that are fp32 beside 16-bit weights: a cast would destroy what they hold, or the model updates them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from ..core.dtypes import is_half
from ..parameters.master_registry import register
from ..parameters.table import Master
from ..torch_internals.torch_compat import buffers_of
from .first_passes import FirstPasses

__all__ = ["POSITIONS", "UpdatedBuffers", "buffers_to_keep"]


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
    """True if a number of a buffer becomes 0 or inf in a dtype."""
    if type(buffer) is not torch.Tensor or buffer.is_meta:
        return False
    cast = buffer.to(dtype)
    return bool((((cast == 0) & (buffer != 0)) | (cast.isinf() & buffer.isfinite())).any())


class _KeptBuffer(Master):
    """The fp32 value of a buffer before it was cast. A copy of the model copies both."""

    def __init__(self, buffer: torch.Tensor, value: torch.Tensor) -> None:
        super().__init__(buffer)
        self.value = value

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.param, self.value)

    def read(self) -> torch.Tensor:
        """The buffer in fp32: with the digits that were kept, where its number is still the cast of these."""
        return _widened(self.param, self.value)

    def write(self, value: torch.Tensor) -> torch.Tensor:
        """Keep a value that is loaded."""
        self.value = value.detach().float().clone()
        return value.to(self.param.dtype)


class UpdatedBuffers:
    """Makes those buffers fp32 that a model updates in its first training pass: running means, codebooks, counters.

    16 bits would lose an update of less than half an ulp. The pass shows which buffers change; these become fp32 when
    the next training pass begins, as a backward pass may need them before in 16 bits. A buffer that was updated in
    place keeps its identity, for DistributedDataParallel. Until then this is the keeper of the fp32 values of all
    buffers that were cast (``master_registry``), so that ``state_dict`` saves and loads them.

    Attributes:
        kept: the fp32 value of each buffer before the cast.
        before: the buffers as the first training pass found them, with their versions and values.
        changed: the buffers that it has changed, as they were; None before its end.
    """

    replicated = False

    def __init__(self, kept: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self.kept = {buffer: _KeptBuffer(buffer, value) for buffer, value in kept.items()}
        self.before: dict[str, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self.changed: dict[str, torch.Tensor] | None = None
        register(self.kept, self)

    def find(self, buffer: torch.Tensor) -> Master | None:
        """The fp32 value of a buffer; None if it was not kept."""
        return self.kept.get(buffer)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer in fp32."""
        return self.kept[buffer].read()

    def begin(self, model: nn.Module, passes: FirstPasses) -> bool:
        """Begin a training pass; return True if buffers are in their last dtype from now on."""
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
            passes.ended.clear()  # other dtypes may meet from now on
        passes.spared += tuple(self.changed)
        return True

    def end(self, model: nn.Module) -> None:
        """The first training pass has ended."""
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
