"""The uses of a package in a file: its imports, and the expressions with names that the imports bind.

It uses ``ast``, because parsing to a syntax tree with comments takes a hundred times as long.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

__all__ = ["Names", "Use", "dotted_text", "loose_names", "names_of"]

_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_Comprehension = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass
class Use:
    """An expression that refers to the package.

    Attributes:
        name: the full name, such as "apex.amp.initialize".
        text: the expression as written, such as "amp.initialize".
        node: the expression.
    """

    name: str
    text: str
    node: ast.Name | ast.Attribute


@dataclass
class Names:
    """The uses of a package in a file.

    Attributes:
        imports: the statements that import from the package.
        uses: the expressions, in the order of the text.
        rebound: the places that rebind a name imported from the package.
    """

    imports: list[ast.Import | ast.ImportFrom] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    rebound: list[ast.Name] = field(default_factory=list)


def names_of(tree: ast.Module, packages: Sequence[str]) -> Names:
    """Find the uses of packages in a file."""
    reader = _Reader(packages)
    reader.read(tree)
    return reader.found


def dotted_text(node: ast.expr) -> str | None:
    """Return ``a.b.c`` as a string; None for any other expression."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def loose_names(tree: ast.Module, names: Names, roots: set[str]) -> list[tuple[int, str]]:
    """Return the lines that read a name in ``roots`` without an import of the package, with the names."""
    bound = {id(_root(use.node)) for use in names.uses}
    return [
        (node.lineno, node.id)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id in roots and isinstance(node.ctx, ast.Load) and id(node) not in bound
    ]


def _root(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


class _Reader(ast.NodeVisitor):
    def __init__(self, packages: Sequence[str]) -> None:
        self.found = Names()
        self._packages = packages
        self._scopes: list[dict[str, str | None]] = []  # name -> full name; None for a name outside the package

    def read(self, tree: ast.Module) -> None:
        self._scopes.append({**self._bound(tree.body), **self._globals(tree)})
        self.generic_visit(tree)

    def _globals(self, tree: ast.Module) -> dict[str, str | None]:
        """Return the names that functions import into the module by ``global``."""
        functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
        found: dict[str, str | None] = {}
        for function in functions:
            names = {
                name for node in _of_one_scope(function.body) if isinstance(node, ast.Global) for name in node.names
            }
            if names:
                found |= {name: meant for name, meant in self._bound(function.body).items() if meant and name in names}
        return found

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside = [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        for part in [*outside, *filter(None, [node.returns])]:
            self.visit(part)
        args = node.args
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, [args.vararg, args.kwarg])]
        for arg in every:
            if arg.annotation is not None:
                self.visit(arg.annotation)
        self._scopes.append({**dict.fromkeys((arg.arg for arg in every), None), **self._bound(node.body)})
        for statement in node.body:
            self.visit(statement)
        self._scopes.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = _function  # noqa: N815

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._scopes.append(dict.fromkeys((arg.arg for arg in node.args.args), None))
        self.visit(node.body)
        self._scopes.pop()

    def visit_Import(self, node: ast.Import) -> None:
        if any(self._ours(alias.name) for alias in node.names):
            self.found.imports.append(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module is not None and self._ours(node.module):
            self.found.imports.append(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        text = dotted_text(node)
        if text is None:
            self.generic_visit(node)
        else:
            self._note(node, text)

    def visit_Name(self, node: ast.Name) -> None:
        self._note(node, node.id)

    def _note(self, node: ast.Name | ast.Attribute, text: str) -> None:
        root, dot, rest = text.partition(".")
        meant = next((scope[root] for scope in reversed(self._scopes) if root in scope), None)
        if meant is None:
            return
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            self.found.rebound.append(node)
        else:
            self.found.uses.append(Use(meant + dot + rest, text, node))

    def _bound(self, body: Sequence[ast.stmt]) -> dict[str, str | None]:
        """Return the names that statements bind; an import takes precedence over other bindings."""
        found: dict[str, str | None] = {}
        outside: set[str] = set()
        for node in _of_one_scope(body):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if self._ours(alias.name):
                        root = alias.name.partition(".")[0]
                        found[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(node, ast.ImportFrom):
                ours = node.level == 0 and node.module is not None and self._ours(node.module)
                for alias in node.names:
                    if ours:
                        found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    else:
                        found.setdefault(alias.asname or alias.name, None)
            elif isinstance(node, (*_Function, ast.ClassDef)):
                found.setdefault(node.name, None)
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                outside.update(node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.setdefault(node.id, None)
        return {name: meant for name, meant in found.items() if name not in outside or meant is not None}

    def _ours(self, module: str) -> bool:
        return module.partition(".")[0] in self._packages


def _of_one_scope(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Yield all nodes outside inner functions, classes and comprehensions."""
    stack: list[ast.AST] = [*body]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, (*_Function, *_Comprehension, ast.ClassDef, ast.Lambda)):
            stack.extend(ast.iter_child_nodes(node))
