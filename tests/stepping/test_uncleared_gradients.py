"""Gradients that outlive a skipped step: an overflow belongs to them, so no later step takes them, whoever asks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import amp, optimizers
from halfstep.core.errors import LossScaleCollapsed
from tests.stepping.test_overflow import BAD, Reads
from tests.support.doors import open_door
from tests.support.worlds import (
    FP16,
    Made,
    assert_equal,
    scaled_backward,
    scaled_step,
    start_amp,
    step_and_clear,
    with_optimizer,
)

OVERFLOWS = 3
"""The step whose gradients are not finite."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW(fused=True)": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=1e-2),
}
FACES = ["O1", "O2", "O2, fused=False", "handle", "wrap_optimizer", "FP16_Optimizer"]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("face", FACES)
def test_clearing_only_after_a_step_that_was_taken_is_clearing_always(
    face: str, optimizer: str, half: torch.dtype
) -> None:
    found = []
    for always in (True, False):
        run = open_door(face, OPTIMIZERS[optimizer], half)
        skips = []
        for i in range(8):
            for turn in range(2):
                run.backward(run.loss(2 * i + turn, math.inf if (i, turn) == (OVERFLOWS, 0) else 1.0))
            run.optimizer.step()
            skips.append(run.skipped())
            if always or not skips[-1]:
                run.optimizer.zero_grad()
        assert skips == [i == OVERFLOWS for i in range(8)]
        found.append(run.weights())
        amp.deactivate()
    assert_equal(*found)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("plain", [False, True], ids=["no pass", "a plain pass"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("face", FACES)
def test_a_step_without_a_block_does_not_take_them(face: str, optimizer: str, plain: bool, bad: float) -> None:
    run = open_door(face, OPTIMIZERS[optimizer])
    run.backward(run.loss(0))
    step_and_clear(run.optimizer)
    before = run.weights()
    run.backward(run.loss(1, bad))
    for _ in range(2):
        run.optimizer.step()
        assert run.skipped()
        assert_equal(run.weights(), before)
        if plain:
            run.loss(2).backward()  # added to what is not finite
    if plain:
        run.optimizer.step()
        assert not run.skipped()
        assert all(p.isfinite().all() for p in run.weights())
        assert not torch.equal(run.weights()[0], before[0])


CLEARINGS: dict[str, Callable[[Any], Any]] = {
    "model.zero_grad()": lambda run: run.model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda run: run.model.zero_grad(set_to_none=False),
    "optimizer.zero_grad(set_to_none=False)": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "p.grad = None": lambda run: [setattr(p, "grad", None) for p in run.model.parameters()],
    "p.grad.zero_()": lambda run: [p.grad.zero_() for p in run.model.parameters()],
}


@pytest.mark.filterwarnings("ignore:.*did not come through amp.scale_loss:UserWarning")
@pytest.mark.parametrize("plain", [False, True], ids=["block", "plain pass"])
@pytest.mark.parametrize("clear", CLEARINGS)
@pytest.mark.parametrize("optimizer", ["AdamW", "FusedAdam"])
@pytest.mark.parametrize("face", ["O1", "O2"])
def test_it_is_over_when_they_are_cleared_by_anybody(face: str, optimizer: str, clear: str, plain: bool) -> None:
    found = []
    for overflows in (False, True):
        run = open_door(face, OPTIMIZERS[optimizer])
        if overflows:
            run.backward(run.loss(1, math.inf))
            run.optimizer.step()
            assert run.skipped()
            CLEARINGS[clear](run)
        run.loss(2).backward() if plain else run.backward(run.loss(2))
        run.optimizer.step()
        assert not run.skipped()
        found.append(run.weights())
        amp.deactivate()
    assert_equal(*found)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_an_overflow_is_over_when_its_gradients_are_cleared_before_any_step(set_to_none: bool) -> None:
    run = open_door("O2", OPTIMIZERS["AdamW"])
    run.backward(run.loss(1, math.inf))
    run.optimizer.zero_grad(set_to_none=set_to_none)
    run.backward(run.loss(2))
    run.optimizer.step()
    assert not run.skipped()


@pytest.mark.parametrize("clear", CLEARINGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("face", ["O1", "O2", "O2, fused=False"])
@pytest.mark.parametrize("overflows", [0, 1, None])
def test_gradients_that_were_kept_and_are_assigned_again(
    face: str, optimizer: str, clear: str, overflows: int | None
) -> None:
    run, kept = open_door(face, OPTIMIZERS[optimizer]), []
    before = run.weights()
    for i in range(2):
        run.backward(run.loss(i, math.inf if i == overflows else 1.0))
        kept.append([p.grad.clone() for p in run.model.parameters()])
        CLEARINGS[clear](run)
    for param, *grads in zip(run.model.parameters(), *kept, strict=True):
        param.grad = sum(grads[1:], grads[0])
    run.optimizer.step()
    assert run.skipped() == (overflows is not None)
    assert all(map(torch.equal, run.weights(), before)) == (overflows is not None)


def test_an_overflow_counts_however_many_passes_follow_it() -> None:
    run = open_door("O1", OPTIMIZERS["AdamW"])
    before = run.weights()
    for i in range(70):
        run.backward(run.loss(i, math.inf if i == 0 else 1.0))
    run.optimizer.step()
    assert run.skipped()
    assert_equal(run.weights(), before)


@pytest.mark.parametrize("optimizer", ["AdamW(fused=True)", "FusedAdam"])
def test_a_step_that_skips_itself_on_the_device_is_not_asked_whether_it_did(optimizer: str) -> None:
    run = open_door("O1", OPTIMIZERS[optimizer])
    counts = []
    for i in range(6):
        with Reads() as counted:
            run.backward(run.loss(i, math.inf if i == OVERFLOWS else 1.0))
            run.optimizer.step()
        counts.append(counted.count)  # nobody clears
    backend_reads = counts[1]  # the eager backend reads flags of the host
    assert counts[1:] == [backend_reads] * 5
    assert all(p.isfinite().all() for p in run.model.parameters())


class Checks(TorchDispatchMode):
    """Counts the reads of gradients that look for inf and NaN."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_
        return func(*args, **(kwargs or {}))


CLEARED = {  # the optimizer, how gradients are set to zero -> checks of a step with two passes
    "a step that was taken, as the host knows": ("AdamW", "model.zero_grad(set_to_none=False)", 2),
    "zeros that the optimizer has set": ("AdamW(fused=True)", "optimizer.zero_grad(set_to_none=False)", 2),
    "no gradients": ("AdamW(fused=True)", "model.zero_grad()", 2),
    "zeros of which nobody has heard": ("AdamW(fused=True)", "model.zero_grad(set_to_none=False)", 3),
}


@pytest.mark.parametrize("case", CLEARED)
def test_gradients_from_before_a_step_are_looked_at_once_and_only_where_they_may_be_bad(case: str) -> None:
    optimizer, clear, expected = CLEARED[case]
    run = open_door("O1", OPTIMIZERS[optimizer])
    for i in range(3):
        with Checks() as counted:
            run.backward(run.loss(i))
            run.backward(run.loss(i))
            run.optimizer.step()
            CLEARINGS[clear](run)
    assert counted.count == expected


@pytest.mark.parametrize("masters", [False, True], ids=["fp32", "O2"])
def test_a_grad_scaler_goes_on_skipping_until_they_are_cleared(masters: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = with_optimizer(nn.Linear(8, 4), torch.optim.SGD, lr=1e-2)
    if masters:
        model, optimizer = amp.decorate(model, optimizer, level="O2", dtype="float16")
    scaler = amp.GradScaler(init_loss_scaling=256.0, decr_every_n_nan_or_inf=1)

    def step(factor: float = 1.0) -> bool:
        x = torch.randn(4, 8, dtype=model.weight.dtype)
        scaler.scale(model(x).float().square().mean() * factor).backward()
        stepped = bool(scaler.step(optimizer))
        scaler.update()
        return stepped

    with caplog.at_level(logging.CRITICAL):
        assert [step(), step(math.inf), step(), step()] == [True, False, False, False]
        optimizer.zero_grad()
        assert step()
        step(math.inf)
        with pytest.raises(LossScaleCollapsed, match="zero_grad"):
            all(not step() for _ in range(200))
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_a_block_does_not_take_what_a_grad_scaler_left(fused: bool) -> None:
    model, optimizer = start_amp(
        nn.Linear(8, 4), torch.optim.SGD, "O2", dtype=FP16, fused=fused, loss_scale=64.0, lr=1e-2
    )
    scaler = amp.GradScaler(init_loss_scaling=256.0)
    scaled_step(model(torch.ones(4, 8)).float().sum() * math.nan, optimizer, scaler)
    for _ in range(2):
        scaled_step(model(torch.ones(4, 8)).float().sum(), optimizer)
    assert not optimizer.step_was_skipped
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_a_closure_that_does_not_clear_is_run_again_without_them(fused: bool) -> None:
    """Under a dynamic scale; what the overflow has left is not in the gradient of the second evaluation."""
    found = []
    for overflows in (False, True):
        run = open_door("O2" if fused else "O2, fused=False", OPTIMIZERS["SGD"])
        factors = [math.inf, 1.0] if overflows else [1.0]

        def closure(run: Any = run, factors: list[float] = factors) -> torch.Tensor:
            loss = run.loss(1, factors.pop(0))
            run.backward(loss)
            return loss

        run.optimizer.step(closure)
        assert not factors
        found.append(run.weights())
    assert_equal(*found)


# ---- several optimizers


ORDERS = {  # what happens, to which optimizer; "!" is a pass that overflows
    "the first skips, then the second has a pass": "0! s0 1 s1",
    "both have passes, the first steps first": "0! 1 s0 s1",
    "both have passes, the second steps first": "0! 1 s1 s0",
    "the second has a pass, then the first overflows": "1 0! s1 s0",
    "its own pass overflows after the other's": "0 1! s0 s1",
}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("level", ["O1", "O2", "handle"])
def test_an_overflow_in_a_shared_parameter_counts_for_both(level: str, order: str, fused: bool) -> None:
    heads = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
    model: Any = Made(lambda self, x, i: self.heads[i](self.body(x)), body=nn.Linear(4, 4), heads=heads)
    made: Any = [
        torch.optim.SGD([*model.body.parameters(), *head.parameters()], lr=0.1, fused=fused) for head in model.heads
    ]
    if level == "handle":
        handle = amp.init(dtype=torch.float16, loss_scale="dynamic")
    else:
        model, made = amp.initialize(
            model, made, opt_level=level, dtype=torch.float16, num_losses=2, loss_scale="dynamic", verbosity=0
        )

    def backward(i: int, factor: float) -> None:
        loss = model(torch.ones(2, 4), i).float().square().mean() * factor
        block = handle.scale_loss(loss, made[i]) if level == "handle" else amp.scale_loss(loss, made[i], loss_id=i)
        with block as scaled_loss:
            scaled_loss.backward()

    for _ in range(2):  # nothing is cleared in between
        for what in ORDERS[order].split():
            i = int(what.strip("s!"))
            if what.startswith("s"):
                made[i].step()
            else:
                backward(i, math.inf if what.endswith("!") else 1.0)
            assert all(p.isfinite().all() for p in model.parameters())
    for optimizer in made:
        optimizer.zero_grad()
    for i in (0, 1):
        backward(i, 1.0)
        made[i].step()
    assert [bool(optimizer.step_was_skipped) for optimizer in made] == [False, False]


def test_an_overflow_of_one_loss_skips_the_step_of_all_and_is_cleared() -> None:
    found = []
    for always in (True, False):
        torch.manual_seed(0)
        model, optimizer = start_amp(
            nn.Linear(8, 4), torch.optim.SGD, "O2", dtype=FP16, num_losses=2, loss_scale="dynamic", lr=1e-2
        )
        for i in range(4):
            for loss_id in (0, 1):
                factor = math.inf if (i, loss_id) == (1, 0) else 1.0
                scaled_backward(model(torch.ones(2, 8)).float().mean() * factor, optimizer, loss_id)
            optimizer.step()
            if always or not optimizer.step_was_skipped:
                optimizer.zero_grad()
        found.append([p.detach().clone() for p in model.parameters()])
    assert_equal(*found)
