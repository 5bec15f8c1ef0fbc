"""What is done to one call of an op, rule by rule. Each takes the mode, the function and its arguments.

A rule runs inside ``__torch_function__``: the mode is off there, native autocast is still on. Nothing is cast where
someone turned ``torch.autocast`` off inside our scope, nor into an ``out=`` tensor.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

from ..core.dtypes import HALF_DTYPES, dtype_name
from ..core.errors import UnsafeOpError
from ..core.oplists.tables import NATIVE
from .emulation import narrow, widen

if TYPE_CHECKING:
    from .mode import CastMode

__all__ = [
    "Rule",
    "backward",
    "banned",
    "cast_args",
    "emulated",
    "float_inplace",
    "forget",
    "half_native",
    "make_rule",
    "match_self",
    "promote",
    "to_float",
    "to_half",
    "without_native",
]

Rule = Callable[["CastMode", Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

logger = logging.getLogger("halfstep")

_is_compiling = torch.compiler.is_compiling
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling

_CONTAINERS = (list, tuple, Mapping)
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)
_NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double"}


def say(name: str, source: torch.dtype, target: torch.dtype) -> None:
    """Log one cast, as Apex spelled it: ``Float->Half (conv2d)``."""
    logger.info("%s->%s (%s)", _NAMES.get(source, dtype_name(source)), _NAMES.get(target, dtype_name(target)), name)


def cast_args(cast: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply a cast to every tensor in an argument, inside lists, tuples and dicts of any depth."""
    if isinstance(value, torch.Tensor):
        return cast(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([cast_args(cast, item) for item in value])
    if isinstance(value, (tuple, list)):
        items = [cast_args(cast, item) for item in value]
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, Mapping):
        return {key: cast_args(cast, item) for key, item in value.items()}
    return value


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Every tensor among arguments."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(*value)
        elif isinstance(value, Mapping):
            found += tensors_in(*value.values())
    return found


def native_off(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call with native autocast off on every device."""
    on = mode.native_on()
    if _is_dynamo_compiling():
        return _native_off_compiled(on, func, args, kwargs)
    for device in on:
        torch.set_autocast_enabled(device, False)
    try:
        return func(*args, **kwargs)
    finally:
        for device in on:
            torch.set_autocast_enabled(device, True)


def _native_off_compiled(on: list[str], func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if not on:
        return func(*args, **kwargs)
    with torch.autocast(on[0], enabled=False):
        return _native_off_compiled(on[1:], func, args, kwargs)


def half_native(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """An op that native autocast lowers by itself: only its weights are ours, from the cache."""
    if mode.cache is None or _is_compiling():
        return func(*args, **kwargs) if kwargs else func(*args)
    if not kwargs:
        weight = mode.weight
        return func(
            *[
                weight(a)
                if type(a) is Parameter or (isinstance(a, torch.Tensor) and a.requires_grad and a.is_leaf)
                else a
                for a in args
            ]
        )
    if kwargs.get("out") is not None:
        return func(*args, **kwargs)
    args = [mode.weight(a) if _is_weight(a) else a for a in args]
    return func(*args, **{key: mode.weight(a) if _is_weight(a) else a for key, a in kwargs.items()})


def _is_weight(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_leaf and (value.requires_grad or type(value) is Parameter)


def to_half(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], name: str) -> Any:
    """Cast every fp32 and 16-bit argument to the 16-bit dtype."""
    if not kwargs:
        return func(*[_lower(mode, a, name) for a in args])
    if kwargs.get("out") is not None:
        return func(*args, **kwargs)
    return func(*[_lower(mode, a, name) for a in args], **{key: _lower(mode, a, name) for key, a in kwargs.items()})


def _lower(mode: CastMode, value: Any, name: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return cast_args(lambda t: _lower(mode, t, name), value) if isinstance(value, _CONTAINERS) else value
    dtype = value.dtype
    if dtype is mode.dtype or dtype not in _CASTABLE or not mode.casts(value):
        return value
    if mode.verbose:
        say(name, dtype, mode.dtype)
    if mode.cache is not None and dtype is torch.float32 and value.is_leaf and not _is_compiling():
        return mode.cache.get(value, mode.dtype)
    return value.to(mode.dtype)


def emulated(
    mode: CastMode,
    func: Callable[..., Any],
    args: Any,
    kwargs: dict[str, Any],
    name: str,
    kind: str,
    lowers: bool,
    otherwise: Rule | None,
) -> Any:
    """An op in 16 bits, run in fp32 on the same numbers where the device has no units for it.

    Args:
        mode: the mode.
        func: the op.
        args: its arguments.
        kwargs: its keyword arguments.
        name: of the op.
        kind: the op's class in ``OP_CLASSES``.
        lowers: whether it is on the half list, so that fp32 arguments are rounded as well.
        otherwise: the rule for calls that are not emulated; None calls as it is.
    """
    floating = [t for t in tensors_in(args, kwargs) if t.is_floating_point()]
    half = None if kwargs.get("out") is not None else _emulated_dtype(mode, floating, kind, lowers)
    if half is None:
        return func(*args, **kwargs) if otherwise is None else otherwise(mode, func, args, kwargs)

    def enter(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in _CASTABLE:
            return tensor
        if mode.verbose and tensor.dtype is not half:
            say(name, tensor.dtype, half)
        if mode.cache is not None and _is_weight(tensor) and not _is_compiling():
            return mode.cache.get(tensor, half, wide=True)
        return widen(tensor if tensor.dtype is half else narrow(tensor, half))

    def leave(tensor: torch.Tensor) -> torch.Tensor:
        return narrow(tensor, half) if tensor.dtype is torch.float32 else tensor

    return cast_args(leave, native_off(mode, func, cast_args(enter, list(args)), cast_args(enter, kwargs)))


def _emulated_dtype(mode: CastMode, tensors: list[torch.Tensor], kind: str, lowers: bool) -> torch.dtype | None:
    """The 16-bit dtype in which an op on some floating tensors is emulated; None if it is not."""
    if len(tensors) < 2:  # an einsum of one tensor is a view
        return None
    device, dtypes = tensors[0].device.type, {tensor.dtype for tensor in tensors}
    lowers = lowers and mode.casts(tensors[0])
    if (lowers or not mode.native) and not mode.explicit and device in NATIVE and torch.is_autocast_enabled(device):
        dtype, fits = torch.get_autocast_dtype(device), dtypes.issubset(_CASTABLE)  # a user's own inside may differ
    elif lowers:
        dtype, fits = mode.dtype, dtypes.issubset(_CASTABLE)
    else:
        dtype, fits = tensors[0].dtype, len(dtypes) == 1
    return dtype if fits and (device, dtype, kind) in mode.emulated else None


def to_float(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], name: str) -> Any:
    """Cast every 16-bit argument to fp32, unless the caller asks for a 16-bit result: some ops refuse to narrow."""
    if not kwargs:
        return func(*[_widen(mode, a, name) for a in args])
    if kwargs.get("out") is not None or kwargs.get("dtype") in HALF_DTYPES:
        return func(*args, **kwargs)
    return func(*[_widen(mode, a, name) for a in args], **{key: _widen(mode, a, name) for key, a in kwargs.items()})


def _widen(mode: CastMode, value: Any, name: str) -> Any:
    if not isinstance(value, torch.Tensor):
        return cast_args(lambda t: _widen(mode, t, name), value) if isinstance(value, _CONTAINERS) else value
    if value.dtype not in HALF_DTYPES or not mode.casts(value):
        return value
    if mode.verbose:
        say(name, value.dtype, torch.float32)
    return value.float()


def promote(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], name: str) -> Any:
    """Cast every floating argument to the widest dtype among them."""
    if kwargs and kwargs.get("out") is not None:
        return func(*args, **kwargs)
    widest = widest_dtype(tensors_in(args, kwargs))
    if widest is None:
        return func(*args, **kwargs)

    def widen(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is widest or tensor.dtype not in _CASTABLE or not mode.casts(tensor):
            return tensor
        if mode.verbose:
            say(name, tensor.dtype, widest)
        return tensor.to(widest)

    return func(*cast_args(widen, list(args)), **cast_args(widen, kwargs))


def widest_dtype(tensors: list[torch.Tensor]) -> torch.dtype | None:
    """The dtype that floating tensors promote to, or None if they have one dtype already.

    Scalars (tensors of no dimension) count only where there is nothing else, as in torch.
    """
    floating = [t for t in tensors if t.dtype in _CASTABLE or t.dtype is torch.float64]
    dtypes = {t.dtype for t in floating if t.dim()} or {t.dtype for t in floating}
    if len({t.dtype for t in floating}) < 2:
        return None
    return functools.reduce(torch.promote_types, dtypes)


def match_self(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """An in-place op keeps the dtype of what it writes into; the other arguments follow."""
    target = args[0].dtype if args else None
    if target not in _CASTABLE:
        return func(*args, **kwargs)

    def follow(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is target or tensor.dtype not in _CASTABLE or not mode.casts(tensor):
            return tensor
        return tensor.to(target)

    return native_off(mode, func, [args[0], *cast_args(follow, args[1:])], cast_args(follow, kwargs))


def float_inplace(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], name: str) -> Any:
    """An fp32 op cannot write its result into 16 bits."""
    if args and args[0].dtype in HALF_DTYPES and mode.casts(args[0]):
        raise UnsafeOpError(
            f"{name}_ runs in fp32 under op casting and cannot write in place into a {dtype_name(args[0].dtype)} "
            f"tensor; use the form that is not in place, x = x.{name}(...), or convert the tensor first, x.float()."
        )
    return to_float(mode, func, args, kwargs, name)


def banned(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], name: str, hint: str) -> Any:
    """Refuse 16-bit arguments, or with ``allow_banned`` widen them."""
    if not mode.allow_banned:
        for tensor in tensors_in(args, kwargs):
            if tensor.dtype in HALF_DTYPES and mode.casts(tensor):
                raise UnsafeOpError(f"{name} is unsafe with {dtype_name(tensor.dtype)} inputs. {hint}")
    return to_float(mode, func, args, kwargs, name)


def backward(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A backward pass is not cast: its ops have the dtypes that forward chose. It ends the life of cached casts."""
    mode.clear_cache()
    return native_off(mode, func, args, kwargs)


def forget(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """``param.data`` is memory that can be written to without a new version: the copy may go stale."""
    if mode.cache is not None and not _is_compiling():
        mode.cache.forget(args[0])
    return func(*args, **kwargs)


def without_native(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """An op that native autocast would cast and our lists leave alone."""
    return native_off(mode, func, args, kwargs) if mode.native_on() else func(*args, **kwargs)


def make_rule(rule: Callable[..., Any], name: str, off: bool, *extra: Any) -> Rule:
    """A rule bound to one op, with native autocast off for the op itself where ``off``."""
    if not off:
        keywords = {"hint": extra[0]} if extra else {}
        return functools.partial(rule, name=name, **keywords)

    def shielded(mode: CastMode, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if not mode.on():
            return func(*args, **kwargs)

        def inner(*args: Any, **kwargs: Any) -> Any:
            return native_off(mode, func, args, kwargs)

        return rule(mode, inner, args, kwargs, name, *extra)

    return shielded
