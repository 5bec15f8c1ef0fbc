"""Parts of pages that are made from the code when the pages are built."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from halfstep.oplists import RULES, entries

_PLACE = "<!-- op lists -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the op lists where a page asks for them."""
    return markdown.replace(_PLACE, op_lists()) if _PLACE in markdown else markdown


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
