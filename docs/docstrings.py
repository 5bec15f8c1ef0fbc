"""Docstrings are written for a terminal. This changes them into Markdown for the API pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

_LITERAL_BLOCK = re.compile(r"^( *)(.*?)::$", re.M)
_POWER = re.compile(r"(?<=\w)\*\*(?=\w)")


class TerminalToMarkdown(griffe.Extension):
    """Remove ``::`` before an indented block, which Markdown does not need, and show ``2**16`` as a power, not bold."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        lines = []
        for line in obj.docstring.value.split("\n"):
            text = _LITERAL_BLOCK.sub(lambda match: match[1] + (match[2] + ":" if match[2] else ""), line)
            lines.append(text if line.startswith("        ") or "``" in line else _POWER.sub(r"\\*\\*", text))
        obj.docstring.value = "\n".join(lines)
