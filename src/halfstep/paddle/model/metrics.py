"""The metrics of a ``Model`` by name; metrics are objects like torchmetrics' ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...core.errors import ArgumentTypeError
from .data import as_list

__all__ = ["compute_metrics", "name_metrics", "reset_metrics"]


def name_metrics(given: Any) -> dict[str, Any]:
    """Name metrics. An unnamed metric gets the name of its class; the second one of a class is ``name_1``.

    Args:
        given: None, an object with ``update``, ``compute`` and ``reset``, a list of them, or a dict that names them.

    Raises:
        ArgumentTypeError: for an object that lacks one of these three methods.
    """
    named: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    for metric in () if isinstance(given, Mapping) else as_list(given):
        name = type(metric).__name__
        same = sum(key == name or key.startswith(f"{name}_") for key in named)
        named[f"{name}_{same}" if same else name] = metric
    for metric in named.values():
        if not all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset")):
            raise ArgumentTypeError(
                f"metrics need update, compute and reset, as torchmetrics' have; {type(metric).__name__} does not."
            )
    return named


def reset_metrics(named: Mapping[str, Any], device: torch.device) -> None:
    """Reset metrics and move them to a device."""
    for metric in named.values():
        metric.reset()
        if isinstance(metric, nn.Module):  # torchmetrics' metrics have buffers
            metric.to(device)


def compute_metrics(named: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the values by name. A metric that returns a mapping, such as a MetricCollection, names its values."""
    found: dict[str, Any] = {}
    for name, metric in named.items():
        value = metric.compute()
        found |= value if isinstance(value, Mapping) else {name: value}
    return found
