"""Reads of device numbers for all observers: copies to the host for which the training does not wait."""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch

__all__ = ["Reading"]


class Reading:
    """Tensors that are read together, in one copy per device and dtype.

    Args:
        *tensors: the tensors, on any device.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._tensors = list(tensors)
        self._events: list[torch.Event] = []
        self._lists: list[list[float]] = []

    def ask(self, tensor: torch.Tensor) -> int:
        """Add a tensor, before ``send``; returns its index."""
        self._tensors.append(tensor.detach())
        return len(self._tensors) - 1

    def send(self) -> Reading:
        """Queue the copies behind the work of the devices."""
        groups: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for i, tensor in enumerate(self._tensors):
            if tensor.device.type != "cpu":
                groups[tensor.device, tensor.dtype].append(i)
        for (device, dtype), places in groups.items():
            found = [self._tensors[i] for i in places]
            sizes = [tensor.numel() for tensor in found]
            host = torch.empty(sum(sizes), dtype=dtype, device="cpu", pin_memory=True)
            host.copy_(torch.cat([tensor.reshape(-1) for tensor in found]), non_blocking=True)
            self._events.append(torch.Event(device))
            self._events[-1].record(torch.accelerator.current_stream(device))
            for i, tensor, part in zip(places, found, host.split(sizes), strict=True):
                self._tensors[i] = part.view(tensor.shape)
        return self

    @property
    def ready(self) -> bool:
        """True if every copy that was sent has arrived."""
        return all(event.query() for event in self._events)

    def get(self) -> list[torch.Tensor]:
        """Wait for the copies, and return the tensors on the host."""
        for event in self._events:
            event.synchronize()
        return self._tensors

    def __getitem__(self, place: int) -> list[float]:
        """Return the numbers of the tensor at an index. The first call converts all tensors to lists at once."""
        if not self._lists:
            numbers = iter(torch.cat([tensor.reshape(-1).float() for tensor in self.get()]).tolist())
            self._lists = [list(itertools.islice(numbers, tensor.numel())) for tensor in self._tensors]
        return self._lists[place]
