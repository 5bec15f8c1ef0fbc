"""``Diagnosis``: the findings of ``diagnose`` as at most twelve lines, and as a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.text import counted
from ..diagnostics.findings import Finding
from ..diagnostics.pages import Line, Shown, figure, header, lines, made_by, note, section, table, write_page

__all__ = ["Diagnosis"]

_MOST_LINES = 12


@dataclass(frozen=True)
class Diagnosis(Shown):
    """The fault of a training: what is wrong, where it begins and what to do. Print it.

    Attributes:
        findings: the findings, the likely cause first; notes are last.
        steps: the number of observed steps.
        losses: the losses of these steps.
        skipped: the number of skipped steps.
        about: a remark on the steps, for the first line.
    """

    findings: list[Finding]
    steps: int = 0
    losses: Sequence[float] = ()
    skipped: int = 0
    about: str = ""

    def __str__(self) -> str:
        wrong = [each for each in self.findings if each.severity != "note"]
        found, skipped = counted(len(wrong), "problem") if wrong else "nothing found", f", {self.skipped} skipped"
        first = f"halfstep.diagnose: {found} in {counted(self.steps, 'step')}{skipped * bool(self.skipped)}{self.about}"
        text = [first]
        left = list(self.findings)
        while left:
            more = str(left[0]).splitlines()
            if len(text) > 1 and len(text) + len(more) + (len(left) > 1) > _MOST_LINES:
                break
            text += more[: _MOST_LINES - len(text) - (len(left) > 1)]
            del left[0]
        if left:
            text.append(f"and {', '.join(f'{each.code} {each.severity}' for each in left)}: see findings"[:110])
        return "\n".join(text)

    def report(self, path: str | Path, command: str | None = None) -> None:
        """Write one self-contained HTML page with the findings and the losses.

        Args:
            path: the file; missing folders are created.
            command: the command that made it, shown on the page.
        """
        rows = [[f"{each.code} {each.severity}", each.message, each.where, each.fix] for each in self.findings]
        parts = [header("halfstep doctor", "What is wrong", made_by(command)), note(str(self).splitlines()[0])]
        if rows:
            parts.append(section("Findings", table(["code", "what is wrong", "where it begins", "what to do"], rows)))
        points = [(i, math.log2(value)) for i, value in enumerate(self.losses) if 0.0 < value < math.inf]
        if len(points) > 1:
            low, high = (pick(value for _, value in points) for pick in (min, max))
            picture = lines("Loss", "The loss of each step.", [Line("loss", points)], low=low - 1.0, high=high + 1.0)
            parts.append(section("Loss", figure(picture, caption="The loss of each step, on a logarithmic scale.")))
        write_page(path, "What is wrong", parts)
