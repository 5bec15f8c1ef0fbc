"""Paddle's names for the ops that torch runs: its op lists use one set of names, its logs another."""

from __future__ import annotations

import functools
import re
from typing import Any

from ...core.oplists import resolve
from ...core.oplists.tables import pairs, row_of
from ...torch_internals.torch_compat import current_node
from ..observe.names import canonical
from ..observe.ops import OpCall

__all__ = ["list_name", "listed", "log_name", "op_of"]

_LISTED = pairs("""
    conv2d=conv2d batch_norm=batch_norm cross_entropy=softmax_with_cross_entropy binary_cross_entropy=bce_loss
    binary_cross_entropy_with_logits=sigmoid_cross_entropy_with_logits embedding=lookup_table_v2
    linear=linear_v2 matmul=matmul_v2 randn=gaussian_random normal=gaussian_random rand=uniform_random
    uniform=uniform_random full=fill_constant zeros=fill_constant ones=fill_constant scalar_tensor=fill_constant
    ones_like=fill_any_like zeros_like=fill_any_like
    """)
"""The name on Paddle's op lists, for torch ops to which the op-list table maps no name or several names."""

_LOGGED = pairs("div=divide sub=subtract mul=multiply pow=elementwise_pow")


@functools.cache
def list_name(name: str) -> str:
    """Translate the name of a torch function to Paddle's op lists; torch's own name if Paddle has none."""
    if name in _LISTED:
        return _LISTED[name]
    return row_of(name).paddle.partition(",")[0] or name


@functools.cache
def log_name(name: str) -> str:
    """Translate the name of a torch function to Paddle's logs."""
    return _LOGGED.get(name, name)


def op_of(call: OpCall) -> str:
    """Return the canonical name of the function that runs an op; in a backward pass, of the differentiated function."""
    if not call.backward:
        return call.canonical
    node: Any = current_node()
    found = re.fullmatch(r"(?:torch::autograd::)?(\w+?)(?:Backward\d*)?", "" if node is None else node.name())
    return canonical(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", found[1]).lower() if found else call.name, call.dims)


def listed(ops: Any) -> frozenset[str]:
    """Resolve an op list (Paddle's names, its log names, or torch's) to canonical names. Gradients end in "_grad"."""
    named = [(op[:-5], "_grad") if isinstance(op, str) and op.endswith("_grad") else (op, "") for op in ops]
    return frozenset(canonical(n) + end for op, end in named for n in (("cast",) if op == "cast" else resolve(op)))
