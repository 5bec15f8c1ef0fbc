"""The op lists as rows to print: one row per op, with its rule and the reason."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .names import resolve
from .op_lists import RULES, OpLists
from .tables import OPS

__all__ = ["Entry", "entries"]


class Entry(NamedTuple):
    """The rule of one op, and the reason for it."""

    op: str
    """The canonical name, which is torch's own in ATen: ``softmax``, ``linalg_norm``, ``fft_rfft``."""
    rule: str
    """A key of ``RULES``."""
    reason: str
    """The reason for the rule, in one word; empty for an op on no list."""
    native: str
    """The rule of ``torch.autocast`` for the op on the requested device, "free" if none."""
    kernels: str = "all"
    """The 16-bit kernels that torch has on a CPU: "all", "none", "wrong" or "one"; see ``tables.Op``."""


def entries(ops: Iterable[object] = (), *, lists: OpLists | None = None, device: str = "cpu") -> list[Entry]:
    """Return the rule of each op, in the order of the lists: half, float, promote, sequence-promote, banned.

    Args:
        ops: names or torch functions to look up; if empty, every public op on a list.
        lists: the op lists; None means the lists of opt level O1.
        device: "cpu" or "cuda", for ``native``.

    Raises:
        ArgumentValueError: for an unknown name.
    """
    ops, chosen = list(ops), lists or OpLists.default()
    names = [name for op in ops for name in resolve(op)]
    if not ops:
        listed = {op.name for op in OPS.values() if op.list != "free"}
        names = sorted(
            name for name in listed.union(chosen.white, chosen.black, chosen.free, chosen.wide) if name[0] != "_"
        )
    found = [Entry(op.name, op.list, op.reason, op.native(device), op.kernels) for op in map(chosen.row, names)]
    return found if ops else sorted(found, key=lambda entry: list(RULES).index(entry.rule))
