"""The codemod that replaces names of Apex by names of halfstep and leaves the rest of a file unchanged."""

from __future__ import annotations

import ast
import re

from .names import EXTENSIONS, Problem, exists, is_apex, module_of, moved, moved_import, moved_use, resolves
from .scopes import Names, Use, loose_names, names_of
from .splice import Text

__all__ = ["to_halfstep"]

_PACKAGES = ("apex", *EXTENSIONS)
_IN_FLOAT16 = ("apex.amp.initialize", "apex.amp.init")
_IN_BFLOAT16 = ("O4", "O5")
_HANDS_ON = (ast.Assign, ast.Call, ast.keyword, ast.Return, ast.Dict, ast.List, ast.Tuple)
_ASKING = ("getattr", "hasattr", "id", "print", "str", "type")
"""Functions that keep no reference to their arguments."""


def to_halfstep(source: str) -> tuple[str, list[Problem]]:
    """Rewrite a text, and return the new text and the places that could not be changed, with reasons.

    Raises:
        SyntaxError: if the text is not valid Python.
    """
    tree = ast.parse(source)
    names = names_of(tree, _PACKAGES)
    if not names.imports:
        return source, []
    rewriting = _Rewriting(source, names)
    rewriting.run(tree)
    after, problems = rewriting.text.result(), rewriting.problems
    wrong = _unresolved(after, tree, names) if after != source else []
    if not wrong:
        return after, problems
    told = {line for line, _ in problems}
    return source, [*problems, *(problem for problem in wrong if problem[0] not in told)]


class _Rewriting:
    """The changes to one file."""

    def __init__(self, source: str, names: Names) -> None:
        self.text = Text(source)
        self.problems: list[Problem] = []
        self._names = names
        self._modules: set[str] = set()  # modules that expressions beginning with ``apex`` need
        self._old: set[str] = set()  # imports from ``halfstep.apex``, for names that only this module has
        self._kept = False  # True if an ``apex`` expression is not changed

    def run(self, tree: ast.Module) -> None:
        """Collect the changes."""
        for use in self._names.uses:
            self._use(use)
        imports = self._names.imports
        plain = [
            alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names if not alias.asname
        ]
        if any(name.partition(".")[0] == "apex" for name in plain):
            for name in self._names.rebound:
                if name.id == "apex" and not self._kept:
                    self.text.change(self.text.start(name), self.text.end(name), "halfstep")
        missing = sorted(self._modules - {moved(name) for name in plain if is_apex(name)})
        bare = "apex" in plain
        for node in imports:
            if isinstance(node, ast.ImportFrom):
                self._import_from(node)
            else:
                missing = self._import(node, missing, bare)
        meant = {id(use.node): use.name for use in self._names.uses}
        held = self._held(tree)
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and (meant.get(id(call.func)) in _IN_FLOAT16 or _is_held(call.func, held)):
                if self.text.bytes[self.text.end(call) - 1 : self.text.end(call)] == b")":
                    self._float16(call)
                else:
                    self._problem(call, "the end of this call cannot be located")

    def _held(self, tree: ast.Module) -> set[str]:
        """Return attributes that hold amp, such as ``self.amp = amp``; report other references to amp as problems."""
        parents = {id(child): node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        held: set[str] = set()
        for use in self._names.uses:
            node = parents[id(use.node)]
            while isinstance(node, (ast.IfExp, ast.BoolOp)):  # ``amp if args.fp16 else None``
                node = parents[id(node)]
            targets = [t.attr for t in getattr(node, "targets", ()) if isinstance(t, ast.Attribute)]
            asks = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ASKING
            held.update(targets if use.name == "apex.amp" else ())
            if use.name == "apex.amp" and isinstance(node, _HANDS_ON) and not targets and not asks:
                self._problem(use.node, 'amp is handed on here: add dtype="float16" to its initialize yourself')
        return held

    def _use(self, use: Use) -> None:
        root = use.text.partition(".")[0]
        meant = use.name[: len(use.name) - len(use.text) + len(root)]
        if root == meant == "apex":
            self._whole_name(use)
            return
        new = moved_use(meant) + use.name[len(meant) :]  # by a rewritten import
        if resolves(new) or not resolves(moved_use(meant)):  # or is already reported
            return
        if resolves(f"halfstep.{use.name}"):
            self._old.add(meant)
        else:
            self._problem(use.node, f"{use.name}: halfstep has no {new.removeprefix('halfstep.')}")

    def _whole_name(self, use: Use) -> None:
        """Rewrite an expression with a full name, such as ``apex.amp.initialize``."""
        new = moved_use(use.name)
        start, end = self.text.start(use.node), self.text.end(use.node)
        located = self.text.bytes[start:end] == use.text.encode()  # not in an f-string, before Python 3.12
        if located and resolves(new):
            self._modules.update({module_of(new)} - {"halfstep"})
            self.text.change(start, end, new)
            return
        self._kept = True
        missing = f"{use.name}: halfstep has no {new.removeprefix('halfstep.')}"
        self._problem(use.node, missing if located else f"{use.text} cannot be located")

    def _import_from(self, node: ast.ImportFrom) -> None:
        module = str(node.module)
        if node.names[0].name == "*":
            new = moved(module)
            if exists(new):
                self._module(node, new)
            else:
                self._problem(node, f"from {module} import *: halfstep has no {new.removeprefix('halfstep.')}")
            return
        groups: dict[str, list[str]] = {}
        for alias in node.names:
            old = f"{module}.{alias.name}" in self._old
            parent, own = (f"halfstep.{module}", alias.name) if old else moved_import(module, alias.name)
            if not exists(parent, own):
                self._problem(node, f"from {module} import {alias.name}: halfstep has no such name")
                parent, own = module, alias.name
            bound = alias.asname or alias.name
            groups.setdefault(parent, []).append(own if own == bound else f"{own} as {bound}")
            if own != alias.name and len(groups) == 1:
                self.text.change(self.text.start(alias), self.text.end(alias), groups[parent][-1])
        if len(groups) == 1:
            self._module(node, next(iter(groups)))
            return
        start, end = self.text.start(node), self.text.end(node)
        self.text.drop(start, end)
        before = self.text.bytes[self.text.line_start(start) : start].decode()
        between = "; " if before.strip() else f"\n{before}"
        lines = [f"from {parent} import {', '.join(aliases)}" for parent, aliases in groups.items()]
        self.text.change(start, end, between.join(lines))

    def _module(self, node: ast.ImportFrom, new: str) -> None:
        start = self.text.start(node)
        match = re.compile(rb"from[\s\\]+([\w.]+)").match(self.text.bytes, start)
        assert match is not None
        self.text.change(match.start(1), match.end(1), new)

    def _import(self, node: ast.Import, missing: list[str], bare: bool) -> list[str]:
        for alias in node.names:
            if not is_apex(alias.name):
                continue
            start, end = self.text.start(alias), self.text.end(alias)
            if alias.name == "apex" and not alias.asname:
                modules = ["apex"] * self._kept + (sorted(self._modules) or ["halfstep"])
                self.text.change(start, end, ", ".join(modules))
                continue
            new = f"halfstep.{alias.name}" if alias.name in self._old else moved(alias.name)
            if not exists(new):
                self._problem(node, f"import {alias.name}: halfstep has no {new.removeprefix('halfstep.')}")
                continue
            bound = alias.asname or (alias.name if alias.name in EXTENSIONS else None)
            text = new if bound is None else f"{new} as {bound}"
            if bound is None and not bare:  # the first import adds modules that Apex's __init__ imported
                text, missing = ", ".join([text, *missing]), []
            self.text.change(start, end, text)
        return missing

    def _float16(self, call: ast.Call) -> None:
        """Add float16 to ``amp.initialize(...)``, because Apex used it on every device."""
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        level = given.get("opt_level")
        if "dtype" in given or (isinstance(level, ast.Constant) and level.value in _IN_BFLOAT16):
            return
        self.text.add_argument(call, 'dtype="float16"')

    def _problem(self, node: ast.expr | ast.stmt, said: str) -> None:
        self.problems.append((node.lineno, said))


def _is_held(func: ast.expr, held: set[str]) -> bool:
    """True for ``self.amp.initialize``, if ``self.amp`` holds amp."""
    holder = getattr(getattr(func, "value", None), "attr", None)
    return holder in held and f"apex.amp.{getattr(func, 'attr', '')}" in _IN_FLOAT16


def _unresolved(after: str, tree: ast.Module, before: Names) -> list[Problem]:
    """Return the names in a rewritten text that would be undefined when it runs.

    Args:
        after: the rewritten text.
        tree: the syntax tree of the original text.
        before: the names of the original text.
    """
    new = ast.parse(after)
    names = names_of(new, ("halfstep", *_PACKAGES))
    gone = [(use.node.lineno, use.name) for use in names.uses if _is_ours(use.name) and not resolves(use.name)]
    for node in names.imports:
        for alias in node.names:
            module, name = (str(node.module), alias.name) if isinstance(node, ast.ImportFrom) else (alias.name, None)
            if _is_ours(module) and not exists(module, name):
                gone.append((node.lineno, f"{module}.{name}" if name else module))
    roots = {use.text.partition(".")[0] for use in before.uses} | {"halfstep"}
    loose, same = loose_names(new, names, roots), loose_names(tree, before, roots)
    if len(loose) > len(same):  # a parameter of the same name is unbound in both texts
        gone += loose
    return [(line, f"not rewritten: {name} would not be found") for line, name in gone]


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "halfstep"
