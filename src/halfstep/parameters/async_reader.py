"""Reads of device values on the host without waiting for the device.

The loss scaler posts the numbers for its messages when it queues a step. It reads them at a later step, when the device
has computed them.
"""

from __future__ import annotations

import ctypes
from collections import deque

import torch

__all__ = ["AsyncReader", "capturing"]


def capturing(device: torch.device) -> bool:
    """True while a CUDA graph is captured on the current stream, so that the host can neither read nor cache values."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Slot:
    """Host memory for one row of numbers, and a device event that completes when the numbers have arrived."""

    __slots__ = ("device", "numbers", "passed", "targets")

    def __init__(self, device: torch.device, width: int) -> None:
        self.device = device
        # Pageable memory would make the copy wait for the device.
        host = torch.empty(width, dtype=torch.float32, device="cpu", pin_memory=device.type != "cpu")
        self.targets = host.unbind()
        # The same memory, without torch: tools that count synchronizations count each read of a tensor.
        self.numbers = (ctypes.c_float * width).from_address(host.data_ptr())
        self.passed = None if device.type == "cpu" else torch.Event(device)


class AsyncReader:
    """A queue of rows of 0-dim tensors.

    ``post`` copies a row into host memory in the order of the device's work, without waiting; ``poll`` returns the
    rows that have arrived, oldest first, as plain floats. A row posted in one step arrives before the next step unless
    the host runs further ahead. ``post`` does nothing while a CUDA graph is captured.

    Args:
        width: the number of tensors in a row.

    Attributes:
        queue: the rows that ``poll`` has not returned yet.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self.queue: deque[_Slot] = deque()
        self._free: list[_Slot] = []

    def __reduce__(self) -> tuple[type[AsyncReader], tuple[int]]:
        """Copy and pickle as an empty reader, because posted rows belong to this reader."""
        return AsyncReader, (self._width,)

    def post(self, *row: torch.Tensor) -> None:
        """Queue a row of ``width`` 0-dim float32 tensors, all on one device."""
        device = row[0].device
        if capturing(device):
            return
        if self._free and self._free[-1].device != device:
            self._free.clear()
        slot = self._free.pop() if self._free else _Slot(device, self._width)
        for target, source in zip(slot.targets, row, strict=True):
            target.copy_(source, non_blocking=True)
        if slot.passed is not None:
            slot.passed.record(torch.accelerator.current_stream(device))
        self.queue.append(slot)

    def poll(self, *, wait: bool = False) -> list[tuple[float, ...]]:
        """Return the rows that have arrived since the last call; with ``wait``, wait for all posted rows."""
        arrived = []
        while self.queue:
            slot = self.queue[0]
            if slot.passed is not None and wait:
                slot.passed.synchronize()
            elif slot.passed is not None and not slot.passed.query():
                break
            self.queue.popleft()
            arrived.append(tuple(slot.numbers))
            self._free.append(slot)
        return arrived
