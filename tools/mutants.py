"""The mutants of a source file: each is one small change that a test should notice.

Comparisons and their boundaries, ``and`` and ``or``, arithmetic, constants, negated conditions, ``return None``, and
what is left out: a statement, a keyword argument, a call around or behind a value. Messages, annotations, decorators,
imports and assertions are left alone.
"""

from __future__ import annotations

import ast
import builtins
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Mutant", "mutants_of"]

COMPARED = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
BOUNDARIES = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: r"is\s+not", ast.In: "in", ast.NotIn: r"not\s+in", ast.And: "and", ast.Or: "or", ast.Add: r"\+",
    ast.Sub: "-", ast.Mult: r"\*", ast.Div: "/", ast.FloorDiv: "//", ast.Pow: r"\*\*", ast.Mod: "%",
}  # fmt: skip
SWAPPED = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Pow: "*", ast.Mod: "*",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
UNSEEN = {"strict", "non_blocking", "stacklevel"}  # arguments that change no result
PLAIN_METHODS = {"items", "keys", "values", "get", "pop"}  # without the call there is nothing but a TypeError


@dataclass(frozen=True)
class Mutant:
    """Bytes ``start`` to ``end`` of a file become ``text``; any of ``lines`` executed means that it is reached."""

    path: str
    start: int
    end: int
    text: bytes
    lines: range
    source: bytes = field(repr=False)

    @property
    def mutated(self) -> bytes:
        return self.source[: self.start] + self.text + self.source[self.end :]

    @property
    def line(self) -> int:
        return self.source.count(b"\n", 0, self.start) + 1

    @property
    def key(self) -> tuple[str, str, str]:
        """Name of the file, and the lines before and after: what stays when files move and grow."""
        first = self.source.rfind(b"\n", 0, self.start) + 1
        last = self.source.find(b"\n", self.end)
        after = self.source[first : self.start] + self.text + self.source[self.end : last]
        before, after_ = (" ".join(text.decode().split()) for text in (self.source[first:last], after))
        return Path(self.path).name, before, after_

    def __str__(self) -> str:
        _, before, after = self.key
        return f"{self.path}:{self.line}  {before}  ->  {after}"


class Mutator(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source, self.mutants = path, source, list[Mutant]()
        self._starts = [0, *(m.end() for m in re.finditer(rb"\n", source))]
        self._lines = range(0)
        self._bound: set[str] | None = None  # names that the function has bound so far; None outside of functions
        self._imported: set[str] = {"self", "cls", "super"}
        self.visit(ast.parse(source))

    def _span(self, node: Any) -> tuple[int, int]:
        start, end = self._starts[node.lineno - 1], self._starts[node.end_lineno - 1]
        return start + node.col_offset, end + node.end_col_offset

    def _text(self, node: ast.AST) -> bytes:
        start, end = self._span(node)
        return self.source[start:end]

    def _add(self, start: int, end: int, text: bytes | str) -> None:
        text = text.encode() if isinstance(text, str) else text
        self.mutants.append(Mutant(self.path, start, end, text, self._lines, self.source))

    def _replace(self, node: ast.AST, text: bytes | str) -> None:
        self._add(*self._span(node), text)

    def _operator(self, left: ast.AST, operator: ast.AST, right: ast.AST, text: str) -> None:
        start, end = self._span(left)[1], self._span(right)[0]
        if found := re.search(SIGNS[type(operator)].encode(), self.source[start:end]):
            self._add(start + found.start(), start + found.end(), text)

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body and body[0].lineno > node.lineno else node.end_lineno
            self._lines = range(node.lineno, (last or node.lineno) + 1)
        lines = self._lines
        super().visit(node)
        self._lines = lines

    def generic_visit(self, node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child)

    def _skip(self, node: ast.AST) -> None:
        pass

    visit_Raise = visit_Assert = visit_JoinedStr = visit_TypeAlias = _skip

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self._imported |= {name.asname or name.name.partition(".")[0] for name in node.names}

    visit_ImportFrom = visit_Import

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._bound = self._bound, {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
        self.generic_visit(node)
        self._bound = outer

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return
        if self._bound is not None and node.value is not None:
            names = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            stored = not any(isinstance(target, (ast.Name, ast.Tuple)) for target in targets)
            if stored or names <= self._bound:  # without a first binding there is nothing but a NameError
                self._replace(node, "pass")
            self._bound |= names
        self.generic_visit(node)

    visit_AnnAssign = visit_Assign

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass")
        if type(node.op) in SWAPPED:
            self._operator(node.target, node.op, node.value, SWAPPED[type(node.op)])
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._replace(node, "pass")
            self._call(node.value)
        else:
            self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._replace(node.value, "None")
            self.generic_visit(node)

    def _condition(self, test: ast.expr) -> None:
        direct = isinstance(test, ast.Compare) and len(test.ops) == 1 and not isinstance(test.ops[0], BOUNDARIES)
        if not direct and not isinstance(test, (ast.UnaryOp, ast.Constant)):
            self._replace(test, b"not (" + self._text(test) + b")")

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self._condition(node.test)
            self.generic_visit(node)

    visit_While = visit_IfExp = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self._operator(left, operator, right, COMPARED[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._operator(left, node.op, right, SWAPPED[type(node.op)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in SWAPPED:
            self._operator(node.left, node.op, node.right, SWAPPED[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub)):
            self._replace(node, self._text(node.operand))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self._replace(node, str(node.value + 1))
            self._replace(node, f"({node.value - 1})")

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name is not None and name.endswith("Error"):
            return
        if name in NAMES:
            self._replace(node.func, NAMES[name])
        elif name is not None and len(node.args) == 1 and not node.keywords and not hasattr(builtins, name):
            if not isinstance(node.args[0], ast.Starred):
                self._replace(node, self._text(node.args[0]))
        elif isinstance(node.func, ast.Attribute) and node.func.attr not in PLAIN_METHODS:
            root = node.func.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if not (isinstance(root, ast.Constant) or (isinstance(root, ast.Name) and root.id in self._imported)):
                self._replace(node, self._text(node.func.value))
        self._call(node)

    def _call(self, node: ast.Call) -> None:
        if ast.unparse(node.func).startswith(("logger.", "warnings.")):
            return
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in UNSEEN]
        for keyword in node.keywords:
            if keyword.arg is not None:
                start, end = self._span(keyword)
                if follows := re.compile(rb"\s*,\s*").match(self.source, end):
                    end = follows.end()
                elif before := re.search(rb",\s*\Z", self.source[:start]):
                    start = before.start()
                self._add(start, end, b"")
        self.generic_visit(node)


def mutants_of(path: str) -> list[Mutant]:
    """All mutants of a file, in the order of its lines."""
    return Mutator(path, Path(path).read_bytes()).mutants
