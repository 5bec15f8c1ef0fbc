"""``TrainStep(cuda_graph=True)``: recorded steps train as eager ones do, and nothing that changes goes unseen.

The recordings are tapes (``tests.support.tape``), on the CPU. The last test is for a real CUDA device.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import DynamicLossScale, TrainStep, amp, optimizers
from halfstep.amp.train_step import graphed_steps
from halfstep.stepping.attached import observers
from tests.support.backends import skip_without_compiler
from tests.support.tape import imitation
from tests.support.worlds import (
    BF16,
    FP16,
    FP32,
    Made,
    advance,
    assert_equal,
    loss_of,
    scaled_backward,
    start_amp,
    with_optimizer,
)
from tests.train_step.runs import random_batch, run_of


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    skip_without_compiler()  # a tape records launches of the compiled backend
    with imitation() as tape:
        monkeypatch.setattr(graphed_steps, "CudaGraph", tape)
        yield


def made(level: str | None, dtype: torch.dtype, *how: Any, **options: Any) -> tuple[Any, Any, TrainStep]:
    torch.manual_seed(0)
    layers = nn.Linear(6, 160), nn.BatchNorm1d(160), nn.Tanh(), nn.Linear(160, 160), nn.Linear(160, 3)
    rule = DynamicLossScale(init_scale=2.0**10, growth_interval=5) if dtype is FP16 and level != "O0" else None
    return run_of(nn.Sequential(*layers), level, dtype, *how, rule=rule, **options)


def pair(
    level: str | None = "O2",
    dtype: torch.dtype = BF16,
    make: Any = optimizers.FusedAdam,
    scaled: bool = False,
    **options: Any,
) -> tuple[tuple[Any, Any, TrainStep], tuple[Any, Any, TrainStep]]:
    """One training with graphs, and the same without."""
    return made(level, dtype, make, scaled, cuda_graph=True, **options), made(level, dtype, make, scaled, **options)


def take(ours: Any, theirs: Any, i: int, **kind: Any) -> None:
    """A step of both, which must agree to the bit."""
    found, expected = ours[2](*random_batch(i, **kind)), theirs[2](*random_batch(i, **kind))
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert_equal(ours[0].parameters(), theirs[0].parameters())


@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize("clip", [pytest.param(None, marks=pytest.mark.exhaustive), 0.5])
@pytest.mark.parametrize(
    ("level", "dtype", "make", "scaled"),
    [
        ("O0", BF16, optimizers.FusedAdam, False),
        ("O1", BF16, optimizers.FusedAdam, False),
        ("O1", FP16, optimizers.FusedSGD, False),
        ("O2", BF16, optimizers.FusedLAMB, False),
        ("O2", FP16, optimizers.FusedAdam, False),
        ("O2", FP16, torch.optim.AdamW, False),
        ("O2", BF16, torch.optim.SGD, False),
        ("O2", BF16, optimizers.FusedNovoGrad, False),
        (None, FP32, optimizers.FusedAdam, True),
        (None, FP32, optimizers.FusedAdam, False),
    ],
)
def test_replays_train_as_eager_steps_do(
    level: str | None, dtype: Any, make: Any, scaled: bool, clip: float | None
) -> None:
    ours, theirs = pair(level, dtype, make, scaled, max_grad_norm=clip)
    scales = scaled or (dtype is FP16 and level in ("O1", "O2"))
    for i in range(12):
        for one in (ours, theirs):
            one[1].param_groups[0]["lr"] = 1e-3 * (1 + i % 3)
        take(ours, theirs, i, rows=3 if i % 5 == 4 else 4, overflow=scales and i in (2, 7, 9))
    first = ours[2].signatures[0]
    assert (first.runs, first.reason) == ("CUDA graph", None)
    assert first.replays >= 4
    if scaled:
        assert ours[2].scaler.get_scale() == theirs[2].scaler.get_scale() < 2.0**10
    elif scales:
        assert amp.state_dict(optimizer=ours[1]) == amp.state_dict(optimizer=theirs[1])
        assert amp.steps_skipped(ours[1]) == amp.steps_skipped(theirs[1]) >= 2
        assert [one[1]._amp_stash.counts["calls"] for one in (ours, theirs)] == [12, 12]


def load_weights(one: Any) -> None:
    one[0].load_state_dict({name: value * 0.5 for name, value in one[0].state_dict().items()})


def load_state(one: Any) -> None:
    saved = one[1].state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"] * 3
    one[1].load_state_dict(saved)


def load_scale(one: Any) -> None:
    saved = amp.state_dict(optimizer=one[1])
    saved["loss_scaler0"]["loss_scale"] = 32.0
    amp.load_state_dict(saved, optimizer=one[1])


def move_memory(one: Any) -> None:
    for param in one[0].parameters():
        param.data = param.data.clone()


def change_betas(one: Any) -> None:
    one[1].param_groups[0]["betas"] = (0.5, 0.6)


def change_decay(one: Any) -> None:
    one[1].param_groups[0]["weight_decay"] = 0.3


def freeze(one: Any) -> None:
    next(one[0].parameters()).requires_grad_(False)


def step_by_hand(one: Any) -> None:
    model, optimizer, _ = one
    advance(loss_of(model(random_batch(77)[0]), random_batch(77)[1]), optimizer)


def write_weight(one: Any) -> None:
    with torch.no_grad():
        one[0][0].weight.mul_(0.9)


def gradient_before(one: Any) -> None:
    model, optimizer, _ = one
    scaled_backward(loss_of(model(random_batch(78)[0]), random_batch(78)[1]), optimizer)


def look_at_the_model(one: Any) -> None:
    with torch.no_grad():
        one[0](random_batch(5)[0])


def clip_harder(one: Any) -> None:
    one[2].max_grad_norm = 0.01


def change_loss(one: Any) -> None:
    one[2].loss_fn = lambda output, target: F.l1_loss(output.float(), target)


def clip_inside(one: Any) -> None:
    one[1].options = dataclasses.replace(one[1].options, max_grad_norm=0.01)


def change_betas_in_place(one: Any) -> None:
    group = one[1].param_groups[0]
    group["betas"] = list(group["betas"])
    group["betas"][0] = 0.1


def freeze_norm(one: Any) -> None:
    one[0][1].eval()


def replace_buffer(one: Any) -> None:
    one[0][1].running_mean = torch.full_like(one[0][1].running_mean, 0.5)
    one[0][1].eval()


def replace_module(one: Any) -> None:
    one[0][2] = nn.ReLU()


def hook_gradient(one: Any) -> None:
    one[0][0].weight.register_hook(lambda grad: grad * 3)


def hook_module(one: Any) -> None:
    one[0][0].register_forward_hook(lambda module, args, output: output * 2)


CHANGES = [
    clip_harder, change_loss, clip_inside, change_betas_in_place, freeze_norm, replace_buffer, replace_module,
    hook_gradient, hook_module,
    load_weights, load_state, load_scale, move_memory, change_betas, change_decay, freeze, step_by_hand, write_weight,
    gradient_before, look_at_the_model,
]  # fmt: skip


@pytest.mark.costly
@pytest.mark.exhaustive
@pytest.mark.usefixtures("tapes")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_counts(change: Callable[[Any], None], level: str) -> None:
    ours, theirs = pair(level, FP16)
    for i in range(5):
        take(ours, theirs, i)
    replays = ours[2].signatures[0].replays
    assert replays
    change(ours)
    change(theirs)
    for i in range(5):
        take(ours, theirs, 100 + i)
    assert ours[2].signatures[0].replays > replays
    with torch.no_grad():
        assert torch.equal(ours[0](random_batch(0)[0]), theirs[0](random_batch(0)[0]))


@pytest.mark.usefixtures("tapes")
def test_a_scheduler_that_writes_into_a_tensor_lr_reaches_replays() -> None:
    ours, theirs = pair()
    schedulers = []
    for one in (ours, theirs):
        one[1].param_groups[0]["lr"] = torch.tensor(1e-2)
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(one[1], 0.7))
    for i in range(10):
        take(ours, theirs, i)
        for scheduler in schedulers:
            scheduler.step()
    assert ours[2].signatures[0].replays >= 5


@pytest.mark.usefixtures("tapes")
def test_gradients_that_accumulate_over_calls_keep_steps_eager() -> None:
    ours, theirs = pair(dtype=FP16, accumulate=2)
    for i in range(4):
        take(ours, theirs, i)
    assert ours[2].signatures[0].reason == "gradients accumulate over several calls"
    take(ours, theirs, 8)
    ours[2].accumulate = theirs[2].accumulate = 1  # the window ends with the next call
    for i in range(9, 14):
        take(ours, theirs, i)
    assert ours[2].signatures[0].runs == "CUDA graph"


def through(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda x, y: loss_of(model(x), y)


@pytest.mark.usefixtures("tapes")
def test_modes_of_a_model_behind_a_function_count() -> None:
    trained = []
    for graph in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        step = TrainStep(through(model), None, optimizers.FusedAdam(model.parameters()), cuda_graph=graph)
        losses = [step(*random_batch(i)) for i in range(6)]
        model.eval()
        losses += [step(*random_batch(i)) for i in range(6)]
        trained.append((torch.stack(losses), [p.detach() for p in model.parameters()]))
    torch.testing.assert_close(trained[0], trained[1], rtol=0, atol=0)


@pytest.mark.usefixtures("tapes")
def test_a_parameter_that_another_optimizer_steps_keeps_steps_eager() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    step = TrainStep(model, loss_of, optimizers.FusedAdam(model[0].parameters()), cuda_graph=True)
    for i in range(6):
        step(*random_batch(i))
    assert step.signatures[0].reason == "the model has trainable parameters that the optimizer does not step"
    assert model[1].weight.grad is not None


@pytest.mark.usefixtures("tapes")
def test_a_second_train_step_of_one_optimizer_is_recorded_too() -> None:
    ours, theirs = pair()
    for _ in range(3):
        for i in range(6):
            take(ours, theirs, i)
        ours = (*ours[:2], TrainStep(ours[0], loss_of, ours[1], cuda_graph=True))
    for i in range(6):
        take(ours, theirs, i)
    assert ours[2].signatures[0].runs == "CUDA graph"


@pytest.mark.usefixtures("tapes")
def test_a_copy_records_for_itself() -> None:
    ours, theirs = pair()
    for i in range(6):
        take(ours, theirs, i)
    copied = copy.deepcopy(ours[2])
    assert copied.model is not ours[0]
    before = [p.clone() for p in ours[0].parameters()]
    for i in range(6):
        assert torch.equal(copied(*random_batch(i)), theirs[2](*random_batch(i)))
    assert all(map(torch.equal, before, ours[0].parameters()))
    assert all(map(torch.equal, copied.model.parameters(), theirs[0].parameters()))
    assert copied.signatures[0].runs == "CUDA graph"


@pytest.mark.usefixtures("tapes")
def test_a_hyperparameter_that_changes_in_every_step_ends_recording() -> None:
    ours, theirs = pair()
    for i in range(30):
        for one in (ours, theirs):
            one[1].param_groups[0]["betas"] = (0.9 - 0.01 * i, 0.999)
        take(ours, theirs, i)
    (signature,) = ours[2].signatures
    assert signature.runs == "eager"
    assert signature.reason == "values that the graphs had recorded changed 9 times (hyperparameters other than lr)"


@pytest.mark.usefixtures("tapes")
def test_only_so_many_kinds_of_batches_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert graphed_steps._MOST_GRAPHS == 16  # as docs/train-step.md says
    monkeypatch.setattr(graphed_steps, "_MOST_GRAPHS", 2)
    ours, theirs = pair()
    for rows in range(2, 5):
        for i in range(5):
            take(ours, theirs, i, rows=rows)
    runs = [signature.runs for signature in ours[2].signatures]
    assert runs == ["CUDA graph", "CUDA graph", "eager"]
    assert ours[2].signatures[-1].reason == "2 kinds of batches already have graphs"


def reads(self: Any, x: torch.Tensor) -> Any:
    y = self.linear(x)
    return y / max(1.0, y.float().abs().max().item())


@pytest.mark.usefixtures("tapes")
def test_a_model_that_reads_the_device_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "halfstep")
    trained = []
    for graph in (True, False):
        torch.manual_seed(0)
        model = Made(reads, linear=nn.Linear(6, 3))
        model, optimizer = start_amp(model, optimizers.FusedAdam, "O2", dtype=BF16, lr=1e-2)
        step = TrainStep(model, loss_of, optimizer, cuda_graph=graph)
        losses = [step(*random_batch(i)) for i in range(8)]
        trained.append((losses, list(model.parameters()), step.signatures[0]))
    assert torch.equal(torch.stack(trained[0][0]), torch.stack(trained[1][0]))
    assert all(map(torch.equal, trained[0][1], trained[1][1]))
    assert trained[0][2].runs == "eager"
    assert "operation not permitted when stream is capturing" in str(trained[0][2].reason)
    assert len(caplog.records) == 1


class Watcher:
    def before_step(self, attached: Any) -> None:
        pass

    def after_step(self, attached: Any) -> None:
        pass


@pytest.mark.usefixtures("tapes")
def test_who_watches_steps_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair()
    for i in range(6):
        take(ours, theirs, i)
    observers.append(Watcher())
    try:
        take(ours, theirs, 6)
        assert ours[2].signatures[0].reason == "hooks or observers watch steps, which replays do not call"
    finally:
        observers.pop()
    seen = []
    handle = ours[1].register_step_post_hook(lambda *_: seen.append(1))
    take(ours, theirs, 7)
    handle.remove()
    assert seen == [1]
    for i in range(8, 11):
        take(ours, theirs, i)
    assert (seen, ours[2].signatures[0].runs) == ([1], "CUDA graph")


@pytest.mark.parametrize(
    ("make", "scaler", "reason"),
    [
        (
            torch.optim.SGD,
            None,
            "SGD reads numbers on the host; use halfstep.optimizers.fuse(optimizer), or capturable=True",
        ),
        (torch.optim.AdamW, None, "AdamW reads numbers on the host"),
        (torch.optim.SGD, amp.GradScaler, "SGD does not skip a step by itself"),
        (optimizers.FusedAdam, lambda: torch.amp.GradScaler("cpu"), "use halfstep.amp.GradScaler"),
    ],
)
@pytest.mark.usefixtures("tapes")
def test_what_reads_the_device_runs_eagerly(make: Any, scaler: Any, reason: str) -> None:
    model = nn.Linear(6, 3)
    step = TrainStep(model, loss_of, make(model.parameters(), lr=0.1), scaler=scaler and scaler(), cuda_graph=True)
    for i in range(6):
        step(*random_batch(i))
    assert step.signatures[0].runs == "eager"
    assert reason in str(step.signatures[0].reason)


@pytest.mark.usefixtures("tapes")
def test_a_batch_that_a_graph_would_keep_runs_eagerly() -> None:
    model, optimizer = with_optimizer(nn.Linear(6, 3), optimizers.FusedAdam)
    step = TrainStep(lambda x, y, mask: loss_of(model(x), y) * float(mask[0]), None, optimizer, cuda_graph=True)
    for i in range(6):
        step(*random_batch(i), bytearray(b"1"))
    assert step.signatures[0].reason == "the batch has an item of type bytearray, which may change unseen"


@pytest.mark.usefixtures("tapes")
def test_each_loss_is_a_tensor_of_its_own() -> None:
    ours, _ = pair()
    losses = [ours[2](*random_batch(i)) for i in range(8)]
    assert len({loss.item() for loss in losses}) == 8
    assert not any(loss.requires_grad for loss in losses)


def test_on_a_cpu_steps_are_eager_and_say_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "halfstep")
    ours, theirs = pair()
    for i in range(5):
        take(ours, theirs, i)
    (signature,) = ours[2].signatures
    assert signature.reason == "CUDA graphs run on CUDA, and the parameters are on cpu"
    assert [r.message.split(": ")[1] for r in caplog.records] == [signature.reason]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_on_cuda(dtype: torch.dtype, compiled: bool) -> None:
    trained = []
    for options in ({"cuda_graph": True, "compiled": compiled}, {}):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)).cuda()
        model, optimizer = start_amp(model, optimizers.FusedAdam, "O2", dtype=dtype, lr=1e-3)
        step = TrainStep(model, loss_of, optimizer, max_grad_norm=1.0, **options)
        losses = []
        for i in range(16):
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 + i % 3)
            x, y = random_batch(i, overflow=dtype is FP16 and i in (3, 11))
            losses.append(step(x.cuda(), y.cuda()).nan_to_num())
        trained.append((torch.stack(losses), amp.steps_skipped(optimizer), step.signatures[0]))
    torch.testing.assert_close(trained[0][0], trained[1][0], rtol=1e-2, atol=1e-3)
    assert trained[0][1] == trained[1][1]
    assert (trained[0][2].runs, trained[0][2].reason) == ("CUDA graph", None)
    assert trained[0][2].replays >= 8
