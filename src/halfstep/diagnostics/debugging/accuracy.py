"""Compare the logs of two runs that ``enable_tensor_checker`` has written, op by op, as a page and as CSV."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ...core.errors import ArgumentValueError
from ..pages import Markup, dense_table, header, paragraph, section, small, write_page, write_text
from .checks import EXTREMES, Checked

__all__ = ["compare_accuracy"]

_CAST = re.compile(r"\.cast_(fp16|bf16|fp32)")
_TOLERANCE = 0.05
_TITLE = "Accuracy of two runs"

_NAMES = ["op_type", "tensor_name", "numel", "infinite"]
_OF_A_RUN = ["dtype", "max_value", "min_value", "mean_value", "num_zero", "num_inf", "num_nan"]
_RATIOS = ["max_value", "min_value", "mean_value"]

Cell = tuple[str, str]
"""The text of a cell and its highlight: "bad", "half", "differs" or none."""


def compare_accuracy(
    dump_path: str, another_dump_path: str, output_filename: str, loss_scale: float = 1, dump_all_tensors: bool = False
) -> None:
    """Compare the logs that two runs wrote with ``TensorCheckerConfig(output_dir=...)`` and ``CHECK_ALL``.

    Writes two files: a page, and all numbers as CSV. Their names are ``output_filename`` with the suffixes ".html" and
    ".csv"; any other suffix, such as Paddle's ".xlsx", is dropped. Two lines are compared if they have the same op and
    tensor and are the same occurrence of that pair. Lines that only one run has are listed as well.

    Red marks inf, NaN and numbers that the other run's dtype cannot hold; yellow marks a 16-bit dtype; orange marks a
    ratio that differs from both 1 and the loss scale by more than 5 %.

    Args:
        dump_path: the folder with the logs of the fp32 run.
        another_dump_path: the folder with the logs of the 16-bit run.
        output_filename: the path of the files to write.
        loss_scale: the factor by which the 16-bit run multiplied its loss.
        dump_all_tensors: must be False, as in Paddle.

    Raises:
        ArgumentValueError: if a folder has no logs, or no log has the same name in both folders.
    """
    if dump_all_tensors:
        raise ArgumentValueError("dump_all_tensors=True is not supported, as in Paddle; leave it out.")
    folders = Path(dump_path), Path(another_dump_path)
    names = [_logs_in(folder) for folder in folders]
    shared = sorted(set(names[0]) & set(names[1]))
    if not shared:
        raise ArgumentValueError(
            f"{folders[0]} has the logs {names[0]}, and {folders[1]} has {names[1]}: no log is in both, so there "
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


def _parsed(path: Path) -> list[Checked]:
    found = filter(None, map(Checked.in_line, path.read_text(encoding="utf-8").splitlines()))
    return [replace(each, tensor=_CAST.sub("", each.tensor)) for each in found]


def _matched(reference: Sequence[Checked], other: Sequence[Checked], *, scale: float) -> list[list[Cell]]:
    """Pair the lines of both logs in the order of the reference; a line of ``other`` alone keeps its place."""
    left, right = dict(_numbered(reference)), dict(_numbered(other))
    places = {key: i for i, key in enumerate(left)}
    at, after = -1, defaultdict(list)
    for key in right:
        at = max(at, places.get(key, -1))
        if key not in left:
            after[at].append(key)
    keys = [*after[-1], *(each for i, key in enumerate(left) for each in (key, *after[i]))]
    return [_row(f"{tensor}#{i}", left.get(key), right.get(key), scale) for key in keys for _, tensor, i in [key]]


def _row(name: str, reference: Checked | None, other: Checked | None, scale: float) -> list[Cell]:
    """The cells of an op in both logs, or in one of them."""
    some = reference or other
    assert some is not None
    is_gradient = some.op.endswith("_grad") or "GRAD" in some.tensor
    limit = math.inf if reference is None or other is None else other.limit / (scale if is_gradient else 1.0)
    extremes = [] if reference is None else [abs(reference.number(each)) for each in EXTREMES[:2]]
    infinite = any(not each <= limit for each in extremes) and other is not None
    infinite |= other is not None and other.bad
    flag = (str(int(infinite)), "bad" if infinite else "")
    cells = [(some.op, ""), (name, ""), (f"{some.number('numel'):.0f}", ""), flag]
    cells += _cells_of(reference, limit) + _cells_of(other, math.inf)
    return [*cells, *(_ratio(each, reference, other, scale) for each in EXTREMES)]


def _cells_of(run: Checked | None, limit: float) -> list[Cell]:
    """Format the cells of one run; the maximum and minimum are bad beyond ``limit``."""
    if run is None:
        return [("--", "")] * len(_OF_A_RUN)
    cells = [(run.dtype, "half" if run.dtype in ("fp16", "bf16") else "")]
    for name in EXTREMES:
        value = run.number(name)
        bad = not math.isfinite(value) or (name != "mean" and abs(value) > limit)
        cells.append((f"{run.numbers.get(name, math.nan):.6g}", "bad" if bad else ""))
    for name in ("num_zero", "num_inf", "num_nan"):
        cells.append((f"{run.number(name):.0f}", "bad" if name != "num_zero" and run.number(name) else ""))
    return cells


def _ratio(name: str, reference: Checked | None, other: Checked | None, scale: float) -> Cell:
    """Return the ratio of the other run's value to the reference; highlight one that is neither 1 nor the scale."""
    if reference is None or other is None:
        return "--", ""
    ours, theirs = (run.numbers.get(name, math.nan) for run in (other, reference))
    ratio = 1.0 if ours == theirs else ours / theirs if theirs else math.inf
    return f"{ratio:.6g}", "" if any(abs(ratio / each - 1.0) <= _TOLERANCE for each in (1.0, scale)) else "differs"


def _numbered(lines: Iterable[Checked]) -> Iterable[tuple[tuple[str, str, int], Checked]]:
    seen: Counter[tuple[str, str]] = Counter()
    for line in lines:
        yield (line.op, line.tensor, seen[line.op, line.tensor]), line
        seen[line.op, line.tensor] += 1


def _csv(found: dict[str, list[list[Cell]]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    runs = (f"{run} {name}" for run, name in itertools.product(("reference", "other"), _OF_A_RUN))
    writer.writerow(["worker", *_NAMES, *runs, *(f"ratio {name}" for name in _RATIOS)])
    for worker, rows in found.items():
        writer.writerows([worker, *(text for text, _ in row)] for row in rows)
    return text.getvalue()


def _parts(found: dict[str, list[list[Cell]]], scale: float) -> list[Markup]:
    groups = (
        ("", 4),
        ("reference", len(_OF_A_RUN)),
        (f"other (scale={scale:g})", len(_OF_A_RUN)),
        ("other / reference", 3),
    )
    names = [*_NAMES, *_OF_A_RUN, *_OF_A_RUN, *_RATIOS]
    key = (
        "Red marks inf, NaN and values that the dtype of the other run cannot represent. Yellow marks a 16-bit dtype. "
        "Orange marks a ratio that differs from both 1 and the loss scale by more than 5 %."
    )
    parts = [header(None, _TITLE), small(key)]
    for worker, rows in found.items():
        infinite = sorted({row[0][0] for row in rows if row[3][1]})
        text = f"Ops with infinite results: {', '.join(infinite)}." if infinite else "No op has infinite results."
        parts.append(section(worker, paragraph(text), dense_table(worker, groups, names, rows)))
    return parts
