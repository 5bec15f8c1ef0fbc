"""The rules that cast one call of an op; ``rule_table`` chooses the rule of each op.

A rule takes the details of its op first, then the mode, the op and its arguments. It runs within
``__torch_function__``, where torch has turned the mode off but native autocast is still on. Rules cast nothing if the
user turned ``torch.autocast`` off within the scope, and never cast for a call with ``out=``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn import Parameter

from ..core.dtypes import HALF_DTYPES, dtype_name
from ..core.errors import UnsafeOpError
from ..core.oplists.tables import NATIVE
from ..torch_internals.torch_compat import is_any_autocast_enabled, jit_tracing_state, saved_hooks_allowed
from . import wide
from .containers import map_tensors, tensors_in
from .dispatch import CastMode, Rule
from .emulation import has_own_ops, narrow, widen
from .operands import MIN_ELEMENTS, STEPWISE, Kept, Operand, run_product
from .weight_cache import WeightCache

__all__ = [
    "CASTABLE",
    "SPARSE_PRODUCTS",
    "banned",
    "bind",
    "dense_only",
    "emulated",
    "float_inplace",
    "half_native",
    "match_self",
    "promote",
    "to_float",
    "to_half",
    "unflatten",
    "without_native",
]

logger = logging.getLogger("halfstep")

_is_compiling = torch.compiler.is_compiling

_CONTAINERS = (list, tuple, Mapping)
_ATOMS = {int, float, bool, str, type(None), torch.dtype}  # `isinstance(1, Mapping)` takes half a microsecond
CASTABLE = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that rules cast. float64 and integers are never cast."""

_ORDINARY = {torch.Tensor, Parameter}
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
SPARSE_PRODUCTS = {torch.sparse.mm: "mm", torch.sparse.addmm: "addmm"}
"""Functions that multiply a sparse matrix, and the names of the products that accept one as well."""

_SPARSE_AT = {"embedding": 4, "embedding_bag": 5}
"""The index of the argument ``sparse`` if the weight comes first, as in ATen; it is two higher if the indices do, as in
``torch.nn.functional``."""

_APEX_NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double"}


def bind(rule: Callable[..., Any], *details: Any, native_off: bool = False) -> Rule:
    """Return a rule bound to one op.

    Args:
        rule: a rule of this module.
        details: the first arguments of the rule, which depend on the op.
        native_off: True to turn native autocast off while the op itself runs.
    """
    bound = functools.partial(rule, *details)
    if not native_off:
        return bound

    def shielded(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        return bound(mode, functools.partial(_uncast, mode, func), args, kwargs)

    return shielded


def _uncast(mode: CastMode, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return without_native(mode, func, args, kwargs)


def without_native(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an op with native autocast off on every device, because its lists differ from the lists of the casting."""
    on = mode.native_on()
    if torch.compiler.is_dynamo_compiling():
        return _without_native_compiled(on, func, args, kwargs)
    for device in on:
        torch.set_autocast_enabled(device, False)
    try:
        return func(*args, **kwargs)
    finally:
        for device in on:
            torch.set_autocast_enabled(device, True)


def _without_native_compiled(on: list[str], func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if not on:
        return func(*args, **kwargs)
    with torch.autocast(on[0], enabled=False):
        return _without_native_compiled(on[1:], func, args, kwargs)


# ---- casts


def _cast(mode: CastMode, value: Any, target: torch.dtype | None, name: str) -> Any:
    """Cast the fp32 and 16-bit tensors of an argument, including tensors in lists, tuples and dicts.

    A target of None casts each tensor to ``CastMode.half_of``. Only casts of weights are cached: a cached cast of an
    input would exist until the scope ends.
    """
    if not isinstance(value, torch.Tensor):
        if isinstance(value, _CONTAINERS):
            return map_tensors(lambda tensor: _cast(mode, tensor, target, name), value)
        return value
    dtype = value.dtype
    if dtype is target or dtype not in CASTABLE:
        return value
    if target is None:
        target = mode.half_of(value)
        if target is None or dtype is target:
            return value
    elif mode.half_of(value) is None:
        return value
    is_weight = value.is_leaf and (value.requires_grad or type(value) is Parameter)
    if is_weight and dtype is torch.float32 and mode.cache is not None and not _is_compiling():
        return _from_cache(mode, mode.cache, value, target, name)
    if mode.config.verbose:
        _log_cast(name, dtype, target)
    return value.float() if target is torch.float32 else value.to(target)  # float() takes a microsecond less


def _from_cache(
    mode: CastMode, cache: WeightCache, weight: torch.Tensor, target: torch.dtype, name: str, *wide: Any
) -> torch.Tensor:
    casts = cache.casts
    copy = cache.cast(weight, target, *wide)
    if mode.config.verbose and cache.casts != casts and weight.dtype is not target:
        _log_cast(name, weight.dtype, target)
    return copy


def _log_cast(name: str, source: torch.dtype, target: torch.dtype) -> None:
    """Log one cast in Apex's format: ``Float->Half (conv2d)``."""
    names = [_APEX_NAMES.get(dtype, dtype_name(dtype)) for dtype in (source, target)]
    logger.info("%s->%s (%s)", *names, name)


def _call_in(target: torch.dtype | None, name: str, mode: CastMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Call an op with its arguments cast to one dtype; see ``_cast``."""
    if kwargs:
        if kwargs.get("out") is not None:
            return func(*args, **kwargs)
        kwargs = {key: _cast(mode, a, target, name) for key, a in kwargs.items()}
    return func(*[a if type(a) in _ATOMS else _cast(mode, a, target, name) for a in args], **kwargs)


def to_half(name: str, mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Cast every fp32 and 16-bit argument to the 16-bit dtype."""
    return _call_in(None, name, mode, func, args, kwargs)


def to_float(name: str, mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Cast every 16-bit argument to fp32, unless the caller requests a 16-bit ``dtype``: some ops refuse to narrow."""
    at = _SPARSE_AT.get(name, 0) and _SPARSE_AT[name] + (2 if args and not args[0].is_floating_point() else 0)
    if at and (kwargs.get("sparse") or args[at : at + 1] == (True,)):
        # Torch cannot cast a sparse gradient back to the weight's dtype. A lookup rounds nothing, so cast its result.
        return _cast(mode, func(*args, **kwargs), torch.float32, name)
    if kwargs.get("dtype") in HALF_DTYPES:
        return func(*args, **kwargs)
    return _call_in(torch.float32, name, mode, func, args, kwargs)


def promote(name: str, mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Cast every fp32 and 16-bit argument to the widest floating dtype among the arguments."""
    floating = [t for t in tensors_in(args, kwargs) if t.dtype in CASTABLE or t.dtype is torch.float64]
    dtypes = {t.dtype for t in floating}
    if len(dtypes) < 2:
        return func(*args, **kwargs)
    # Zero-dimensional tensors count only if there are no tensors with dimensions, as in torch.
    widest = functools.reduce(torch.promote_types, {t.dtype for t in floating if t.dim()} or dtypes)
    return _call_in(widest, name, mode, func, args, kwargs)


def half_native(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op that native autocast casts, with weights from the cache."""
    if mode.cache is None or _is_compiling() or (kwargs and kwargs.get("out") is not None):
        return func(*args, **kwargs)
    args = [mode.weight(a) for a in args]
    return func(*args, **{key: mode.weight(a) for key, a in kwargs.items()}) if kwargs else func(*args)


def banned(name: str, hint: str, mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Refuse a 16-bit input, or cast it to fp32 with ``allow_banned``. Targets and weights are always cast."""
    if not mode.config.allow_banned:
        for tensor in tensors_in(args[:1], kwargs.get("input")):
            if tensor.dtype in HALF_DTYPES and mode.casts(tensor):
                raise UnsafeOpError(f"{name} is unsafe with {dtype_name(tensor.dtype)} inputs. {hint}")
    return to_float(name, mode, func, args, kwargs)


# ---- sparse matrices


def dense_only(name: str, otherwise: Rule | None, mode: CastMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run a product with a sparse matrix in fp32, because torch has no 16-bit kernels for its backward pass."""
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, torch.Tensor) and a.layout in _SPARSE:
            return _call_in(torch.float32, name, mode, functools.partial(_uncast, mode, func), args, kwargs)
    return func(*args, **kwargs) if otherwise is None else otherwise(mode, func, args, kwargs)


# ---- in-place ops


def match_self(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an in-place op in the dtype of the tensor that it writes to, and cast the other arguments to this dtype."""
    target = args[0].dtype if args else None
    if target not in CASTABLE:
        return func(*args, **kwargs)

    def match(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(target) if tensor.dtype in CASTABLE and mode.casts(tensor) else tensor

    return without_native(mode, func, [args[0], *map_tensors(match, args[1:])], map_tensors(match, kwargs))


def float_inplace(name: str, mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an in-place op of the float list, which must not round its fp32 result into a 16-bit tensor."""
    if args and args[0].dtype in HALF_DTYPES and mode.casts(args[0]):
        if not mode.config.enabled:  # an island writes to a tensor from outside
            return match_self(mode, func, args, kwargs)
        raise UnsafeOpError(
            f"{name}_ runs in fp32 under op casting and cannot write in place into a {dtype_name(args[0].dtype)} "
            f"tensor; use the out-of-place form, x = x.{name}(...), or convert the tensor first, x.float()."
        )
    return to_float(name, mode, func, args, kwargs)


# ---- emulation


def emulated(
    name: str, kind: str, listed: str, otherwise: Rule | None, mode: CastMode, func: Any, args: Any, kwargs: Any
) -> Any:
    """Run a 16-bit op in an fp32 kernel on rounded operands, if the device lacks 16-bit units or the result is fp32.

    Args:
        name: the name of the op.
        kind: the kind of the op, one of ``KINDS``.
        listed: the list of the op. On "half" and "wide" fp32 arguments are rounded as well.
        otherwise: the rule for calls that are not emulated; None calls the op unchanged.
        mode: the mode.
        func: the op.
        args: the arguments of the call.
        kwargs: the keyword arguments of the call.
    """
    half = None if kwargs.get("out") is not None else _emulated_dtype(mode, args, kwargs, kind, listed)
    if half is None:
        return func(*args, **kwargs) if otherwise is None else otherwise(mode, func, args, kwargs)
    if listed == "wide" and ("cuda", half, kind) not in mode.config.emulated and wide.has_kernel(name, args, kwargs):
        return to_half(name, mode, functools.partial(wide.product, name), args, kwargs)
    plain = _is_compiling() or jit_tracing_state() is not None or name in STEPWISE or not saved_hooks_allowed()
    kept: Kept | None = None if plain else {}
    args = _rounded(mode, half, name, args, kept)
    kwargs = dict(zip(kwargs, _rounded(mode, half, name, kwargs.values(), kept), strict=True)) if kwargs else kwargs
    call = functools.partial(func, *args, **kwargs)
    if torch.compiler.is_dynamo_compiling() or is_any_autocast_enabled():
        call = functools.partial(without_native, mode, func, args, kwargs)
    result = run_product(call, kept, half, kind) if kept else call()
    if not isinstance(result, torch.Tensor):
        return map_tensors(lambda tensor: narrow(tensor, half) if tensor.dtype is torch.float32 else tensor, result)
    if result.dtype is not torch.float32 or listed == "wide":
        return result
    return narrow(result, half) if _is_compiling() else result.to(half)


def _rounded(mode: CastMode, half: torch.dtype, name: str, values: Iterable[Any], kept: Kept | None) -> list[Any]:
    """Return the arguments with their tensors rounded to 16 bits and widened to fp32; ``kept`` gets the operands."""
    cache = None if (compiling := _is_compiling()) else mode.cache
    rounded = []
    for value in values:
        if not isinstance(value, torch.Tensor):
            if isinstance(value, _CONTAINERS):
                value = map_tensors(lambda tensor: _rounded(mode, half, name, [tensor], kept)[0], value)
        elif value.dtype not in CASTABLE:
            pass
        elif cache is not None and value.is_leaf and (value.requires_grad or type(value) is Parameter):
            if mode.config.verbose:
                value = _from_cache(mode, cache, value, half, name, True, kept)
            else:
                value = cache.cast(value, half, True, kept)
        else:
            if mode.config.verbose and value.dtype is not half:
                _log_cast(name, value.dtype, half)
            if compiling:
                value = widen(value if value.dtype is half else narrow(value, half))
            elif kept is None or value.numel() < MIN_ELEMENTS:
                value = value.to(half).float()
            else:
                operand = Operand(value.to(half))
                value = kept.setdefault(id(operand.wide), operand).wide
        rounded.append(value)
    return rounded


def _emulated_dtype(mode: CastMode, args: Any, kwargs: dict[str, Any], kind: str, listed: str) -> torch.dtype | None:
    """Return the 16-bit dtype in which a call is emulated; None if it is not emulated."""
    tensors: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, _CONTAINERS):
            tensors += tensors_in(value)
    tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
    foreign = not _ORDINARY.issuperset(map(type, tensors)) and any(map(has_own_ops, tensors))
    if len(tensors) < 2 or foreign:  # an einsum of one tensor is a view
        return None
    device, dtypes = tensors[0].device.type, {tensor.dtype for tensor in tensors}
    half = mode.half_of(tensors[0]) if listed in ("half", "wide") else None
    plain = half is None and not mode.config.native and not mode.plan.explicit and device in NATIVE
    if plain and torch.is_autocast_enabled(device):  # a torch.autocast block of user code, in a scope without casts
        half = torch.get_autocast_dtype(device)
    dtype, fits = half or tensors[0].dtype, dtypes.issubset(CASTABLE) if half else len(dtypes) == 1
    runs = (device, dtype, kind) in mode.config.emulated or (half is not None and listed == "wide")
    return dtype if fits and runs else None


# ---- other calls that the mode must handle


def unflatten(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Replace ``Tensor.unflatten`` while Dynamo traces, which cannot follow its ``super()`` in a mode (torch 2.13)."""
    return (torch.unflatten if torch.compiler.is_dynamo_compiling() else func)(*args, **kwargs)
