"""A watched forward pass, which finds ops that should not compute in 16 bits and outputs that are fp32 in name only.

The pass runs without gradients, and the random state and all buffers are restored. Its effect on inputs with large
integers (HS118) remains, as after any first pass.
"""

from __future__ import annotations

import functools
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ...casting.modules import hooks_of
from ...core.dtypes import HALF_DTYPES, is_half
from ...core.oplists.names import spellings
from ...core.oplists.tables import row_of, words
from ...torch_internals.torch_compat import DisableTorchFunction, buffers_of, tree_flatten
from ..observe.names import ROOT, qualified_names
from ..observe.notes import Notes
from ..observe.ops import FunctionCall
from ..observe.samples import PROOF, can_sample, grid_flags, sample
from ..observe.watch import CallWatch, ModuleCall

__all__ = ["Forward", "is_norm", "is_router", "run", "same_random_numbers"]

_LOSE = words("binary_cross_entropy log_softmax logsumexp")
"""Functions whose results are losses or determine a loss's precision, in addition to the losses of the op lists."""


def is_norm(module: nn.Module) -> bool:
    """True if a module normalizes: a torch norm, or a class with such a name (``LlamaRMSNorm``)."""
    return _is_norm(type(module).__name__)


@functools.lru_cache(1024)
def _is_norm(name: str) -> bool:
    return re.search(r"norm(\d?d)?$", name, re.IGNORECASE) is not None


def is_router(name: str, names: Mapping[nn.Module, str]) -> bool:
    """True if a module chooses experts: its name is ``router``, or ``gate`` with a sibling ``experts``."""
    parent, _, last = name.rpartition(".")
    return last == "router" or (last in ("gate", "gating") and f"{parent}.experts".lstrip(".") in names.values())


_REDUCTIONS = frozenset(("mean", "nanmean", "nansum", "sum"))
_VARIANCES = frozenset(("std", "std_mean", "var", "var_mean"))
_ROOTS = frozenset(("rsqrt", "sqrt"))
_CASTS = frozenset(("bfloat16", "contiguous", "double", "float", "half", "reshape", "to", "type", "type_as", "view"))
_KEEP = _CASTS | frozenset((
    *("__getitem__", "abs", "add", "clamp", "clamp_min", "clip", "detach", "div", "expand", "maximum", "mul", "relu"),
    *("squeeze", "sub", "unsqueeze"),
))  # fmt: skip
"""Functions that may occur between a statistic and its root, if they keep the number of elements."""


class Squares(NamedTuple):
    """A note on a tensor that holds squares or a statistic, which is a sum of squares.

    Attributes:
        dtype: the 16-bit dtype in which the squares were computed.
        is_inf: for a statistic, a flag tensor: True if it is inf, so that a division by its root gives 0.
    """

    dtype: torch.dtype
    is_inf: torch.Tensor | None


def root_in(call: FunctionCall, notes: Notes[Squares]) -> tuple[str, torch.Tensor] | None:
    """Return the name of a torch function that takes the root of a statistic, with the statistic's inf flag, else None.

    Follows squares that are computed in 16 bits, then reduced, then put under a root. torch's norms compute in fp32
    internally and are one function each. Sums of all elements, such as a loss, do not count. Squares of bfloat16 that
    are summed in fp32 do not count either, because their rounding errors average out; float16 squares overflow for
    inputs from 256 on.

    Args:
        call: any call of a torch function.
        notes: the notes on squares and statistics of earlier calls; the result of this call is added.
    """
    function, args, kwargs, result = call
    name = spellings().get(function, (getattr(function, "__name__", ""), False))[0]
    if name in _VARIANCES and isinstance(result, (torch.Tensor, tuple)):
        first = result if isinstance(result, torch.Tensor) else result[0]
        if first.dim() and first.dtype in HALF_DTYPES:
            is_inf = _is_inf(first)
            notes.add(first, Squares(first.dtype, is_inf))
            return (name, is_inf) if name.startswith("std") else None
        return None
    if not isinstance(result, torch.Tensor) or not args:
        return None
    exponent = args[1] if name == "pow" and len(args) > 1 else kwargs.get("exponent")
    if name == "square" or exponent == 2 or (name == "mul" and len(args) > 1 and args[0] is args[1]):
        if result.dtype in HALF_DTYPES:
            notes.add(result, Squares(result.dtype, None))
        return None
    found = next(((each, known) for each in args if (known := notes.get(each)) is not None), None)
    if found is None:
        return None
    tensor, known = found
    if known.is_inf is None:
        if name in _REDUCTIONS and result.dim():
            if result.dtype in HALF_DTYPES or known.dtype is torch.float16:
                notes.add(result, known._replace(is_inf=_is_inf(result)))
        elif name in _CASTS:
            notes.add(result, known)
    elif name in _ROOTS or (name == "pow" and exponent in (0.5, -0.5)):
        return name, known.is_inf
    elif name in _KEEP and result.numel() == tensor.numel():
        notes.add(result, known)
    return None


def _is_inf(statistic: torch.Tensor) -> torch.Tensor:
    return statistic.detach().isinf().any()


class _Inside(NamedTuple):
    """The results so far of the modules within a call.

    Attributes:
        halves: True if a result is in 16 bits, so that values on a 16-bit grid are expected.
        latest: the tensors of the latest result, which a container may return unchanged.
    """

    halves: bool = False
    latest: Sequence[torch.Tensor] = ()


class Forward:
    """A record of one forward pass.

    Args:
        model: the model whose modules are watched; None watches all modules.

    Attributes:
        running: the unfinished calls of modules, the outermost first.
        dtypes: the 16-bit dtypes of results.
        losses: loss functions that computed in 16 bits, as "module: function".
        norms: roots of 16-bit sums of squares, as in hand-written norms, as "module: function", each with a flag that
            is True if the sum is inf.
        routers: the names of routers whose results are in 16 bits.
        flags: names of modules, or "the loss", with the ``grid_flags`` of fp32 values that should not lie on a grid.
        loss_dtype: the dtype of the loss, if there was one.
        largest: names of modules, "the batch" or "the loss", in order of execution, with the largest magnitude that
            they returned. -inf in the inputs of a module is ignored, because masks contain it. Only ``run`` fills it.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._names = None if model is None else qualified_names(model)
        self.running: list[ModuleCall] = []
        self._squares = Notes[Squares](stay=True)
        self.dtypes: set[torch.dtype] = set()
        self.losses: dict[str, torch.dtype] = {}
        self.norms: list[tuple[str, torch.Tensor]] = []
        self.routers: dict[str, torch.dtype] = {}
        self.flags: list[tuple[str, torch.Tensor]] = []
        self.loss_dtype: torch.dtype | None = None
        self.largest: list[tuple[str, torch.Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[Forward]:
        """Record calls of modules and torch functions within the block. Compiled code runs eagerly."""
        with CallWatch(self._names, modules=self, functions=self._note_function) as watch:
            self.running = watch.running
            yield self

    def entered(self, call: ModuleCall, args: Any, kwargs: Any) -> None:
        """Receive the start of a module call."""

    def returned(self, call: ModuleCall, args: Any, output: Any) -> None:
        """Receive the end of a module call."""
        tensors = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor) and t.is_floating_point()]
        self.dtypes.update(t.dtype for t in tensors if is_half(t))
        if tensors and is_half(tensors[0]) and is_router(call.name, self._names or {}):
            self.routers.setdefault(call.name, tensors[0].dtype)
        inside = call.note or _Inside()
        if len(tensors) == 1 and not inside.halves and all(t is not tensors[0] for t in inside.latest):
            self._compare(call.name, [a for a in args if isinstance(a, torch.Tensor)], tensors[0])
        if self.running:
            outer = self.running[-1].note or _Inside()
            halves = outer.halves or inside.halves or any(map(is_half, tensors))
            self.running[-1].note = _Inside(halves, tensors)

    def _note_function(self, call: FunctionCall) -> None:
        if isinstance(call.result, torch.Tensor) and call.result.dtype in HALF_DTYPES:
            self.dtypes.add(call.result.dtype)
            name = getattr(call.function, "__name__", "")
            if name in _LOSE or row_of(name).reason == "loss":
                self.losses.setdefault(f"{self._here()}{name}", call.result.dtype)
        root = root_in(call, self._squares)
        if root is not None:
            self.norms.append((f"{self._here()}{root[0]}", root[1]))

    def _here(self) -> str:
        name = self.running[-1].name if self.running else ROOT
        return "" if name == ROOT else f"{name}: "

    def _compare(self, name: str, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        """Record an output for the grid test, unless an input may lie on the grid already."""
        both = [t for t in inputs if t.is_floating_point()]
        wide = all(t.dtype is torch.float32 for t in [*both, output])
        if both and wide and min(t.numel() for t in [*both, output]) >= PROOF:
            off = torch.stack([grid_flags(sample(t, 1024))[0] for t in both]).amin()
            flags = grid_flags(sample(output, 1024))
            self.flags.append((name, torch.stack([torch.maximum(flags[0], 1.0 - off), flags[1]])))

    def note_loss(self, result: Any) -> None:
        """Record the result of the forward pass: a loss, or an output with a ``loss``."""
        loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            return
        self.loss_dtype = loss.dtype
        if loss.dtype is torch.float32:
            self.flags.append(("the loss", grid_flags(loss.detach().reshape(1))))


class _Checked(Forward):
    """A record that also has the largest magnitudes. The inputs of a module count for the module that calls it."""

    def entered(self, call: ModuleCall, args: Any, kwargs: Any) -> None:
        """Receive the start of a module call."""
        self._look(self.running[-2].name if len(self.running) > 1 else "the batch", (args, kwargs), torch.Tensor.float)

    def returned(self, call: ModuleCall, args: Any, output: Any) -> None:
        """Receive the end of a module call."""
        super().returned(call, args, output)
        self._look(call.name, output, torch.Tensor.abs)

    def note_loss(self, result: Any) -> None:
        """Record the result of the forward pass."""
        super().note_loss(result)
        if self.loss_dtype is not None:
            self._look("the loss", result, torch.Tensor.abs)

    def _look(self, name: str, values: Any, size: Callable[[torch.Tensor], torch.Tensor]) -> None:
        with DisableTorchFunction():
            found = [t for t in tree_flatten(values)[0] if isinstance(t, torch.Tensor) and t.is_floating_point()]
            self.largest += [(name, size(t.float()).amax()) for t in found if t.numel() and can_sample(t)]


@contextmanager
def same_random_numbers(model: nn.Module) -> Iterator[None]:
    """Restore the random state of Python, NumPy and torch, on the devices of a model, after the block."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    states: list[Any] = [(random.setstate, random.getstate())]
    if numpy := sys.modules.get("numpy"):
        states.append((numpy.random.set_state, numpy.random.get_state()))
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for restore, state in states:
            restore(state)


def run(model: nn.Module, batch: Any) -> Forward:
    """Run a forward pass in the model's current mode (train or eval), and restore all changes.

    Args:
        model: any module. If its forward pass communicates with other ranks, all ranks must call this function.
        batch: a function without arguments that returns the loss; or the arguments of the model: a mapping of keyword
                arguments, a tuple or list of positional arguments, or a single argument.
    """
    forward = _Checked(model)
    call: Callable[[], Any] = batch if callable(batch) else lambda: _call(model, batch)
    buffers = [
        (buffers_of(module), name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in buffers_of(module).items()
        if buffer is not None
    ]
    if (given := hooks_of(model).inputs) is not None:
        given.looked.clear()  # this batch is checked as well
    with same_random_numbers(model), torch.no_grad():
        try:
            with forward.watching():
                result = call()
            forward.note_loss(result)
        finally:
            for place, name, buffer, value in buffers:
                place[name] = buffer
                buffer.data.copy_(value)  # keeps the version: a backward pass may still need the buffer
    return forward


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
