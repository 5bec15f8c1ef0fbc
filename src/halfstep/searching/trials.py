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

__all__ = ["Setting", "Trials", "copied"]

_SEED = 0x5EED


@dataclass(frozen=True)
class Setting:
    """A meaning of "low" in a search.

    Attributes:
        dtype: the 16-bit dtype.
        level: "O1" or "O2".
        unit: "module" or "op".
    """

    dtype: torch.dtype
    level: str
    unit: str

    def options(self, wide: Iterable[str] = ()) -> dict[str, Any]:
        """The arguments of ``amp.initialize`` that bring a model to the level, with some units in fp32."""
        kept = {"excluded_layers" if self.unit == "module" else "custom_black_list": list(wide)} if wide else {}
        return {"opt_level": self.level, "dtype": dtype_name(self.dtype), **kept}

    @contextmanager
    def lowered(self, model: nn.Module, wide: Iterable[str] = ()) -> Iterator[nn.Module]:
        """Bring a model to the level as ``amp.initialize`` does; the session of the user's is as before afterwards."""
        before = latest.session
        initialize(model, verbosity=0, **self.options(wide))
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
    """

    model: nn.Module
    step: Callable[[nn.Module, Any], Any]
    metric: Callable[[nn.Module, Any], Any] | None
    setting: Setting

    def losses(self, batches: Sequence[Any], runs: int, wide: Iterable[str] | None = None) -> list[list[float]]:
        """The losses of some runs, which differ in their random numbers.

        Args:
            batches: the batches of a run.
            runs: the number of runs.
            wide: the units in fp32; None for all of the model.
        """
        return [self._run(batches, wide, run) for run in range(runs)]

    def _run(self, batches: Sequence[Any], wide: Iterable[str] | None, run: int) -> list[float]:
        with self._prepared(wide) as model:
            found = []
            for number, batch in enumerate(batches):
                torch.manual_seed(_SEED + 1000 * run + number)
                found.append(self._loss(model, batch))
                if not math.isfinite(found[-1]):
                    return [math.inf] * len(batches)
            return found

    @contextmanager
    def _prepared(self, wide: Iterable[str] | None) -> Iterator[nn.Module]:
        model = copied(self.model)
        if wide is None:
            with NO_CASTING:
                yield model
        else:
            with self.setting.lowered(model, wide):
                yield model

    def _loss(self, model: nn.Module, batch: Any) -> float:
        if self.metric is not None:
            return float(self.metric(model, batch))
        return float(self.step(model, batch).detach())
