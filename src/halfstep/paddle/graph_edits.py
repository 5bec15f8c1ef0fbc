"""Changes of a program's graph: more outputs, evaluation instead of training, and fewer idle ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..casting.emulation import narrow
from ..core.errors import ArgumentValueError
from ..torch_internals.torch_compat import OpOverload, schema_of

__all__ = ["evaluate", "with_outputs", "without_idle_broadcasts"]


def evaluate(graph: fx.Graph) -> None:
    """Change a graph to evaluation mode, and remove nodes that only training needs, such as counts of batches."""
    for node in reversed(graph.nodes):
        if not node.users and (node.op == "get_attr" or (node.op == "call_function" and not _is_needed(node))):
            graph.erase_node(node)
        elif isinstance(node.target, OpOverload):
            _evaluate(node)


def _is_needed(node: fx.Node) -> bool:
    """True for a node that is needed although no node reads its result, because it writes to a value, not a buffer."""
    if not isinstance(node.target, OpOverload) or not schema_of(node.target).is_mutable:
        return False
    written = node.args[0]
    return not (isinstance(written, fx.Node) and written.op == "get_attr")


def _evaluate(node: fx.Node) -> None:
    """Change an op to evaluation mode, by arguments that have the same names in all torch ops."""
    for place, argument in enumerate(schema_of(node.target).arguments):
        value: Any = {"train": False, "training": False, "dropout_p": 0.0}.get(argument.name)
        if argument.name == "use_input_stats" and node.args[3] is not None:  # InstanceNorm with running statistics
            value = False
        if value is not None and argument.name in node.kwargs:
            node.update_kwarg(argument.name, value)
        elif value is not None and place < len(node.args):
            node.update_arg(place, value)


def without_idle_broadcasts(module: fx.GraphModule) -> fx.GraphModule:
    """Remove broadcasts of tensors with equal shapes, which losses make and whose outputs export would return."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.broadcast_tensors.default:
            inputs = node.args[0]
            if len({str(tuple(source.meta["val"].shape)) for source in inputs}) == 1:
                for item in list(node.users):
                    item.replace_all_uses_with(inputs[item.args[1]])
                    module.graph.erase_node(item)
                module.graph.erase_node(node)
    module.recompile()
    return module


def with_outputs(module: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """Copy a module so that it also returns the values of some nodes, rounded for an emulated product.

    Raises:
        ArgumentValueError: if no node has a name.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result: Any = graph.graph_copy(module.graph, copies)
    found = {node.name: copy for node, copy in copies.items()}
    found |= {str(node.args[0]): copy for node, copy in copies.items() if node.target is narrow}
    if missing := [name for name in names if name not in found]:
        raise ArgumentValueError(
            f"fetch_list names {', '.join(missing)}, which this program does not compute; fetch program.loss, one of "
            "program.outputs, or a node that program.explain() names."
        )
    graph.output((*result, *(found[name] for name in names)))
    graph.set_codegen(fx.graph.CodeGen())
    return fx.GraphModule(module, graph)
