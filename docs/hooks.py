"""Parts of pages that are made from the code when the pages are built."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from halfstep.oplists import RULES, entries

_DEMO = Path(__file__).parent / "images/demo.json"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the op lists and the results of the demo where a page asks for them."""
    for place, make in {"<!-- op lists -->": op_lists, "<!-- demo results -->": demo_results}.items():
        if place in markdown:
            markdown = markdown.replace(place, make())
    return markdown


def demo_results() -> str:
    """The recorded results of ``halfstep demo`` as a table; README has the same one."""
    runs = json.loads(_DEMO.read_text(encoding="utf-8"))["runs"]
    lines = [
        "| level | dtype | test accuracy | step ms | ratio to O0 | computed | final loss | held MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        cells = [
            run["level"],
            run["dtype"],
            f"{100 * run['test_accuracy']:.1f} %",
            f"{1e3 * run['step_seconds']:.1f}",
            f"{run['step_seconds'] / runs[0]['step_seconds']:.2f}",
            run["computed"],
            f"{run['final_loss']:.4f}",
            f"{run['held_bytes'] / 2**20:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
