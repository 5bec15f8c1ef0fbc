"""``halfstep run``: runs a script written for Apex, unchanged."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .files import check_writable
from .termination import exiting_on_sigterm

if TYPE_CHECKING:
    from ..stepping.attached import AttachedOptimizer

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

    options: dict[str, object] = {"opt-level": opt_level, "dtype": dtype, "device": device, "report": report}
    options |= {"numerics": numerics, "every": every}
    written = [f"--{name}={value}" for name, value in options.items() if value is not None]
    _check(opt_level, numerics, every, (report, numerics))
    if opt_level:
        os.environ["HALFSTEP_OPT_LEVEL"] = opt_level
    if dtype:
        os.environ["HALFSTEP_DTYPE"] = dtype
    install()
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    import torch.distributed as dist

    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(cuda_on_cpu())
        stack.enter_context(_telling_skips())
        if report is not None or numerics is not None:
            stack.enter_context(exiting_on_sigterm())
        line = ["halfstep", "run", *written, str(script), *args]
        if report is not None:
            stack.enter_context(_reported(report, script.name, line))
        if numerics is not None:
            from .run_numerics import monitored

            stack.enter_context(monitored(numerics, every or 100, script.name, line))
        runpy.run_path(str(script), run_name="__main__")
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()  # scripts for Apex never do, and torch warns without it


def _check(opt_level: str | None, numerics: Path | None, every: int | None, files: tuple[Path | None, ...]) -> None:
    """Refuse options that could only fail after the script has run."""
    from ..core.errors import HalfstepError
    from ..core.policy import parse_level

    if opt_level:
        try:
            parse_level(opt_level)
        except HalfstepError as error:
            raise click.BadParameter(str(error), param_hint="--opt-level") from None
    if every is not None and numerics is None:
        raise click.UsageError("--every goes with --numerics FILE.")
    for path in files:
        if path is not None:
            check_writable(path)


def _is_first() -> bool:
    """Whether this is the only process, or that of rank 0."""
    return int(os.environ.get("RANK", 0)) == 0


@contextmanager
def _telling_skips() -> Iterator[None]:
    """Say at the end how many steps were skipped, if any were."""
    from ..stepping.attached import creation_callbacks

    made = []

    def note(attached: AttachedOptimizer) -> None:
        made.append((attached.stepping, attached.passes.ranks))  # which let go of the optimizer

    creation_callbacks.append(note)
    try:
        yield
    finally:
        creation_callbacks.remove(note)
        counted = [stepping for stepping, ranks in made if not ranks.inside]
        skipped = sum(stepping.skipped for stepping in counted)
        if skipped and _is_first():
            steps = sum(stepping.calls for stepping in counted)
            were = "step was" if skipped == 1 else "steps were"
            click.echo(f"halfstep: {skipped} of {steps} {were} skipped for an overflow.", err=True)


@contextmanager
def _reported(path: Path, script: str, command_line: list[str]) -> Iterator[None]:
    """Write the report, however the script ends. Of several processes the one of rank 0 writes."""
    if not _is_first():
        yield
        return
    from .run_report import recording, write_report

    path = path.resolve()  # the script may go elsewhere
    ending = "It ran to its end."
    with recording() as record:
        try:
            yield
        except SystemExit as left:
            ending = ending if not left.code else f"It exited with {left.code}."
            raise
        except BaseException as error:
            ending = f"It ended with {type(error).__name__}: {error}"
            raise
        finally:
            write_report(path, record, script, command_line, ending)
