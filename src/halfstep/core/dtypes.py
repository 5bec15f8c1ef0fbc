"""The number formats, their names, and what each device can do with them. Facts only; nothing here casts."""

from __future__ import annotations

from typing import Literal

import torch

from .errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "DTYPES_BY_NAME",
    "HALF_DTYPES",
    "StateForm",
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
"""How the moments of optimizers are stored; see ``parse_state_form``."""

_STATE_FORMS = "'8bit', torch.bfloat16 (of first moments), torch.float32 or None"

DTYPES_BY_NAME = {
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "float64": torch.float64,
    "double": torch.float64,
}
"""The floating formats by all their names, in small letters."""


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype: ``torch.bfloat16`` is ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(dtype: torch.dtype | str, name: str = "dtype") -> torch.dtype:
    """A floating dtype from itself or from its name (``"bfloat16"``, ``"bf16"``, ``"torch.bfloat16"``, any case).

    ``name`` is what messages call it.

    Raises:
        ArgumentValueError: for a name or dtype that is no floating format.
        ArgumentTypeError: for anything that is neither a dtype nor a string.
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
    """How moments are stored: ``"8bit"``, the dtype of first moments or its name, or None for float32.

    Raises:
        ArgumentValueError: for a name or dtype that is none of these.
        ArgumentTypeError: for anything else.
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
    """A 16-bit dtype from itself or from its name.

    Raises:
        ArgumentValueError: for another dtype.
        ArgumentTypeError: for anything that is neither a dtype nor a string.
    """
    found = parse_dtype(dtype)
    if found not in HALF_DTYPES:
        raise ArgumentValueError(f"dtype={dtype_name(found)} has not 16 bits; use torch.float16 or torch.bfloat16.")
    return found


def _allowed() -> str:
    return ", ".join(sorted({dtype_name(d) for d in DTYPES_BY_NAME.values()}))


def is_half(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds 16-bit floating numbers."""
    return tensor.dtype in HALF_DTYPES


def default_half(device: torch.device | str) -> torch.dtype:
    """The 16-bit format a device trains best in: float16 on CUDA as Apex had it, bfloat16 elsewhere.

    Float16 on a CPU works and is slow; bfloat16 needs no loss scale and has kernels of its own there.
    """
    return torch.float16 if torch.device(device).type == "cuda" else torch.bfloat16
