"""The language updates are written in: a plain Python function of tensors and scalars, traced once per pass.

An update is written with ``+ - * /`` and the tensor methods ``sqrt``, ``abs``, ``maximum`` and ``minimum``, so the same
function runs on tensors, on lists of tensors (``foreach``), and on the symbols of this module, whose trace the
``compiled`` and ``triton`` backends print as source code.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Node", "Pass", "Program", "Symbol", "trace"]


@dataclass(frozen=True)
class Pass:
    """One elementwise pass over rows of tensors.

    Attributes:
        name: for messages and file names.
        fn: ``fn(column, ..., *, scalar, ...) -> {output: value}``. Positional parameters are columns of tensors,
            keyword-only ones are numbers, one for each row. An output named as a column is stored there, after the
            whole row was read, unless ``squares`` or ``checks`` names it.
        squares: outputs of which the sum of squares over each row is returned instead.
        checks: outputs that are looked through for inf and NaN.
    """

    name: str
    fn: Callable[..., Mapping[str, Any]]
    squares: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns it reads or writes, in the order of the function's parameters."""
        return trace(self).columns

    @property
    def scalars(self) -> tuple[str, ...]:
        """The numbers it needs for each row."""
        return trace(self).scalars


@dataclass(frozen=True)
class Node:
    """One operation: its name and the positions of its operands, or the name or number it stands for."""

    op: str
    args: tuple[int | float | str, ...]


@dataclass(frozen=True)
class Program:
    """What a pass does, operation by operation, each value computed once.

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


class Symbol:
    """A value that is not known yet; operators on it are written down in its trace."""

    __slots__ = ("_nodes", "index")

    def __init__(self, nodes: dict[Node, int], node: Node) -> None:
        self._nodes = nodes
        self.index = nodes.setdefault(node, len(nodes))

    def _apply(self, op: str, *operands: Symbol | float) -> Symbol:
        indices = []
        for x in operands:
            symbol = x if isinstance(x, Symbol) else Symbol(self._nodes, Node("const", (float(x),)))
            indices.append(symbol.index)
        return Symbol(self._nodes, Node(op, tuple(indices)))

    def __add__(self, other: Symbol | float) -> Symbol:
        return self._apply("add", self, other)

    def __radd__(self, other: float) -> Symbol:
        return self._apply("add", other, self)

    def __sub__(self, other: Symbol | float) -> Symbol:
        return self._apply("sub", self, other)

    def __mul__(self, other: Symbol | float) -> Symbol:
        return self._apply("mul", self, other)

    def __rmul__(self, other: float) -> Symbol:
        return self._apply("mul", other, self)

    def __truediv__(self, other: Symbol | float) -> Symbol:
        return self._apply("div", self, other)

    def __neg__(self) -> Symbol:
        return self._apply("neg", self)

    def sqrt(self) -> Symbol:
        """The correctly rounded square root."""
        return self._apply("sqrt", self)

    def abs(self) -> Symbol:
        """The magnitude."""
        return self._apply("abs", self)

    def maximum(self, other: Symbol) -> Symbol:
        """The larger of two values; NaN if either is."""
        return self._apply("maximum", self, other)

    def minimum(self, other: Symbol) -> Symbol:
        """The smaller of two values; NaN if either is."""
        return self._apply("minimum", self, other)


@functools.cache
def trace(pass_: Pass) -> Program:
    """Run the function of a pass on symbols and write down what it does."""
    parameters = inspect.signature(pass_.fn).parameters.values()
    columns = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
    scalars = tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    nodes: dict[Node, int] = {}
    loads = {name: Symbol(nodes, Node("load", (name,))) for name in columns}
    numbers = {name: Symbol(nodes, Node("scalar", (name,))) for name in scalars}
    outputs = pass_.fn(*loads.values(), **numbers)
    special = {*pass_.squares, *pass_.checks}
    stores = {name: value.index for name, value in outputs.items() if name not in special}
    ordered = tuple(nodes)
    used = {*stores.values(), *(outputs[name].index for name in special)}
    used.update(int(arg) for node in ordered if node.op not in ("load", "scalar", "const") for arg in node.args)
    return Program(
        columns,
        scalars,
        ordered,
        tuple(name for name in columns if loads[name].index in used),
        stores,
        tuple(outputs[name].index for name in pass_.squares),
        tuple(outputs[name].index for name in pass_.checks),
    )
