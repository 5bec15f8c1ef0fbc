"""The fused optimizers of 2018, and ``apex.optimizers.FP16_Optimizer`` around them."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from halfstep.apex.contrib import optimizers as contrib
from torch import nn
from torch.nn import functional as F

from halfstep import optimizers as ours
from halfstep.apex import optimizers
from halfstep.core.errors import ArgumentValueError
from tests.support.worlds import assert_equal, step_and_clear

ADAM: Any = contrib.FusedAdam
SGD: Any = contrib.FusedSGD
FP16_Optimizer: Any = optimizers.FP16_Optimizer

Numbers = list[torch.Tensor]


def adam_of_2018(
    params: Numbers,
    steps: list[Numbers],
    *,
    lr: float = 1e-2,
    bias_correction: bool = True,
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
) -> Numbers:
    """The documented update in float64: ``steps`` has the gradients of each step."""
    params = [p.double() for p in params]
    m, v = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    for t, grads in enumerate(steps, 1):
        norm = torch.cat([g.double().flatten() for g in grads]).norm()
        clip = max(1.0, ((norm + 1e-6) / max_grad_norm).item()) if max_grad_norm else 1.0
        rate = lr * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t) if bias_correction else lr
        for i, grad in enumerate(grads):
            g = grad.double() / clip
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g * g
            root = (v[i] + eps).sqrt() if eps_inside_sqrt else v[i].sqrt() + eps
            params[i] = params[i] - rate * (m[i] / root + weight_decay * params[i])
    return params


SETTINGS: list[dict[str, Any]] = [
    {},
    {"bias_correction": False, "max_grad_norm": 1.0},
    {"weight_decay": 0.1},
    {"eps": 1e-3, "eps_inside_sqrt": True},
    {"max_grad_norm": 0.5, "weight_decay": 0.01, "lr": 0.1},
]


@pytest.mark.parametrize("how", ["grads", "param.grad", "fp16 grads and output"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_adam_of_2018(settings: dict[str, Any], how: str) -> None:
    params = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7))]
    steps = [[torch.randn_like(p).half().float() for p in params] for _ in range(4)]
    expected = adam_of_2018([p.detach() for p in params], steps, **{"lr": 1e-2, **settings})
    optimizer = ADAM(params, **{"lr": 1e-2, **settings})
    outputs = [torch.zeros_like(p, dtype=torch.float16) for p in params]
    for grads in steps:
        if how == "grads":
            optimizer.step(grads=[g * 8 for g in grads], scale=8.0)
        elif how == "param.grad":
            for p, g in zip(params, grads, strict=True):
                p.grad = g * 4
            optimizer.step(scale=4.0)
        else:
            optimizer.step(grads=[[g.half() * 2 for g in grads]], output_params=[outputs], scale=2.0)
    for p, value, output in zip(params, expected, outputs, strict=True):
        torch.testing.assert_close(p.detach().double(), value, rtol=2e-5, atol=1e-6)
        if how == "fp16 grads and output":
            assert p.grad is None
            assert torch.equal(output, p.half())
    assert not hasattr(optimizer, "grad_scale")


def test_groups_are_clipped_apart() -> None:
    one, two = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(4))
    grads = [torch.randn(5) * 10, torch.randn(4) * 10]
    groups = [{"params": [one], "max_grad_norm": 1.0}, {"params": [two]}]
    expected = [
        adam_of_2018([one.detach()], [[grads[0]]] * 2, max_grad_norm=1.0, eps=1.0)[0],
        adam_of_2018([two.detach()], [[grads[1]]] * 2, max_grad_norm=3.0, eps=1.0)[0],
    ]
    optimizer = ADAM(groups, lr=1e-2, max_grad_norm=3.0, eps=1.0)
    for _ in range(2):
        optimizer.step(grads=[[grads[0]], [grads[1]]], grad_norms=[None, None])
    torch.testing.assert_close(one.detach().double(), expected[0], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(two.detach().double(), expected[1], rtol=1e-5, atol=1e-7)


def test_sgd_takes_gradients_and_a_closure() -> None:
    param, reference = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = SGD([param], lr=0.1, momentum=0.9, weight_decay=0.1)
    exact = torch.optim.SGD([reference], lr=0.1, momentum=0.9, weight_decay=0.1)
    output = torch.zeros(3, dtype=torch.bfloat16)
    for i in range(3):
        reference.grad = torch.full((3,), i + 1.0, dtype=torch.float64)
        exact.step()
        given = (g for g in [torch.full((3,), 16.0 * (i + 1), dtype=torch.float16)])
        assert optimizer.step(lambda: 7.0, grads=given, output_params=[output], scale=16.0) == 7.0
    torch.testing.assert_close(param.detach().double(), reference.detach())
    assert torch.equal(output, param.bfloat16())


def test_the_adam_of_apex_optimizers_is_of_its_year() -> None:
    params = [nn.Parameter(torch.ones(2))]
    today, then = optimizers.FusedAdam(params, lr=0.1), optimizers.FusedAdam(params, max_grad_norm=1.0, use_mt=True)
    assert type(then) is ADAM
    assert isinstance(today, ours.FusedAdam)
    assert isinstance(then, optimizers.FusedAdam)
    assert type(copy.deepcopy(then)) is ADAM
    reference = ours.FusedAdam([nn.Parameter(torch.ones(2))], lr=0.1)
    (theirs,) = reference.param_groups[0]["params"]
    for optimizer, param in ((today, params[0]), (reference, theirs)):
        param.grad = torch.tensor([1.0, -2.0])
        optimizer.step()
    assert torch.equal(params[0], theirs)
    today.step(grads=[torch.tensor([8.0, 8.0])], scale=8.0)
    theirs.grad = torch.ones(2)
    reference.step()
    assert torch.equal(params[0], theirs)


# ---- FP16_Optimizer


def net(dtype: torch.dtype = torch.float16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(dtype)


def train(model: nn.Module, optimizer: Any, steps: int, *, overflow_at: int = -1, first: int = 0) -> list[float]:
    seen = []
    for i in range(first, first + steps):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(i))
        loss = F.mse_loss(model(x.to(next(model.parameters()).dtype)).float(), x[:, :2])
        optimizer.backward(loss * float("inf") if i == overflow_at else loss)
        step_and_clear(optimizer)
        seen.append(loss.item())
    return seen


MAKERS: dict[str, Any] = {
    "FusedAdam of 2018": lambda p: optimizers.FusedAdam(p, lr=1e-2, bias_correction=False, max_grad_norm=1.0),
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=1e-2),
    "contrib FusedAdam": lambda p: ADAM(p, lr=1e-2, eps_inside_sqrt=True),
    "contrib FusedSGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "contrib FusedLAMB": lambda p: contrib.FusedLAMB(p, lr=0.1),
    "torch Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
}


@pytest.mark.parametrize("make", MAKERS)
def test_training_with_an_overflow_and_a_checkpoint(make: str, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = FP16_Optimizer(MAKERS[make](model.parameters()), dynamic_loss_scale=True)
    assert (optimizer.cur_scale, optimizer.cur_iter, optimizer.last_overflow_iter) == (2.0**16, 0, -1)
    with caplog.at_level(logging.INFO, "halfstep"):
        seen = train(model, optimizer, 25, overflow_at=3)
        assert (optimizer.cur_scale, optimizer.cur_iter, optimizer.last_overflow_iter) == (2.0**15, 25, 3)
    assert "Gradient overflow" in caplog.text
    assert seen[-1] < 0.8 * seen[0]
    assert [p.dtype for p in model.parameters()] == [torch.float16] * 4
    (flat,) = optimizer.fp32_groups_flat
    assert flat.dtype is torch.float32
    assert torch.equal(flat.half(), torch.cat([p.flatten() for p in model.parameters()]))

    saved = copy.deepcopy(optimizer.state_dict())
    other = net().apply(lambda module: [nn.init.zeros_(p) for p in module.parameters()])
    resumed = FP16_Optimizer(MAKERS[make](other.parameters()), dynamic_loss_scale=True)
    resumed.load_state_dict(saved)
    assert (resumed.cur_scale, resumed.cur_iter, resumed.last_overflow_iter) == (2.0**15, 25, 3)
    assert train(model, optimizer, 3, first=25) == train(other, resumed, 3, first=25)
    assert_equal(model.parameters(), other.parameters())


def test_gradients_stay_scaled_until_the_step_and_add_up() -> None:
    model = net()
    optimizer = FP16_Optimizer(SGD(model.parameters(), lr=0.0), static_loss_scale=64.0)
    x = torch.randn(4, 4).half()
    exact = net(torch.float64)
    F.mse_loss(exact(x.double()), x.double()[:, :2]).backward()
    for _ in range(2):
        optimizer.backward(F.mse_loss(model(x).float(), x.float()[:, :2]))
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad.double(), q.grad * 128, rtol=2e-2, atol=1.0)
    optimizer.step()
    assert optimizer.cur_iter == 1
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    # As a subclass of unilm's does when it resumes.
    optimizer.cur_scale, optimizer.cur_iter, optimizer.last_overflow_iter = 8.0, 5, 2
    assert (optimizer.loss_scale, optimizer.cur_iter, optimizer.last_overflow_iter) == (8.0, 5, 2)


def test_the_factor_and_the_window_of_a_dynamic_scale_can_be_set() -> None:
    model = nn.Linear(2, 2).half()
    optimizer = FP16_Optimizer(ADAM(model.parameters()), dynamic_loss_scale=True, verbose=False)
    optimizer.cur_scale, optimizer.scale_factor, optimizer.scale_window = 64.0, 4.0, 2
    assert (optimizer.scale_factor, optimizer.scale_window) == (4.0, 2)
    scales = []
    for value in (float("inf"), 1.0, 1.0):
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(1, 2).half()).float().sum() * value)
        optimizer.step()
        scales.append(optimizer.cur_scale)
    assert scales == [16.0, 16.0, 64.0]


def test_a_backward_pass_of_the_script_itself() -> None:
    results = []
    for own in (False, True):
        model = net()
        optimizer = FP16_Optimizer(MAKERS["FusedAdam"](model.parameters()), static_loss_scale=128.0)
        x = torch.ones(4, 4).half()
        loss = model(x).float().square().mean()
        if own:
            (loss * optimizer.cur_scale).backward()
        else:
            optimizer.backward(loss)
        optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("flat", [True, False])
def test_a_checkpoint_of_the_original(flat: bool) -> None:
    """``apex.optimizers`` kept one vector for each group, ``apex.contrib`` a list of masters."""
    model = net()
    params = list(model.parameters())
    masters = [p.detach().float() + 1e-4 for p in params]
    moments = [torch.rand_like(m) for m in masters], [torch.rand_like(m) for m in masters]

    def vector(tensors: Numbers) -> torch.Tensor:
        return torch.cat([t.flatten() for t in tensors])

    group: dict[str, Any] = {"lr": 1e-2, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8}
    group |= {"weight_decay": 0.0, "max_grad_norm": 0.0}
    if flat:
        state: dict[int, Any] = {140: {"step": 5, "exp_avg": vector(moments[0]), "exp_avg_sq": vector(moments[1])}}
        saved_masters: dict[str, Any] = {"fp32_groups_flat": [vector(masters)]}
    else:
        state = {i: {"step": 5, "exp_avg": moments[0][i], "exp_avg_sq": moments[1][i]} for i in range(4)}
        saved_masters = {"fp32_groups": [masters]}
    saved = {
        "dynamic_loss_scale": True, "cur_scale": 512.0, "cur_iter": 9, "last_overflow_iter": 4, "scale_factor": 2,
        "scale_window": 1000, **saved_masters,
        "optimizer_state_dict": {"state": state, "param_groups": [{**group, "params": list(state)}]},
    }  # fmt: skip
    optimizer = FP16_Optimizer(ADAM(params, lr=1e-2), dynamic_loss_scale=True)
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert (optimizer.cur_scale, optimizer.cur_iter, optimizer.last_overflow_iter) == (512.0, 9, 4)
    assert torch.equal(optimizer.fp32_groups_flat[0], vector(masters))
    for p, m, v in zip(params, *moments, strict=True):
        entry = optimizer.state[p]
        assert torch.equal(entry["exp_avg"], m)
        assert torch.equal(entry["exp_avg_sq"], v)
        assert int(entry["step"]) == 5
    train(model, optimizer, 1)
    assert optimizer.cur_iter == 10
    with pytest.raises(ArgumentValueError, match="A group was saved with 3 values, and here it has 58"):
        optimizer.load_state_dict({**saved, "fp32_groups_flat": [torch.ones(3)]})
