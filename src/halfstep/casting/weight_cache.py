"""16-bit copies of fp32 weights, made once and used until the weight changes."""

from __future__ import annotations

import sys
import weakref

import torch

from ..core.torch_compat import dispatch_mode_at, dispatch_mode_count, functorch_level, has_storage, jit_tracing_state
from . import weight_copies

__all__ = ["WeightCache", "clear_in_all_threads"]

_Key = tuple[int, bool]
"""The identity of the weight, and whether the copy is widened again."""

_Entry = tuple[int, int, torch.dtype, bool, bool, torch.Tensor, "weakref.ref[torch.Tensor]"]
"""The version and address of the weight when it was cast, the dtype, whether the copy has a gradient function, whether
it was made in inference mode, the copy, and the weak reference that drops the entry with the weight."""

_ONLY_THE_GRAPH = 3
"""How many references a weight has that only a graph holds: the graph's, a variable's and that of the call."""

_is_grad_enabled = torch.is_grad_enabled

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_clears = 0


def clear_in_all_threads() -> None:
    """Have the cache of every thread forget its copies at its next use."""
    global _clears
    _clears += 1


def _is_recorded() -> bool:
    """Whether a dispatch mode may record ops. The modes of ``numerics`` only watch them."""
    modes = (dispatch_mode_at(i) for i in range(dispatch_mode_count()))
    return any(not getattr(mode, "only_watches", False) for mode in modes)


class WeightCache:
    """The 16-bit copies of leaf tensors. An entry lives as long as its weight and is good for one version of it.

    A weight that was written in place has another version, and one that got other memory (``param.data = x``) another
    address: either is cast anew. So is a weight whose memory someone else holds (``param.data`` kept for later, a numpy
    array), for what is written there gives it no new version. Under ``no_grad`` any copy is good; with gradients on,
    only one that autograd follows back to the weight. Nothing is kept while operations are recorded (tracing,
    ``make_fx``, ``torch.func``), for a kept tensor would be recorded as a constant.

    Attributes:
        casts: how many casts it has made.
    """

    def __init__(self) -> None:
        self._entries: dict[_Key, _Entry] = {}
        self._sweep_at = 32
        self._clears = _clears
        self.casts = 0

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget every copy."""
        self._entries.clear()

    def forget(self, tensor: torch.Tensor) -> None:
        """Forget the copies of the weights that have the memory of a tensor, also those that optimizers write."""
        self._entries.pop((id(tensor), False), None)
        self._entries.pop((id(tensor), True), None)
        if type(tensor) not in _PLAIN or not has_storage(tensor):  # a sparse tensor and one in a transform have none
            return
        storage = tensor.untyped_storage()
        weight_copies.forget_storage(storage)
        if self._entries:
            start = storage.data_ptr()
            end = start + storage.nbytes()
            for key in [key for key, entry in self._entries.items() if start <= entry[1] < end]:
                del self._entries[key]

    def get(self, weight: torch.Tensor, dtype: torch.dtype, wide: bool = False) -> torch.Tensor:
        """The weight in ``dtype``, from the cache if the weight has not changed.

        Args:
            weight: a leaf.
            dtype: torch.float16 or torch.bfloat16.
            wide: give the rounded numbers in fp32, for emulated products.
        """
        if self._clears != _clears:
            self.clear()
            self._clears = _clears
        entry = self._entries.get((id(weight), wide))
        if entry is not None:
            version, address, kept, has_graph, inference, cast, _ = entry
            if (
                kept is dtype
                and version == weight._version
                and address == weight.data_ptr()
                and (has_graph == weight.requires_grad or not _is_grad_enabled())
                and (not inference or torch.is_inference_mode_enabled())
                and not ((dispatch_mode_count() and _is_recorded()) or jit_tracing_state())
                and not weight_copies.held_by_others(weight)
            ):
                return cast
        return self._make(weight, dtype, wide)

    def _make(self, weight: torch.Tensor, dtype: torch.dtype, wide: bool) -> torch.Tensor:
        recording = (dispatch_mode_count() and _is_recorded()) or jit_tracing_state() or functorch_level() is not None
        temporary = recording or weight.is_inference()
        cast = None if temporary else weight_copies.fresh_copy(weight, dtype)
        if cast is None:
            self.casts += 1
            cast = weight.to(dtype)
            if temporary or weight_copies.held_by_others(weight):  # who may write to it, and be gone when that is asked
                return cast.float() if wide else cast
            weight_copies.keep_cast(weight, cast)
        if wide:
            cast = cast.float()
        if len(self._entries) >= self._sweep_at:
            self._sweep()
        key, entries = (id(weight), wide), self._entries
        gone = weakref.ref(weight, lambda _: entries.pop(key, None))
        address = weight.data_ptr()
        entries[key] = (weight._version, address, dtype, cast.requires_grad, cast.is_inference(), cast, gone)
        return cast

    def _sweep(self) -> None:
        """Drop the copies of weights that are kept alive by nothing but the graph of their copy."""
        for key, entry in list(self._entries.items()):
            weight = entry[-1]()
            if weight is None or sys.getrefcount(weight) <= _ONLY_THE_GRAPH:
                self._entries.pop(key, None)
            del weight
        self._sweep_at = 2 * len(self._entries) + 32
