"""16-bit copies of fp32 weights: the fused step of their optimizer writes them, so a forward pass need not cast.

A copy is used only while nothing but its optimizer can have written to the weight. In doubt the weight is cast anew.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..core import data_writes as writes
from ..core.dtypes import is_half
from ..core.torch_compat import storage_key, storage_owners
from ..gradients.ledger import set_grads

__all__ = [
    "WeightCopies",
    "adding_in_fp32",
    "forget",
    "forget_storage",
    "fresh_copy",
    "held_by_others",
    "keep_cast",
    "memory_of",
    "widen_gradients",
]

_MIN_ELEMENTS = 2**14  # a smaller weight is cast as fast as autograd is told of the copy
_MAX_LOSSES = 8  # after so many copies that went stale unused, none is kept: something else writes to this weight

_FP32 = torch.float32


class _Copy:
    """The copy of one weight.

    Attributes:
        weight: the parameter.
        dtype: of the copy.
        owner: the optimizer that writes it.
        value: the copy; None while there is none.
        version: of the weight when the copy was written.
        memory: the weight without a gradient. While this lives, no other tensor can get the weight's address.
        lost: how many copies went stale since one was last used.
    """

    def __init__(self, weight: torch.Tensor, dtype: torch.dtype, owner: torch.optim.Optimizer) -> None:
        self.weight = weakref.ref(weight)
        self.dtype = dtype
        self.owner = weakref.ref(owner)
        self.value: torch.Tensor | None = None
        self.version = -1
        self.lost = 0
        self._hold(weight)

    def _hold(self, weight: torch.Tensor) -> None:
        self.memory = weight.detach()
        _copies_by_storage[storage_key(self.memory.untyped_storage())] = self

    def is_fresh(self, weight: torch.Tensor) -> bool:
        """Whether the weight is what it was when the copy was written.

        Who else holds the weight's memory may write to it without a new version.
        """
        return (
            self.version == weight._version
            and self.memory.data_ptr() == weight.data_ptr()
            and not held_by_others(weight)
        )

    def drop(self) -> None:
        """Forget a value that is stale."""
        if self.value is not None:
            self.value = None
            self.lost += 1

    def locate(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight's present memory, as a tensor without a gradient."""
        if self.memory.data_ptr() != weight.data_ptr():
            self._hold(weight)
        return self.memory


_copies: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
_copies_by_storage: weakref.WeakValueDictionary[int, _Copy] = weakref.WeakValueDictionary()
"""The copies by the address of the storage that they hold, or held before their weight got other memory."""


class WeightCopies:
    """The copies that one optimizer writes.

    They are not in its state, so no checkpoint, deep copy or pickle holds them. A parameter of two optimizers has its
    copy from the first; a step of the other makes it stale.

    Args:
        owner: the optimizer.
        dtype: of the copies.
    """

    def __init__(self, owner: torch.optim.Optimizer, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._owner = weakref.ref(owner)
        self._mine: dict[int, _Copy] = {}
        self._writing: list[tuple[torch.Tensor, _Copy]] = []
        writes.watch(self)
        _watch_steps()
        weakref.finalize(self, _unwatch_steps).atexit = False

    def touch(self, param: torch.Tensor) -> None:
        """``param.data`` was read or set: what holds it may write to the weight without a new version."""
        if id(param) in self._mine:
            forget(param)

    def watch(self, params: Iterable[torch.Tensor]) -> None:
        """Let these parameters have copies, from when a forward pass first asks for one."""
        owner = self._owner()
        for param in params:
            if (
                owner is not None
                and type(param) is torch.nn.Parameter
                and param.dtype is _FP32
                and param.numel() >= _MIN_ELEMENTS
                and _copy_of(param) is None
            ):
                self._mine[id(param)] = _copies[id(param)] = _Copy(param, self.dtype, owner)

    def stop(self) -> None:
        """Have no copies from now on."""
        self._writing.clear()
        self._mine.clear()

    def having(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of some parameters that have a copy here: their gradients may be 16-bit."""
        mine = self._mine
        return [p for p in params if id(p) in mine and mine[id(p)].value is not None and mine[id(p)].weight() is p]

    def begin_step(self) -> None:
        """Forget what an earlier step began to write, and did not because it failed."""
        self._writing.clear()

    def begin_write(self, param: torch.Tensor) -> torch.Tensor | None:
        """The copy that the coming step writes with this parameter; None if there is none.

        A copy that a graph holds is not written to: backward needs it as it is.
        """
        copy = self._mine.get(id(param))
        if copy is None or copy.value is None or copy.weight() is not param:
            return None
        owners = storage_owners(storage_key(copy.value.untyped_storage()))
        in_use = owners > 2  # ``value``, and the storage object made for this question
        if in_use or not copy.is_fresh(param):
            copy.drop()
            return None
        self._writing.append((param, copy))
        return copy.value

    def end_write(self) -> None:
        """The step is done."""
        for param, copy in self._writing:
            copy.version = param._version
        self._writing.clear()


_half_grads: dict[int, torch.Tensor] = {}
"""The 16-bit gradients that weights have got in this backward pass, by the identity of the weight."""


class _CastByOptimizer(torch.autograd.Function):
    """The cast of a weight to 16 bits, for autograd; the optimizer has made it already.

    Autograd adds the gradients that reach a weight by several paths in one pass. It may do so in place, in the dtype of
    the first, but not where that one has another holder, as it has here: so a 16-bit gradient and an fp32 one make an
    fp32 sum. A second 16-bit gradient, from another forward pass, is widened here.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """The copy."""
        ctx.weight = id(weight)
        return value.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient as it is; autograd casts it to ``weight.grad_dtype``."""
        copy = _copies.get(ctx.weight)
        weight = None if copy is None else copy.weight()
        if weight is None or getattr(weight, "grad_dtype", _FP32) is _FP32:
            return grad, None  # autograd widens it before it adds anything
        if ctx.weight in _half_grads:
            return grad.float(), None
        _half_grads[ctx.weight] = grad.detach()
        return grad, None


def fresh_copy(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """The copy of a weight, through which autograd reaches the weight; None if there is no copy that is up to date."""
    copy = _copy_of(weight)
    if copy is None or copy.value is None or copy.dtype is not dtype:
        return None
    if not copy.is_fresh(weight):
        copy.drop()
        return None
    copy.lost = 0
    if weight.requires_grad and torch.is_grad_enabled():
        return _CastByOptimizer.apply(weight, copy.value)  # type: ignore[no-any-return, no-untyped-call]
    return copy.value


def keep_cast(weight: torch.Tensor, cast: torch.Tensor) -> None:
    """Keep the cast of a weight as its copy, if its optimizer writes copies of this dtype."""
    copy = _copy_of(weight)
    if copy is not None and copy.dtype is cast.dtype and copy.lost < _MAX_LOSSES and not cast.is_inference():
        copy.locate(weight)
        copy.value, copy.version = cast.detach(), weight._version


def forget(weight: torch.Tensor) -> None:
    """Drop the copy of a weight: something may write to the weight without a new version."""
    copy = _copy_of(weight)
    if copy is not None:
        copy.drop()


def forget_storage(storage: torch.UntypedStorage) -> None:
    """Drop the copy of the weight that has its memory in a storage, if there is one."""
    copy = _copies_by_storage.get(storage_key(storage))
    if copy is not None:
        copy.drop()


_memories: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
"""What ``memory_of`` has given out for parameters without a copy, by the identity of the parameter."""


def memory_of(param: torch.Tensor) -> torch.Tensor:
    """``param.detach()``, but the same tensor for all callers, which counts as one holder of the memory."""
    copy = _copy_of(param)
    if copy is not None:
        return copy.locate(param)
    if type(param) is not torch.nn.Parameter:
        return param.detach()
    known = _memories.get(id(param))
    if known is None or _place(known) != _place(param):
        known = _memories[id(param)] = param.detach()
    return known


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def held_by_others(weight: torch.Tensor) -> bool:
    """Whether a tensor or an array that halfstep does not know has the weight's memory.

    Known are the weight, what ``memory_of`` gave out, and the storage that is asked here. Another holder
    (``param.data`` kept for later, a flat buffer, a numpy array) may write to it without a new version.
    """
    owners = storage_owners(storage_key(weight.untyped_storage()))
    if owners <= 2:  # the weight and this question
        return False
    copy = _copy_of(weight)
    known = _memories.get(id(weight)) if copy is None else copy.memory
    return owners > (2 if known is None or known.data_ptr() != weight.data_ptr() else 3)


def widen_gradients(params: Iterable[torch.Tensor] | None = None) -> None:
    """Widen the 16-bit gradients of fp32 weights, before something adds to them or needs the dtype of the weight.

    Args:
        params: of these; None for all that have copies.
    """
    if params is None:
        params = [weight for copy in _copies.values() if (weight := copy.weight()) is not None]
    for param in params:
        if param.dtype is _FP32 and param.grad is not None and is_half(param.grad):
            set_grads([param], [param.grad.float()])


def adding_in_fp32(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that adds up the gradients of fp32 weights in fp32, also those that are 16-bit."""

    @functools.wraps(backward)
    def careful(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # in a graph nothing uses the copies
            return backward(*args, **kwargs)
        widen_gradients()
        outer = dict(_half_grads)  # a checkpoint runs a backward pass inside of another
        _half_grads.clear()
        try:
            return backward(*args, **kwargs)
        finally:
            _half_grads.clear()
            _half_grads.update(outer)

    return careful


def _copy_of(weight: torch.Tensor) -> _Copy | None:
    copy = _copies.get(id(weight))
    return copy if copy is not None and copy.weight() is weight else None


def _copied_by_others(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimizer whose copies another optimizer writes."""
    return [
        param
        for group in optimizer.param_groups
        for param in group["params"]
        if (copy := _copy_of(param)) is not None and copy.owner() is not optimizer
    ]


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    widen_gradients(_copied_by_others(optimizer))


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for param in _copied_by_others(optimizer):
        forget(param)


_watchers = 0
_hooks: list[Any] = []


def _watch_steps() -> None:
    """Count one more ``WeightCopies``. While there are any, hooks watch the steps of every optimizer.

    torch's own ``fused=True`` optimizers write without a new version (as of torch 2.13).
    """
    global _watchers
    _watchers += 1
    if _watchers == 1:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def _unwatch_steps() -> None:
    global _watchers
    _watchers -= 1
    if _watchers == 0:
        while _hooks:
            _hooks.pop().remove()
