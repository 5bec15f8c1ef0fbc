"""16-bit casts of the fp32 weights of a fused optimizer, which reads 16-bit gradients: so none is widened on the way.

With ``keep_casts`` a cast outlives its iteration, because the step that writes the weight writes the cast too. It is
used as long as the weight has the version and the address that it had then. That is all that is checked: who writes in
a way that changes neither (through ``.data``, a detached handle, another process) calls ``amp.clear_casts``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..core.dtypes import is_half
from ..core.torch_compat import backward_pass_id, queue_after_backward
from ..gradients.ledger import set_grads

__all__ = [
    "WeightCopies",
    "after_step",
    "attach_gradient",
    "clear_kept",
    "copy_of",
    "drop_failed_pass",
    "widen_gradients",
]

_MIN_ELEMENTS = 2**14  # a smaller weight is cast, and its gradient widened, as fast as ``_CastWeight`` runs

_FP32 = torch.float32
_UNWRITTEN = -1  # the version of a copy that a step has begun to write


class _Copy:
    """The cast of one weight.

    Attributes:
        weight: the parameter.
        dtype: of the cast.
        owner: the optimizer that has the weight.
        keeps: whether ``value`` is kept from step to step.
        value: the cast; None while none is kept.
        version: of the weight that ``value`` is the cast of.
        address: of its memory.
        narrow: whether the weight has got a 16-bit gradient since gradients were last widened.
        backward_pass: the number of the pass that brought it.
        grad: that gradient, while its pass runs.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, owner: torch.optim.Optimizer, keeps: bool) -> None:
        self.weight = weakref.ref(weight)
        self.dtype = dtype
        self.owner = weakref.ref(owner)
        self.keeps = keeps
        self.value: torch.Tensor | None = None
        self.version = _UNWRITTEN
        self.address = 0
        self.narrow = False
        self.backward_pass = -1
        self.grad: torch.Tensor | None = None

    def kept(self, weight: torch.Tensor) -> torch.Tensor | None:
        """The value, if the weight is as it was; otherwise it is dropped."""
        if self.version != weight._version or self.address != weight.data_ptr():
            self.value = None
        return self.value

    def make(self, weight: torch.Tensor) -> torch.Tensor:
        """Cast the weight anew."""
        value = weight.detach().to(self.dtype)
        if self.keeps and not value.is_inference():
            self.value, self.version, self.address = value, weight._version, weight.data_ptr()
        return value


_copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
"""The copies of all optimizers, by the identity of the weight."""


class WeightCopies:
    """The casts of the weights of one optimizer.

    They are not in its state, so no checkpoint, deep copy or pickle holds them. A parameter of two optimizers belongs
    to the first.

    Args:
        owner: the optimizer.
        dtype: of the casts.
        keep: see ``keeps``.

    Attributes:
        keeps: whether its steps write them, so that they are kept from step to step.
    """

    def __init__(self, owner: torch.optim.Optimizer, dtype: torch.dtype, keep: bool = False) -> None:
        self._owner = weakref.ref(owner)
        self._dtype = dtype
        self.keeps = keep
        self._mine: dict[int, _Copy] = {}

    def watch(self, params: Iterable[torch.Tensor]) -> None:
        """Take care of these parameters, too."""
        owner = self._owner()
        for param in params:
            if (
                owner is not None
                and type(param) is torch.nn.Parameter
                and param.dtype is _FP32
                and param.numel() >= _MIN_ELEMENTS
                and copy_of(param) is None
            ):
                self._mine[id(param)] = _copies[id(param)] = _Copy(param, self._dtype, owner, self.keeps)

    def stop(self) -> None:
        """Take care of no parameter from now on."""
        self._mine.clear()

    def having(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of some parameters whose gradients may be 16-bit."""
        mine = self._mine
        return [p for p in params if id(p) in mine and mine[id(p)].weight() is p]

    def begin_write(self, param: torch.Tensor) -> torch.Tensor | None:
        """The value that the coming step writes with this parameter; None if there is none.

        Until ``end_write`` it is the cast of no version, for the step may fail.
        """
        copy = self._mine.get(id(param))
        if copy is None or copy.weight() is not param or copy.kept(param) is None:
            return None
        copy.version = _UNWRITTEN
        return copy.value

    def end_write(self, params: Iterable[torch.Tensor]) -> None:
        """The values of these parameters are written.

        Autograd refuses a backward pass that needs a value as it was before, as it does for a weight itself.
        """
        for param in params:
            copy = self._mine.get(id(param))
            if copy is not None and copy.value is not None and copy.version == _UNWRITTEN:
                increment_version(copy.value)
                copy.version = param._version


class _CastWeight(torch.autograd.Function):
    """The cast of a weight, for autograd. In a ``scale_loss`` block the gradient reaches the weight in 16 bits.

    Autograd adds the gradients that reach a weight by several paths in one pass. It may do so in place, in the dtype of
    the first, but not where that one has another holder, as it has here: so a 16-bit gradient and an fp32 one make an
    fp32 sum. A second 16-bit gradient, from another cast, is widened here.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, value: torch.Tensor, narrow: bool) -> torch.Tensor:
        """The value."""
        ctx.weight, ctx.narrow = weight, narrow
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient as it is; autograd casts it to ``weight.grad_dtype``."""
        copy = copy_of(ctx.weight)
        if getattr(ctx.weight, "grad_dtype", _FP32) is _FP32:
            return grad, None, None  # autograd widens it before it adds anything
        number = backward_pass_id()
        if copy is None or copy.backward_pass == number or not ctx.narrow:
            return grad.float(), None, None
        copy.narrow, copy.backward_pass, copy.grad = True, number, grad.detach()
        queue_after_backward(functools.partial(setattr, copy, "grad", None))
        return grad, None, None


def copy_of(weight: torch.Tensor) -> _Copy | None:
    """The copy of a weight; None if it belongs to no optimizer that reads 16-bit gradients."""
    copy = _copies.get(id(weight))
    return copy if copy is not None and copy.weight() is weight else None


def attach_gradient(weight: torch.Tensor, value: torch.Tensor, *, narrow: bool) -> torch.Tensor:
    """The cast ``value`` of a weight, through which autograd reaches the weight; ``narrow`` allows 16-bit gradients."""
    if weight.requires_grad and torch.is_grad_enabled():
        return _CastWeight.apply(weight, value, narrow)  # type: ignore[no-any-return, no-untyped-call]
    return value


def clear_kept() -> None:
    """Drop the values that are kept."""
    for copy in list(_copies.values()):
        copy.value = None


def drop_failed_pass() -> None:
    """A backward pass has raised an error, so nobody else will forget what it brought."""
    for copy in list(_copies.values()):
        copy.grad = None


def widen_gradients(stepping: torch.optim.Optimizer | None = None) -> None:
    """Widen the 16-bit gradients of fp32 weights, before something adds to them or needs the dtype of the weight.

    Args:
        stepping: only of the weights that this optimizer steps and another one owns.
    """
    narrow = [copy for copy in _copies.values() if copy.narrow]
    if stepping is not None and narrow:
        stepped = {id(param) for group in stepping.param_groups for param in group["params"]}
        narrow = [copy for copy in narrow if id(copy.weight()) in stepped and copy.owner() is not stepping]
    for copy in narrow:
        weight, copy.narrow = copy.weight(), False
        if weight is not None and weight.grad is not None and is_half(weight.grad):
            set_grads([weight], [weight.grad.float()])


def after_step(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer has stepped. A ``fused=True`` of torch's gives weights no new version (torch 2.13)."""
    for param in [p for group in optimizer.param_groups for p in group["params"]] if _copies else []:
        copy = copy_of(param)
        if copy is not None and copy.owner() is not optimizer:
            copy.value = None
