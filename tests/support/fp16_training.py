"""One small training run told four ways: in fp32, by ``FP16_Optimizer``, and by hand with plain or flat masters.

Every way returns the fp32 numbers that its optimizer updates, so that a table can compare them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp
from halfstep.fp16_utils import (
    DynamicLossScaler,
    FP16_Optimizer,
    LossScaler,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
)
from tests.support.apex_recording import grid

DTYPES = {
    "fp16": (torch.float16, torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "mixed": (torch.float16, torch.float32, torch.bfloat16),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, eps=1e-3),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3, history_size=10),
}
STATIC = 64.0
DYNAMIC = {"init_scale": 2.0**10, "scale_window": 4}


class Layers(nn.Module):
    """Three linear layers that compute in the dtypes of their own weights."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        sizes = (6, 12, 12, 3)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        with torch.no_grad():
            for k, param in enumerate(self.parameters()):
                # Numbers that all formats hold, so that every run starts at the same point.
                param.copy_(grid(tuple(param.shape), 7 * k, 0.5).bfloat16().half())
        for layer, dtype in zip(self.layers, dtypes, strict=True):
            layer.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x.to(layer.weight.dtype))
            x = torch.tanh(x) if i < 2 else x
        return x


def loss_of(model: nn.Module, t: int, optimizer: str) -> torch.Tensor:
    # LBFGS measures curvature between steps, which means something on one batch only.
    t = 0 if optimizer == "LBFGS" else t
    return F.mse_loss(model(grid((16, 6), 300 + 11 * t)).float(), grid((16, 3), 500 + 5 * t))


class Overflow:
    """Makes a loss infinite, once at each of the given steps."""

    def __init__(self, steps: tuple[int, ...] = ()) -> None:
        self.left = set(steps)

    def __call__(self, loss: torch.Tensor, t: int) -> torch.Tensor:
        if t in self.left:
            self.left.remove(t)
            return loss * float("inf")
        return loss


def values(params: Any) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in params])


def fp32(optimizer: str, steps: int, skipped: tuple[int, ...] = ()) -> torch.Tensor:
    """The reference: the same batches in fp32, some steps left out."""
    model = Layers((torch.float32,) * 3)
    optim = OPTIMIZERS[optimizer](model.parameters())
    for t in range(steps):
        if t in skipped:
            continue

        def closure(t: int = t) -> torch.Tensor:
            optim.zero_grad()
            loss = loss_of(model, t, optimizer)
            loss.backward()
            return loss.detach()

        optim.step(closure)
    return values(model.parameters())


def wrapped(optimizer: str, dtypes: str, dynamic: bool, steps: int, overflow: Overflow) -> tuple[torch.Tensor, float]:
    """By ``FP16_Optimizer``: the masters and the last loss scale."""
    model = Layers(DTYPES[dtypes])
    optim = FP16_Optimizer(OPTIMIZERS[optimizer](model.parameters()), STATIC, dynamic, DYNAMIC, verbose=False)
    for t in range(steps):

        def closure(t: int = t) -> torch.Tensor:
            optim.zero_grad()
            loss = loss_of(model, t, optimizer)
            optim.backward(overflow(loss, t))
            return loss.detach()

        if optimizer == "LBFGS":
            optim.step(closure)
        else:
            closure()
            optim.step()
    masters = list(amp.master_params(optim))
    for param, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(param, master.to(param.dtype))
    return values(masters), optim.loss_scale


class _Skip(Exception):
    """A closure by hand found an overflow that a static scale cannot answer."""


def by_hand(
    optimizer: str, dtypes: str, dynamic: bool, steps: int, overflow: Overflow, *, flat: bool
) -> tuple[torch.Tensor, float]:
    """With ``prep_param_lists``: the masters and the last loss scale."""
    model = Layers(DTYPES[dtypes])
    model_params, masters = prep_param_lists(model, flat_master=flat)
    optim = OPTIMIZERS[optimizer](masters)
    scaler = DynamicLossScaler(**DYNAMIC) if dynamic else LossScaler(STATIC)
    look = DynamicLossScaler().has_overflow

    def evaluate(t: int) -> torch.Tensor:
        while True:
            master_params_to_model_params(model_params, masters, flat_master=flat)
            model.zero_grad()
            loss = loss_of(model, t, optimizer)
            scale = scaler.loss_scale
            scaler.backward(overflow(loss, t))
            overflowed = look(model_params)
            scaler.update_scale(overflowed)
            if not overflowed:
                break
            if not dynamic or optimizer != "LBFGS":
                raise _Skip
        model_grads_to_master_grads(model_params, masters, flat_master=flat)
        for master in masters:
            master.grad.mul_(1.0 / scale)
        return loss.detach()

    for t in range(steps):
        try:
            optim.step(lambda t=t: evaluate(t))
        except _Skip:
            continue
        master_params_to_model_params(model_params, masters, flat_master=flat)
    pieces = values(masters).split([p.numel() for p in model_params])
    for param, piece in zip(model_params, pieces, strict=True):
        assert torch.equal(param.flatten(), piece.to(param.dtype))
    return values(masters), scaler.loss_scale
