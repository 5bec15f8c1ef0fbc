"""Copies of a step: the function again, on copies of the model, the optimizer and all else that it reaches.

``copy.deepcopy`` shares functions, so a function is built anew with copies in its closure and of the global names that
it reads. Objects that refuse a copy, such as a running iterator, are shared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from ..core.errors import UsageError
from ..core.inner_optimizers import unwrap

__all__ = ["copied"]


def copied(step: Callable[[], Any], model: nn.Module | None, optimizers: list[Any]) -> tuple[Any, Any, list[Any]]:
    """Copy a step together with its model and optimizers, so that the three belong together.

    Raises:
        UsageError: for a model or an optimizer that cannot be copied.
    """
    memo: dict[int, Any] = {}
    try:
        model, optimizers = copy.deepcopy((model, optimizers), memo)
    except Exception as error:
        raise UsageError(
            f"diagnose runs the step on copies, and the model or the optimizer cannot be copied ({error}). Diagnose "
            "the script instead, which runs in another process: halfstep doctor train.py."
        ) from error
    return _copy(step, memo), model, [unwrap(each) for each in optimizers]


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, FunctionType):
        return _function(value, memo) if _is_of_user(value) else value
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _copy(value.__self__, memo))
    if isinstance(value, (ModuleType, type, BuiltinFunctionType)):
        return value
    known = dict(memo)
    try:
        made = copy.deepcopy(value, known)
    except Exception:  # noqa: BLE001 - a user's object may refuse a copy with any error
        return value
    memo.update(known)
    return made


def _is_of_user(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] not in ("torch", "halfstep")


def _function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    names = dict(function.__globals__)
    cells = tuple(CellType() for _ in function.__closure__ or ())
    made = FunctionType(function.__code__, names, function.__name__, None, cells)
    memo[id(function)] = made  # before what it refers to: it may call itself
    made.__defaults__ = _copy(function.__defaults__, memo)
    made.__kwdefaults__ = _copy(function.__kwdefaults__, memo)
    for name in _names(function.__code__) & names.keys():
        names[name] = _copy(names[name], memo)
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents = _copy(old.cell_contents, memo)
        except ValueError:  # an empty cell
            continue
    return made


def _names(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names, inner))
