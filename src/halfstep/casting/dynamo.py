"""The part of op casting that ``torch.compile`` sees: scopes entered while it traces, and functions marked for it.

Dynamo follows function modes, also across graph breaks, if it can find them again, so they are kept in ``_modes``. It
loses native autocast that one hook turns on and another turns off (torch 2.13: AOTAutograd drops the calls). So the
tables for models do not rely on native autocast, and turn it off for each op that it would cast.

Dynamo traces the scopes, so they may only use attributes of ``thread``, constants and the stack of modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ..core.oplists.tables import NATIVE
from ..torch_internals.compiler_compat import (
    enter_autocast,
    never_traced,
    not_by_itself,
    restore_dtypes_after_trace,
    traced_as_constant,
    tracer_follows_autocast,
)
from .config import CastingConfig, config_of
from .current import is_current, plan_of, push_traced, thread
from .dispatch import CastMode

__all__ = ["eager", "enter_model", "enter_scope"]

F = TypeVar("F", bound=Callable[..., Any])

_modes: dict[str, CastMode] = {}


# If Dynamo skips a frame, such as an LSTM's, it would compile each call of the mode as a separate program.
not_by_itself(CastMode.__torch_function__)


def eager(function: F) -> F:
    """Mark a function that handles gradients or steps, so that Dynamo runs it without tracing it.

    This is ``torch.compiler.disable`` without its wrapper, which costs some microseconds per call (torch 2.13).
    """
    return not_by_itself(never_traced(function, "halfstep handles gradients and steps as they are"))


@traced_as_constant
def _prepare_mode(key: str, explicit: bool) -> str:
    """Create the mode of a casting. Dynamo calls this function while it traces, without tracing it."""
    restore_dtypes_after_trace(NATIVE)
    name = f"{key} {explicit}"
    if name not in _modes:
        mode = _modes[name] = CastMode()
        mode.config = config_of(key)
        mode.config.native = () if explicit else mode.config.native
        mode.plan = plan_of(mode.config, explicit, True)
    return name


def enter_scope(casting: CastingConfig) -> None:
    """Enter a user's ``with`` block, in which a newer Dynamo also keeps native autocast."""
    explicit = not tracer_follows_autocast()
    mode = _modes[_prepare_mode(casting.key, explicit)]
    config, devices = mode.config, () if explicit else mode.config.devices
    native = [enter_autocast(each, config.dtype, each in config.native, False) for each in devices if each in NATIVE]
    push_traced(mode, casting.key, True, native)


def enter_model(casting: CastingConfig) -> None:
    """Enter the casting of a model, unless it is already current or an explicit scope around the model decides."""
    # In Dynamo of torch 2.11 is_exporting() is always true.
    if thread.explicit or (is_current(casting) and (casting.is_noop or not torch.compiler.is_exporting())):
        thread.traced.append(None)
    else:
        explicit = not casting.keeps_autocast or bool(thread.key)  # as in eager mode
        push_traced(_modes[_prepare_mode(casting.key, explicit)], casting.key, False, [])
