"""The part of op casting that ``torch.compile`` meets: scopes entered while it traces, and functions marked for it.

Dynamo follows function modes, also across graph breaks, where it can find them again: they lie in ``_modes``. It does
not keep native autocast that one hook turns on and another off (torch 2.13: AOTAutograd drops the calls), so the
tables for models leave nothing to it, and turn it off for each op that it would touch.

Scopes are traced: they may use attributes of the thread, constants and the stack of modes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..core.oplists.tables import NATIVE
from ..torch_internals.compiler_compat import (
    FrameAction,
    FrameExecStrategy,
    enter_autocast,
    never_traced,
    set_code_exec_strategy,
    traced_as_constant,
    tracer_follows_autocast,
)
from .config import CastingConfig, config_of
from .current import is_current, plan_of, push_traced, thread
from .dispatch import CastMode

__all__ = ["eager", "enter_model", "enter_scope", "not_by_itself"]

F = TypeVar("F", bound=Callable[..., Any])

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
        mode.config = config_of(key)
        mode.config.native = () if explicit else mode.config.native
        mode.plan = plan_of(mode.config, explicit, True)
    return name


def enter_scope(casting: CastingConfig) -> None:
    """Put a casting of the user's in force, in a ``with`` block: there a newer Dynamo keeps native autocast too."""
    explicit = not tracer_follows_autocast()
    mode = _modes[_prepare_mode(casting.key, explicit)]
    devices = () if explicit else [device for device in mode.config.devices if device in NATIVE]
    native = [enter_autocast(device, mode.config.dtype, device in mode.config.native, False) for device in devices]
    push_traced(mode, casting.key, True, native)


def enter_model(casting: CastingConfig) -> None:
    """Put the casting of a model in force, unless it is already, or an explicit scope around it decides."""
    # In Dynamo of torch 2.11 is_exporting() is always true.
    if thread.explicit or (is_current(casting) and (casting.is_noop or not torch.compiler.is_exporting())):
        thread.traced.append(None)
    else:
        explicit = not casting.keeps_autocast or bool(thread.key)  # as in eager mode
        push_traced(_modes[_prepare_mode(casting.key, explicit)], casting.key, False, [])
