"""The table of ops: one row per op with all facts about it, read from ``ops.txt``.

To add an op, add a line to ``ops.txt`` below the heading of its list. An op without a row is on no list, and torch's
kernels accept 16-bit tensors for it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["BANNED", "KINDS", "NATIVE", "OF_TORCHVISION", "OPS", "Op", "paddle", "pairs", "row_of", "words"]


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def pairs(text: str) -> dict[str, str]:
    """Parse a text of pairs, ``name=value name=value``, into a dictionary."""
    return dict(pair.split("=") for pair in text.split())


class Op(NamedTuple):
    """The facts about one op; ``names.spellings`` has the callables that compute it.

    Attributes:
        name: the canonical name, which is torch's name in ATen.
        list: the list of the op at O1: "half", "float", "promote", "sequence-promote", "banned", or "free" for none.
        reason: the reason why the op is on its list, in one word. The half list has "matrix-unit" (the ops that level
            OD casts) and "fast"; ops of the float list with "interpolation" or "accumulation" run in fp32 at O2 as
            well.
        kind: for an op that sums products and may have 16-bit hardware units, one of ``KINDS``.
        reads: the way in which torch handles tensors of several dtypes. "one" refuses them; "any" promotes them;
            "first" computes in the dtype of the first tensor with fp32 parameters; "half-first" does so for a 16-bit
            tensor, and refuses fp32 with 16-bit parameters; "moves" marks an op of one tensor that moves values without
            computing.
        in_place: the way in which the in-place form handles tensors of other dtypes: "one" or "any" as above; "moves"
            writes values without computing, so that 16 bits lose nothing although the op is on the float list.
        result: "given" for conversions, factories and other ops whose dtype is an argument and that compute no values
            from their inputs; otherwise the result has the dtype in which the op reads its inputs.
        kernels: torch's 16-bit kernels (2.11 to 2.13, CPU): "all"; "none"; "wrong" for losses and for ops whose result
            or gradient is wrong or missing; "one" for ops whose kernel or gradient refuses an additional fp32 tensor.
        numbers: the calls that compute and return fp32 from inputs of any dtype, because one of their values is out of
            range in 16 bits (``dtypes.needs_fp32``). "number", also for every op that takes a Python number and a
            tensor: if the number would become 0 or infinite; "bound": also if it would become 1; "eps": if 1 minus the
            number would; "sum": in float16, for one result or more than 65,504 addends; "norm": in float16;
            "product": in float16, for one result or for sums of more than 65,504 elementwise products; "accumulate":
            with ``accumulate=True``; "mask": the call stays in 16 bits, and only its mask is kept finite.
        inside: "product" if torch's implementation may call a matrix product, which native autocast would cast.
        cpu: the rule of ``torch.autocast`` on a CPU. Some ops only call an op that has the rule.
        cuda: the rule of ``torch.autocast`` on CUDA.
        paddle: Paddle's names if they differ from torch's, separated by commas.
        fused: Paddle's names of kernels that fuse the op with other ops, or exist in one library only.
        note: the advice in the error of a banned op.
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
        """Return the rule of ``torch.autocast`` for the op on a device type; "free" if there is none."""
        return str(getattr(self, device)) if device in NATIVE else "free"


KINDS = ("product", "convolution", "attention", "recurrent")
"""The kinds of ops that sum products; libraries implement all ops of a kind together."""

NATIVE = ("cpu", "cuda")
"""The device types whose ``torch.autocast`` lists the table contains."""


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
    """Return the row of an op by its canonical name; an op without a row gets the defaults of ``Op``."""
    return OPS.get(name) or Op(name)


BANNED: dict[str, str] = {op.name: op.note for op in OPS.values() if op.list == "banned"}
"""The advice in the error of each op that refuses 16-bit inputs."""


@functools.cache
def paddle() -> dict[str, tuple[str, ...]]:
    """Return Paddle's operator names that differ from torch's, with the torch ops that compute the same.

    The tuple is empty for an op whose result dtype is an argument, that communicates tensors, or that torch does not
    have: op lists could not change it.
    """
    found: dict[str, tuple[str, ...]] = {}
    for op in OPS.values():
        for name in filter(None, f"{op.paddle},{op.fused}".split(",")):
            found[name] = (*found.get(name, ()), op.name) if op.name != "_" else ()
    return found


OF_TORCHVISION = pairs("""roi_align=roi_align roi_pool=roi_pool psroi_pool=ps_roi_pool deformable_conv=deform_conv2d
    multiclass_nms3=batched_nms""")
"""Paddle's names of ops that torchvision has and torch does not."""
