"""``HalfstepScaler`` in the place of timm's ``NativeScaler`` trains as the plain loop does, bit for bit."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

if importlib.util.find_spec("timm") is None:
    pytest.skip("timm is not installed; `make integrations` installs it", allow_module_level=True)

from tests.integrations.torchvision_stub import import_timm

import_timm()

import timm
from timm.optim import create_optimizer_v2, list_optimizers
from timm.utils import ModelEmaV3, NativeScaler
from timm.utils.agc import adaptive_clip_grad
from torch.nn import functional as F

from halfstep import Policy, amp, optimizers
from halfstep.integrations.timm import HalfstepScaler
from tests.integrations import direct_loop as direct
from tests.support.worlds import with_optimizer


def train(
    level: str = "O1",
    dtype: str | None = None,
    optimizer: str = "AdamW",
    *,
    accumulate: int = 1,
    data: Any = None,
    policy: Policy | None = None,
    **clip: Any,
) -> tuple[direct.Trained, list[Any]]:
    model = direct.classifier()
    stepper = direct.optimizer_of(optimizer, model.parameters())
    loss_scaler = HalfstepScaler(level, dtype, policy=policy)
    loss_scaler.prepare(model, stepper)
    losses, steps = [], []
    for i, (x, y) in enumerate(direct.batches() if data is None else data):
        with loss_scaler.autocast():
            loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        update = (i + 1) % accumulate == 0
        arguments = {"parameters": model.parameters(), "need_update": update, **clip}
        steps.append(loss_scaler(loss / accumulate, stepper, **arguments))
        if update:
            stepper.zero_grad()
    weights = [p.detach().clone() for p in amp.master_params(stepper)]
    return direct.Trained(losses, weights, loss_scaler.scaler.get_scale()), steps


@pytest.mark.parametrize(("accumulate", "clip", "clip_by"), direct.WINDOWS)
@pytest.mark.parametrize("optimizer", list(direct.OPTIMIZERS))
@pytest.mark.parametrize(("level", "dtype"), direct.RECIPES)
def test_trains_as_the_plain_loop_does(
    level: str, dtype: str, optimizer: str, accumulate: int, clip: float | None, clip_by: str
) -> None:
    mine, steps = train(level, dtype, optimizer, accumulate=accumulate, clip_grad=clip, clip_mode=clip_by)
    direct.same(mine, direct.train(level, dtype, optimizer, accumulate=accumulate, clip=clip, clip_by=clip_by))
    assert [step is not None for step in steps] == [(i + 1) % accumulate == 0 for i in range(direct.BATCHES)]
    assert all(steps[accumulate - 1 :: accumulate])


@pytest.mark.parametrize(("level", "dtype"), direct.RECIPES)
def test_adaptive_clipping_is_that_of_the_masters(level: str, dtype: str) -> None:
    mine, _ = train(level, dtype, data=direct.batches(1), clip_grad=0.01, clip_mode="agc")

    model = direct.classifier()
    optimizer = direct.optimizer_of("AdamW", model.parameters())
    if level == "O2":
        amp.decorate(model, optimizer, level="O2", dtype=dtype)
    scaler = amp.GradScaler(dtype == "float16")
    x, y = direct.batches(1)[0]
    with direct.scope(level, dtype):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    adaptive_clip_grad(list(amp.master_params(optimizer)), 0.01)
    scaler.step(optimizer)
    for weight, expected in zip(mine.weights, amp.master_params(optimizer), strict=True):
        torch.testing.assert_close(weight, expected.detach(), rtol=0, atol=0)
    assert any(not torch.equal(w, e) for w, e in zip(mine.weights, direct.train(level, dtype).weights, strict=True))


def test_a_part_of_the_parameters_can_be_clipped() -> None:
    model, optimizer = with_optimizer(direct.classifier(), torch.optim.SGD, lr=1.0)
    loss_scaler = HalfstepScaler("O2", "bfloat16")
    loss_scaler.prepare(model, optimizer)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    x, y = direct.batches(1)[0]
    with loss_scaler.autocast():
        loss = F.cross_entropy(model(x), y)
    loss_scaler(loss, optimizer, clip_grad=1e-3, parameters=list(model.parameters())[:1])
    moved = [(p - b).norm().item() for p, b in zip(amp.master_params(optimizer), before, strict=True)]
    assert moved[0] == pytest.approx(1e-3, rel=1e-3)
    assert all(distance > 1e-2 for distance in moved[-2:])


def test_a_skipped_step_says_so() -> None:
    _, steps = train("O2", "float16", "AdamW(fused=True)", data=direct.batches(3, overflow_at=1))
    assert [bool(step) for step in steps] == [True, False, True]


def test_it_has_what_a_native_scaler_has() -> None:
    mine, theirs = HalfstepScaler("O1", "float16"), NativeScaler(device="cpu")
    assert mine.state_dict_key == theirs.state_dict_key
    mine.scaler.set_init_loss_scaling(8.0)
    other = HalfstepScaler("O1", "float16")
    other.load_state_dict(mine.state_dict())
    assert other.scaler.get_scale() == 8.0


KINDS = {
    "halfstepadam": optimizers.FusedAdam,
    "halfstepadamw": optimizers.FusedAdam,
    "halfstepsgd": optimizers.FusedSGD,
    "halfsteplamb": optimizers.FusedLAMB,
    "halfstepnovograd": optimizers.FusedNovoGrad,
    "halfstepadagrad": optimizers.FusedAdagrad,
}


def test_the_registry_has_all_of_them() -> None:
    assert list_optimizers("halfstep*") == sorted(KINDS)


@pytest.mark.parametrize("name", list(KINDS))
def test_a_model_of_timm_trains_with_an_optimizer_of_the_registry(name: str) -> None:
    torch.manual_seed(1)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
    optimizer = create_optimizer_v2(model, name, lr=1e-2, weight_decay=0.01)
    assert isinstance(optimizer, KINDS[name])
    loss_scaler = HalfstepScaler("O2", "bfloat16")
    loss_scaler.prepare(model, optimizer)
    x, y = torch.randn(8, 3, 16, 16), torch.randint(5, (8,))
    losses = []
    for _ in range(8):
        with loss_scaler.autocast():
            loss = F.cross_entropy(model(x), y)
        loss_scaler(loss, optimizer, clip_grad=5.0, clip_mode="norm", parameters=model.parameters())
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_an_average_of_weights_is_fp32() -> None:
    model = direct.classifier()
    optimizer = direct.optimizer_of("AdamW", model.parameters())
    loss_scaler = HalfstepScaler("O2", "bfloat16")
    loss_scaler.prepare(model, optimizer)
    ema = ModelEmaV3(amp.master_model(model), decay=0.99)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for x, y in direct.batches():
        with loss_scaler.autocast():
            loss = F.cross_entropy(model(x), y)
        loss_scaler(loss, optimizer)
        optimizer.zero_grad()
        ema.update(model)
        for name, value in model.state_dict().items():
            expected[name].lerp_(value, 0.01)
    for name, value in ema.module.state_dict().items():
        assert value.dtype is torch.float32
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)
    assert ema.module(torch.randn(2, 12)).dtype is torch.float32


@pytest.mark.parametrize("policy", direct.POLICIES)
def test_a_policy_is_what_initialize_makes_of_it(policy: Policy) -> None:
    direct.same(train(policy=policy)[0], direct.train_by_policy(policy))
