"""The number formats with their names, and the best 16-bit format of each device. Facts only; no code here casts."""

from __future__ import annotations

from typing import Literal

import torch

from .errors import ArgumentTypeError, ArgumentValueError, UsageError

__all__ = [
    "DTYPES_BY_NAME",
    "HALF_DTYPES",
    "StateForm",
    "cast_error",
    "default_half",
    "dtype_name",
    "is_half",
    "parse_dtype",
    "parse_half",
    "parse_state_form",
]

HALF_DTYPES = (torch.float16, torch.bfloat16)
"""The 16-bit floating formats: float16 (5-bit exponent, 10-bit fraction) and bfloat16 (8 and 7)."""

StateForm = torch.dtype | Literal["8bit"] | None
"""The type of a storage form for optimizers' moments; see ``parse_state_form``."""

_STATE_FORMS = "'8bit', torch.bfloat16 (of first moments), torch.float32 or None"

_OTHER_NAMES = {"float16": "fp16 half", "bfloat16": "bf16", "float32": "fp32 float", "float64": "double"}
DTYPES_BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, own) for own, others in _OTHER_NAMES.items() for name in (own, *others.split())
}
"""The floating formats by all their names, in lower case."""


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: ``torch.bfloat16`` is ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def cast_error(weight: str, was: torch.dtype, now: torch.dtype) -> UsageError:
    """Say that a weight was cast after the level had chosen its dtype.

    Args:
        weight: the name or the shape of the weight.
        was: the dtype that the level gave it.
        now: the dtype that it has.
    """
    return UsageError(
        f"The weight {weight} was cast to {dtype_name(was)} and is {dtype_name(now)} now: model.float(), half() or "
        "to(dtype) was called after amp.initialize or amp.decorate, or another weight was put in its place, as "
        "load_state_dict(assign=True) does. Leave the dtypes to the level, and leave out assign=True: "
        "model.state_dict() is fp32 as it is, and amp.master_model(model) is an fp32 copy."
    )


def parse_dtype(dtype: torch.dtype | str, name: str = "dtype") -> torch.dtype:
    """Parse a floating dtype, or its name (``"bfloat16"``, ``"bf16"``, ``"torch.bfloat16"``, any case).

    ``name`` is the name of the argument in messages.

    Raises:
        ArgumentValueError: for a name or dtype that is not a floating format.
        ArgumentTypeError: for a value that is neither a dtype nor a string.
    """
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES_BY_NAME.values():
            raise ArgumentValueError(f"{name}={dtype} is not a format to train in; use one of {_allowed()}.")
        return dtype
    if not isinstance(dtype, str):
        raise ArgumentTypeError(f"{name} must be a torch.dtype or its name, not {dtype!r}; use one of {_allowed()}.")
    found = DTYPES_BY_NAME.get(dtype.strip().lower().removeprefix("torch."))
    if found is None:
        raise ArgumentValueError(f"{name}={dtype!r} is not a floating format; use one of {_allowed()}.")
    return found


def parse_state_form(form: object, name: str = "state_dtype") -> StateForm:
    """Parse the storage form of moments: ``"8bit"``, the dtype of first moments or its name, or None for float32.

    Raises:
        ArgumentValueError: for any other name or dtype.
        ArgumentTypeError: for any other value.
    """
    if form is None or form == "8bit":
        return form
    if not isinstance(form, (str, torch.dtype)):
        raise ArgumentTypeError(f"{name} must be {_STATE_FORMS}, not {form!r}.")
    known = DTYPES_BY_NAME.get(form.strip().lower().removeprefix("torch.")) if isinstance(form, str) else form
    if known not in (torch.float32, torch.bfloat16):
        reason = "; float16 has no room for small gradients" if known is torch.float16 else ""
        raise ArgumentValueError(f"{name}={form!r} must be {_STATE_FORMS}{reason}.")
    return known


def parse_half(dtype: torch.dtype | str) -> torch.dtype:
    """Parse a 16-bit dtype, or its name.

    Raises:
        ArgumentValueError: for another dtype.
        ArgumentTypeError: for a value that is neither a dtype nor a string.
    """
    found = parse_dtype(dtype)
    if found not in HALF_DTYPES:
        raise ArgumentValueError(f"dtype={dtype_name(found)} is not 16-bit; use torch.float16 or torch.bfloat16.")
    return found


def _allowed() -> str:
    return ", ".join(sorted({dtype_name(d) for d in DTYPES_BY_NAME.values()}))


def is_half(tensor: torch.Tensor) -> bool:
    """True if a tensor holds 16-bit floating numbers."""
    return tensor.dtype in HALF_DTYPES


def default_half(device: torch.device | str) -> torch.dtype:
    """Return the 16-bit format in which a device trains best: float16 on CUDA, as in Apex, bfloat16 elsewhere.

    Float16 works on a CPU but is slow; bfloat16 needs no loss scale and has native kernels there.
    """
    return torch.float16 if torch.device(device).type == "cuda" else torch.bfloat16
