"""``compare_step``: what it runs, how, and that nothing of it remains."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep import Policy, amp, numerics
from halfstep.core.errors import UsageError
from halfstep.numerics import Comparison
from tests.support.processes import Ranks, one_rank
from tests.support.worlds import HALVES, Applies, scaled_step, start_amp, with_optimizer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.first(x)).relu() @ torch.eye(32)))


def cancels(x: torch.Tensor) -> torch.Tensor:
    """Lose all digits below 2**10 in 16 bits."""
    return (x + 1024.0) - 1024.0


def broken() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), Applies(cancels), nn.Linear(32, 4))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(12, 16, generator=generator), torch.randint(4, (12,), generator=generator)


def loss_of(model: nn.Module) -> torch.Tensor:
    x, y = batch()
    return F.cross_entropy(model(x), y)


def top(found: Comparison) -> tuple[str, str]:
    worst = found.modules()[0]
    return worst.module, worst.why


# ---- nothing remains


def state_of(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]},
        "identities": [id(t) for t in [*model.parameters(), *model.buffers()]],
        "addresses": [t.data_ptr() for t in [*model.parameters(), *model.buffers()]],
        "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "hooks": [(list(m._forward_pre_hooks), list(m._forward_hooks)) for m in model.modules()],
        "training": [m.training for m in model.modules()],
        "random": (torch.get_rng_state(), random.getstate()),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def fails(model: nn.Module) -> torch.Tensor:
    loss_of(model).backward()
    raise ValueError("stop")


@pytest.mark.parametrize("candidate", ["O1", "O2", "O3", None])
@pytest.mark.parametrize("step", [loss_of, fails])
def test_everything_is_as_before(candidate: str | None, step: Callable[[nn.Module], torch.Tensor]) -> None:
    model = Net()
    loss_of(model).backward()
    before = state_of(model)
    if step is fails:
        with pytest.raises(ValueError, match="stop"):
            numerics.compare_step(lambda: step(model), model, candidate=candidate)
    else:
        numerics.compare_step(lambda: step(model), model, candidate=candidate)
    assert same(before, state_of(model))


def test_both_runs_draw_the_same_random_numbers() -> None:
    model = Net()
    found = numerics.compare_step(
        lambda: loss_of(model) * (torch.rand(()) + random.random()), model, candidate="O0", reference=torch.float32
    )
    assert {entry.error for entry in found.entries} == {0.0}


def test_a_run_ends_where_the_optimizer_steps() -> None:
    model, optimizer = with_optimizer(broken(), torch.optim.SGD, lr=1.0)
    before = state_of(model)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        raise AssertionError("it goes on")

    found = numerics.compare_step(step, model, candidate="O1")
    assert top(found) == ("1", "cancellation")
    assert any(entry.backward for entry in found.entries)
    assert same(before, state_of(model))


def stepping(model: nn.Module, scaler: Any) -> Callable[[], None]:
    """A step in float16 with a scaler, or by ``scale_loss`` where there is none."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if scaler is None:
        amp.initialize(model, optimizer, opt_level="O1", dtype="float16", verbosity=0)

    def step() -> None:
        with nullcontext() if scaler is None else amp.auto_cast(dtype="float16"):
            loss = loss_of(model)
        scaled_step(loss, optimizer, scaler)

    return step


SCALERS = [lambda: None, amp.GradScaler, lambda: torch.amp.GradScaler("cpu")]


@pytest.mark.parametrize("make_scaler", SCALERS, ids=["scale_loss", "GradScaler", "torch's GradScaler"])
def test_a_whole_step_with_a_loss_scale_is_compared_and_trains_on(make_scaler: Callable[[], Any]) -> None:
    model, scaler = broken(), make_scaler()
    step = stepping(model, scaler)
    scales = amp.state_dict if scaler is None else scaler.state_dict
    step()
    before, scale = state_of(model), copy.deepcopy(scales())
    found = numerics.compare_step(step, model)
    assert top(found) == ("1", "cancellation")
    assert any(entry.backward and entry.dtype == "float16" for entry in found.entries)
    assert same(before, state_of(model))
    assert same(scale, scales())
    other = broken()
    twice = stepping(other, make_scaler())
    twice()
    for run in (step, twice):
        run()
    assert same(state_of(model)["tensors"], state_of(other)["tensors"])


# ---- what is compared


@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize("scope", [amp.auto_cast(dtype="bfloat16"), torch.autocast("cpu", torch.bfloat16)])
def test_without_a_candidate_the_step_is_compared_as_it_is(scope: Any, own_backward: bool) -> None:
    model = broken()

    def step() -> torch.Tensor | None:
        with scope:
            loss = loss_of(model)
        return loss.backward() if own_backward else loss

    found = numerics.compare_step(step, model)
    assert top(found) == ("1", "cancellation")
    assert {entry.dtype.removesuffix(" (emulated)") for entry in found.entries} == {"bfloat16", "float32"}
    assert any(entry.backward for entry in found.entries)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_model_that_was_brought_up_is_compared_as_it_is(level: str, dtype: torch.dtype) -> None:
    model, optimizer = start_amp(broken(), torch.optim.AdamW, level, dtype=dtype)
    before = state_of(model)
    found = numerics.compare_step(lambda: loss_of(model), model)
    assert top(found) == ("1", "cancellation")
    assert same(before, state_of(model))
    scaled_step(loss_of(model), optimizer)
    assert not same(before["tensors"], state_of(model)["tensors"])


def test_the_reference_of_16_bit_weights_are_their_masters() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    fp32 = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", dtype="bfloat16", verbosity=0)
    found = numerics.compare_step(lambda: model(torch.ones(2, 64)).square().mean(), model)
    (weight,) = (entry for entry in found.entries if entry.op == "weight")
    rounded = model.weight.detach().float()
    assert weight.error == pytest.approx(float((rounded - fp32).norm() / fp32.norm()), rel=0.2)
    assert 0.0 < weight.error < 2.0**-8


@pytest.mark.parametrize("candidate", ["O1", "O2", Policy.from_level("O1", "bfloat16")])
def test_a_candidate_is_a_level_or_a_policy(candidate: Any) -> None:
    model = broken()
    found = numerics.compare_step(lambda: loss_of(model), model, candidate=candidate)
    assert top(found) == ("1", "cancellation")
    assert found.names[0] == "float32"
    assert str(candidate) in found.names[1]


def test_a_dynamic_loss_scale_is_the_largest_with_room() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    scales = []
    for factor in (1.0, 1e-6, 1e6):
        found = numerics.compare_step(
            lambda factor=factor: loss_of(model) * factor, model, candidate="O1", dtype=torch.float16
        )
        assert found.first() is None, str(found)
        scales.append(found.about.get("loss scale", 1.0))
    assert 1.0 < scales[0] <= scales[1] == 2.0**15
    assert 0.0 < scales[2] < 1.0


def test_gradients_that_vanish_without_a_loss_scale_are_found() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    policy = Policy.from_level("O1", torch.float16).replace(loss_scale=1.0)
    found = numerics.compare_step(lambda: loss_of(model) * 1e-7, model, candidate=policy)
    first = found.first()
    assert first is not None
    assert (first.backward, first.why, first.dtype) == (True, "underflow", "float16")
    assert "loss scale" not in found.about


def test_two_passes_of_a_checkpoint_are_aligned() -> None:
    model = broken()

    def step() -> torch.Tensor:
        x, y = batch()
        return F.cross_entropy(checkpoint(model, x.requires_grad_(), use_reentrant=False), y)

    found = numerics.compare_step(step, model, candidate="O1")
    assert top(found) == ("1", "cancellation")
    assert "ops of one run only" not in found.about


def test_other_op_streams_are_aligned_by_what_they_have_in_common() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.bfloat16:
            x = x.sigmoid().logit()
        return cancels(x)

    model = nn.Sequential(nn.Linear(16, 32), Applies(branches), nn.Linear(32, 4))
    found = numerics.compare_step(lambda: loss_of(model), model, candidate="O2")
    assert found.about["ops of one run only"] == 4  # each in both passes
    assert top(found) == ("1", "cancellation")


def test_recurrent_layers_keep_their_weights() -> None:
    model = nn.LSTM(8, 16, 2, batch_first=True)
    x = torch.randn(4, 5, 8)
    before = [id(w) for w in model._flat_weights]
    numerics.compare_step(lambda: model(x)[0].square().mean(), model, candidate="O1")
    assert [id(w) for w in model._flat_weights] == before == [id(p) for p in model.parameters()]


def test_tied_weights_stay_tied_in_a_run() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    tied = []

    def step() -> torch.Tensor:
        tied.append(model[1].weight is model[0].weight)
        return loss_of(model)

    numerics.compare_step(step, model, candidate="O2")
    assert tied == [True, True]


def in_ddp(rank: int) -> tuple[tuple[str, str], list[float]]:
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(broken())
    first = numerics.compare_step(lambda: loss_of(model), model, candidate="O2")
    if rank == 0:  # no rank waits for another one
        numerics.compare_step(lambda: loss_of(model), model, candidate="O1")
    loss_of(model).backward()
    return top(first), [float(p.grad.double().sum()) for p in model.parameters() if p.grad is not None]


def test_under_ddp_each_rank_compares_alone(ranks: Ranks) -> None:
    (one, grads), (other, others) = ranks.run(in_ddp)
    assert one == other == ("1", "cancellation")
    assert grads == others
    assert len(grads) == 4


# ---- what is no divergence


def test_statistics_beside_a_result_are_not_blamed() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.LayerNorm(32), nn.Linear(32, 4))
    found = numerics.compare_step(lambda: loss_of(model), model, candidate="O1")  # the mean of normalized rows is 0
    assert found.first() is None, str(found)


def test_the_lists_are_about_functions_and_not_about_the_ops_inside() -> None:
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    x = torch.randn(4, 1, 9, 9)
    found = numerics.compare_step(lambda: model(x).square().mean(), model, candidate="O1")
    assert ("1", "mean", "bfloat16") in {(entry.module, entry.op, entry.dtype) for entry in found.entries}
    assert found.first() is None, str(found)


def test_the_gradient_of_a_bias_before_a_norm_is_noise() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    found = numerics.compare_step(lambda: loss_of(model), model, candidate="O1")
    assert found.first() is None, str(found)


def test_a_batch_in_16_bits_is_wide_in_the_reference() -> None:
    model = nn.Conv1d(4, 8, 3)
    x = torch.randn(4, 4, 16).bfloat16()
    found = numerics.compare_step(lambda: model(x).float().square().mean(), model, candidate="O3")
    assert found.first() is None, str(found)
    assert max(entry.error for entry in found.entries) > 2.0**-12


# ---- what comes out


def test_a_comparison_prints_as_a_table() -> None:
    model = broken()
    lines = str(numerics.compare_step(lambda: loss_of(model), model, candidate="O1")).splitlines()
    assert lines[0].startswith("O1 bfloat16 against float32: ")
    assert lines[1].startswith("first divergence: 1: sub in bfloat16, cancellation: error ")
    assert lines[3].split() == ["module", "excess", "added", "inherited", "error", "at", "dtype", "why"]
    assert lines[4].split()[0] == "1"
    assert lines[4].split()[-3:] == ["sub", "bfloat16", "cancellation"]


def test_a_comparison_without_divergence_says_so() -> None:
    model = nn.Linear(16, 4)
    assert "no divergence" in str(numerics.compare_step(lambda: loss_of(model), model, candidate="O1"))


# ---- refused


def test_a_sharded_model_is_refused() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    with one_rank():
        model = nn.Linear(4, 4)
        fsdp.fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        with pytest.raises(UsageError, match="weight is sharded"):
            numerics.compare_step(lambda: None, model, candidate="O1")


# ---- a reference that is not finite itself


def masked(x: torch.Tensor, most: int) -> torch.Tensor:
    """An attention of positions to the first few."""
    scores = torch.where(torch.arange(32) < most, x, -torch.inf)
    return scores.softmax(-1)


NOT_FINITE: list[tuple[Callable[[torch.Tensor], torch.Tensor], str]] = [
    (lambda x: x.log(), "NaN, from 1: log"),
    (lambda x: x + 0.0 / x.relu(), "NaN, from 1: reciprocal"),
    (lambda x: (x * 0.0).abs().sqrt(), "NaN, from 1: div (backward)"),
    (lambda x: (x * 1e30).exp() * 0.0, "NaN, from 1: exp"),  # inf * 0 is NaN, and exp has made the inf
    (lambda x: x * 1e30 * 1e30, "NaN, from 1: mul"),
    (lambda x: masked(x, 0), "NaN, from 1: _softmax"),
    (lambda x: masked(x, 8), ""),
    (lambda x: x, ""),
]


@pytest.mark.parametrize(
    ("function", "began"), NOT_FINITE, ids=[began or str(i) for i, (_, began) in enumerate(NOT_FINITE)]
)
@pytest.mark.parametrize("reference", [torch.float32, torch.float64])
def test_where_a_reference_becomes_nan_itself(
    function: Callable[[torch.Tensor], torch.Tensor], began: str, reference: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), Applies(function), nn.Linear(32, 4))
    found = numerics.compare_step(lambda: loss_of(model), model, candidate="O1", reference=reference)
    if reference is torch.float32 or "mul" not in began:  # float64 holds 1e60
        assert found.not_finite == began
    assert ("as well" in str(found)) is bool(found.not_finite)


@pytest.mark.parametrize(("where", "began"), [("weight", "NaN, from 0: weight"), ("batch", "NaN, from 0: input")])
def test_nan_that_a_step_begins_with_is_not_blamed_on_an_op(where: str, began: str) -> None:
    model, (x, y) = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4)), batch()
    with torch.no_grad():
        (model[0].weight if where == "weight" else x)[0, 0] = torch.nan
    found = numerics.compare_step(lambda: F.cross_entropy(model(x), y), model, candidate="O1")
    assert found.not_finite == began


@pytest.mark.parametrize(
    ("emulate", "function", "op"),
    [(False, lambda x: x * 1e3 * 1e3 / 1e6, "mul"), (True, lambda x: (6e3 * x) @ (6e3 * x).T @ x / 1e6, "mm")],
)
def test_an_overflow_of_16_bits_alone_leaves_the_reference_finite(emulate: bool, function: Any, op: str) -> None:
    model = nn.Sequential(nn.Linear(16, 32), Applies(function), nn.Linear(32, 4))
    model = amp.initialize(model, opt_level="O2", dtype=torch.float16, emulate=emulate, verbosity=0)
    found = numerics.compare_step(lambda: loss_of(model), model)
    first, dtype = found.first(), "float16" + " (emulated)" * emulate
    assert first is not None
    assert (found.not_finite, first.module, first.op, first.dtype, first.why) == ("", "1", op, dtype, "overflow")


def test_the_page_says_where_the_reference_became_nan(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 32), Applies(torch.log), nn.Linear(32, 4))
    numerics.compare_step(lambda: loss_of(model), model, candidate="O1").report(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "float32 is NaN as well: precision is not the cause. It began at 1: log." in page
