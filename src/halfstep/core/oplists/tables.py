"""The table of ops: a row for each, with all that is known of it. The rows are in ``ops.txt``.

A new op is a line there, below the heading of its list. An op without a row is on no list, and torch's kernels take it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["BANNED", "KINDS", "NATIVE", "OF_TORCHVISION", "OPS", "Op", "paddle", "pairs", "row_of", "words"]


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def pairs(text: str) -> dict[str, str]:
    """A dictionary from a text of pairs: ``name=value name=value``."""
    return dict(pair.split("=") for pair in text.split())


class Op(NamedTuple):
    """The facts about one op. ``names.spellings`` has the callables that compute it.

    Attributes:
        name: the canonical name, which is torch's own in ATen.
        list: the list of the op at O1: "half", "float", "promote", "sequence-promote", "banned", or "free" for none.
        reason: the reason why it is there, in a word. The half list has "matrix-unit" (all that level OD casts) and
            "fast"; of the float list "interpolation" and "accumulation" are fp32 at O2 too.
        kind: the kind of a sum of products, which a chip may have 16-bit units for: one of ``KINDS``.
        reads: the way in which torch itself takes tensors of several dtypes. "one" refuses them, "any" promotes them,
            "first" computes in the dtype of the first beside fp32 parameters, "half-first" does so for 16 bits and
            refuses fp32 beside 16-bit parameters, "moves" is for an op of one tensor that moves numbers and computes
            none.
        in_place: the way in which its form in place takes tensors of other dtypes: "one" or "any" as above; "moves"
            writes numbers and computes none, so that 16 bits are no loss although the op is on the float list.
        result: "given" for a conversion, a factory and other ops that are given their dtype and compute no value from
            their inputs; else it is in the dtype that is read.
        kernels: the kernels that torch has for 16 bits (2.11 to 2.13, CPU): "all"; "none"; "wrong", whose result or
            gradient is wrong or missing, and losses; "one", which takes no fp32 tensor beside, or whose gradient does
            not.
        numbers: the calls that compute and return fp32 from inputs of any dtype, because 16 bits do not have one of
            their numbers (``dtypes.needs_fp32``). "number", and all ops that take a Python number beside a tensor: if
            it would become 0 or infinite; "bound": also if it would become 1; "sum": in float16, if it gives one number
            or adds more than 65,504; "norm": in float16; "product": in float16, if it gives one number, or adds more
            than 65,504 products of elements in the same place; "accumulate": with ``accumulate=True``; "mask": the mask
            alone stays finite in 16 bits.
        inside: "product" if its own implementation may call a matrix product, which native autocast would lower.
        cpu: the rule of ``torch.autocast`` on a CPU. Some ops only call an op that has the rule.
        cuda: the same on CUDA.
        paddle: Paddle's names where they differ from torch's, with commas between.
        fused: Paddle's names of kernels that do the op together with others, or in one library only.
        note: the advice that the error of a banned op gives.
    """

    name: str
    list: str = "free"
    reason: str = ""
    kind: str = ""
    reads: str = "one"
    in_place: str = "one"
    result: str = "read"
    kernels: str = "all"
    numbers: str = ""
    inside: str = ""
    cpu: str = "free"
    cuda: str = "free"
    paddle: str = ""
    fused: str = ""
    note: str = ""

    def native(self, device: str) -> str:
        """The rule that ``torch.autocast`` has for it on a type of device; "free" if none."""
        return str(getattr(self, device)) if device in NATIVE else "free"


KINDS = ("product", "convolution", "attention", "recurrent")
"""The kinds of sums of products. Libraries implement the ops of one kind together."""

NATIVE = ("cpu", "cuda")
"""The types of devices for which the lists of ``torch.autocast`` are known."""


def _read(text: str) -> Iterator[Op]:
    shared: dict[str, str] = {}
    for name, facts, note in re.findall(r"^(\[|\w+)([^]#\n]*)\]?(?:# (.*))?$", text, re.MULTILINE):
        own = dict(re.findall(r"(\w+)=(\S+)", facts)) if facts else {}
        if name == "[":
            shared = own
        else:
            yield Op(name, **shared | own, note=note)


OPS: dict[str, Op] = {op.name: op for op in _read(Path(__file__).with_name("ops.txt").read_text(encoding="utf-8"))}
"""Every op with a row, by name."""


def row_of(name: str) -> Op:
    """The row of a canonical name; one without facts for any other op."""
    return OPS.get(name) or Op(name)


BANNED: dict[str, str] = {op.name: op.note for op in OPS.values() if op.list == "banned"}
"""Refused for 16-bit inputs: what to do instead, as the error says it."""


@functools.cache
def paddle() -> dict[str, tuple[str, ...]]:
    """Paddle's operator names that differ from torch's, and the torch ops that do the same.

    None for an op that is given the dtype of its result, that sends tensors, or that torch does not have: there is
    nothing that a list could change.
    """
    found: dict[str, tuple[str, ...]] = {}
    for op in OPS.values():
        for name in filter(None, f"{op.paddle},{op.fused}".split(",")):
            found[name] = (*found.get(name, ()), op.name) if op.name != "_" else ()
    return found


OF_TORCHVISION = pairs("""roi_align=roi_align roi_pool=roi_pool psroi_pool=ps_roi_pool deformable_conv=deform_conv2d
    multiclass_nms3=batched_nms""")
"""Paddle's names of ops that torch does not have and torchvision has."""
