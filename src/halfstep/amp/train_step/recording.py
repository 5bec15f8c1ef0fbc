"""Recordings of kernel launches, and the memory in which recordings exchange gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

__all__ = ["CudaGraph", "GradientSlot"]

T = TypeVar("T")


class CudaGraph:
    """A recording of the kernels that a function launches on the current stream.

    Args:
        pool: the memory pool of other recordings, which never run at the same time; None for a new pool.

    Attributes:
        pool: the memory pool of this recording, after ``record``.
    """

    def __init__(self, pool: Any = None) -> None:
        self.pool = pool
        self._graph = torch.cuda.CUDAGraph()

    @staticmethod
    def obstacle(device: torch.device) -> str | None:
        """Return the reason why nothing can be recorded on a device; None if recording works."""
        return None if device.type == "cuda" else f"CUDA graphs run on CUDA, and the parameters are on {device}"

    @staticmethod
    @contextmanager
    def stream(device: torch.device, stream: Any) -> Iterator[Any]:
        """Run the block on a separate stream (a new one for None), ordered with the current stream's work."""
        stream = stream or torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield stream
        finally:
            current.wait_stream(stream)

    def record(self, function: Callable[[], T]) -> T:
        """Record a function without running its kernels.

        Raises:
            RuntimeError: if the function cannot be recorded, for example because it reads the device.
        """
        stream = torch.cuda.current_stream()
        # Other threads, such as a DataLoader's pin-memory thread, may keep calling CUDA.
        with torch.cuda.graph(self._graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
            result = function()
        self.pool = self._graph.pool()
        return result

    def replay(self) -> None:
        """Run the recorded kernels."""
        self._graph.replay()


@dataclass
class GradientSlot:
    """Gradients and an overflow flag at fixed addresses."""

    grads: list[torch.Tensor | None]
    flag: torch.Tensor | None

    def accepts(self, grads: Sequence[torch.Tensor | None], flag: torch.Tensor | None) -> bool:
        """True if gradients have the dtypes, shapes and strides of this slot, so that it can hold them."""
        kinds = [None if g is None else (g.dtype, g.shape, g.stride()) for g in grads]
        own = [None if g is None else (g.dtype, g.shape, g.stride()) for g in self.grads]
        return kinds == own and (flag is None) == (self.flag is None)

    def take(self, grads: Sequence[torch.Tensor | None], flag: torch.Tensor | None) -> None:
        """Copy gradients and flag into the slot, except tensors that are already in it."""
        pairs = [
            (a, b) for a, b in zip(self.grads, grads, strict=True) if a is not None and b is not None and a is not b
        ]
        if pairs:
            targets, sources = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(targets, sources)
        if self.flag is not None and flag is not None and flag is not self.flag:
            self.flag.copy_(flag)
