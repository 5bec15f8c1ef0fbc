"""The demo's measurements of time and memory."""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch

from ...casting.containers import tensors_in
from ...torch_internals.torch_compat import TorchDispatchMode

__all__ = ["PeakMemory", "now"]


def now(device: torch.device) -> float:
    """Return the time in seconds after waiting for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class PeakMemory:
    """The peak memory of tensors on a device during a training step (a block), including memory held before it.

    On CUDA the allocator counts it. On a CPU this class counts the results of all ops for as long as their memory
    lives. The temporary memory of a kernel is in the first count and not in the second.

    Args:
        device: the device of the step.
        held: the bytes held before the step; see ``halfstep.memory``.
    """

    def __init__(self, device: torch.device, held: int) -> None:
        self.device = device
        self.bytes = self.held = held
        self._results = _Results() if device.type != "cuda" else None

    def __enter__(self) -> PeakMemory:
        if self._results is not None:
            self._results.__enter__()  # type: ignore[no-untyped-call]
        else:
            self._others = torch.cuda.memory_allocated(self.device) - self.held
            torch.cuda.reset_peak_memory_stats(self.device)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._results is not None:
            self._results.__exit__(*exc)  # type: ignore[no-untyped-call]
            self.bytes = self.held + self._results.most
        else:
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._others


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
