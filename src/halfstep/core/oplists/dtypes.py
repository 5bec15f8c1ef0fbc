"""Which dtype an op reads its tensors in, and which dtype its result has: what every kind of casting asks.

Four ask. Eager op casting asks when it builds the table of its rules (``casting.rule_table``), so that a call costs
nothing more. A call that torch has refused, and one that is recorded and runs later, ask for ops of models that have no
lists (``casting.meeting``). The pass over captured graphs asks for each node (``graph.cast_pass``). What they do with
the answer is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

from .tables import Op

__all__ = ["ANY", "FIRST", "FLOAT", "HALF", "WIDEST", "dtypes", "read_in", "refused_row"]

HALF, FLOAT, WIDEST, FIRST, ANY = "half", "float", "widest", "first", "any"
"""The dtypes in which a call reads its fp32 and 16-bit tensors: 16 bits, fp32, the widest of them, that of the first,
or as they are."""


def read_in(op: Op, in_place: bool = False) -> str:
    """Return the dtype in which an op reads its fp32 and 16-bit tensors.

    Args:
        op: its row as the lists in force have it; see ``OpLists.row``.
        in_place: True for the form that writes to its first tensor. ``FLOAT`` means then that it may not write to 16
            bits.
    """
    if in_place:
        if op.list in ("float", "banned") and op.in_place != "moves":
            return FLOAT
        return ANY if op.in_place == "any" and op.list != "half" else FIRST
    if op.list in ("half", "wide"):
        return HALF
    if op.list in ("float", "banned") or op.kernels == "none":
        return FLOAT
    return WIDEST if op.reads in ("one", "half-first") else ANY


def dtypes(op: Op, given: Sequence[str], in_place: bool = False) -> tuple[str, str]:
    """Return the dtype in which one call reads its fp32 and 16-bit tensors, and the dtype of its result.

    Args:
        op: as of ``read_in``.
        given: what each is given in, ``HALF`` or ``FLOAT``; at least one.
        in_place: as of ``read_in``.

    Returns:
        ``HALF``, ``FLOAT`` or, where torch takes them as they are, ``ANY``; and ``HALF`` or ``FLOAT``.
    """
    first, widest = given[0], FLOAT if FLOAT in given else HALF
    read = {WIDEST: widest, FIRST: first}.get(read := read_in(op, in_place), read)
    if in_place:
        return (ANY if read == FLOAT else read), first
    result = (first if op.reads in ("first", "moves") else widest) if read == ANY else read
    return read, FLOAT if op.list == "wide" else result


def refused_row(op: Op, in_place: bool) -> Op:
    """The row of an op in a model that has no lists, where only calls are cast that torch refuses.

    A product is computed in 16 bits there, as everywhere, and an op in place keeps the dtype of its tensor.
    """
    return op._replace(list="free") if in_place else op
