"""Helpers for datasets, loaders and their batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ...core.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["as_list", "as_loader", "batch_size_of", "inputs_and_labels", "length_of", "shapes_of", "stacked"]


def as_list(parts: Any) -> list[Any]:
    """Make a list of parts from None, one part, or a list or tuple of parts."""
    return [] if parts is None else list(parts) if isinstance(parts, (list, tuple)) else [parts]


def as_loader(data: Any, batch_size: int, shuffle: bool, num_workers: int, drop_last: bool = False) -> Iterable[Any]:
    """Make a loader for a dataset or a list of samples; return any other iterable as it is.

    Raises:
        ArgumentTypeError: for data that is not iterable.
    """
    is_loader = isinstance(data, DataLoader) or (isinstance(data, (list, tuple)) and not _has_samples(data))
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and not is_loader):
        shuffle = shuffle and not isinstance(data, IterableDataset)
        return DataLoader(data, batch_size=batch_size, shuffle=shuffle, num_workers=num_workers, drop_last=drop_last)
    if not isinstance(data, Iterable):
        raise ArgumentTypeError(
            f"The data must be a torch dataset, or a loader that gives batches, not {type(data).__name__}."
        )
    return data


def _has_samples(data: Sequence[Any]) -> bool:
    """True if a list holds samples, not batches: the label of its first item is a single number."""
    parts = as_list(data[0]) if data else []
    return len(parts) > 1 and (isinstance(parts[-1], (int, float)) or getattr(parts[-1], "ndim", None) == 0)


def inputs_and_labels(batch: Any) -> tuple[list[Any], list[Any]]:
    """Split a batch into its inputs and its label, which is the last part.

    Raises:
        ArgumentValueError: for a batch with fewer than two parts.
    """
    parts = as_list(batch)
    if len(parts) < 2:
        raise ArgumentValueError(f"A batch needs inputs and a label after them; this one has {len(parts)} part.")
    return parts[:-1], parts[-1:]


def batch_size_of(parts: list[Any]) -> int:
    """Count the samples in a batch: the length of its last part's first dimension.

    Raises:
        ArgumentTypeError: if the last part has no length.
    """
    last = parts[-1]
    if not hasattr(last, "__len__"):
        raise ArgumentTypeError(
            f"The label of a batch must be a tensor with one row for each sample, and this one is {last!r}, of type "
            f"{type(last).__name__}. The data is taken for a loader of batches: give a torch Dataset, a list of "
            "samples, or DataLoader(data, batch_size=...), which makes batches of samples."
        )
    return len(last) if not isinstance(last, torch.Tensor) or last.dim() else 1


def length_of(loader: Iterable[Any], most: int | None = None) -> int | None:
    """Count the batches of a loader, ``most`` at most; None if the loader has no length."""
    try:
        return len(range(len(loader))[:most])  # type: ignore[arg-type]
    except TypeError:  # a DataLoader over a stream has a __len__, which raises this too
        return None


def stacked(outputs: list[Any]) -> list[torch.Tensor]:
    """Concatenate a network's outputs over batches: one tensor per output.

    Raises:
        ArgumentTypeError: if an output is not a tensor with a dimension for samples.
    """
    parts = list(map(as_list, outputs))
    if not all(isinstance(part, torch.Tensor) and part.dim() for batch in parts for part in batch):
        raise ArgumentTypeError(
            "stack_outputs=True needs a network whose outputs are tensors with a row for each sample. Leave it out: "
            "predict then returns the outputs batch by batch."
        )
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def shapes_of(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a state dict, by name."""
    return {name: tuple(getattr(value, "shape", ())) for name, value in state.items()}
