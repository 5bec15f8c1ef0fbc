"""The imports of Apex in a file: they become imports of torch, or go."""

from __future__ import annotations

import ast
import importlib
from typing import TypeGuard

from .mentions import waits_for_import
from .names import Problem, exists, is_apex, moved, moved_import, resolves
from .scopes import Names, dotted_text
from .torch_names import CONVERT, REPLACED
from .torch_tree import Statements

__all__ = ["Imports"]

_MODULES = (
    *("apex", "apex.amp", "apex.parallel", "apex.optimizers", "apex.normalization"),
    "apex.normalization.fused_layer_norm",
)
_AMP = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")
_FAILS = ("ImportError", "ModuleNotFoundError", "AttributeError", "Exception")


class Imports:
    """The rewriting of imports of Apex. What a script does where one fails goes, because torch is there.

    Args:
        tree: the syntax tree of a file.
        text: its text.
        names: its uses of Apex.
        problems: what cannot be rewritten in it.
        others: the text of other files, which may import from this one.

    Attributes:
        gone: ids of the nodes that are not in the new text.
    """

    def __init__(self, tree: ast.Module, text: Statements, names: Names, problems: list[Problem], others: str) -> None:
        self._others = others
        self._read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self._read |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        self.gone: set[int] = set()
        self._tree = tree
        self._text = text
        self._names = names
        self._problems = problems
        self._blocks = [
            block
            for node in ast.walk(tree)
            for name in ("body", "orelse", "finalbody")
            if isinstance(block := getattr(node, name, None), list)
        ]

    def rewrite(self) -> None:
        """Collect the changes."""
        fallbacks = {node: node.handlers[0].body for node in ast.walk(self._tree) if _never_imports(node)}
        for whole, left in fallbacks.items():
            inside = {id(part) for each in left for part in ast.walk(each)}
            self.gone |= {id(part) for part in ast.walk(whole)} - inside
        nodes = [node for node, _ in self._names.imports]
        new: dict[ast.stmt, list[str]] = {node: self._lines(node) for node in nodes if id(node) not in self.gone}
        new |= {whole: [self._text.source(each) for each in left] for whole, left in fallbacks.items()}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Try) and any(each in new for each in node.body) and self._plain(node, new):
                kept = [new.pop(each) if each in new else [self._text.source(each)] for each in node.body]
                kept += [[self._text.source(each)] for each in node.orelse]
                new[node] = [line for lines in kept for line in lines]
                self.gone |= {id(part) for handler in node.handlers for part in ast.walk(handler)}
        for block in self._blocks:
            left = [each for each in block if new.get(each) != []]
            for each in block:
                if each in new:
                    lines = new[each] or ([] if left or block is self._tree.body else ["pass"])
                    left = left or [each]
                    self._replace(each, lines)
        for name in self._names.rebound:
            if id(name) not in self.gone:
                self._say(name, f"{name.id} is set to something else here")
        self._conditions()

    def _lines(self, node: ast.Import | ast.ImportFrom) -> list[str]:
        """What an import becomes."""
        found = []
        for alias in node.names:
            whole = alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
            bound = f" as {alias.asname}" if alias.asname else ""
            if self._is_unused(whole, alias.asname or alias.name):
                continue
            if alias.name == "*":
                self._say(node, f"from {node.module} import *: say which names")  # type: ignore[union-attr]
            elif isinstance(node, ast.Import) and not is_apex(whole):
                found.append(f"import {whole}{bound}")
            elif whole in REPLACED and whole != CONVERT:
                module, _, name = REPLACED[whole].rpartition(".")
                own = alias.asname or alias.name
                found.append(f"from {module} import {name}" + (f" as {own}" if own != name else ""))
            elif whole not in (*_MODULES, CONVERT) and whole.removeprefix("apex.amp.") not in (*_AMP, "_amp_state"):
                self._no_counterpart(node, whole)
        return found

    def _is_unused(self, whole: str, own: str) -> bool:
        """Whether an import binds no name that this file, or another one, knows."""
        if own == "*":
            module = moved(whole.removesuffix(".*"))
            known = getattr(importlib.import_module(module), "__all__", None) if resolves(module) else None
            defined = {node.name for node in ast.walk(self._tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
            return known is not None and not self._read & {*known} - defined
        kept = whole in (*_MODULES, *REPLACED) or whole.removeprefix("apex.amp.") in _AMP
        return not kept and own.partition(".")[0] not in self._read and own not in self._others

    def _plain(self, node: ast.Try, new: dict[ast.stmt, list[str]]) -> bool:
        """Whether nothing but an import can fail in a block, whose handlers wait for that only."""
        caught = [
            dotted_text(each)
            for handler in node.handlers
            for each in (handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])
            if each is not None
        ]
        rest = [*(each for each in node.body if each not in new), *node.orelse]
        flags = all(isinstance(each, ast.Assign) and isinstance(each.value, ast.Constant) for each in rest)
        return flags and not node.finalbody and all(name in _FAILS for name in caught)

    def _replace(self, node: ast.stmt, lines: list[str]) -> None:
        start, end = self._text.start(node), self._text.end(node)
        before = self._text.line_start(start)
        indent = self._text.bytes[before:start].decode()
        alone = not indent.strip() and not self._text.bytes[end : self._text.line_end(end)].strip()
        if lines:
            self._text.change(start, end, (f"\n{indent}" if not indent.strip() else "; ").join(lines))
        elif alone:
            after = self._text.bytes.find(b"\n", end)
            self._text.change(before, len(self._text.bytes) if after < 0 else after + 1, "")
        elif not indent.strip() and self._text.bytes[end : self._text.line_end(end)].lstrip().startswith(b"#"):
            self._text.change(start, end, "")
        else:
            self._text.crowded.append(node)

    def _conditions(self) -> None:
        """``amp is not None`` is true."""
        bare = {id(use.node): use for use in self._names.uses if use.name in _MODULES}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Compare) and id(node.left) in bare and len(node.ops) == 1:
                no_import = isinstance(node.comparators[0], ast.Constant) and node.comparators[0].value is None
                if no_import and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
                    del bare[id(node.left)]
                    told = str(isinstance(node.ops[0], ast.IsNot))
                    self._text.change(self._text.start(node), self._text.end(node), told)
        for use in bare.values():
            if id(use.node) not in self.gone:
                self._say(use.node, f"{use.text} is handed on here, or asked for")
        known = (*_MODULES, *REPLACED, *(f"apex.amp.{name}" for name in _AMP))
        for use in self._names.uses:
            if use.name not in known and id(use.node) not in self.gone:
                self._no_counterpart(use.node, use.name)

    def _no_counterpart(self, node: ast.expr | ast.stmt, name: str) -> None:
        where = "torch.amp" if name.startswith("apex.amp") else "torch; halfstep has it (--to halfstep)"
        self._say(node, f"{name} has no counterpart in {where}")

    def _say(self, node: ast.expr | ast.stmt, said: str) -> None:
        self._problems.append((node.lineno, said))


def _never_imports(node: ast.AST) -> TypeGuard[ast.Try]:
    """Whether a block begins with an import that fails with every Apex, and goes on. halfstep has all names of Apex.

    Transformers asks for a ``FusedProphetNetLayerNorm``, for example, and takes that of torch then.
    """
    first = node.body[0] if isinstance(node, ast.Try) and not node.finalbody and node.handlers else None
    if not isinstance(node, ast.Try) or not isinstance(first, ast.ImportFrom) or first.module not in _MODULES:
        return False
    module = first.module
    missing = [each for each in first.names if each.name != "*" and not exists(*moved_import(module, each.name))]
    handler = node.handlers[0]
    short = all(each.lineno == each.end_lineno for each in handler.body)
    return bool(missing) and waits_for_import(handler) and handler.name is None and short
