"""From whatever a user calls an op to its one canonical name, and from there to every torch callable that spells it."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional

from ..errors import ArgumentTypeError, ArgumentValueError
from . import tables

__all__ = ["canonical", "is_inplace", "resolve", "resolve_all", "spellings", "universe"]


class Spelling(NamedTuple):
    """One way to write an op: its dotted name, and the callable that a ``TorchFunctionMode`` sees."""

    name: str
    function: Callable[..., Any]


class _Universe(NamedTuple):
    spellings: dict[str, tuple[Spelling, ...]]
    by_function: dict[Any, str]
    by_name: dict[str, tuple[str, ...]]


def spellings(op: str) -> tuple[Spelling, ...]:
    """Every spelling of a canonical op in this torch, in-place ones too; empty if this torch has none."""
    return universe().spellings.get(op, ())


def is_inplace(spelling: Spelling) -> bool:
    """Whether a spelling writes its result into its first argument (``exp_``, ``__ipow__``)."""
    name = spelling.name.rpartition(".")[2]
    return name.endswith("_") and (not name.startswith("__") or name.startswith("__i"))


def canonical(function: object) -> str | None:
    """The op that a torch callable spells, or None if it is no op of torch."""
    try:
        return universe().by_function.get(function)
    except TypeError:  # not hashable
        return None


def resolve(op: object) -> tuple[str, ...]:
    """The canonical names of what a user named; more than one for Paddle's names that cover several torch ops.

    Args:
        op: a torch callable, an operator overload, or a name: ``"softmax"``, ``"torch.nn.functional.softmax"``,
            ``"aten::softmax"``, ``"linalg.norm"``, or Paddle's ``"elementwise_add"``.

    Raises:
        ArgumentValueError: if there is no such op, with the nearest names there are.
        ArgumentTypeError: if it is neither a name nor callable.
    """
    if isinstance(op, str):
        found = _resolve_name(op.strip())
        if found:
            return found
        near = difflib.get_close_matches(op.strip().rpartition(".")[2].rpartition(":")[2], universe().by_name, n=3)
        hint = f"The nearest names are {', '.join(near)}." if near else "Use a name of torch or of Paddle."
        raise ArgumentValueError(f"There is no op named {op!r}. {hint} `halfstep oplists` prints the lists.")
    if not callable(op):
        raise ArgumentTypeError(f"An op is named by a string or given as a torch callable, not by {op!r}.")
    name = canonical(op)
    if name is not None:
        return (name,)
    found = _resolve_aten(str(op).removeprefix("aten.")) if type(op).__module__ == "torch._ops" else ()
    if found:
        return found
    raise ArgumentValueError(
        f"{op!r} is no op of torch. Give a function such as torch.softmax or its name; for a function of your own use "
        "amp.register_half_function, register_float_function or register_promote_function."
    )


def resolve_all(ops: object, argument: str) -> tuple[str, ...]:
    """The canonical names of a list of ops, sorted, each once.

    Raises:
        ArgumentTypeError: for a single string, or anything else that is no collection.
        ArgumentValueError: for an op that does not exist.
    """
    if ops is None:
        return ()
    if isinstance(ops, str) or not isinstance(ops, Iterable):
        raise ArgumentTypeError(f"{argument}={ops!r} must be a list of ops; write [{ops!r}].")
    return tuple(sorted({name for op in ops for name in resolve(op)}))


def _resolve_name(name: str) -> tuple[str, ...]:
    if name.startswith("aten::"):
        return _resolve_aten(name.removeprefix("aten::"))
    for prefix in ("torch.ops.aten.", "aten."):
        if name.startswith(prefix):
            return _resolve_aten(name.removeprefix(prefix))
    found = universe().by_name.get(name)
    if found or "." not in name:
        return found or ()
    target: Any = torch
    path = name.removeprefix("torch.")
    for short, full in (("F.", "nn.functional."), ("functional.", "nn.functional.")):
        if path.startswith(short):
            path = full + path.removeprefix(short)
    for part in path.split("."):
        target = getattr(target, part, None)
    op = canonical(target) if target is not None else None
    return () if op is None else (op,)


def _resolve_aten(name: str) -> tuple[str, ...]:
    base = name.partition(".")[0]
    names = universe().by_name
    for prefix in ("linalg", "fft", "special"):
        if base.startswith(prefix + "_"):
            return names.get(f"{prefix}.{base.removeprefix(prefix + '_')}", ())
    return tables.ATEN_NAMES.get(base) or (names.get(base, ()) if base not in tables.PADDLE_NAMES else ())


@functools.lru_cache(maxsize=1)
def universe() -> _Universe:
    """All ops of this torch. Built on first use, from torch's own namespaces and the tables."""
    listed = [
        *tables.HALF,
        *(name for names in tables.FLOAT.values() for name in names),
        *tables.PROMOTE,
        *tables.PROMOTE_BY_TORCH,
        *tables.SEQUENCE_PROMOTE,
        *tables.BANNED,
        *tables.NATIVE_UNLISTED,
    ]
    found: dict[str, tuple[Spelling, ...]] = {}
    by_function: dict[Any, str] = {}
    by_name: dict[str, tuple[str, ...]] = {}
    for op in dict.fromkeys([*listed, *tables.ALIASES, *_namespace_names()]):
        if op in by_name:
            continue
        forms = [f for f in _forms(op) if by_function.setdefault(f.function, op) == op]
        if not forms and op not in listed:
            continue
        found[op] = tuple(forms)
        by_name[op] = (op,)
        for form in forms:
            by_name.setdefault(form.name, (op,))
            short = form.name.rpartition(".")[2]
            if not short.startswith("_") and "linalg." not in form.name and "fft." not in form.name:
                by_name.setdefault(short, (op,))
            special = form.name.removeprefix("torch.")
            if special.startswith("special."):
                by_name.setdefault(special, (op,))
    for name, ops in tables.PADDLE_NAMES.items():
        by_name.setdefault(name, ops)
    return _Universe(found, by_function, by_name)


_PLAIN = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch._C._nn": torch._C._nn,
}
_DOTTED = {"linalg": torch.linalg, "fft": torch.fft, "special": torch.special}


def _namespace_names() -> Iterator[str]:
    """Every name under which torch has an op, in-place forms and private names left out."""
    of_torch = {*dir(torch._C._VariableFunctions), *torch.functional.__all__}
    for prefix, space in _PLAIN.items():
        for name in dir(space):
            if name.startswith("_") or name.endswith("_") or (prefix == "torch" and name not in of_torch):
                continue
            function = getattr(space, name, None)
            if callable(function) and not isinstance(function, type) and _is_op(function):
                yield name
    for prefix, space in _DOTTED.items():
        for name in getattr(space, "__all__", dir(space)):
            if _is_op(getattr(space, name, None)):
                yield f"{prefix}.{name}"


def _is_op(function: object) -> bool:
    if isinstance(function, FunctionType):
        # _tensor holds the Python methods of Tensor; _jit_internal makes functions of two forms, such as max_pool2d.
        module = function.__module__
        return module in ("torch.functional", "torch.nn.functional", "torch._tensor", "torch._jit_internal")
    return type(function).__name__ in ("builtin_function_or_method", "method_descriptor", "wrapper_descriptor")


def _forms(op: str) -> Iterator[Spelling]:
    for name in (op, *tables.ALIASES.get(op, ())):
        if "." in name:
            target: Any = torch
            for part in name.split("."):
                target = getattr(target, part, None)
            if callable(target):
                yield Spelling(f"torch.{name}", target)
            continue
        for prefix, space in _PLAIN.items():
            for attribute in (name, name + "_"):
                function = getattr(space, attribute, None)
                if callable(function) and not isinstance(function, type):
                    yield Spelling(f"{prefix}.{attribute}", function)
