"""Read numbers of a device on the host without waiting for the device.

The loss scaler posts the numbers for its messages when a step is queued. It reads them at a later step, when the device
has computed them long since.
"""

from __future__ import annotations

import ctypes
from collections import deque

import torch

__all__ = ["AsyncReader", "capturing"]


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded on the current stream: nothing can be read or cached for later then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


class _Slot:
    """Host memory for one row of numbers, and an event of the device that says when they are there."""

    __slots__ = ("device", "numbers", "passed", "targets")

    def __init__(self, device: torch.device, width: int) -> None:
        self.device = device
        # Pageable memory would make the copy wait for the device.
        host = torch.empty(width, dtype=torch.float32, device="cpu", pin_memory=device.type != "cpu")
        self.targets = host.unbind()
        # The same memory, without torch: reading a tensor counts as a wait wherever waits are counted.
        self.numbers = (ctypes.c_float * width).from_address(host.data_ptr())
        self.passed = None if device.type == "cpu" else torch.Event(device)


class AsyncReader:
    """A queue of rows of 0-dim tensors.

    ``post`` copies a row into host memory in the order of the device's work, without waiting; ``poll`` hands out the
    rows that have arrived, oldest first, as plain floats. A row posted in one step is there in the next unless the
    host runs further ahead than that. While a CUDA graph is captured nothing is posted.

    Args:
        width: how many numbers a row has.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._queue: deque[_Slot] = deque()
        self._free: list[_Slot] = []

    def __reduce__(self) -> tuple[type[AsyncReader], tuple[int]]:
        """Copies and pickles start empty: the rows on their way belong to this reader."""
        return AsyncReader, (self._width,)

    def post(self, *row: torch.Tensor) -> None:
        """Queue a row of ``width`` 0-dim float32 tensors, all on one device."""
        device = row[0].device
        if capturing(device):
            return
        slot = self._free.pop() if self._free else _Slot(device, self._width)
        if slot.device != device:
            self._free.clear()
            slot = _Slot(device, self._width)
        for target, source in zip(slot.targets, row, strict=True):
            target.copy_(source, non_blocking=True)
        if slot.passed is not None:
            slot.passed.record(torch.accelerator.current_stream(device))
        self._queue.append(slot)

    def poll(self, *, wait: bool = False) -> list[tuple[float, ...]]:
        """The rows that have arrived since the last call; with ``wait`` all that were posted."""
        arrived = []
        while self._queue:
            slot = self._queue[0]
            if slot.passed is not None:
                if wait:
                    slot.passed.synchronize()
                elif not slot.passed.query():
                    break
            self._queue.popleft()
            arrived.append(tuple(slot.numbers))
            self._free.append(slot)
        return arrived
