"""``halfstep run``: runs a script written for Apex, unchanged."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from .run_outputs import Outputs, is_first
from .script import SCRIPT_SETTINGS, Script, takes_script

__all__ = ["command"]

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(context_settings=SCRIPT_SETTINGS, epilog="Example: halfstep run --opt-level O2 train.py --lr 0.1")
@click.option("--opt-level", "--level", metavar="LEVEL", help="instead of what the script asks amp.initialize for")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), help="instead of float16")
@click.option("--report", metavar="FILE", type=_FILE, help="write an HTML report")
@click.option("--numerics", metavar="FILE", type=_FILE, help="save what tensors look like; FILE.html gets pictures")
@click.option("--every", metavar="N", type=click.IntRange(min=1), help="every N-th step  [default: 20 first, 100th]")
@takes_script(required=True)
def command(
    script: Script,
    opt_level: str | None,
    dtype: str | None,
    report: Path | None,
    numerics: Path | None,
    every: int | None,
) -> Callable[[], None]:
    """Run SCRIPT with ARGS; its `import apex` finds halfstep. A SCRIPT of `-` is the standard input."""
    opt_level = _check_level(opt_level, dtype)
    outputs = Outputs(report, numerics, every)
    outputs.check()
    options = {"opt-level": opt_level, "dtype": dtype, **vars(outputs)}
    line = script.line("run", *(f"--{name}={value}" for name, value in options.items() if value is not None))
    if opt_level:
        os.environ["HALFSTEP_OPT_LEVEL"] = opt_level
    if dtype:
        os.environ["HALFSTEP_DTYPE"] = dtype
    return functools.partial(_run, script, outputs, line, opt_level)


def _run(script: Script, outputs: Outputs, line: list[str], opt_level: str | None) -> None:
    with script.prepared("run"):
        import torch.distributed as dist

        with outputs.written(Path(script.name).name, line), _telling_if_unused(opt_level):
            script.run()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()  # scripts for Apex never call it, and torch then warns


@contextmanager
def _telling_if_unused(opt_level: str | None) -> Iterator[None]:
    """Print at the end that the opt level changed nothing, if this process trained and never called amp.initialize.

    A launcher does not train itself: the processes that it starts do, and each of them reads the level.
    """
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    stepped: set[bool] = set()
    hook = register_optimizer_step_pre_hook(lambda *_: stepped.add(True))
    try:
        yield
    finally:
        hook.remove()
        session = sys.modules.get("halfstep.amp.session")
        if opt_level and stepped and is_first() and (session is None or session.latest.session is None):
            click.echo("halfstep: no amp.initialize was called: --opt-level changed nothing.", err=True)


def _check_level(given: str | None, dtype: str | None) -> str | None:
    """Return an opt level in capitals; on a command line either case is clear."""
    opt_level = given and given.upper()
    if opt_level is None:
        return None
    import torch

    from ..core.errors import ArgumentValueError
    from ..core.policy import parse_level

    try:
        parse_level(opt_level, None if dtype is None else getattr(torch, dtype))
    except ArgumentValueError as error:
        raise click.BadParameter(str(error), param_hint="--opt-level") from None
    return opt_level
