"""The names of ops, as torch, Paddle and users write them, and the torch callables that compute each op."""

from __future__ import annotations

import difflib
import functools
import operator
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch.overrides import get_overridable_functions

from ...torch_internals.torch_compat import (
    C_NAMESPACES,
    FunctionSchema,
    OpOverload,
    OpOverloadPacket,
    all_op_names,
    schemas_of_op,
)
from ..errors import ArgumentTypeError, ArgumentValueError
from .tables import OF_TORCHVISION, OPS, paddle, pairs, row_of, words

__all__ = ["Spelling", "computes", "dispatcher_spellings", "known_names", "resolve", "spellings", "takes_number"]

Spelling = tuple[str, bool]
"""The canonical name of the op that a callable computes, and True if the callable writes to its first argument."""

_LISTED = frozenset(op.name for op in OPS.values() if op.list != "free")

_OPERATORS = {
    **{f"__{name}__": name for name in ("add", "sub", "mul", "matmul", "pow", "eq", "ne", "ge", "gt", "le", "lt")},
    **{f"__r{name}__": name for name in ("add", "sub", "mul", "matmul", "pow", "div")},
    **{f"__i{name}__": f"{name}_" for name in ("add", "sub", "mul", "pow", "div")},
    **pairs("__div__=div __truediv__=div __rtruediv__=div __itruediv__=div_ __mod__=remainder"),
    **pairs("__floordiv__=floor_divide __neg__=neg __abs__=abs"),
}
_SYNONYMS = pairs("""
    subtract=sub rsub=sub multiply=mul divide=div true_divide=div arccos=acos arcsin=asin arctanh=atanh
    greater=gt greater_equal=ge less=lt less_equal=le not_equal=ne ger=outer clip=clamp concat=cat concatenate=cat
    negative=neg absolute=abs det=linalg_det slogdet=linalg_slogdet inv=linalg_inv
    matrix_power=linalg_matrix_power matrix_exp=linalg_matrix_exp max_pool1d_with_indices=max_pool1d
    max_pool2d_with_indices=max_pool2d max_pool3d_with_indices=max_pool3d arctan2=atan2 row_stack=vstack
    moveaxis=movedim swapdims=swapaxes _grouped_mm=grouped_mm _varlen_attn=varlen_attn
    """)


_PREFIXED = ("linalg", "fft", "special")
_PLAIN = (C_NAMESPACES["functions"], torch, torch.functional, torch.Tensor, C_NAMESPACES["nn"], torch.nn.functional)
_NAMESPACES: tuple[tuple[Any, str], ...] = (
    *((space, "") for space in _PLAIN),
    *(pair for name in _PREFIXED for pair in ((C_NAMESPACES[name], ""), (getattr(torch, name), name + "_"))),
)
_CALLABLES = (types.BuiltinFunctionType, types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)


@functools.cache
def _aten() -> frozenset[str]:
    """Return the base names of all ATen ops."""
    return frozenset(name[6:].partition(".")[0] for name in all_op_names() if name.startswith("aten::"))


@functools.cache
def _composites() -> frozenset[str]:
    """Return the names of Python functions that torch passes to function modes, such as ``gumbel_softmax``."""
    spaces, found = (torch.nn.functional, torch.functional), get_overridable_functions()
    return frozenset(f.__name__ for space in spaces for f in found.get(space, ()))


@functools.cache
def known_names() -> frozenset[str]:
    """Return every canonical name that an op list may contain."""
    return frozenset(name for name in _aten() | _composites() | _LISTED if not name.endswith(("_", "_backward")))


def _canonical(name: str) -> Spelling | None:
    """Return the op that a bare function name means, and True if it names the in-place form; None for no op."""
    name = _OPERATORS.get(name, name)
    inplace = name.endswith("_") and not name.endswith("__")
    base = name[:-1] if inplace else name
    base = _SYNONYMS.get(base, base)
    if base.startswith("special_") and base[8:] in known_names():
        base = base[8:]
    return (base, inplace) if base in known_names() else None


def _attributes() -> Iterator[tuple[str, Callable[..., Any]]]:
    for space, prefix in _NAMESPACES:
        for name in dir(space):
            value = getattr(space, name, None)
            if isinstance(value, _CALLABLES) and (space is not torch or getattr(torch, "_" + name, None) is not value):
                yield (name if name.startswith(("_", prefix)) or not prefix else prefix + name), value


@functools.cache
def spellings() -> dict[Callable[..., Any], Spelling]:
    """Return every torch callable that computes an op: functions, methods, operators and their private C++ forms."""
    found: dict[Callable[..., Any], Spelling] = {}
    for name, value in _attributes():
        if (spelling := _canonical(name)) is not None:
            found.setdefault(value, spelling)
    # Under torch.export(strict=True) a mode gets these functions instead of the methods of Tensor.
    for name in ("add", "sub", "mul", "matmul", "pow", "truediv", "mod", "eq", "ne", "ge", "gt", "le", "lt"):
        for prefix in ("", "i"):
            if (spelling := _canonical(f"__{prefix}{name}__")) is not None and hasattr(operator, prefix + name):
                found[getattr(operator, prefix + name)] = spelling
    return found


@functools.cache
def dispatcher_spellings() -> dict[str, Spelling]:
    """Return the spelling of each name in torch's dispatcher, such as ``"aten::mm"``."""
    found = {f"aten::{name}": spelling for name in _aten() if (spelling := _canonical(name)) is not None}
    return found | {"torch_attn::_varlen_attn": ("varlen_attn", False)}


def resolve(op: object) -> tuple[str, ...]:
    """Return the canonical names that an entry of an op list means. A Paddle name may mean several torch ops.

    Args:
        op: a torch callable (``torch.softmax``, ``torch.nn.functional.softmax``, ``torch.Tensor.softmax``), or a name:
            "softmax", "F.softmax", "torch.nn.functional.softmax", "aten::softmax.int", or Paddle's "reduce_sum".

    Returns:
        The names; empty for a Paddle op whose result dtype is an argument, such as "cast".

    Raises:
        ArgumentValueError: for an unknown name (the error suggests the nearest names), or for a callable that is not an
            op of torch.
        ArgumentTypeError: if ``op`` is neither a name nor a callable.
    """
    if isinstance(op, str):
        name = op.strip()
        if name.startswith("aten::"):
            name = name[6:].partition(".")[0]
        elif "." in name:
            space, _, last = name.rpartition(".")
            inner = space.rpartition(".")[2]
            name = f"{inner}_{last}" if inner in _PREFIXED else last
        spelling = _canonical(name)
        if spelling is not None:
            return (spelling[0],)
        if name in paddle():
            return paddle()[name]
        if name in OF_TORCHVISION:
            theirs = OF_TORCHVISION[name]
            raise ArgumentValueError(
                f"{op!r} is an op of torchvision, not of torch. Remove it from the list and use "
                f"amp.register_float_function(torchvision.ops, {theirs!r}) or amp.register_half_function."
            )
        names = known_names() | paddle().keys()
        nearest = difflib.get_close_matches(name.lower(), sorted(n for n in names if n[0] != "_"), n=3, cutoff=0.5)
        hint = f" Did you mean {', '.join(map(repr, nearest))}?" if nearest else ""
        raise ArgumentValueError(
            f"{op!r} is not an op of torch or Paddle.{hint} Write it as in torch, 'softmax', "
            "'torch.nn.functional.softmax' or 'aten::softmax', or pass the torch function itself."
        )
    if isinstance(op, (OpOverload, OpOverloadPacket)):
        return resolve(str(getattr(op, "overloadpacket", op)))
    if callable(op):
        found = spellings().get(op) if isinstance(op, Hashable) else None
        if found is None:
            raise ArgumentValueError(
                f"{op!r} is not an op of torch; to cast your own functions, use amp.half_function, amp.float_function "
                "or amp.promote_function."
            )
        return (found[0],)
    raise ArgumentTypeError(f"op must be a name or a torch function, not {op!r}.")


_INTERNAL_PREFIXES = tuple(words("_ is_ sym_ quantize to_ sparse_ mkldnn_ miopen_ fbgemm_ fake_quantize_ empty_"))
_TENSORS = ("Tensor", "Tensor[]")


@functools.cache
def computes(name: str) -> bool:
    """True if an op computes new values from its inputs, unlike views, factories and conversions."""
    if name in _LISTED:
        return True
    if row_of(name).result == "given" or name not in known_names() or name.startswith(_INTERNAL_PREFIXES):
        return False
    return any(_makes_values(s) for s in schemas_of_op(f"aten::{name}") if not any(a.is_out for a in s.arguments))


@functools.cache
def takes_number(name: str) -> bool:
    """True if an op computes with a Python number and a tensor."""
    texts = map(str, schemas_of_op(f"aten::{name}")) if computes(name) else ()
    return any("Tensor " in text and ("Scalar " in text or "Scalar? " in text) for text in texts)


def _makes_values(schema: FunctionSchema) -> bool:
    takes = any(str(a.type) in _TENSORS for a in schema.arguments)
    gives = [r for r in schema.returns if str(r.type) in _TENSORS]
    return takes and bool(gives) and all(r.alias_info is None for r in gives)
