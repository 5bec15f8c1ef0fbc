"""``SearchResult``: what must stay in fp32, with what was tried, as arguments of ``amp.initialize`` and as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.dtypes import parse_half
from ..core.errors import ArgumentValueError
from ..core.oplists import OpLists
from ..core.policy import Policy
from ..core.text import counted
from ..diagnostics.pages import (
    Bar,
    Shown,
    bars,
    figure,
    header,
    made_by,
    note,
    section,
    table,
    write_page,
    write_text,
)
from .guard import Outcome
from .scores import Score
from .trials import Setting

__all__ = ["SearchResult"]

_FORMAT = "halfstep.search 1"

_MOST_BARS = 40


@dataclass(frozen=True)
class SearchResult(Shown):
    """The answer of a search. Print it.

    Every way to use amp takes the answer unchanged::

        amp.initialize(model, optimizer, **result.options)

        given = {"level": result.level, "dtype": result.dtype}
        amp.decorate(model, optimizer, module_filter=result.module_filter, products=result.recipe, **given)
        with amp.auto_cast(op_lists=result.op_lists, **given):
            ...

    Attributes:
        status: "found" if the answer passes the guard, also on fresh batches; "cannot" if nothing that was tried does;
            "interrupted" if Ctrl-C ended the search.
        keep: the names of the units that stay in fp32; if the status is not "found", the smallest set that has passed,
            or all units.
        level: the opt level of the search.
        dtype: the 16-bit dtype by its name.
        unit: "module" or "op".
        why: the reason, if the status is not "found".
        tolerance: the largest difference of the loss that passes.
        scores: the score of each unit, the highest first.
        flops: the number of floating point operations in each unit's forward pass of one batch.
        runs: the guarded runs in their order: the units in fp32, and the outcome.
        products: the recipe of each linear layer by its name if the units are products: what is kept has no formats
            then, and has the 16-bit dtype; else None.
        passes: True if each product of a layer is a unit: ``head.forward``, ``head.input_gradient`` and
            ``head.weight_gradient``.
    """

    status: str
    keep: tuple[str, ...]
    level: str
    dtype: str
    unit: str
    why: str = ""
    tolerance: float = 0.0
    scores: dict[str, Score] = field(default_factory=dict)
    flops: dict[str, int] = field(default_factory=dict)
    runs: list[tuple[tuple[str, ...], Outcome]] = field(default_factory=list)
    products: dict[str, str] | None = None
    passes: bool = False

    @property
    def _setting(self) -> Setting:
        return Setting(parse_half(self.dtype), self.level, self.unit, self.products, self.passes)

    @property
    def _words(self) -> tuple[str, str, str]:
        """The words for a unit, for the precision in which a unit is kept, and for the precision of others."""
        if self.products is None:
            return self.unit, "fp32", self.dtype
        return "product" if self.passes else "linear layer", self.dtype, "formats"

    @property
    def op_lists(self) -> OpLists | None:
        """The op lists, for ``op_lists=`` of ``amp.initialize`` and ``amp.auto_cast``; None at O2."""
        if self.level != "O1":
            return None
        return OpLists.custom(black=self.keep if self.unit == "op" else ())

    @property
    def policy(self) -> Policy:
        """The policy, for ``amp.initialize(policy=)``; it names no modules, so give ``module_filter`` beside it."""
        policy = Policy.from_level(self.level, self.dtype)
        return policy if self.op_lists is None else policy.replace(op_lists=self.op_lists)

    @property
    def module_filter(self) -> Callable[[nn.Module, str], torch.dtype | None]:
        """The dtype of each module, for ``module_filter=`` of ``amp.initialize`` and ``amp.decorate``."""
        wide = self.keep if self.unit == "module" and self.products is None else ()

        def dtype_of(module: nn.Module, name: str) -> torch.dtype | None:
            inside = any(name == each or name.startswith(f"{each}.") for each in wide)
            return torch.float32 if inside else None

        return dtype_of

    @property
    def recipe(self) -> dict[str, str] | None:
        """The recipe of each linear layer by its name, for ``products=`` of ``amp.initialize`` and ``amp.decorate``;
        None without formats.
        """
        return self._setting.recipe(self.keep)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that bring a model to the answer, as plain values: ``amp.initialize(model, **options)``.

        ``amp.decorate(model, **options)`` also takes an answer in modules or products, and
        ``amp.auto_cast(**options)`` an answer in ops.
        """
        return self._setting.options(self.keep)

    @property
    def outcome(self) -> Outcome | None:
        """The last outcome of a guarded run with the answer; None if it never ran."""
        return next((outcome for wide, outcome in reversed(self.runs) if set(wide) == set(self.keep)), None)

    def __str__(self) -> str:
        asked = f"halfstep.search, {self.level} in {self.dtype}: "
        runs = counted(len(self.runs), "guarded run")
        if self.status != "found":
            best = f" Known to pass: {', '.join(self.keep)}." if any(each.passed for _, each in self.runs) else ""
            return f"{asked}{self.status}, after {runs}: {self.why}{best}"
        total = sum(each.total for each in self.scores.values() if math.isfinite(each.total)) or 1.0
        unit, wide, _ = self._words
        shares = [f"  keep {wide}: {name}{self._share(name, total)}" for name in self.keep]
        what = f"{counted(len(self.keep), unit) if self.keep else 'nothing'} must stay in {wide}"
        return "\n".join([f"{asked}{what}, after {runs}", *shares, f"  {self._losses()}"])

    def _share(self, name: str, total: float) -> str:
        if name not in self.scores:
            return " (as asked)"
        score = self.scores[name].total
        return f" (score {score:.1e}, {score / total:.2%} of all)" if math.isfinite(score) else " (overflows)"

    def _losses(self) -> str:
        if (outcome := self.outcome) is None:
            return ""
        size = abs(outcome.reference) or math.inf
        share, noise = outcome.difference / size, self.tolerance / size
        return f"loss fp32 {outcome.reference:.5g}, here {outcome.loss:.5g} ({share:+.3%}, tolerance {noise:.3%})"

    def table(self) -> list[dict[str, Any]]:
        """A row for each unit, the highest score first."""
        return [
            {"unit": name, "fp32": name in self.keep, "flops": self.flops.get(name, 0), **score._asdict()}
            for name, score in self.scores.items()
        ]

    def frontier(self) -> list[tuple[float, float]]:
        """Pairs (share of flops below fp32, loss) of guarded runs, by the share: what more fp32 brings.

        A run is a point only if its loss is nearer to the loss of fp32 than the losses of all runs with a larger share,
        so along the frontier the difference falls with the share. Runs on the fresh batches that confirm the answer
        have other losses, and are left out.
        """
        total = sum(self.flops.values()) or 1
        runs = [
            (sum(self.flops.get(name, 0) for name in wide) / total, outcome)
            for wide, outcome in self.runs
            if outcome.reference == self.runs[0][1].reference
        ]
        found: list[tuple[float, Outcome]] = []
        for wide_share, outcome in sorted(runs, key=lambda each: (each[0], abs(each[1].difference))):
            if not found or abs(outcome.difference) < abs(found[-1][1].difference):
                found.append((wide_share, outcome))
        return [(1.0 - wide_share, outcome.loss) for wide_share, outcome in reversed(found)]

    def report(self, path: str | Path, command: str | None = None) -> None:
        """Write one self-contained HTML page with the answer, the scores and the guarded runs.

        Args:
            path: the file; missing folders are created.
            command: the command that made it, shown on the page.
        """
        parts = [header("halfstep search", "What must stay in fp32", made_by(command))]
        parts += [note(line.strip()) for line in str(self).splitlines() if line.strip()]
        totals = {row["unit"]: row["forward"] + row["backward"] for row in self.table()[:_MOST_BARS]}
        logs = [math.log2(total) for total in totals.values() if 0.0 < total < math.inf]
        if logs:
            low, across = min(logs) - 1.0, max(logs) - min(logs) + 2.0
            drawn = [
                Bar(
                    name,
                    f"{total:.1e}" if total < math.inf else "overflows",
                    1.0 if total == math.inf else (math.log2(total) - low) / across if total else 0.0,
                    alarming=name in self.keep,
                )
                for name, total in totals.items()
            ]
            picture = bars("Scores", "The score of each unit.", drawn, mark=1.0, value_name="score")
            caption = f"The highest scores, on a logarithmic scale. Highlighted units stay in {self._words[1]}."
            parts.append(section("Scores", figure(picture, caption=caption)))
        rows = [
            [row["unit"], self._words[1 if row["fp32"] else 2], f"{row['forward']:.2e}", f"{row['backward']:.2e}"]
            for row in self.table()
        ]
        parts.append(section("Units", table(["unit", "stays in", "forward", "backward"], rows)))
        runs = [
            [
                str(n),
                ", ".join(wide) or "none",
                f"{one.loss:.5g}",
                f"{one.reference:.5g}",
                "yes" if one.passed else "no",
            ]
            for n, (wide, one) in enumerate(self.runs, 1)
        ]
        parts.append(
            section("Guarded runs", table(["run", f"in {self._words[1]}", "loss", "loss of fp32", "passes"], runs))
        )
        write_page(path, "What must stay in fp32", parts)

    def save(self, path: str | Path) -> None:
        """Write the result as JSON for ``load`` and for ``amp.initialize(precision=path)``, which takes its options."""
        write_text(path, json.dumps({"format": _FORMAT, "options": self.options, **asdict(self)}, indent=1))

    @classmethod
    def load(cls, path: str | Path) -> SearchResult:
        """Read what ``save`` has written.

        Raises:
            ArgumentValueError: for a file that is no saved result.
        """
        try:
            known = json.loads(Path(path).read_text(encoding="utf-8"))
            if known.pop("format") != _FORMAT:
                raise KeyError("format")
            del known["options"]  # they follow from the rest
            known["keep"] = tuple(known["keep"])
            known["scores"] = {name: Score(*score) for name, score in known["scores"].items()}
            known["runs"] = [(tuple(wide), Outcome(*outcome)) for wide, outcome in known["runs"]]
            return cls(**known)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArgumentValueError(
                f"{str(path)!r} is no result of a search ({error!r}); result.save(path) writes one."
            ) from error
