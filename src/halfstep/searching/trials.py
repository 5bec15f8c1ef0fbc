"""Trials: the step of a user on a copy of the model, in fp32, or at a level with some units in fp32.

Only copies run. So the model, its buffers, hooks and gradients are as before by construction, however a search ends.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..amp.initialize import initialize
from ..amp.session import latest
from ..casting import modules
from ..casting.scope import NO_CASTING, end_session
from ..core.dtypes import dtype_name
from ..core.errors import UsageError
from ..formats.recipe import PRODUCTS, Recipe

__all__ = ["Setting", "Trials", "copied"]

_SEED = 0x5EED

_RATE = 1e-3
"""The learning rate of runs that train."""

_NORM = 2.0**8
"""The norm of all gradients at the loss scale of runs that do not train: as far from 2^16, where float16 ends, as from
1. A unit whose gradients overflow already here makes a dynamic loss scale fall until small gradients are lost.
"""


@dataclass(frozen=True)
class Setting:
    """A meaning of "low" in a search.

    Attributes:
        dtype: the 16-bit dtype.
        level: "O1" or "O2".
        unit: "module" or "op".
        products: the recipe of each linear layer by its name, whose products are the units; None without formats.
        passes: True if each product of a layer is a unit by itself, and runs train.
    """

    dtype: torch.dtype
    level: str
    unit: str
    products: dict[str, str] | None = None
    passes: bool = False

    def units(self) -> list[str]:
        """The names of the units among products: a layer, or a product of a layer."""
        if not self.passes:
            return list(self.products or ())
        recipes = {name: Recipe.parse(text) for name, text in (self.products or {}).items()}
        return [f"{name}.{which}" for name, one in recipes.items() for which in PRODUCTS if any(getattr(one, which))]

    def recipe(self, wide: Iterable[str] = ()) -> dict[str, str] | None:
        """The value for ``products=``, with some units without formats."""
        if not self.passes:
            return {name: text for name, text in (self.products or {}).items() if name not in {*wide}} or None
        return {
            name: "; ".join([text, *(f"{which}=None @ None" for which in PRODUCTS if f"{name}.{which}" in {*wide})])
            for name, text in (self.products or {}).items()
        }

    def options(self, wide: Iterable[str] = ()) -> dict[str, Any]:
        """The arguments of ``amp.initialize`` that bring a model to the level, with some units in higher precision."""
        options: dict[str, Any] = {"opt_level": self.level, "dtype": dtype_name(self.dtype)}
        if self.products is None and wide:
            options["excluded_layers" if self.unit == "module" else "custom_black_list"] = list(wide)
        elif recipe := self.recipe(wide):
            options["products"] = recipe
        return options

    @contextmanager
    def lowered(self, model: nn.Module, wide: Iterable[str] = (), optimizer: Any = None) -> Iterator[nn.Module]:
        """Bring a model to the level as ``amp.initialize`` does; the session of the user's is as before afterwards."""
        before = latest.session
        initialize(model, optimizer, verbosity=0, **self.options(wide))
        try:
            yield model
        finally:
            latest.session = before
            end_session(modules.hooks_of(model).casting)


def copied(model: nn.Module) -> nn.Module:
    """Copy a model, without casts.

    Raises:
        UsageError: for a model that cannot be copied.
    """
    try:
        found = copy.deepcopy(model)
    except Exception as error:
        raise UsageError(
            f"search runs the step on copies of the model, and it cannot be copied ({error}). Search before the model "
            "has run, or give its class a __deepcopy__."
        ) from error
    modules.remove_hooks(found)
    return found


@dataclass
class Trials:
    """Runs of the user's step over batches.

    Attributes:
        model: the model; only copies of it run.
        step: the function of the user, ``step(model, batch)``.
        metric: a function to call in its place; None for the step.
        setting: the meaning of "low".
        scale: the loss scale of backward passes, with which the gradients in fp32 have the norm ``_NORM``.
    """

    model: nn.Module
    step: Callable[[nn.Module, Any], Any]
    metric: Callable[[nn.Module, Any], Any] | None
    setting: Setting
    scale: float = 1.0

    def losses(self, batches: Sequence[Any], runs: int, wide: Iterable[str] | None = None) -> list[list[float]]:
        """The losses of some runs, which differ in their random numbers; all are inf in a run in which a loss, or a
        gradient of the last batch, is not finite.

        Args:
            batches: the batches of a run.
            runs: the number of runs.
            wide: the units in fp32; None for all of the model.
        """
        return [self._run(batches, wide, run) for run in range(runs)]

    def _run(self, batches: Sequence[Any], wide: Iterable[str] | None, run: int) -> list[float]:
        with self._prepared(wide) as (model, optimizer):
            found = []
            for number, batch in enumerate(batches):
                torch.manual_seed(_SEED + 1000 * run + number)
                found.append(self._loss(model, batch, optimizer))
                if not math.isfinite(found[-1]):
                    return [math.inf] * len(batches)
            size = 1.0 if optimizer is not None else self._gradient(model, batches[-1])
            if wide is None:
                self.scale *= _NORM / (size or _NORM)
            return found if math.isfinite(size) else [math.inf] * len(batches)

    @contextmanager
    def _prepared(self, wide: Iterable[str] | None) -> Iterator[tuple[nn.Module, torch.optim.Optimizer | None]]:
        model = copied(self.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE) if self.setting.passes else None
        with NO_CASTING if wide is None else self.setting.lowered(model, wide, optimizer):
            yield model, optimizer

    def _loss(self, model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None) -> float:
        found = None if self.metric is None else float(self.metric(model, batch))
        if found is None or optimizer is not None:
            loss = self.step(model, batch)
            found = float(loss.detach()) if found is None else found
            if optimizer is not None:
                loss.backward()  # in bfloat16, where there is no loss scale
                optimizer.step()
                optimizer.zero_grad()
        return found

    def _gradient(self, model: nn.Module, batch: Any) -> float:
        """The norm of all gradients of a batch; inf or NaN if one of them is not finite."""
        model.zero_grad()
        (self.step(model, batch) * self.scale).backward()
        return math.hypot(*(float(p.grad.float().norm()) for p in model.parameters() if p.grad is not None))
