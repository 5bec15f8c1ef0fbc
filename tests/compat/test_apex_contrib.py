"""``apex.contrib`` against formulas written out in float64, over dtypes, options and levels."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from halfstep.apex.contrib import focal_loss as focal_package
from halfstep.apex.contrib.group_norm import GroupNorm
from halfstep.apex.contrib.layer_norm import FastLayerNorm
from halfstep.apex.contrib.layer_norm.layer_norm import FastLayerNormFN
from halfstep.apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from torch import nn
from torch.nn import functional as F

from halfstep import amp
from tests.support.worlds import scaled_backward

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


# ---- in a model


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["cross entropy", "cross entropy in fp32", "focal"])
def test_losses_of_a_model(level: str, dtype: str, kind: str) -> None:
    """Loss and gradients of a convolution, a group norm and a linear layer, against torch's own in float64."""
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
    scaled_backward(loss, optimizer)
    for found, wide in zip(amp.master_params(optimizer), exact.parameters(), strict=True):
        assert found.grad is not None
        assert wide.grad is not None
        close(found.grad, wide.grad, getattr(torch, dtype), 4.0)


# ---- what does nothing, and what is not here


def test_pyprof_says_once_that_it_marks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    from halfstep.apex import pyprof

    pyprof.nvtx.init.cache_clear()
    with caplog.at_level(logging.WARNING, "halfstep"):
        pyprof.nvtx.init()
        pyprof.init()
        pyprof.nvtx.wrap(nn.Linear, "forward")
    assert [re.search("emit_nvtx", record.message) is not None for record in caplog.records] == [True]
