"""Check a change on a machine with a GPU: run the tests marked gpu, then the benchmarks, in 8 minutes.

It writes gpu_check.json (what ran, how it ended, how long it took), pytest.txt and one JSON file for each benchmark
into $OUT, or into ./gpu-check if OUT is not set. It needs torch and pytest::

    PYTHONPATH=src python3 -m benchmarks gpu_check

With ``--report gpu.html`` it also writes one page and, beside it, one JSON file with all of this in it, to be sent in::

    PYTHONPATH=src python3 -m benchmarks gpu_check --report gpu.html
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from halfstep.cli.machine import describe_machine
from halfstep.diagnostics.pages import element, facts, header, made_by, note, section, table, write_page

NO_TESTS = 5  # pytest's exit status if it found no tests to run

BENCHMARKS = {
    "simplenet-float16": ["simplenet", "--dtype", "float16"],
    "simplenet-bfloat16": ["simplenet", "--dtype", "bfloat16"],
    "scaler_cost": ["scaler_cost"],
    "op_cost": ["op_cost"],
    "fused_step": ["fused_step"],
    "graph": ["graph"],
    "train_step-float16": ["train_step", "--dtype", "float16"],
    "train_step-bfloat16": ["train_step"],
    "simplenet-float16-small": ["simplenet", "--dtype", "float16", "--width", "1024", "--batch", "256"],
    "scaler-cost-100": ["scaler_cost", "--tensors", "100"],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=460.0, help="time for all of it (default 460)")
    parser.add_argument("--report", type=Path, metavar="PAGE", help="write one page, and one .json file beside it")


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
        print(
            "gpu_check: torch finds no CUDA device here, so nothing was checked and no report was written. Run it on a "
            f"machine with an NVIDIA GPU, with a torch for CUDA; here torch {torch.__version__} is built for {built}.",
            file=sys.stderr,
        )
        return 2
    out = Path(os.environ.get("OUT", "gpu-check"))
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.seconds
    record: dict[str, object] = {"machine": describe_machine(torch.device("cuda"))}
    # If the tests are slow, a quarter of the time is left for the benchmarks.
    tests = _call([sys.executable, "-m", "pytest", "-m", "gpu", "-q"], 0.75 * args.seconds, out / "pytest.txt")
    record["tests"] = tests
    failed = tests["status"] not in (0, NO_TESTS)
    benchmarks = {}
    for i, (name, command) in enumerate(BENCHMARKS.items()):
        share = (deadline - time.monotonic()) / (len(BENCHMARKS) - i)
        timing = ["--device", "cuda", "--steps", "50", "--max-seconds", f"{max(5.0, 0.5 * share):.0f}"]
        full = [sys.executable, "-m", "benchmarks", *command, *timing, "--json", str(out / f"{name}.json")]
        benchmarks[name] = _call(full, max(30.0, share))
        failed = failed or benchmarks[name]["status"] != 0
    record["benchmarks"] = benchmarks
    record["passed"] = not failed
    (out / "gpu_check.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if args.report is not None:
        write_report(args.report, record, out)
    print(f"gpu_check: {'FAILED' if failed else 'passed'}, written to {args.report or out}")
    return int(failed)


def write_report(page: Path, record: dict[str, Any], out: Path) -> None:
    """Write a page for people and, beside it, one JSON file with the same and every figure.

    Args:
        page: the path of the page; the other has its name with ``.json``.
        record: what ran, and how it ended.
        out: the folder with a JSON file for each benchmark that wrote one.
    """
    figures = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(out.glob("*.json"))}
    figures.pop("gpu_check", None)
    whole = {**record, "figures": figures}
    page.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    ran = {"tests marked gpu": record["tests"], **record["benchmarks"]}
    rows = [[name, _ended(each["status"]), f"{each['seconds']:g}", each["command"]] for name, each in ran.items()]
    ending = "Everything ended well." if record["passed"] else "Something failed: see the last lines below."
    outputs = [section(name, element("pre", "\n".join(each["last_lines"]))) for name, each in ran.items()]
    command = f"python -m benchmarks gpu_check --report {page.name}"
    parts = [
        header("gpu_check", record["machine"].get("GPU", "no GPU"), made_by(command)),
        note(ending),
        section("What ran", table(["name", "ended", "seconds", "command"], rows)),
        section("The machine", facts(record["machine"])),
        *outputs,
    ]
    write_page(page, "gpu_check", parts)


def _ended(status: int | None) -> str:
    if status is None:
        return "out of time"
    return "no tests" if status == NO_TESTS else "well" if status == 0 else f"failed ({status})"


def _call(command: list[str], seconds: float, log: Path | None = None) -> dict[str, object]:
    """Run a command, print its output, and return how it ended. The status is None if its time ran out."""
    began = time.monotonic()
    print("$", " ".join(command[1:]), flush=True)
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds, check=False
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as expired:
        status, output = None, (expired.stdout or b"").decode(errors="replace")
    print(output, flush=True)
    if log is not None:
        log.write_text(output, encoding="utf-8")
    return {
        "command": " ".join(command[1:]),
        "status": status,
        "seconds": round(time.monotonic() - began, 1),
        "last_lines": output.strip().splitlines()[-20:],
    }
