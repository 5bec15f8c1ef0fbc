"""The cache of 16-bit weights: each fp32 weight is cast once per call of the outermost model, or per block."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from ..torch_internals.torch_compat import dispatch_mode_count, functorch_level, has_recording_mode, jit_tracing_state
from .operands import MIN_ELEMENTS, Kept, Operand

__all__ = ["WeightCache"]

_Key = tuple[int, bool]
"""The ``id`` of the weight, and True if its copy is widened to fp32 again."""

_Entry = tuple[int, int, torch.dtype, bool, bool, "torch.Tensor | Operand", "weakref.ref[torch.Tensor]"]
"""The version and address of the weight at the cast, the dtype, True if the copy has a ``grad_fn``, True if it is an
inference tensor, the copy, and the weak reference that removes the entry when Python frees the weight."""

_MOST = 4096
"""The number of entries at which the cache is cleared: the graph of a cast keeps its weight alive, even if user code no
longer refers to it."""


class WeightCache:
    """The 16-bit casts of leaf tensors in one thread.

    The cache holds casts while a scope is open: a call of the outermost model, or an outermost block. It is cleared at
    the end of the scope, before a backward pass and after a step. So it need not detect the ways in which user code
    writes to weights between two calls. Within a scope a cast is valid for one version and one address of the weight: a
    weight that was written in place, or that got new memory, is cast again. Entries do not outlive their weights.

    Under ``no_grad`` any cast is valid; with gradients on, only a cast through which autograd reaches the weight. The
    cache stores nothing while ops are recorded (tracing, ``make_fx``, ``torch.func``), because the recorder would treat
    a cached tensor as a constant.

    Args:
        scopes: the open scopes of the thread.

    Attributes:
        entries: the casts, by weight.
        clear: removes every cast.
        casts: the number of casts made.
    """

    def __init__(self, scopes: Sequence[object]) -> None:
        self._scopes = scopes
        self.entries: dict[_Key, _Entry] = {}
        self.clear = self.entries.clear
        self.casts = 0

    def cast(
        self, weight: torch.Tensor, dtype: torch.dtype, wide: bool = False, kept: Kept | None = None
    ) -> torch.Tensor:
        """Return a weight in ``dtype``, from the cache if the weight has not changed.

        Args:
            weight: a leaf.
            dtype: torch.float16 or torch.bfloat16.
            wide: True to return the rounded values in fp32, for emulated products.
            kept: the dictionary that gets the operand of an emulated product; None caches the fp32 tensor instead.
        """
        key, entries = (id(weight), wide), self.entries
        recording = (dispatch_mode_count() and has_recording_mode()) or jit_tracing_state()
        entry = None if recording else entries.get(key)
        if entry is not None:
            version, address, cast_to, has_graph, inference, cast, _ = entry
            if (
                cast_to is dtype
                and version == weight._version
                and address == weight.data_ptr()
                and (has_graph == weight.requires_grad or not torch.is_grad_enabled())
                and (not inference or torch.is_inference_mode_enabled())
            ):
                if not isinstance(cast, Operand):
                    return cast
                if kept is not None:
                    kept[id(cast.wide)] = cast
                return cast.read()
        temporary = not self._scopes or recording or functorch_level() is not None or weight.is_inference()
        self.casts += 1
        cast = weight.to(dtype)
        operand = None
        if wide and kept is not None and cast.numel() >= MIN_ELEMENTS:
            operand = Operand(cast, shared=not temporary)
            cast = operand.read()
            kept[id(cast)] = operand
        elif wide:
            cast = cast.float()
        if not temporary:
            if len(entries) >= _MOST:
                self.clear()
            found = weight._version, weight.data_ptr(), dtype, cast.requires_grad, cast.is_inference()
            entries[key] = (*found, operand or cast, weakref.ref(weight, lambda _: entries.pop(key, None)))
        return cast
