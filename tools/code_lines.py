"""Counts lines of code by room: lines with a token of code.

Docstrings, comments, blank lines, imports and ``__all__`` are not counted, so that explaining code costs nothing.

    python tools/code_lines.py [ROOT] [--files]     the default ROOT is src/halfstep
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

_QUIET = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def _is_free(node: ast.AST) -> bool:
    """True if a statement is a docstring, another bare string, an import or ``__all__``."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    if isinstance(node, ast.Assign):
        return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    return isinstance(node, ast.Import | ast.ImportFrom)


def code_lines(text: str) -> int:
    """The number of lines of code in the text of a Python file."""
    free: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and _is_free(node):
            free.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _QUIET:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - free)


def by_file(root: Path) -> dict[Path, int]:
    """Lines of code of each Python file below a folder, by the path relative to that folder."""
    return {path.relative_to(root): code_lines(path.read_text()) for path in sorted(root.rglob("*.py"))}


def by_room(root: Path) -> Counter[str]:
    """Lines of code of each folder right below ``root``; files that lie in ``root`` itself are under ``"top"``."""
    rooms: Counter[str] = Counter()
    for path, lines in by_file(root).items():
        rooms[path.parts[0] if len(path.parts) > 1 else "top"] += lines
    return rooms


def main(arguments: list[str]) -> None:
    """Print the table."""
    roots = [Path(argument) for argument in arguments if not argument.startswith("--")] or [Path("src/halfstep")]
    for root in roots:
        if "--files" in arguments:
            for path, lines in by_file(root).items():
                print(f"{lines:6d}  {path}")
        rooms = by_room(root)
        for room, lines in rooms.most_common():
            print(f"{lines:6d}  {room}")
        print(f"{sum(rooms.values()):6d}  all of {root}")


if __name__ == "__main__":
    main(sys.argv[1:])
