"""One call of each op, from its spelling: which shapes it takes, and with what other arguments."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Call = tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]
"""The shapes of the tensor slots of a call, and the call on tensors of these shapes."""

LABELS = torch.tensor([0, 2, 1])
SQUARE = (4, 4)
BATCH = (3, 4)


def beside(x: torch.Tensor, value: Any) -> Any:
    """A value, moved to where a tensor is if it is one itself."""
    return value.to(x.device) if isinstance(value, torch.Tensor) else value


# op -> (shapes of the slots, other positional arguments, keyword arguments)
SHAPES: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[Any, ...], dict[str, Any]]] = {
    "linear": ((BATCH, (5, 4), (5,)), (), {}),
    "conv1d": (((2, 3, 8), (4, 3, 3)), (), {}),
    "conv2d": (((2, 3, 8, 8), (4, 3, 3, 3)), (), {}),
    "conv3d": (((1, 2, 4, 4, 4), (3, 2, 3, 3, 3)), (), {}),
    "conv_transpose1d": (((2, 3, 8), (3, 4, 3)), (), {}),
    "conv_transpose2d": (((2, 3, 4, 4), (3, 4, 3, 3)), (), {}),
    "conv_transpose3d": (((1, 2, 3, 3, 3), (2, 3, 2, 2, 2)), (), {}),
    "conv_tbc": (((5, 2, 3), (3, 3, 4), (4,)), (), {}),
    "matmul": ((BATCH, (4, 5)), (), {}),
    "mm": ((BATCH, (4, 5)), (), {}),
    "mv": ((BATCH, (4,)), (), {}),
    "bmm": (((2, 3, 4), (2, 4, 5)), (), {}),
    "addmm": (((3, 5), BATCH, (4, 5)), (), {}),
    "addmv": (((3,), BATCH, (4,)), (), {}),
    "addr": ((BATCH, (3,), (4,)), (), {}),
    "addbmm": (((3, 5), (2, 3, 4), (2, 4, 5)), (), {}),
    "baddbmm": (((2, 3, 5), (2, 3, 4), (2, 4, 5)), (), {}),
    "prelu": ((BATCH, (4,)), (), {}),
    "bilinear": ((BATCH, (3, 5), (2, 4, 5)), (), {}),
    "dot": (((4,), (4,)), (), {}),
    "cross": (((2, 3), (2, 3)), (), {"dim": 1}),
    "pow": ((BATCH,), (2,), {}),
    "renorm": ((BATCH,), (2, 0, 1.0), {}),
    "layer_norm": ((BATCH, (4,), (4,)), (), {}),
    "group_norm": ((BATCH, (4,), (4,)), (), {}),
    "local_response_norm": (((2, 3, 4),), (2,), {}),
    "interpolate": (((1, 2, 4),), (), {"scale_factor": 2}),
    "grid_sample": (((1, 1, 4, 4), (1, 3, 3, 2)), (), {"align_corners": False}),
    "clamp": ((BATCH,), (0.1, 0.9), {}),
    "where": ((BATCH, BATCH), (), {}),
    "cross_entropy": ((BATCH,), (LABELS,), {}),
    "nll_loss": ((BATCH,), (LABELS,), {}),
    "multi_margin_loss": ((BATCH,), (LABELS,), {}),
    "multilabel_margin_loss": ((BATCH,), (torch.tensor([[0, 2, -1, 0]] * 3),), {}),
    "hinge_embedding_loss": ((BATCH,), (torch.ones(BATCH, dtype=torch.int64),), {}),
    "soft_margin_loss": ((BATCH,), (torch.ones(BATCH, dtype=torch.int64),), {}),
    "cosine_embedding_loss": ((BATCH, BATCH), (torch.ones(3, dtype=torch.int64),), {}),
    "margin_ranking_loss": (((3,), (3,)), (torch.ones(3, dtype=torch.int64),), {}),
    "triplet_margin_loss": ((BATCH, BATCH, BATCH), (), {}),
    "avg_pool1d": (((1, 2, 4),), (2,), {}),
    "max_pool1d": (((1, 2, 4),), (2,), {}),
    "instance_norm": (((2, 3, 4),), (), {}),
    "scaled_dot_product_attention": (((1, 2, 3, 4),) * 3, (), {}),
}
SHAPES |= dict.fromkeys(("softmax", "softmin", "log_softmax"), ((BATCH,), (1,), {}))
SHAPES["cumsum"] = SHAPES["cumprod"] = ((BATCH,), (0,), {})
SHAPES["addcmul"] = SHAPES["addcdiv"] = ((BATCH,) * 3, (), {})
SHAPES["kl_div"] = ((BATCH, BATCH), (), {"reduction": "sum"})
BINARY = "add sub mul div atan2 eq ne ge gt le lt binary_cross_entropy_with_logits binary_cross_entropy l1_loss"
BINARY += (
    " mse_loss smooth_l1_loss poisson_nll_loss huber_loss maximum cosine_similarity dist multilabel_soft_margin_loss"
)
for _op in (BINARY + " equal").split():
    SHAPES[_op] = ((BATCH, BATCH), (), {})

_SIGNS = "+ - * / // ** @ == != >= > <= < += -= *= /= **="
_NAMES = "add sub mul truediv floordiv pow matmul eq ne ge gt le lt iadd isub imul itruediv ipow"
_OPERATORS = {sign: getattr(operator, name) for sign, name in zip(_SIGNS.split(), _NAMES.split(), strict=True)}

SPECIAL: dict[str, Call] = {
    "torch.cat": ((BATCH, BATCH), lambda a, b: torch.cat([a, b])),
    "torch.cat(tuple)": ((BATCH, BATCH), lambda a, b: torch.cat((a, b))),
    "torch.cat(tensors=)": ((BATCH, BATCH), lambda a, b: torch.cat(tensors=[a, b])),
    "torch.cat of 3": ((BATCH, BATCH, BATCH), lambda *t: torch.cat(t)),
    "torch.stack": ((BATCH, BATCH), lambda a, b: torch.stack([a, b])),
    "torch.pow(2,x)": ((BATCH,), lambda x: torch.pow(2, x)),
    "torch.pow(x,2)": ((BATCH,), lambda x: torch.pow(x, 2)),
    "torch.pow(x,y)": ((BATCH, BATCH), torch.pow),
    "Tensor.pow_(y)": ((BATCH, BATCH), torch.Tensor.pow_),
    "torch.norm(x,dim)": ((BATCH,), lambda x: torch.norm(x, dim=0)),
    "torch.sum(x,dim)": ((BATCH,), lambda x: torch.sum(x, 0)),
    "torch.einsum": ((BATCH, (4, 5)), lambda a, b: torch.einsum("ij,jk->ik", a, b)),
    "torch.linalg.norm": ((BATCH,), torch.linalg.norm),
    "torch.layer_norm": ((BATCH,), lambda x: torch.layer_norm(x, (4,))),
    "torch.where": ((BATCH, BATCH), lambda a, b: torch.where(torch.ones(BATCH, dtype=torch.bool), a, b)),
    "F.layer_norm": ((BATCH, (4,), (4,)), lambda x, w, b: F.layer_norm(x, (4,), w, b)),
    "F.group_norm": ((BATCH, (4,), (4,)), lambda x, w, b: F.group_norm(x, 2, w, b)),
    "F.ctc_loss": (((5, 2, 4),), lambda x: F.ctc_loss(x, torch.ones(2, 2).long(), *torch.tensor([[5, 5], [2, 2]]))),
    "F.embedding": ((SQUARE,), lambda w: F.embedding(beside(w, LABELS), w)),
    "F.dropout(eval)": ((BATCH,), lambda x: F.dropout(x, 0.5, training=False)),
    "F.batch_norm, fp32 weights": ((BATCH,), lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4))),
    "nn.MultiheadAttention(x,x,x)": (((2, 3, 4),), lambda x: list(nn.MultiheadAttention(4, 2)(x, x, x))),
    "nn.Bilinear(x,y)": ((BATCH, BATCH), lambda x, y: nn.Bilinear(4, 4, 2)(x, y)),
    "nn.Conv2d(x)": (((1, 3, 8, 8),), lambda x: nn.Conv2d(3, 4, 3)(x)),
    "nn.ConvTranspose1d(x)": (((1, 3, 8),), lambda x: nn.ConvTranspose1d(3, 4, 3)(x)),
    "nn.Linear(x)": ((BATCH,), lambda x: nn.Linear(4, 5)(x)),
    "nn.PReLU(x)": ((BATCH,), lambda x: nn.PReLU()(x)),
    "nn.BatchNorm1d(x)": ((BATCH,), lambda x: nn.BatchNorm1d(4)(x)),
    "nn.BCEWithLogitsLoss(x,y)": ((BATCH, BATCH), nn.BCEWithLogitsLoss()),
    "nn.CrossEntropyLoss(x)": ((BATCH,), lambda x: nn.CrossEntropyLoss()(x, beside(x, LABELS))),
    "nn.GELU(x)": ((BATCH,), nn.GELU()),
    "nn.GroupNorm(x)": ((BATCH,), lambda x: nn.GroupNorm(2, 4)(x)),
    "nn.LayerNorm(x)": ((BATCH,), lambda x: nn.LayerNorm(4)(x)),
    "nn.Softmax(x)": ((BATCH,), nn.Softmax(1)),
    "nn.Upsample(x)": (((1, 2, 4),), nn.Upsample(scale_factor=2)),
}

_SPACES = {"torch": torch, "F": F, "Tensor": torch.Tensor}


def call_of(spelling: str) -> Call:
    """The call that a spelling such as "Tensor.exp_" or "a + b" stands for."""
    if spelling in SPECIAL:
        return SPECIAL[spelling]
    words = spelling.removesuffix(" (unlisted)").split(" ")
    if len(words) == 3:
        left, symbol, right = words
        function = _OPERATORS[symbol]
        if left[0].isdigit():
            return (BATCH,), lambda x: function(int(left), x)
        if right[0].isdigit():
            return (BATCH,), lambda x: function(x, float(right) if "." in right else int(right))
        return ((BATCH, (4, 3)) if symbol == "@" else (BATCH, BATCH)), function
    space, _, name = words[0].partition(".")
    function = getattr(_SPACES[space], name)
    shapes, args, kwargs = SHAPES.get(name.removesuffix("_"), ((BATCH,), (), {}))
    return shapes, lambda *tensors: function(*tensors, *[beside(tensors[0], a) for a in args], **kwargs)
