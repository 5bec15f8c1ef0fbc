"""Multi-tensor operations on lists of tensors that may mix devices and dtypes: copy, scale, unscale, add, norm.

If torch has one call for the operation (``torch._foreach``), it is called once per group of tensors. Other operations
are elementwise kernels, which run on the backend of their device (``launch``). A caller that runs a kernel on the same
tensors in every step keeps a ``TensorTable`` and launches on it.

``groups`` is a ``TensorGroups`` of the operation's lists, in the order of its arguments; callers with the same lists in
every step keep it. ``found_inf`` is a 0-dim float32 tensor on any device. These functions set it to 1.0 if a value is
inf or NaN, and never read it. ``copy``, ``scale_``, ``unscale_``, ``unscale_into`` and ``norm`` also take sharded
tensors (``DTensor``). They combine the results of all processes that hold a part, so they are collective operations on
sharded tensors. Autograd records neither ``copy``, ``unscale_`` nor a kernel.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..core.scalars import scalar_dtype
from ..torch_internals.torch_compat import foreach_unscale_
from .expr import ElementwiseKernel, elementwise_kernel, trace
from .launch import backend_for, launch
from .shards import FLATTENED, ORDINARY, Domain, complete_max, complete_sum, domain_of, locals_of
from .tensor_table import Number, Scalars, TensorTable

__all__ = [
    "TensorGroups",
    "axpby",
    "axpby_kernel",
    "copy",
    "group_rows",
    "l2norm",
    "norm",
    "read_gradients",
    "run",
    "scale",
    "scale_",
    "scale_kernel",
    "unscale_",
    "unscale_into",
]

Tensors = Sequence[torch.Tensor]

_LARGE = 2**16  # elements of a tensor, on average


# ---- which tensors go together


def group_rows(*columns: Sequence[torch.Tensor | None], marks: Sequence[Hashable] = ()) -> list[list[int]]:
    """Group rows whose tensors have the same device, dtype and sharding, column by column.

    Args:
        columns: lists of equal length; row i is ``(columns[0][i], columns[1][i], ...)``. None matches None.
        marks: one mark per row, or empty. A group has rows with equal marks.

    Returns:
        A list of row positions per group. Groups are in the order of their first rows.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, row in enumerate(zip(*columns, strict=True)):
        key = (
            tuple([None if t is None else (t.device, t.dtype, domain_of(t)) for t in row]),
            marks[i] if marks else None,
        )
        groups.setdefault(key, []).append(i)
    return list(groups.values())


class TensorGroups:
    """The groups of aligned lists of tensors; see ``group_rows``.

    It keeps positions, never a tensor, so that the groups of one step also fit the next step, whose gradients are new
    tensors of the same kind.

    Args:
        columns: lists of equal length.
        owners: the parameters whose gradients or masters the columns hold. FSDP1 cuts parameters into plain tensors.

    Attributes:
        domains: for each group, the processes over which its tensors are sharded.
        cut: the distinct domains that are not empty.
    """

    __slots__ = ("_rows", "cut", "domains")

    def __init__(self, *columns: Sequence[torch.Tensor], owners: Sequence[torch.Tensor] = ()) -> None:
        self._rows = group_rows(*columns)
        flat = FLATTENED if FLATTENED in map(domain_of, owners) else ()
        self.domains: list[Domain] = [domain_of(columns[0][rows[0]]) or flat for rows in self._rows]
        self.cut: list[Domain] = [domain for domain in dict.fromkeys(self.domains) if domain]

    def split(self, *columns: Sequence[torch.Tensor]) -> list[tuple[list[torch.Tensor], ...]]:
        """Split lists of the same kind as the lists given to the constructor into groups.

        Returns:
            A tuple of lists per group, in the order of ``columns``. Sharded tensors are replaced by their local parts.
        """
        if len(self._rows) != 1:
            groups = [tuple([[column[i] for i in rows] for column in columns]) for rows in self._rows]
        else:
            groups = [tuple([column if isinstance(column, list) else list(column) for column in columns])]
        plain = all(ORDINARY.issuperset(map(type, column)) for column in columns)
        return groups if plain else [tuple(map(locals_of, group)) for group in groups]


# ---- kernels


@elementwise_kernel(checks=("seen",))
def scale_kernel(source: Any, target: Any, *, factor: Any) -> dict[str, Any]:
    """Compute ``target = source * factor`` and check the source."""
    return {"target": source * factor, "seen": source}


@elementwise_kernel(checks=("x_seen", "y_seen"))
def axpby_kernel(x: Any, y: Any, target: Any, *, a: Any, b: Any) -> dict[str, Any]:
    """Compute ``target = a x + b y`` and check both sources."""
    return {"target": x * a + y * b, "x_seen": x, "y_seen": y}


@elementwise_kernel(checks=("seen",))
def accumulate_kernel(source: Any, target: Any, *, factor: Any) -> dict[str, Any]:
    """Compute ``target += source * factor`` and check the source."""
    return {"target": target + source * factor, "seen": source}


@elementwise_kernel(squares=("seen",), checks=("seen",))
def read_gradients(grad: Any) -> dict[str, Any]:
    """Compute the sum of squares of a gradient, or of another tensor, and check it for inf and NaN."""
    return {"seen": grad}


# ---- torch's own calls


@torch.no_grad()
def copy(sources: Tensors, targets: Tensors, *, groups: TensorGroups | None = None) -> None:
    """Copy each source to its target, cast to the target's dtype."""
    for src, dst in (groups or TensorGroups(sources, targets)).split(sources, targets):
        torch._foreach_copy_(dst, src)


def scale_(tensors: Tensors, factor: torch.Tensor, *, groups: TensorGroups | None = None) -> None:
    """Multiply tensors by ``factor``, a 0-dim tensor on any device, in place."""
    for (group,) in (groups or TensorGroups(tensors)).split(tensors):
        torch._foreach_mul_(group, factor.to(group[0].device, non_blocking=True))


@torch.no_grad()
def unscale_(
    tensors: Tensors, inv_scale: torch.Tensor, found_inf: torch.Tensor, *, groups: TensorGroups | None = None
) -> None:
    """Multiply tensors by ``inv_scale`` in place, in fp32 arithmetic, and check for inf and NaN in the same pass.

    The version counters of the tensors do not change, as in ``torch.amp.GradScaler``.

    Args:
        tensors: real tensors of any float dtype.
        inv_scale: 0-dim tensor on any device.
        found_inf: set to 1.0 if a value is not finite.
        groups: made for ``tensors``.
    """
    groups = groups or TensorGroups(tensors)
    for (group,) in groups.split(tensors):
        _unscale_group(group, inv_scale, found_inf)
    for domain in groups.cut:
        complete_max(found_inf, domain)


def unscale_into(
    sources: Tensors,
    targets: Tensors,
    inv_scale: torch.Tensor | None,
    found_inf: torch.Tensor,
    *,
    accumulate: bool,
    groups: TensorGroups | None = None,
) -> None:
    """Write ``target = source * inv_scale``, or ``target += ...`` with ``accumulate``, and leave the sources unchanged.

    Args:
        sources: gradients.
        targets: float32 tensors of the same shapes, or the sources themselves, to unscale them in place.
        inv_scale: 0-dim float32 tensor, or None to copy without scaling and without the overflow check.
        found_inf: set to 1.0 if a source is not finite.
        accumulate: add to the targets instead of overwriting them.
        groups: made for ``sources, targets``.
    """
    groups = groups or TensorGroups(sources, targets)
    for src, dst in groups.split(sources, targets):
        if accumulate and _worth_a_kernel(src, dst):
            factor = 1.0 if inv_scale is None else inv_scale
            found = None if inv_scale is None else found_inf
            run(accumulate_kernel, {"factor": factor}, found, source=src, target=dst)
            continue
        if accumulate and inv_scale is None:
            torch._foreach_add_(dst, src)
            continue
        fresh = [torch.empty_like(t) for t in dst] if accumulate else dst
        if fresh[0] is not src[0]:
            torch._foreach_copy_(fresh, src)
        if inv_scale is not None:
            _unscale_group(fresh, inv_scale, found_inf)
        if accumulate:
            torch._foreach_add_(dst, fresh)
    for domain in groups.cut if inv_scale is not None else ():
        complete_max(found_inf, domain)


def norm(tensors: Tensors, p: float = 2.0, *, groups: TensorGroups | None = None) -> torch.Tensor:
    """Compute the p-norm of all the tensors taken as one vector.

    Args:
        tensors: at least one; real, of any float dtype.
        p: above 0; ``float("inf")`` for the largest magnitude.
        groups: made for ``tensors``.

    Returns:
        A 0-dim tensor on the first tensor's device: float64 if a tensor is float64, else float32.
    """
    groups = groups or TensorGroups(tensors)
    device = tensors[0].device
    norms = [torch.zeros((), dtype=torch.float32, device=device)]
    for (group,), domain in zip(groups.split(tensors), groups.domains, strict=True):
        fp32_or_wider = torch.promote_types(group[0].dtype, torch.float32)
        filled = [t for t in group if t.numel()]  # an empty tensor has no largest element
        found = list(torch._foreach_norm(filled, p, dtype=fp32_or_wider)) if filled else []
        norms.extend([_complete_norm(found, p, domain, device)] if domain else found)
    dtype = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
    gathered = torch.stack([n.to(device, dtype, non_blocking=True) for n in norms])
    total: torch.Tensor = torch.linalg.vector_norm(gathered, p)
    return total


# ---- calls of kernels


def scale(sources: Tensors, targets: Tensors, factor: Number, found_inf: torch.Tensor | None = None) -> None:
    """Write ``target = source * factor`` for each pair, in fp32 arithmetic (fp64 if either tensor is fp64).

    Args:
        sources: real tensors of any float dtypes and layouts.
        targets: a target of the same shape per source; may be the sources themselves.
        factor: a number or 0-dim tensor.
        found_inf: 0-dim float32 tensor, set to 1.0 if a source holds inf or NaN.
    """
    run(scale_kernel, {"factor": factor}, found_inf, source=sources, target=targets)


def axpby(
    a: Number, xs: Tensors, b: Number, ys: Tensors, targets: Tensors, found_inf: torch.Tensor | None = None
) -> None:
    """Write ``target = a x + b y`` for each triple; see ``scale``."""
    run(axpby_kernel, {"a": a, "b": b}, found_inf, x=xs, y=ys, target=targets)


def l2norm(
    tensors: Tensors, *, per_tensor: bool = False, found_inf: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the 2-norm of the tensors taken as one vector, and check for inf and NaN in the same read.

    Args:
        tensors: tensors of any float dtypes, layouts and devices.
        per_tensor: also return the norm of each tensor.
        found_inf: 0-dim float32 tensor, set to 1.0 if a value is inf or NaN.

    Returns:
        A 0-dim float32 tensor on the first tensor's device, and a float32 tensor of shape [len(tensors)] or None.
        Sums across the chunks of a tensor are float64; on a CPU, sums in a chunk are also float64.
    """
    if not tensors:
        norms = torch.zeros(0, dtype=torch.float32, device="cpu")
        return norms.sum(), norms if per_tensor else None
    squares = run(read_gradients, {}, found_inf, grad=tensors)[0]
    return squares.sum().sqrt().float(), squares.sqrt().float() if per_tensor else None


@torch.no_grad()
def run(
    kernel: ElementwiseKernel,
    scalars: Scalars,
    found_inf: torch.Tensor | None = None,
    *,
    skip: torch.Tensor | None = None,
    **columns: Tensors,
) -> torch.Tensor:
    """Run a kernel group by group on lists of tensors.

    Args:
        kernel: the kernel to run.
        scalars: the scalar arguments of the kernel: floats, 0-dim tensors, or tensors of shape [rows].
        found_inf: float32 tensor of one element, set to 1.0 if a checked value is inf or NaN.
        skip: 0-dim float32 tensor; if it is not 0, the kernel writes nothing.
        **columns: a list of tensors per column of the kernel; all lists have one element per row.

    Returns:
        The sums of squares that the kernel names (see ``Launcher``), on the first tensor's device and in the
        ``scalar_dtype`` of this device.
    """
    first, *_ = columns.values()
    device = first[0].device if first else torch.device("cpu")
    dtype = scalar_dtype(device)
    results = torch.zeros(len(kernel.squares), len(first), dtype=dtype, device=device)
    for rows in group_rows(*columns.values()):
        table = TensorTable.of(**{name: [tensors[i] for i in rows] for name, tensors in columns.items()})
        found = None if found_inf is None else torch.zeros((), dtype=torch.float32, device=table.device)
        numbers = {name: _rows_of(value, rows, len(first)) for name, value in scalars.items()}
        here = launch(table, kernel, numbers, skip=skip, found=found)
        if kernel.squares:
            results[:, rows] = here.to(results.device, non_blocking=True)
        for name in trace(kernel).stores:  # kernels write behind autograd's back
            increment_version(table.columns[name][1][0])
        if found is not None and found_inf is not None:
            found_inf.copy_(torch.maximum(found_inf, found.to(found_inf).reshape(found_inf.shape)))
    return results


# ---- inside


def _rows_of(value: Number, rows: list[int], count: int) -> Number:
    """Return the scalars of some rows from a tensor of shape [count]; a scalar for all rows is returned unchanged."""
    return value.expand(count)[rows] if isinstance(value, torch.Tensor) and value.dim() else value


def _worth_a_kernel(src: Tensors, dst: Tensors) -> bool:
    """True for large tensors on a CPU, where one pass that adds 16-bit values in fp32 beats torch's two to four."""
    elements = sum(t.numel() for t in src)
    return elements > _LARGE * len(src) and dst[0].device.type == "cpu" and backend_for("cpu") == "compiled"


def _unscale_group(group: list[torch.Tensor], inv_scale: torch.Tensor, found_inf: torch.Tensor) -> None:
    device = group[0].device
    if inv_scale.device != device or inv_scale.dtype is not torch.float32:
        inv_scale = inv_scale.to(device, torch.float32, non_blocking=True)
    if found_inf.device == device:
        foreach_unscale_(group, found_inf, inv_scale)
        return
    local = torch.zeros((), dtype=torch.float32, device=device)
    foreach_unscale_(group, local, inv_scale)
    found_inf.copy_(torch.maximum(found_inf, local.to(found_inf.device, non_blocking=True)))


def _complete_norm(norms: list[torch.Tensor], p: float, domain: Domain, device: torch.device) -> torch.Tensor:
    """Compute the norm of whole tensors from the norms of their local parts."""
    zero = torch.zeros((), dtype=scalar_dtype(device), device=device)
    here = torch.linalg.vector_norm(torch.stack([zero, *(n.to(zero.dtype) for n in norms)]), p)
    return complete_max(here, domain) if p == float("inf") else complete_sum(here**p, domain) ** (1.0 / p)
