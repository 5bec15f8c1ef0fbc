"""Notes on tensors that do not keep the tensors alive."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

import torch

__all__ = ["Notes"]

T = TypeVar("T")


class Notes(Generic[T]):
    """Notes on tensors, each for the lifetime of its tensor.

    Args:
        stay: True to keep a note when its tensor is written to.
    """

    def __init__(self, *, stay: bool) -> None:
        self._stay = stay
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], int, T]] = {}

    def add(self, tensor: torch.Tensor, note: T) -> None:
        """Store a note on a tensor."""
        self._found[id(tensor)] = weakref.ref(tensor), self._version(tensor), note

    def get(self, tensor: Any) -> T | None:
        """Return the note on a tensor; None if there is none."""
        found = self._found.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != self._version(tensor):
            return None
        return found[2]

    def clear(self) -> None:
        """Remove all notes."""
        self._found.clear()

    def _version(self, tensor: Any) -> int:
        return -1 if self._stay or tensor.is_inference() else int(tensor._version)
