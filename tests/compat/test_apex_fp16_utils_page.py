"""Each example of a page of Apex's documentation, as it stands there, with ``.cuda()`` gone and the dots filled in.

The page is "apex.fp16_utils", https://nvidia.github.io/apex/fp16_utils.html.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep.fp16_utils import (
    FP16_Optimizer,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
)
from tests.support.apex_recording import grid

D_in, D_out = 6, 3
loss_fn = F.mse_loss


def batches(n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(grid((8, D_in), 300 + 11 * t).half(), grid((8, D_out), 500 + 5 * t).half()) for t in range(n)]


def linear(name: torch.dtype = torch.float16) -> nn.Linear:
    model = nn.Linear(D_in, D_out)
    with torch.no_grad():
        model.weight.copy_(grid((D_out, D_in), 1, 0.5))
        model.bias.copy_(grid((D_out,), 2, 0.5))
    return model.to(name)


def assert_learned(model: nn.Module, steps: int) -> None:
    """Where fp32 SGD gets in as many steps, to the 11 bits of fp16."""
    reference = linear(torch.float32)
    optimizer = torch.optim.SGD(reference.parameters(), lr=1e-3)
    for input, target in batches(steps):
        optimizer.zero_grad()
        loss_fn(reference(input.float()), target.float()).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-3, atol=1e-3)


def test_two_lines_changed() -> None:
    model = torch.nn.Linear(D_in, D_out).half()
    model.load_state_dict(linear().state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    # Name the FP16_Optimizer instance to replace the existing optimizer
    # (recommended but not required):
    optimizer = FP16_Optimizer(optimizer, static_loss_scale=128.0)
    for input, target in batches(5):
        optimizer.zero_grad()
        loss = loss_fn(model(input), target)
        # loss.backward() becomes:
        optimizer.backward(loss)
        optimizer.step()
    assert_learned(model, 5)


@pytest.mark.parametrize("arguments", [{}, {"dynamic_loss_args": {"scale_window": 500}}], ids=["plain", "window"])
def test_dynamic_loss_scaling(arguments: dict[str, Any]) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer = FP16_Optimizer(
        optimizer,
        dynamic_loss_scale=True,
        # optional arg to control dynamic loss scaling behavior
        # Usually, dynamic_loss_args is not necessary.
        **arguments,
    )
    stepped = []
    data = iter(batches(5) * 10)
    input, target = next(data)
    while len(stepped) < 5:
        optimizer.zero_grad()
        optimizer.backward(loss_fn(model(input), target))
        optimizer.step()
        if not optimizer.overflow:
            stepped.append(optimizer.loss_scale)
            input, target = next(data)
    assert 1.0 < stepped[-1] < 2.0**32
    assert optimizer.loss_scaler.scale_window == arguments.get("dynamic_loss_args", {}).get("scale_window", 1000)
    assert_learned(model, 5)


def test_reading_and_setting_the_loss_scale() -> None:
    optimizer = FP16_Optimizer(torch.optim.SGD(linear().parameters(), lr=1e-3), static_loss_scale=128.0)
    assert str(optimizer.loss_scale) == "128.0"
    new_loss_scale = 512
    optimizer.loss_scale = new_loss_scale
    assert optimizer.loss_scale == 512.0


def gradients(optimizer: FP16_Optimizer) -> torch.Tensor:
    return torch.cat([g.flatten() for group in optimizer.inspect_master_grad_data() for g in group])


@pytest.mark.parametrize("way", ["ordinary", "naive", "efficient"])
def test_backward(way: str) -> None:
    model = linear()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), static_loss_scale=128.0)
    (input, target), (input2, target2) = batches(2)
    loss1, loss2 = loss_fn(model(input), target), loss_fn(model(input2), target2)
    if way == "ordinary":
        loss = loss1 + loss2
        # Ordinary operation:
        optimizer.backward(loss)
    elif way == "naive":
        # Naive operation with multiple losses (technically valid, but less efficient):
        # fp32 grads will be correct after the second call, but
        # the first call incurs an unnecessary fp16->fp32 grad copy.
        optimizer.backward(loss1)
        optimizer.backward(loss2)
    else:
        # More efficient way to handle multiple losses:
        # The fp16->fp32 grad copy is delayed until fp16 grads from all
        # losses have been accumulated.
        optimizer.backward(loss1, update_master_grads=False)
        optimizer.backward(loss2, update_master_grads=False)
        optimizer.update_master_grads()
    reference = linear(torch.float32)
    for x, y in batches(2):
        loss_fn(reference(x.float()), y.float()).backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
    torch.testing.assert_close(gradients(optimizer), expected, rtol=5e-3, atol=2e-3)


def test_clip_master_grads() -> None:
    model = linear()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=1e-3), static_loss_scale=128.0)
    input, target = batches(1)[0]
    optimizer.backward(loss_fn(model(input), target))
    before = gradients(optimizer).norm()
    torch.testing.assert_close(optimizer.clip_master_grads(0.1), before)
    assert gradients(optimizer).norm() == pytest.approx(0.1, rel=1e-3)
    optimizer.backward(loss_fn(model(input), target) * float("inf"))
    assert optimizer.clip_master_grads(0.1) == -1


def test_saving_and_loading(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, FP16_Optimizer]:
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        return model, FP16_Optimizer(optimizer, static_loss_scale=128.0)

    def train(model: nn.Module, optimizer: FP16_Optimizer, data: Any) -> None:
        for input, target in data:
            optimizer.zero_grad()
            optimizer.backward(loss_fn(model(input), target))
            optimizer.step()

    model, optimizer = build()
    train(model, optimizer, batches(3))
    checkpoint = {}
    checkpoint["model"] = model.state_dict()
    checkpoint["optimizer"] = optimizer.state_dict()
    torch.save(checkpoint, tmp_path / "saved.pth")
    train(model, optimizer, batches(6)[3:])

    resumed, again = build()
    checkpoint = torch.load(tmp_path / "saved.pth")
    resumed.load_state_dict(checkpoint["model"])
    again.load_state_dict(checkpoint["optimizer"])
    train(resumed, again, batches(6)[3:])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_step_with_a_closure(kind: type[torch.optim.Optimizer], dynamic: bool) -> None:
    model = linear()
    optimizer = kind(model.parameters(), lr=1e-3)
    # The page warns that dynamic loss scaling is not compatible with closures; here it is.
    optimizer = FP16_Optimizer(optimizer, static_loss_scale=128.0, dynamic_loss_scale=dynamic)
    dataset = batches(5)
    first = last = None
    # optimizer is assumed to be an FP16_Optimizer object, previously constructed from an
    # existing pytorch optimizer.
    for input, target in dataset:

        def closure(input: torch.Tensor = input, target: torch.Tensor = target) -> torch.Tensor:
            optimizer.zero_grad()
            output = model(input)
            loss = loss_fn(output, target)
            # loss.backward() becomes:
            optimizer.backward(loss)
            return loss.detach()

        last = optimizer.step(closure)
        first = last if first is None else first
    assert last is not None
    if kind is torch.optim.SGD:
        assert_learned(model, 5)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("flat_master", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_manual_master_parameters(flat_master: bool, dtype: torch.dtype) -> None:
    model = linear(dtype)
    model_params, master_params = prep_param_lists(model, flat_master=flat_master)
    assert len(master_params) == (1 if flat_master else 2)
    optimizer = torch.optim.SGD(master_params, lr=1e-3)
    for input, target in batches(5):
        model.zero_grad()
        loss_fn(model(input.to(dtype)), target.to(dtype)).backward()
        model_grads_to_master_grads(model_params, master_params, flat_master=flat_master)
        optimizer.step()
        master_params_to_model_params(model_params, master_params, flat_master=flat_master)
    if dtype is torch.float16:
        assert_learned(model, 5)
    else:
        masters = torch.cat([m.detach().flatten() for m in master_params])
        assert torch.equal(torch.cat([p.detach().flatten() for p in model_params]), masters.to(dtype))
