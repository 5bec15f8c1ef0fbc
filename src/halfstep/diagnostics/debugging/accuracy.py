"""Compare the logs of two runs that ``enable_tensor_checker`` has written, op by op, as CSV."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ...core.errors import ArgumentValueError
from ..pages import write_text
from .checks import EXTREMES, Checked

__all__ = ["compare_accuracy"]

_CAST = re.compile(r"\.cast_(fp16|bf16|fp32)")
_NAMES = ["op_type", "tensor_name", "numel", "infinite"]
_OF_A_RUN = ["dtype", "max_value", "min_value", "mean_value", "num_zero", "num_inf", "num_nan"]
_RATIOS = ["max_value", "min_value", "mean_value"]


def compare_accuracy(
    dump_path: str, another_dump_path: str, output_filename: str, loss_scale: float = 1, dump_all_tensors: bool = False
) -> None:
    """Compare the logs that two runs wrote with ``TensorCheckerConfig(output_dir=...)`` and ``CHECK_ALL``.

    Writes a CSV file, which spreadsheets open. Its name is ``output_filename`` with the suffix ".csv" in place of
    Paddle's ".xlsx". Two lines are compared if they have the same op and tensor and are the same occurrence of that
    pair. Lines that only one run has are listed as well.

    The column "infinite" is 1 for inf, NaN and numbers that the other run's dtype cannot hold. Compare the ratios with
    1, and in gradients with the loss scale.

    Args:
        dump_path: the folder with the logs of the fp32 run.
        another_dump_path: the folder with the logs of the 16-bit run.
        output_filename: the path of the file to write.
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
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    runs = (f"{run} {name}" for run, name in itertools.product(("reference", "other"), _OF_A_RUN))
    writer.writerow(["worker", *_NAMES, *runs, *(f"ratio {name}" for name in _RATIOS)])
    for name in shared:
        reference, other = (_parsed(folder / name) for folder in folders)
        writer.writerows([name, *row] for row in _matched(reference, other, float(loss_scale)))
    stem = Path(output_filename)
    stem = stem.with_suffix("") if stem.suffix in (".xlsx", ".csv") else stem
    write_text(stem.with_name(f"{stem.name}.csv"), text.getvalue())


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


def _matched(reference: Sequence[Checked], other: Sequence[Checked], scale: float) -> list[list[str]]:
    """Pair the lines of both logs in the order of the reference; lines of ``other`` alone come last."""
    left, right = dict(_numbered(reference)), dict(_numbered(other))
    keys = dict.fromkeys([*left, *right])
    return [_row(f"{tensor}#{i}", left.get(key), right.get(key), scale) for key in keys for _, tensor, i in [key]]


def _row(name: str, reference: Checked | None, other: Checked | None, scale: float) -> list[str]:
    """The cells of an op in both logs, or in one of them."""
    some = reference or other
    assert some is not None
    infinite = other is not None and other.bad
    if reference is not None and other is not None:
        is_gradient = some.op.endswith("_grad") or "GRAD" in some.tensor
        limit = other.limit / (scale if is_gradient else 1.0)
        infinite |= any(not abs(reference.number(each)) <= limit for each in EXTREMES[:2])
    cells = [some.op, name, f"{some.number('numel'):.0f}", str(int(infinite))]
    cells += _cells_of(reference) + _cells_of(other)
    return [*cells, *(_ratio(each, reference, other) for each in EXTREMES)]


def _cells_of(run: Checked | None) -> list[str]:
    if run is None:
        return ["--"] * len(_OF_A_RUN)
    extremes = (f"{run.numbers.get(name, math.nan):.6g}" for name in EXTREMES)
    return [run.dtype, *extremes, *(f"{run.number(name):.0f}" for name in ("num_zero", "num_inf", "num_nan"))]


def _ratio(name: str, reference: Checked | None, other: Checked | None) -> str:
    """Return the ratio of the other run's value to the reference."""
    if reference is None or other is None:
        return "--"
    ours, theirs = (run.numbers.get(name, math.nan) for run in (other, reference))
    return f"{1.0 if ours == theirs else ours / theirs if theirs else math.inf:.6g}"


def _numbered(lines: Iterable[Checked]) -> Iterable[tuple[tuple[str, str, int], Checked]]:
    seen: Counter[tuple[str, str]] = Counter()
    for line in lines:
        yield (line.op, line.tensor, seen[line.op, line.tensor]), line
        seen[line.op, line.tensor] += 1
