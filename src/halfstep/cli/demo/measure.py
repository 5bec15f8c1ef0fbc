"""The demo's measurements of time and memory."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...casting.containers import tensors_in
from ...torch_internals.torch_compat import TorchDispatchMode

__all__ = ["now", "peak_bytes"]


def now(device: torch.device) -> float:
    """Return the time in seconds after waiting for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_bytes(step: Callable[[], object], device: torch.device, held: int) -> int:
    """Run a training step and return the peak memory of tensors on a device, including memory held before the step.

    On CUDA the allocator counts it. On a CPU this function counts the results of all ops for as long as their memory
    lives. The temporary memory of a kernel is in the first count and not in the second.

    Args:
        step: runs the step.
        device: the device of the step.
        held: the bytes held before the step; see ``halfstep.memory``.
    """
    if device.type == "cuda":
        others = torch.cuda.memory_allocated(device) - held
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - others
    with _Results() as results:
        step()
    return held + int(results.most)


class _Results(TorchDispatchMode):
    """Counts the bytes of live memory that ops allocated.

    Attributes:
        most: the peak of this count.
    """

    only_watches = True  # so that casts of weights stay cached

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        for tensor in tensors_in(args, kwargs or {}):
            self._known.add(tensor.untyped_storage())  # existing memory, which no op allocated
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.most = max(self.most, self._now)
        return result

    def _free(self, size: int) -> None:
        self._now -= size
