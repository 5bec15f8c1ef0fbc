"""Programs that user code builds line by line, under Paddle's names: data, ops on data, and ``minimize``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..core.checks import check_kind
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from .capture import Program, Value, loss_of
from .tape import ModuleRecording, Variable

__all__ = [
    "Scope",
    "data",
    "default_main_program",
    "default_startup_program",
    "disable_static",
    "enable_static",
    "global_scope",
    "program_guard",
]


class _Current(threading.local):
    """The programs that this thread is building."""

    def __init__(self) -> None:
        self.main, self.startup = Program(), Program()


class Scope:
    """A scope, which holds parameters in Paddle. It is empty here: the model holds its parameters."""


_current = _Current()
_recording = ModuleRecording()
_scope = Scope()


def enable_static() -> None:
    """Enable ``static.data``, and give every torch optimizer a method ``minimize(loss)``, until ``disable_static``.

    Model constructors do not change, and models compute on ordinary tensors as before.
    """
    _recording.on()
    torch.optim.Optimizer.minimize = _minimize  # type: ignore[attr-defined]


def disable_static() -> None:
    """Undo ``enable_static``. Existing programs continue to run."""
    if in_static_mode():
        _recording.off()
        del torch.optim.Optimizer.minimize  # type: ignore[attr-defined]


def in_static_mode() -> bool:
    """True after ``enable_static``, until ``disable_static``."""
    return "minimize" in vars(torch.optim.Optimizer)


def _minimize(self: torch.optim.Optimizer, loss: Value | Variable, startup_program: Program | None = None) -> None:
    """Train the program of a loss with this optimizer, in fp32; ``static.amp.decorate`` is for 16 bits.

    ``startup_program`` is accepted without effect.
    """
    loss_of(loss).program.minimize(self)


def data(
    name: str,
    shape: Sequence[int | None],
    dtype: torch.dtype | str = "float32",
    device: torch.device | str | None = None,
) -> Variable:
    """Create an input of the current program, which records ops on the input and modules that are called with it.

    After ``minimize``, the next ``data`` starts the program again.

    Args:
        name: the name of the input in the feed.
        shape: the sizes of the input; None or -1 means any size.
        dtype: a torch dtype or its name.
        device: the device of the model; None means torch's default device.

    Raises:
        UsageError: without ``enable_static()``.
        ArgumentTypeError: if the name is not a string, or the shape is not a list of numbers.
        ArgumentValueError: if another input has the name, a size is below -1, or torch does not have the dtype.
    """
    if not in_static_mode():
        raise UsageError("static.data needs static mode: call static.enable_static() first.")
    check_kind("name", name, str, "a text")
    check_kind("shape", shape, (tuple, list), "a list of sizes")
    for size in shape:
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            raise ArgumentTypeError(f"shape={list(shape)!r} must have whole numbers, and None where any size fits.")
        if size is not None and size < -1:
            raise ArgumentValueError(f"shape={list(shape)!r} has a size below 0; None or -1 is any size.")
    return _current.main.new_tape().data(name, shape, _dtype(dtype), device)


def _dtype(given: torch.dtype | str) -> torch.dtype:
    found = getattr(torch, given.removeprefix("torch."), None) if isinstance(given, str) else given
    if not isinstance(found, torch.dtype):
        raise ArgumentValueError(f"dtype={given!r} is no dtype of torch; write 'float32', 'int64' or the like.")
    return found


def default_main_program() -> Program:
    """Return the program to which ``static.data`` adds inputs in this thread."""
    return _current.main


def default_startup_program() -> Program:
    """Return an empty program. ``exe.run`` on it does nothing, because models initialize their parameters."""
    return _current.startup


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Open a block in which ``static.data`` adds to another program.

    Args:
        main_program: a new ``static.Program()``, or a program under construction.
        startup_program: the program that ``default_startup_program()`` returns in the block.

    Raises:
        ArgumentTypeError: for arguments that are not programs.
    """
    check_kind("main_program", main_program, Program, "a static.Program")
    if startup_program is not None:
        check_kind("startup_program", startup_program, Program, "a static.Program")
    before = _current.main, _current.startup
    _current.main, _current.startup = main_program, startup_program or _current.startup
    try:
        yield
    finally:
        _current.main, _current.startup = before


def global_scope() -> Scope:
    """Return a scope for ``amp_init(scope=)``."""
    return _scope
