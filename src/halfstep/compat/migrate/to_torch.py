"""Rewrites O0 and O1 of Apex to ``torch.autocast`` and ``torch.amp.GradScaler``, where these do the same.

Files that belong together are rewritten as a whole or not at all. If one function has all of amp, its GradScaler is a
variable, ``scaler``. Otherwise it is an attribute of the optimizer, which every function that steps has.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Hashable, Mapping
from typing import TypeVar

from .names import EXTENSIONS, Problem
from .scopes import Names, loose_names, names_of
from .torch_imports import Imports
from .torch_names import CONVERT, OPTIMIZERS, REPLACED, options_problem
from .torch_script import Package
from .torch_training import Training
from .torch_tree import Statements

__all__ = ["to_torch"]

_PACKAGES = ("apex", *EXTENSIONS)
_Key = TypeVar("_Key", bound=Hashable)


def to_torch(sources: Mapping[_Key, str], *, accumulation: bool = False) -> dict[_Key, tuple[str, list[Problem]]]:
    """The new texts and no problems, or the old texts and all problems.

    Args:
        sources: the texts of files that belong together.
        accumulation: also rewrite steps of several backward passes, after which a GradScaler moves its scale once.

    Raises:
        SyntaxError: if a text is no Python.
    """
    files = {key: _File(source) for key, source in sources.items()}
    package = Package(accumulation=accumulation)
    for file in files.values():
        file.training.tell(package)
    for file in files.values():
        file.rewrite(package)
    if any(file.problems for file in files.values()):
        return {key: (sources[key], sorted(set(file.problems))) for key, file in files.items()}
    return {key: (file.after, []) for key, file in files.items()}


class _File:
    """A file, and the changes to it."""

    def __init__(self, source: str) -> None:
        self.source = self.after = source
        self.problems: list[Problem] = []
        self._tree = ast.parse(source)
        self._text = Statements(source)
        self._names = names_of(self._tree, _PACKAGES)
        self.training = Training(self._tree, self._text, self._names, self.problems)

    def rewrite(self, package: Package) -> None:
        """Find the problems, and the new text."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and node.level and {"amp", "apex"} & {each.name for each in node.names}:
                self.problems.append((node.lineno, "Apex is taken from another file here"))
        if not self._names.imports:
            return
        imports = Imports(self._tree, self._text, self._names, self.problems)
        imports.rewrite()
        self._replaced_names()
        self.training.rewrite(package, imports.gone)
        if self.problems:
            return
        self.training.indent(_inside_strings(self.source))
        self.after = _with_torch(self._text.result())
        tree = ast.parse(self.after)
        names = names_of(tree, _PACKAGES)
        roots = {use.text.partition(".")[0] for use in self._names.uses if use.name not in REPLACED or "." in use.text}
        for line, name in _left(tree, names, roots):
            self.problems.append((line, f"{name} is used here in a way that cannot be rewritten"))

    def _replaced_names(self) -> None:
        calls = {id(node.func): node for node in ast.walk(self._tree) if isinstance(node, ast.Call)}
        for use in self._names.uses:
            if use.name not in REPLACED:
                continue
            call = calls.get(id(use.node))
            if "." in use.text or use.name == CONVERT:
                self._text.change(self._text.start(use.node), self._text.end(use.node), REPLACED[use.name])
            if call is None:
                if use.name in OPTIMIZERS:
                    self.problems.append((use.node.lineno, f"{use.name} that is not called here: its defaults differ"))
                continue
            said = options_problem(use.name, call)
            if said:
                self.problems.append((call.lineno, said))
            given = {keyword.arg: keyword for keyword in call.keywords}
            if use.name in OPTIMIZERS and "weight_decay" not in given:
                self._text.add_argument(call, "weight_decay=0.0")
            if "delay_allreduce" in given:
                start = self._text.start(given["delay_allreduce"])
                self._text.change(start, start + len("delay_allreduce"), "find_unused_parameters")


def _left(tree: ast.Module, names: Names, roots: set[str]) -> list[Problem]:
    found = [(node.lineno, "Apex") for node, _ in names.imports]
    return found + loose_names(tree, names, roots - {"torch"})


def _with_torch(text: str) -> str:
    """The text with ``import torch``, if it needs that."""
    tree = ast.parse(text)
    used = any(isinstance(node, ast.Name) and node.id == "torch" for node in ast.walk(tree))
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    plain = [node for node in imports if isinstance(node, ast.Import)]
    bound = any(not alias.asname and alias.name.partition(".")[0] == "torch" for node in plain for alias in node.names)
    if not used or bound:
        return text
    later = [node for node in imports if not (isinstance(node, ast.ImportFrom) and node.module == "__future__")]
    line = later[0].lineno - 1 if later else 0
    lines = text.splitlines(keepends=True)
    return "".join([*lines[:line], "import torch\n", *lines[line:]])


def _inside_strings(source: str) -> set[int]:
    """The lines that begin inside of a string."""
    found: set[int] = set()
    begun: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind == "FSTRING_START":
            begun.append(token.start[0])
        elif kind in ("FSTRING_END", "STRING"):
            first = begun.pop() if kind == "FSTRING_END" else token.start[0]
            found.update(range(first + 1, token.end[0] + 1))
    return found
