"""Which objects of a library's modules change while it runs, read from its sources.

State is a name that a function rebinds by ``global``, a container that is empty at first or changed somewhere, and an
instance of a class that is not frozen. A table that nobody changes is none, nor is a ``functools.cache``: it has what
follows from the arguments.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

__all__ = ["module_state"]

CHANGES = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}

STATEFUL = {
    *("dict", "list", "set", "defaultdict", "OrderedDict", "deque", "Counter", "count", "ContextVar"),
    *("local", "Lock", "RLock", "Event", "Condition", "Semaphore"),
    *("WeakSet", "WeakKeyDictionary", "WeakValueDictionary", "WeakIdKeyDictionary", "WeakTensorKeyDictionary"),
}
"""Names of what makes an object that is there to be changed."""

LITERALS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)


def module_state(root: Path, leave_out: set[str]) -> set[tuple[str, str]]:
    """The path below ``root`` and the name of each such object; folders or files of some names are left out."""
    paths = [path for path in sorted(root.rglob("*.py")) if leave_out.isdisjoint(path.relative_to(root).parts)]
    sources = {path.relative_to(root).as_posix(): _Source(path.read_text()) for path in paths}
    stateful = STATEFUL.union(*(source.classes for source in sources.values()))
    changed_elsewhere = set().union(*(source.imported & source.changed for source in sources.values()))
    return {(path, name) for path, source in sources.items() for name in source.state(stateful, changed_elsewhere)}


class _Source:
    """What a module's text says.

    Attributes:
        classes: names of its classes whose instances may change.
        rebound: names that a function rebinds.
        changed: names of objects that a function changes: by an item, in place, or by a method.
        imported: names that it has from other modules.
    """

    def __init__(self, text: str) -> None:
        self._tree = ast.parse(text)
        nodes = list(ast.walk(self._tree))
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)]
        inside = [node for function in functions for node in ast.walk(function)]
        self.classes = {node.name for node in nodes if isinstance(node, ast.ClassDef) and not _is_value(node)}
        self.rebound = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
        self.changed = {_changed_by(node) for node in inside} - {""}
        self.imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}

    def state(self, stateful: set[str], changed_elsewhere: set[str]) -> Iterator[str]:
        """Names of the module's objects that change; those of a class come with its name."""
        yield from self.rebound
        bodies = [("", self._tree.body)]
        bodies += [(f"{node.name}.", node.body) for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef)]
        changed = self.changed | changed_elsewhere
        for prefix, body in bodies:
            for name, value in _assigned(body):
                if isinstance(value, LITERALS):
                    changes = name != "__all__" and (_is_empty(value) or name in changed)
                else:
                    changes = isinstance(value, ast.Call) and _last(value.func) in stateful
                if changes and name not in self.rebound:
                    yield prefix + name


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((target.id, node.value) for target in targets if isinstance(target, ast.Name))


def _is_empty(value: ast.expr) -> bool:
    return not (getattr(value, "elts", None) or getattr(value, "keys", None) or hasattr(value, "generators"))


def _changed_by(node: ast.AST) -> str:
    """The name of what a piece of code changes; empty if it changes nothing."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return _last(node.value)
    if isinstance(node, ast.AugAssign):
        return _last(node.target)
    if isinstance(node, ast.Attribute) and node.attr in CHANGES:
        return _last(node.value)
    return ""


def _last(node: ast.expr) -> str:
    """The last part of a dotted name, without what is in brackets; empty for anything else."""
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_value(node: ast.ClassDef) -> bool:
    """Whether the instances of a class never change: those of a frozen dataclass, a named tuple, an enum."""
    calls = [made for made in node.decorator_list if isinstance(made, ast.Call)]
    frozen = any(word.arg == "frozen" for made in calls for word in made.keywords)
    return frozen or any(
        _last(base) in ("NamedTuple", "Enum", "IntEnum", "Protocol", "TypedDict") for base in node.bases
    )
