"""What ``torch.compile`` meets of op casting: scopes that are entered while it traces, and functions marked for it.

Dynamo follows function modes, also across graph breaks, where it can find them again: they lie in ``_modes``. It does
not keep native autocast that one hook turns on and another off (torch 2.13: AOTAutograd drops the calls), so the
tables for models leave nothing to it, and turn it off for each op that it would touch.

Scopes are traced: they may use attributes of the thread, constants and the stack of modes, and nothing else.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from ..core.oplists.tables import NATIVE
from ..core.torch_compat import (
    FrameAction,
    FrameExecStrategy,
    enter_autocast,
    exit_autocast,
    never_traced,
    set_code_exec_strategy,
    traced_as_constant,
    tracer_follows_autocast,
)
from .config import CastingConfig, config_of
from .current import is_current, thread
from .dispatch import CastMode, function_modes, set_function_modes

__all__ = ["abandon", "eager", "enter_model", "enter_scope", "is_running", "leave", "not_by_itself", "without_ours"]

F = TypeVar("F", bound=Callable[..., Any])
_EVAL_FRAME = os.path.join("torch", "_dynamo", "eval_frame.py")

_modes: dict[str, CastMode] = {}


def not_by_itself(hook: F) -> F:
    """Mark a hook: Dynamo follows it inside of what it compiles, but compiles neither it nor its callees alone.

    Where a whole module call is compiled, its hooks are a part of that. But of a module of the user's Dynamo compiles
    ``forward``, and each hook as a program of its own (torch 2.13): there a hook must put things in force for real.
    """
    set_code_exec_strategy(hook.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))
    return hook


# Where Dynamo skips a frame, as that of an LSTM, it would compile each call of the mode as a program of its own.
not_by_itself(CastMode.__torch_function__)


def eager(function: F) -> F:
    """Mark a function that handles gradients or steps: Dynamo does not look into it and runs it as it is.

    As ``torch.compiler.disable``, whose wrapper costs some microseconds a call (torch 2.13).
    """
    return not_by_itself(never_traced(function, "halfstep handles gradients and steps as they are"))


@traced_as_constant
def _prepare_mode(key: str, explicit: bool) -> str:
    """Have the mode of a casting ready. Dynamo calls this while it traces, and does not look into it."""
    name = f"{key} {explicit}"
    if name not in _modes:
        mode = _modes[name] = CastMode()
        config_of(key).apply_to(mode, None, explicit=explicit)
        if explicit:
            mode.native = ()
    return name


def without_ours(modes: list[TorchFunctionMode]) -> list[TorchFunctionMode]:
    """The modes that are not ours."""
    return [mode for mode in modes if not isinstance(mode, CastMode)]


def enter_scope(casting: CastingConfig) -> None:
    """Put a casting of the user's in force, in a ``with`` block: there a newer Dynamo keeps native autocast too."""
    explicit = not tracer_follows_autocast()
    mode = _modes[_prepare_mode(casting.key, explicit)]
    devices = () if explicit else [device for device in mode.devices if device in NATIVE]
    native = [enter_autocast(device, mode.dtype, device in mode.native, False) for device in devices]
    _push(mode, casting.key, True, native)


def enter_model(casting: CastingConfig) -> None:
    """Put the casting of a model in force, unless it is already, or an explicit scope around it decides."""
    # In Dynamo of torch 2.11 is_exporting() is always true.
    if thread.explicit or (is_current(casting) and (casting.is_noop or not torch.compiler.is_exporting())):
        thread.traced.append(None)
    else:
        explicit = not casting.keeps_autocast or bool(thread.key)  # as in eager mode
        _push(_modes[_prepare_mode(casting.key, explicit)], casting.key, False, [])


def _push(mode: CastMode, key: str, explicit: bool, native: list[Any]) -> None:
    before = function_modes()
    thread.traced.append((before, thread.key, thread.explicit, native))
    set_function_modes([*without_ours(before), mode])
    thread.key, thread.explicit = key, explicit


def leave() -> None:
    """Put back what was before the latest ``enter_scope`` or ``enter_model``."""
    record = thread.traced.pop()
    if record is not None:
        before, thread.key, thread.explicit, native = record
        set_function_modes(before)
        for entered in native:
            exit_autocast(entered)


def is_running() -> bool:
    """Whether compiled code is running in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(_EVAL_FRAME):
        frame = frame.f_back
    return frame is not None


def abandon() -> None:
    """Put back what was before compiled code that was interrupted after a graph break."""
    while thread.traced:
        leave()
