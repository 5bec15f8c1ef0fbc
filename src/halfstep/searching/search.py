"""``search``: finds the smallest part of a model that must stay in fp32, proven by the loss."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..amp.arguments import RecipeChoice
from ..casting.scope import NO_CASTING
from ..core.aliases import aliases
from ..core.checks import check_count, check_kind, check_switch
from ..core.dtypes import dtype_name, is_half, parse_half
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..diagnostics.findings.forward import same_random_numbers
from ..formats.layers import choose
from ..formats.recipe import Recipe
from .finder import CannotError, Finder
from .guard import Guard
from .result import SearchResult
from .scores import scores
from .trials import Setting, Trials, copied
from .units import Seen, chosen, watched

__all__ = ["search"]

logger = logging.getLogger("halfstep")

_RANGE = {torch.float16: 2.0**15, torch.bfloat16: math.inf}
"""The size of a number, or the number of terms in a sum, from which on a unit comes first."""


@aliases(opt_level="level")
def search(
    model: nn.Module,
    step: Callable[[nn.Module, Any], torch.Tensor],
    batches: Iterable[Any],
    *,
    dtype: torch.dtype | str = "float16",
    level: str = "O1",
    products: RecipeChoice = None,
    guard: Guard | None = None,
    unit: str = "module",
    passes: bool = False,
    score_batches: int = 8,
    budget: int | None = None,
    keep: Iterable[str] | None = None,
    checkpoint: str | Path | None = None,
    progress: bool | Callable[[str, int, str], object] = True,
) -> SearchResult:
    """Find what must stay in fp32.

    ::

        result = halfstep.search(model, lambda model, batch: loss_fn(model(batch[0]), batch[1]), loader, level="O2")
        print(result)
        model, optimizer = amp.initialize(model, optimizer, **result.options)

    The search first tries the whole model in 16 bits, and ends if the loss matches the loss in fp32. Otherwise it
    scores all units in one pass over a few batches, and puts 1, 2, 4, 8 ... of them in fp32, the highest score first,
    until the loss matches. It then takes out each unit that is not needed, and confirms the answer on batches that it
    has not seen. Only copies of the model run: the search leaves the model and the random state as they were, even
    after an error.

    Args:
        model: in fp32, on any device, before ``amp.initialize``.
        step: a function that is called as ``step(model, batch)`` with copies of the model. It returns the loss and runs
            no backward pass.
        batches: a loader or list, of which up to twice ``score_batches`` batches are used. The first half decides, and
            the second half confirms the answer.
        dtype: float16 or bfloat16.
        level: "O1" or "O2"; ``opt_level=`` also works.
        products: a recipe for linear layers, as ``amp.initialize(products=)`` takes it: the search finds which layers
            compute without formats. The search starts from all linear layers, even with ``layers="auto"``.
        guard: the test that decides; None for the loss, with a tolerance from its own noise.
        unit: "module", or "op" at O1, where the answer is a choice of op lists.
        passes: True to search over the three products of each layer, ``head.forward``, ``head.input_gradient`` and
            ``head.weight_gradient``; needs ``products``. A run then trains in bfloat16, with AdamW.
        score_batches: the number of batches that are scored, and that a guarded run takes.
        budget: the largest number of guarded runs; None for no limit.
        keep: units that stay in fp32 in any case, as names or patterns of ``fnmatch``.
        checkpoint: a file that keeps scores and guarded runs; if it exists, the search continues from it.
        progress: True to log each stage and each guarded run; or a function that is called with the stage, the number
            of guarded runs and what is known.

    Returns:
        The answer; ``status`` says whether the search has found one, found that there is none, or was interrupted by
        Ctrl-C.

    Raises:
        ArgumentTypeError: for an argument of another type.
        ArgumentValueError: for a value that is not allowed, no batches, or a checkpoint of another search.
        UsageError: for a model that has no parameters, has 16-bit ones or cannot be copied, for a step that returns no
            scalar, runs a backward pass or does not call the model that it is given, or for a loss that is not finite
            in fp32.
    """
    setting = _check(model, step, dtype, level, unit, products, passes)
    guard = Guard() if guard is None else guard
    check_kind("guard", guard, Guard, "a halfstep.Guard, or None")
    check_count("score_batches", score_batches)
    if budget is not None:
        check_count("budget", budget)
    if isinstance(keep, str):
        raise ArgumentTypeError(f"keep={keep!r} must be a list of names or patterns: keep=[{keep!r}].")
    if not callable(progress):
        check_switch("progress", progress)
    halves = _split(batches, score_batches)
    say = _log if progress is True else progress if callable(progress) else _silent
    with same_random_numbers(model):
        seen, flops = _watch(model, step, halves[0][0])
        units = seen.ops() if unit == "op" else seen.modules(model)
        if products is not None:
            units, flops = setting.units(), _of_units(setting, flops)
        limit = _RANGE[setting.dtype] if products is None else math.inf
        beyond = seen.beyond(limit, terms=limit)
        finder = Finder(
            trials=Trials(model, step, guard.metric, setting),
            guard=guard,
            batches=halves,
            units=units,
            always=_kept(units, keep or ()),
            score=lambda: scores(model, units, step, halves[0], setting),
            early={name for name in units if any(f"{each}.".startswith(f"{name}.") for each in beyond)},
            budget=budget,
            checkpoint=checkpoint,
            say=say,
        )
        status, why, found = _answer(finder)
    return SearchResult(
        status=status,
        keep=tuple(found),
        level=level,
        dtype=dtype_name(setting.dtype),
        unit=unit,
        why=why,
        tolerance=finder.tolerance,
        scores=finder.scores,
        flops={name: flops.get(name, 0) for name in units},
        runs=finder.history,
        products=setting.products,
        passes=passes,
    )


def _kept(units: list[str], keep: Iterable[str]) -> list[str]:
    """Return the units that ``keep`` chooses; each of its names and patterns must choose at least one."""
    keep = list(keep)
    for name in keep:
        if not chosen(units, [name]):
            raise ArgumentValueError(
                f"keep={name!r} is no unit, no module with units and no pattern of: {', '.join(units)}."
            )
    return chosen(units, keep)


def _answer(finder: Finder) -> tuple[str, str, Iterable[str]]:
    """Run a search; return its status, the reason for an early end, and the units to keep in fp32."""
    try:
        return "found", "", finder.find()
    except KeyboardInterrupt:
        why = "Ctrl-C has ended it; a search with the same checkpoint= continues from there."
        return "interrupted", why, finder.best()
    except CannotError as no:
        return "cannot", str(no), finder.best()


def _log(stage: str, runs: int, known: str) -> None:
    logger.info("search: %s, %d guarded runs, %s", stage, runs, known)


def _silent(*_: Any) -> None:
    pass


def _of_units(setting: Setting, flops: dict[str, int]) -> dict[str, int]:
    """The floating point operations of units among products; each product of a layer has as many."""
    return {unit: flops.get(unit.rpartition(".")[0] if setting.passes else unit, 0) for unit in setting.units()}


def _check(
    model: nn.Module, step: Any, dtype: Any, level: str, unit: str, products: RecipeChoice, passes: bool
) -> Setting:
    check_kind("model", model, nn.Module, "a torch.nn.Module")
    if not callable(step):
        raise ArgumentTypeError(f"step={step!r} must be a function of (model, batch) that returns the loss.")
    if level not in ("O1", "O2"):
        raise ArgumentValueError(f"level={level!r} must be 'O1' or 'O2', the levels that have parts in fp32.")
    if unit not in ("module", "op"):
        raise ArgumentValueError(f"unit={unit!r} must be 'module' or 'op'.")
    if unit == "op" and level != "O1":
        raise UsageError("unit='op' finds op lists, and only O1 casts by op lists; use level='O1' or unit='module'.")
    if next(model.parameters(), None) is None:
        raise UsageError(f"{type(model).__name__} has no parameters, so there is no training to search for.")
    narrow = next((name for name, p in model.named_parameters() if is_half(p)), None)
    if narrow is not None:
        raise UsageError(
            f"{narrow} of the model is in 16 bits already, and search compares with fp32. Give it the model in fp32, "
            "before amp.initialize."
        )
    dtype = parse_half(dtype)
    check_switch("passes", passes)
    if products is None:
        if passes:
            raise UsageError("passes=True takes apart the products of linear layers: give products= with it.")
        return Setting(dtype, level, unit)
    if unit == "op":
        raise UsageError("unit='op' finds op lists, and products= are of linear layers; leave one of them out.")
    if passes and dtype is not torch.bfloat16:
        raise UsageError("passes=True trains in its runs, without a loss scale: use dtype='bfloat16'.")
    recipe = Recipe.of(products)
    by_layer = callable(recipe.layers)
    table = choose(model, recipe if by_layer else recipe.replace(layers="all", last_blocks=0.0))
    texts = {each.name: str(each.recipe if by_layer else recipe) for each in table if each.recipe is not None}
    return Setting(dtype, level, unit, texts, passes)


def _split(batches: Iterable[Any], count: int) -> tuple[list[Any], list[Any]]:
    """Divide the batches into one half for guarded runs and another to confirm."""
    if isinstance(batches, torch.Tensor) or not isinstance(batches, Iterable):
        raise ArgumentTypeError(f"batches must be a loader or a list of batches, not {type(batches).__name__}.")
    found = list(itertools.islice(batches, 2 * count))
    if len(found) < 2:
        raise ArgumentValueError(
            f"batches has {len(found)} batches; a search takes at least 2, and better {2 * count} (twice "
            "score_batches): one half decides, and the other confirms."
        )
    return found[: len(found) // 2], found[len(found) // 2 :]


def _watch(model: nn.Module, step: Callable[[nn.Module, Any], Any], batch: Any) -> tuple[Seen, dict[str, int]]:
    """Watch a pass in fp32 and check what the step does.

    Raises:
        UsageError: for a step that cannot be searched.
    """
    copy = copied(model)
    copy.zero_grad()
    losses: list[Any] = []
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    counter = FlopCounterMode(display=False)
    with NO_CASTING, counter:
        seen = watched(copy, lambda: losses.append(step(copy, batch)))
    loss = losses[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(type(loss).__name__)
        raise UsageError(f"step must return the loss, a tensor with one number, and it returned {what}.")
    if any(p.grad is not None for p in copy.parameters()):
        raise UsageError("step ran a backward pass; let it return the loss only: search runs the backward passes.")
    if not seen.called:
        raise UsageError("step did not call the model that it was given: use its argument, as search passes copies.")
    if not math.isfinite(loss.detach()):
        first = f"{seen.first} is the first module with" if seen.first else "the step computes it, as no module has"
        raise UsageError(f"The loss is not finite in fp32, so no dtype helps: {first} inf or NaN.")
    if loss.grad_fn is None:
        raise UsageError("The loss of step has no gradient: it must come from the model, outside torch.no_grad().")
    root = type(copy).__name__
    counts = {name.removeprefix(f"{root}."): sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    return seen, counts
