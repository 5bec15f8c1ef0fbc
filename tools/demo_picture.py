"""Draw docs/images/demo.svg and print the table that README has, from recorded results of ``halfstep demo``.

::

    halfstep demo
    cp halfstep-demo/results.json docs/images/demo.json
    python tools/demo_picture.py

The picture has a fixed width and large text: on a screen of 400 px it is shrunk, and can still be read. It is light or
dark as the reader's system is.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"

WIDTH, TOP, ROW, BAR = 540, 44, 30, 16
NAME, TIME, MEMORY, ACCURACY = 0, 100, 300, WIDTH  # where the columns begin; the last one ends there
TIME_ROOM, MEMORY_ROOM = 130, 92  # of the longest bars
COLORS = {"O0 float32": "soft", "O1": "blue", "O2": "orange", "O3": "green", "O2 float16": "pink"}

STYLE = """
text { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #1c2126; }
.head, .foot { fill: #56616b; }
.soft { fill: #7a8691; }
.blue { fill: #3d85c6; } .orange { fill: #c86f10; } .green { fill: #2f9e77; } .pink { fill: #c2456b; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e8ec; } .head, .foot { fill: #aab4bd; } .soft { fill: #98a2ad; }
  .blue { fill: #5fa3df; } .orange { fill: #e8953d; } .green { fill: #4dbb94; } .pink { fill: #e2718f; }
}
""".strip()


def draw(results: dict[str, Any]) -> str:
    """The picture of what ``halfstep demo`` has written to results.json."""
    runs = results["runs"]
    slowest, largest = max(run["step_seconds"] for run in runs), max(run["held_bytes"] for run in runs)
    parts = [
        _text("head", NAME, 20, "level"),
        _text("head", TIME, 20, "time of a step"),
        _text("head", MEMORY, 20, "memory held"),
        _text("head", ACCURACY, 20, "accuracy", end=True),
    ]
    said = []
    for i, run in enumerate(runs):
        name = f"{run['level']} {run['dtype']}"
        color = COLORS.get(name) or COLORS[run["level"]]
        time, memory = 1e3 * run["step_seconds"], run["held_bytes"] / 2**20
        long, wide = TIME_ROOM * run["step_seconds"] / slowest, MEMORY_ROOM * run["held_bytes"] / largest
        top = TOP + i * ROW
        parts += [
            _text("", NAME, top + 13, name),
            _bar(color, TIME, top, long),
            _text("", TIME + long + 6, top + 13, f"{time:.0f} ms"),
            _bar(color, MEMORY, top, wide),
            _text("", MEMORY + wide + 6, top + 13, f"{memory:.1f} MiB"),
            _text("", ACCURACY, top + 13, f"{100 * run['test_accuracy']:.1f} %", end=True),
        ]
        said.append(f"{name}: {time:.0f} ms, {memory:.1f} MiB, {100 * run['test_accuracy']:.1f} %")
    emulated = sorted({run["dtype"] for run in runs if run["computed"] == "emulated"})
    foot = "A convolutional classifier of handwritten digits"
    if emulated:
        foot += f"; {' and '.join(emulated)} emulated"
    height = TOP + len(runs) * ROW + 30
    parts.append(_text("foot", NAME, height - 10, foot))
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img">\n<title>halfstep demo</title>\n<desc>{html.escape(". ".join(said))}.</desc>\n'
        f"<style>\n{STYLE}\n</style>\n{inner}\n</svg>\n"
    )


def table(results: dict[str, Any]) -> str:
    """The table of README and of the page on performance."""
    runs = results["runs"]
    lines = [
        "| level | dtype | test accuracy | step ms | ratio to O0 | computed | final loss | held MiB | peak MiB |",
        "|---|---|---|---|---|---|---|---|---|",
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
            f"{run['peak_bytes'] / 2**20:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _text(kind: str, x: float, y: float, text: str, *, end: bool = False) -> str:
    given = (f' class="{kind}"' if kind else "") + (' text-anchor="end"' if end else "")
    return f'<text x="{x:.4g}" y="{y}"{given}>{html.escape(text)}</text>'


def _bar(color: str, x: float, y: float, width: float) -> str:
    return f'<rect class="{color}" x="{x}" y="{y}" width="{width:.4g}" height="{BAR}" rx="2"/>'


if __name__ == "__main__":
    found = json.loads((IMAGES / "demo.json").read_text(encoding="utf-8"))
    (IMAGES / "demo.svg").write_text(draw(found), encoding="utf-8")
    print(table(found))
