"""Units of a search: the smallest modules whose ops can be put in fp32, or the ops that run in 16 bits."""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..core.oplists import OpLists
from ..core.oplists.names import computes, spellings
from ..diagnostics.observe.names import ROOT, qualified_names
from ..diagnostics.observe.ops import FunctionCall
from ..diagnostics.observe.watch import CallWatch
from ..torch_internals.torch_compat import DisableTorchFunction

__all__ = ["Seen", "chosen", "watched"]

_HARMLESS = frozenset((
    *("add", "sub", "mul", "cat", "stack", "dropout", "relu", "silu", "gelu", "sigmoid", "tanh", "abs", "neg", "pad"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "interpolate", "clone", "contiguous", "flatten", "embedding", "where"),
    *("avg_pool2d", "adaptive_avg_pool2d", "zeros", "ones", "arange", "masked_fill", "mean"),
))  # fmt: skip
"""Functions that a container may call between its modules without being a unit by itself."""


_PRODUCTS = {"linear": 0, "matmul": 0, "mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1}
"""Matrix products, and which of their tensors has the terms of a sum as its last dimension."""

_SUMS = frozenset(("sum", "mean", "prod", "cumsum", "cumprod", "logsumexp", "var", "std"))


def _terms(name: str, call: FunctionCall) -> int:
    """The number of terms in a sum that a function computes; 0 if it computes none."""
    tensors = [each for each in (*call.args, *call.kwargs.values()) if isinstance(each, torch.Tensor)]
    if name in _PRODUCTS:
        return tensors[_PRODUCTS[name]].shape[-1]
    if name.startswith("conv") and len(tensors) > 1:
        weight = tensors[1]
        return weight.numel() // max(weight.shape[1 if "transpose" in name else 0], 1)
    if name not in _SUMS:
        return 0
    over = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    dims = over if isinstance(over, (tuple, list)) else range(tensors[0].dim()) if over is None else [over]
    return math.prod(tensors[0].shape[dim] for dim in dims)


class Seen:
    """The record of a watched pass in fp32.

    Attributes:
        called: the names of the modules that ran, in the order of their first calls.
        own: the canonical names of the functions that each module called outside its submodules.
        largest: the largest absolute number that each module read or gave, or has as a weight.
        terms: the largest number of terms in a sum that each module computed outside its submodules.
        first: the first module with a weight, an input or a result that is not finite; None if there is none.
    """

    def __init__(self) -> None:
        self.called: dict[str, None] = {}
        self.own: dict[str, set[str]] = {}
        self.largest: defaultdict[str, float] = defaultdict(float)
        self.terms: dict[str, int] = {}
        self.first: str | None = None

    def entered(self, call: Any, args: Any, kwargs: Any) -> None:
        """Note a call of a module, and its inputs."""
        self.called.setdefault(call.name)
        self._note(call.name, (*args, *call.of.parameters(recurse=False)))

    def returned(self, call: Any, args: Any, output: Any) -> None:
        """Note the result of a call."""
        self._note(call.name, output if isinstance(output, (tuple, list)) else (output,))

    def _note(self, name: str, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
                with DisableTorchFunction():  # the watch would take them for ops of the module
                    amax = float(value.detach().abs().amax())
                if self.first is None and not math.isfinite(amax):
                    self.first = name
                self.largest[name] = max(self.largest[name], amax)

    def beyond(self, limit: float, terms: float) -> set[str]:
        """The modules with a number beyond a limit, or a sum of more terms than another, as AutoCast's rules are."""
        return {name for name in self.called if self.largest.get(name, 0.0) > limit or self.terms.get(name, 0) > terms}

    def ops(self) -> list[str]:
        """The ops that O1 leaves in 16 bits, in the order of their names."""
        lists = OpLists.default()
        names = {name for own in self.own.values() for name in own if computes(name)}
        return sorted(name for name in names if lists.rule_of(name) not in ("float", "banned"))

    def modules(self, model: nn.Module) -> list[str]:
        """The names of the modules that are units, in the order of their first calls.

        A module that computes by itself is a unit with all that is in it, such as attention with its softmax. The model
        itself is none: with all of it in fp32 there is nothing left to find.
        """
        found: list[str] = []
        for name in self.called:
            if name == ROOT or any(name.startswith(f"{outer}.") for outer in found):
                continue
            inner = any(other.startswith(f"{name}.") for other in self.called)
            if not inner or self.own.get(name, set()) - _HARMLESS:
                found.append(name)
        return found


def watched(model: nn.Module, run: Callable[[], Any]) -> Seen:
    """Watch one pass of a model in fp32."""
    seen = Seen()
    watch: CallWatch

    def note(call: FunctionCall) -> None:
        spelling = spellings().get(call.function)
        if spelling is not None and computes(spelling[0]) and watch.running:
            module = watch.running[-1].name
            seen.own.setdefault(module, set()).add(spelling[0])
            seen.terms[module] = max(seen.terms.get(module, 0), _terms(spelling[0], call))

    watch = CallWatch(qualified_names(model), modules=seen, functions=note)
    with watch:
        run()
    return seen


def chosen(units: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The units that match a pattern, or lie in a module that does."""
    parts = list(patterns)
    return [unit for unit in units if any(fnmatch.fnmatch(unit, part) or unit.startswith(f"{part}.") for part in parts)]
