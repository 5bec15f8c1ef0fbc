"""``halfstep run``: runs a script written for Apex, unchanged."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import click

from .files import check_script
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
@click.option("--trust-checkpoints", is_flag=True, help="let torch.load unpickle any object: for files of your own")
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as for python -m")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(
    later: list[Callable[[], None]],
    opt_level: str | None,
    dtype: str | None,
    device: str | None,
    report: Path | None,
    numerics: Path | None,
    every: int | None,
    trust_checkpoints: bool,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGS; its `import apex` finds halfstep. A SCRIPT of `-` is the standard input."""
    _check_level(opt_level, dtype)
    if module:
        _check_module(script)
    elif script != "-":
        check_script(click.get_current_context(), script)
    outputs = Outputs(report, numerics, every)
    outputs.check()
    options = {"opt-level": opt_level, "dtype": dtype, "device": device, **vars(outputs)}
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    line = ["halfstep", "run", *given, *["--trust-checkpoints"] * trust_checkpoints, *["-m"] * module, script, *args]
    if opt_level:
        os.environ["HALFSTEP_OPT_LEVEL"] = opt_level
    if dtype:
        os.environ["HALFSTEP_DTYPE"] = dtype
    if trust_checkpoints:
        from ..compat import torch_past

        torch_past.trust_checkpoints()
    # Not here: click catches what ends a script, such as KeyboardInterrupt, EOFError and a broken pipe.
    later.append(functools.partial(_run, script, args, module, device, outputs, line))


def _run(script: str, args: Sequence[str], module: bool, device: str | None, outputs: Outputs, line: list[str]) -> None:
    from ..compat.cuda_shim import cuda_on_cpu
    from ..compat.install import install
    from ..compat.torch_past import bring_back_six
    from .run_script import hide_halfstep, prepare_workers, run_script

    install()
    bring_back_six()
    prepare_workers(device)
    hide_halfstep(functools.partial(_hint, device))
    import torch.distributed as dist

    with cuda_on_cpu() if device == "cpu" else nullcontext(), outputs.written(Path(script).name, line):
        run_script(script, args, module=module)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()  # scripts for Apex never do, and torch warns without it


# ---- what is checked before anything runs


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


def _check_module(name: str) -> None:
    sys.path[0] = os.getcwd()  # where python -m looks first
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise click.BadParameter(f"No module named {name}", param_hint="-m")


def _hint(device: str | None, error: BaseException) -> str | None:
    """Advice for a script that ended because it asked for a GPU where there is none, or for a pickled object."""
    import pickle

    import torch

    from ..compat.missing import MISSING_EXTENSIONS

    if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):
        return (
            "halfstep run: since torch 2.6 torch.load reads tensors only. If the file is your own, "
            "`halfstep run --trust-checkpoints` reads everything in it."
        )
    if isinstance(error, ModuleNotFoundError) and error.name in MISSING_EXTENSIONS:
        instead = MISSING_EXTENSIONS[error.name]
        return f"halfstep run: {error.name} is an extension of Apex that is not here. Use {instead}."
    if device is not None:
        return None
    asked = any(word in str(error) for word in ("CUDA", "cuda", "NVIDIA", "no GPUs found"))
    if isinstance(error, Exception) and asked and not torch.cuda.is_available():
        return (
            "halfstep run: torch finds no CUDA device here. `halfstep run --device cpu` sends what a script asks of "
            "CUDA to the CPU."
        )
    return None
