"""Python processes that do not import torch anew, which takes two seconds: they are forked from one that has done so.

Nor do they import Dynamo, which the first optimizer of torch imports, and which takes three seconds more.

``python("-m", "halfstep", "run", "train.py")`` is ``subprocess.run([sys.executable, "-m", ...], capture_output=True)``.
What a process does before torch is there, such as the options of Python itself and ``sitecustomize``, needs a real one.
So does what it does after its exit functions, such as an error in a ``__del__``: a forked process ends there.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["python"]

STREAMS = ("stdin", "stdout", "stderr")


def python(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    quiet: bool = False,
    timeout: float = 120.0,
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end.

    Args:
        *arguments: ``-m`` with a module, ``-c`` with code, or a script; then what it is given.
        cwd: its folder; by default that of this process.
        env: its variables; by default those of this process.
        stdin: what it can read.
        quiet: without warnings, as by ``-W ignore``.
        timeout: seconds; then it is killed.
    """
    if any(name.startswith("COVERAGE_PROCESS") for name in os.environ):  # forks are not measured
        command = [sys.executable, *(["-W", "ignore"] if quiet else []), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout, cwd=cwd, env=env, input=stdin
        )
    with tempfile.TemporaryDirectory(prefix="halfstep-python-") as folder:
        files = {name: Path(folder, name) for name in STREAMS}
        for name, file in files.items():
            file.write_text(stdin if name == "stdin" else "")
        job = {
            "arguments": arguments,
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "quiet": quiet,
            "files": {name: str(file) for name, file in files.items()},
        }
        answers = _server()
        answers.write(json.dumps(job) + "\n")
        answers.flush()
        pid = int(answers.readline())
        killer = threading.Timer(timeout, os.kill, (pid, signal.SIGKILL))
        killer.start()
        status = int(answers.readline())
        killer.cancel()
        return subprocess.CompletedProcess(
            [sys.executable, *arguments], status, files["stdout"].read_text(), files["stderr"].read_text()
        )


@functools.cache
def _server() -> Any:
    """The connection to the process that forks; it ends with this one."""
    ours, theirs = socket.socketpair()
    compiled = tempfile.TemporaryDirectory(prefix="halfstep-compiled-")
    command = [sys.executable, __file__, str(theirs.fileno()), compiled.name]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # Dynamo imports Triton
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=env)
    theirs.close()
    connection = ours.makefile("rw")
    ours.close()

    def end() -> None:
        connection.close()
        process.wait(10)
        compiled.cleanup()

    atexit.register(end)
    return connection


def _serve(connection: Any) -> dict[str, Any] | None:
    """In the process that forks: answer jobs with the id and the status of a process; in that process, the job."""
    for line in connection:
        if not (pid := os.fork()):
            return json.loads(line)
        connection.write(f"{pid}\n")
        connection.flush()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        connection.write(f"{status}\n")
        connection.flush()
    return None


def _become(job: dict[str, Any], compiled: str) -> None:
    """Go on as the process that was asked for. What it imports is compiled once, also where Python is to write nothing
    beside the sources.
    """
    sys.dont_write_bytecode, sys.pycache_prefix = False, compiled
    for descriptor, (name, file) in enumerate(job["files"].items()):
        os.dup2(os.open(file, os.O_RDONLY if name == "stdin" else os.O_WRONLY | os.O_APPEND), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    warnings.resetwarnings()
    sys.warnoptions[:] = ["ignore"] if job["quiet"] else []
    if job["quiet"]:
        warnings.simplefilter("ignore")
    first, *rest = job["arguments"]
    if first in ("-m", "-c"):
        sys.path[0] = job["cwd"] if first == "-m" else ""
        sys.argv = [first, *rest[1:]]
    else:
        sys.path[0] = str(Path(first).resolve().parent)
        sys.argv = [first, *rest]
    status = 0
    try:
        if first == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(first, run_name="__main__")
    except SystemExit as left:
        status = (left.code or 0) & 0xFF if isinstance(left.code, int | None) else 1
        if not isinstance(left.code, int | None):
            sys.stderr.write(f"{left.code}\n")
    except BaseException as error:  # noqa: BLE001 - as Python does, but with a traceback that does not begin here
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # to free all that torch made takes longer than most processes


if __name__ == "__main__":
    import torch._dynamo  # noqa: F401 - what this is for

    gc.freeze()  # so that a process does not copy the memory of all of this when it ends
    with socket.socket(fileno=int(sys.argv[1])) as _given:
        _job = _serve(_given.makefile("rw"))
    if _job is not None:
        _become(_job, sys.argv[2])
