"""Emulation of 16-bit products on hardware without 16-bit units, in fp32 kernels whose results are rounded once.

A matrix unit multiplies 16-bit values exactly, accumulates in fp32 and rounds the sum to 16 bits. The product of two
16-bit values is exact in fp32 as well, so the fp32 kernel gives the same result up to the order of the additions.
Operands are rounded to 16 bits and widened, and results are rounded. Autograd rounds gradients in the same places,
because the gradient of a cast is a cast. ``python -m benchmarks emulation`` measures the accuracy and the time.

``kind`` in ``core.oplists.tables.Op`` says which ops are emulated, and ``emulated_kinds`` on which devices.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from ..core.dtypes import HALF_DTYPES
from ..core.errors import ArgumentValueError
from ..core.hardware import has_units
from ..core.oplists.tables import KINDS

__all__ = ["Emulate", "EmulatedKinds", "check_emulate", "emulated_kinds", "has_own_ops", "narrow", "widen"]

Emulate = bool | Literal["auto"]
"""The devices that emulate: True for every device, False for none, "auto" for devices without 16-bit units."""

EmulatedKinds = frozenset[tuple[str, torch.dtype, str]]
"""The emulated ops, as triples of device type, 16-bit dtype and kind."""


def check_emulate(value: object) -> Emulate:
    """Check and return the user's value of ``emulate=``.

    Raises:
        ArgumentValueError: if the value is not True, False or "auto".
    """
    if isinstance(value, bool) or value == "auto":
        return value
    raise ArgumentValueError(
        f'emulate={value!r} must be "auto" (fp32 kernels with 16-bit rounding where the device has no 16-bit units), '
        "True (everywhere) or False (nowhere)."
    )


@functools.cache
def _kinds(device_type: str, everywhere: bool) -> EmulatedKinds:
    device, every = torch.device(device_type), itertools.product([device_type], HALF_DTYPES, KINDS)
    return frozenset(kind for kind in every if everywhere or not has_units(device, kind[1], kind[2]))


def emulated_kinds(device_types: Iterable[str], dtype: torch.dtype | None, emulate: Emulate) -> EmulatedKinds:
    """Return the ops that are emulated on devices of some types; the current device stands for its type.

    Args:
        device_types: values of ``torch.device.type``.
        dtype: torch.float16 or torch.bfloat16; None for both.
        emulate: see ``Emulate``.
    """
    if emulate is False:
        return frozenset()
    kinds: EmulatedKinds = frozenset().union(*(_kinds(each, emulate is True) for each in device_types))
    return kinds if dtype is None else frozenset(kind for kind in kinds if kind[1] is dtype)


def has_own_ops(tensor: Tensor) -> bool:
    """True if a tensor belongs to a third-party subclass that implements ops itself, such as a float8 tensor.

    The fp32 product of such a tensor's values is not the result of its own op, and it may not support ``float()``.
    """
    kind = type(tensor)
    if kind is Tensor or kind is torch.nn.Parameter or kind.__module__.partition(".")[0] in ("torch", "halfstep"):
        return False
    plain = (Tensor, torch.nn.Parameter)
    return any(
        "__torch_dispatch__" in vars(cls) or "__torch_function__" in vars(cls)
        for cls in kind.__mro__
        if cls not in plain and issubclass(cls, Tensor)
    )


# Inductor removes casts to 16 bits and back between ops that it fuses. In compiled graphs the casts are therefore
# custom ops, which are opaque to Inductor; each is the derivative of the other. In eager mode they are plain casts.


# `torch.library.custom_op` would search all modules for its caller, which takes a tenth of halfstep.amp's import time.
_ops = torch.library.Library("halfstep", "DEF")
_ops.define("narrow(Tensor x, ScalarType dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_ops.define("widen(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_narrow, _widen = torch.ops.halfstep.narrow.default, torch.ops.halfstep.widen.default
# The ops copy, because an op of torch.library must not return its input.
_ops.impl("narrow", lambda x, dtype: x.to(dtype, copy=True), "CompositeExplicitAutograd")
_ops.impl("widen", lambda x: x.to(torch.float32, copy=True), "CompositeExplicitAutograd")
torch.library.register_vmap(_narrow, lambda info, dims, x, dtype: (_narrow(x, dtype), dims[0]), lib=_ops)
torch.library.register_vmap(_widen, lambda info, dims, x: (_widen(x), dims[0]), lib=_ops)
torch.library.register_autograd(_narrow, lambda ctx, grad: (_widen(grad), None), lib=_ops)
torch.library.register_autograd(
    _widen,
    lambda ctx, grad: _narrow(grad, ctx.dtype),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "dtype", inputs[0].dtype),
    lib=_ops,
)


def _is_compiled() -> bool:
    """True while ``torch.compile`` traces. ONNX export is excluded: ONNX lacks the custom ops, and keeps casts."""
    return torch.compiler.is_compiling() and not torch.onnx.is_in_onnx_export()


def narrow(x: Tensor, dtype: torch.dtype, opaque: bool | None = None) -> Tensor:
    """Round an fp32 tensor to a 16-bit dtype, to nearest even; differentiable.

    Args:
        x: a tensor on any device.
        dtype: torch.float16 or torch.bfloat16.
        opaque: True to use the custom op, which a compiler cannot remove; None means ``_is_compiled``.
    """
    if _is_compiled() if opaque is None else opaque:
        return _narrow(x, dtype)  # type: ignore[no-any-return]
    return x.to(dtype)


def widen(x: Tensor, opaque: bool | None = None) -> Tensor:
    """Cast a 16-bit tensor to fp32 exactly; its gradient is rounded to the dtype of ``x``. See ``narrow``."""
    if _is_compiled() if opaque is None else opaque:
        return _widen(x)  # type: ignore[no-any-return]
    return x.float()
