"""The system's C++ compiler, and an on-disk cache of its libraries. Independent of the code that is compiled."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from pathlib import Path

from ...core.files import generated

__all__ = ["FAILURES", "available", "build", "give_up"]

FAILURES = (OSError, subprocess.SubprocessError)
"""The errors that ``build`` raises."""

logger = logging.getLogger("halfstep")

# Without -ffp-contract=off some machines fuse a multiply and an add into one operation with one rounding, and the same
# training run differs from the eager backend's. No code reads errno or traps; both hinder vectorization.
_FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_TUNED = ("-march=native", "-fopenmp")
_TIMEOUT_SECONDS = 120


@functools.cache
def available() -> bool:
    """True if there is a compiler that builds a trivial library; logs once if there is none."""
    compiler = _compiler()
    if compiler is None:
        logger.warning(
            "No C++ compiler found (CXX, c++, g++, clang++): fused optimizers on the CPU run on torch's own steps, "
            "slower and with other roundings."
        )
        return False
    try:
        build("probe", 'extern "C" int probe() { return 1; }')
    except FAILURES as error:
        give_up(error)
        return False
    return True


def give_up(error: Exception) -> None:
    """Log once that a library could not be built. Later libraries are only loaded from the cache."""
    global _gave_up
    if not _gave_up:
        _gave_up = True
        logger.warning(
            "%s cannot build a library here (%s): fused optimizers and number formats on the CPU run on torch's own "
            "ops, slower, and the optimizers with other roundings.",
            _compiler(),
            _first_line(error),
        )


_gave_up = False


@functools.cache
def build(name: str, source: str) -> ctypes.CDLL:
    """Compile C++ source into a library and load it, or load it from the cache.

    Args:
        name: a part of the file name.
        source: one translation unit; OpenMP is enabled if the compiler has it.

    Raises:
        subprocess.SubprocessError: if the compiler fails or takes longer than two minutes.
        OSError: if the result cannot be written or loaded.
    """
    compiler = _compiler() or "c++"
    flags = _flags(compiler)
    key = hashlib.sha256("\n".join((source, compiler, *flags, _processor())).encode()).hexdigest()[:20]

    def write(path: Path) -> None:
        if _gave_up:
            raise subprocess.SubprocessError("an earlier library could not be built")
        _compile(source, compiler, *flags, "-o", str(path)).check_returncode()

    return generated(f"{name}-{key}", ".so", write, lambda path: ctypes.CDLL(str(path)))


@functools.cache
def _compiler() -> str | None:
    for candidate in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if candidate and (found := shutil.which(candidate)):
            return found
    return None


@functools.cache
def _flags(compiler: str) -> tuple[str, ...]:
    """Return the flags that the compiler accepts: clang on macOS lacks -fopenmp, some targets lack -march=native."""
    probe = "#include <cmath>\n"
    tuned = [flag for flag in _TUNED if _compile(probe, compiler, flag, "-fsyntax-only").returncode == 0]
    return (*_FLAGS, *tuned)


def _compile(source: str, compiler: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [compiler, *arguments, "-x", "c++", "-"]
    return subprocess.run(command, input=source, text=True, capture_output=True, timeout=_TIMEOUT_SECONDS)


@functools.cache
def _processor() -> str:
    """Read the processor features that -march=native depends on, so that machines can share one home directory."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"


def _first_line(error: Exception) -> str:
    text = str(getattr(error, "stderr", None) or error)
    return text.strip().splitlines()[0] if text.strip() else type(error).__name__
