"""The loop that every adapter is compared with: halfstep alone, on a small classifier."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from halfstep import DynamicLossScale, Policy, amp, optimizers
from halfstep.integrations.training_precision import LOSSES
from tests.support.worlds import advance

__all__ = [
    "BATCHES",
    "OPTIMIZERS",
    "POLICIES",
    "RECIPES",
    "WINDOWS",
    "Trained",
    "batches",
    "classifier",
    "masters_at_o2",
    "optimizer_of",
    "same",
    "train",
    "train_by_policy",
]

WINDOWS = [(1, None, "norm"), (2, 0.1, "norm"), (2, 0.01, "value")]  # batches of a window, and how it is clipped
POLICIES = [
    Policy.from_level(level, "bfloat16").replace(loss_scale=DynamicLossScale(init_scale=64.0))
    for level in ("O1", "O2", "O3")
]
RECIPES = [(level, dtype) for level in ("O1", "O2") for dtype in ("bfloat16", "float16")]
BATCHES = 6

Params = Iterable[torch.Tensor]

OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW(fused=True)": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=1e-2),
}


def scope(level: str, dtype: str) -> amp.auto_cast:
    """Where a step of a trainer runs: at O2 the losses in it are fp32."""
    return amp.auto_cast(level=level, dtype=dtype, custom_black_list=LOSSES if level == "O2" else None)


def optimizer_of(name: str, params: Params) -> torch.optim.Optimizer:
    return OPTIMIZERS[name](params)


def classifier() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 5))


def batches(count: int = BATCHES, *, overflow_at: int | None = None, seed: int = 2) -> list[tuple[torch.Tensor, ...]]:
    """Batches of 8; the one at ``overflow_at`` has gradients of inf in float16."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        (torch.randn(8, 12, generator=generator), torch.randint(5, (8,), generator=generator)) for _ in range(count)
    ]
    if overflow_at is not None:
        made[overflow_at] = (made[overflow_at][0] * math.inf, made[overflow_at][1])
    return made


class Trained(NamedTuple):
    """What a training left behind."""

    losses: list[float]
    weights: list[torch.Tensor]
    scale: float


def train(
    level: str,
    dtype: str,
    optimizer: str = "AdamW",
    *,
    data: list[tuple[torch.Tensor, ...]] | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    clip_by: str = "norm",
    backend: Any = None,
    loss_in_scope: bool = True,
) -> Trained:
    """Train in a plain loop. ``loss_in_scope`` says whether the loss is computed where ops are cast,
    and ``backend`` compiles the model.
    """
    model = classifier()
    stepper = optimizer_of(optimizer, model.parameters())
    if level == "O2":
        amp.decorate(model, stepper, level="O2", dtype=dtype)
    scaler = amp.GradScaler(dtype == "float16", decr_every_n_nan_or_inf=1)
    called: Any = model if backend is None else torch.compile(model, backend=backend)
    losses = []
    for i, (x, y) in enumerate(batches() if data is None else data):
        with scope(level, dtype):
            output = called(x)
            loss = F.cross_entropy(output, y) if loss_in_scope else None
        loss = F.cross_entropy(output.float(), y) if loss is None else loss
        losses.append(loss.item())
        scaler.scale(loss / accumulate).backward()
        if (i + 1) % accumulate == 0:
            scaler.unscale_(stepper)
            if clip is not None:
                _clip(stepper, clip, clip_by)
            scaler.step(stepper)
            scaler.update()
            stepper.zero_grad()
    return Trained(losses, [p.detach().clone() for p in amp.master_params(stepper)], scaler.get_scale())


def train_by_policy(policy: Policy) -> Trained:
    """Train with ``amp.initialize`` in a plain loop."""
    model = classifier()
    optimizer = optimizer_of("AdamW", model.parameters())
    amp.initialize(model, optimizer, policy=policy, verbosity=0)
    losses = []
    for x, y in batches():
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        advance(loss, optimizer)
    weights = [p.detach().clone() for p in amp.master_params(optimizer)]
    return Trained(losses, weights, amp.state_dict(optimizer=optimizer)["loss_scaler0"]["loss_scale"])


def masters_at_o2(model: Any, optimizer: Any, scaler: Any = None) -> torch.Tensor:
    """The masters after some steps with ``amp.initialize`` at O2."""
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", dtype="bfloat16", verbosity=0)
    for x, y in batches(5):
        advance(F.cross_entropy(model(x), y), optimizer, scaler)
    return torch.cat([p.detach().flatten() for p in amp.master_params(optimizer)])


def _clip(optimizer: Any, value: float, clip_by: str) -> None:
    params = list(amp.master_params(optimizer))
    if clip_by == "value":
        torch.nn.utils.clip_grad_value_(params, value)
    elif amp.has_masters(optimizer):
        optimizer.clip_master_grads(value)
    else:
        torch.nn.utils.clip_grad_norm_(params, value)


def same(mine: Trained, other: Trained) -> None:
    """Bit for bit."""
    torch.testing.assert_close(mine.losses, other.losses, rtol=0, atol=0, equal_nan=True)
    assert len(mine.weights) == len(other.weights)
    for left, right in zip(mine.weights, other.weights, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)
    assert mine.scale == other.scale
