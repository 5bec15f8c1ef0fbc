"""``Profile``: the time of a step by kind, its ceiling at 16 bits, and what makes it slow, as text and as a page."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from ..core.checks import check_kind
from ..core.errors import ArgumentValueError
from ..core.text import counted
from ..diagnostics.findings import Finding
from ..diagnostics.pages import Bar, Shown, bars, figure, header, made_by, note, section, small, table, write_page
from .accounts import Account, RunSettings
from .machine import CHIPS, Machine, chip_named
from .ops import KINDS, SIZES
from .rules import apply
from .trace import ChromeTrace, read_trace

__all__ = ["Profile", "profile_of"]

_MOST_LINES = _MOST_ROWS = 30


@dataclass(frozen=True)
class Profile(Shown):
    """The time of a step by kind, and the changes that would make it faster. Print it.

    Attributes:
        total_ms: the milliseconds of a step.
        device_busy_ms: the milliseconds in which the device works.
        device_idle_ms: the milliseconds in which it does not.
        kinds: the milliseconds of each kind of time; they add up to ``total_ms`` with what is hidden left out.
        findings: the causes of a slow step, the most expensive first; ``evidence["ms"]`` is what its fix alone brings.
        ceiling: the factor by which 16 bits can still speed up the step, by Amdahl and by roofline.
        have: the factor by which ops of 16 bits speed it up already, by the same rates.
        steps: the number of steps.
        ops: rows of op, dtype, sizes, kind, calls of a step and its milliseconds, the longest first.
        about: the device, and facts that the trace lacks.
    """

    total_ms: float
    device_busy_ms: float
    device_idle_ms: float
    kinds: dict[str, float]
    findings: list[Finding]
    ceiling: float
    have: float = 1.0
    steps: int = 1
    ops: tuple[tuple[str, ...], ...] = ()
    about: str = ""

    @classmethod
    def from_trace(cls, path: str | Path, *, chip: str | None = None) -> Profile:
        """Profile a step of another machine, from a Chrome trace of torch.profiler.

        Shapes are there if it was recorded with ``record_shapes=True``.

        Args:
            path: the trace, packed by gzip or not.
            chip: the device, such as "H100" or "MI300X"; None for the one that the trace names.

        Raises:
            ArgumentTypeError: for a path of another type.
            ArgumentValueError: for a file that is missing or is not a trace, and for a chip that is not known.
            UsageError: for a trace without events of a device that take time.
        """
        check_kind("path", path, (str, os.PathLike), "a path")
        trace = read_trace(path)
        machine = chip_named(trace.chip if chip is None else str(chip))
        if machine is None and chip is not None:
            raise ArgumentValueError(f"chip={chip!r} is not known; there are {', '.join(CHIPS)}.")
        lacks = []
        if machine is None:
            lacks.append(f"{trace.chip or 'no chip'} named: the rates are of an H100; give chip=")
            machine = CHIPS["H100"]
        if not any(call.dims for call in trace.calls):
            lacks.append("no shapes: record_shapes=True")
        return profile_of(trace, machine, RunSettings(), "; ".join([f"{Path(path).name} on {machine.name}", *lacks]))

    def __str__(self) -> str:
        shares = [f"{kind} {ms / max(self.total_ms, 1e-12):.0%}" for kind, ms in self._shown()]
        text = [
            f"halfstep.profile: a step takes {self.total_ms:.4g} ms ({counted(self.steps, 'step')}; {self.about})",
            f"device busy {self.device_busy_ms:.4g} ms, idle {self.device_idle_ms:.4g} ms: {', '.join(shares)}",
            f"best possible at 16 bits: {self.ceiling:.3g}x, by Amdahl and roofline; you have {self.have:.3g}x",
        ]
        left = list(self.findings)
        while left and len(text) + len(more := str(left[0]).splitlines()) < _MOST_LINES:
            text += more
            del left[0]
        if left:
            text.append(f"and {', '.join(each.code for each in left)}: see findings")
        return "\n".join(text if self.findings else [*text, "no cause found that would save 3 % of a step"])

    def _shown(self) -> list[tuple[str, float]]:
        found = [(kind, ms) for kind, ms in self.kinds.items() if ms >= 0.005 * self.total_ms and ms > 0.0]
        return sorted(found, key=lambda pair: -pair[1])

    def report(self, path: str | Path, command: str | None = None) -> None:
        """Write one self-contained HTML page: the time by kind, the findings, and the ops.

        Args:
            path: the file; missing folders are created.
            command: the command that made it, shown on the page.
        """
        lines = str(self).splitlines()
        longest = max([ms for _, ms in self._shown()], default=1.0)
        drawn = [Bar(kind, f"{ms:.3g} ms", ms / longest) for kind, ms in self._shown()]
        rows = [[each.code, f"{each.evidence['ms']:.3g}", each.message, each.where, each.fix] for each in self.findings]
        parts = [header("halfstep profile", "Why is it not faster", made_by(command)), note(lines[2])]
        parts.append(small(lines[0]))
        picture = bars("Time of a step", "The milliseconds of each kind.", drawn, mark=1.0, value_name="a step")
        parts.append(section("Time by kind", figure(picture, caption="What is hidden by other work counts once.")))
        parts.append(small("; ".join(f"{kind}: {KINDS[kind]}" for kind, _ in self._shown())))
        if rows:
            parts.append(section("What would help", table(["code", "ms", "why", "where", "what to do"], rows)))
        names = ["op", "dtype", "sizes", "kind", "calls", "ms"]
        parts.append(section("Ops", table(names, self.ops)))
        write_page(path, "Why is it not faster", parts)


def profile_of(trace: ChromeTrace, machine: Machine, settings: RunSettings, about: str) -> Profile:
    """Make the profile of a trace."""
    account = Account(trace, machine, settings)
    kinds = {kind: account.ms(us) for kind, us in account.kinds.items()}
    saved, spent = _sixteen(account)
    total, busy, idle = (account.ms(us) for us in (account.total, account.busy, account.idle))
    ceiling, have = account.total / max(account.total - saved, 1e-9), 1 + spent / max(account.total, 1e-9)
    return Profile(total, busy, idle, kinds, apply(account), ceiling, have, account.steps, _rows(account), about)


def _sixteen(account: Account) -> tuple[float, float]:
    """The microseconds that 16 bits can still save, and the time that they save already.

    Casts can go as a whole. A product gains what the rates or the bytes allow, the larger of the two; an op by element
    gains by its bytes. That is a bound: it is not below what is reached. The steps of optimizers stay in float32.
    """
    saved = spent = 0.0
    best = max(("bfloat16", "float16"), key=lambda half: account.machine.flops.get(half, 0.0))
    units = best in account.machine.flops
    for each in (work for work in account.works if work.kind in ("products", "memory-bound ops", "casts")):
        time = each.piece.time
        gain = 2.0 if each.kind != "products" else max(2.0, account.machine.gain("float32", best)) if units else 1.0
        if each.kind == "casts":
            saved += time
        elif each.dtype == "float32":
            saved += time * (1.0 - 1.0 / gain)
        elif SIZES.get(each.dtype) == 2:
            spent += time * (gain - 1.0)
    return min(saved, 0.999 * account.total), spent


def _rows(account: Account) -> tuple[tuple[str, ...], ...]:
    times: Counter[tuple[str, ...]] = Counter()
    calls: dict[tuple[str, ...], set[int]] = defaultdict(set)
    for each in account.works:
        key = each.op, each.dtype, each.sizes, each.kind
        times[key] += each.piece.time  # type: ignore[assignment]
        calls[key].add(id(each.whole or each))
    return tuple(
        (*key, f"{len(calls[key]) / account.steps:,.0f}", f"{account.ms(us):.4g}")
        for key, us in times.most_common(_MOST_ROWS)
    )
