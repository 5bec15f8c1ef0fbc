"""The scores of units: how much the rounding of each changes the loss, from one pass in fp32 with a low twin beside it.

Each unit also runs in 16 bits, on the inputs that it has in fp32. The forward score is the sum over samples of
(sum of g dY)^2, with g the gradient of its output and dY the difference of its outputs: the change of the loss to first
order. The sum inside keeps the signs, because the rounding of a weight is the same error at every place. The backward
pass of the twin gives a second score: how far its gradients diverge, as the square of the change of the loss if the
weights move by a thousandth along the error of their gradients. An op has no weights, so its inputs take their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
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

__all__ = ["Score", "scores"]

_Watch = tuple[AbstractContextManager[Any], Callable[[], None]]
"""A context for the forward pass of a batch, and a function to call after the backward pass."""

_STEP = 1e-3
"""The size of an update, as a share of the weights."""

_TOP = 1.0
"""The size to which the largest gradient of a unit is scaled in its float16 backward pass, as a loss scale does. Sums
over a batch, and the gradients of further batches, have room above it."""


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
        self.scales: dict[str, float] = {}

    def scores(self) -> dict[str, Score]:
        """The sums as numbers; inf for what is not finite."""
        return {name: Score(_plain(self.forward[name]), _plain(self.backward[name])) for name in self.forward}

    def watch(self, name: str, real: Any, low: Any, then: Callable[[int, torch.Tensor], None] | None = None) -> None:
        """Add to the score of a unit once the gradients of its outputs are there."""
        pairs = zip(_floating(real), _floating(low), strict=False)
        for place, (one, other) in enumerate(pairs):
            error = other.detach().to(torch.float32, copy=True).sub_(one.detach())
            if not one.requires_grad:
                continue

            def add(grad: torch.Tensor, place: int = place, error: torch.Tensor = error) -> None:
                changes = torch.atleast_1d(error.mul_(grad)).unsqueeze(-1).flatten(1).sum(1)  # a row is a sample
                changes = changes.double()
                self.forward[name] = self.forward[name] + changes.dot(changes)
                if then is not None:
                    then(place, grad)

            one.register_hook(add)

    def gradients(
        self, name: str, result: torch.Tensor, inputs: Sequence[torch.Tensor], grad: torch.Tensor, dtype: torch.dtype
    ) -> list[torch.Tensor | None]:
        """The gradients of the inputs of a 16-bit unit; float16 has a loss scale, from the unit's first gradient."""
        scale = 1.0 if dtype is torch.bfloat16 else self.scales.get(name, 0.0)
        if not scale:
            top = float(grad.abs().amax())
            scale = 1.0
            if 0.0 < top < math.inf:
                scale = self.scales[name] = 2.0 ** math.floor(math.log2(_TOP / top))
        root = (grad if scale == 1.0 else grad * scale).to(result.dtype)
        made = torch.autograd.grad(result, inputs, root, retain_graph=True, allow_unused=True)
        return [each if each is None or scale == 1.0 else each.float().div_(scale) for each in made]

    def diverged(self, name: str, size: torch.Tensor, low: torch.Tensor, real: torch.Tensor) -> None:
        """Add the error of a gradient to the backward score of a unit, with the norm of what has the gradient."""
        self.backward[name] = self.backward[name] + (_STEP * size * (real - low).norm()).double().square()


def _floating(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor) and each.is_floating_point()]


class _Twins:
    """The units of a model in 16 bits, which run beside the units in fp32."""

    def __init__(self, model: nn.Module, twin: nn.Module, sums: _Sums, dtype: torch.dtype) -> None:
        self.dtype, self.sums = dtype, sums
        self.real = {name: model.get_submodule(name) for name in sums.forward}
        self.scope: Any = hooks_of(twin).casting
        self.low = {name: twin.get_submodule(name) for name in self.real}
        self.open: list[Any] = []
        self.found: dict[torch.Tensor, torch.Tensor] = {}  # the gradients of 16-bit weights
        self.pairs = [
            (name, real, low, real.detach().norm())
            for name in self.real
            for real, low in zip(self.real[name].parameters(), self.low[name].parameters(), strict=True)
        ]

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
            args, kwargs = _rounded((args, kwargs), self.dtype)
            with same_random_numbers(module), torch.enable_grad(), self.scope:
                self.open.append(self.low[name](*args, **kwargs))

        return run

    def _after(self, name: str) -> Callable[..., None]:
        weights = [p for p in self.low[name].parameters() if p.requires_grad]

        def compare(module: nn.Module, args: Any, output: Any) -> None:
            low = self.open.pop()
            results = _floating(low)

            def back(place: int, grad: torch.Tensor) -> None:
                if weights and results[place].requires_grad:
                    made = self.sums.gradients(name, results[place], weights, grad, self.dtype)
                    for weight, found in zip(weights, made, strict=True):
                        if found is not None:
                            more = self.found.get(weight)
                            self.found[weight] = found if more is None else found.float() + more

            self.sums.watch(name, output, low, back)

        return compare

    def end_batch(self) -> None:
        """Compare the gradients of weights, which are complete now, and forget them."""
        for name, real, low, size in self.pairs:
            found = self.found.pop(low, None)
            if found is not None and real.grad is not None:
                self.sums.diverged(name, size, found, real.grad)


def _rounded(value: Any, dtype: torch.dtype, needs: bool = False) -> Any:
    """The same with copies of its floating tensors in 16 bits, which the unit may write to.

    Args:
        value: the arguments of a unit.
        dtype: the 16-bit dtype.
        needs: True if a copy needs a gradient where the tensor does.
    """
    return cast_tree(
        value, dtype, lambda *each: each[-1].detach().to(dtype).requires_grad_(needs and each[-1].requires_grad)
    )


@contextmanager
def _beside_modules(model: nn.Module, sums: _Sums, setting: Setting) -> Iterator[_Watch]:
    """Run modules also in 16 bits."""
    with setting.lowered(copied(model)) as twin:
        twins = _Twins(model, twin, sums, setting.dtype)
        with twins.attached():
            yield nullcontext(), twins.end_batch


@contextmanager
def _beside_products(model: nn.Module, sums: _Sums, setting: Setting) -> Iterator[_Watch]:
    """Compute products of linear layers also with rounded operands.

    The backward score of a gradient is the change of the loss to first order if the input, or the weight, moves by a
    thousandth along its error.
    """
    layers = setting.products or {}
    names = {name: [f"{name}.{which}" if setting.passes else name for which in PRODUCTS] for name in layers}

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
                        sums.diverged(unit, operand.detach().norm(), one, other)

            sums.watch(names[name][0], output, low, back)

        return run

    with ExitStack() as stack:
        for name, text in layers.items():
            hook = model.get_submodule(name).register_forward_hook(beside(name, Recipe.parse(text)))
            stack.callback(hook.remove)
        yield nullcontext(), lambda: None


def _view(value: torch.Tensor) -> torch.Tensor:
    return value.view_as(value) if value.requires_grad else value


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
        given, low = _rounded((args, kwargs), self.dtype, needs=True), None
        device = next((each.device for each in _floating((args, kwargs))), torch.device("cpu"))
        probe = nn.Module()
        probe.register_parameter("at", nn.Parameter(torch.empty(0, device=device)))
        with same_random_numbers(probe), suppress(RuntimeError):  # no 16-bit kernel: casting computes it in fp32
            low = func(*given[0], **given[1])
        if low is None:
            return func(*args, **kwargs)
        # An op gets views of its inputs: the gradient of a view is the op's own part.
        args, kwargs = cast_tree((args, kwargs), self.dtype, lambda *each: _view(each[-1]))
        result = func(*args, **kwargs)
        self._watch(spelling[0], (args, kwargs), result, given, low)
        return result

    def _watch(self, name: str, inputs: Any, result: Any, low_inputs: Any, low: Any) -> None:
        """Compare the results, and in the backward pass the gradients of the inputs."""
        results = _floating(low)
        pairs = [each for each in zip(_floating(inputs), _floating(low_inputs), strict=True) if each[1].requires_grad]
        found: list[torch.Tensor | None] = [None] * len(pairs)

        def back(place: int, grad: torch.Tensor) -> None:
            if results[place].requires_grad:
                made = self.sums.gradients(name, results[place], [each for _, each in pairs], grad, self.dtype)
                found[:] = [b if a is None else a if b is None else a + b for a, b in zip(found, made, strict=True)]

        def compare(grad: torch.Tensor, place: int, size: torch.Tensor) -> None:
            if (one := found[place]) is not None:
                self.sums.diverged(name, size, one, grad)

        for place, (one, _) in enumerate(pairs):
            if one.requires_grad:
                one.register_hook(partial(compare, place=place, size=one.detach().norm()))
        self.sums.watch(name, result, low, back)


@contextmanager
def _beside_ops(model: nn.Module, sums: _Sums, setting: Setting) -> Iterator[_Watch]:
    """Run ops also in 16 bits."""
    yield _OpTwins(sums, setting.dtype), lambda: None


def scores(
    model: nn.Module,
    units: Sequence[str],
    step: Callable[[nn.Module, Any], Any],
    batches: Sequence[Any],
    setting: Setting,
) -> dict[str, Score]:
    """Score the units of a search, as sums over batches."""
    model, sums = copied(model), _Sums(units)
    kind = _beside_ops if setting.unit == "op" else _beside_modules if setting.products is None else _beside_products
    with kind(model, sums, setting) as (forward, end_batch), NO_CASTING:
        for batch in batches:
            with forward:
                loss = step(model, batch)
            loss.backward()
            end_batch()
            model.zero_grad()
    found = sums.scores()
    return {name: found[name] for name in units}
