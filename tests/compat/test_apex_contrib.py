"""``apex.contrib`` against formulas written out in float64, over dtypes, options and levels."""

from __future__ import annotations

import importlib
import logging
import math
import re
from typing import Any

import pytest
import torch
from halfstep.apex.contrib import focal_loss as focal_package
from halfstep.apex.contrib.group_norm import GroupNorm
from halfstep.apex.contrib.layer_norm import FastLayerNorm
from halfstep.apex.contrib.layer_norm.layer_norm import FastLayerNormFN
from halfstep.apex.contrib.multihead_attn import (
    EncdecMultiheadAttn,
    SelfMultiheadAttn,
    fast_mask_softmax_dropout_func,
)
from halfstep.apex.contrib.sparsity import ASP, create_mask
from halfstep.apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from torch import nn
from torch.nn import functional as F

from halfstep import amp
from halfstep.core.errors import ArgumentValueError, MissingModuleError, UsageError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LEVELS = ["O1", "O2"]


def close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, loose: float = 1.0) -> None:
    """``found`` is ``expected`` up to a few roundings of ``dtype``, measured against the largest element."""
    assert found.isfinite().all()
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error <= 8 * loose * torch.finfo(dtype).eps, error


def gradients_of(loss: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, leaves))


# ---- xentropy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half_to_float", [False, True])
@pytest.mark.parametrize(("smoothing", "padding"), [(0.0, 0), (0.1, 3), (0.3, -100)])
def test_cross_entropy(dtype: torch.dtype, half_to_float: bool, smoothing: float, padding: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(12, 9).mul(3).to(dtype).requires_grad_()
    labels = torch.arange(12) % 9
    wide = logits.detach().double().requires_grad_()
    log_p = wide - wide.exp().sum(1, keepdim=True).log()
    expected = -(1 - smoothing) * log_p[torch.arange(12), labels] - smoothing * log_p.mean(1)
    expected = expected * (labels != padding)
    found = SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, padding, half_to_float)
    out = torch.float32 if half_to_float else dtype
    assert found.dtype is out
    close(found, expected.detach(), out)
    outer = torch.rand(12).double()
    (grad,) = gradients_of((found * outer.to(found.dtype)).sum(), [logits])
    assert grad.dtype is dtype
    close(grad, gradients_of((expected * outer).sum(), [wide])[0], dtype, 2.0 if out is dtype else 1.0)
    assert (grad[labels == padding] == 0).all()


def test_cross_entropy_of_a_sequence_has_the_shape_of_the_labels() -> None:
    logits, labels = torch.randn(2, 3, 5), torch.randint(1, 5, (2, 3))
    found = SoftmaxCrossEntropyLoss.apply(logits, labels)
    torch.testing.assert_close(found, F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none"))


# ---- focal loss


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_focal_loss(dtype: torch.dtype, gamma: float, smoothing: float) -> None:
    torch.manual_seed(0)
    alpha, real = 0.24, 6
    x = torch.randn(2, 5, 8).mul(2).to(dtype)
    x[0, 0, 0] = 60.0  # is right, to the last digit
    x.requires_grad_()
    target = torch.tensor([[0, -1, -2, 5, 2], [1, 1, -1, -2, 4]])
    wide = x.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(2):
        for j in range(5):
            for c in range(real if target[i, j] != -2 else 0):
                z = wide[i, j, c] if target[i, j] == c else -wide[i, j, c]  # large where the class is right
                weight = alpha if target[i, j] == c else 1 - alpha
                entropy = (1 - smoothing / 2) * F.softplus(-z) + smoothing / 2 * F.softplus(z)
                total = total + weight * (-gamma * F.softplus(z)).exp() * entropy
    expected = total / 4
    found = focal_package.focal_loss.FocalLoss.apply(x, target, torch.tensor(4.0), real, alpha, gamma, smoothing)
    assert found.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    close(found, expected.detach(), torch.float32)
    (grad,) = gradients_of(found, [x])
    assert grad.dtype is dtype
    close(grad, gradients_of(expected, [wide])[0], dtype if dtype.itemsize < 8 else torch.float32)
    assert (grad[..., real:] == 0).all()
    assert (grad[target == -2] == 0).all()


# ---- normalization


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weights", [None, torch.float32])
def test_fast_layer_norm(dtype: torch.dtype, weights: torch.dtype | None) -> None:
    torch.manual_seed(0)
    own = weights or dtype
    module = FastLayerNorm(24, eps=1e-3).to(own)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {"weight": (24,), "bias": (24,)}
    with torch.no_grad():
        module.weight.uniform_(0.5, 2.0)
        module.bias.uniform_(-1.0, 1.0)
    x = (torch.randn(5, 2, 24) * 3 + 1).to(dtype).requires_grad_()
    leaves = [x, module.weight, module.bias]
    wide_x, weight, bias = (t.detach().double().requires_grad_() for t in leaves)
    centered = wide_x - wide_x.mean(-1, keepdim=True)
    expected = centered / (centered.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight + bias
    found = module(x)
    assert found.dtype is own
    assert torch.equal(found, FastLayerNormFN.apply(x, module.weight, module.bias, 1e-3))
    worst = max((dtype, own), key=lambda d: torch.finfo(d).eps)
    worst = torch.float32 if worst is torch.float64 else worst
    close(found, expected.detach(), worst)
    outer = torch.rand_like(expected)
    ours = gradients_of((found * outer.to(own)).sum(), leaves)
    theirs = gradients_of((expected * outer).sum(), [wide_x, weight, bias])
    for leaf, a, b in zip(leaves, ours, theirs, strict=True):
        assert a.dtype is leaf.dtype
        close(a, b, worst)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("weights", [None, torch.float32])
@pytest.mark.parametrize("act", ["", "silu", "Swish"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_group_norm(dtype: torch.dtype, weights: torch.dtype | None, act: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    module = GroupNorm(4, 16, eps=1e-3, act=act, dtype=weights or dtype)
    with torch.no_grad():
        module.weight.uniform_(0.5, 2.0)
        module.bias.uniform_(-1.0, 1.0)
    x = (torch.randn(2, 16, 3, 5) * 2 - 1).to(dtype).to(memory_format=layout).requires_grad_()
    leaves = [x, module.weight, module.bias]
    wide_x, weight, bias = (t.detach().double().requires_grad_() for t in leaves)
    groups = wide_x.reshape(2, 4, -1)
    centered = groups - groups.mean(-1, keepdim=True)
    y = (centered / (centered.square().mean(-1, keepdim=True) + 1e-3).sqrt()).reshape(x.shape)
    y = y * weight[:, None, None] + bias[:, None, None]
    expected = y / (1 + (-y).exp()) if act else y
    found = module(x)
    assert found.dtype is dtype
    close(found, expected.detach(), dtype)
    outer = torch.rand_like(expected).to(dtype)
    ours = gradients_of((found * outer).sum(), leaves)
    for a, b in zip(ours, gradients_of((expected * outer).sum(), [wide_x, weight, bias]), strict=True):
        close(a, b, dtype, 2.0)


def test_group_norm_options() -> None:
    assert dict(GroupNorm(2, 4, affine=False).named_parameters()) == {}
    assert "act=silu" in repr(GroupNorm(2, 4, act="silu"))
    with pytest.raises(ArgumentValueError, match="'relu' must be '', 'silu' or 'swish'"):
        GroupNorm(2, 4, act="relu")


# ---- attention

E, HEADS, T, S, B = 16, 4, 5, 7, 3


def attention_by_hand(
    module: Any, query: torch.Tensor, key: torch.Tensor, w: dict[str, torch.Tensor], mask: torch.Tensor
) -> torch.Tensor:
    """From the definition, one sequence and one head at a time. ``mask`` [B, T, S] is added to the scores."""
    x, size = query, E // HEADS
    if module.include_norm_add:
        norm = [
            w[n] for n in ("lyr_nrm_gamma_weights", "lyr_nrm_beta_weights", "lyr_nrm.weight", "lyr_nrm.bias") if n in w
        ]
        centered = x - x.mean(-1, keepdim=True)
        x = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm[0] + norm[1]
    out = torch.zeros_like(query)
    for b in range(B):
        parts = []
        for h in range(HEADS):
            rows = slice(h * size, (h + 1) * size)

            def projected(name: str, source: torch.Tensor, rows: slice = rows, b: int = b) -> torch.Tensor:
                bias = w[f"{name}_b"][rows] if f"{name}_b" in w else 0.0
                return source[:, b] @ w[name][rows].T + bias

            q, k, v = projected("q", x), projected("k", key if key is not query else x), None
            v = projected("v", key if key is not query else x)
            p = torch.softmax(q @ k.T / math.sqrt(size) + mask[b], -1)
            parts.append(p @ v)
        out[:, b] = torch.cat(parts, -1) @ w["out_proj_weight"].T + w.get("out_proj_bias", 0.0)
    return out + query if module.include_norm_add else out


def weights_by_hand(module: Any) -> dict[str, torch.Tensor]:
    """The weights of a module in float64, with q, k and v apart and heads in order."""
    w = {name: p.detach().double() for name, p in module.named_parameters()}
    for name, letters in {"in_proj_weight": "qkv", "in_proj_weight_kv": "kv", "in_proj_weight_q": "q"}.items():
        if name in w:
            stack = w[name].view(HEADS, len(letters), E // HEADS, E)
            w.update({letter: stack[:, i].reshape(E, E) for i, letter in enumerate(letters)})
        bias = name.replace("weight", "bias")
        if bias in w:
            stack = w[bias].view(HEADS, len(letters), E // HEADS)
            w.update({f"{letter}_b": stack[:, i].reshape(E) for i, letter in enumerate(letters)})
    for letter in "qkv":
        for own, apex in ((letter, f"{letter}_weight"), (f"{letter}_b", f"{letter}_bias")):
            if apex in w:
                w[own] = w[apex]
    return w


SELF = [
    ({}, {"in_proj_weight": (48, 16), "out_proj_weight": (16, 16)}),
    (
        {"bias": True, "impl": "default"},
        {"in_proj_weight": (48, 16), "in_proj_bias": (48,), "out_proj_weight": (16, 16), "out_proj_bias": (16,)},
    ),
    (
        {"include_norm_add": True},
        {
            "in_proj_weight": (48, 16),
            "out_proj_weight": (16, 16),
            "lyr_nrm_gamma_weights": (16,),
            "lyr_nrm_beta_weights": (16,),
        },
    ),
    (
        {"include_norm_add": True, "impl": "default"},
        {"in_proj_weight": (48, 16), "out_proj_weight": (16, 16), "lyr_nrm.weight": (16,), "lyr_nrm.bias": (16,)},
    ),
    (
        {"separate_qkv_params": True, "bias": True},
        {
            **{f"{part}_weight": (16, 16) for part in "qkv"},
            **{f"{part}_bias": (16,) for part in "qkv"},
            "out_proj_weight": (16, 16),
            "out_proj_bias": (16,),
        },
    ),
]
ENCDEC = [
    ({}, {"in_proj_weight_q": (16, 16), "in_proj_weight_kv": (32, 16), "out_proj_weight": (16, 16)}),
    (
        {"bias": True, "impl": "default", "include_norm_add": True},
        {
            "in_proj_weight_q": (16, 16),
            "in_proj_weight_kv": (32, 16),
            "out_proj_weight": (16, 16),
            "in_proj_bias_q": (16,),
            "in_proj_bias_kv": (32,),
            "out_proj_bias": (16,),
            "lyr_nrm.weight": (16,),
            "lyr_nrm.bias": (16,),
        },
    ),
]
MODULES = [
    *((SelfMultiheadAttn, *row, mask) for row in SELF for mask in ("", "padding", "time", "additive")),
    *((EncdecMultiheadAttn, *row, mask) for row in ENCDEC for mask in ("", "padding", "time")),
]


def randomized(kind: Any, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    module = kind(E, HEADS, **options)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn_like(param) * 0.3 + (1.0 if param.dim() == 1 else 0.0))
    return module


@pytest.mark.parametrize(("kind", "options", "shapes", "masked"), MODULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(kind: Any, options: dict[str, Any], shapes: Any, dtype: torch.dtype, masked: str) -> None:
    if masked == "additive":
        options = {**options, "mask_additive": True}
    module = randomized(kind, options).to(dtype)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == shapes
    query = torch.randn(T, B, E).to(dtype).requires_grad_()
    key = query if kind is SelfMultiheadAttn else torch.randn(S, B, E).to(dtype)
    keys = key.shape[0]
    wide_query = query.detach().double().requires_grad_()
    wide_key = wide_query if key is query else key.double()
    added, masks = torch.zeros(B, T, keys, dtype=torch.float64), {}
    if masked == "padding":
        padding = torch.arange(keys) >= torch.tensor([[keys], [2], [4]])
        masks = {"key_padding_mask": padding.to(torch.uint8)}
        added = added.masked_fill(padding[:, None], float("-inf"))
    elif masked == "time":
        future = torch.ones(T, keys).triu(1).bool()
        masks = {"attn_mask": future.to(torch.uint8)}
        added = added.masked_fill(future, float("-inf"))
    elif masked == "additive":
        penalty = torch.randn(B, keys).to(dtype)
        masks = {"key_padding_mask": penalty}
        added = added + penalty.double()[:, None]
    expected = attention_by_hand(module, wide_query, wide_key, weights_by_hand(module), added)
    found, none = module(query, key, key, **masks)
    assert none is None
    assert found.dtype is dtype
    precision = torch.float32 if dtype is torch.float64 and module.include_norm_add else dtype
    close(found, expected.detach(), precision, 4.0)
    outer = torch.rand(T, B, E).to(dtype)
    (grad,) = gradients_of((found * outer).sum(), [query])
    close(grad, gradients_of((expected * outer).sum(), [wide_query])[0], precision, 4.0)


@pytest.mark.parametrize("kind", [SelfMultiheadAttn, EncdecMultiheadAttn])
def test_attention_drops_while_it_is_told_to_train(kind: Any) -> None:
    module = randomized(kind, {"dropout": 0.5, "include_norm_add": True}).eval()
    x = torch.randn(T, B, E)
    first, second = (module(x, x, x)[0] for _ in range(2))
    assert not torch.equal(first, second)
    first, second = (module(x, x, x, is_training=False)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_attention_refuses() -> None:
    with pytest.raises(ArgumentValueError, match="embed_dim=10 must be a multiple of num_heads=4"):
        SelfMultiheadAttn(10, 4)
    with pytest.raises(ArgumentValueError, match="impl='slow' must be 'fast' or 'default'"):
        EncdecMultiheadAttn(16, 4, impl="slow")
    x = torch.randn(T, B, E)
    with pytest.raises(ArgumentValueError, match="either key_padding_mask or attn_mask"):
        SelfMultiheadAttn(E, HEADS)(x, x, x, torch.zeros(B, T), attn_mask=torch.zeros(T, T))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mask_additive", [False, True])
def test_attention_in_a_model(level: str, mask_additive: bool) -> None:
    """Forward and backward of a model with one, 16-bit, against the same model in float64."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = randomized(SelfMultiheadAttn, {"include_norm_add": True, "mask_additive": mask_additive})
            self.norm = FastLayerNorm(E)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.norm(self.attention(x, x, x, key_padding_mask=mask)[0])

    model: Any = Model()
    x, mask = torch.randn(T, B, E), torch.zeros(B, T)
    mask[0, 2:] = -1e4 if mask_additive else 1
    copies = {name: p.detach().double() for name, p in model.named_parameters()}
    w = {name.removeprefix("attention."): p for name, p in copies.items()}
    w.update(weights_by_hand(model.attention))
    penalty = mask.double() if mask_additive else mask.double() * -1e9
    y = attention_by_hand(model.attention, *[x.double().requires_grad_()] * 2, w, penalty[:, None].expand(B, T, T))
    expected = F.layer_norm(y, [E]).square().mean((0, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype="float16", loss_scale=128.0, verbosity=0)
    losses = model(x, mask).float().square().mean((0, 2))
    close(losses, expected.detach(), torch.float16)
    with amp.scale_loss(losses.sum(), optimizer) as scaled:
        scaled.backward()
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    optimizer.step()
    after = list(amp.master_params(optimizer))
    assert all(p.isfinite().all() for p in after)
    assert any(not torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["cross entropy", "cross entropy in fp32", "focal"])
def test_losses_of_a_model(level: str, dtype: str, kind: str) -> None:
    """Loss and gradients of a convolution, a group norm and a linear layer, against torch's own in float64."""
    torch.manual_seed(0)
    labels = torch.arange(8) % 5

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        if kind == "focal":
            return focal_package.focal_loss.focal_loss(logits, labels, torch.tensor(8.0), 4, 0.25, 2.0)
        return SoftmaxCrossEntropyLoss.apply(logits, labels, 0.1, 0, kind.endswith("fp32")).mean()

    def reference(logits: torch.Tensor) -> torch.Tensor:
        if kind == "focal":
            positive = F.one_hot(labels, 5)[:, :4].double()
            p_t = torch.where(positive == 1, logits[:, :4].sigmoid(), 1 - logits[:, :4].sigmoid())
            alpha = torch.where(positive == 1, 0.25, 0.75)
            return -(alpha * (1 - p_t) ** 2 * p_t.log()).sum() / 8
        return F.cross_entropy(logits, labels, ignore_index=0, label_smoothing=0.1, reduction="sum") / 8

    model: Any = nn.Sequential(nn.Conv2d(3, 16, 3), GroupNorm(4, 16, act="silu"), nn.Flatten(), nn.Linear(64, 5))
    exact = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.Flatten(), nn.Linear(64, 5))
    exact.load_state_dict(dict(zip(exact.state_dict(), model.state_dict().values(), strict=True)))
    exact.double()
    x = torch.randn(8, 3, 4, 4)
    expected = reference(exact(x.double()))
    expected.backward()
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=dtype, loss_scale=128.0, verbosity=0)
    loss = loss_of(model(x))
    close(loss, expected.detach(), getattr(torch, dtype))
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    for found, wide in zip(amp.master_params(optimizer), exact.parameters(), strict=True):
        assert found.grad is not None
        assert wide.grad is not None
        close(found.grad, wide.grad, getattr(torch, dtype), 4.0)


@pytest.mark.parametrize("additive", [False, True])
def test_masked_softmax(additive: bool) -> None:
    scores = torch.randn(B * HEADS, T, S).half()
    padding = torch.zeros(B, S)
    padding[1, 4:] = -3.0 if additive else 1.0
    extra = padding.double() if additive else padding.double() * -1e9
    expected = torch.softmax(scores.double().view(B, HEADS, T, S) + extra[:, None, None], -1).view(scores.shape)
    found = fast_mask_softmax_dropout_func(False, HEADS, scores, padding.half(), additive, 0.5)
    close(found, expected, torch.float16)
    assert (fast_mask_softmax_dropout_func(True, HEADS, scores, None, additive, 0.5) == 0).float().mean() > 0.3


# ---- sparsity


@pytest.fixture
def asp() -> Any:
    """An ASP of its own: Apex's keeps its model for the life of the process."""
    return type("OwnASP", (ASP,), {})


@pytest.mark.parametrize("shape", [(12,), (8, 16), (8, 16, 3), (8, 16, 3, 2), (3, 6)])
def test_a_mask_keeps_the_two_largest_of_four(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape).half()
    mask = create_mask(weight)
    assert mask.shape == weight.shape
    assert mask.dtype is weight.dtype
    dim = min(1, len(shape) - 1)
    for kept, values in zip(
        mask.movedim(dim, -1).reshape(-1, shape[dim]), weight.movedim(dim, -1).reshape(-1, shape[dim]), strict=True
    ):
        for four in range(0, shape[dim], 4):
            sizes = values[four : four + 4].abs()
            assert kept[four : four + 4].sum() == min(2, len(sizes))
            assert (sizes[kept[four : four + 4] == 1].min() >= sizes.sort(descending=True).values[1]).item()


def pruned(model: nn.Module) -> bool:
    layers = [m for m in model.modules() if hasattr(m, "__weight_mma_mask")]
    return bool(layers) and all((m.weight[~m.get_buffer("__weight_mma_mask")] == 0).all() for m in layers)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("pruned_first", [True, False])
def test_a_pruned_model_stays_pruned(asp: Any, level: str, pruned_first: bool) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 3))
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if pruned_first:
        asp.prune_trained_model(model, optimizer)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype="float16", verbosity=0)
    if not pruned_first:
        asp.prune_trained_model(model, optimizer)
    assert pruned(model)
    before = model[0].weight.detach().clone()
    for _ in range(3):
        loss = model(torch.randn(8, 32)).float().square().mean()
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert pruned(model)
    assert not torch.equal(before, model[0].weight)
    assert asp.is_sparsity_enabled()
    assert not hasattr(model[3], "__weight_mma_mask")  # of 8 columns


def test_what_was_pruned_comes_back(asp: Any) -> None:
    model = nn.Sequential(nn.Conv2d(16, 8, 3), nn.Linear(16, 8))
    dense = [p.detach().clone() for p in model.parameters()]
    assert not asp.already_init_asp_model()
    asp.init_model_for_pruning(model, allow_recompute_mask=True, disallowed_layer_names=["1"], verbosity=0)
    assert asp.already_init_asp_model()
    assert not asp.is_sparsity_enabled()
    assert list(model.state_dict()) == [
        *("0.weight", "0.bias", "0.__weight_mma_mask", "0.__weight_mma_pruned_p", "1.weight", "1.bias")
    ]
    asp.compute_sparse_masks()
    assert asp.is_sparsity_enabled()
    asp.compute_sparse_masks()
    asp.restore_pruned_weights()
    assert not asp.is_sparsity_enabled()
    for a, b in zip(model.parameters(), dense, strict=True):
        assert torch.equal(a, b)


def test_sparsity_refuses(asp: Any) -> None:
    model, optimizer = nn.Linear(16, 8), torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    with pytest.raises(UsageError, match="init_model_for_pruning first"):
        asp.init_optimizer_for_pruning(optimizer)
    with pytest.raises(ArgumentValueError, match=r"m4n2_2d_best.*mask_calculator"):
        asp.init_model_for_pruning(model, "m4n2_2d_best")
    with pytest.raises(ArgumentValueError, match=r"\['Embedding'\]; name them in custom_layer_dict"):
        asp.init_model_for_pruning(model, whitelist=[nn.Embedding])
    asp.init_model_for_pruning(model, lambda weight: create_mask(weight).bool())
    with pytest.raises(UsageError, match="a model already"):
        asp.init_model_for_pruning(model)
    asp.init_optimizer_for_pruning(optimizer)
    with pytest.raises(UsageError, match="an optimizer already"):
        asp.init_optimizer_for_pruning(optimizer)
    asp.compute_sparse_masks()
    with pytest.raises(UsageError, match="allow_recompute_mask=True"):
        asp.compute_sparse_masks()
    model.get_buffer("__weight_mma_mask").fill_(False)
    with pytest.raises(UsageError, match="load a whole checkpoint"):
        asp.is_sparsity_enabled()


def test_channels_are_not_permuted_and_it_says_so(asp: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "halfstep"):
        asp.init_model_for_pruning(nn.Linear(16, 8))
    assert "channels are not permuted" in caplog.text


# ---- what does nothing, and what is not here


def test_pyprof_says_once_that_it_marks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    from halfstep.apex import pyprof

    pyprof.nvtx.init.cache_clear()
    with caplog.at_level(logging.WARNING, "halfstep"):
        pyprof.nvtx.init()
        pyprof.init()
        pyprof.nvtx.wrap(nn.Linear, "forward")
    assert [re.search("emit_nvtx", record.message) is not None for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("apex.transformer", "Megatron-LM"),
        ("apex.transformer.parallel_state", "Megatron-LM"),
        ("apex.contrib.fmha", "scaled_dot_product_attention"),
        ("apex.contrib.groupbn.batch_norm", "SyncBatchNorm"),
    ],
)
def test_what_is_not_here_says_what_to_use(name: str, said: str) -> None:
    with pytest.raises(MissingModuleError, match=said):
        importlib.import_module(f"halfstep.{name}")
    parent, _, last = name.rpartition(".")
    with pytest.raises(ImportError, match=said):
        exec(f"from halfstep.{parent} import {last}")
