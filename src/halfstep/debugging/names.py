"""Paddle's names of the ops that torch runs: those of its op lists, and those of its logs, which are others."""

from __future__ import annotations

import functools
import re
from typing import Any

from ..core.oplists import resolve
from ..core.oplists.tables import PADDLE_NAMES, pairs
from ..core.torch_compat import current_node
from ..observe.ops import OpCall

__all__ = ["canonical", "list_name", "listed", "log_name", "op_of"]

_PUBLIC = pairs("""
    mm=matmul bmm=matmul addmm=linear _to_copy=cast copy_=cast to_copy=cast
    native_layer_norm=layer_norm native_group_norm=group_norm native_batch_norm=batch_norm
    _native_batch_norm_legit=batch_norm _batch_norm_with_update=batch_norm cudnn_batch_norm=batch_norm
    miopen_batch_norm=batch_norm native_dropout=dropout _fused_dropout=dropout _fused_rms_norm=rms_norm
    nll_loss_forward=nll_loss nll_loss2d_forward=nll_loss2d max_pool2d_with_indices=max_pool2d
    max_pool3d_with_indices=max_pool3d _adaptive_avg_pool2d=adaptive_avg_pool2d
    _adaptive_avg_pool3d=adaptive_avg_pool3d upsample_linear1d=interpolate upsample_bilinear2d=interpolate
    upsample_trilinear3d=interpolate upsample_nearest2d=interpolate upsample_bicubic2d=interpolate
    _thnn_fused_lstm_cell=lstm _thnn_fused_gru_cell=gru mkldnn_linear=linear
    """)
"""The function of torch that users know, by the ATen op that it runs where the names differ."""

_LISTED = pairs("""
    conv2d=conv2d batch_norm=batch_norm cross_entropy=softmax_with_cross_entropy binary_cross_entropy=bce_loss
    binary_cross_entropy_with_logits=sigmoid_cross_entropy_with_logits embedding=lookup_table_v2
    linear=linear_v2 matmul=matmul_v2 randn=gaussian_random normal=gaussian_random rand=uniform_random
    uniform=uniform_random full=fill_constant zeros=fill_constant ones=fill_constant scalar_tensor=fill_constant
    ones_like=fill_any_like zeros_like=fill_any_like
    """)
"""The name on Paddle's op lists where the table of these has none, or several for one op of torch."""

_LOGGED = pairs("div=divide sub=subtract mul=multiply pow=elementwise_pow")


@functools.cache
def canonical(name: str, dims: int = 2) -> str:
    """The name of the function of torch that runs an ATen op.

    Args:
        name: of the op, without namespace and overload.
        dims: of a convolution.
    """
    if "convolution" in name:
        return f"conv{dims}d"
    if "scaled_dot_product" in name:
        return "scaled_dot_product_attention"
    name = _PUBLIC.get(name, name)
    bare = name.strip("_") if not name.startswith("__") else name
    return _PUBLIC.get(bare, bare)


@functools.cache
def list_name(name: str) -> str:
    """What Paddle's op lists call a function of torch; torch's own name where Paddle has none."""
    if name in _LISTED:
        return _LISTED[name]
    return next((theirs for theirs, ours in PADDLE_NAMES.items() if name in ours), name)


@functools.cache
def log_name(name: str) -> str:
    """What Paddle's logs call a function of torch."""
    return _LOGGED.get(name, name)


def op_of(call: OpCall) -> str:
    """The canonical name of what runs an op; in a backward pass, of the op whose gradient it is."""
    name = call.name
    dims = call.args[0].dim() - 2 if "convolution" in name else 2
    if not call.backward:
        return canonical(name, dims)
    node: Any = current_node()
    found = re.fullmatch(r"(?:torch::autograd::)?(\w+?)(?:Backward\d*)?", "" if node is None else node.name())
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", found[1]).lower() if found else name
    return canonical(snake, dims)


def listed(ops: Any) -> frozenset[str]:
    """The canonical names that an op list means: Paddle's names, those of its logs, or torch's."""
    return frozenset(canonical(name) for op in ops for name in (("cast",) if op == "cast" else resolve(op)))
