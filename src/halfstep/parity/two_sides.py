"""``parity``: runs two sides on the same inputs and finds the first op at which they round differently."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..core.dtypes import dtype_name
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..diagnostics.numerics.linked_rows import LinkedRow, aligned_rows
from ..diagnostics.observe.names import OUTSIDE, ROOT, canonical
from ..torch_internals.compiler_compat import compiled_from
from ..torch_internals.torch_compat import tree_flatten, tree_unflatten
from .compiled import Fused, rounding_as_eager
from .parting import Parting, is_same, part
from .recorded import OUTPUT, SideRun, Wide, run
from .result import Difference, OpDifference, Parity

__all__ = ["batch_invariance", "parity", "record"]

Side = Callable[..., Any] | SideRun | str | Path

_NOWHERE: Any = {"module": OUTPUT, "op": "output", "occurrence": 0}  # the place of what only outputs show


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

    Ops inside compiled code cannot be observed. A compiled side therefore runs its graph eagerly, op by op as any
    other side, and once as compiled, where only what it returns is compared. If the eager ops agree and the compiled
    output does not, the graph runs once more with the roundings of its pointwise ops left out, as compilers do between
    ops that they fuse. If this explains less than half of the difference, Inductor compiles the side once more, with
    these roundings. ``first.note`` says how much of the difference is explained; a difference that only outputs show
    has the module "(output)".

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
            that is not a saved run.
        UsageError: if a side raises.
    """
    if reference not in ("float64", None):
        raise ArgumentValueError(f"reference={reference!r} must be 'float64' or None.")
    sides = [SideRun.load(side) if isinstance(side, (str, Path)) else side for side in (a, b)]
    if wrong := [side for side in sides if not (isinstance(side, SideRun) or callable(side))]:
        raise ArgumentTypeError(f"{wrong[0]!r} must be a callable, a recorded run, or the path of a saved run.")
    names = [side.name if isinstance(side, SideRun) else _name(side) for side in sides]
    names = [f"{name} ({at})" for name, at in zip(names, "ab", strict=True)] if names[0] == names[1] else names
    runs = [s if isinstance(s, SideRun) else run(n, s, inputs) for n, s in zip(names, sides, strict=True)]
    found = _compare(runs, reference)
    compiles = "torch._dynamo" in sys.modules
    return replace(found, first=_compiled_difference(runs, sides, inputs)) if found and compiles else found


def record(side: Callable[..., Any], inputs: Any, *, name: str = "") -> SideRun:
    """Record one side, to compare it with another process's: ``parity.record(model, x).save("a.pt")``.

    Args:
        side: a callable.
        inputs: the arguments, as for ``parity``.
        name: the name in reports; "" is the own name of the side.
    """
    return replace(run(name or _name(side), side, inputs), again=None)  # the side may change later


def batch_invariance(model: Callable[..., Any], inputs: Any, *, alone: Any = None) -> Parity:
    """Compare the first row of a batch computed alone with the same row computed in the batch, op by op.

    Differences that begin at an op with equal inputs mean that the op chooses its kernel, or the order of its sums, by
    the size of the batch, or of its padding.

    Args:
        model: a model or function whose inputs and outputs have the batch as their first dimension.
        inputs: the arguments, as for ``parity``, with two or more rows. The first row may be padded at its end, or be
            the first of several sequences in a row that are packed.
        alone: the arguments for the first row alone, if they are not the first row of ``inputs``: without its padding,
            or without the sequences that are packed behind it.

    Raises:
        ArgumentValueError: for a batch of fewer than two rows, if ``alone`` is None.
    """
    leaves, tree = tree_flatten(inputs)
    size = next((len(x) for x in leaves if isinstance(x, torch.Tensor) and x.dim()), 0)
    if size < 2 and alone is None:
        raise ArgumentValueError(f"inputs have {size} rows: give a batch of 2 or more to compare its first row with.")
    first = [x[:1] if isinstance(x, torch.Tensor) and x.dim() and len(x) == size else x for x in leaves]
    one = run("row 0 alone", model, tree_unflatten(first, tree) if alone is None else alone)
    return _compare([one, run(f"row 0 of {size}", model, inputs, alone=one)], None)


parity.__dict__.update(batch_invariance=batch_invariance, record=record)


def _name(side: Any) -> str:
    name: str = getattr(side, "__name__", type(compiled_from(side) or side).__name__)
    return name if compiled_from(side) is None else f"{name} (compiled)"


def _compare(runs: Sequence[SideRun], reference: str | None) -> Parity:
    a, b = runs
    shapes = [[tuple(run.rows[i].shape) for i in run.outputs] for run in runs]
    if shapes[0] != shapes[1]:
        said = f"{a.name} returns {shapes[0]} and {b.name} {shapes[1]}"
        raise ArgumentValueError(f"The outputs differ in structure: {said}. Return equal shapes in equal order.")
    modules = [{row.module for row in run.rows} - {OUTSIDE, OUTPUT, ROOT} for run in runs]
    if all(modules) and not modules[0] & modules[1]:
        said = f"{a.name} has {', '.join(sorted(modules[0])[:3])} and {b.name} {', '.join(sorted(modules[1])[:3])}"
        raise ArgumentValueError(f"No module has the same name on both sides: {said}. Compare equal module trees.")
    first = _difference(runs, found, reference) if (found := part(a, b)) else None
    return Parity((a.name, b.name), first, *_ops(runs))


def _difference(runs: Sequence[SideRun], found: Parting, reference: str | None, exact: bool = True) -> Difference:
    """Describe the place where two runs part, from whole tensors if both sides can run again."""
    ends = [(run, end, run.rows[end]) for run, end in zip(runs, found.ends, strict=True)]
    exact = exact and all(run.again is not None for run in runs)
    values = [run.again(keep={end}).kept[end].cpu() if exact else row.sample for run, end, row in ends]
    dtype = max((row.dtype for *_, row in ends), key=_eps)
    apart = ulps(values[0], values[1], dtype)
    rows = [[run.rows[i] for i in of] for run, of in zip(runs, found.rows, strict=True)]
    a, b = (tuple(f"{row.op}:{dtype_name(row.dtype)}" for row in of) for of in rows)
    return Difference(
        **_place(runs, found),
        kind=found.kind,
        more="" if found.more is None else runs[found.more].name,
        ulps=float(apart.max()),
        share=float((apart > 0).double().mean()),
        inputs_differed=found.kind == "inputs",
        nearer=_nearer(runs, found, values) if reference and exact else "",
        dtype=dtype_name(dtype),
        a=a,
        b=b,
    )


def _place(runs: Sequence[SideRun], found: Parting) -> dict[str, Any]:
    """Return the module of the first op where the runs part, its name, and its index among equal ops of the module."""
    side = 0 if found.rows[0] else 1
    named = [(row.module, canonical(row.op)) for row in runs[side].rows[: found.rows[side][0] + 1]]
    return {"module": named[-1][0], "op": named[-1][1], "occurrence": named.count(named[-1]) - 1}


def _nearer(runs: Sequence[SideRun], found: Parting, values: Sequence[torch.Tensor]) -> str:
    """Return the name of the side whose values are nearer to float64; "" if equal or if float64 does not run."""
    right = _in_float64(runs[0], found) if found.rows[0] else values[0].double()
    errors = [torch.inf if right is None else float((value.double() - right).norm()) for value in values]
    return "" if errors[0] == errors[1] else runs[int(errors[1] < errors[0])].name


def _compiled_difference(runs: Sequence[SideRun], sides: Sequence[Any], inputs: Any) -> Difference | None:
    """Explain the difference of the real outputs of two sides whose ops agree when compiled code runs eagerly.

    Two runs are tried: the graph without the roundings that compilers leave out, which is to agree with the compiled
    code, and code that Inductor compiles with them, which is to agree with the graph. Only the first shows a place.
    """
    real = [each if each.again is None else each.again(watched=False) for each in runs]
    if (found := part(*real)) is None:
        return None
    apart = [0.0 if each is own else _distance(each, own) for each, own in zip(real, runs, strict=True)]
    side = max(0, 1, key=lambda i: (runs[i].again is not None, apart[i]))  # the side that its compiler changes more
    eager, other = runs[side], runs[1 - side]
    whole, as_eager = apart[side], rounding_as_eager(sides[side])
    for end, what, rerun in (
        (real[side], "results that stay in float32 between fused ops", partial(eager.again, below=lambda _: Fused())),
        (eager, "roundings that Inductor leaves out", partial(run, eager.name, as_eager, inputs, watched=False)),
    ):
        with suppress(UsageError):  # of a function that refuses float32 where it had 16 bits
            again = rerun()
            share = max(0.0, 1.0 - _distance(end, again) / whole) if whole else 0.0
            pair = real if end is eager else (other, again) if side else (again, other)
            if share >= 0.5 and (parted := part(*pair)):
                note = f"told from outputs: {what} explain {share:.0%} of the difference"
                at = replace(_difference(pair, parted, None, exact=False), **(_NOWHERE if end is eager else {}))
                return replace(at, kind="rounding", more=other.name, note=note)
    note = "told from outputs: roundings that the compiler leaves out explain less than half of the difference"
    return replace(_difference(real, found, None, exact=False), kind="kernel", more="", note=note, **_NOWHERE)


def _distance(run: SideRun, other: SideRun) -> float:
    """Return the distance of the outputs of two runs, in the dtypes of the first."""
    pairs = [(run.kept[i], other.kept[j]) for i, j in zip(run.outputs, other.outputs, strict=True)]
    return sum(float((a.to(torch.complex128) - b.to(a.dtype)).abs().sum()) for a, b in pairs)


def _in_float64(side: SideRun, found: Parting) -> torch.Tensor | None:
    """Compute the ops of the first side at the parting again in float64; None for an op that has no float64."""
    start, end = found.rows[0][0], found.ends[0]
    if start in side.facts and side.again is not None:
        with suppress(UsageError):
            wide: SideRun = side.again(keep={end}, below=partial(Wide, side.facts[start][0]))
            if end < len(wide.rows) and wide.rows[end].place == side.rows[end].place:
                return wide.kept[end].double().cpu()
    return None


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def ulps(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute the distance of values, in units in the last place of a dtype; inf where only one is finite.

    The unit of integers is 1.
    """
    if not _eps(dtype):
        return (a.long() - b.long()).abs().double()
    info, a, b = torch.finfo(dtype), a.double(), b.double()
    size = torch.maximum(a.abs(), b.abs()).clamp_min(info.smallest_normal)
    unit = torch.ldexp(torch.full_like(size, info.eps), torch.frexp(size).exponent - 1)
    equal = (a == b) | (a.isnan() & b.isnan())
    return ((a - b).abs() / unit).masked_fill(~(a.isfinite() & b.isfinite()), torch.inf).masked_fill(equal, 0.0)


def _ops(runs: Sequence[SideRun]) -> tuple[list[OpDifference], int]:
    """List the ops of both runs, and count the ops of one run only."""
    a, b = (run.rows for run in runs)
    matched, alone = aligned_rows(a, b)
    partners = {i: b[j] for i, j in matched.items()}
    found = []
    for i in sorted(partners.keys() & runs[0].facts.keys()):
        row, other = a[i], partners[i]
        dtype = max(row.dtype, other.dtype, key=_eps)
        apart = 0.0 if is_same(row, other) else max(2.0**-20, float(ulps(row.sample, other.sample, dtype).max()))
        differ = any(not _is_equal(a, partners, j) for j in row.inputs)
        dtypes = dtype_name(row.dtype), dtype_name(other.dtype)
        found.append(OpDifference(row.module, canonical(row.op), dtypes, apart, differ))
    return found, alone


def _is_equal(rows: Sequence[LinkedRow], partners: dict[int, LinkedRow], i: int) -> bool:
    """True if a row, or what it was cast from, is equal on both sides; rows without a partner count as equal."""
    while i not in partners and rows[i].inputs:
        i = rows[i].inputs[0]
    return i not in partners or is_same(rows[i], partners[i])
