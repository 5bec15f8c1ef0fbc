"""Multi-tensor operations on lists of tensors that may mix devices and dtypes: copy, scale, unscale, add, norm.

Where torch has one call for the operation (``torch._foreach``), that call is made, once for each group of tensors.
Other operations are elementwise kernels, which run on the backend of their device (``launch``). Whoever runs a kernel
on the same tensors step after step keeps a ``TensorTable`` and launches on it.

``groups`` is what ``TensorGroups`` makes of an operation's lists, in the order of its arguments; callers that have
the same lists in every step keep it. ``found_inf`` is a 0-dim float32 tensor on any device that is set to 1.0 where a
value is inf or NaN, and is never read here. ``copy``, ``scale_``, ``unscale_``, ``unscale_into`` and ``norm`` take
sharded tensors (``DTensor``), too. What is found of them is what all their processes find, so these calls are
collective operations there. Autograd records neither ``copy``, ``unscale_`` nor a kernel.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..core.scalars import scalar_dtype
from ..core.torch_compat import foreach_unscale_
from .expr import ElementwiseKernel, elementwise_kernel, trace
from .launch import backend_for, launch
from .shards import FLATTENED, ORDINARY, Domain, complete_max, complete_sum, domain_of, locals_of
from .tensor_table import Number, Scalars, TensorTable

__all__ = [
    "TensorGroups",
    "TensorGroupsCache",
    "axpby",
    "axpby_kernel",
    "copy",
    "group_rows",
    "l2norm",
    "norm",
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
    """The positions of rows whose tensors have the same device, dtype and sharding, column by column.

    Args:
        columns: lists of equal length; row i is ``(columns[0][i], columns[1][i], ...)``. None goes with None.
        marks: one for each row, if there are any; rows with the same go together.

    Returns:
        A list of positions for each group. Groups come in the order of their first rows.
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

    Only positions are kept, never a tensor. So the groups of one step serve the next, whose gradients are new tensors
    of the same kind.

    Args:
        columns: lists of equal length.
        owners: the parameters whose gradients or masters these are. FSDP1 cuts them into plain tensors.

    Attributes:
        domains: for each group, the processes over which its tensors are sharded.
        cut: those among them that are not empty, each once.
    """

    __slots__ = ("_rows", "cut", "domains")

    def __init__(self, *columns: Sequence[torch.Tensor], owners: Sequence[torch.Tensor] = ()) -> None:
        self._rows = group_rows(*columns)
        flat = FLATTENED if FLATTENED in map(domain_of, owners) else ()
        self.domains: list[Domain] = [domain_of(columns[0][rows[0]]) or flat for rows in self._rows]
        self.cut: list[Domain] = [domain for domain in dict.fromkeys(self.domains) if domain]

    def split(self, *columns: Sequence[torch.Tensor]) -> list[tuple[list[torch.Tensor], ...]]:
        """The groups of these lists, which must be of the kind that the groups were made for.

        Returns:
            One tuple of lists for each group, the lists in the order of ``columns``. Of sharded tensors they hold the
            local parts.
        """
        if len(self._rows) != 1:
            groups = [tuple([[column[i] for i in rows] for column in columns]) for rows in self._rows]
        else:
            groups = [tuple([column if isinstance(column, list) else list(column) for column in columns])]
        plain = all(ORDINARY.issuperset(map(type, column)) for column in columns)
        return groups if plain else [tuple(map(locals_of, group)) for group in groups]


class TensorGroupsCache:
    """The groups of long-lived tensors (parameters, masters), found by the identity of these.

    An entry keeps its tensors alive, so that their identities cannot become those of later tensors. The cache holds one
    entry for each ``slot``. It is made anew when other tensors take part: a parameter had no gradient this time, or a
    parameter group was added.
    """

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[tuple[int, ...], TensorGroups, Sequence[torch.Tensor]]] = {}

    def get(self, slot: Hashable, owners: Sequence[torch.Tensor], *columns: Sequence[torch.Tensor]) -> TensorGroups:
        """The groups of ``columns``, whose rows belong to ``owners``."""
        key = tuple(map(id, owners))
        entry = self._entries.get(slot)
        if entry is None or entry[0] != key:
            entry = self._entries[slot] = (key, TensorGroups(*columns, owners=owners), owners)
        return entry[1]


# ---- kernels


@elementwise_kernel(checks=("seen",))
def scale_kernel(source: Any, target: Any, *, factor: Any) -> dict[str, Any]:
    """``target = source * factor``, with a check of the source."""
    return {"target": source * factor, "seen": source}


@elementwise_kernel(checks=("x_seen", "y_seen"))
def axpby_kernel(x: Any, y: Any, target: Any, *, a: Any, b: Any) -> dict[str, Any]:
    """``target = a x + b y``, with a check of both."""
    return {"target": x * a + y * b, "x_seen": x, "y_seen": y}


@elementwise_kernel(checks=("seen",))
def accumulate_kernel(source: Any, target: Any, *, factor: Any) -> dict[str, Any]:
    """``target += source * factor``, with a check of the source."""
    return {"target": target + source * factor, "seen": source}


@elementwise_kernel(squares=("seen",), checks=("seen",))
def l2norm_kernel(source: Any) -> dict[str, Any]:
    """The sum of squares, with a check."""
    return {"seen": source}


# ---- torch's own calls


@torch.no_grad()
def copy(sources: Tensors, targets: Tensors, *, groups: TensorGroups | None = None) -> None:
    """``target = source`` for each pair, cast to the target's dtype."""
    for src, dst in (groups or TensorGroups(sources, targets)).split(sources, targets):
        torch._foreach_copy_(dst, src)


def scale_(tensors: Tensors, factor: torch.Tensor, *, groups: TensorGroups | None = None) -> None:
    """``tensor *= factor`` in place; ``factor`` is a 0-dim tensor on any device."""
    for (group,) in (groups or TensorGroups(tensors)).split(tensors):
        torch._foreach_mul_(group, factor.to(group[0].device, non_blocking=True))


@torch.no_grad()
def unscale_(
    tensors: Tensors, inv_scale: torch.Tensor, found_inf: torch.Tensor, *, groups: TensorGroups | None = None
) -> None:
    """``tensor *= inv_scale`` in place, in fp32 arithmetic, looking for inf and NaN in the same pass.

    The versions of the tensors stay as they are, as in ``torch.amp.GradScaler``.

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
    """``target = source * inv_scale``, or ``target += ...`` with ``accumulate``; the sources stay as they are.

    Args:
        sources: gradients.
        targets: float32 tensors of the same shapes, or the sources themselves, which are unscaled in place then.
        inv_scale: 0-dim float32 tensor, or None to copy without scaling and without looking for overflow.
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
    """The p-norm of all the tensors taken as one vector.

    Args:
        tensors: at least one; real, of any float dtype.
        p: above 0; ``float("inf")`` for the largest magnitude.
        groups: made for ``tensors``.

    Returns:
        A 0-dim tensor on the first tensor's device, float32, or float64 if one of them is.
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
    """``target = source * factor`` for each pair, in fp32 arithmetic (fp64 where a side is fp64).

    Args:
        sources: real tensors of any float dtypes and layouts.
        targets: as many, of the same shapes; may be the sources themselves.
        factor: a number or 0-dim tensor.
        found_inf: 0-dim float32 tensor, set to 1.0 if a source holds inf or NaN.
    """
    run(scale_kernel, {"factor": factor}, found_inf, source=sources, target=targets)


def axpby(
    a: Number, xs: Tensors, b: Number, ys: Tensors, targets: Tensors, found_inf: torch.Tensor | None = None
) -> None:
    """``target = a x + b y`` for each triple; see ``scale``."""
    run(axpby_kernel, {"a": a, "b": b}, found_inf, x=xs, y=ys, target=targets)


def l2norm(
    tensors: Tensors, *, per_tensor: bool = False, found_inf: torch.Tensor | None = None
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
        norms = torch.zeros(0, dtype=torch.float32, device="cpu")
        return norms.sum(), norms if per_tensor else None
    squares = run(l2norm_kernel, {}, found_inf, source=tensors)[0]
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
        kernel: what to run.
        scalars: its numbers: floats, 0-dim tensors, or tensors of shape [rows].
        found_inf: float32 tensor of one element, set to 1.0 if a checked value is inf or NaN.
        skip: 0-dim float32 tensor; nothing is written where it is not 0.
        **columns: a list of tensors for each column of the kernel, of one length: the rows.

    Returns:
        What the kernel finds, as ``Launcher`` says: of shape [kernel.results, rows], on the first one's device and in
        the ``scalar_dtype`` of that.
    """
    first, *_ = columns.values()
    device = first[0].device if first else torch.device("cpu")
    dtype = scalar_dtype(device)
    results = torch.zeros(kernel.results, len(first), dtype=dtype, device=device)
    for rows in group_rows(*columns.values()):
        table = TensorTable.of(**{name: [tensors[i] for i in rows] for name, tensors in columns.items()})
        found = None if found_inf is None else torch.zeros((), dtype=torch.float32, device=table.device)
        numbers = {name: _rows_of(value, rows, len(first)) for name, value in scalars.items()}
        here = launch(table, kernel, numbers, skip=skip, found=found)
        if kernel.results:
            results[:, rows] = here.to(results.device, non_blocking=True)
        for name in trace(kernel).stores:  # kernels write behind autograd's back
            increment_version(table.columns[name][1][0])
        if found is not None and found_inf is not None:
            found_inf.copy_(torch.maximum(found_inf, found.to(found_inf).reshape(found_inf.shape)))
    return results


# ---- inside


def _rows_of(value: Number, rows: list[int], count: int) -> Number:
    """A number for all rows as it is; of a tensor of shape [count] the numbers of some rows."""
    return value.expand(count)[rows] if isinstance(value, torch.Tensor) and value.dim() else value


def _worth_a_kernel(src: Tensors, dst: Tensors) -> bool:
    """Whether one pass that reads 16 bits and adds in fp32 beats torch's two to four: for large tensors on a CPU."""
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
    """The norm of whole tensors, from the norms of their local parts."""
    zero = torch.zeros((), dtype=scalar_dtype(device), device=device)
    here = torch.linalg.vector_norm(torch.stack([zero, *(n.to(zero.dtype) for n in norms)]), p)
    if p == float("inf"):
        return complete_max(here, domain)
    return complete_sum(here**p, domain) ** (1.0 / p)
