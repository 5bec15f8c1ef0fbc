"""Measure the figures of README and docs again, and write their tables and picture.

::

    python -m tools.figures              # measures on this machine, which must do nothing else: 8 minutes
    python -m tools.figures --no-runs    # writes the tables and the picture of the recorded results again

Each record in ``docs/images`` names its command, its machine, and the version and the commit of halfstep. A test
compares the tables with the records, and fails if a record is older than the release before this one.

The picture has a fixed width and large text: on a screen of 400 px it is shrunk, and can still be read. It is light or
dark as the reader's system is.
"""

from __future__ import annotations

import argparse
import html
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"

NO_UNITS = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""Environment variables that hide the 16-bit units of a CPU."""
_FOUR_EPOCHS = "halfstep demo --device cpu --epochs 4 --dtype"
RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "demo": ("halfstep demo --device cpu", {}),
    "demo-bfloat16-no-units": (f"{_FOUR_EPOCHS} bfloat16", NO_UNITS),
    "demo-float16-no-units": (f"{_FOUR_EPOCHS} float16", NO_UNITS),
    "reported-no-units": ("python -m benchmarks reported --device cpu --steps 9", NO_UNITS),
}
"""For each record, its command and the environment variables that the command gets."""

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
        label("head", NAME, 20, "level"),
        label("head", TIME, 20, "time of a step"),
        label("head", MEMORY, 20, "memory held"),
        label("head", ACCURACY, 20, "accuracy", end=True),
    ]
    said = []
    for i, run in enumerate(runs):
        name = f"{run['level']} {run['dtype']}"
        color = COLORS.get(name) or COLORS[run["level"]]
        time, memory = 1e3 * run["step_seconds"], run["held_bytes"] / 2**20
        long, wide = TIME_ROOM * run["step_seconds"] / slowest, MEMORY_ROOM * run["held_bytes"] / largest
        top = TOP + i * ROW
        parts += [
            label("", NAME, top + 13, name),
            bar(color, TIME, top, long),
            label("", TIME + long + 6, top + 13, f"{time:.0f} ms"),
            bar(color, MEMORY, top, wide),
            label("", MEMORY + wide + 6, top + 13, f"{memory:.1f} MiB"),
            label("", ACCURACY, top + 13, f"{100 * run['test_accuracy']:.1f} %", end=True),
        ]
        said.append(f"{name}: {time:.0f} ms, {memory:.1f} MiB, {100 * run['test_accuracy']:.1f} %")
    emulated = sorted({run["dtype"] for run in runs if run["computed"] == "emulated"})
    foot = "A convolutional classifier of handwritten digits"
    if emulated:
        foot += f"; {' and '.join(emulated)} emulated"
    height = TOP + len(runs) * ROW + 30
    parts.append(label("foot", NAME, height - 10, foot))
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img">\n<title>halfstep demo</title>\n<desc>{html.escape(". ".join(said))}.</desc>\n'
        f"<style>\n{STYLE}\n</style>\n{inner}\n</svg>\n"
    )


def tables(records: dict[str, dict[str, Any]]) -> list[str]:
    """Return the tables of README and docs; the first row of a table tells where it stands."""
    return [_demo(records["demo"]), _no_units(records), *_reported(records["reported-no-units"])]


def _demo(record: dict[str, Any]) -> str:
    runs = record["runs"]
    rows = [
        [
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
        for run in runs
    ]
    head = "level | dtype | test accuracy | step ms | ratio to O0 | computed | final loss | held MiB | peak MiB"
    return _markdown(head.split(" | "), rows)


def _no_units(records: dict[str, dict[str, Any]]) -> str:
    rows = []
    for dtype in ("bfloat16", "float16"):
        runs = records[f"demo-{dtype}-no-units"]["runs"]
        seconds = {run["level"]: run["step_seconds"] for run in reversed(runs) if run["dtype"] in (dtype, "float32")}
        rows.append([dtype, *(f"{seconds[level] / seconds['O0']:.2f}" for level in ("O1", "O2", "O3"))])
    return _markdown(["ratio to O0", "O1", "O2", "O3"], rows)


def _reported(record: dict[str, Any]) -> list[str]:
    ratios = {timing["name"]: f"{timing['ratio']:.1f}" for timing in record["timings"]}
    losses = {name: f"{statistics.median(found):.3f}" for name, found in record["settings"]["losses"].items()}
    sizes = ("500", "1000", "2000")
    rows = [
        [f"{dtype}, {library}", *(ratios[f"{size}, {dtype} {library}"] for size in sizes)]
        for dtype in ("bfloat16", "float16")
        for library in ("torch", "halfstep")
    ]
    (_, *torchs), (_, *ours) = rows[:2]
    reported = ["49", "44", "499"]
    return [
        _markdown(
            ["square bfloat16 products, time divided by fp32's", *sizes],
            [
                ["torch, [as reported][146508] for another AVX2 CPU", *reported],
                ["torch", *torchs],
                ["halfstep, [emulated][emulation]", *ours],
            ],
        ),
        _markdown(
            ["loss of a small language model", "fp32", "bfloat16 weights, no masters", _WITH_MASTERS],
            [
                ["[as reported][3910] for a large one", "1.06", "1.76", ""],
                ["here", *(losses[name] for name in ("fp32", "bf16 weights", "halfstep O2, 2-byte masters"))],
            ],
        ),
        _markdown(
            ["time divided by fp32's", *(f"{size} x {size}" for size in sizes)],
            [["bfloat16, torch, as reported on another CPU", *reported], *rows],
        ),
    ]


_WITH_MASTERS = "halfstep O2, masters at 2 bytes per weight"


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows)])


def replace(page: str, table: str) -> str:
    """Return a page with a table in place of the table that begins with the same row, if the page has it."""
    head = table.partition("\n")[0]
    before, found, after = page.partition(f"{head}\n")
    return f"{before}{table}\n\n{after.partition(chr(10) * 2)[2]}" if found else page


def measure(name: str) -> dict[str, Any]:
    """Run the command of a record on this machine, and return what it measured."""
    line, variables = RUNS[name]
    program, *arguments = shlex.split(line)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        command = [sys.executable, *(["-m", program] if program == "halfstep" else []), *arguments]
        command += ["--out", folder] if program == "halfstep" else ["--json", str(out)]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=True)
        record: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    settings = " ".join(f"{variable}={value}" for variable, value in variables.items())
    for run in record.get("runs", ()):
        del run["losses"]
    return {**record, "command": f"{settings} {line}".strip(), "commit": commit.stdout.strip()}


def recorded() -> dict[str, dict[str, Any]]:
    """Return the records of ``docs/images``, by name."""
    return {name: json.loads((IMAGES / f"{name}.json").read_text(encoding="utf-8")) for name in RUNS}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.figures", description=__doc__)
    parser.add_argument("--no-runs", action="store_true", help="only write tables and picture of the recorded results")
    if not parser.parse_args().no_runs:
        for name in RUNS:
            text = json.dumps(measure(name), indent=1)
            (IMAGES / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
    records = recorded()
    (IMAGES / "demo.svg").write_text(draw(records["demo"]), encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        old = text = path.read_text(encoding="utf-8")
        for table in tables(records):
            text = replace(text, table)
        if text != old:
            path.write_text(text, encoding="utf-8")


def label(kind: str, x: float, y: float, text: str, *, end: bool = False) -> str:
    given = (f' class="{kind}"' if kind else "") + (' text-anchor="end"' if end else "")
    return f'<text x="{x:.4g}" y="{y}"{given}>{html.escape(text)}</text>'


def bar(color: str, x: float, y: float, width: float) -> str:
    return f'<rect class="{color}" x="{x}" y="{y}" width="{width:.4g}" height="{BAR}" rx="2"/>'


if __name__ == "__main__":
    main()
