"""16-bit products on chips without 16-bit units: the fp32 kernel on the same numbers, its result rounded once.

A matrix unit multiplies 16-bit numbers exactly, adds in fp32 and rounds the sum to 16 bits. The product of two 16-bit
numbers is exact in fp32 as well, so the fp32 kernel gives the same, but for the order of the additions. What goes in is
rounded to 16 bits and widened, what comes out is rounded; autograd rounds gradients in the same places, for the
gradient of a cast is a cast. Measured: ``python -m benchmarks emulation``.

Which ops: ``kind`` of ``core.oplists.tables.Op``. Where: ``emulated_kinds``.
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
"""True emulates on every device, False on none, "auto" where the device has no units."""

EmulatedKinds = frozenset[tuple[str, torch.dtype, str]]
"""Device type, 16-bit dtype and op class of what is emulated."""


def check_emulate(value: object) -> Emulate:
    """``emulate=`` as a user gave it.

    Raises:
        ArgumentValueError: for anything but True, False and "auto".
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
    """Return the kinds of ops that are emulated on some devices, the current one of each type.

    Args:
        device_types: as of ``torch.device.type``.
        dtype: torch.float16 or torch.bfloat16; None for both.
        emulate: see there.
    """
    if emulate is False:
        return frozenset()
    kinds: EmulatedKinds = frozenset().union(*(_kinds(each, emulate is True) for each in device_types))
    return kinds if dtype is None else frozenset(kind for kind in kinds if kind[1] is dtype)


def has_own_ops(tensor: Tensor) -> bool:
    """True if a tensor is of a subclass, not of torch or halfstep, that implements ops itself, such as float8 tensors.

    The result of an op on it is not the product of its numbers in fp32, and it may not be widened at all.
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


# Inductor drops casts to 16 bits and back between ops that it fuses. In compiled graphs the casts are therefore ops of
# our own that it does not look into; each is the derivative of the other. Elsewhere they are plain casts.


# Not by `torch.library.custom_op`, which searches all modules for its caller: a tenth of the import of halfstep.amp.
_ops = torch.library.Library("halfstep", "DEF")
_ops.define("narrow(Tensor x, ScalarType dtype) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_ops.define("widen(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_narrow, _widen = torch.ops.halfstep.narrow.default, torch.ops.halfstep.widen.default
# Copies, because an op of torch.library may not return its input.
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
    """True while ``torch.compile`` traces. ONNX has no ops of ours, and what runs its graphs keeps casts."""
    return torch.compiler.is_compiling() and not torch.onnx.is_in_onnx_export()


def narrow(x: Tensor, dtype: torch.dtype, opaque: bool | None = None) -> Tensor:
    """An fp32 tensor rounded to a 16-bit dtype, to nearest even; differentiable.

    Args:
        x: on any device.
        dtype: torch.float16 or torch.bfloat16.
        opaque: True if a compiler must not see through it; None means ``_is_compiled``.
    """
    if _is_compiled() if opaque is None else opaque:
        return _narrow(x, dtype)  # type: ignore[no-any-return]
    return x.to(dtype)


def widen(x: Tensor, opaque: bool | None = None) -> Tensor:
    """A 16-bit tensor in fp32, exactly; its gradient is rounded to the dtype of ``x``. Arguments as of ``narrow``."""
    if _is_compiled() if opaque is None else opaque:
        return _widen(x)  # type: ignore[no-any-return]
    return x.float()
