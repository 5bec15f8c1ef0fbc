"""Tensors in nests of containers, cast where they lie."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

__all__ = ["cast_tree"]


def cast_tree(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating tensor in a nest of containers; what holds none comes back as the same object.

    Containers keep their type: lists, tuples, named tuples, sets, mappings of any class, dataclasses,
    ``PackedSequence``. Another object with a ``to`` method is asked ``value.to(dtype)``, as Apex did.
    """
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype != dtype else value
    if isinstance(value, PackedSequence):
        return value.to(dtype) if value.data.is_floating_point() else value
    if value is None or isinstance(value, (str, bytes, int, float, complex, nn.Module, type)):
        return value
    if isinstance(value, Mapping):
        cast = {key: cast_tree(item, dtype) for key, item in value.items()}
        if all(cast[key] is item for key, item in value.items()):
            return value
        if type(value) is dict:
            return cast
        mapping: Any = copy.copy(value)
        for key, item in cast.items():
            mapping[key] = item
        return mapping
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [cast_tree(item, dtype) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = cast_tree(old, dtype)
            if new is not old:
                changed[field.name] = new
        if not changed:
            return value
        twin: Any = copy.copy(value)
        for name, new in changed.items():
            object.__setattr__(twin, name, new)
        return twin
    convert = getattr(value, "to", None)
    return convert(dtype) if callable(convert) else value
