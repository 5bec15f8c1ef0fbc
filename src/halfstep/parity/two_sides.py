"""``parity``: runs two sides on the same inputs and finds the first op at which they round differently."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ..core.dtypes import dtype_name
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.torch_compat import TorchDispatchMode, tree_flatten, tree_unflatten
from ..numerics.linked_rows import LinkedRow, aligned_rows
from ..observe.names import OUTSIDE, ROOT, canonical
from ..observe.ops import widened, written
from .compiled import compiled_difference, is_compiled
from .parting import Parting, is_same, part
from .recorded import OUTPUT, BitRecorder, Run, run
from .result import Difference, Op, Parity

__all__ = ["batch_invariance", "parity", "record"]

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
    runs = [_as_run(name, side, inputs) for name, side in zip(names, sides, strict=True)]
    _check(runs)
    found = part(*runs)
    first = None
    if found is None:
        if any(map(is_compiled, sides)):
            first = compiled_difference(names, sides, inputs, runs)
            found = None
    else:
        first = _difference(names, sides, inputs, runs, found, reference)
    return Parity(names, first, *_ops(runs))


def record(side: Callable[..., Any], inputs: Any, *, name: str = "") -> Run:
    """Record one side, to compare it with another process's: ``parity.record(model, x).save("a.pt")``.

    Args:
        side: a callable.
        inputs: its arguments, as for ``parity``.
        name: how reports call the side; "" is its own name.
    """
    return run(name or _name(side), side, inputs)[0]


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
    alone = run(names[0], model, tree_unflatten(one, tree))[0]

    def guide() -> tuple[int, dict[Any, list[torch.Size]]]:
        shapes = defaultdict(list)
        for row in alone.rows:
            shapes[row.module, row.op, row.index].append(row.shape)
        return size, shapes

    runs = [alone, run(names[1], model, inputs, BitRecorder(batch=guide()))[0]]
    _check(runs)
    found = part(*runs)
    first = None
    if found is not None:
        again = run(names[1], model, inputs, BitRecorder({found.ends[1]}, guide()))[0]
        alone.kept = run(names[0], model, tree_unflatten(one, tree), BitRecorder({found.ends[0]}))[0].kept
        first = _described(names, [alone, again], found, None)
    return Parity(names, first, *_ops(runs))


parity.__dict__.update(batch_invariance=batch_invariance, record=record)


def _name(side: Any) -> str:
    return getattr(side, "__name__", type(getattr(side, "_orig_mod", side)).__name__)


def _names(sides: Sequence[Any]) -> tuple[str, str]:
    a, b = (side.name if isinstance(side, Run) else _name(side) for side in sides)
    a, b = (f"{name} (compiled)" if is_compiled(side) else name for name, side in zip((a, b), sides, strict=True))
    return (a, b) if a != b else (f"{a} (a)", f"{b} (b)")


def _as_run(name: str, side: Any, inputs: Any) -> Run:
    return side if isinstance(side, Run) else run(name, side, inputs)[0]


def _check(runs: Sequence[Run]) -> None:
    """Refuse runs that cannot be aligned."""
    shapes = [[tuple(run.rows[i].shape) for i in run.outputs] for run in runs]
    if shapes[0] != shapes[1]:
        said = " and ".join(f"{run.name} returns {len(of)}: {of}" for run, of in zip(runs, shapes, strict=True))
        raise ArgumentValueError(
            f"The outputs differ in structure ({said}). Return tensors of equal shapes, in equal order."
        )
    modules = [{row.module for row in run.rows} - {OUTSIDE, OUTPUT, ROOT} for run in runs]
    if all(modules) and not modules[0] & modules[1]:
        said = " and ".join(
            f"{run.name} has {', '.join(sorted(of)[:3])}" for run, of in zip(runs, modules, strict=True)
        )
        raise ArgumentValueError(
            f"No module has the same name on both sides: {said}. Compare models of one module tree."
        )


class _Wide(TorchDispatchMode):
    """Computes in float64 from a row of a recorder on."""

    def __init__(self, recorder: BitRecorder, start: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder, self._start = recorder, start

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(self._recorder.rows) >= self._start and not func.is_view:
            args, kwargs = widened(args, kwargs, torch.float64, list(written(func, args, kwargs)))
        return func(*args, **kwargs)


def _difference(
    names: tuple[str, str],
    sides: Sequence[Any],
    inputs: Any,
    runs: Sequence[Run],
    found: Parting,
    reference: str | None,
) -> Difference:
    """Describe the place where two runs part, from whole tensors if a side can run again."""
    for name, side, of, end in zip(names, sides, runs, found.ends, strict=True):
        if not isinstance(side, Run):
            of.kept = run(name, side, inputs, BitRecorder({end}))[0].kept
    right = None
    if reference and not found.inputs_differed and not isinstance(sides[0], Run):
        end = found.ends[0]
        if found.rows[0] and found.rows[0][0] in runs[0].facts:
            start, recorder = runs[0].facts[found.rows[0][0]].before, BitRecorder({end})
            with suppress(UsageError):  # an op that has no float64
                run(names[0], sides[0], inputs, recorder, lambda it: _Wide(it, start))
            same = end < len(recorder.rows) and recorder.rows[end].place == runs[0].rows[end].place
            right = recorder.kept.get(end) if same else None
        else:  # nothing happens here on the first side
            right = runs[0].kept.get(end)
    return _described(names, runs, found, right)


def _described(names: tuple[str, str], runs: Sequence[Run], found: Parting, right: torch.Tensor | None) -> Difference:
    rows = [run.rows[end] for run, end in zip(runs, found.ends, strict=True)]
    whole = all(end in run.kept for run, end in zip(runs, found.ends, strict=True))
    values = [
        (run.kept[end] if whole else row.sample).double().cpu()
        for run, row, end in zip(runs, rows, found.ends, strict=True)
    ]
    dtype = max((row.dtype for row in rows), key=_eps)
    apart = ulps(values[0], values[1], dtype)
    side = 0 if found.rows[0] else 1
    run, at = runs[side], found.rows[side][0]
    row = run.rows[at]
    nearer = ""
    if right is not None and whole and right.shape == values[0].shape:
        errors = [float((value - right.cpu()).norm()) for value in values]
        nearer = "" if errors[0] == errors[1] else names[int(errors[1] < errors[0])]
    before = sum(
        (r.module, r.op, r.index, r.backward) == (row.module, row.op, row.index, row.backward) for r in run.rows[:at]
    )
    return Difference(
        row.module,
        canonical(row.op),
        before,
        found.kind,
        "" if found.more is None else names[found.more],
        float(apart.max()) if apart.numel() else 0.0,
        float((apart > 0).double().mean()) if apart.numel() else 0.0,
        found.inputs_differed,
        nearer,
        dtype_name(dtype),
        *(
            tuple(f"{run.rows[i].op}:{dtype_name(run.rows[i].dtype)}" for i in of)
            for run, of in zip(runs, found.rows, strict=True)
        ),
    )


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def ulps(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the distance of values, in units in the last place of a dtype; inf where only one is finite."""
    if a.shape != b.shape or not dtype.is_floating_point:
        return (a != b).double() if a.shape == b.shape else torch.tensor([torch.inf], dtype=torch.float64, device="cpu")
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
        apart = (
            0.0
            if is_same(row, other)
            else float(max(ulps(row.sample, other.sample, dtype).max(), torch.tensor(2**-20)))
        )
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
