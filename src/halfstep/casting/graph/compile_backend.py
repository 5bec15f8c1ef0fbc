"""``torch.compile(model, backend="halfstep")``: the casting pass on what Dynamo captures, then Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...core.dtypes import default_half, parse_dtype
from ...core.oplists import OpLists
from ...torch_internals.compiler_compat import compile_with_inductor, register_backend
from ..emulation import check_emulate
from .cast_pass import cast_graph

__all__ = ["halfstep"]


def halfstep(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a captured graph at O1: a backend of ``torch.compile`` for training and inference.

    Args:
        module: the graph that Dynamo captured.
        example_inputs: the inputs of the graph.
        options: ``dtype`` (float16 on CUDA and bfloat16 on the CPU if absent), ``lists`` (an ``OpLists``),
            ``emulate`` as in ``amp.auto_cast``, and ``inductor=False`` to run the graph as it is.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    given = options or {}
    device = next((x.device for x in example_inputs if isinstance(x, torch.Tensor)), torch.device("cpu"))
    half = parse_dtype(given["dtype"]) if "dtype" in given else default_half(device)
    # Use Dynamo's fake inputs: real inputs would be computed with, and new fakes would get new symbols for their sizes.
    nodes = module.graph.find_nodes(op="placeholder")
    fakes = [node.meta.get("example_value", x) for node, x in zip(nodes, example_inputs, strict=True)]
    traced = make_fx(module, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(*fakes)
    cast = cast_graph(
        traced,
        given.get("lists", OpLists.default()),
        half,
        emulate=check_emulate(given.get("emulate", "auto")),
        opaque=True,
    ).module
    return compile_with_inductor(cast, list(example_inputs)) if given.get("inductor", True) else cast


register_backend("halfstep", halfstep)
