"""The metrics of a ``Model``, by their names; they are objects like those of torchmetrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..core.errors import ArgumentTypeError
from .data import as_list

__all__ = ["Metrics"]


class Metrics:
    """Named metrics. A metric without a name has that of its class; the second of a class is ``name_1``.

    Args:
        given: None, an object with ``update``, ``compute`` and ``reset``, a list of them, or a dict that names them.

    Raises:
        ArgumentTypeError: for an object that lacks one of the three.
    """

    def __init__(self, given: Any) -> None:
        self._named: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
        if not isinstance(given, Mapping):
            for metric in as_list(given):
                name = type(metric).__name__
                same = sum(key == name or key.startswith(f"{name}_") for key in self._named)
                self._named[f"{name}_{same}" if same else name] = metric
        for metric in self._named.values():
            if not all(callable(getattr(metric, method, None)) for method in ("update", "compute", "reset")):
                raise ArgumentTypeError(
                    f"metrics need update, compute and reset, as torchmetrics' have; {type(metric).__name__} does not."
                )

    def reset(self, device: torch.device) -> None:
        """Start over, on a device."""
        for metric in self._named.values():
            metric.reset()
            if isinstance(metric, nn.Module):  # torchmetrics' have buffers
                metric.to(device)

    def update(self, outputs: Sequence[Any], labels: Sequence[Any]) -> None:
        """Take in the outputs and labels of a batch."""
        for metric in self._named.values():
            metric.update(*outputs, *labels)

    def compute(self) -> dict[str, Any]:
        """The values by name. A metric that returns a mapping, such as a MetricCollection, names its own values."""
        found: dict[str, Any] = {}
        for name, metric in self._named.items():
            value = metric.compute()
            found |= value if isinstance(value, Mapping) else {name: value}
        return found
