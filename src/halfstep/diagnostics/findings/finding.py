"""``Finding``: one problem with its place, cause and fix, and its name, text and log line."""

from __future__ import annotations

import functools
import logging
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ...core.text import counted, listed

__all__ = ["Finding", "Found", "Severity", "grouped", "log", "share"]

logger = logging.getLogger("halfstep")

Severity = Literal["error", "warning", "note"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Finding:
    """One cause of lost precision.

    Attributes:
        code: "HS101" and so on. A code never changes its meaning.
        severity: "error" if the training does not do what the script says, "warning" if it loses accuracy or may fail
                later, "note" for information.
        where: the tensors or modules, with numbers replaced by ``*``.
        message: the problem, with its numbers.
        evidence: the same numbers by name.
        fix: the remedy.
    """

    code: str
    severity: Severity
    where: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"{self.code} {self.severity:7}  {self.message}", f"where: {self.where}"]
        lines += [f"fix: {self.fix}"] if self.fix else []
        wrap = functools.partial(textwrap.wrap, width=104, break_long_words=False, break_on_hyphens=False)
        return ("\n" + " " * 15).join(part for line in lines for part in wrap(line))


class Found(NamedTuple):
    """The part of a ``Finding`` that its rule determines; code and default fix are in the table of rules.

    Attributes:
        severity: see ``Finding``.
        where: see ``Finding``.
        message: see ``Finding``.
        evidence: see ``Finding``.
        fix: the remedy, if it differs from the rule's default.
    """

    severity: Severity
    where: str
    message: str
    evidence: Mapping[str, Any]
    fix: str = ""


def grouped(sizes: Mapping[str, int]) -> str:
    """Summarize many tensors in a few words: ``layers.*.mlp, head (25 tensors, 6.9e+09 weights)``.

    Args:
        sizes: the number of elements by qualified name.
    """
    groups: dict[str, int] = {}
    for name, size in sizes.items():
        group = _without_numbers(name.rpartition(".")[0] or name) if len(sizes) > 1 else name
        groups[group] = groups.get(group, 0) + size
    largest = sorted(groups, key=lambda group: -groups[group])
    tensors = counted(len(sizes), "tensor")
    total = sum(sizes.values())
    weights = f"{total} weight{'s' if total != 1 else ''}" if total < 100_000 else f"{total:.2g} weights"
    return f"{listed(largest)} ({tensors}, {weights})"


@functools.lru_cache(1024)
def _without_numbers(name: str) -> str:
    return _NUMBER.sub("*", name)


def share(fraction: float) -> str:
    """Format a fraction as ``98.7 %``, without rounding up to 100 %."""
    percent = 100 * fraction
    return "100 %" if percent == 100 else f"{min(percent, 99.99):.3g} %" if percent < 99.95 else "99.9 %"


def log(findings: Iterable[Finding], by: str = "halfstep.check") -> None:
    """Log findings in one line of the logger "halfstep": at WARNING if one is an error, else at INFO; no line if empty.

    Args:
        findings: the findings to log.
        by: the function that found them. The user can call ``check`` again for the fixes; measurements of other
            functions cannot be repeated, so their line includes the fixes.
    """
    found = list(findings)
    if found:
        level = logging.WARNING if any(each.severity == "error" for each in found) else logging.INFO
        again = by == "halfstep.check"
        hint = " Call halfstep.check(model, optimizer) for the fixes." if again else ""
        logger.log(level, "%s: %s%s", by, " ".join(_line(each, with_fix=not again) for each in found), hint)


def _line(finding: Finding, *, with_fix: bool) -> str:
    text = f"{finding.code} {finding.severity} at {finding.where}: {finding.message}"
    return f"{text} Fix: {finding.fix}" if with_fix and finding.fix else text
