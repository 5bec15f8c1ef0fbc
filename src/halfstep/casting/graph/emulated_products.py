"""Emulation of 16-bit products in a captured graph: fp32 kernels run them on devices without 16-bit units."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from ...core.oplists.names import dispatcher_spellings
from ...core.oplists.tables import row_of
from ...torch_internals.torch_compat import OpOverload, schema_of
from ..emulation import Emulate, emulated_kinds, narrow, widen
from ..operands import MIN_ELEMENTS, run_node

__all__ = ["canonical_name", "emulate_products", "op_name"]

_OTHERWISE = {"cross_entropy_loss": "cross_entropy", "nll_loss_nd": "nll_loss"}
"""The rows of ops that a graph calls by another name, and eager mode does not."""

_BATCH = 64  # assumed value of a symbolic size


def op_name(node: fx.Node) -> str:
    """Return the name of the op that a node calls, without its namespace and overload."""
    target = node.target
    return schema_of(target).name.rpartition("::")[2] if isinstance(target, OpOverload) else str(target)


def canonical_name(node: fx.Node) -> str:
    """Return the name of the row of the op that a node calls: ``mul`` for ``aten.multiply_.Tensor``."""
    name = op_name(node)
    return _OTHERWISE.get(name) or dispatcher_spellings().get(f"aten::{name}", (name,))[0]


def emulate_products(
    graph: fx.Graph,
    halves: Iterable[fx.Node],
    wides: Collection[fx.Node],
    floating: set[fx.Node],
    half: torch.dtype,
    emulate: Emulate,
    opaque: bool | None,
) -> None:
    """Widen the inputs of 16-bit products, let the products keep the 16-bit inputs, and round their results to 16 bits.

    Args:
        graph: a graph of aten ops; changed in place.
        halves: the nodes with 16-bit values.
        wides: products that read 16 bits and give fp32, wherever they run.
        floating: the nodes with floating values; new nodes are added to it.
        half: the 16-bit dtype.
        emulate: see ``casting.emulation``.
        opaque: see ``emulation.narrow``.
    """
    in_fp32: dict[fx.Node, fx.Node] = {}
    for node in (*halves, *wides):
        kind, device = row_of(canonical_name(node)).kind, _device(node)
        if node.op != "call_function" or not kind or device is None:
            continue
        if node not in wides and (device, half, kind) not in emulated_kinds((device,), half, emulate):
            continue
        sources = [source for source in node.all_input_nodes if source in floating]
        for source in sources:
            if source not in in_fp32:
                with graph.inserting_after(source):
                    in_fp32[source] = graph.call_function(widen, (source, opaque))
            node.replace_input_with(source, in_fp32[source])
        if not opaque and any(map(_is_large, sources)):
            op: Any = node.target
            node.args = (op, canonical_name(node), sources, [in_fp32[source] for source in sources], *node.args)
            node.target = run_node
        parts = [user for user in node.users if user.target is operator.getitem and user in floating]
        for result in () if node in wides else parts or [node]:
            with graph.inserting_after(result):
                rounded = graph.call_function(narrow, (result, half, opaque))
            result.replace_all_uses_with(rounded)
            rounded.args = (result, half, opaque)  # restores the use that the line above replaced
            floating.add(rounded)


def _is_large(source: fx.Node) -> bool:
    """True if a value is so large that keeping it in 16 bits is worth a call in Python."""
    value = source.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else (0,)
    return math.prod(size if isinstance(size, int) else _BATCH for size in sizes) >= MIN_ELEMENTS


def _device(node: fx.Node) -> str | None:
    values = [n.meta.get("val") for n in (node, *node.users)]  # an op with several results has one user per result
    return next((value.device.type for value in values if isinstance(value, torch.Tensor)), None)
