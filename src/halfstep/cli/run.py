"""``halfstep run``: runs a script written for Apex, unchanged."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import click

from .run_outputs import Outputs
from .script import SCRIPT_SETTINGS, Script, script_options

__all__ = ["command"]

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(context_settings=SCRIPT_SETTINGS)
@click.option("--opt-level", metavar="LEVEL", help="instead of what the script asks amp.initialize for")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), help="instead of float16")
@click.option("--report", metavar="FILE", type=_FILE, help="write an HTML report")
@click.option("--numerics", metavar="FILE", type=_FILE, help="save what tensors look like; FILE.html gets pictures")
@click.option("--every", metavar="N", type=click.IntRange(min=1), help="every N-th step  [default: 20 first, 100th]")
@script_options(required=True)
@click.pass_obj
def command(
    later: list[Callable[[], None]],
    opt_level: str | None,
    dtype: str | None,
    report: Path | None,
    numerics: Path | None,
    every: int | None,
    device: str | None,
    trust_checkpoints: bool,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGS; its `import apex` finds halfstep. A SCRIPT of `-` is the standard input."""
    _check_level(opt_level, dtype)
    found = Script(script, args, module, device, trust_checkpoints)
    found.check(click.get_current_context())
    outputs = Outputs(report, numerics, every)
    outputs.check()
    options = {"opt-level": opt_level, "dtype": dtype, **vars(outputs)}
    line = found.line("run", *(f"--{name}={value}" for name, value in options.items() if value is not None))
    if opt_level:
        os.environ["HALFSTEP_OPT_LEVEL"] = opt_level
    if dtype:
        os.environ["HALFSTEP_DTYPE"] = dtype
    # Deferred, because click would catch exceptions that end a script: KeyboardInterrupt, EOFError, a broken pipe.
    later.append(functools.partial(_run, found, outputs, line))


def _run(script: Script, outputs: Outputs, line: list[str]) -> None:
    with script.prepared("run"):
        import torch.distributed as dist

        with outputs.written(Path(script.name).name, line):
            script.run()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()  # scripts for Apex never call it, and torch then warns


def _check_level(opt_level: str | None, dtype: str | None) -> None:
    if opt_level is None:
        return
    import torch

    from ..core.errors import ArgumentValueError
    from ..core.policy import parse_level

    try:
        parse_level(opt_level, None if dtype is None else getattr(torch, dtype))
    except ArgumentValueError as error:
        raise click.BadParameter(str(error), param_hint="--opt-level") from None
