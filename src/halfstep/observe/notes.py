"""Notes on tensors, which hold none of them."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import torch

__all__ = ["Notes"]

T = TypeVar("T")


class Notes(Generic[T]):
    """Notes on tensors, for as long as these live.

    Args:
        stay: whether a note stays when somebody writes to its tensor.
    """

    def __init__(self, *, stay: bool) -> None:
        self._stay = stay
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], int, T]] = {}

    def add(self, tensor: torch.Tensor, note: T) -> None:
        """Remember a note on a tensor."""
        self._found[id(tensor)] = weakref.ref(tensor), self._version(tensor), note

    def get(self, tensor: Any) -> T | None:
        """The note on a tensor; None if there is none."""
        found = self._found.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != self._version(tensor):
            return None
        return found[2]

    def clear(self) -> None:
        """Forget all."""
        self._found.clear()

    def _version(self, tensor: Any) -> int:
        return -1 if self._stay or tensor.is_inference() else int(tensor._version)
