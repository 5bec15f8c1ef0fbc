"""The script argument of ``halfstep run`` and ``halfstep doctor``: its common options, and its execution."""

from __future__ import annotations

import difflib
import errno
import functools
import importlib.util
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ..core.text import listed

__all__ = ["SCRIPT_SETTINGS", "Script", "takes_script"]

SCRIPT_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Context settings of a command that takes a script: arguments after the script belong to the script."""


def takes_script(required: bool) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Give a command the options and arguments that describe a ``Script``, which is its first argument.

    The command returns a function to call outside of click, or None. click would catch exceptions that end a script:
    KeyboardInterrupt, EOFError, a broken pipe.

    Args:
        required: True if the command needs a script; otherwise the argument is None if no script is given.
    """
    trusts = "let torch.load unpickle any object: for files of your own"

    def decorate(command: Callable[..., Any]) -> Callable[..., None]:
        @click.option("--device", type=click.Choice(["cpu"]), help="send what the script asks of CUDA to the CPU")
        @click.option("--trust-checkpoints", is_flag=True, help=trusts)
        @click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module, as for python -m")
        @click.argument("script", required=required)
        @click.argument("args", nargs=-1, type=click.UNPROCESSED)
        @click.pass_context
        @functools.wraps(command)
        def call(ctx: click.Context, /, script: str | None, args: tuple[str, ...], **given: Any) -> None:
            about = {name: given.pop(name) for name in ("module", "device", "trust_checkpoints")}
            found = None
            if script is not None:
                found = Script(script, args, **about)
                found.check(ctx)
            for param in ctx.command.params:
                if found is None and about.get(param.name or ""):
                    raise click.UsageError(f"{param.opts[0]} goes with a SCRIPT.")
            later = command(found, **given)
            if later is not None:
                ctx.obj.append(later)

        return call

    return decorate


@dataclass(frozen=True)
class Script:
    """A user's script.

    Attributes:
        name: the path of the script; "-" for the standard input; or the name of a module.
        args: the arguments in its ``sys.argv``.
        module: True to run a module, as ``python -m`` does.
        device: "cpu" redirects requests for CUDA to the CPU.
        trust_checkpoints: True to let ``torch.load`` unpickle any object.
    """

    name: str
    args: tuple[str, ...]
    module: bool
    device: str | None
    trust_checkpoints: bool

    def check(self, ctx: click.Context) -> None:
        """Refuse an argument that is not a script: a mistyped option, a folder, a missing file.

        Raises:
            click.UsageError: with the given argument and a suggestion.
        """
        if self.module:
            _check_module(self.name)
        elif self.name != "-":
            _check_path(ctx, self.name)

    def line(self, command: str, *options: str) -> list[str]:
        """Compose the command line that runs the script with other options."""
        given = [f"--device={self.device}"] if self.device else []
        given += ["--trust-checkpoints"] * self.trust_checkpoints + ["-m"] * self.module
        return ["halfstep", command, *options, *given, self.name, *self.args]

    @contextmanager
    def prepared(self, command: str) -> Iterator[None]:
        """Make Apex, and names that torch removed, importable for the script and its child processes within the block.

        Args:
            command: "run" or "doctor", for the hint on an error.
        """
        from ..compat import torch_past
        from ..compat.cuda_shim import cuda_on_cpu
        from ..compat.install import install
        from .run_script import hide_halfstep, prepare_workers

        if self.trust_checkpoints:
            torch_past.trust_checkpoints()
        install()
        torch_past.bring_back_six()
        prepare_workers(self.device)
        hide_halfstep(functools.partial(_hint, f"halfstep {command}", self.device))
        with cuda_on_cpu() if self.device == "cpu" else nullcontext():
            yield

    def run(self) -> None:
        """Run the script as ``__main__``; its exceptions and exit pass through."""
        from .run_script import run_script

        run_script(self.name, self.args, module=self.module)


def _check_module(name: str) -> None:
    sys.path[0] = os.getcwd()  # python -m searches it first
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        raise click.BadParameter(f"No module named {name}", param_hint="-m")


def _check_path(ctx: click.Context, script: str) -> None:
    if script.startswith("-"):
        option = script.partition("=")[0]
        known = [name for param in ctx.command.params for name in (*param.opts, *param.secondary_opts)]
        known = [name for name in (*known, "--help") if name.startswith("-")]
        raise click.NoSuchOption(option, possibilities=difflib.get_close_matches(option, known, n=1), ctx=ctx)
    try:
        is_folder = stat.S_ISDIR(os.stat(script).st_mode)
        if not os.access(script, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except FileNotFoundError:
        raise click.BadParameter(f"File {script!r} does not exist.", ctx, param_hint="SCRIPT") from None
    except OSError as error:
        message = f"File {script!r} cannot be read: {error.strerror}."
        raise click.BadParameter(message, ctx, param_hint="SCRIPT") from None
    if is_folder:
        inside = sorted(each.name for each in Path(script).glob("*.py"))
        names = f": {listed(inside)}" if inside else ""
        raise click.BadParameter(f"{script!r} is a folder; name a script{names}.", ctx, param_hint="SCRIPT")


def _hint(command: str, device: str | None, error: BaseException) -> str | None:
    """Compose a hint for a script that asked for a missing GPU, loaded a pickled object, or mixed dtypes."""
    import pickle

    import torch

    if isinstance(error, pickle.UnpicklingError) and "weights_only" in str(error):
        return (
            f"{command}: since torch 2.6 torch.load reads tensors only. If the file is your own, "
            f"`{command} --trust-checkpoints` reads everything in it."
        )
    mixed = any(words in str(error) for words in ("same dtype", "scalar type", "should be the same"))
    if type(error) is RuntimeError and mixed and "halfstep.amp" in sys.modules:
        return (
            f"{command}: at O2 and O3 a part that is called past its model, as model.encoder(x), casts no inputs. Call "
            "the model, give it a method that calls the part, or pass cast_ops=True to amp.initialize."
        )
    if device is not None or isinstance(error, ImportError):  # for example of fused_adam_cuda
        return None
    asked = any(word in str(error) for word in ("CUDA", "cuda", "NVIDIA", "no GPUs found"))
    if isinstance(error, Exception) and asked and not torch.cuda.is_available():
        return (
            f"{command}: torch finds no CUDA device here. `{command} --device cpu` sends what a script asks of "
            "CUDA to the CPU."
        )
    return None
