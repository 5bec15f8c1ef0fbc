"""One forward pass, watched: which ops compute in 16 bits that should not, and which fp32 outputs are so in name only.

Nothing remains of it: it runs without gradients, and the random state and all buffers are put back.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.dtypes import HALF_DTYPES, is_half
from ..core.oplists.tables import FLOAT, words
from ..core.torch_compat import buffers_of, tree_flatten
from ..observe.names import ROOT, qualified_names
from ..observe.notes import Notes
from ..observe.ops import FunctionCall
from ..observe.samples import grid_flags, sample
from ..observe.watch import ModuleCall, Watch
from .statistics import Squares, root_in

__all__ = ["Forward", "is_norm", "is_router", "run", "same_random_numbers"]

_LOSE = words("binary_cross_entropy log_softmax logsumexp")
"""Functions whose results are losses, or lose what a loss needs, beside the losses of the op lists."""

_ON_GRID = 64
"""Outputs with fewer elements prove nothing."""


def is_norm(module: nn.Module) -> bool:
    """Whether a module normalizes: torch's norms, and classes called so (``LlamaRMSNorm``)."""
    return _is_norm(type(module).__name__)


@functools.lru_cache(1024)
def _is_norm(name: str) -> bool:
    return re.search(r"norm(\d?d)?$", name, re.IGNORECASE) is not None


def is_router(name: str, names: Mapping[nn.Module, str]) -> bool:
    """Whether a module chooses experts: it is called ``router``, or it is a ``gate`` beside ``experts``."""
    parent, _, last = name.rpartition(".")
    return last == "router" or (last in ("gate", "gating") and f"{parent}.experts".lstrip(".") in names.values())


class _Inside(NamedTuple):
    """What the modules inside of a call have returned so far.

    Attributes:
        halves: whether any of it is in 16 bits, so that a 16-bit grid is no surprise.
        latest: the tensors of the latest of them, which a container may return as they are.
    """

    halves: bool = False
    latest: Sequence[torch.Tensor] = ()


class Forward:
    """A record of one forward pass.

    Args:
        model: whose modules are watched; None watches all there are.

    Attributes:
        running: the calls of modules that have not returned, the outermost first.
        dtypes: the 16-bit dtypes of results.
        losses: loss functions that computed in 16 bits, as "module: function".
        statistics: roots of sums of squares that were computed in 16 bits, as norms by hand have them, likewise.
        overflows: the same, with a number that is 1.0 if the sum is inf.
        routers: the names of routers whose results are in 16 bits.
        flags: names of modules, or "the loss", with the ``grid_flags`` of fp32 values that should not be on a grid.
        loss_dtype: of the loss, if there was one.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._names = None if model is None else qualified_names(model)
        self.running: list[ModuleCall] = []
        self._squares = Notes[Squares](stay=True)
        self.dtypes: set[torch.dtype] = set()
        self.losses: dict[str, torch.dtype] = {}
        self.statistics: dict[str, torch.dtype] = {}
        self.overflows: list[tuple[str, torch.Tensor]] = []
        self.routers: dict[str, torch.dtype] = {}
        self.flags: list[tuple[str, torch.Tensor]] = []
        self.loss_dtype: torch.dtype | None = None

    @contextmanager
    def watching(self) -> Iterator[Forward]:
        """Within the block calls of modules and functions of torch are noted. What is compiled runs eagerly."""
        with Watch(self._names, modules=self, functions=self._note_function) as watch:
            self.running = watch.running
            yield self

    def entered(self, call: ModuleCall, args: Any, kwargs: Any) -> None:
        """As a listener: a module is called."""

    def returned(self, call: ModuleCall, args: Any, output: Any) -> None:
        """As a listener: a module has returned."""
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
            if name in _LOSE or FLOAT.get(name) == "loss":
                self.losses.setdefault(f"{self._here()}{name}", call.result.dtype)
        root = root_in(call, self._squares)
        if root is not None:
            self.statistics.setdefault(f"{self._here()}{root.op}", root.dtype)
            self.overflows.append((f"{self._here()}{root.op}", root.is_inf))

    def _here(self) -> str:
        name = self.running[-1].name if self.running else ROOT
        return "" if name == ROOT else f"{name}: "

    def _compare(self, name: str, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        """Note an output that may lie on a grid where no input does."""
        both = [t for t in inputs if t.is_floating_point()]
        wide = all(t.dtype is torch.float32 for t in [*both, output])
        if both and wide and min(t.numel() for t in [*both, output]) >= _ON_GRID:
            off = torch.stack([grid_flags(sample(t, 1024))[0] for t in both]).amin()
            flags = grid_flags(sample(output, 1024))
            self.flags.append((name, torch.stack([torch.maximum(flags[0], 1.0 - off), flags[1]])))

    def note_loss(self, result: Any) -> None:
        """Look at what the forward pass returned: a loss, or an output with a ``loss``."""
        loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", result)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            return
        self.loss_dtype = loss.dtype
        if loss.dtype is torch.float32:
            self.flags.append(("the loss", grid_flags(loss.detach().reshape(1))))


@contextmanager
def same_random_numbers(model: nn.Module) -> Iterator[None]:
    """Put the state of the random numbers of torch, on the devices of a model, and of Python back after the block."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(state)


def run(model: nn.Module, batch: Any) -> Forward:
    """Run a forward pass in the mode (train or eval) that the model is in, and put back what it changes.

    Args:
        model: any module. One that exchanges something with other ranks in its forward pass must run on all of them.
        batch: a function without arguments that returns the loss; or the arguments of the model: a mapping of keyword
            arguments, a tuple or list of positional ones, or a single one.
    """
    forward = Forward(model)
    call: Callable[[], Any] = batch if callable(batch) else lambda: _call(model, batch)
    buffers = [
        (buffers_of(module), name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in buffers_of(module).items()
        if buffer is not None
    ]
    with same_random_numbers(model), torch.no_grad():
        try:
            with forward.watching():
                result = call()
            forward.note_loss(result)
        finally:
            for place, name, buffer, value in buffers:
                place[name] = buffer
                buffer.data.copy_(value)  # no new version: a backward pass may still need the old one
    return forward


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
