"""Tensors in nests of containers."""

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
"""An object, its cast, and the items of the cast of a container."""


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in lists, tuples and dicts of any depth; anything else stays as it is."""
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
    """Every tensor in lists, tuples and dicts of any depth."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, values)
    return found


def items_of(container: Any) -> dict[Any, Any]:
    """The items of a list, or a mapping, by index or key; the attributes of any other object."""
    if isinstance(container, list):
        return dict(enumerate(container))
    return dict(container if isinstance(container, Mapping) else getattr(container, "__dict__", {}))


def cast_tree(value: Any, dtype: torch.dtype, cast: Callable[..., Any] | None = None, made: Made | None = None) -> Any:
    """Cast every floating tensor in a nest of containers; what holds none comes back as the same object.

    Containers keep their type: lists, tuples, named tuples, sets, mappings of any class, dataclasses,
    ``PackedSequence``. Another object with a ``to`` method is asked ``value.to(dtype)``, as Apex did.

    Args:
        value: anything.
        dtype: the dtype of the results.
        cast: a function that is called with each floating tensor of another dtype, after the number or key of each item
            in its container; None is ``tensor.to(dtype)``.
        made: gets each container of which a copy is made, the copy, and the items of the copy. What is in it already
            is not copied again.
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
    """The items that a cast makes other objects of, cast."""
    changes = {key: cast(key, item) for key, item in items.items()}
    return {key: item for key, item in changes.items() if item is not items[key]}
