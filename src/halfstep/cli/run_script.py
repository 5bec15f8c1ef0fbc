"""Execution of a script in this process as by ``python SCRIPT``: ``__main__``, arguments, traceback, exit status."""

from __future__ import annotations

import importlib.util
import io
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

__all__ = ["hide_halfstep", "prepare_workers", "run_script"]


def run_script(script: str, args: Sequence[str], *, module: bool = False) -> None:
    """Run a script as ``__main__``; its exceptions and exit pass through.

    Args:
        script: the path of the script; "-" for the standard input; or the name of a module.
        args: the arguments in its ``sys.argv``.
        module: True to run a module, as ``python -m`` does.
    """
    sys.argv = [script, *args]
    if not getattr(sys.flags, "safe_path", False):  # python -P, from 3.11 on
        sys.path[0] = os.getcwd() if module else "" if script == "-" else str(Path(script).resolve().parent)
    if module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    main: Any = ModuleType("__main__")
    if script != "-":
        main.__file__ = os.path.abspath(script)
    sys.modules["__main__"] = main
    exec(_code(script), vars(main))


def _code(script: str) -> CodeType:
    if script == "-":
        return compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True)
    with io.open_code(os.path.abspath(script)) as file:
        return compile(file.read(), os.path.abspath(script), "exec", dont_inherit=True)


def prepare_workers(device: str | None) -> None:
    """Make ``import apex`` find halfstep in the Python processes that the script starts, too."""
    startup = str(Path(__file__).with_name("startup"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [startup, os.environ.get("PYTHONPATH")]))
    if device:
        os.environ["HALFSTEP_RUN_DEVICE"] = device


def hide_halfstep(hint: Callable[[BaseException], str | None]) -> None:
    """Make tracebacks begin in the script, and print a hint below an error if there is one.

    Tracebacks also leave out frames of this package and of halfstep's observers, which lie between frames of a model
    and of torch, and the search for a module or name of Apex that ends in an error.
    """
    own, here, ours = sys.excepthook, Path(__file__).parent, Path(__file__).parents[1]
    finders = ("install.py", "missing.py")
    hidden = {
        *here.iterdir(),
        *(ours / "diagnostics" / "observe").iterdir(),
        *(ours / "compat" / name for name in finders),
        *(ours / "compat" / "apex").rglob("__init__.py"),
        Path(importlib.util.__file__),
        Path("<frozen importlib.util>"),  # from Python 3.11 on
    }
    starters = {sys.modules["__main__"].__dict__.get("__file__"), runpy.__file__, "<frozen runpy>"}

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        frames = []
        while trace is not None:
            frames.append(trace)
            trace = trace.tb_next
        files = [Path(frame.tb_frame.f_code.co_filename) for frame in frames]
        first = max((i + 1 for i, file in enumerate(files) if file == Path(__file__)), default=0)
        while first < len(files) and str(files[first]) in starters:
            first += 1
        for frame, file in reversed([*zip(frames, files, strict=True)][first:]):
            if file not in hidden:
                frame.tb_next, trace = trace, frame
        own(kind, error.with_traceback(trace), trace)
        said = hint(error)
        if said:
            sys.stderr.write(f"{said}\n")

    sys.excepthook = hook
