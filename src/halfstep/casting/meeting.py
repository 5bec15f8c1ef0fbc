"""Retries of ops that torch refuses because of the dtypes of their arguments.

The op lists name the ops that need a cast. Other ops refuse a 16-bit tensor together with an fp32 tensor, such as an
assignment ``x[mask] = y``, or have no 16-bit kernel. torch checks dtypes before it computes or writes anything, so
calling the op again with matching dtypes repeats no work. Calls that torch accepts are not changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch

from ..core.dtypes import HALF_DTYPES
from ..core.oplists.dtypes import ANY, FIRST, FLOAT, HALF, read_in, refused_row
from ..core.oplists.names import computes, spellings
from ..core.oplists.tables import row_of
from ..torch_internals.torch_compat import OpOverload, OpOverloadPacket, is_any_autocast_enabled, qualified_name
from .composites import composite_rule, has_question
from .containers import map_tensors, tensors_in
from .dispatch import CastMode, Rule, count_changed_op
from .finite import write_in_fp32
from .rules import CASTABLE, bind, match_self, promote, to_float, without_native

__all__ = ["call_again", "refused_rule"]

_ASSIGNMENTS = ("__setitem__", "index_put_", "put_")


def call_again(mode: CastMode, rule: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Retry an op that torch refused, with its fp32 and 16-bit arguments cast to one dtype after another.

    Args:
        mode: the mode; tensors on its devices are cast.
        rule: the rule of the op.
        func: the op.
        args: the arguments of the call.
        kwargs: the keyword arguments of the call.

    Returns:
        True if torch accepted a retry, and its result.
    """
    taken, result = _call_again(mode, rule, func, args, kwargs)
    _, recorded, *_ = numbers if isinstance(numbers := mode.plan.recorded.get(func), tuple) else (None, numbers)
    if taken and recorded is not None and not (mode.native_on() or "out" in kwargs or _in_place(func, func.__name__)):
        if not (isinstance(rule, partial) and rule.func is _refused_before):
            rule, entry = bind(_refused_before, set(), recorded, rule), mode.plan.table.get(func)
            mode.plan.table[func] = (entry[0], rule, *entry[2:]) if isinstance(entry, tuple) else rule
        rule.args[0].add(tuple([tensor.dtype for tensor in tensors_in(args, kwargs)]))
    return taken, result


def _call_again(mode: CastMode, rule: Rule, func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[bool, Any]:
    floating = [t for t in tensors_in(args, kwargs) if t.dtype in CASTABLE]
    halves = [t for t in floating if t.dtype in HALF_DTYPES]
    name, _ = spellings().get(func, (getattr(func, "__name__", ""), False))
    foreign = any(t.device.type not in mode.config.devices for t in floating)
    native = mode.native_on()
    if not (halves or native) or foreign or isinstance(kwargs.get("out"), tuple) or not _computes(func, name):
        return False, None
    if isinstance(func, FunctionType) and has_question(func):  # written in Python: the ops inside meet
        return True, composite_rule(func)(mode, func, args, kwargs)
    target = _target(func, name, args, kwargs)
    for dtype in _candidates(func, name, target, floating, halves[0].dtype if halves else mode.config.dtype):
        if all(t.dtype is dtype for t in floating) and not native:
            continue
        try:
            call = rule if dtype in HALF_DTYPES else without_native
            result = call(mode, func, _cast(args, dtype), _cast(kwargs, dtype))
        except RuntimeError:  # refused again; the first error says more
            continue
        return True, result
    fills = "out" not in kwargs and (name in (*_ASSIGNMENTS, "fill") or computes(name))
    if fills and target is not None and target.dtype in HALF_DTYPES:
        with contextlib.suppress(RuntimeError):  # it has no kernel for 16 bits, or a number that they do not have
            return True, write_in_fp32(mode, func, target, args, kwargs)
    return False, None


def _refused_before(
    refused: set[Any], recorded: Rule, otherwise: Rule, mode: CastMode, func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """An op with dtypes that torch has refused before gets the rule that it has where it cannot be called again.

    An error of torch's and a second call take some ten times as long as a cast.
    """
    again = tuple([tensor.dtype for tensor in tensors_in(args, kwargs)]) in refused
    return (recorded if again else otherwise)(mode, func, args, kwargs)


def _computes(func: Callable[..., Any], name: str) -> bool:
    """True if a callable is an op of torch's own. ``backward`` and the setter of ``grad`` are none.

    A custom op may have done something before it failed, and a second call would repeat it.
    """
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return qualified_name(func).startswith("aten::")
    if isinstance(func, FunctionType):
        return func in spellings() or func.__module__ in ("torch.nn.functional", "torch.functional")
    return func in spellings() or name in _ASSIGNMENTS or hasattr(torch.ops.aten, name)


def _in_place(func: Callable[..., Any], name: str) -> bool:
    inplace = spellings().get(func, ("", False))[1] or (name.endswith("_") and not name.endswith("__"))
    return inplace or name in _ASSIGNMENTS


def _target(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The 16-bit or fp32 tensor that an op writes to; None for any other op."""
    target = args[0] if args and _in_place(func, name) else kwargs.get("out")
    return target if isinstance(target, torch.Tensor) and target.dtype in CASTABLE else None


def _candidates(func: Any, name: str, target: Any, floating: list[Any], half: torch.dtype) -> Iterator[torch.dtype]:
    """Yield the dtypes to try: the dtype of the tensor that is written to; else 16 bits for a product, and fp32."""
    if target is not None or _in_place(func, name):
        # Lists of tensors may be written in part. Integers refuse floating numbers in fp32, too.
        if target is not None and any(t.dtype is not target.dtype for t in floating):
            yield target.dtype
        return
    if read_in(refused_row(row_of(name), False)) == HALF:
        yield half
    yield torch.float32


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.dtype in CASTABLE else tensor, value)


def _met(
    rule: Rule, otherwise: Rule | None, mixed: bool, half_first: bool, mode: CastMode, func: Any, args: Any, kwargs: Any
) -> Any:
    """Cast and count a call that torch refuses, or whose result or gradient is wrong.

    Args:
        rule: the rule that casts it.
        otherwise: the rule for calls that are not cast; None calls the op unchanged.
        mixed: True to cast only calls with both 16-bit and fp32 tensors.
        half_first: True for a norm: torch accepts 16-bit inputs with fp32 weights, but not the reverse.
        mode: the mode.
        func: the op.
        args: the arguments of the call.
        kwargs: the keyword arguments of the call.
    """
    dtypes = {tensor.dtype for tensor in tensors_in(args, kwargs)}
    accepted = half_first and (args[0] if args else kwargs["input"]).dtype in HALF_DTYPES
    if accepted or dtypes.isdisjoint(HALF_DTYPES) or (mixed and torch.float32 not in dtypes):
        return func(*args, **kwargs) if otherwise is None else otherwise(mode, func, args, kwargs)
    count_changed_op()
    return rule(mode, func, args, kwargs)


def refused_rule(name: str, inplace: bool, otherwise: Rule | None) -> Rule | None:
    """Return the rule of a recorded op, which cannot be retried when it runs.

    The row of the op says which dtypes torch refuses, and for which ops it gives a wrong result or gradient. An op on
    no list is not cast unless torch has no kernel for it.

    Args:
        name: the name of the op.
        inplace: True if it writes to its first argument.
        otherwise: the rule for calls that torch accepts.
    """
    op = refused_row(row_of(name), inplace)
    read = read_in(op, inplace)
    silent = name.startswith("_") or op.result == "given" if inplace else op.list == "free" and op.kernels == "all"
    if read == ANY or silent:
        return otherwise
    casts = {HALF: bind(_in_half, otherwise), FLOAT: bind(to_float, name), FIRST: match_self}
    mixed = inplace or op.kernels not in ("none", "wrong")
    return bind(_met, casts.get(read) or bind(promote, name), otherwise, mixed, op.reads == "half-first")


def _in_half(otherwise: Rule | None, mode: CastMode, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Cast the arguments of a product to the 16-bit dtype among them, unless native autocast casts them."""
    if not is_any_autocast_enabled():
        half = next(tensor.dtype for tensor in tensors_in(args, kwargs) if tensor.dtype in HALF_DTYPES)
        args, kwargs = _cast(args, half), _cast(kwargs, half)
    return func(*args, **kwargs) if otherwise is None else otherwise(mode, func, args, kwargs)
