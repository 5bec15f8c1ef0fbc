"""Which op runs in which precision: the lists, how to choose others, and what an op's name means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .core.oplists import LIST_LEVELS, RULES, OpLists, resolve
from .core.oplists.tables import BANNED, FLOAT, HALF, NATIVE, PROMOTE, SEQUENCE

__all__ = ["BANNED", "LIST_LEVELS", "RULES", "Entry", "OpLists", "entries", "resolve"]


class Entry(NamedTuple):
    """What becomes of one op."""

    op: str
    """Its canonical name, torch's own in ATen: ``softmax``, ``linalg_norm``, ``fft_rfft``."""
    rule: str
    """A key of ``RULES``."""
    reason: str
    """In a word; empty for an op on no list."""
    native: str
    """The rule that ``torch.autocast`` has for it on the device asked about, "free" if none."""


def entries(ops: Iterable[object] = (), *, lists: OpLists | None = None, device: str = "cpu") -> list[Entry]:
    """The rule of each op, in the order of the lists: half, float, promote, sequence-promote, banned.

    Args:
        ops: names or torch functions to ask about; none means every public name on a list.
        lists: a choice of lists; None means those of opt level O1.
        device: "cpu" or "cuda", for ``native``.

    Raises:
        ArgumentValueError: for a name that no op has.
    """
    chosen = lists or OpLists.default()
    names = [name for op in ops for name in resolve(op)]
    if not names:
        every = [*HALF, *FLOAT, *PROMOTE, *SEQUENCE, *BANNED, *chosen.white, *chosen.black]
        names = sorted({name for name in every if not name.startswith("_")})
    order = list(RULES)
    found = [_entry(name, chosen, device) for name in names]
    return found if ops else sorted(found, key=lambda entry: order.index(entry.rule))


def _entry(name: str, lists: OpLists, device: str) -> Entry:
    native = next((kind for kind, ops in NATIVE[device].items() if name in ops), "free")
    return Entry(name, lists.rule_of(name), lists.reason(name), native)
