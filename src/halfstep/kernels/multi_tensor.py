"""Multi-tensor operations for everybody: scale, axpby, norms, unscale, copy; each an expression and one pass.

They take plain lists that may mix dtypes and devices. Whoever calls one with the same tensors step after step keeps a
``Batch`` instead and runs the pass itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from .expr import Pass, trace
from .grouping import Plan
from .tensor_table import Batch, Scalars

__all__ = ["AXPBY", "COPY", "L2NORM", "SCALE", "axpby", "copy", "l2norm", "run", "scale", "unscale_"]


def _scale(source: Any, target: Any, *, factor: Any) -> dict[str, Any]:
    return {"target": source * factor, "seen": source}


def _axpby(x: Any, y: Any, target: Any, *, a: Any, b: Any) -> dict[str, Any]:
    return {"target": x * a + y * b, "x_seen": x, "y_seen": y}


def _copy(source: Any, target: Any) -> dict[str, Any]:
    return {"target": source}


def _l2norm(source: Any) -> dict[str, Any]:
    return {"seen": source}


SCALE = Pass("scale", _scale, checks=("seen",))
AXPBY = Pass("axpby", _axpby, checks=("x_seen", "y_seen"))
COPY = Pass("copy", _copy)
L2NORM = Pass("l2norm", _l2norm, squares=("seen",), checks=("seen",))


def scale(
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    factor: float | torch.Tensor,
    found_inf: torch.Tensor | None = None,
) -> None:
    """``target = source * factor`` for each pair, in fp32 arithmetic (fp64 where a side is fp64).

    Args:
        sources: real tensors of any float dtypes and layouts.
        targets: as many, of the same shapes; may be the sources themselves.
        factor: a number or 0-dim tensor.
        found_inf: 0-dim float32 tensor, set to 1.0 if a source holds inf or NaN.
    """
    run(SCALE, {"factor": factor}, found_inf, source=sources, target=targets)


def unscale_(tensors: Sequence[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    """``tensor *= inv_scale`` in place, looking for inf and NaN in the same pass; see ``scale``."""
    scale(tensors, tensors, inv_scale, found_inf)


def axpby(
    a: float | torch.Tensor,
    xs: Sequence[torch.Tensor],
    b: float | torch.Tensor,
    ys: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    found_inf: torch.Tensor | None = None,
) -> None:
    """``target = a x + b y`` for each triple; see ``scale``."""
    run(AXPBY, {"a": a, "b": b}, found_inf, x=xs, y=ys, target=targets)


def copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """``target = source`` for each pair, cast to the target's dtype."""
    run(COPY, {}, None, source=sources, target=targets)


def l2norm(
    tensors: Sequence[torch.Tensor], *, per_tensor: bool = False, found_inf: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The 2-norm of the tensors taken as one vector, and of each if asked for, with the finite check in one read.

    Args:
        tensors: of any float dtypes, layouts and devices.
        per_tensor: whether to return each one's norm too.
        found_inf: 0-dim float32 tensor, set to 1.0 if a value is inf or NaN.

    Returns:
        A 0-dim float32 tensor on the first tensor's device, and a float32 tensor of shape [len(tensors)] or None.
        Sums run in float64 across the pieces of a tensor, and on a CPU within them.
    """
    if not tensors:
        return torch.zeros(()), torch.zeros(0) if per_tensor else None
    device = tensors[0].device
    squares = torch.zeros(len(tensors), dtype=torch.float64, device=device)
    for rows, sums in run(L2NORM, {}, found_inf, source=tensors):
        squares[rows] = sums[0].to(device, non_blocking=True)
    return squares.sum().sqrt().float(), squares.sqrt().float() if per_tensor else None


def run(
    pass_: Pass,
    scalars: Scalars,
    found_inf: torch.Tensor | None,
    *,
    skip: torch.Tensor | None = None,
    **columns: Sequence[torch.Tensor],
) -> list[tuple[list[int], torch.Tensor]]:
    """Run a pass group by group of device and dtype; returns the positions and the sums of each.

    Args:
        pass_: what to run.
        scalars: its numbers.
        found_inf: as in ``scale``.
        skip: 0-dim float32 tensor; nothing is written where it is not 0.
        **columns: a list of tensors for each column of the pass.
    """
    results = []
    with torch.no_grad():
        for rows in Plan(*columns.values()).rows:
            batch = Batch.of(**{name: [tensors[i] for i in rows] for name, tensors in columns.items()})
            found = None if found_inf is None else torch.zeros((), device=batch.device)
            results.append((rows, batch.run(pass_, scalars, skip=skip, found=found)))
            for name in trace(pass_).stores:  # kernels write behind autograd's back
                increment_version(batch.columns[name][1][0])
            if found is not None and found_inf is not None:
                found_inf.copy_(torch.maximum(found_inf, found.to(found_inf).reshape(found_inf.shape)))
    return results
