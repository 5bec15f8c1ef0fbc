"""``halfstep run``: runs a script written for Apex, unchanged."""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

import click

from .run_outputs import Outputs

__all__ = ["command"]

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--opt-level", metavar="LEVEL", help="instead of what the script asks amp.initialize for")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), help="instead of float16")
@click.option("--device", type=click.Choice(["cpu"]), help="send what the script asks of CUDA to the CPU")
@click.option("--report", metavar="FILE", type=_FILE, help="write an HTML report")
@click.option("--numerics", metavar="FILE", type=_FILE, help="save what tensors look like; FILE.html gets pictures")
@click.option("--every", metavar="N", type=click.IntRange(min=1), help="look at every N-th step  [default: 100]")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    opt_level: str | None,
    dtype: str | None,
    device: str | None,
    report: Path | None,
    numerics: Path | None,
    every: int | None,
    script: Path,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGS; its `import apex` finds halfstep."""
    from ..compat.cuda_shim import cuda_on_cpu
    from ..compat.install import install

    _check_level(opt_level)
    outputs = Outputs(report, numerics, every)
    outputs.check()
    options = {"opt-level": opt_level, "dtype": dtype, "device": device, **vars(outputs)}
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    if opt_level:
        os.environ["HALFSTEP_OPT_LEVEL"] = opt_level
    if dtype:
        os.environ["HALFSTEP_DTYPE"] = dtype
    install()
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    import torch.distributed as dist

    line = ["halfstep", "run", *given, str(script), *args]
    with cuda_on_cpu() if device == "cpu" else nullcontext(), outputs.written(script.name, line):
        runpy.run_path(str(script), run_name="__main__")
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()  # scripts for Apex never do, and torch warns without it


def _check_level(opt_level: str | None) -> None:
    if opt_level is None:
        return
    from ..core.errors import ArgumentValueError
    from ..core.policy import parse_level

    try:
        parse_level(opt_level)
    except ArgumentValueError as error:
        raise click.BadParameter(str(error), param_hint="--opt-level") from None
