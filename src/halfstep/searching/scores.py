"""The scores of units: how much the rounding of each changes the loss, from one pass in fp32 with a low twin beside it.

Each unit also runs in 16 bits, on the inputs that it has in fp32. Its score is the sum over samples of (sum of g dY)^2,
with g the gradient of its output and dY the difference of its outputs: the change of the loss to first order. The sum
inside keeps the signs, because the rounding of a weight is the same error at every place. The backward pass of the
twin gives a second number: how far the gradients of its weights diverge, as the change of the loss that a step would
make with them that moves the weights by a thousandth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..casting.containers import cast_tree
from ..casting.modules import hooks_of
from ..casting.scope import NO_CASTING
from ..core.oplists.names import spellings
from ..diagnostics.findings.forward import same_random_numbers
from ..formats.products import linear
from ..formats.recipe import PRODUCTS, Recipe
from ..torch_internals.torch_compat import tree_flatten
from .trials import Setting, copied

__all__ = ["Score", "module_scores", "op_scores", "product_scores"]

_STEP = 1e-3
"""The size of an update, as a share of the weights."""

_TOP = 1.0
"""The size to which the largest gradient of a unit is scaled in its 16-bit backward pass, as a loss scale does. Sums
over a batch have room above it."""


class Score(NamedTuple):
    """The score of a unit: the sum of both numbers is what units are ordered by."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        """The number by which units are ordered; inf where 16 bits overflow."""
        return self.forward + self.backward


def _plain(value: Any) -> float:
    number = float(value)
    return number if math.isfinite(number) else math.inf


class _Sums:
    """Sums for each unit, kept as tensors so that nothing waits for the device."""

    def __init__(self, units: Iterable[str]) -> None:
        self.forward: dict[str, Any] = dict.fromkeys(units, 0.0)
        self.backward: dict[str, Any] = dict.fromkeys(self.forward, 0.0)

    def scores(self) -> dict[str, Score]:
        """The sums as numbers; inf for what is not finite."""
        return {name: Score(_plain(self.forward[name]), _plain(self.backward[name])) for name in self.forward}

    def watch(self, name: str, real: Any, low: Any, then: Callable[[int, torch.Tensor], None] | None = None) -> None:
        """Add to the score of a unit once the gradients of its outputs are there."""
        pairs = zip(_floating(real), _floating(low), strict=False)
        for place, (one, other) in enumerate(pairs):
            error = other.detach().float() - one.detach()
            if not one.requires_grad:
                continue

            def add(grad: torch.Tensor, place: int = place, error: torch.Tensor = error) -> None:
                changes = torch.atleast_1d(grad * error).double().unsqueeze(-1).flatten(1).sum(1)  # a row is a sample
                self.forward[name] = self.forward[name] + changes.square().sum()
                if then is not None:
                    then(place, grad)

            one.register_hook(add)


def _floating(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor) and each.is_floating_point()]


class _Twins:
    """The units of a model in 16 bits, which run beside the units in fp32."""

    def __init__(self, model: nn.Module, twin: nn.Module, units: Sequence[str], dtype: torch.dtype) -> None:
        self.dtype, self.sums = dtype, _Sums(units)
        self.real = {name: model.get_submodule(name) for name in units}
        self.scope: Any = hooks_of(twin).casting
        self.low = {name: twin.get_submodule(name) for name in units}
        self.open: list[Any] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self.real.items():
                before = module.register_forward_pre_hook(self._before(name), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(self._after(name)).remove)
            yield

    def _before(self, name: str) -> Callable[..., None]:
        def run(module: nn.Module, args: Any, kwargs: Any) -> None:
            """Before the unit: it may write to its inputs, and its random numbers come first."""
            args, kwargs = cast_tree(_detached((args, kwargs)), self.dtype)
            with same_random_numbers(module), torch.enable_grad(), self.scope:
                self.open.append(self.low[name](*args, **kwargs))

        return run

    def _after(self, name: str) -> Callable[..., None]:
        def compare(module: nn.Module, args: Any, output: Any) -> None:
            low = self.open.pop()
            results = _floating(low)
            weights = [p for p in self.low[name].parameters() if p.requires_grad]

            def back(place: int, grad: torch.Tensor) -> None:
                result = results[place]
                if weights and result.requires_grad:
                    top = float(grad.abs().amax())
                    scale = 2.0 ** math.floor(math.log2(_TOP / top)) if 0.0 < top < math.inf else 1.0
                    root = (grad * scale).to(result.dtype)
                    made = torch.autograd.grad(result, weights, root, retain_graph=True, allow_unused=True)
                    for weight, found in zip(weights, made, strict=True):
                        if found is not None:
                            found = found.float() / scale
                            weight.__dict__["found"] = weight.__dict__.get("found", 0.0) + found

            self.sums.watch(name, output, low, back)

        return compare

    def end_batch(self) -> None:
        """Compare the gradients of weights, which are complete now, and forget them."""
        for name, module in self.real.items():
            for real, low in zip(module.parameters(), self.low[name].parameters(), strict=True):
                found = low.__dict__.pop("found", None)
                if found is not None and real.grad is not None:
                    size = real.detach().norm() * (found - real.grad).norm()
                    self.sums.backward[name] = self.sums.backward[name] + (_STEP * size).double().square()
                real.grad = None


def _detached(value: Any) -> Any:
    """The same with copies of its fp32 tensors, which the unit may write to."""
    return cast_tree(value, torch.float64, lambda *each: each[-1].detach().clone())


def module_scores(
    model: nn.Module,
    units: Sequence[str],
    step: Callable[[nn.Module, Any], Any],
    batches: Sequence[Any],
    setting: Setting,
) -> dict[str, Score]:
    """Score modules, as sums over batches."""
    model = copied(model)
    with setting.lowered(copied(model)) as twin:
        twins = _Twins(model, twin, units, setting.dtype)
        with NO_CASTING, twins.attached():
            for batch in batches:
                step(model, batch).backward()
                twins.end_batch()
                model.zero_grad()
    return twins.sums.scores()


def product_scores(
    model: nn.Module,
    units: Sequence[str],
    step: Callable[[nn.Module, Any], Any],
    batches: Sequence[Any],
    setting: Setting,
) -> dict[str, Score]:
    """Score the products of linear layers with rounded operands, as sums over batches.

    The backward score of a gradient is the change of the loss to first order if the input, or the weight, moves by a
    thousandth along its error.
    """
    model, layers = copied(model), setting.products or {}
    names = {name: [f"{name}.{which}" if setting.passes else name for which in PRODUCTS] for name in layers}
    sums = _Sums(unit for each in names.values() for unit in each)

    def beside(name: str, recipe: Recipe) -> Callable[..., None]:
        def run(module: Any, args: Any, output: torch.Tensor) -> None:
            x, weight = args[0].detach().requires_grad_(), module.weight.detach().requires_grad_()
            with torch.enable_grad(), same_random_numbers(module):
                low = linear(x, weight, module.bias, recipe.products, torch.float32)
                exact = functional.linear(x, weight, module.bias)

            def back(_: int, grad: torch.Tensor) -> None:
                pairs = [torch.autograd.grad(each, (x, weight), grad) for each in (low, exact)]
                for unit, operand, one, other in zip(names[name][1:], (x, weight), *pairs, strict=True):
                    if operand is weight or args[0].requires_grad:
                        size = operand.detach().norm() * (one - other).norm()
                        sums.backward[unit] = sums.backward[unit] + (_STEP * size).double().square()

            sums.watch(names[name][0], output, low, back)

        return run

    with ExitStack() as stack, NO_CASTING:
        for name, text in layers.items():
            hook = model.get_submodule(name).register_forward_hook(beside(name, Recipe.parse(text)))
            stack.callback(hook.remove)
        for batch in batches:
            step(model, batch).backward()
            model.zero_grad()
    found = sums.scores()
    return {unit: found[unit] for unit in units}


class _OpTwins(TorchFunctionMode):
    """Runs each op a second time, on inputs rounded to 16 bits."""

    def __init__(self, sums: _Sums, dtype: torch.dtype) -> None:
        super().__init__()
        self.sums, self.dtype = sums, dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        spelling = spellings().get(func)
        if spelling is None or spelling[1] or spelling[0] not in self.sums.forward:
            return func(*args, **kwargs)
        low = None
        device = next((each.device for each in _floating((args, kwargs))), torch.device("cpu"))
        probe = nn.Module()
        probe.register_parameter("at", nn.Parameter(torch.empty(0, device=device)))
        with same_random_numbers(probe), torch.no_grad():
            try:
                low = func(*cast_tree(tuple(args), self.dtype), **cast_tree(kwargs, self.dtype))
            except RuntimeError:  # no 16-bit kernel: casting computes it in fp32
                low = None
        result = func(*args, **kwargs)
        if low is not None:
            self.sums.watch(spelling[0], result, low)
        return result


def op_scores(
    model: nn.Module,
    units: Sequence[str],
    step: Callable[[nn.Module, Any], Any],
    batches: Sequence[Any],
    setting: Setting,
) -> dict[str, Score]:
    """Score ops by their forward passes, as sums over batches."""
    model, sums = copied(model), _Sums(units)
    with NO_CASTING:
        for batch in batches:
            with _OpTwins(sums, setting.dtype):
                loss = step(model, batch)
            loss.backward()
    return sums.scores()
