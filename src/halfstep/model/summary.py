"""What a network consists of, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..core.dtypes import dtype_name

__all__ = ["layers_of", "show"]


def layers_of(network: nn.Module, inputs: Sequence[torch.Tensor] | None) -> list[dict[str, Any]]:
    """The modules that do something themselves, in the order in which a forward pass reaches them, or of definition.

    Args:
        network: in the mode in which it is to run.
        inputs: of its forward; None does not run it, and no output shapes are known.

    Returns:
        ``name``, ``type``, ``output_shape`` (None where unknown), ``dtype`` of the weights and ``params``, each once.
    """
    names = {module: name for name, module in network.named_modules() if _own(module) or not list(module.children())}
    shapes: dict[nn.Module, Any] = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        shapes.setdefault(module, tuple(output.shape) if isinstance(output, torch.Tensor) else None)

    if inputs is not None:
        hooks = [module.register_forward_hook(note) for module in names]
        try:
            network(*inputs)
        finally:
            for hook in hooks:
                hook.remove()
    counted: set[int] = set()
    rows = []
    for module in [*shapes, *(module for module in names if module not in shapes)]:
        own = [p for p in _own(module) if id(p) not in counted]
        counted.update(map(id, own))
        rows.append(
            {
                "name": names[module],
                "type": type(module).__name__,
                "output_shape": shapes.get(module),
                "dtype": dtype_name(own[0].dtype) if own else None,
                "params": sum(p.numel() for p in own),
            }
        )
    return rows


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def show(layers: list[dict[str, Any]], totals: dict[str, int]) -> None:
    """Draw the table on the terminal."""
    from rich.console import Console
    from rich.table import Table

    table = Table(caption=f"{totals['total_params']:,} parameters, {totals['trainable_params']:,} of them trainable")
    for column in ("layer", "type", "output", "weights", "parameters"):
        table.add_column(column, justify="right" if column == "parameters" else "left")
    for row in layers:
        shape = "" if row["output_shape"] is None else str(list(row["output_shape"]))
        table.add_row(
            row["name"], row["type"], shape, row["dtype"] or "", f"{row['params']:,}" if row["params"] else ""
        )
    Console().print(table, markup=False)
