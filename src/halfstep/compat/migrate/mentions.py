"""The places where a file speaks of Apex without importing it: comments, strings, and its name as a string."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Collection
from typing import TypeGuard

from .names import Problem, is_apex
from .scopes import dotted_text

__all__ = ["asked_by_string", "asked_for_spec", "mentions", "waits_for_import"]

_WORD = re.compile(r"\b(?:apex|amp_C|apex_C)\b", re.IGNORECASE)
_TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}  # from 3.12 on
_ASKING = ("find_spec", "find_loader", "import_module", "importorskip", "__import__", "get_distribution", "version")


def mentions(source: str) -> list[Problem]:
    """The lines of comments and strings that have the word, and what stands there."""
    found: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _TEXTS and _WORD.search(token.string):
            first = token.line.partition("\n")[0]
            for i, part in enumerate(token.string.split("\n")):
                if _WORD.search(part):
                    found[token.start[0] + i] = part.strip() if i or token.type == tokenize.COMMENT else first.strip()
    return sorted(found.items())


def asked_by_string(source: str, *, optional: bool = True) -> list[Problem]:
    """Calls such as ``find_spec("apex")``, which no rewriting of names reaches.

    Args:
        source: the text of a file.
        optional: also those whose module has no name, and without which the file does by itself, and comparisons of a
            spec with None.
    """
    tree = ast.parse(source)
    skipped = set() if optional else _optional(tree) | {id(node.left) for node in asked_for_spec(tree)}
    return [
        (node.lineno, f"{ast.unparse(node)} asks for Apex by a string; change it yourself")
        for node in ast.walk(tree)
        if _asks(node, _ASKING) and id(node) not in skipped
    ]


def _asks(node: ast.AST, names: Collection[str]) -> TypeGuard[ast.Call]:
    """Whether a node is a call of a function with one of these last names, of the name of Apex."""
    if not isinstance(node, ast.Call) or (dotted_text(node.func) or "").rpartition(".")[2] not in names:
        return False
    return any(isinstance(arg, ast.Constant) and isinstance(arg.value, str) and is_apex(arg.value) for arg in node.args)


def asked_for_spec(tree: ast.Module) -> list[ast.Compare]:
    """The expressions ``find_spec("apex") is not None`` and ``is None``."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], (ast.Is, ast.IsNot))
        if _asks(node.left, ("find_spec",)) and ast.unparse(node.comparators[0]) == "None"
    ]


def _optional(tree: ast.Module) -> set[int]:
    """The ids of calls that may fail because a module is not there, and whose result is not assigned."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(waits_for_import(handler) for handler in node.handlers):
            parts = [part for each in node.body for part in ast.walk(each)]
            assigned = {
                id(getattr(part, "value", None)) for part in parts if isinstance(part, (ast.Assign, ast.NamedExpr))
            }
            found |= {id(part) for part in parts} - assigned
    return found


def waits_for_import(handler: ast.ExceptHandler) -> bool:
    """Whether a handler is for a module that is not there, or for every error, and goes on."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    known = any(each is None or dotted_text(each) in ("ImportError", "ModuleNotFoundError") for each in kinds)
    return known and not isinstance(handler.body[-1], ast.Raise)
