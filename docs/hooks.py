"""Parts of pages that are made from the code when the pages are built."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any

from halfstep.diagnostics.findings.memory import MemoryLine, lines
from halfstep.oplists import RULES, entries


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put tables where a page asks for them."""
    for place, make in _PLACES.items():
        markdown = markdown.replace(place, make()) if place in markdown else markdown
    return markdown


def on_page_content(content: str, **_: Any) -> str:
    """Mark option names, which must not break at hyphens, and output that needs more columns than fit."""
    content = _INLINE_CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), content)
    return _OUTPUT.sub(
        lambda block: block[0].replace("language-", "wide language-", 1) if _is_wide(block) else block[0], content
    )


def _is_wide(block: re.Match[str]) -> bool:
    text = html.unescape(re.sub(r"<[^>]*>", "", block[0]))
    return max(map(len, text.splitlines())) > FITTING_COLUMNS


FITTING_COLUMNS = 85
"""The columns of a code block that fit on a wide screen; ``extra.css`` has smaller letters for "wide" blocks."""
_INLINE_CODE = re.compile(r"(?<!<pre>)(?<!</span>)<code>[^<]*</code>")
_OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
_OUTPUT = re.compile(r'<div class="language-(?:text|console) highlight">.*?</div>', re.S)


def bytes_table(found: Iterable[MemoryLine]) -> str:
    """Return the bytes per parameter, line by line."""
    head = "| optimizer | level, dtype | weight | master | state | gradient | total |\n" + "|---" * 7 + "|"
    rows = [
        f"| {line.optimizer} | {line.level} {line.dtype} | "
        + " | ".join(f"{size:g}" for size in (*line[3:7], line.total))
        + " |"
        for line in found
    ]
    return "\n".join([head, *rows])


def op_lists() -> str:
    """The lists of level O1, rule by rule and reason by reason."""
    sections = []
    for rule, listed in groupby(entries(), key=lambda entry: entry.rule):
        rows = sorted(listed, key=lambda entry: (entry.reason, entry.op))
        sections.append(f"### {rule}: {RULES[rule]}\n")
        for reason, ops in groupby(rows, key=lambda entry: entry.reason):
            names = ", ".join(f"`{entry.op}`" for entry in ops)
            sections.append(f"**{reason}**: {names}\n" if reason else f"{names}\n")
    return "\n".join(sections)


_PLACES = {
    "<!-- op lists -->": op_lists,
    "<!-- memory table -->": lambda: bytes_table(lines()),
}
