"""``TrainStep`` does what the loop in its documentation does, bit for bit, and refuses what it cannot do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import HalfstepError, TrainStep, amp, optimizers
from tests.support.processes import Ranks
from tests.support.worlds import BF16, FP16, assert_equal, loss_of, scaled_backward, with_optimizer
from tests.train_step.runs import random_batch

SCALERS: dict[str, Callable[[], Any]] = {
    "no scaler": lambda: None,
    "amp.GradScaler": lambda: amp.GradScaler(init_loss_scaling=2.0**10, decr_every_n_nan_or_inf=1),
    "torch.amp.GradScaler": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10),
    "disabled": lambda: amp.GradScaler(enable=False),
}
SETUPS = [
    (level, dtype, optimizer, "no scaler")
    for level, dtype in [("O0", FP16), ("O1", BF16), ("O1", FP16), ("O2", BF16), ("O2", FP16), ("O3", BF16)]
    for optimizer in (torch.optim.SGD, torch.optim.AdamW, optimizers.FusedAdam)
] + [
    (level, FP16, torch.optim.AdamW, scaler)
    for level in (None, "decorate")
    for scaler in ("no scaler", "amp.GradScaler", "torch.amp.GradScaler", "disabled")
    if (level, scaler) != ("decorate", "torch.amp.GradScaler")
]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def brought_up(level: str | None, dtype: torch.dtype, make: Any) -> tuple[Any, Any]:
    model, optimizer = with_optimizer(mlp(), make, lr=0.01)
    if level == "decorate":
        return amp.decorate(models=model, optimizers=optimizer, level="O2", dtype=dtype)
    if level is not None:
        return amp.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0)
    return model, optimizer


def forward_of(model: nn.Module, level: str | None, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model, within the scope that one from ``amp.decorate`` is called in."""
    if level != "decorate":
        return model

    def forward(x: torch.Tensor) -> torch.Tensor:
        with amp.auto_cast(level="O2", dtype=dtype):
            return model(x)  # type: ignore[no-any-return]

    return forward


@pytest.mark.parametrize(("accumulate", "clip"), [(3, 0.5), pytest.param(1, None, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("level", "dtype", "make", "scaler"), SETUPS)
def test_it_is_the_loop(level: str | None, dtype: Any, make: Any, scaler: str, accumulate: int, clip: Any) -> None:
    model, optimizer = brought_up(level, dtype, make)
    theirs, their_optimizer = brought_up(level, dtype, make)
    their_scaler, forward = SCALERS[scaler](), forward_of(theirs, level, dtype)
    step = TrainStep(
        forward_of(model, level, dtype),
        loss_of,
        optimizer,
        scaler=SCALERS[scaler](),
        accumulate=accumulate,
        max_grad_norm=clip,
    )
    scales = (dtype is FP16 and level in ("O1", "O2")) or scaler in ("amp.GradScaler", "torch.amp.GradScaler")
    for i in range(4 * accumulate):
        x, y = random_batch(i, overflow=scales and i == 2 * accumulate - 1)
        found = step(x, y)
        loss = loss_of(forward(x), y)
        part = loss / accumulate if accumulate > 1 else loss
        if their_scaler is not None:
            their_scaler.scale(part).backward()
        elif level is not None and level != "decorate":
            scaled_backward(part, their_optimizer)
        else:
            part.backward()
        if (i + 1) % accumulate == 0:
            params = list(amp.master_params(their_optimizer))  # in fp32, as max_grad_norm clips
            if their_scaler is not None:
                if clip is not None:
                    their_scaler.unscale_(their_optimizer)
                    norm = nn.utils.clip_grad_norm_(params, clip)
                their_scaler.step(their_optimizer)
                their_scaler.update()
            else:
                if clip is not None:
                    norm = nn.utils.clip_grad_norm_(params, clip)
                their_optimizer.step()
            their_optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())
            if clip is not None:
                assert step.grad_norm is not None
                torch.testing.assert_close(step.grad_norm, norm, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(found, loss.detach(), rtol=0, atol=0, equal_nan=True)
        assert_equal(model.parameters(), theirs.parameters())
    assert not found.requires_grad
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), mlp().to(BF16).parameters(), strict=True))
    (signature,) = step.signatures
    assert (signature.runs, signature.reason, signature.calls) == ("eager", None, 4 * accumulate)
    assert signature.inputs == ("float32[4, 6] cpu", "float32[4, 3] cpu")


def test_the_model_may_return_the_loss_of_the_whole_batch() -> None:
    model, optimizer = with_optimizer(mlp(), torch.optim.SGD, lr=0.1)
    step = TrainStep(lambda given: loss_of(model(given["x"]), given["y"]), None, optimizer)
    x, y = random_batch(0)
    first = step({"x": x, "y": y})
    assert first == loss_of(mlp()(x), y)
    assert step({"x": x, "y": y}) < first


def test_the_items_before_the_last_are_the_models_arguments() -> None:
    model, optimizer = with_optimizer(mlp(), torch.optim.SGD, lr=0.1)
    step = TrainStep(lambda one, other: model(one + other), loss_of, optimizer, max_grad_norm=1.0)
    assert step.grad_norm is None
    x, y = random_batch(0)
    assert step(x, x, y) == loss_of(mlp()(2 * x), y)
    assert step.grad_norm > 0


def test_each_kind_of_batch_has_a_signature_and_few_are_kept() -> None:
    model = mlp()
    step = TrainStep(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1))
    for rows in (4, 2, 4, 4):
        step(torch.ones(rows, 6), torch.zeros(rows, 3))
    model.eval()
    step(torch.ones(2, 6), torch.zeros(2, 3))
    assert [(s.inputs[0], s.training, s.calls) for s in step.signatures] == [
        ("float32[4, 6] cpu", True, 3),
        ("float32[2, 6] cpu", True, 1),
        ("float32[2, 6] cpu", False, 1),
    ]
    for rows in range(1, 100):
        step(torch.ones(rows, 6), torch.zeros(rows, 3))
    assert len(step.signatures) == 64


def test_a_failed_forward_pass_changes_nothing() -> None:
    model, optimizer = brought_up("O2", BF16, optimizers.FusedAdam)
    step = TrainStep(model, loss_of, optimizer, accumulate=2)
    step(*random_batch(0))
    before = [p.clone() for p in model.parameters()], [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError):
        step(torch.ones(4, 5), torch.ones(4, 3))
    assert all(map(torch.equal, before[0], model.parameters()))
    assert all(map(torch.equal, before[1], [p.grad for p in model.parameters()]))
    step(*random_batch(1))
    assert not all(map(torch.equal, before[0], model.parameters()))


def windows_on_ranks(rank: int, level: str | None, half: torch.dtype) -> list[torch.Tensor]:
    model, optimizer = brought_up(level, half, torch.optim.AdamW)
    step = TrainStep(DistributedDataParallel(model), loss_of, optimizer, accumulate=2)
    for i in range(4):
        step(*random_batch(2 * i + rank))
    return [p.detach().float().clone() for p in model.parameters()]


@pytest.mark.parametrize(("level", "half"), [(None, BF16), ("O2", BF16), ("O2", FP16)])
def test_ranks_step_with_the_mean_over_all_batches(ranks: Ranks, level: str | None, half: torch.dtype) -> None:
    first, second = ranks.run(windows_on_ranks, level, half)
    assert all(map(torch.equal, first, second))
    model, optimizer = brought_up(level, half, torch.optim.AdamW)
    step = TrainStep(model, loss_of, optimizer, accumulate=4)
    for i in range(8):
        step(*random_batch(i))
    torch.testing.assert_close([p.float() for p in model.parameters()], [*first], rtol=2e-2, atol=2e-3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # Inductor calls it
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"compiled": True}, marks=pytest.mark.exhaustive), {"cuda_graph": True}]
)
def test_gradients_may_be_released_inside_of_the_backward_pass(options: dict[str, bool]) -> None:
    trained = []
    for release in (True, False):
        model, optimizer = brought_up("O2", FP16, optimizers.FusedAdam)
        optimizer.attach(model, release=release)
        step = TrainStep(model, loss_of, optimizer, **(options if release else {}))
        trained.append(([step(*random_batch(i, overflow=i == 1)) for i in range(4)], list(model.parameters())))
        assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-3, atol=1e-4, equal_nan=True)


def test_a_window_that_is_not_full_can_be_finished() -> None:
    model, optimizer = brought_up("O2", BF16, optimizers.FusedAdam)
    theirs, their_optimizer = brought_up("O2", BF16, optimizers.FusedAdam)
    step = TrainStep(model, loss_of, optimizer, accumulate=4)
    step.finish()
    assert all(map(torch.equal, model.parameters(), theirs.parameters()))
    for i in range(2):
        step(*random_batch(i))
        scaled_backward(loss_of(theirs(random_batch(i)[0]), random_batch(i)[1]) / 4, their_optimizer)
    step.finish()
    their_optimizer.step()
    assert all(map(torch.equal, model.parameters(), theirs.parameters()))
    assert all(p.grad is None for p in model.parameters())
    before = [p.clone() for p in model.parameters()]
    for i in range(3):
        step(*random_batch(i))
    assert all(map(torch.equal, before, model.parameters()))  # a new window of four


def test_a_window_that_becomes_shorter_than_what_it_has_is_full() -> None:
    model, optimizer = brought_up("O2", BF16, optimizers.FusedAdam)
    step, before = TrainStep(model, loss_of, optimizer, accumulate=4), [p.clone() for p in model.parameters()]
    for i in range(3):
        step(*random_batch(i))
    step.accumulate = 2
    step(*random_batch(3))
    assert not all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"accumulate": 2}])
def test_gradients_that_are_released_later_can_be_neither_clipped_nor_accumulated(options: dict[str, Any]) -> None:
    model, optimizer = brought_up("O2", FP16, optimizers.FusedAdam)
    step, before = TrainStep(model, loss_of, optimizer, **options), [p.clone() for p in model.parameters()]
    optimizer.attach(model, release=True)
    with pytest.raises(HalfstepError, match=f"{next(iter(options))}=.*remove"):
        step(*random_batch(0))
    assert all(map(torch.equal, before, model.parameters()))


def test_it_is_made_again_around_copies() -> None:
    model, optimizer = brought_up("O2", BF16, optimizers.FusedAdam)
    TrainStep(model, loss_of, optimizer)(*random_batch(0))
    again, copied = copy.deepcopy((model, optimizer))
    first = TrainStep(model, loss_of, optimizer)(*random_batch(1))
    assert TrainStep(again, loss_of, copied)(*random_batch(1)) == first
