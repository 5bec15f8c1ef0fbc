"""The share of lost updates that HS101 predicts is the share that is lost: 20 cases of model, optimizer and rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import halfstep
from halfstep import optimizers
from halfstep.diagnostics.findings.facts import Facts
from halfstep.diagnostics.observe.samples import MOST_TENSORS, draw, sample, samples_in
from tests.support.worlds import BF16, FP16, with_optimizer


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16))


def gaussian() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 1024, bias=False), nn.GELU(), nn.Linear(1024, 16, bias=False))
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    return model


def normed() -> nn.Module:
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(40)]  # 160 tensors
    return nn.Sequential(*blocks, nn.Linear(64, 16))


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(512, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.reshape(-1, 1, 8, 8))


class Lion(torch.optim.Optimizer):
    """arXiv 2302.06675, in 16 bits throughout."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_((average * 0.9 + p.grad * 0.1).sign_(), alpha=-group["lr"])
                average.lerp_(p.grad, 0.01)


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    lr: float
    dtype: torch.dtype = BF16
    options: dict[str, Any] | None = None


CASES = [
    Case(gaussian, torch.optim.AdamW, 1e-2),
    Case(gaussian, torch.optim.AdamW, 1e-3),
    Case(gaussian, torch.optim.AdamW, 1e-4),
    Case(gaussian, torch.optim.AdamW, 3e-6),
    Case(mlp, torch.optim.AdamW, 1e-3, BF16, {"foreach": False}),
    Case(mlp, torch.optim.AdamW, 1e-4, BF16, {"fused": True}),
    Case(normed, torch.optim.AdamW, 3e-4),
    Case(Convolutions, torch.optim.AdamW, 3e-4),
    Case(mlp, torch.optim.Adam, 1e-4, FP16, {"eps": 1e-4}),
    Case(mlp, torch.optim.Adam, 3e-4, BF16, {"amsgrad": True}),
    Case(mlp, torch.optim.SGD, 1e-1),
    Case(mlp, torch.optim.SGD, 1e-2, BF16, {"momentum": 0.9}),
    Case(Convolutions, torch.optim.SGD, 3e-2, FP16, {"momentum": 0.9, "nesterov": True}),
    Case(normed, torch.optim.SGD, 1.0, BF16, {"weight_decay": 1e-2}),
    Case(mlp, torch.optim.Adagrad, 1e-3),
    Case(mlp, Lion, 3e-4),
    Case(gaussian, optimizers.FusedAdam, 1e-4, BF16, {"weight_decay": 0.1}),
    Case(mlp, optimizers.FusedSGD, 1e-2, FP16, {"momentum": 0.9}),
    Case(mlp, optimizers.FusedAdagrad, 1e-3),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.model.__name__}-{c.optimizer.__name__}-{c.lr:g}")
@pytest.mark.filterwarnings("ignore:.*rounds away")
def test_predicted_is_measured(case: Case) -> None:
    model, optimizer = with_optimizer(case.model().to(case.dtype), case.optimizer, lr=case.lr, **case.options or {})
    for _ in range(20):
        optimizer.zero_grad()
        x, y = torch.randn(32, 64).to(case.dtype), torch.randint(16, (32,))
        nn.functional.cross_entropy(model(x).float(), y).backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
    lost = sum(int(((p == old) & (p.grad != 0)).sum()) for p, old in zip(model.parameters(), before, strict=True))
    moving = sum(int((p.grad != 0).sum()) for p in model.parameters())
    (predicted,) = Facts(model, [optimizer]).lost
    assert predicted.fraction == pytest.approx(lost / moving, abs=0.01)


def test_automodel_3875_to_the_digit() -> None:
    """NVIDIA-NeMo/Automodel#3875: a weight of 1.0, a gradient of 0.01, lr 6e-4, 100 steps of AdamW."""
    ends = {}
    for dtype in (torch.float32, BF16):
        model = nn.Module()
        model.weight = nn.Parameter(torch.ones(1, dtype=dtype))
        optimizer = torch.optim.AdamW([model.weight], lr=6e-4, weight_decay=0.0)
        found = set()
        for _ in range(100):
            model.weight.grad = torch.full_like(model.weight, 0.01)
            found |= {each.code for each in halfstep.check(model, optimizer)}
            optimizer.step()
        ends[dtype] = f"{model.weight.item():.6f}", found
        if dtype is BF16:
            (lost,) = [each for each in halfstep.check(model, optimizer) if each.code == "HS101"]
            assert lost.evidence["lost"] == 1.0
            assert lost.severity == "error"
            assert lost.message.startswith("100 % of the updates round to nothing: bfloat16 weights, AdamW")
    assert ends == {torch.float32: ("0.940002", set()), BF16: ("1.000000", {"HS101", "HS102"})}


def test_reinforcement_learning_at_3e_6_loses_99_percent() -> None:
    """PULSE (in a post of Hugging Face): at lr 3e-6 more than 99 % of the bfloat16 weights are unchanged."""
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 16)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    (found,) = [each for each in halfstep.check(model, optimizer) if each.code == "HS101"]
    assert found.evidence["lost"] > 0.98


@pytest.mark.parametrize("count", [3, MOST_TENSORS, 1000])
def test_a_draw_has_every_share(count: int) -> None:
    tensors = [torch.empty(i % 7 + 1) for i in range(count)]
    drawn = draw(tensors)
    assert len(drawn) == min(count, MOST_TENSORS)
    assert sum(each.share for each in drawn) == pytest.approx(1.0)


@pytest.mark.filterwarnings("ignore:.*rounds away")
def test_a_hundred_steps_move_no_weight_without_masters_and_all_with_them() -> None:
    """ml-by-hand#85: of 768 weights none moved in bfloat16, most moved with masters, and all of the masters did."""
    moved = {}
    for name, dtype, options in [
        ("bfloat16", BF16, {}),
        ("masters", BF16, {"master_weights": True}),
        ("float32", torch.float32, {}),
    ]:
        torch.manual_seed(0)
        model = nn.Module()
        model.weight = nn.Parameter((torch.rand(768) + 1).to(dtype))
        optimizer = optimizers.FusedAdam([model.weight], lr=1e-4, **options)
        start = model.weight.detach().clone()
        for _ in range(100):
            model.weight.grad = torch.full_like(model.weight, 0.01)
            found = halfstep.check(model, optimizer)
            optimizer.step()
        moved[name] = int((model.weight != start).sum()), [each.code for each in found]
    assert moved["bfloat16"] == (0, ["HS101"])
    assert moved["float32"] == (768, [])
    assert moved["masters"][0] > 600
    assert moved["masters"][1] == []


def test_weights_that_never_step_do_not_count() -> None:
    model = nn.ModuleDict({"used": nn.Linear(64, 64), "unused": nn.Linear(64, 640)}).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        model["used"](torch.randn(8, 64).bfloat16()).float().square().mean().backward()
        before = [p.detach().clone() for p in model["used"].parameters()]
        optimizer.step()
    same = sum(int((p == old).sum()) for p, old in zip(model["used"].parameters(), before, strict=True))
    (predicted,) = Facts(model, [optimizer]).lost
    assert predicted.fraction == pytest.approx(same / (64 * 65), abs=0.01)


def test_nothing_is_drawn_of_nothing() -> None:
    assert draw([]) == draw([torch.empty(0)] * 300) == []


@pytest.mark.parametrize("count", [1, 7, 100, 10**6])
def test_a_sample_is_the_same_in_whatever_order_the_memory_is(count: int) -> None:
    tensor = torch.randn(3, 5, 7, 4)
    turned = tensor.to(memory_format=torch.channels_last)
    assert torch.equal(sample(turned, count), sample(tensor, count))
    assert len(sample(turned, count)) == samples_in(turned, count) <= max(count, 1)
