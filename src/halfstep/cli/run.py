"""``halfstep run``: runs a script written for Apex, unchanged."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import click

__all__ = ["command"]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--opt-level", metavar="LEVEL", help="instead of what the script asks amp.initialize for")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), help="instead of float16")
@click.option("--device", type=click.Choice(["cpu"]), help="send what the script asks of CUDA to the CPU")
@click.option("--report", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="write an HTML report")
@click.argument("script", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    opt_level: str | None,
    dtype: str | None,
    device: str | None,
    report: Path | None,
    script: Path,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGS; its `import apex` finds halfstep."""
    from ..compat.cuda_shim import cuda_on_cpu
    from ..compat.install import install

    if opt_level:
        os.environ["HALFSTEP_OPT_LEVEL"] = opt_level
    if dtype:
        os.environ["HALFSTEP_DTYPE"] = dtype
    install()
    sys.argv = [str(script), *args]
    sys.path.insert(0, str(script.resolve().parent))
    import torch.distributed as dist

    with cuda_on_cpu() if device == "cpu" else nullcontext(), _reported(report, script, args):
        runpy.run_path(str(script), run_name="__main__")
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()  # scripts for Apex never do, and torch warns without it


@contextmanager
def _reported(path: Path | None, script: Path, args: tuple[str, ...]) -> Iterator[None]:
    """Write the report, however the script ends. Of several processes the one of rank 0 writes."""
    if path is None or int(os.environ.get("RANK", 0)) > 0:
        yield
        return
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise click.ClickException(f"--report needs {error.name}: pip install 'halfstep[demo]'") from None
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
            write_report(path, record, script.name, ["halfstep run", str(script), *args], ending)
