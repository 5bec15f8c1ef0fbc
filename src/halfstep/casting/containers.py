"""Functions that map over the tensors in nested containers."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

__all__ = ["Made", "cast_tree", "items_of", "map_tensors", "tensors_in"]


Made = list[tuple[Any, Any, Any]]
"""A list of (object, its cast, the items of the cast if it is a container)."""


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in lists, tuples and dicts of any depth; other values are returned unchanged."""
    if isinstance(value, torch.Tensor):
        return function(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_tensors(function, item) for item in value])
    if isinstance(value, (tuple, list)):
        return _sequence(kind, [map_tensors(function, item) for item in value])
    if isinstance(value, Mapping):
        return {key: map_tensors(function, item) for key, item in value.items()}
    return value


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """List every tensor in lists, tuples and dicts of any depth."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, values)
    return found


def items_of(container: Any) -> dict[Any, Any]:
    """Return the items of a list or mapping by index or key, or the attributes of any other object."""
    if isinstance(container, list):
        return dict(enumerate(container))
    return dict(container if isinstance(container, Mapping) else getattr(container, "__dict__", {}))


def cast_tree(value: Any, dtype: torch.dtype, cast: Callable[..., Any] | None = None, made: Made | None = None) -> Any:
    """Cast every floating tensor in nested containers; a container without any is returned as the same object.

    Containers keep their type: lists, tuples, named tuples, sets, mappings of any class, dataclasses and
    ``PackedSequence``. Any other object with a ``to`` method is cast by ``value.to(dtype)``, as in Apex.

    Args:
        value: anything.
        dtype: the dtype of the results.
        cast: a function that casts a floating tensor of another dtype; it gets the index or key in each container,
            then the tensor. None calls ``tensor.to(dtype)``.
        made: a list that gets each copied container, the copy, and the items of the copy. Objects in it are not copied
            again.
    """
    tensor = isinstance(value, torch.Tensor)
    if tensor and (value.dtype == dtype or not value.is_floating_point()):
        return value
    for given, copied, _ in made or ():
        if given is value:
            return copied
    if tensor:
        return value.to(dtype) if cast is None else cast(value)
    result = _cast(value, dtype, cast, made)
    if made is not None and result is not value:
        made.append((value, result, items_of(result)))
    return result


def _cast(value: Any, dtype: torch.dtype, cast: Callable[..., Any] | None, made: Made | None) -> Any:
    def inner(key: Any, item: Any) -> Any:
        return cast_tree(item, dtype, cast and functools.partial(cast, key), made)

    if isinstance(value, PackedSequence):
        return value.to(dtype) if value.data.is_floating_point() else value
    if value is None or isinstance(value, (str, bytes, int, float, complex, nn.Module, type)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [inner(i, item) for i, item in enumerate(value)]
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        return _sequence(type(value), items) if changed else value
    if isinstance(value, Mapping):
        changes = _changed(value, inner)
        if not (changes and isinstance(value, MutableMapping)):  # types.MappingProxyType can be made, not written to
            return type(value)({**value, **changes}) if changes else value  # type: ignore[call-arg]
        mapping: Any = copy.copy(value)
        for key, item in changes.items():
            mapping[key] = item
        return mapping
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        changes = _changed(fields, inner)
        other = copy.copy(value) if changes else value
        for name, item in changes.items():
            object.__setattr__(other, name, item)
        return other
    convert = getattr(value, "to", None)
    return convert(dtype) if callable(convert) else value


def _sequence(kind: Any, items: list[Any]) -> Any:
    return kind(*items) if hasattr(kind, "_fields") else kind(items)


def _changed(items: Mapping[Any, Any], cast: Callable[[Any, Any], Any]) -> dict[Any, Any]:
    """Return the items that a cast changes, cast."""
    changes = {key: cast(key, item) for key, item in items.items()}
    return {key: item for key, item in changes.items() if item is not items[key]}
