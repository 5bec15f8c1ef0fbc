"""A syntax tree that knows what is around a node, and changes to the text of its statements."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .splice import Text

__all__ = ["BLOCKS", "CROWDED", "Function", "Statements", "Tree"]

Function = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
CROWDED = "several statements in a line"
"""The problem of a statement that shares its line."""
BLOCKS = ("body", "orelse", "finalbody")


class Tree:
    """The surroundings of each node.

    Args:
        tree: the syntax tree of a file.

    Attributes:
        owners: the node around each node, by the id of that.
        places: the block that each statement is in and its place there, by the id of the statement.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.owners = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.places: dict[int, tuple[list[ast.stmt], int]] = {}
        for node in ast.walk(tree):
            for block in (getattr(node, name, None) for name in BLOCKS):
                if isinstance(block, list):
                    self.places |= {id(each): (block, i) for i, each in enumerate(block)}

    def around(self, node: ast.AST) -> Iterator[ast.stmt]:
        """The statements around a statement, from the inside, up to a function."""
        while not isinstance(node := self.owners[id(node)], (*Function, ast.ClassDef, ast.Module)):
            if isinstance(node, ast.stmt):
                yield node

    def conditions(self, node: ast.AST) -> list[ast.If]:
        """The ``if`` statements around a statement, from the inside, up to a function."""
        return [each for each in self.around(node) if isinstance(each, ast.If)]

    def path(self, node: ast.stmt) -> Iterator[tuple[list[ast.stmt], int, bool]]:
        """The blocks around a statement, its place there, and whether it is in a loop there, from the inside."""
        looped = False
        for each in (node, *self.around(node)):
            looped |= isinstance(each, (ast.For, ast.AsyncFor, ast.While))
            yield *self.places[id(each)], looped

    def branch(self, condition: ast.If, node: ast.AST) -> bool:
        """Whether a node is in the part of an ``if`` statement that runs where its condition is true."""
        while self.owners[id(node)] is not condition:
            node = self.owners[id(node)]
        return any(each is node for each in condition.body)

    def exclusive(self, one: ast.stmt, other: ast.stmt) -> bool:
        """Whether only one of two statements runs, because they are in two branches of an ``if``."""
        both = {id(each): each for each in self.conditions(other)}
        return any(
            self.branch(each, one) != self.branch(each, other) for each in self.conditions(one) if id(each) in both
        )

    def function(self, node: ast.AST) -> ast.AST:
        """The innermost function around a node, or the file."""
        while not isinstance(node, (*Function, ast.Module)):
            node = self.owners[id(node)]
        return node

    def statement(self, node: ast.AST) -> ast.stmt:
        """The statement that a node is in."""
        while not isinstance(node, ast.stmt):
            node = self.owners[id(node)]
        return node


class Statements(Text):
    """A text with changes to whole statements.

    Attributes:
        crowded: statements that were to be changed and share their lines with others.
    """

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.crowded: list[ast.stmt] = []
        self._break = "\r\n" if "\r\n" in source else "\n"

    def margin(self, node: ast.stmt) -> str:
        """The space before a statement that has its lines for itself."""
        start, end = self.start(node), self.end(node)
        margin = self.bytes[self.line_start(start) : start].decode()
        rest = self.bytes[end : self.line_end(end)].strip()
        if margin.strip() or (rest and not rest.startswith(b"#")):
            self.crowded.append(node)
        return margin

    def put(self, node: ast.expr | ast.stmt, new: str) -> None:
        """Replace the text of a node."""
        self.change(self.start(node), self.end(node), new)

    def lines(self, node: ast.stmt, lines: list[str]) -> None:
        """Replace a statement by others."""
        margin = self.margin(node)
        if lines:
            self.put(node, f"{self._break}{margin}".join(lines))
        else:
            after = self.bytes.find(b"\n", self.end(node))
            self.change(self.line_start(self.start(node)), len(self.bytes) if after < 0 else after + 1, "")

    def before(self, node: ast.stmt, line: str) -> None:
        """Add a statement before one."""
        start = self.line_start(self.start(node))
        self.change(start, start, f"{self.margin(node)}{line}{self._break}")

    def after(self, node: ast.stmt, line: str) -> None:
        """Add a statement after one."""
        end = self.line_end(self.end(node))
        self.change(end, end, f"{self._break}{self.margin(node)}{line}")

    def around(self, first: ast.stmt, last: ast.stmt, header: str, inside_strings: set[int]) -> None:
        """Put a block around statements; lines that begin inside of a string stay where they are."""
        start, end, line = self.line_start(self.start(first)), self.end(last), first.lineno
        margin = self.margin(first)
        self.change(start, start, f"{margin}{header}{self._break}")
        while start < end:
            if line not in inside_strings and self.bytes[start : self.line_end(start)].strip():
                self.change(start, start, "\t" if margin.endswith("\t") else "    ")
            start, line = self.bytes.find(b"\n", start) + 1 or end, line + 1
