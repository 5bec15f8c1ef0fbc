"""Trials: the step of a user on a copy of the model, in fp32, or at a level with some units in fp32.

Only copies run. So the model, its buffers, hooks and gradients are as before by construction, however a search ends.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..amp.auto_cast import auto_cast
from ..amp.decorate import decorate
from ..casting import modules
from ..casting.inputs import ModuleInputs
from ..casting.scope import NO_CASTING, OpCasting
from ..core.errors import UsageError

__all__ = ["Setting", "Trials", "copied", "make_islands"]

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

    def lowered(self, model: nn.Module, wide: Iterable[str] = ()) -> nn.Module:
        """Bring a model to the level, but for the modules of some names, which become islands in fp32."""
        islands = [model.get_submodule(name) for name in wide] if self.unit == "module" else []
        if self.level == "O2":
            decorate(model, level="O2", dtype=self.dtype, excluded_layers=islands or None)
            modules.hooks_of(model).outputs = torch.float32  # as amp.initialize has it
        make_islands(islands, self.dtype if self.level == "O2" else None)
        return model

    def scope(self, wide: Iterable[str] = ()) -> Any:
        """The scope in which a step of a lowered model runs."""
        if self.level == "O2":  # the model has its own
            return nullcontext()
        black = list(wide) if self.unit == "op" else None
        return auto_cast(level="O1", dtype=self.dtype, custom_black_list=black)


def make_islands(islands: Iterable[nn.Module], outputs: torch.dtype | None) -> None:
    """Let modules compute in fp32 under any casting around them.

    Args:
        islands: modules with fp32 weights.
        outputs: the dtype of what they return; None leaves it.
    """
    for island in islands:
        hooks = modules.hooks_of(island, explicit=True)
        hooks.casting, hooks.inputs = OpCasting(None, enabled=False), ModuleInputs(torch.float32)
        hooks.outputs = outputs
        hooks.attach_to(island)


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
            with self.setting.scope(wide):
                yield self.setting.lowered(model, wide)

    def _loss(self, model: nn.Module, batch: Any) -> float:
        if self.metric is not None:
            return float(self.metric(model, batch))
        return float(self.step(model, batch).detach())
