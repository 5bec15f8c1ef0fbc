"""16-bit copies of fp32 weights, made once and used until the weight changes."""

from __future__ import annotations

import weakref

import torch

__all__ = ["WeightCache"]

_Entry = tuple[int, torch.dtype, bool, torch.Tensor, "weakref.ref[torch.Tensor]"]


class WeightCache:
    """The casts of leaf tensors. An entry lives as long as its weight and is good for one version of it.

    A weight that was written in place has another version, so it is cast anew. Under ``no_grad`` any cast will do;
    with gradients on, only one that autograd follows back to the weight.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self.casts = 0

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget every copy."""
        self._entries.clear()

    def get(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight in ``dtype``, from the cache if it has not changed."""
        key = id(weight)
        entry = self._entries.get(key)
        if (
            entry is not None
            and entry[0] == weight._version
            and entry[1] is dtype
            and (not torch.is_grad_enabled() or entry[2] == weight.requires_grad)
        ):
            return entry[3]
        self.casts += 1
        cast = weight.to(dtype)
        if weight.is_inference() or torch._C._functorch.peek_interpreter_stack() is not None:
            return cast
        entries = self._entries
        gone = weakref.ref(weight, lambda _: entries.pop(key, None))
        entries[key] = (weight._version, dtype, cast.requires_grad, cast, gone)
        return cast
