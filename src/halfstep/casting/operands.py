"""The tensors that an emulated product keeps for its backward pass: 16-bit operands, not the fp32 ones of its kernel.

A widened operand carries no more information than its 16-bit tensor. So autograd keeps the 16-bit tensor, which is
widened again when the backward pass needs it, with the same values and strides. One pair of saved-tensor hooks around
the kernel does this for every op. Saved-tensor hooks of user code that are active at the same time get the 16-bit
tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.oplists.tables import OPS, row_of
from ..torch_internals import torch_compat

__all__ = ["MIN_ELEMENTS", "STEPWISE", "Kept", "Operand", "run_node", "run_product", "version_of"]

MIN_ELEMENTS = 2**12
"""Smaller operands are kept in fp32: calling the hooks costs more than their 16 KiB are worth."""

_REARRANGING = ("product", "convolution")
"""Kinds of ops that may save an operand copied to another memory order. Ops of other kinds save computed values."""

STEPWISE = {op.name for op in OPS.values() if op.kind == "recurrent"} - {"lstm", "mkldnn_rnn_layer"}
"""Recurrent ops that torch runs step by step, saving mostly the values computed in each step. With hooks they save only
6 to 15 % of the fp32 memory and take 1.15 to 1.25 times as long (GRU and LSTMCell on a CPU)."""

_NOTHING = torch.empty(0, dtype=torch.float32, device="cpu")

_View = tuple[torch.Size, tuple[int, ...], int]
"""Sizes, strides and offset of a view of the widened operand."""


class Operand:
    """A 16-bit tensor that a product reads in fp32.

    Args:
        half: the 16-bit tensor, attached to its graph.
        shared: True if several products read the same widened tensor, as with a weight.
        wide: the widened tensor, if it already exists.

    Attributes:
        half: the 16-bit tensor, detached; it shares memory and version with the original.
        wide: the fp32 tensor, attached to the graph, while a product runs. The widened tensor of a weight remains,
            because all products read it and gradients accumulate on it in fp32; between products it holds no memory.
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
        """Return the widened tensor for another product."""
        self._reads += 1
        if self.wide.shape != self.half.shape:
            self.wide.data = self.half.float()
        return self.wide

    def release(self) -> None:
        """Free the widened tensor after a product; autograd keeps this operand until the backward pass."""
        if not self.shared:
            del self.wide
        elif self._reads == 1 and type(self.wide) is Tensor:
            self.wide.data = _NOTHING

    def widened(self) -> Tensor:
        """Return the widened tensor for the backward pass; several products share one copy."""
        if self.saves < 2:
            return self.half.float()
        if self._again is None:
            self._again = self.half.float()
        return self._again


Kept = dict[int, Operand]
"""The operands of one product, by the ``id`` of the widened tensor."""


def run_product(call: Callable[[], Any], kept: Kept, half: torch.dtype, kind: str) -> Any:
    """Call an op with widened operands, and keep the 16-bit tensors for its backward pass.

    Args:
        call: a function that calls the op.
        kept: the operands among its arguments; emptied by the call.
        half: the 16-bit dtype.
        kind: the kind of the op; see ``core.oplists.tables.Op``.
    """
    try:
        if not torch.is_grad_enabled():
            return call()
        outer = torch_compat.saved_hooks()

        def pack(tensor: Tensor) -> Callable[[], Tensor]:
            operand, view = _operand_of(tensor, kept, half, kind)
            read = _keep(tensor, operand) if outer is None else _hand_over(tensor, operand, *outer)
            return read if view is None else lambda: read().as_strided(*view)

        torch_compat.push_saved_hooks(pack, lambda read: read())
        try:
            return call()
        finally:
            torch_compat.pop_saved_hooks()
    finally:
        for operand in kept.values():
            operand.release()
        kept.clear()  # autograd keeps `pack` alive


def run_node(
    op: Callable[..., Any], name: str, halves: Sequence[Tensor], wides: Sequence[Tensor], *args: Any, **kwargs: Any
) -> Any:
    """Call an op of a captured graph, in which its arguments were widened, and keep the 16-bit tensors.

    Args:
        op: the op.
        name: the name of the op.
        halves: the 16-bit tensors.
        wides: the widened tensors, which are among the arguments.
        args: the arguments.
        kwargs: the keyword arguments.
    """
    if torch.compiler.is_compiling() or name in STEPWISE or not torch_compat.saved_hooks_allowed():
        return op(*args, **kwargs)
    kept = {id(w): Operand(h, wide=w) for h, w in zip(halves, wides, strict=True) if h.numel() >= MIN_ELEMENTS}
    call = functools.partial(op, *args, **kwargs)
    return run_product(call, kept, halves[0].dtype, row_of(name).kind) if kept else call()


def _operand_of(tensor: Tensor, kept: Kept, half: torch.dtype, kind: str) -> tuple[Operand | None, _View | None]:
    """Return the operand that has the values of a tensor, and their view in it; None if 16 bits cannot hold them."""
    operand = kept.get(id(tensor))
    if operand is not None or tensor.dtype is not torch.float32:
        return operand, None
    base = kept.get(id(torch_compat.base_of(tensor)))
    if base is not None and type(tensor) is Tensor:
        return base, (tensor.size(), tensor.stride(), int(tensor.storage_offset()))
    if base is None and (kind not in _REARRANGING or type(tensor) is not Tensor or tensor.numel() < MIN_ELEMENTS):
        return None, None
    copy = Operand(tensor.to(half))
    kept[id(copy.wide)] = copy
    return (copy, None) if base is not None or torch.equal(copy.wide, tensor) else (None, None)


def version_of(tensor: Tensor) -> int | None:
    """Return the version of a tensor, which counts in-place writes; None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


def _keep(tensor: Tensor, operand: Operand | None) -> Callable[[], Tensor]:
    """Keep the operand that has the values of a tensor, or else the tensor, and return a function that rebuilds it.

    The function raises RuntimeError, torch's error about a saved tensor that was modified in place.
    """
    kept = tensor.detach() if operand is None else operand.half
    version = version_of(kept)
    if operand is not None:
        operand.saves += 1

    def read() -> Tensor:
        with torch_compat.DisableTorchFunction():  # not through the mode that a backward pass has for ops of users
            if version is not None and kept._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"[{kept.type()} {list(kept.shape)}] is at version {kept._version}; expected version "
                    f"{version} instead. Hint: it is an operand of a 16-bit product, which the backward pass needs."
                )
            return kept if operand is None else operand.widened()

    return read


def _hand_over(
    tensor: Tensor, operand: Operand | None, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
) -> Callable[[], Tensor]:
    """Give the 16-bit tensor of an operand, or else the tensor, to a user's hooks, and do not keep the operand."""
    if operand is None:
        packed = pack(tensor)
        return lambda: unpack(packed)
    packed, sizes, strides = pack(operand.half), operand.wide.shape, operand.wide.stride()

    def read() -> Tensor:
        half = unpack(packed)
        return torch.empty_strided(sizes, strides, dtype=torch.float32, device=half.device).copy_(half)

    return read
