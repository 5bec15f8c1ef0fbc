"""The tensors that an emulated product keeps for its backward pass: 16-bit operands, not the fp32 ones of its kernel.

A widened operand says no more than the 16-bit tensor that it was made of. So the latter is kept, and widened again when
autograd asks for it: the backward pass gets the same numbers with the same strides. One pair of hooks on saved tensors
around the kernel does this for every op. Hooks of the user's that are on meanwhile get the 16-bit tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.oplists.tables import OPS, row_of
from ..torch_internals import torch_compat

__all__ = ["MIN_ELEMENTS", "STEPWISE", "Kept", "Operand", "run_node", "run_product", "version_of"]

MIN_ELEMENTS = 2**12
"""A smaller operand stays wide: its 16 KiB are not worth the calls of the hooks."""

_REARRANGING = ("product", "convolution")
"""Classes of ops that may save a copy of an operand in another order. Ops of another class save what they have
computed."""

STEPWISE = {op.name for op in OPS.values() if op.kind == "recurrent"} - {"lstm", "mkldnn_rnn_layer"}
"""Recurrent ops that torch runs step by step: they keep what they compute in each step, and not much else. With hooks
they kept 0.06 to 0.15 of fp32's bytes less, and took 1.15 to 1.25 times as long (GRU and LSTMCell on a CPU)."""

_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")

_View = tuple[torch.Size, tuple[int, ...], int]
"""Sizes, strides and offset of a view of the widened operand."""


class Operand:
    """A 16-bit tensor that a product reads in fp32.

    Args:
        half: the 16-bit tensor, in its graph.
        shared: True if other products read the same widened tensor, as they do with a weight.
        wide: the widened tensor, if it is there already.

    Attributes:
        half: out of the graph, with the memory and the version that it has there.
        wide: the fp32 tensor, in the graph, while a product runs. The widened tensor of a weight stays, because all
            products read it and gradients add up there in fp32. It has no memory between the first product and the
            second.
    """

    __slots__ = ("_again", "_reads", "half", "saves", "shared", "wide")

    def __init__(self, half: Tensor, shared: bool = False, wide: Tensor | None = None) -> None:
        self.half = half.detach()
        self.wide = half.float() if wide is None else wide
        self.shared = shared
        self.saves = 0
        self._reads = 0
        self._again: Tensor | None = None

    def read(self) -> Tensor:
        """The widened tensor, for one product more."""
        self._reads += 1
        if self._reads > 1 and self.wide.shape != self.half.shape:
            self.wide.data = self.half.float()
        return self.wide

    def let_go(self) -> None:
        """Free the widened tensor after a product: autograd keeps this until the backward pass."""
        if not self.shared:
            del self.wide
        elif self._reads == 1 and type(self.wide) is Tensor:
            self.wide.data = _NOTHING

    def widened(self) -> Tensor:
        """The widened tensor as the backward pass needs it, which is kept for others if there were several products."""
        if self.saves < 2:
            return self.half.float()
        if self._again is None:
            self._again = self.half.float()
        return self._again


Kept = dict[int, Operand]
"""The operands of one product, by the identity of the widened tensor."""


class _Packed(NamedTuple):
    """The value that autograd keeps instead of a tensor.

    Attributes:
        kept: the operand of which the tensor is made again, or a tensor that is given back as it is.
        version: the version of ``kept``, which must not change.
        view: the place of the tensor in the widened operand; None if it is all of it.
    """

    kept: Operand | Tensor
    version: int | None
    view: _View | None = None


class _Handed(NamedTuple):
    """The value that autograd keeps if a hook of the user's has got the 16-bit tensor.

    Attributes:
        unpack: the user's other hook.
        packed: the argument of that hook.
        layout: sizes and strides of the widened operand; None gives back what the hook gives.
        view: as of ``_Packed``.
    """

    unpack: Callable[[Any], Tensor]
    packed: Any
    layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    view: _View | None = None


def run_product(call: Callable[[], Any], kept: Kept, half: torch.dtype, kind: str) -> Any:
    """Call an op with widened operands, and keep the 16-bit ones for its backward pass.

    Args:
        call: calls the op.
        kept: the operands among its arguments; empty afterwards.
        half: the 16-bit dtype.
        kind: the kind of the op; see ``core.oplists.tables.Op``.
    """
    try:
        if not torch.is_grad_enabled():
            return call()
        outer = torch_compat.saved_hooks()

        def pack(tensor: Tensor) -> _Packed | _Handed:
            operand, view = _operand_of(tensor, kept, half, kind)
            if outer is None:
                if operand is None:
                    return _Packed(tensor.detach(), version_of(tensor))
                operand.saves += 1
                return _Packed(operand, version_of(operand.half), view)
            hand, take_back = outer
            if operand is None:
                return _Handed(take_back, hand(tensor))
            return _Handed(take_back, hand(operand.half), (operand.wide.shape, operand.wide.stride()), view)

        torch_compat.push_saved_hooks(pack, _unpack)
        try:
            return call()
        finally:
            torch_compat.pop_saved_hooks()
    finally:
        for operand in kept.values():
            operand.let_go()
        kept.clear()  # autograd keeps `pack`, too


def run_node(
    op: Callable[..., Any], name: str, halves: Sequence[Tensor], wides: Sequence[Tensor], *args: Any, **kwargs: Any
) -> Any:
    """Call an op of a captured graph, whose arguments have been widened there, and keep the 16-bit tensors.

    Args:
        op: the op.
        name: the name of the op.
        halves: the 16-bit tensors.
        wides: the same, widened, as they are among the arguments.
        args: the arguments.
        kwargs: the keyword arguments.
    """
    if torch.compiler.is_compiling() or name in STEPWISE or not torch_compat.saved_hooks_allowed():
        return op(*args, **kwargs)
    kept = {id(w): Operand(h, wide=w) for h, w in zip(halves, wides, strict=True) if h.numel() >= MIN_ELEMENTS}
    call = functools.partial(op, *args, **kwargs)
    return run_product(call, kept, halves[0].dtype, row_of(name).kind) if kept else call()


def _operand_of(tensor: Tensor, kept: Kept, half: torch.dtype, kind: str) -> tuple[Operand | None, _View | None]:
    """The operand that has the numbers of a tensor, and where they lie in it; None if 16 bits do not have them."""
    operand = kept.get(id(tensor))
    if operand is not None or tensor.dtype is not torch.float32:
        return operand, None
    base = kept.get(id(torch_compat.base_of(tensor)))
    if base is not None and type(tensor) is Tensor:
        return base, (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
    if base is None and (kind not in _REARRANGING or type(tensor) is not Tensor or tensor.numel() < MIN_ELEMENTS):
        return None, None
    copy = Operand(tensor.detach().to(half))
    kept[id(copy.wide)] = copy
    return (copy, None) if base is not None or torch.equal(copy.wide, tensor) else (None, None)


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was written to; None for a tensor of inference mode, which has no version."""
    return None if tensor.is_inference() else tensor._version


def _unpack(packed: _Packed | _Handed) -> Tensor:
    """The tensor again.

    Raises:
        RuntimeError: what was kept has been written to, in torch's words.
    """
    view = packed.view
    if isinstance(packed, _Handed):
        tensor = packed.unpack(packed.packed)
        if packed.layout is None:
            return tensor
        wide = torch.empty_strided(*packed.layout, dtype=torch.float32, device=tensor.device).copy_(tensor)
    else:
        kept, version = packed.kept, packed.version
        with torch_compat.DisableTorchFunction():  # not through the mode that a backward pass has for ops of users
            tensor = kept.half if isinstance(kept, Operand) else kept
            if version is not None and tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version "
                    f"{version} instead. Hint: it is an operand of a 16-bit product, which the backward pass needs."
                )
            wide = kept.widened() if isinstance(kept, Operand) else kept
    return wide if view is None else wide.as_strided(*view)
