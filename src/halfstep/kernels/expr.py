"""The language of updates: a plain Python function of tensors and numbers, traced once.

An update uses ``+ - * /`` and the tensor methods ``sqrt`` and ``maximum``. So the same function runs on lists of
tensors (``backends.foreach``) and on the symbols of this module, whose trace the ``compiled`` and ``triton`` backends
print as source code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "ByTorch",
    "Columns",
    "ElementwiseKernel",
    "Expression",
    "Node",
    "Symbol",
    "TorchUpdate",
    "Trace",
    "elementwise_kernel",
    "trace",
]

Function = Callable[..., Mapping[str, Any]]

Columns = Mapping[str, list[torch.Tensor]]

TorchUpdate = Callable[[Columns, list[int]], None]
"""A function that updates lists of tensors in place: takes the columns, and the row of each list position."""

ByTorch = Callable[[Mapping[str, float | torch.Tensor]], TorchUpdate | None]
"""A function that makes an update from the numbers of a step; None if torch has no call for these numbers."""


@dataclass(frozen=True)
class ElementwiseKernel:
    """One elementwise computation over the rows of a table of tensors.

    Attributes:
        name: the name in messages and file names.
        fn: ``fn(column, ..., *, scalar, ...) -> {output: value}``. Positional parameters are columns of tensors,
            keyword-only ones are numbers, one for each row. An output named as a column is stored there, after the
            whole row was read, unless ``squares`` or ``checks`` names it.
        squares: outputs that are not stored; the sum of their squares over each row is returned.
        checks: outputs that are checked for inf and NaN.
        by_torch: the same update as a fused torch call, for the ``torch`` backend; None if there is none. Columns that
            the kernel does not store are copies, which the call may overwrite. The column ``grad`` is already
            multiplied by the number ``factor``.
    """

    name: str
    fn: Function
    squares: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    by_torch: ByTorch | None = None


def elementwise_kernel(
    *,
    squares: tuple[str, ...] = (),
    checks: tuple[str, ...] = (),
    by_torch: ByTorch | None = None,
) -> Callable[[Function], ElementwiseKernel]:
    """Make a function an ``ElementwiseKernel`` with the function's name (a decorator)."""
    return lambda fn: ElementwiseKernel(fn.__name__, fn, squares, checks, by_torch)


@dataclass(frozen=True)
class Node:
    """One operation: its name and the positions of its operands, or the name or number that it loads."""

    op: str
    args: tuple[int | float | str, ...]


@dataclass(frozen=True)
class Trace:
    """The operations of a kernel, one after another, each value computed once.

    Attributes:
        columns: names of the tensors of a row.
        scalars: names of the numbers of a row.
        nodes: the operations in an order in which they can run.
        loads: the columns that are read.
        stores: column -> position of the value written to it.
        squares: positions of the values whose squares are summed.
        checks: positions of the values that must be finite.
    """

    columns: tuple[str, ...]
    scalars: tuple[str, ...]
    nodes: tuple[Node, ...]
    loads: tuple[str, ...]
    stores: Mapping[str, int]
    squares: tuple[int, ...]
    checks: tuple[int, ...]


class Expression:
    """A value in an update, with the operators and methods that an update may use."""

    __slots__ = ()

    _apply: Callable[..., Any]
    """Computes an operation, by the name that it has in a ``Node``, of this value and others."""

    def __add__(self, other: Any) -> Any:
        return self._apply("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._apply("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return self._apply("sub", self, other)

    def __mul__(self, other: Any) -> Any:
        return self._apply("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._apply("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._apply("div", self, other)

    def sqrt(self) -> Any:
        """Compute the correctly rounded square root."""
        return self._apply("sqrt", self)

    def maximum(self, other: Any) -> Any:
        """Compute the larger of two values; NaN if either is NaN."""
        return self._apply("maximum", self, other)


class Symbol(Expression):
    """A symbolic value; operators on it are recorded in its trace."""

    __slots__ = ("_nodes", "index")

    def __init__(self, nodes: dict[Node, int], node: Node) -> None:
        self._nodes = nodes
        self.index = nodes.setdefault(node, len(nodes))

    def _apply(self, op: str, *operands: Symbol | float) -> Symbol:
        symbols = [x if isinstance(x, Symbol) else Symbol(self._nodes, Node("const", (float(x),))) for x in operands]
        return Symbol(self._nodes, Node(op, tuple([symbol.index for symbol in symbols])))


@functools.cache
def trace(kernel: ElementwiseKernel) -> Trace:
    """Run the function of a kernel on symbols and record its operations."""
    parameters = inspect.signature(kernel.fn).parameters.values()
    columns = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
    scalars = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    nodes: dict[Node, int] = {}
    loads = {name: Symbol(nodes, Node("load", (name,))) for name in columns}
    numbers = {name: Symbol(nodes, Node("scalar", (name,))) for name in scalars}
    outputs = kernel.fn(*loads.values(), **numbers)
    special = {*kernel.squares, *kernel.checks}
    stores = {name: value.index for name, value in outputs.items() if name not in special}
    ordered = tuple(nodes)
    used = {*stores.values(), *(outputs[name].index for name in special)}
    used.update(int(arg) for node in ordered if node.op not in ("load", "scalar", "const") for arg in node.args)
    return Trace(
        columns,
        scalars,
        ordered,
        tuple(name for name in columns if loads[name].index in used),
        stores,
        tuple(outputs[name].index for name in kernel.squares),
        tuple(outputs[name].index for name in kernel.checks),
    )
