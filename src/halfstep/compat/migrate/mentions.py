"""The places where a file mentions Apex without an import: comments, strings, and the module name as a string."""

from __future__ import annotations

import ast
import io
import re
import tokenize

from .names import Problem, is_apex
from .scopes import dotted_text

__all__ = ["asked_by_string", "mentions"]

_WORD = re.compile(r"\b(?:apex|amp_C|apex_C)\b", re.IGNORECASE)
_TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}  # from 3.12 on
_ASKING = ("find_spec", "find_loader", "import_module", "importorskip", "__import__", "get_distribution", "version")


def mentions(source: str) -> list[Problem]:
    """Return the lines of comments and strings that mention Apex, with their text."""
    found: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _TEXTS and _WORD.search(token.string):
            first = token.line.partition("\n")[0]
            for i, part in enumerate(token.string.split("\n")):
                if _WORD.search(part):
                    found[token.start[0] + i] = part.strip() if i or token.type == tokenize.COMMENT else first.strip()
    return sorted(found.items())


def asked_by_string(source: str) -> list[Problem]:
    """Return calls such as ``find_spec("apex")``, which a rewrite of names does not change."""
    return [
        (node.lineno, f"{ast.unparse(node)} asks for Apex by a string; change it yourself")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and _asks(node)
    ]


def _asks(call: ast.Call) -> bool:
    """True if a function in ``_ASKING`` is called with the name of Apex."""
    asking = (dotted_text(call.func) or "").rpartition(".")[2] in _ASKING
    return asking and any(
        isinstance(arg, ast.Constant) and isinstance(arg.value, str) and is_apex(arg.value) for arg in call.args
    )
