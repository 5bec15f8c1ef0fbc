"""A table of the layers of a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...core.dtypes import dtype_name, parse_dtype

__all__ = ["summarize"]


@torch.no_grad()
def summarize(network: nn.Module, device: torch.device, input_size: Any, dtypes: Any, verbose: int) -> dict[str, Any]:
    """Compute the result of ``Model.summary``; ``network`` must be on ``device``."""
    shapes = [] if input_size is None else input_size if isinstance(input_size, list) else [input_size]
    kinds = dtypes if isinstance(dtypes, list) else [dtypes or torch.float32] * len(shapes)
    inputs = [torch.zeros(s, dtype=parse_dtype(k), device=device) for s, k in zip(shapes, kinds, strict=True)]
    was_training = network.training
    network.eval()
    try:
        layers = _layers_of(network, inputs)
    finally:
        network.train(was_training)
    params = list(network.parameters())
    totals = {
        "total_params": sum(p.numel() for p in params),
        "trainable_params": sum(p.numel() for p in params if p.requires_grad),
    }
    if verbose:
        _show(layers, totals)
    return {**totals, "layers": layers}


def _layers_of(network: nn.Module, inputs: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """List the modules that directly own weights or have no children, in order of execution, or of definition.

    Without inputs the network does not run and the output shapes are None. A shared weight counts once.
    """
    names = {module: name for name, module in network.named_modules() if _own(module) or not list(module.children())}
    shapes: dict[nn.Module, Any] = {}

    def note(module: nn.Module, args: Any, output: Any) -> None:
        shapes.setdefault(module, tuple(output.shape) if isinstance(output, torch.Tensor) else None)

    if inputs:
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
        about = {"name": names[module], "type": type(module).__name__, "output_shape": shapes.get(module)}
        dtype = dtype_name(own[0].dtype) if own else None
        rows.append(about | {"dtype": dtype, "params": sum(p.numel() for p in own)})
    return rows


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _show(layers: list[dict[str, Any]], totals: dict[str, int]) -> None:
    """Print the table of layers."""
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
