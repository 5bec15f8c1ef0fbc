"""Compare the logs of two runs that ``enable_tensor_checker`` has written, op by op, as a page and as CSV."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.errors import ArgumentValueError
from ..pages import Markup, dense_table, header, paragraph, section, small, write_page, write_text

__all__ = ["compare_accuracy"]

_LINE = re.compile(r"\[PRECISION\] (?:\[ERROR\] )?in \[device=(.*?), op=(.*?), tensor=(.*?), dtype=(.*?)\], (.*)")
_CAST = re.compile(r"\.cast_(fp16|bf16|fp32)")
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_TOLERANCE = 0.05
_TITLE = "Accuracy of two runs"

_NAMES = ["op_type", "tensor_name", "numel", "infinite"]
_OF_A_RUN = ["dtype", "max_value", "min_value", "mean_value", "num_zero", "num_inf", "num_nan"]
_RATIOS = ["max_value", "min_value", "mean_value"]
_EXTREMES = ("max", "min", "mean")


@dataclass(frozen=True)
class _Logged:
    """One line of a log."""

    op: str
    tensor: str
    dtype: str
    facts: dict[str, float]

    @property
    def is_gradient(self) -> bool:
        return self.op.endswith("_grad") or "GRAD" in self.tensor

    @property
    def bad(self) -> bool:
        return self.facts.get("num_nan", 0) > 0 or self.facts.get("num_inf", 0) > 0

    def cells(self) -> list[str]:
        counts = (f"{self.facts.get(name, 0):.0f}" for name in ("num_zero", "num_inf", "num_nan"))
        return [self.dtype, *(f"{self.facts.get(name, math.nan):.6g}" for name in _EXTREMES), *counts]


@dataclass(frozen=True)
class _Compared:
    """An op in both logs, or in one of them."""

    name: str
    reference: _Logged | None
    other: _Logged | None
    scale: float

    @property
    def infinite(self) -> bool:
        """Whether the reference cannot be held in the dtype of the other run, or the other one has inf or NaN."""
        if self.other is not None and self.other.bad:
            return True
        if self.reference is None or self.other is None:
            return False
        scale = self.scale if self.reference.is_gradient else 1.0
        largest = max(abs(self.reference.facts.get(name, 0.0)) for name in _EXTREMES[:2])
        return not largest * scale <= torch.finfo(_DTYPES.get(self.other.dtype, torch.float32)).max

    def ratios(self) -> list[float | None]:
        """The other run's numbers as parts of the reference's; None where there are not both."""
        if self.reference is None or self.other is None:
            return [None] * len(_EXTREMES)
        return [_ratio(self.reference.facts.get(n, math.nan), self.other.facts.get(n, math.nan)) for n in _EXTREMES]

    def differs(self, ratio: float | None) -> bool:
        """Whether a ratio is neither nearly 1 nor nearly the loss scale."""
        return ratio is not None and not any(
            abs(ratio / expected - 1.0) <= _TOLERANCE for expected in (1.0, self.scale)
        )

    def cells(self) -> list[str]:
        some = self.reference or self.other
        assert some is not None
        cells = [some.op, self.name, f"{some.facts.get('numel', 0):.0f}", str(int(self.infinite))]
        for each in (self.reference, self.other):
            cells += ["--"] * len(_OF_A_RUN) if each is None else each.cells()
        return cells + ["--" if ratio is None else f"{ratio:.6g}" for ratio in self.ratios()]

    def kinds(self) -> list[str]:
        """What stands out, for each cell: "bad", "half" or "differs"."""
        kinds = ["", "", "", "bad" if self.infinite else ""]
        for each in (self.reference, self.other):
            half = each is not None and each.dtype in ("fp16", "bf16")
            kinds.append("half" if half else "")
            kinds += ["bad" if each is not None and self._is_bad(each, name) else "" for name in _EXTREMES]
            kinds.append("")
            kinds += ["bad" if each is not None and each.facts.get(n, 0) else "" for n in ("num_inf", "num_nan")]
        return kinds + ["differs" if self.differs(ratio) else "" for ratio in self.ratios()]

    def _is_bad(self, each: _Logged, name: str) -> bool:
        value = each.facts.get(name, 0.0)
        return not math.isfinite(value) or (each is self.reference and name != "mean" and self._overflows(value))

    def _overflows(self, value: float) -> bool:
        if self.other is None or self.reference is None:
            return False
        scale = self.scale if self.reference.is_gradient else 1.0
        return abs(value) * scale > torch.finfo(_DTYPES.get(self.other.dtype, torch.float32)).max


def compare_accuracy(
    dump_path: str,
    another_dump_path: str,
    output_filename: str,
    loss_scale: float = 1,
    dump_all_tensors: bool = False,
) -> None:
    """Compare what two runs have logged, as ``TensorCheckerConfig(output_dir=...)`` with ``CHECK_ALL`` does.

    Two files are written: a page, and all numbers as CSV. Their names are ``output_filename`` with the suffixes ".html"
    and ".csv"; another suffix, such as Paddle's ".xlsx", is dropped. Lines belong together that have the same op and
    tensor and are the same occurrence of these. What only one run has is there, too.

    Red is inf or NaN, and what the other run's dtype cannot hold; yellow a 16-bit dtype; orange a ratio that is
    neither 1 nor the loss scale, by more than 5 %.

    Args:
        dump_path: the folder with the logs of the fp32 run.
        another_dump_path: that of the 16-bit run.
        output_filename: what to write.
        loss_scale: what the loss of the 16-bit run was multiplied by.
        dump_all_tensors: must be False, as in Paddle.

    Raises:
        ArgumentValueError: if a folder has no logs, or the two have none of the same name.
    """
    if dump_all_tensors:
        raise ArgumentValueError("dump_all_tensors=True is not supported, as in Paddle; leave it out.")
    folders = Path(dump_path), Path(another_dump_path)
    names = [_logs_in(folder) for folder in folders]
    shared = sorted(set(names[0]) & set(names[1]))
    if not shared:
        raise ArgumentValueError(
            f"{folders[0]} has the logs {names[0]}, and {folders[1]} has {names[1]}: none has the same name, so there "
            "is nothing to compare. Runs with as many processes on the same kind of device have logs of the same names."
        )
    found = {
        name: _matched(*(_parsed(folder / name) for folder in folders), scale=float(loss_scale)) for name in shared
    }
    stem = Path(output_filename)
    stem = stem.with_suffix("") if stem.suffix in (".xlsx", ".html", ".csv") else stem
    write_page(stem.with_name(f"{stem.name}.html"), _TITLE, _parts(found, float(loss_scale)), wide=True)
    write_text(stem.with_name(f"{stem.name}.csv"), _csv(found))


def _logs_in(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.glob("*worker_*")) if folder.is_dir() else []
    if not names:
        raise ArgumentValueError(
            f"{folder} has no logs, whose names contain 'worker_': TensorCheckerConfig(output_dir=...) writes them."
        )
    return names


def _parsed(path: Path) -> list[_Logged]:
    lines = (_LINE.search(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [
        _Logged(
            found[2],
            _CAST.sub("", found[3]),
            found[4],
            {name: float(value) for name, value in (pair.split("=") for pair in found[5].split(", "))},
        )
        for found in lines
        if found is not None
    ]


def _matched(reference: Sequence[_Logged], other: Sequence[_Logged], *, scale: float) -> list[_Compared]:
    """Both logs line by line, in the order of the reference; what only the other has comes where it was."""
    left, right = dict(_numbered(reference)), dict(_numbered(other))
    keys = list(left)
    at = 0
    for key in right:
        if key in left:
            at = max(at, keys.index(key) + 1)
        else:
            keys.insert(at, key)
            at += 1
    return [_Compared(f"{tensor}#{i}", left.get(key), right.get(key), scale) for key in keys for _, tensor, i in [key]]


def _numbered(lines: Iterable[_Logged]) -> Iterable[tuple[tuple[str, str, int], _Logged]]:
    seen: Counter[tuple[str, str]] = Counter()
    for line in lines:
        yield (line.op, line.tensor, seen[line.op, line.tensor]), line
        seen[line.op, line.tensor] += 1


def _ratio(reference: float, other: float) -> float:
    if reference == other:
        return 1.0
    return other / reference if reference else math.inf


def _csv(found: dict[str, list[_Compared]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    runs = (f"{run} {name}" for run, name in itertools.product(("reference", "other"), _OF_A_RUN))
    writer.writerow(["worker", *_NAMES, *runs, *(f"ratio {name}" for name in _RATIOS)])
    for worker, rows in found.items():
        writer.writerows([worker, *row.cells()] for row in rows)
    return text.getvalue()


def _parts(found: dict[str, list[_Compared]], scale: float) -> list[Markup]:
    groups = (
        ("", 4),
        ("reference", len(_OF_A_RUN)),
        (f"other (scale={scale:g})", len(_OF_A_RUN)),
        ("other / reference", 3),
    )
    names = [*_NAMES, *_OF_A_RUN, *_OF_A_RUN, *_RATIOS]
    key = (
        "Red is inf or NaN, or what the dtype of the other run cannot hold. Yellow is a 16-bit dtype. Orange is a "
        "ratio that is neither 1 nor the loss scale, by more than 5 %."
    )
    parts = [header(None, _TITLE), small(key)]
    for worker, rows in found.items():
        infinite = sorted({row.cells()[0] for row in rows if row.infinite})
        text = f"Ops with infinite results: {', '.join(infinite)}." if infinite else "No op has infinite results."
        cells = (zip(row.cells(), row.kinds(), strict=True) for row in rows)
        parts.append(section(worker, paragraph(text), dense_table(worker, groups, names, cells)))
    return parts
