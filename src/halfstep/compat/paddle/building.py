"""Programs that are built line by line, by the names of Paddle's: data, ops on it, and ``minimize``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...core.checks import check_kind
from ...core.errors import ArgumentTypeError, ArgumentValueError, UsageError
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
    """The programs that are being built in this thread."""

    def __init__(self) -> None:
        self.main, self.startup = Program(), Program()


class Scope:
    """The holder of parameters in Paddle. It is empty here: parameters are the model's own."""


_current = _Current()
_recording = ModuleRecording()
_scope = Scope()


def enable_static() -> None:
    """Let ``static.data`` begin programs, and give every torch optimizer ``minimize(loss)``, until ``disable_static``.

    Models are built as before, and compute as before on tensors with numbers.
    """
    _recording.on()
    torch.optim.Optimizer.minimize = _minimize  # type: ignore[attr-defined]


def disable_static() -> None:
    """Take back what ``enable_static`` did. Programs that were built run on."""
    if in_static_mode():
        _recording.off()
        del torch.optim.Optimizer.minimize  # type: ignore[attr-defined]


def in_static_mode() -> bool:
    """True after ``enable_static``, until ``disable_static``."""
    return "minimize" in vars(torch.optim.Optimizer)


def _minimize(self: torch.optim.Optimizer, loss: Value | Variable, startup_program: Program | None = None) -> None:
    """Train the program of a loss with this optimizer, in fp32; ``static.amp.decorate`` is for 16 bits.

    ``startup_program`` is accepted, without meaning here.
    """
    loss_of(loss).program.minimize(self)


def data(
    name: str,
    shape: Sequence[int | None],
    dtype: torch.dtype | str = "float32",
    device: torch.device | str | None = None,
) -> Variable:
    """An input of the program that is being built. Ops on it, and modules that are given it, are recorded.

    A program that ``minimize`` has ended begins anew with the next ``data``.

    Args:
        name: under which it is fed.
        shape: its sizes; None or -1 is any size.
        dtype: as torch has it, or its name.
        device: where the model is; None is torch's default device.

    Raises:
        UsageError: without ``enable_static()``.
        ArgumentTypeError: for a name that is no text, or a shape that is no list of numbers.
        ArgumentValueError: for a name that another input has, a size below -1, or a dtype that torch does not have.
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
    """The program that ``static.data`` adds to in this thread."""
    return _current.main


def default_startup_program() -> Program:
    """An empty program. ``exe.run`` of it does nothing: a model has the values of its parameters when it is made."""
    return _current.startup


@contextmanager
def program_guard(main_program: Program, startup_program: Program | None = None) -> Iterator[None]:
    """Have ``static.data`` add to another program inside.

    Args:
        main_program: ``static.Program()``, or one that is being built.
        startup_program: the program that ``default_startup_program()`` gives inside.

    Raises:
        ArgumentTypeError: for something else than programs.
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
    """A scope for ``amp_init(scope=)``."""
    return _scope
