"""``op_table``: counts the ops of one step by module and dtype, and its casts by origin."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from torch import nn

from ...core.checks import check_kind
from ...core.dtypes import dtype_name
from ...core.text import counted
from ..observe.counted import CountedOp, counting
from ..observe.names import qualified_names
from .text import aligned

__all__ = ["CastRow", "OpRow", "OpTable", "op_table"]

_PASSES = ("forward", "backward")
_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class OpRow:
    """The calls of one op by one module.

    Attributes:
        module: the qualified name of the module. "(root)" is the model, "(step)" is code outside of modules,
            "(optimizer)" for the optimizer's step.
        op: the name of the ATen op, such as "addmm".
        backward: True if the backward pass called the op.
        calls: the number of calls, by the dtype of the (first) result. An emulated product, which computes in fp32,
            counts under the dtype that it emulates, such as "float16 (emulated)", and a product with a recipe as the op
            "linear" under its formats, such as "mxfp8 (emulated)".
    """

    module: str
    op: str
    backward: bool
    calls: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class CastRow:
    """Casts of one kind.

    Attributes:
        module: see ``OpRow``.
        asked_by: the function whose arguments were cast, such as "linear"; empty for a cast by user code, and for a
            cast of a module's input or output.
        made_by: "casting" for halfstep or native autocast; "user" for a call such as ``x.float()``; "torch" for torch
            itself.
        source: the dtype before the cast.
        target: the dtype after the cast.
        backward: True for the gradient of such a cast.
        calls: the number of casts.
        bytes: the number of bytes read and written.
    """

    module: str
    asked_by: str
    made_by: str
    source: str
    target: str
    backward: bool
    calls: int
    bytes: int


@dataclass(frozen=True)
class OpTable:
    """The ops of one step. Print it, or use its rows. Views and casts are not counted among the calls."""

    _rows: Sequence[OpRow]
    _casts: Sequence[CastRow]

    def rows(self) -> list[OpRow]:
        """Return the calls by module and op, in order of first occurrence."""
        return list(self._rows)

    def casts(self) -> list[CastRow]:
        """Return the casts by decreasing number of bytes."""
        return list(self._casts)

    def by_dtype(self) -> dict[str, int]:
        """Count the calls by the dtype of their results."""
        return dict(sum((Counter(row.calls) for row in self._rows), Counter[str]()))

    def __str__(self) -> str:
        shares = ", ".join(f"{count} {dtype}" for dtype, count in sorted(self.by_dtype().items(), key=lambda p: -p[1]))
        found = {dtype for row in self._rows for dtype in row.calls}
        columns = [dtype for dtype in _DTYPES if dtype in found] + sorted(dtype for dtype in found if "(" in dtype)
        lines = [f"One step: {sum(self.by_dtype().values())} calls of ops ({shares})"]
        ops: list[list[str]] = [["module", "op", "pass", *columns, *(["other"] if found - set(columns) else [])]]
        for row in self._rows:
            counts = [row.calls.get(dtype, 0) for dtype in columns]
            counts += [sum(row.calls.values()) - sum(counts)] if found - set(columns) else []
            ops.append([row.module, row.op, _PASSES[row.backward], *(str(n or ".") for n in counts)])
        lines += ["", *aligned(ops, right=range(3, len(ops[0])))]
        if self._casts:
            calls, moved = sum(cast.calls for cast in self._casts), sum(cast.bytes for cast in self._casts)
            casts = [["module", "asked by", "made by", "pass", "from", "to", "casts", "bytes"]]
            for cast in self._casts:
                names = [cast.module, cast.asked_by or ".", cast.made_by, _PASSES[cast.backward]]
                casts.append([*names, cast.source, cast.target, str(cast.calls), _size(cast.bytes)])
            lines += ["", f"{counted(calls, 'cast')}, {_size(moved)} moved", "", *aligned(casts, right=(6, 7))]
        return "\n".join(lines)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} GiB"


def op_table(step: Callable[[], Any], model: nn.Module | None = None) -> OpTable:
    """Run one step and count its ops by module, op and dtype, and its casts by origin.

    ::

        print(halfstep.numerics.op_table(lambda: train_step(batch), model))

    The step has its normal effects, including the optimizer's step. Compiled modules run eagerly. Ops in replays of
    CUDA graphs are not counted.

    Args:
        step: a function without arguments.
        model: the model whose modules are named, as in ``named_modules()``. None names modules by their path from the
            outermost running module.

    Raises:
        ArgumentTypeError: if ``model`` is neither a module nor None.
    """
    check_kind("model of op_table", model, (nn.Module, NoneType), "a torch.nn.Module or None")
    watch, counted = counting(None if model is None else qualified_names(model), casts=True)
    with watch:
        step()
    return OpTable(_op_rows(counted), _cast_rows(counted))


def _op_rows(counted: Mapping[CountedOp, int]) -> list[OpRow]:
    found: dict[tuple[str, bool, str], OpRow] = {}
    for each, calls in counted.items():
        if each.cast is None:
            place = each.module, each.backward, each.op
            row = found.setdefault(place, OpRow(each.module, each.op, each.backward))
            dtype = (made := each.emulates) or each.dtype
            column = str(dtype or "none").removeprefix("torch.") + " (emulated)" * isinstance(made, torch.dtype)
            row.calls[column] = row.calls.get(column, 0) + calls
    return list(found.values())


def _cast_rows(counted: Mapping[CountedOp, int]) -> list[CastRow]:
    found: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0, 0])
    for each, calls in counted.items():
        if (cast := each.cast) is not None:
            dtypes = dtype_name(cast.source), dtype_name(cast.target)
            kind = (each.module, cast.asked_by, cast.made_by, *dtypes, each.backward)
            total = found[kind]
            total[0] += calls
            total[1] += calls * cast.bytes
    return sorted((CastRow(*kind, *total) for kind, total in found.items()), key=lambda row: -row.bytes)
