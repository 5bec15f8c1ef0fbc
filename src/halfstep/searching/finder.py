"""The stages of a search over sets of units: all low, a prefix of the scores that passes, and what of it is needed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.errors import ArgumentValueError, UsageError
from ..diagnostics.pages import write_text
from .guard import Guard, Outcome, compared, tolerance_of
from .scores import Score
from .trials import Trials

__all__ = ["CannotError", "Finder"]


class CannotError(Exception):
    """The end of a search without an answer; its text says why."""


@dataclass
class Finder:
    """A search over sets of units.

    Attributes:
        trials: the runs of the step.
        guard: the test that decides.
        batches: the batches of a guarded run, and the batches that confirm an answer.
        units: the names of all units.
        always: the units that are in fp32 in any case.
        score: a function that makes the scores.
        early: the units that come first regardless of their scores.
        budget: the largest number of guarded runs; None for no limit.
        checkpoint: the file of what is known; None for no file.
        say: a function to call with the stage, the number of guarded runs and what is known.
        scores: the scores, once known, the highest first.
        history: the guarded runs that were made.
        tolerance: the tolerance, once known.
    """

    trials: Trials
    guard: Guard
    batches: tuple[Sequence[Any], Sequence[Any]]
    units: list[str]
    always: list[str]
    score: Callable[[], dict[str, Score]]
    early: set[str]
    budget: int | None
    checkpoint: str | Path | None
    say: Callable[[str, int, str], object]
    scores: dict[str, Score] = field(default_factory=dict)
    history: list[tuple[tuple[str, ...], Outcome]] = field(default_factory=list)
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        self._known: dict[tuple[str, bool], Outcome] = {}
        self._reference: dict[bool, list[float]] = {}

    def find(self) -> list[str]:
        """Return the units that must stay in fp32, ``always`` among them.

        Raises:
            CannotError: if nothing that was tried passes, or the budget has ended.
        """
        self._begin()
        fits, order = self.test(()), self._order()
        if fits:
            return self._confirmed([], order)
        if not order:
            raise CannotError("there is no unit to put in fp32.")
        size = 1
        while not self.test(order[:size]):
            if size == len(order):
                raise CannotError(
                    "with all units in fp32 the loss still differs. What the model computes outside its "
                    'modules may be the cause: unit="op" finds it, or give it a module of its own.'
                    if self.trials.setting.products is None
                    else "without formats the loss still differs from fp32. Search without products= for the cause."
                )
            size = min(2 * size, len(order))
        least = size // 2
        while size - least > 1:  # the shortest prefix that passes
            middle = (least + size) // 2
            least, size = (least, middle) if self.test(order[:middle]) else (middle, size)
        found = order[:size]
        for one in reversed(order[: size - 1]):  # the last is needed: without it the guard has failed
            without = [each for each in found if each != one]
            found = without if self.test(without) else found
        return self._confirmed(found, order)

    def best(self) -> list[str]:
        """The smallest set that has passed a guarded run; all units if there is none."""
        passed = [wide for wide, outcome in self.history if outcome.passed]
        return sorted(min(passed, key=len, default=self.units), key=self.units.index)

    def test(self, wide: Iterable[str], *, fresh: bool = False) -> bool:
        """Make a guarded run with some units in fp32, unless its outcome is known."""
        names = tuple(name for name in self.units if name in {*wide, *self.always})
        key = ("\n".join(names), fresh)
        if key not in self._known:
            if self.budget is not None and len(self.history) >= self.budget:
                raise CannotError(f"the budget of {self.budget} guarded runs has ended.")
            enough = f"; {len(self.best())} are enough" if any(one.passed for _, one in self.history) else ""
            known = f"{len(names)} of {len(self.units)} in fp32{enough}"
            self.say("confirm" if fresh else "search", len(self.history), known)
            runs = len(self._losses(fresh)) // len(self.batches[fresh])
            losses = [loss for run in self.trials.losses(self.batches[fresh], runs, names) for loss in run]
            self._add(names, fresh, compared(losses, self._losses(fresh), self.tolerance))
            self._save()
        return self._known[key].passed

    # ---- inside

    def _begin(self) -> None:
        self.say("fp32", 0, f"{len(self.units)} units")
        self._losses(False)
        if self.checkpoint is not None and Path(self.checkpoint).exists():
            self._load(Path(self.checkpoint))

    def _losses(self, fresh: bool) -> list[float]:
        """The losses of fp32 on the batches of a run; of several runs, if random numbers matter."""
        if fresh not in self._reference:
            runs = self.trials.losses(self.batches[fresh], self.guard.runs)
            if any(loss == math.inf for run in runs for loss in run):
                raise UsageError(
                    "The loss, or a gradient, is not finite in fp32, so no dtype helps. "
                    "halfstep.numerics.compare_step and halfstep.diagnose name the module at which this begins."
                )
            if not fresh:
                self.tolerance = tolerance_of(self.guard, runs)
            runs = runs if any(run != runs[0] for run in runs) else runs[:1]
            self._reference[fresh] = [loss for run in runs for loss in run]
        return self._reference[fresh]

    def _order(self) -> list[str]:
        if not self.scores:
            self.say("scores", len(self.history), f"{len(self.units)} units")
            found = self.score()
            last = {name: math.isfinite(score.forward) and name not in self.early for name, score in found.items()}
            self.scores = {name: found[name] for name in sorted(found, key=lambda one: (last[one], -found[one].total))}
            self._save()
        return [name for name in self.scores if name not in self.always]

    def _confirmed(self, found: list[str], order: list[str]) -> list[str]:
        """Return the set, or a larger one, that also passes on fresh batches.

        The larger sets that have passed come first, then the set with the next 1, 2, 4, ... units of the order.
        """
        larger = {wide for wide, outcome in self.history if outcome.passed and set(found) <= set(wide)}
        rest = [name for name in order if name not in found]
        more = [(*found, *rest[: 2**i]) for i in range(len(rest).bit_length() + 1) if rest]
        for wide in [tuple(found), *sorted(larger, key=len), *more]:
            if self.test(wide, fresh=True):
                return [name for name in self.units if name in {*wide, *self.always}]
        raise CannotError("what passes on the batches of the search does not pass on fresh ones: give it more batches.")

    def _add(self, names: tuple[str, ...], fresh: bool, outcome: Outcome) -> None:
        self._known["\n".join(names), fresh] = outcome
        self.history.append((names, outcome))

    def _save(self) -> None:
        if self.checkpoint is not None:
            fresh = [key for _, key in self._known]
            runs = [(wide, known, one) for (wide, one), known in zip(self.history, fresh, strict=True)]
            write_text(self.checkpoint, json.dumps({"of": self._fingerprint(), "scores": self.scores, "runs": runs}))

    def _load(self, path: Path) -> None:
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            matches = known["of"] == self._fingerprint()
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentValueError(f"checkpoint={str(path)!r} is no checkpoint of a search: {error!r}.") from error
        if not matches:
            raise ArgumentValueError(
                f"checkpoint={str(path)!r} is of another search: its model, batches or arguments differ. Delete "
                "the file, or name another."
            )
        self.scores = {name: Score(*score) for name, score in known["scores"].items()}
        for wide, fresh, outcome in known["runs"]:
            self._add(tuple(wide), fresh, Outcome(*outcome))

    def _fingerprint(self) -> list[Any]:
        setting = self.trials.setting
        losses = [f"{loss:.6g}" for loss in self._losses(False)]
        products = [setting.products, setting.passes]
        return [self.units, self.always, str(setting.dtype), setting.level, setting.unit, *products, losses]
