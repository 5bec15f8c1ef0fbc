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
    """The arguments of a constructor by name, from its ``locals()``, without those that are ``excluded``.

    To be called before the constructor sets any other local name.
    """
    return {name: value for name, value in local.items() if name not in ("self", "__class__", *excluded)}


def check_kind(name: str, value: object, kind: type | tuple[type, ...], what: str) -> None:
    """Check that a value is of a class, or of one of several.

    Args:
        name: what the message calls the value.
        value: what was given.
        kind: the class.
        what: the class in words, "a torch.nn.Module".

    Raises:
        ArgumentTypeError: if it is not.
    """
    if not isinstance(value, kind):
        raise ArgumentTypeError(f"{name} must be {what}, not {value!r} of type {type(value).__name__}.")


def check_flag(name: str, value: Any) -> bool:
    """A switch as a bool. It may be a bool, also one of numpy, or 0 or 1, as command lines have it.

    Any other value is truthy or not by chance: a text like "no" would switch something on.

    Raises:
        ArgumentTypeError: for anything else.
    """
    if isinstance(value, bool):
        return value
    flag = value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 else value
    if isinstance(flag, int) and flag in (0, 1):
        return bool(flag)
    hint = ""
    if isinstance(value, (torch.dtype, str)) and str(value).removeprefix("torch.").lower() in DTYPES_BY_NAME:
        hint = f" If {value!r} is the dtype to compute in, write dtype={value!r}."
    elif isinstance(value, str):
        hint = " A text is no switch: compare it before, as in value.lower() in ('yes', 'true', '1')."
    raise ArgumentTypeError(f"{name}={value!r} must be True or False.{hint}")


def check_switch(name: str, value: object, *, or_none: bool = False) -> None:
    """Check that a value is True or False itself, or, with ``or_none``, None.

    Raises:
        ArgumentTypeError: for anything else.
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
        ArgumentValueError: if it does not, or is no number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < below:
        limits = f"above {above:g}" + ("" if below == math.inf else f" and below {below:g}")
        raise ArgumentValueError(f"{name}={value!r} must be a finite number {limits}.")


def check_count(name: str, value: object, *, least: int = 1, never: bool = False) -> None:
    """Check that a value is a whole number.

    Args:
        name: what the message calls the value.
        value: what was given.
        least: the smallest number allowed.
        never: whether the message is to say that None stands for never.

    Raises:
        ArgumentValueError: if it is not, or smaller.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        allowed = f"number above {least - 1}, or None for never" if never else f"number, {least} or more"
        raise ArgumentValueError(f"{name}={value!r} must be a whole {allowed}.")


def check_number(name: str, value: object, *, below: float | None = None, finite: bool = True) -> None:
    """Check that a number, or the one number in a tensor, is 0 or more. A tensor is read, if it has values.

    Args:
        name: what the message calls the number.
        value: what was given.
        below: what it must be below, if anything.
        finite: whether inf is refused.

    Raises:
        ArgumentValueError: if it is outside, or a tensor with several elements.
        ArgumentTypeError: if it is no number.
    """
    number = value
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ArgumentValueError(f"{name}={value!r} must be a number or a tensor with one element.")
        if value.device.type == "meta" or type(value) is not torch.Tensor:
            return  # it has no value, or only a subclass knows how to read it
        number = value.item()
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise ArgumentTypeError(f"{name} must be a number, not {value!r}.")
    if not number >= 0 or (below is not None and not number < below) or (finite and number == math.inf):
        limits = f" and below {below:g}" if below is not None else " and finite" if finite else ""
        raise ArgumentValueError(f"{name}={value!r} must be at least 0{limits}.")


def as_number(name: str, value: Any) -> float:
    """A float from a number, a text of one, or the one element of a list, an array or a tensor, which is read.

    Raises:
        ArgumentValueError: if it is nothing of these.
    """
    one = value
    while isinstance(one, (list, tuple)) and len(one) == 1:
        one = one[0]
    try:
        return float(one.item() if hasattr(one, "item") else one)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentValueError(f"{name}={value!r} must be a number or an array or tensor of one element.") from None


def check_optimizer_state(optimizer: object, state_dict: object) -> None:
    """Check that a value looks like what ``state_dict()`` of an optimizer returned.

    Raises:
        ArgumentTypeError: if it is no mapping.
        ArgumentValueError: if it has no ``state`` or ``param_groups``.
    """
    kind = type(optimizer).__name__
    instead = f"pass what state_dict() of {kind} returned. Nothing was loaded."
    if not isinstance(state_dict, Mapping):
        raise ArgumentTypeError(f"load_state_dict of {kind} was given {type(state_dict).__name__}; {instead}")
    missing = [name for name in ("state", "param_groups") if name not in state_dict]
    if missing:
        has = ", ".join(map(repr, list(state_dict)[:5])) or "nothing"
        raise ArgumentValueError(f"The state dict has no {' and no '.join(missing)}, but {has}; {instead}")
