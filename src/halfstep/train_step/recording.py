"""One recording of launches on a device, and the places where recordings leave gradients for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

__all__ = ["CudaGraph", "GradientSlot"]

T = TypeVar("T")


class CudaGraph:
    """One recording of what a function launches on the current stream.

    Args:
        pool: the memory of other recordings, which never run at the same time; None for new memory.

    Attributes:
        pool: its memory, after ``record``.
    """

    def __init__(self, pool: Any = None) -> None:
        self.pool = pool
        self._graph = torch.cuda.CUDAGraph()

    @staticmethod
    def obstacle(device: torch.device) -> str | None:
        """The reason why nothing can be recorded on a device; None if it can."""
        return None if device.type == "cuda" else f"CUDA graphs run on CUDA, and the parameters are on {device}"

    @staticmethod
    @contextmanager
    def stream(device: torch.device, stream: Any) -> Iterator[Any]:
        """Work on a stream of its own, made if it is None, in the order of the current stream's work."""
        stream = stream or torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield stream
        finally:
            current.wait_stream(stream)

    def record(self, function: Callable[[], T]) -> T:
        """Record a function; it does not run.

        Raises:
            RuntimeError: if it cannot be recorded, for example because it reads the device.
        """
        stream = torch.cuda.current_stream()
        # Other threads, such as those that pin memory for a DataLoader, may go on calling CUDA.
        with torch.cuda.graph(self._graph, pool=self.pool, stream=stream, capture_error_mode="thread_local"):
            result = function()
        self.pool = self._graph.pool()
        return result

    def replay(self) -> None:
        """Run what was recorded."""
        self._graph.replay()


@dataclass
class GradientSlot:
    """Gradients and overflow flag in fixed places."""

    grads: list[torch.Tensor | None]
    flag: torch.Tensor | None

    def accepts(self, grads: Sequence[torch.Tensor | None], flag: torch.Tensor | None) -> bool:
        """True for gradients of the kind that is kept here."""
        kinds = [None if g is None else (g.dtype, g.shape, g.stride()) for g in grads]
        own = [None if g is None else (g.dtype, g.shape, g.stride()) for g in self.grads]
        return kinds == own and (flag is None) == (self.flag is None)

    def take(self, grads: Sequence[torch.Tensor | None], flag: torch.Tensor | None) -> None:
        """Copy gradients and flag here, unless they are here."""
        pairs = [
            (a, b) for a, b in zip(self.grads, grads, strict=True) if a is not None and b is not None and a is not b
        ]
        if pairs:
            targets, sources = map(list, zip(*pairs, strict=True))
            torch._foreach_copy_(targets, sources)
        if self.flag is not None and flag is not None and flag is not self.flag:
            self.flag.copy_(flag)
