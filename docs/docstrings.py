"""Docstrings are written for a terminal. This changes them into Markdown for the API pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

_CODE = re.compile(r"^( *)(.*)::\n\n((?:\1    .*\n|\n)*\1    .*)", re.M)
_POWER = re.compile(r"(?<=\w)\*\*(?=\w)")


class TerminalToMarkdown(griffe.Extension):
    """Show the indented block after ``::`` as Python, and ``2**16`` in a text as a power, not bold."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        lines, in_code = [], False
        for line in _CODE.sub(_fenced, obj.docstring.value).split("\n"):
            in_code ^= line.lstrip().startswith("```")
            lines.append(line if in_code or "``" in line else _POWER.sub(r"\\*\\*", line))
        obj.docstring.value = "\n".join(lines)


def _fenced(found: re.Match[str]) -> str:
    """The block between fences: so mkdocstrings colors it, and a long line goes on below as on the other pages."""
    indent, text, block = found.groups()
    code = "\n".join(line.removeprefix("    ") for line in block.split("\n"))
    return f"{indent}{text}{':' if text else ''}\n\n{indent}```python\n{code}\n{indent}```"
