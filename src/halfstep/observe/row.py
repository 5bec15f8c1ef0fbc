"""``Row``: what one tensor of one step looked like. Rows can be added up, saved as JSON lines, and loaded."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..core.errors import ArgumentValueError
from ..core.files import replacing

__all__ = ["PROBE", "Range", "Row", "load_rows", "merge_rows", "save_rows"]

PROBE = 64
"""How many values of a tensor a row keeps."""

_FORMAT = 1
_DERIVED = ("headroom", "subnormal", "flushed")


class Range(NamedTuple):
    """The exponents of the numbers that a dtype can hold, where these are shown without their loss scale.

    Attributes:
        subnormal: of the smallest number, which has one digit.
        normal: of the smallest number with all digits.
        overflow: the first one that is too large.
    """

    subnormal: int
    normal: int
    overflow: int


@dataclass(frozen=True)
class Row:
    """The numbers of one tensor in one step. Shares are between 0 and 1.

    All magnitudes are without the loss scale: ``scale`` says by what the numbers were multiplied where they were
    computed, in ``dtype``. So headroom and what is subnormal or flushed are about the numbers with their scale.

    Attributes:
        step: which step of the optimizer, counted from 0; without an optimizer, which forward pass of the model.
        module: the qualified name of the module; for "grad", "update" and "weight", that of the parameter.
        tensor: "output", "output_grad", "grad", "update" or "weight".
        call: which call of the module within one forward pass, counted from 0.
        dtype: in which the numbers were computed, as in "float16".
        numel: how many numbers there were.
        amax: the largest magnitude of all of them; inf or NaN if one is. Of gradients of several steps, those with an
            overflow do not count.
        smallest: the smallest magnitude other than 0 in the sample; inf if there is none.
        rms: the root of the mean square.
        zeros: the share of zeros, -0.0 included.
        overflow: the share of inf; of gradients of several steps, the share of steps with inf or NaN.
        nan: the share of NaN.
        exponents: of the sample, how many magnitudes lie in [2**exponent, 2 * 2**exponent), by exponent. Empty without
            ``bins``.
        scale: the loss scale in these numbers, which was divided out; 1.0 if there was none.
        probe: some values at evenly spread places, the same ones for the same shape, to compare two runs by. It is
            empty in a merged row.
        merged: of how many rows it is the sum; of gradients, of how many steps.
        began_in: of an output with inf or NaN the module inside of which they began: the innermost one that runs and
            got nothing but finite numbers. "(step)" if even the model got others; empty if it is not known.
    """

    step: int
    module: str
    tensor: str
    call: int = 0
    dtype: str = "float32"
    numel: int = 0
    amax: float = 0.0
    smallest: float = math.inf
    rms: float = 0.0
    zeros: float = 0.0
    overflow: float = 0.0
    nan: float = 0.0
    exponents: Mapping[int, int] = field(default_factory=dict)
    scale: float = 1.0
    probe: tuple[float, ...] = ()
    merged: int = 1
    began_in: str = ""

    @property
    def is_finite(self) -> bool:
        """Whether there is neither inf nor NaN."""
        return math.isfinite(self.amax) and not self.overflow and not self.nan

    @property
    def headroom(self) -> float:
        """How many doublings lie between ``amax`` and the largest number of ``dtype``: below 0 after an overflow."""
        if math.isnan(self.amax) or math.isinf(self.amax):
            return -math.inf
        if self.amax == 0.0:
            return math.inf
        largest = torch.finfo(getattr(torch, self.dtype)).max
        return math.log2(largest) - math.log2(self.amax) - math.log2(self.scale)

    @property
    def subnormal(self) -> float:
        """The share of numbers below the normal range of ``dtype``, which have fewer digits. NaN without ``bins``."""
        if not self.exponents:
            return 0.0 if self.zeros == 1.0 else math.nan
        first = self.range.normal
        below = sum(count for exponent, count in self.exponents.items() if exponent < first)
        return below / sum(self.exponents.values()) * self._nonzero

    @property
    def flushed(self) -> float:
        """The share of numbers that became 0 because they were too small for ``dtype``: an estimate. NaN without
        ``bins``.

        What was flushed cannot be counted afterwards. The counts at the lowest exponents are continued below the
        smallest number, and no more zeros can come from there than there are. So zeros of a ReLU, or of rows of an
        embedding that are not in the batch, are none of these unless numbers close to the edge are frequent, too.
        """
        if not self.exponents:
            return 0.0 if self.zeros in (0.0, 1.0) else math.nan
        edge = self.range.subnormal
        lowest, above = self.exponents.get(edge, 0), self.exponents.get(edge + 1, 0)
        if not lowest:
            return 0.0
        ratio = lowest / above if above else math.inf
        missing = lowest * ratio / (1.0 - ratio) if ratio < 1.0 else math.inf
        return min(self.zeros, missing / sum(self.exponents.values()) * self._nonzero)

    def to_dict(self) -> dict[str, Any]:
        """All attributes, and ``headroom``, ``subnormal`` and ``flushed``, by name."""
        return {**asdict(self), **{name: getattr(self, name) for name in _DERIVED}}

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> Row:
        """The row that ``to_dict`` was called on."""
        known = {each.name: saved[each.name] for each in fields(Row) if each.name in saved}
        exponents = {int(exponent): count for exponent, count in known.get("exponents", {}).items()}
        return Row(**{**known, "exponents": exponents, "probe": tuple(known.get("probe", ()))})

    @property
    def range(self) -> Range:
        """Where the numbers lie that ``dtype`` can hold, with their scale divided out."""
        finfo = torch.finfo(getattr(torch, self.dtype))
        ends = (finfo.smallest_normal * finfo.eps, finfo.smallest_normal, finfo.max)
        return Range(*(round(math.log2(end)) - round(math.log2(self.scale)) for end in ends))

    @property
    def _nonzero(self) -> float:
        """The share of numbers that ``exponents`` are counted of."""
        return 1.0 - self.zeros - self.overflow - self.nan


def merge_rows(rows: Iterable[Row]) -> list[Row]:
    """Add up rows of one step, module, tensor, call and dtype: those of several ranks, or of several backward passes.

    Counts and squares are added, the largest of ``amax`` and of ``scale`` remain.
    """
    groups: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.step, row.module, row.tensor, row.call, row.dtype].append(row)
    return [_sum(each) for each in groups.values()]


def _sum(rows: list[Row]) -> Row:
    first = rows[0]
    if len(rows) == 1:
        return first
    numel = sum(row.numel for row in rows)

    def mean(values: Iterable[float]) -> float:
        return sum(value * row.numel for value, row in zip(values, rows, strict=True)) / max(numel, 1)

    exponents: Counter[int] = Counter()
    for row in rows:
        exponents.update(row.exponents)
    return Row(
        **{name: getattr(first, name) for name in ("step", "module", "tensor", "call", "dtype")},
        numel=numel,
        amax=math.nan if any(math.isnan(row.amax) for row in rows) else max(row.amax for row in rows),
        smallest=min(row.smallest for row in rows),
        rms=math.sqrt(mean(row.rms**2 for row in rows)),
        zeros=mean(row.zeros for row in rows),
        overflow=mean(row.overflow for row in rows),
        nan=mean(row.nan for row in rows),
        exponents=dict(sorted(exponents.items())),
        scale=max(row.scale for row in rows),
        merged=sum(row.merged for row in rows),
        began_in=next((row.began_in for row in rows if row.began_in), ""),
    )


def save_rows(path: str | Path, rows: Iterable[Row], **about: Any) -> None:
    """Write rows as JSON lines, of which the first says what they are.

    Numbers that are not finite are written as ``Infinity`` and ``NaN``, as Python's ``json`` does.

    Args:
        path: the file; missing folders are made. An existing file is replaced whole.
        rows: to be written.
        **about: what else the first line says: strings and numbers.
    """
    with replacing(path) as file:
        header = {"halfstep": "numerics", "format": _FORMAT, **about}
        for line in itertools.chain((header,), (row.to_dict() for row in rows)):
            file.write(json.dumps(line).encode() + b"\n")


def load_rows(path: str | Path) -> list[Row]:
    """The rows that ``save_rows`` wrote.

    Raises:
        ArgumentValueError: for a file of something else, and for a line that is no row, with its number.
    """
    with Path(path).open("rb") as file:
        try:
            about = json.loads(file.readline())
            known = about.get("halfstep") == "numerics" and about.get("format") == _FORMAT
        except (ValueError, AttributeError):
            known = False
        if not known:
            raise ArgumentValueError(
                f"{path} has no rows of halfstep.numerics in format {_FORMAT}. Monitor.save and `halfstep run "
                "--numerics FILE` write such files."
            )
        return [_row(line, path, number) for number, line in enumerate(file, start=2) if line.strip()]


def _row(line: bytes, path: str | Path, number: int) -> Row:
    try:
        return Row.from_dict(json.loads(line))
    except (ValueError, TypeError, AttributeError) as error:
        raise ArgumentValueError(
            f"Line {number} of {path} is no row of halfstep.numerics ({error}). The file was cut short or changed: "
            "save it again, or delete the line."
        ) from error
