"""After any mix of synced and unsynced micro-steps every rank holds the mean over ranks of the sum over micro-steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from halfstep import amp, parallel
from halfstep.fp16_utils import FP16_Optimizer
from halfstep.optimizers import FusedAdam
from tests.support.apex_recording import fill, grid
from tests.support.processes import Ranks, ranks_of
from tests.support.worlds import (
    BF16,
    LEVELS,
    assert_equal,
    read_back,
    scaled_backward,
    start_amp,
    step_and_clear,
    with_optimizer,
)

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
MICRO_STEPS = {  # u, d and v are under no_sync(), f has require_backward_grad_sync = False; d and x have delay_unscale
    "s": "synced",
    "u": "unsynced",
    "f": "unsynced by flag",
    "d": "unsynced and delayed",
    "x": "synced and delayed",
    "v": "unsynced without a block",
    "p": "synced without a block",
    "w": "synced after a forward pass of an evaluation",
}
PATTERNS = ["s", "us", "fs", "uuus", "uds", "dds", "ss", "sus", "suus", "xs", "xus", "su", "uu", "dd", "udu", "uw"]
WRAPPERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "small buckets, copied": {"bucket_cap_mb": 1e-5},
}
APEX_WRAPPERS: dict[str, dict[str, Any]] = {
    "sum": {"gradient_average": False},
    "mean in two": {"gradient_predivide_factor": 2.0},
    "sum, small buckets": {"gradient_average": False, "message_size": 3},
    "mean at the end": {"delay_allreduce": True},
    "mean in two, in fp32": {"gradient_predivide_factor": 2.0, "allreduce_always_fp32": True},
    "sum over 4, copied": {"gradient_average": False, "gradient_predivide_factor": 4.0},
}
USERS_HOOK = "plain, with a communication hook of the user's"
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, fused=True),
    "ours": lambda p: FusedAdam(p, lr=0.01, eps=1e-4),
}


def in_words(pattern: str) -> str:
    return ", ".join(MICRO_STEPS[how] for how in pattern)


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    fill(model[0], weight=grid((8, 3), 1), bias=grid((8,), 2))
    fill(model[2], weight=grid((2, 8), 3), bias=grid((2,), 4))
    return model


def data(rank: int, step: int, micro: int) -> torch.Tensor:
    return grid((4, 3), 1 + rank + 3 * micro + 11 * step, 2.0)


def micro_step(
    model: Any, optim: Any, how: str, x: torch.Tensor, poison: bool = False, used: Sequence[str] = ()
) -> None:
    model.require_backward_grad_sync = how != "f"
    with model.no_sync() if how in "udv" else nullcontext():
        loss = model(x, *used).float().square().mean()
        if poison:
            loss = loss * float("inf")
        if how == "w":
            with torch.no_grad():
                model(x, *used)
        if how in "vp":
            loss.backward()
        else:
            scaled_backward(loss, optim, delay_unscale=how in "dx")
    model.require_backward_grad_sync = True


def train(
    rank: int,
    level: str,
    half: str,
    pattern: str,
    wrapper: str,
    optimizer: str = "sgd",
    steps: int = 3,
    poison: tuple[int, int, int] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """``poison``: the loss of this rank, step and micro-step is infinite."""
    model = net()
    if rank:  # the wrapper gives everybody the weights of rank 0
        for p in model.parameters():
            p.data.mul_(3)
    model, optim = amp.initialize(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        opt_level=level,
        dtype=HALVES[half],
        verbosity=0,
        **{"loss_scale": 128.0, **options},
    )
    if wrapper in APEX_WRAPPERS:
        model = parallel.DistributedDataParallel(model, **APEX_WRAPPERS[wrapper])
    else:
        model = DistributedDataParallel(model, **WRAPPERS.get(wrapper, {}))
    if wrapper == USERS_HOOK:
        model.register_comm_hook(None, allreduce_hook)
    scales, grads = [], []
    for step in range(steps):
        if step == 1 and "copied" in wrapper:
            model, optim = copy.deepcopy(read_back((model, optim), weights_only=False))
        for micro, how in enumerate(pattern):
            micro_step(model, optim, how, data(rank, step, micro), poison == (rank, step, micro))
        scales.append(amp.state_dict()["loss_scaler0"]["loss_scale"])
        grads.append([p.grad.clone() for p in amp.master_params(optim) if p.grad is not None])
        step_and_clear(optim)
    scales.append(amp.state_dict()["loss_scaler0"]["loss_scale"])
    return outcome(model, optim, grads=grads, scales=scales)


def outcome(model: nn.Module, optim: Any, scales: Sequence[float] = (), **more: Any) -> dict[str, Any]:
    """What a training has led to; amp ends."""
    masters, params = ([p.detach().clone() for p in ps] for ps in (amp.master_params(optim), model.parameters()))
    amp.deactivate()
    return {"masters": masters, "params": params, "scales": scales, "skipped": amp.steps_skipped(optim), **more}


def reference(
    world: int,
    pattern: str,
    optimizer: str = "sgd",
    steps: int = 3,
    skip: int | None = None,
    divide: float | None = None,
) -> list[Any]:
    """One process, fp64, the losses of all ranks and micro-steps in one backward pass."""
    model = net().double()
    optim = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        losses = [
            model(data(rank, step, micro).double()).square().mean()
            for rank in range(world)
            for micro in range(len(pattern))
        ]
        (sum(losses) / (divide or world)).backward()  # type: ignore[union-attr]
        if step != skip:
            optim.step()
        optim.zero_grad()
    return [p.detach() for p in model.parameters()]


def assert_same(results: list[dict[str, Any]]) -> None:
    for other in results[1:]:
        for key in ("masters", "params"):
            for a, b in zip(results[0][key], other[key], strict=True):
                assert torch.equal(a, b), key
        assert results[0]["scales"] == other["scales"]
        assert results[0]["skipped"] == other["skipped"]


def assert_near(results: list[dict[str, Any]], expected: list[torch.Tensor], level: str, half: str) -> None:
    # The rounding of 16-bit arithmetic moves the weights by this much in three steps; O3 also rounds the weights.
    close = {"O0": 1e-5, "O1": 5e-3, "O2": 5e-3, "O3": 1e-2}[level] * (4 if half == "bf16" and level != "O0" else 1)
    torch.testing.assert_close([a.double() for a in results[0]["masters"]], [*expected], rtol=0, atol=close)


def assert_trains_as_one(
    ranks: Ranks, level: str, half: str, pattern: str, wrapper: str, divide: float = 2.0
) -> list[dict[str, Any]]:
    """Two ranks end equal, and near to one process that divides the sum of all losses."""
    results = ranks.run(train, level, half, pattern, wrapper)
    assert_same(results)
    assert_near(results, reference(2, pattern, divide=divide), level, half)
    return results


@pytest.mark.parametrize(("level", "half"), [("O1", "fp16"), ("O2", "fp16")])  # without masters and with them
@pytest.mark.parametrize("pattern", PATTERNS, ids=in_words)
def test_every_pattern(ranks: Ranks, level: str, pattern: str, half: str) -> None:
    assert_trains_as_one(ranks, level, half, pattern, "plain")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pattern", ["sus", "uds"], ids=in_words)
@pytest.mark.parametrize("half", HALVES)
def test_every_level(ranks: Ranks, level: str, pattern: str, half: str) -> None:
    assert_trains_as_one(ranks, level, half, pattern, "plain")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pattern", ["s", "uus", "su", "xus", "sw"], ids=in_words)
@pytest.mark.parametrize("wrapper", [w for w in WRAPPERS if w != "plain"])
def test_every_wrapper(ranks: Ranks, level: str, pattern: str, wrapper: str) -> None:
    if wrapper == "static" and pattern == "uus":
        pattern = "sus"  # torch 2.13: a static graph whose first backward pass is not synced is an internal error
    assert_trains_as_one(ranks, level, "bf16", pattern, wrapper)


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("pattern", ["s", "us", "sus", "dds", "xus", "uw"], ids=in_words)
@pytest.mark.parametrize("wrapper", APEX_WRAPPERS)
def test_what_is_not_a_mean(ranks: Ranks, level: str, pattern: str, wrapper: str) -> None:
    options = APEX_WRAPPERS[wrapper]
    divide = 2.0 if options.get("gradient_average", True) else options.get("gradient_predivide_factor", 1.0)
    assert_trains_as_one(ranks, level, "fp16", pattern, wrapper, divide)


class Branches(nn.Module):
    """A pass uses one branch or both, and each rank its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2), nn.Linear(8, 2)
        for i, layer in enumerate((self.trunk, self.a, self.b)):
            fill(
                layer, weight=grid(tuple(layer.weight.shape), 2 * i + 1), bias=grid(tuple(layer.bias.shape), 2 * i + 2)
            )

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        h = torch.tanh(self.trunk(x))
        out: torch.Tensor = sum((self.a if name == "a" else self.b)(h) for name in used)  # type: ignore[assignment]
        return out


# For each window its passes: how, and what the two ranks use. What no rank uses in a window has no gradient in it.
BRANCHES = {
    "gone before the synced pass": [
        [("u", "ab", "b"), ("s", "a", "a")],
        [("u", "b", "b"), ("u", "a", "b"), ("s", "a", "a")],
    ],
    "gone before the synced pass, without blocks": [
        [("v", "ab", "b"), ("p", "a", "a")],
        [("v", "b", "b"), ("v", "a", "b"), ("p", "a", "a")],
    ],
    "another one on each rank": [[("s", "a", "b")], [("u", "b", "a"), ("s", "a", "b")]],
    "unsynced at the end": [[("s", "b", "b"), ("u", "a", "ab")], [("s", "a", "b")]],
    "delayed": [[("s", "a", "ab"), ("d", "a", "b")], [("d", "b", "a"), ("x", "a", "a")]],
    "used at the end of the window before": [
        [("s", "a", "a"), ("u", "ab", "b")],
        [("s", "a", "a")],
        [("u", "b", "a")],
        [("u", "a", "a"), ("s", "a", "a")],
    ],
}


def train_branches(rank: int, level: str, case: str, optimizer: str, loss_scale: float) -> dict[str, Any]:
    scale = 1.0 if "without blocks" in case else loss_scale
    model, optim = start_amp(Branches(), OPTIMIZERS[optimizer], level, dtype=torch.float16, loss_scale=scale)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for step, window in enumerate(BRANCHES[case] * 2):
        for micro, (how, *used) in enumerate(window):
            micro_step(ddp, optim, how, data(rank, step, micro), used=used[rank : rank + 1])
        optim.clip_master_grads(0.5)
        step_and_clear(optim)
    return outcome(model, optim)


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("case", BRANCHES)
@pytest.mark.parametrize("optimizer", ["sgd", "ours"])
@pytest.mark.parametrize("loss_scale", [1.0, 128.0])
def test_branches_that_not_every_pass_uses(
    ranks: Ranks, level: str, case: str, optimizer: str, loss_scale: float
) -> None:
    results = ranks.run(train_branches, level, case, optimizer, loss_scale)
    assert_same(results)
    model = Branches().double()
    optim = OPTIMIZERS[optimizer](model.parameters())
    for step, window in enumerate(BRANCHES[case] * 2):
        for micro, (_, *used) in enumerate(window):
            for rank in range(2):
                (model(data(rank, step, micro).double(), used[rank]).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        step_and_clear(optim)
    assert results[0]["skipped"] == 0
    assert_near(results, [p.detach() for p in model.parameters()], level, "fp16")


def train_plainly(rank: int, scaled: bool) -> list[torch.Tensor]:
    """Without scale_loss: torch's loop, or GradScaler's; the last of three passes is synced."""
    model: Any = parallel.DistributedDataParallel(net(), gradient_average=False)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = amp.GradScaler(init_scale=128.0, enabled=scaled)
    for step in range(3):
        for micro in range(3):
            with model.no_sync() if micro < 2 else nullcontext():
                scaler.scale(model(data(rank, step, micro)).square().mean()).backward()
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_sum_without_scale_loss(ranks: Ranks, scaled: bool) -> None:
    for found in ranks.run(train_plainly, scaled):
        torch.testing.assert_close([a.double() for a in found], [*reference(2, "uus", divide=1.0)], rtol=0, atol=1e-5)


def count_reductions(rank: int, level: str, pattern: str, loss_scale: float) -> int:
    """All-reduces in two windows, after one that lets the wrapper order its buckets."""
    model, optim = start_amp(net(), OPTIMIZERS["sgd"], level, dtype=torch.bfloat16, loss_scale=loss_scale)
    ddp = DistributedDataParallel(model)

    def window(step: int) -> None:
        for micro, how in enumerate(pattern):
            micro_step(ddp, optim, how, data(rank, step, micro))
        step_and_clear(optim)

    window(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        window(1)
        window(2)
    amp.deactivate()
    return sum(event.count for event in profile.key_averages() if event.key == "c10d::allreduce_")


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("pattern", ["s", "us", "uuus", "uu"], ids=in_words)
@pytest.mark.parametrize(("loss_scale", "numbers"), [(1.0, 1), (128.0, 2)])
def test_a_window_costs_one_reduction_and_few_of_numbers(
    ranks: Ranks, level: str, pattern: str, loss_scale: float, numbers: int
) -> None:
    """One of overflows, one of facts before the step, and where the step averages, one of which gradients there are."""
    numbers += "s" not in pattern
    assert ranks.run(count_reductions, level, pattern, loss_scale) == [2 * (1 + numbers)] * 2


def fail(rank: int, level: str, wrapper: str, optimizer: str, way: str) -> None:
    """A backward pass that fails between two that do not."""
    model, optim = start_amp(net(), OPTIMIZERS[optimizer], level, dtype=torch.float16, loss_scale=128.0)
    ddp = parallel.DistributedDataParallel(model, **APEX_WRAPPERS[wrapper])
    micro_step(ddp, optim, "s", data(rank, 0, 0))
    micro_step(ddp, optim, "u", data(rank, 0, 1))

    def grads() -> list[torch.Tensor]:
        return [p.grad.clone() for p in amp.master_params(optim)]

    def interrupted() -> None:
        syncing = ddp.no_sync() if way == "unsynced" else nullcontext()
        with syncing, amp.scale_loss(ddp(data(rank, 0, 2)).float().square().mean(), optim) as scaled_loss:
            if way != "synced, before backward on one rank":
                scaled_loss.backward()
            raise KeyboardInterrupt

    before = grads()
    if rank or way != "synced, before backward on one rank":
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    if way != "synced":
        assert_equal(grads(), before)
    micro_step(ddp, optim, "s", data(rank, 0, 3))
    optim.step()
    assert amp.steps_skipped(optim) == (way == "synced")
    amp.deactivate()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrapper", ["sum", "mean in two"])
@pytest.mark.parametrize("optimizer", ["sgd", "ours"])
@pytest.mark.parametrize("way", ["unsynced", "synced", "synced, before backward on one rank"])
def test_a_pass_that_fails_leaves_what_was_there_or_skips_the_step_where_ranks_have_talked(
    ranks: Ranks, level: str, wrapper: str, optimizer: str, way: str
) -> None:
    ranks.run(fail, level, wrapper, optimizer, way)


@pytest.mark.costly
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("pattern", ["s", "us", "su", "dds"], ids=in_words)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("poisoned", [0, 1])
def test_overflow_on_one_rank_skips_on_all(
    ranks: Ranks, level: str, pattern: str, optimizer: str, poisoned: int
) -> None:
    results = ranks.run(train, level, "fp16", pattern, "plain", optimizer, 3, (poisoned, 1, 0))
    assert_same(results)
    assert [r["skipped"] for r in results] == [1, 1]
    if (level, optimizer) != ("O3", "adam"):  # O3 keeps Adam's second moments in fp16, where they are zeros
        assert_near(results, reference(2, pattern, optimizer, skip=1), level, "fp16")


def train_dynamic(rank: int, level: str, pattern: str, poison: tuple[int, int, int]) -> dict[str, Any]:
    return train(rank, level, "fp16", pattern, "plain", "sgd", 4, poison, loss_scale="dynamic")


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("pattern", ["ss", "us", "uus", "su"], ids=in_words)
@pytest.mark.parametrize("micro", [0, -1])
def test_all_ranks_keep_the_same_loss_scale(ranks: Ranks, level: str, pattern: str, micro: int) -> None:
    results = ranks.run(train_dynamic, level, pattern, (1, 1, micro % len(pattern)))
    assert_same(results)
    assert results[0]["skipped"] == 1
    assert results[0]["scales"][-1] == 2.0**15, "one overflow in a window lowers the scale once"


def train_fp16_optimizer(rank: int, pattern: str, poison: tuple[int, int, int] | None) -> dict[str, Any]:
    model: Any = DistributedDataParallel(net().to(torch.float16))
    optim = FP16_Optimizer(OPTIMIZERS["sgd"](model.parameters()), static_loss_scale=128.0, verbose=False)
    for step in range(3):
        for micro, how in enumerate(pattern):
            with model.no_sync() if how == "u" else nullcontext():
                loss = model(data(rank, step, micro).half()).float().square().mean()
                optim.backward(loss * (float("inf") if poison == (rank, step, micro) else 1.0))
        step_and_clear(optim)
    masters, params = ([p.detach().clone() for p in ps] for ps in (amp.master_params(optim), model.parameters()))
    return {"masters": masters, "params": params, "scales": [optim.loss_scale], "skipped": 0}


@pytest.mark.costly
@pytest.mark.parametrize("poison", [None, (1, 1, 0)])
@pytest.mark.parametrize("pattern", ["s", "us", "su", "uu"], ids=in_words)
def test_fp16_optimizer(ranks: Ranks, pattern: str, poison: tuple[int, int, int] | None) -> None:
    results = ranks.run(train_fp16_optimizer, pattern, poison)
    assert_same(results)
    assert_near(results, reference(2, pattern, skip=None if poison is None else 1), "O2", "fp16")


@pytest.mark.costly
@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("pattern", ["us", "su", "uuus"], ids=in_words)
@pytest.mark.parametrize("poison", [None, (2, 1, 0)])
def test_four_ranks(level: str, pattern: str, poison: tuple[int, int, int] | None) -> None:
    results = ranks_of(4).run(train, level, "fp16", pattern, "plain", "sgd", 3, poison)
    assert_same(results)
    assert_near(results, reference(4, pattern, skip=None if poison is None else 1), level, "fp16")


def words(rank: int, step: int, micro: int) -> torch.Tensor:
    """Rows of a table with 7 rows; some occur twice, some on one rank alone."""
    return torch.tensor([[0, 1 + rank, 1 + rank], [3, 4 + (step + micro) % 3, 0]])


def words_net() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Flatten(), nn.Linear(9, 2))
    fill(model[0], weight=grid((7, 3), 1))
    fill(model[2], weight=grid((2, 9), 3), bias=grid((2,), 4))
    return model


def train_words(rank: int, level: str, pattern: str) -> dict[str, Any]:
    model, optim = start_amp(words_net(), torch.optim.SGD, level, dtype=BF16, loss_scale=128.0, fused=False, lr=0.1)
    model = DistributedDataParallel(model)
    sparse = []
    for step in range(3):
        for micro, how in enumerate(pattern):
            micro_step(model, optim, how, words(rank, step, micro))
        optim.step()
        sparse.append(model.module[0].weight.grad.is_sparse)
        optim.zero_grad()
    return outcome(model, optim, sparse=sparse)


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("pattern", ["s", "us", "suus", "uu"], ids=in_words)
def test_a_communication_hook_of_the_user_s_sends_what_was_accumulated(ranks: Ranks, level: str, pattern: str) -> None:
    results = assert_trains_as_one(ranks, level, "fp16", pattern, USERS_HOOK)
    assert results[0]["skipped"] == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("pattern", ["s", "us", "uu", "su", "dds"], ids=in_words)
def test_sparse_gradients_become_means_too(ranks: Ranks, level: str, pattern: str) -> None:
    model, optim = with_optimizer(words_net(), torch.optim.SGD, lr=0.1)
    for step in range(3):
        losses = [model(words(rank, step, micro)).square().mean() for rank in range(2) for micro in range(len(pattern))]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        step_and_clear(optim)
    results = ranks.run(train_words, level, pattern)
    assert_same(results)
    assert (results[0]["skipped"], results[0]["sparse"]) == (0, [True] * 3)
    for found, exact in zip(results[0]["masters"], model.parameters(), strict=True):
        torch.testing.assert_close(found, exact.detach(), rtol=0, atol=0.02)


@pytest.mark.costly
@pytest.mark.parametrize("optimizer", ["sgd", "ours"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("pattern", ["s", "uuus", "sus", "xs", "uu"], ids=in_words)
def test_gradients_that_are_views_of_buckets_are_not_rounded(
    ranks: Ranks, pattern: str, half: str, optimizer: str
) -> None:
    """Neither in the first window, after which torch makes new buckets, nor in the next."""
    everybody = ranks.run(train, "O2", half, pattern, "plain", optimizer, 2)
    for plain, views in zip(everybody, ranks.run(train, "O2", half, pattern, "views", optimizer, 2), strict=True):
        for name in ("grads", "masters"):
            torch.testing.assert_close(views[name], plain[name], rtol=0, atol=0)
    rounded = [torch.equal(g, g.to(HALVES[half]).float()) for g in everybody[0]["grads"][0]]
    assert not all(rounded)  # there is something to lose
