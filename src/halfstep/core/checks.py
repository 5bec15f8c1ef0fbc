"""Checks of arguments that several faces share. A message says what was given and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from .dtypes import DTYPES_BY_NAME
from .errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "arguments",
    "as_number",
    "check_between",
    "check_count",
    "check_flag",
    "check_kind",
    "check_number",
    "check_optimizer_state",
    "check_switch",
    "is_device",
]


def arguments(local: Mapping[str, Any], *excluded: str) -> dict[str, Any]:
    """Collect the arguments of a function by name from its ``locals()``, without the ``excluded`` ones.

    Call this before the function sets any other local name.
    """
    return {name: value for name, value in local.items() if name not in ("self", "__class__", *excluded)}


def check_kind(name: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Check that a value is an instance of a class, or of one of several classes.

    Args:
        name: the name of the value in the message.
        value: the value to check.
        kind: the class.
        what: the class in words, "a torch.nn.Module".

    Raises:
        ArgumentTypeError: if it is not.
    """
    if not isinstance(value, kind):
        raise ArgumentTypeError(f"{name} must be {what}, not {value!r} of type {type(value).__name__}.")


def check_flag(name: str, value: Any) -> bool:
    """Convert a switch to a bool: a bool, also numpy's, or 0 or 1, as command lines have it.

    The truth of any other value is an accident: a string such as "no" would enable the switch.

    Raises:
        ArgumentTypeError: for any other value.
    """
    if isinstance(value, bool):
        return value
    flag = value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 else value
    if isinstance(flag, int) and flag in (0, 1):
        return bool(flag)
    hint = ""
    if isinstance(value, (torch.dtype, str)) and str(value).removeprefix("torch.").lower() in DTYPES_BY_NAME:
        hint = f" If {value!r} is the dtype to compute in, write dtype={value!r}."
    elif isinstance(value, str) and value[:1] in ("O", "o") and value[1:].isdigit():
        hint = f" Did you mean opt_level={value!r}?"
    elif isinstance(value, str):
        hint = " A text is no switch: compare it before, as in value.lower() in ('yes', 'true', '1')."
    raise ArgumentTypeError(f"{name}={value!r} must be True or False.{hint}")


def check_switch(name: str, value: object, *, or_none: bool = False) -> None:
    """Check that a value is True or False itself, or, with ``or_none``, None.

    Raises:
        ArgumentTypeError: for any other value.
    """
    if not isinstance(value, bool) and not (or_none and value is None):
        raise ArgumentTypeError(f"{name}={value!r} must be {'True, False or None' if or_none else 'True or False'}.")


def is_device(value: object) -> bool:
    """True for the name of a device, such as "cuda" or "cpu:0"."""
    try:
        return isinstance(value, str) and bool(torch.device(value).type)
    except RuntimeError:
        return False


def check_between(name: str, value: float, *, above: float = 0.0, below: float = math.inf) -> None:
    """Check that a number lies between two others.

    Raises:
        ArgumentValueError: if the value lies outside, or is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < below:
        limits = f"above {above:g}" + ("" if below == math.inf else f" and below {below:g}")
        raise ArgumentValueError(f"{name}={value!r} must be a finite number {limits}.")


def check_count(name: str, value: object, *, least: int = 1, never: bool = False) -> None:
    """Check that a value is a whole number.

    Args:
        name: the name of the value in the message.
        value: the value to check.
        least: the smallest number allowed.
        never: True to allow None, which means never.

    Raises:
        ArgumentValueError: if the value is not a whole number, or too small.
    """
    if value is None and never:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        allowed = f"number above {least - 1}, or None for never" if never else f"number, {least} or more"
        raise ArgumentValueError(f"{name}={value!r} must be a whole {allowed}.")


def check_number(name: str, value: object, *, below: float | None = None, finite: bool = True) -> None:
    """Check that a number, or the one number in a tensor, is 0 or more. A tensor is read, if it has values.

    Args:
        name: the name of the number in the message.
        value: the value to check.
        below: an exclusive upper limit, if there is one.
        finite: True to refuse inf.

    Raises:
        ArgumentValueError: if the number lies outside, or for a tensor with several elements.
        ArgumentTypeError: if the value is not a number.
    """
    number = value
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ArgumentValueError(f"{name}={value!r} must be a number or a tensor with one element.")
        if value.device.type == "meta" or type(value) is not torch.Tensor:
            return  # it has no value, or only its subclass can read it
        number = value.item()
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ArgumentTypeError(f"{name} must be a number, not {value!r}.")
    if not number >= 0 or (below is not None and not number < below) or (finite and number == math.inf):
        limits = f" and below {below:g}" if below is not None else " and finite" if finite else ""
        raise ArgumentValueError(f"{name}={value!r} must be at least 0{limits}.")


def as_number(name: str, value: Any) -> float:
    """Convert to a float: a number, its string, or the only element of a list, an array or a tensor, which is read.

    Raises:
        ArgumentValueError: for any other value.
    """
    one = value
    while isinstance(one, (list, tuple)) and len(one) == 1:
        one = one[0]
    try:
        return float(one.item() if hasattr(one, "item") else one)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentValueError(f"{name}={value!r} must be a number or an array or tensor of one element.") from None


def check_optimizer_state(optimizer: object, state_dict: object) -> None:
    """Check that a value looks like the result of an optimizer's ``state_dict()``.

    Raises:
        ArgumentTypeError: if the value is not a mapping.
        ArgumentValueError: if the mapping lacks ``state`` or ``param_groups``.
    """
    kind = type(optimizer).__name__
    instead = f"pass what state_dict() of {kind} returned. Nothing was loaded."
    if not isinstance(state_dict, Mapping):
        raise ArgumentTypeError(f"load_state_dict of {kind} was given {type(state_dict).__name__}; {instead}")
    missing = [name for name in ("state", "param_groups") if name not in state_dict]
    if missing:
        has = ", ".join(map(repr, list(state_dict)[:5])) or "nothing"
        raise ArgumentValueError(f"The state dict has no {' and no '.join(missing)}, but {has}; {instead}")
