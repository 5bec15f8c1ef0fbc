"""16-bit casts of fp32 weights, made once in a call of the outermost model, or in a block."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from ..torch_internals.torch_compat import dispatch_mode_count, functorch_level, has_recording_mode, jit_tracing_state
from .operands import MIN_ELEMENTS, Kept, Operand

__all__ = ["WeightCache"]

_Key = tuple[int, bool]
"""The identity of the weight, and whether the copy is widened again."""

_Entry = tuple[int, int, torch.dtype, bool, bool, "torch.Tensor | Operand", "weakref.ref[torch.Tensor]"]
"""The version and address of the weight when it was cast, the dtype, whether the copy has a gradient function, whether
it was made in inference mode, the copy, and the weak reference that drops the entry with the weight."""

_MOST = 4096
"""The number of entries at which all are forgotten: the graph of a cast keeps alive a weight that has no other
holder."""

_is_grad_enabled = torch.is_grad_enabled


class WeightCache:
    """The 16-bit casts of leaf tensors, in one thread.

    A cast is kept while a scope is open: during a call of the outermost model, or during an outermost block. It is
    forgotten at the end of that scope, before a backward pass and after a step. So no way of writing to a weight
    between two calls has to be noticed. Meanwhile a cast is good for one version of the weight and one address: a
    weight that was written in place, or that got other memory, is cast anew. An entry lives no longer than its weight.

    Under ``no_grad`` any cast is good; with gradients on, only one that autograd follows back to the weight. Nothing is
    kept while operations are recorded (tracing, ``make_fx``, ``torch.func``), for a kept tensor would be recorded as a
    constant.

    Args:
        scopes: the open scopes of the thread.

    Attributes:
        clear: forgets every cast.
        casts: number of casts made.
    """

    def __init__(self, scopes: Sequence[object]) -> None:
        self._scopes = scopes
        self._entries: dict[_Key, _Entry] = {}
        self.clear = self._entries.clear
        self.casts = 0

    def __len__(self) -> int:
        return len(self._entries)

    def cast(
        self, weight: torch.Tensor, dtype: torch.dtype, wide: bool = False, kept: Kept | None = None
    ) -> torch.Tensor:
        """The weight in ``dtype``, as it was cast before if the weight has not changed.

        Args:
            weight: a leaf.
            dtype: torch.float16 or torch.bfloat16.
            wide: give the rounded numbers in fp32, for emulated products.
            kept: gets the operand of the product that reads them; None keeps them in fp32.
        """
        key, entries = (id(weight), wide), self._entries
        recording = (dispatch_mode_count() and has_recording_mode()) or jit_tracing_state()
        entry = None if recording else entries.get(key)
        if entry is not None:
            version, address, cast_to, has_graph, inference, cast, _ = entry
            if (
                cast_to is dtype
                and version == weight._version
                and address == weight.data_ptr()
                and (has_graph == weight.requires_grad or not _is_grad_enabled())
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
