"""The demo's measurements of time and memory."""

from __future__ import annotations

import time

import torch
from torch import nn

from ...stepping.attached import attached_to

__all__ = ["PeakMemory", "held_bytes", "now"]


def now(device: torch.device) -> float:
    """The time in seconds, once the device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, buffers, masters, gradients and optimizer state, each storage once."""
    held = [*model.parameters(), *model.buffers()]
    held += [tensor.grad for tensor in held if tensor.grad is not None]
    attached = attached_to(optimizer)
    if attached is not None:
        held += [master for _, master in attached.keeper.started()]
    held += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in held}
    return sum(storage.nbytes() for storage in storages.values())


class PeakMemory:
    """The peak of CUDA memory from now on, less what others hold now: all that is allocated but ``own`` bytes."""

    def __init__(self, device: torch.device, own: int) -> None:
        self.device = device
        self.others = 0
        if device.type == "cuda":
            self.others = torch.cuda.memory_allocated(device) - own
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> int | None:
        """Bytes, or None on a device that keeps no such count."""
        return torch.cuda.max_memory_allocated(self.device) - self.others if self.device.type == "cuda" else None
