"""Scopes of op casting that ``torch.compile`` meets while it traces.

Dynamo follows function modes, also across graph breaks, where it can find them again: they lie in ``_modes``. It does
not keep native autocast that one hook turns on and another off (torch 2.13: AOTAutograd drops the calls), so the
tables for models leave nothing to it, and turn it off for each op that it would touch.

What runs here is traced: attributes of the thread, constants and the stack of modes are all that it may use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from ..core.oplists.tables import NATIVE
from .mode import CastMode

if TYPE_CHECKING:
    from .in_force import Thread
    from .spec import CastingSpec

__all__ = [
    "abandon",
    "eager",
    "enter_model",
    "enter_scope",
    "is_running",
    "known",
    "leave",
    "not_by_itself",
    "others",
    "put_stack",
    "stack",
]

F = TypeVar("F", bound=Callable[..., Any])
_EVAL_FRAME = os.path.join("torch", "_dynamo", "eval_frame.py")

known: dict[str, CastingSpec] = {}
"""Every casting that was made, by its key, which Dynamo takes for a constant."""

_modes: dict[str, CastMode] = {}


def _prepare(key: str, explicit: bool) -> str:
    """Have the mode of a casting ready. Dynamo calls this while it traces, and does not look into it."""
    name = f"{key} {explicit}"
    if name not in _modes:
        mode = _modes[name] = CastMode()
        known[key].set_up(mode, None, explicit=explicit)
        if explicit:
            mode.native = ()
    return name


_prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]


def stack() -> list[TorchFunctionMode]:
    """The function modes of this thread, the innermost last."""
    return [_get_function_stack_at(i) for i in range(_len_torch_function_stack())]


def put_stack(modes: list[TorchFunctionMode]) -> None:
    """Make these the function modes of this thread."""
    for _ in range(_len_torch_function_stack()):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


def others(modes: list[TorchFunctionMode]) -> list[TorchFunctionMode]:
    """The modes that are not ours."""
    return [mode for mode in modes if not isinstance(mode, CastMode)]


def not_by_itself(hook: F) -> F:
    """A hook that Dynamo follows inside of what it compiles, and does not compile by itself, nor what it calls.

    Where a whole module call is compiled, its hooks are a part of that. But of a module of the user's Dynamo compiles
    ``forward``, and each hook as a program of its own (torch 2.13): there a hook must put things in force for real.
    """
    set_code_exec_strategy(hook.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return hook


def eager(function: F) -> F:
    """A function that Dynamo does not look into and runs as it is: it handles gradients, or decides on a step.

    As ``torch.compiler.disable``, whose wrapper costs some microseconds a call (torch 2.13).
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "halfstep handles gradients and steps as they are"  # type: ignore[attr-defined]
    return not_by_itself(function)


def enter_scope(key: str, thread: Thread) -> None:
    """Put a casting in force that the user asked for, in a ``with`` block: there Dynamo keeps native autocast too."""
    mode = _modes[_prepare(key, False)]
    native = [
        _enter_autocast(device, mode.dtype, device in mode.native, False) for device in mode.devices if device in NATIVE
    ]
    _push(mode, key, True, native, thread)


def enter_model(key: str, inert: bool, thread: Thread) -> None:
    """Put the casting of a model in force, unless it is, or an explicit scope around it has its way.

    Args:
        key: the casting's.
        inert: whether it neither casts nor emulates.
        thread: what is in force in this thread.
    """
    in_force = thread.key == key and not torch.compiler.is_exporting()
    if thread.explicit or in_force or (inert and not thread.key):
        thread.traced.append(None)
    else:
        _push(_modes[_prepare(key, True)], key, False, [], thread)


def _push(mode: CastMode, key: str, explicit: bool, native: list[Any], thread: Thread) -> None:
    before = stack()
    thread.traced.append((before, thread.key, thread.explicit, native))
    put_stack([*others(before), mode])
    thread.key, thread.explicit = key, explicit


def leave(thread: Thread) -> None:
    """Put back what was before the latest ``enter_scope`` or ``enter_model``."""
    record = thread.traced.pop()
    if record is not None:
        before, thread.key, thread.explicit, native = record
        put_stack(before)
        for entered in native:
            _exit_autocast(entered)


def is_running() -> bool:
    """Whether compiled code is under way in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith(_EVAL_FRAME):
        frame = frame.f_back
    return frame is not None


def abandon(thread: Thread) -> None:
    """Put back what was before compiled code that was interrupted after a graph break."""
    while thread.traced:
        leave(thread)
