"""Scopes of op casting that ``torch.compile`` meets while it traces.

Dynamo follows function modes, also across graph breaks, where it can find them again: they lie in ``_modes``. It does
not keep native autocast that one function turns on and another off (torch 2.13: AOTAutograd drops the calls), so the
tables of these modes leave nothing to it, and turn it off for each op that it would touch.

What runs here is traced: attributes of the thread, constants and the stack of modes are all that it may use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from .mode import CastMode

if TYPE_CHECKING:
    from .ops import OpCasting, Thread

__all__ = ["enter", "known", "leave", "others", "put_stack", "stack"]

known: dict[str, OpCasting] = {}
"""Every casting that was made, by its key, which Dynamo takes for a constant."""

_modes: dict[str, CastMode] = {}


def _prepare(key: str) -> str:
    """Have the mode of a casting ready. Dynamo calls this while it traces, and does not look into it."""
    if key not in _modes:
        mode = _modes[key] = CastMode()
        known[key].set_up(mode, None, explicit=True)
    return key


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


def enter(key: str, inert: bool, thread: Thread, *, explicit: bool) -> None:
    """Put a casting in force.

    Args:
        key: the casting's.
        inert: whether it neither casts nor emulates.
        thread: what is in force in this thread.
        explicit: whether the user asked for it; else a model did, and an explicit scope around it has its way.
    """
    in_force = thread.key == key and not torch.compiler.is_exporting()
    if not explicit and (thread.explicit or in_force or (inert and not thread.key)):
        thread.traced.append(None)
        return
    before = stack()
    thread.traced.append((before, thread.key, thread.explicit))
    put_stack([*others(before), _modes[_prepare(key)]])
    thread.key, thread.explicit = key, explicit


def leave(thread: Thread) -> None:
    """Put back what was before the latest ``enter``."""
    record = thread.traced.pop()
    if record is not None:
        before, thread.key, thread.explicit = record
        put_stack(before)
