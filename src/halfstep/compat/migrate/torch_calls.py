"""The functions of files that belong together, and who calls them with what."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .scopes import dotted_text
from .torch_tree import Tree

__all__ = ["Calls", "File", "Site"]

_Named = (ast.FunctionDef, ast.AsyncFunctionDef)


class File:
    """The functions and calls of one file, by their last names."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.around = Tree(tree)
        self.functions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef]] = {}
        self.calls: dict[str, list[ast.Call]] = {}
        self.classes: dict[str, set[str]] = {}
        self.imported: set[str] = set()
        self.partials: dict[str, ast.Call] = {}
        for node in ast.walk(tree):
            if isinstance(node, _Named):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):
                bases = {(dotted_text(base) or "").rpartition(".")[2] for base in node.bases}
                self.classes.setdefault(node.name, set()).update(bases)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imported |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.Call):
                self.calls.setdefault(_name(node.func), []).append(node)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                target = dotted_text(node.targets[0])
                if target and _name(node.value.func) == "partial" and node.value.args:
                    self.partials[target] = node.value

    def class_of(self, node: ast.AST) -> str | None:
        """The class whose method a function is, or has the function around a node."""
        function = self.around.function(node)
        while isinstance(function, ast.Lambda):
            function = self.around.function(self.around.owners[id(function)])
        owner = self.around.owners.get(id(function))
        return owner.name if isinstance(owner, ast.ClassDef) else None


_File = TypeVar("_File", bound=File)


@dataclass
class Site(Generic[_File]):
    """A call of a function of the files.

    Attributes:
        file: where the call is.
        call: the call.
        function: what is called.
        arguments: the parameters that get something, and what.
        receiver: the parameter that stands for the object of a method, and the text of that object.
    """

    file: _File
    call: ast.Call
    function: ast.AST
    arguments: dict[str, ast.expr]
    receiver: tuple[str, str] | None = None

    def outside(self, text: str, here: File) -> str | None:
        """The name that the caller has for something, if it has one; ``here`` is the file of the function."""
        root = re.split(r"\W", text, maxsplit=1)[0]
        rest = text[len(root) :]
        if root in self.arguments:
            given = dotted_text(self.arguments[root])
            return given and given + rest
        if self.receiver and root == self.receiver[0]:
            return self.receiver[1] + rest
        parts = list(ast.walk(self.function))
        own = {part.arg for part in parts if isinstance(part, ast.arg)}
        own |= {part.id for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
        return text if root not in own and self.file is here else None


@dataclass
class Calls(Generic[_File]):
    """The calls in files that belong together.

    Attributes:
        files: the files that are read.
        read: reads the files that may call a function of this name.
    """

    files: list[_File] = field(default_factory=list)
    read: Callable[[str], None] = lambda name: None
    _known: dict[int, list[Site[_File]]] = field(default_factory=dict)

    def callers(self, function: ast.AST, *, read: bool = True) -> list[Site[_File]]:
        """The calls of a function, in all files or only in those that are read."""
        if not isinstance(function, _Named):
            return []
        if read:
            if id(function) in self._known:
                return self._known[id(function)]
            self.read(function.name)
        found: list[Site[_File]] = []
        for each in self.files:
            names = {function.name} | {
                target for target, call in each.partials.items() if dotted_text(call.args[0]) == function.name
            }
            for call in (call for name in names for call in each.calls.get(name.rpartition(".")[2], [])):
                found += [site for _, site in self._resolved(each, call) if site.function is function]
        if read:
            self._known[id(function)] = found
        return found

    def called(self, file: _File, node: ast.AST) -> Iterator[tuple[_File, Site[_File]]]:
        """The calls of functions of the files in a part of one, each with the file of the function."""
        for call in ast.walk(node):
            if isinstance(call, ast.Call):
                yield from self._resolved(file, call)

    def _resolved(self, file: _File, call: ast.Call) -> list[tuple[_File, Site[_File]]]:
        partial = file.partials.get(dotted_text(call.func) or "")
        func = partial.args[0] if partial else call.func
        given = [*(partial.args[1:] if partial else []), *call.args]
        keywords = [*(partial.keywords if partial else []), *call.keywords]
        found = []
        for other in self.files:
            for function in other.functions.get(_name(func), []):
                owner = other.around.owners[id(function)]
                method = isinstance(owner, ast.ClassDef)
                if isinstance(func, ast.Name):
                    fits = not method
                elif isinstance(func, ast.Attribute) and method:
                    fits = self._may_be(file, func, call, owner.name)  # type: ignore[attr-defined]
                else:
                    fits = isinstance(func, ast.Attribute) and (dotted_text(func.value) or "?") in file.imported
                static = any(dotted_text(each) == "staticmethod" for each in function.decorator_list)
                arguments = _bound(function, given, keywords, 1 if method and not static else 0) if fits else None
                if arguments is None:
                    continue
                receiver = None
                if method and not static and isinstance(func, ast.Attribute) and function.args.args:
                    of = "self" if _is_super(func.value) else dotted_text(func.value)
                    receiver = (function.args.args[0].arg, of) if of else None
                found.append((other, Site(file, call, function, arguments, receiver)))
        return found

    def _may_be(self, file: File, func: ast.Attribute, call: ast.Call, owner: str) -> bool:
        """Whether a method of a class may be what is called."""
        if dotted_text(func.value) not in ("self", "cls") and not _is_super(func.value):
            return True
        own = file.class_of(call)
        if own is None or own == owner or own in self._bases(owner) or owner in self._bases(own):
            return True
        return not any(file.class_of(each) == own for each in file.functions.get(func.attr, []))

    def _bases(self, name: str) -> set[str]:
        found: set[str] = set()
        new = {name}
        while new:
            new = {base for each in self.files for one in new for base in each.classes.get(one, ())} - found
            found |= new
        return found


def _name(func: ast.expr) -> str:
    return func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and dotted_text(node.func) == "super"


def _bound(
    function: ast.FunctionDef | ast.AsyncFunctionDef, given: list[ast.expr], keywords: list[ast.keyword], skip: int
) -> dict[str, ast.expr] | None:
    """What each parameter gets; None if a call does not fit."""
    args = function.args
    places = [arg.arg for arg in (*args.posonlyargs, *args.args)][skip:]
    plain = [each for each in given if not isinstance(each, ast.Starred)]
    if len(plain) > len(places) and args.vararg is None:
        return None
    found = dict(zip(places, plain, strict=False))
    known = {*places, *(arg.arg for arg in args.kwonlyargs)}
    for keyword in keywords:
        if keyword.arg in known:
            found[str(keyword.arg)] = keyword.value
        elif keyword.arg is not None and args.kwarg is None:
            return None
    whole = len(plain) == len(given) and all(keyword.arg for keyword in keywords)
    needed = places[: len(places) - len(args.defaults)]
    return None if whole and any(name not in found for name in needed) else found
