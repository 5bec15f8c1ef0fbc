"""``halfstep doctor``: reports the abilities of this machine and installation, with advice on level and dtype."""

from __future__ import annotations

import functools
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from .files import check_writable
from .script import SCRIPT_SETTINGS, Script, takes_script

if TYPE_CHECKING:
    import torch
    from rich.table import Table

__all__ = ["Advice", "advise", "command"]


class Advice(NamedTuple):
    """The advice for training on a device."""

    level: str
    dtype: torch.dtype
    reason: str

    def __str__(self) -> str:
        return f'opt_level="{self.level}"' + ("" if self.level == "O0" else f", dtype={self.dtype}")


@click.command(context_settings=SCRIPT_SETTINGS, epilog="Example: halfstep doctor train.py --lr 0.1")
@click.option("--json", "as_json", is_flag=True, help="print JSON, for other programs to read")
@click.option("--html", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="write an HTML page")
@takes_script(required=False)
def command(script: Script | None, as_json: bool, html: Path | None) -> Callable[[], None] | None:
    """Print the devices, what each supports, what is installed, and which level and dtype to use.

    With SCRIPT, run it with ARGS until its eighth optimizer step, and print what is wrong, where it begins and what to
    do. Exits with 1 if that is an error. A SCRIPT of `-` is the standard input.
    """
    if script is not None:
        check_writable(html)
        return functools.partial(_check, script, as_json, html)
    if html is not None:
        raise click.UsageError("--html goes with a SCRIPT.")
    import torch

    from .machine import describe_machine

    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    facts = describe_machine(torch.device("cpu"))
    known = [_as_dict(each, facts["CPU"]) for each in devices]
    if as_json:
        click.echo(json.dumps({"devices": known, "facts": facts | _installed()}, indent=2))
        return None
    from rich.console import Console

    console = Console()
    rows = [
        [each["device"], each["name"], *("fast" if half in each["fast"] else "as fp32" for half in each["emulated"])]
        for each in known
    ]
    console.print(_table("device", "what it is", "float16", "bfloat16", rows=rows))
    facts.pop("CPU")
    console.print(_table("", "", rows=(facts | _installed()).items()))
    for line in map(_emulation, known):
        if line:
            console.print(line, highlight=False)
    for each in devices:
        advice = advise(each)
        console.print(f"On {each} train with {advice}: {advice.reason}", highlight=False)
    return None


def _check(script: Script, as_json: bool, html: Path | None) -> None:
    """Print the diagnosis of a script. JSON is alone on stdout, and the output of the script goes to stderr."""
    from ..diagnosis import of_run

    with script.prepared("doctor"), _stdout_on_stderr() if as_json else nullcontext():
        found = of_run(script.run)
    name = Path(script.name).name
    if found is None:
        sys.exit(f"Error: {name} has ended without a step of an optimizer on a model that it called.")
    if html is not None:
        found.report(html, shlex.join(script.line("doctor", f"--html={html}")))
        click.echo(f"halfstep: wrote {html}", err=True)
    if as_json:
        findings = [vars(each) for each in found.findings]
        known = {"script": script.name, "findings": findings, "steps": found.steps, "skipped": found.skipped}
        click.echo(json.dumps(_plain(known | {"losses": found.losses}), indent=2, allow_nan=False))
    else:
        click.echo(str(found))
    if any(finding.severity == "error" for finding in found.findings):
        sys.exit(1)
    if not as_json:
        line = shlex.join(script.line("run", "--numerics", "numerics.html"))
        click.echo(f"A fault that only later steps show, such as a learning rate that is too high: {line}")


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Redirect stdout of this process and its child processes to stderr."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(own, 1)
        os.close(own)


def _as_dict(device: torch.device, cpu: str) -> dict[str, Any]:
    """Collect what is known of a device: its 16-bit dtypes, and the classes of ops for which it has no units."""
    from ..core.dtypes import HALF_DTYPES, dtype_name
    from ..core.hardware import has_units, slow_reason
    from ..core.oplists.tables import KINDS

    advice = advise(device)
    return {
        "device": str(device),
        "name": cpu if device.type == "cpu" else _describe_gpu(device),
        "fast": [dtype_name(half) for half in HALF_DTYPES if slow_reason(device, half) is None],
        "emulated": {
            dtype_name(half): [kind for kind in KINDS if not has_units(device, half, kind)] for half in HALF_DTYPES
        },
        "advice": {"opt_level": advice.level, "dtype": dtype_name(advice.dtype), "reason": advice.reason},
    }


def _plain(value: Any) -> Any:
    """Convert a value to JSON, which has neither inf nor NaN nor dtypes."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _emulation(known: dict[str, Any]) -> str | None:
    """Describe the ops that a device emulates by fp32 kernels with 16-bit rounding; None if there are none."""
    from ..core.oplists.tables import KINDS

    lacks = [
        name if len(kinds) == len(KINDS) else f"{name} ({', '.join(kinds)})"
        for name, kinds in known["emulated"].items()
        if kinds
    ]
    if not lacks:
        return None
    return (
        f"{known['device']} has no units for {' and '.join(lacks)}. halfstep emulates it: the same rounding as on "
        "a chip that has them, at about the speed of fp32."
    )


def advise(device: torch.device) -> Advice:
    """Choose the level and dtype to begin with on a device: the fastest combination that trains as safely as fp32."""
    import torch

    from ..core.hardware import slow_reason

    weights = "weights of 16 bits with an fp32 copy behind each"
    if slow_reason(device, torch.bfloat16) is None:
        return Advice("O2", torch.bfloat16, f"{weights}; it needs no loss scale.")
    if slow_reason(device, torch.float16) is None:
        return Advice("O2", torch.float16, f"{weights}, and a loss scale that adapts.")
    why = "this is fp32. Computing in 16 bits is no faster here; O2 would save memory only."
    return Advice("O0", torch.float32, why)


def _describe_gpu(device: torch.device) -> str:
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, {memory:.0f} GiB"


def _table(*names: str, rows: Iterable[Iterable[str]]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False, show_header=any(names))
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _installed() -> dict[str, str]:
    """Describe torch's build and the compilers for kernels."""
    import torch

    from ..kernels import backend_for

    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built_for = next((f"{name} {version}" for name, version in builds.items() if version), "the CPU only")
    return {
        "torch is built for": built_for,
        "C++ compiler": _cpp_compiler() or "none found: torch.compile cannot make kernels for the CPU",
        "fused optimizers": ", ".join(f"{backend_for(kind)} on {kind}" for kind in kinds),
        "Triton": "installed" if find_spec("triton") else "not installed: torch.compile cannot make kernels for a GPU",
    }


def _cpp_compiler() -> str | None:
    """Find the compiler that torch would call: ``$CXX``, or one with a usual name."""
    import shutil

    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++", "cl"]
    return next((path for name in names if name and (path := shutil.which(name))), None)
