"""``parity``: runs two sides on the same inputs and finds the first op at which they round differently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..core.dtypes import dtype_name
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.torch_compat import tree_flatten, tree_unflatten
from ..numerics.linked_rows import LinkedRow, aligned_rows
from ..observe.names import OUTSIDE, ROOT, canonical
from .compiled import Fused, is_compiled
from .parting import Parting, is_same, part
from .recorded import OUTPUT, Run, run
from .result import Difference, Op, Parity

__all__ = ["batch_invariance", "parity", "record"]

_LEAST = 2.0**-20
"""The ulps of an op of which only values differ that are not in the sample."""

_EXPLAINED = 0.5
"""The share of a difference that a cause explains at least."""

_Again = Callable[..., Run] | None
Side = Callable[..., Any] | Run | str | Path


def parity(a: Side, b: Side, inputs: Any = None, *, reference: str | None = "float64") -> Parity:
    """Run two sides on the same inputs and find the first op whose result differs, and what one side rounds more.

    ::

        found = halfstep.numerics.parity(trainer, sampler, x)
        print(found)
        found.report("parity.html")

    A side is a model, a compiled model, a function, or a run that ``parity.record`` recorded, perhaps in another
    process. Ops are aligned by module, op and occurrence, and by the numbers that they return: a difference begins at
    the first op whose numbers the other side does not have, and on which a different output depends. Outputs that agree
    bit for bit have no difference, however they were computed.

    Each side begins with the same random state, with copies of ``inputs``, in its current mode (train or eval) and grad
    mode. Weights, buffers, gradients and random state are as before afterwards, for the models that a side is, has as
    ``__self__``, or names in its closure or globals. A side runs two times: to find the place, and
    to keep the tensors there; the first side once more for the reference.

    Ops inside of compiled code cannot be observed. A compiled side therefore runs its graph eagerly, op by op as any
    other side, and once as compiled, where only what it returns is compared. If the eager ops agree and the compiled
    output does not, the graph runs once more with the roundings of its pointwise ops left out, as compilers do between
    ops that they fuse. ``first.note`` says how much of the difference this explains.

    Args:
        a: the first side.
        b: the second side.
        inputs: a tuple or list of positional arguments, a mapping of keyword arguments, or a single argument. Not used
            by recorded runs.
        reference: "float64" computes the ops at the first difference again in float64, as the first side has them and
            from its inputs there, to find the nearer side; None leaves this out.

    Raises:
        ArgumentTypeError: for a side that cannot be called or returns no tensor.
        ArgumentValueError: for outputs of different structure, modules that do not align, another reference, or a file
            that is no saved run.
        UsageError: if a side raises.
    """
    if reference not in ("float64", None):
        raise ArgumentValueError(f"reference={reference!r} must be 'float64' or None.")
    sides = [Run.load(side) if isinstance(side, (str, Path)) else side for side in (a, b)]
    for side in sides:
        if not (isinstance(side, Run) or callable(side)):
            raise ArgumentTypeError(f"{side!r} must be a callable, a recorded run, or the path of a saved run.")
    names = _names(sides)
    again = [
        None if isinstance(side, Run) else partial(run, name, side, inputs)
        for name, side in zip(names, sides, strict=True)
    ]
    runs = [each() if each else side for each, side in zip(again, sides, strict=True)]
    found = _compare(names, runs, again, reference)
    if found and any(map(is_compiled, sides)):
        return replace(found, first=_compiled_difference(names, sides, runs, again))
    return found


def record(side: Callable[..., Any], inputs: Any, *, name: str = "") -> Run:
    """Record one side, to compare it with another process's: ``parity.record(model, x).save("a.pt")``.

    Args:
        side: a callable.
        inputs: its arguments, as for ``parity``.
        name: how reports call the side; "" is its own name.
    """
    return run(name or _name(side), side, inputs)


def batch_invariance(model: Callable[..., Any], inputs: Any) -> Parity:
    """Compare the first row of a batch computed alone with the same row computed in the batch, op by op.

    Differences that begin at an op with equal inputs mean that the op chooses its kernel, or the order of its sums, by
    the size of the batch.

    Args:
        model: a model or function whose inputs and outputs have the batch as their first dimension.
        inputs: its arguments, as for ``parity``, with two or more rows.

    Raises:
        ArgumentValueError: for a batch of fewer than two rows.
    """
    leaves, tree = tree_flatten(inputs)
    size = next((len(x) for x in leaves if isinstance(x, torch.Tensor) and x.dim()), 0)
    if size < 2:
        raise ArgumentValueError(f"inputs have {size} rows: give a batch of 2 or more to compare its first row with.")
    one = [x[:1] if isinstance(x, torch.Tensor) and x.dim() and len(x) == size else x for x in leaves]
    names = "row 0 alone", f"row 0 of {size}"
    again = [partial(run, names[0], model, tree_unflatten(one, tree))]
    again.append(partial(run, names[1], model, inputs, batch=(size, again[0]())))
    return _compare(names, [each() for each in again], again, None)


parity.__dict__.update(batch_invariance=batch_invariance, record=record)


def _name(side: Any) -> str:
    return getattr(side, "__name__", type(getattr(side, "_orig_mod", side)).__name__)


def _names(sides: Sequence[Any]) -> tuple[str, str]:
    a, b = (side.name if isinstance(side, Run) else _name(side) for side in sides)
    a, b = (f"{name} (compiled)" if is_compiled(side) else name for name, side in zip((a, b), sides, strict=True))
    return (a, b) if a != b else (f"{a} (a)", f"{b} (b)")


def _compare(names: tuple[str, str], runs: Sequence[Run], again: Sequence[_Again], reference: str | None) -> Parity:
    shapes = [[tuple(run.rows[i].shape) for i in run.outputs] for run in runs]
    if shapes[0] != shapes[1]:
        said = " and ".join(f"{name} returns {of}" for name, of in zip(names, shapes, strict=True))
        raise ArgumentValueError(f"The outputs differ in structure: {said}. Return equal shapes in equal order.")
    modules = [{row.module for row in run.rows} - {OUTSIDE, OUTPUT, ROOT} for run in runs]
    if all(modules) and not modules[0] & modules[1]:
        said = " and ".join(f"{name} has {', '.join(sorted(of)[:3])}" for name, of in zip(names, modules, strict=True))
        raise ArgumentValueError(f"No module has the same name on both sides: {said}. Compare equal module trees.")
    found = part(*runs)
    return Parity(names, None if found is None else _difference(names, runs, again, found, reference), *_ops(runs))


def _difference(
    names: tuple[str, str], runs: Sequence[Run], again: Sequence[_Again], found: Parting, reference: str | None
) -> Difference:
    """Describe the place where two runs part, from whole tensors if a side can run again."""
    ends = list(zip(runs, found.ends, strict=True))
    kept = [each(keep={end}).kept.get(end) if each else None for each, end in zip(again, found.ends, strict=True)]
    whole = None not in [None if each is None else 0 for each in kept]
    values = [
        (x if whole and x is not None else run.rows[end].sample).double().cpu()
        for x, (run, end) in zip(kept, ends, strict=True)
    ]
    dtype = max((run.rows[end].dtype for run, end in ends), key=_eps)
    apart = ulps(*values, dtype)
    side = 0 if found.rows[0] else 1
    nearer = ""
    if reference and whole and again[0] and not found.inputs_differed:
        right = values[0] if side else _in_float64(runs[0], again[0], found)
        errors = [torch.inf if right is None else float((value - right).norm()) for value in values]
        nearer = "" if errors[0] == errors[1] else names[int(errors[1] < errors[0])]
    rows, at = runs[side].rows, found.rows[side][0]
    row = rows[at]
    before = sum(
        (x.module, x.op, x.index, x.backward) == (row.module, row.op, row.index, row.backward) for x in rows[:at]
    )
    ops = [
        tuple(f"{run.rows[i].op}:{dtype_name(run.rows[i].dtype)}" for i in of)
        for run, of in zip(runs, found.rows, strict=True)
    ]
    more = "" if found.more is None else names[found.more]
    share = float((apart > 0).double().mean())
    sizes = (float(apart.max()), share, found.inputs_differed, nearer, dtype_name(dtype))
    return Difference(row.module, canonical(row.op), before, found.kind, more, *sizes, *ops)


def _compiled_difference(
    names: tuple[str, str], sides: Sequence[Any], runs: Sequence[Run], again: Sequence[_Again]
) -> Difference | None:
    """Explain the difference of outputs where one side or both are compiled, and the ops agree that run eagerly."""
    ran = [
        each(watched=False) if each and is_compiled(side) else run
        for each, side, run in zip(again, sides, runs, strict=True)
    ]
    found = part(*ran)
    if found is None:
        return None
    first = _difference(names, ran, (None, None), found, None)
    side = int(is_compiled(sides[1]))
    rerun = again[side]
    assert rerun is not None
    fused = rerun(below=Fused())
    left, whole = (_distance(ran[side], of) for of in (fused, runs[side]))
    parted = part(*((runs[0], fused) if side else (fused, runs[1])))
    share = 1.0 - left / whole if whole else 0.0
    note = f"results that stay in float32 between fused ops explain {max(share, 0.0):.0%} of the difference of outputs"
    if parted is None or share < _EXPLAINED:
        return replace(
            first,
            kind="kernel",
            note=f"{note}; the rest is compiled kernels: sums in another order, fused multiply-add, other functions",
        )
    at = _difference(names, (runs[0], fused) if side else (fused, runs[1]), (None, None), parted, None)
    return replace(at, kind="rounding", more=names[1 - side], nearer="", note=f"told from outputs: {note}")


def _distance(run: Run, other: Run) -> float:
    """Return the distance of the outputs of two runs, in the dtypes of the first."""
    pairs = [(run.kept[i], other.kept[j]) for i, j in zip(run.outputs, other.outputs, strict=True)]
    return sum(float((a.double() - b.to(a.dtype).double()).abs().sum()) for a, b in pairs if a.is_floating_point())


def _in_float64(side: Run, again: Callable[..., Run], found: Parting) -> torch.Tensor | None:
    """Compute the ops of the first side at the parting again in float64; None for an op that has no float64."""
    start, end = found.rows[0][0], found.ends[0]
    if start not in side.facts:  # an output
        return None
    with suppress(UsageError):
        found_again = again(keep={end}, wide_from=side.facts[start].before)
        if end < len(found_again.rows) and found_again.rows[end].place == side.rows[end].place:
            return found_again.kept[end].double().cpu()
    return None


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def ulps(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the distance of values, in units in the last place of a dtype; inf where only one is finite."""
    if not dtype.is_floating_point:
        return (a != b).double()
    size = torch.maximum(a.abs(), b.abs()).clamp_min(torch.finfo(dtype).smallest_normal)
    unit = torch.ldexp(torch.full_like(size, torch.finfo(dtype).eps), torch.frexp(size).exponent - 1)
    equal = (a == b) | (a.isnan() & b.isnan())
    return ((a - b).abs() / unit).masked_fill(~(a.isfinite() & b.isfinite()), torch.inf).masked_fill(equal, 0.0)


def _ops(runs: Sequence[Run]) -> tuple[list[Op], int]:
    """List the ops of both runs, and count the others."""
    a, b = (run.rows for run in runs)
    matched, alone = aligned_rows(a, b)
    partners = {i: b[j] for i, j in matched.items()}
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for i, row in enumerate(a):
        if i not in partners or i not in runs[0].facts or row.index:
            continue
        other = partners[i]
        dtype = max(row.dtype, other.dtype, key=_eps)
        apart = 0.0 if is_same(row, other) else max(_LEAST, float(ulps(row.sample, other.sample, dtype).max()))
        differ = any(not _is_equal(a, partners, j) for j in row.inputs)
        key = row.module, canonical(row.op)
        found.append(Op(*key, seen[key], (dtype_name(row.dtype), dtype_name(other.dtype)), apart, differ))
        seen[key] += 1
    return found, alone


def _is_equal(rows: Sequence[LinkedRow], partners: dict[int, LinkedRow], i: int) -> bool:
    """True if a row, or what it was cast from, is equal on both sides; rows without a partner count as equal."""
    while i not in partners and rows[i].inputs:
        i = rows[i].inputs[0]
    return i not in partners or is_same(rows[i], partners[i])
