"""``Row``: the statistics of one tensor in one step. Rows can be merged, saved as JSON lines, and loaded."""

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

from ...core.errors import ArgumentValueError
from ...core.files import replacing

__all__ = ["PROBE", "Range", "Row", "load_rows", "merge_rows", "save_rows"]

PROBE = 64
"""The number of values that a row keeps of a tensor."""

_FORMAT = 1
_DERIVED = ("headroom", "subnormal", "flushed")


class Range(NamedTuple):
    """The exponents that bound the values of a dtype, with the loss scale divided out.

    Attributes:
        subnormal: the exponent of the smallest number, which has one significant bit.
        normal: the exponent of the smallest number with full precision.
        overflow: the first exponent that is too large.
    """

    subnormal: int
    normal: int
    overflow: int


@dataclass(frozen=True)
class Row:
    """The statistics of one tensor in one step. Shares are between 0 and 1.

    All magnitudes are without the loss scale; ``scale`` is the factor that the values had when they were computed in
    ``dtype``. Headroom and the subnormal and flushed shares refer to the scaled values.

    Attributes:
        step: the index of the optimizer's step, from 0; without an optimizer, the index of the model's forward pass.
        module: the qualified name of the module; for "grad", "update" and "weight", the name of the parameter.
        tensor: "output", "output_grad", "grad", "update" or "weight".
        call: the index of the module's call within one forward pass, from 0.
        dtype: the dtype in which the values were computed, such as "float16".
        numel: the number of elements.
        amax: the largest magnitude; inf or NaN if a value is.
        rms: the root of the mean square.
        zeros: the share of zeros, -0.0 included.
        overflow: the share of inf.
        nan: the share of NaN.
        exponents: by exponent, the count of magnitudes of the sample in [2**exponent, 2 * 2**exponent).
        scale: the loss scale that was divided out of these values; 1.0 if there was none.
        probe: values at evenly spread positions, equal for equal shapes, by which two runs are compared. Empty in a
            merged row.
        began_in: for an output with inf or NaN, the module in which they began: the innermost running module with
            finite inputs. "(step)" if the inputs of the model itself had inf or NaN; empty if not known.
    """

    step: int
    module: str
    tensor: str
    call: int = 0
    dtype: str = "float32"
    numel: int = 0
    amax: float = 0.0
    rms: float = 0.0
    zeros: float = 0.0
    overflow: float = 0.0
    nan: float = 0.0
    exponents: Mapping[int, int] = field(default_factory=dict)
    scale: float = 1.0
    probe: tuple[float, ...] = ()
    began_in: str = ""

    @property
    def is_finite(self) -> bool:
        """True if there is neither inf nor NaN."""
        return math.isfinite(self.amax) and not self.overflow and not self.nan

    @property
    def headroom(self) -> float:
        """The number of doublings from ``amax`` to the largest number of ``dtype``; below 0 after an overflow."""
        if math.isnan(self.amax) or math.isinf(self.amax):
            return -math.inf
        if self.amax == 0.0:
            return math.inf
        return math.log2(torch.finfo(getattr(torch, self.dtype)).max) - math.log2(self.amax) - math.log2(self.scale)

    @property
    def subnormal(self) -> float:
        """The share of values below the normal range of ``dtype``, with less precision. NaN without ``exponents``."""
        if not self.exponents:
            return 0.0 if self.zeros == 1.0 else math.nan
        first = self.range.normal
        below = sum(count for exponent, count in self.exponents.items() if exponent < first)
        return below / sum(self.exponents.values()) * self._nonzero

    @property
    def flushed(self) -> float:
        """The estimated share of values that became 0 because they were too small for ``dtype``.

        Flushed values cannot be counted afterwards. The estimate extrapolates the counts at the lowest exponents below
        the smallest number, limited by the number of zeros. So zeros of a ReLU, or of embedding rows that the batch
        does not use, count as flushed only if values close to the edge are frequent. NaN without ``exponents``.
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
        """Return all attributes, ``headroom``, ``subnormal`` and ``flushed`` by name."""
        return {**asdict(self), **{name: getattr(self, name) for name in _DERIVED}}

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> Row:
        """Rebuild a row from the result of ``to_dict``."""
        known = {each.name: saved[each.name] for each in fields(Row) if each.name in saved}
        exponents = {int(exponent): count for exponent, count in known.get("exponents", {}).items()}
        return Row(**{**known, "exponents": exponents, "probe": tuple(known.get("probe", ()))})

    @property
    def range(self) -> Range:
        """The range of values that ``dtype`` can represent, with the scale divided out."""
        finfo = torch.finfo(getattr(torch, self.dtype))
        ends = (finfo.smallest_normal * finfo.eps, finfo.smallest_normal, finfo.max)
        return Range(*(round(math.log2(end)) - round(math.log2(self.scale)) for end in ends))

    @property
    def _nonzero(self) -> float:
        """The share of finite nonzero values, which ``exponents`` counts."""
        return 1.0 - self.zeros - self.overflow - self.nan


def merge_rows(rows: Iterable[Row]) -> list[Row]:
    """Merge rows of equal step, module, tensor, call and dtype, from several ranks or several backward passes.

    Counts and squares are summed; ``amax`` and ``scale`` keep their maximum.
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
        rms=math.sqrt(mean(row.rms**2 for row in rows)),
        zeros=mean(row.zeros for row in rows),
        overflow=mean(row.overflow for row in rows),
        nan=mean(row.nan for row in rows),
        exponents=dict(sorted(exponents.items())),
        scale=max(row.scale for row in rows),
        began_in=next((row.began_in for row in rows if row.began_in), ""),
    )


def save_rows(path: str | Path, rows: Iterable[Row], **about: Any) -> None:
    """Write rows as JSON lines after a header line.

    Infinities and NaN are written as ``Infinity`` and ``NaN``, as by Python's ``json``.

    Args:
        path: the file; missing folders are created. An existing file is replaced as a whole.
        rows: the rows to write.
        **about: additional strings and numbers for the header line.
    """
    with replacing(path) as file:
        header = {"halfstep": "numerics", "format": _FORMAT, **about}
        for line in itertools.chain((header,), (row.to_dict() for row in rows)):
            file.write(json.dumps(line).encode() + b"\n")


def load_rows(path: str | Path) -> list[Row]:
    """Load the rows that ``save_rows`` wrote.

    Raises:
        ArgumentValueError: for another kind of file, and for a line that is not a row; the message has the line number.
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
            f"Line {number} of {path} is not a row of halfstep.numerics ({error}). The file was cut short or changed: "
            "save it again, or delete the line."
        ) from error
