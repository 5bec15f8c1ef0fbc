"""A rank that has no backward pass in a window that nobody averages: it counts as zero, and nobody waits for it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import amp
from halfstep.core.errors import UsageError
from tests.distributed.test_accumulation_across_processes import OPTIMIZERS, data, net, words, words_net
from tests.support.processes import Ranks

# One string a rank, one word a window, one letter a micro-step: u is unsynced, s is synced, - is no pass, 0 is an
# unsynced pass of a loss times zero, ! is one whose loss is infinite, c clips.
PLANS = {
    "the first window": ("u u u", "- u u"),
    "a window in the middle": ("u u u", "u - u"),
    "two in a row, at both": ("uu uu uu -- uu", "uu -- -- uu uu"),
    "half a window": ("uu uu", "u- uu"),
    "after a synced pass": ("su su su", "su s- su"),
    "beside an overflow": ("u ! u u", "u - u -"),
    "beside a first overflow": ("! u u", "- u u"),
    "after synced windows": ("s s u s", "s s - s"),
    "between clipping and the step": ("u ucu u", "u uc- u"),
}

# The same for a rank that has never had, nor heard of, a window that was not averaged by its last pass.
UNEXPECTED = {
    "after the first synced pass": ("su s su", "s- s su"),
    "of a few passes": ("s suusuu s", "s s--s-- s"),
    "on the other rank": ("s- s", "su s"),
    "an overflow after a synced pass": ("s! s", "s- s"),
}


def train(
    rank: int,
    plans: tuple[str, str],
    level: str,
    scale: Any,
    optimizer: str,
    how: str = "",
    sparse: bool = False,
    *,
    scales: list[Any] | None = None,
) -> dict[str, Any]:
    model: Any = words_net() if sparse else net()
    batch = words if sparse else data
    model, optim = amp.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1) if sparse else OPTIMIZERS[optimizer](model.parameters()),
        opt_level=level,
        dtype=torch.bfloat16,
        loss_scale=scale,
        fused=not sparse,
        verbosity=0,
    )
    ddp = DistributedDataParallel(model)
    scales = [] if scales is None else scales
    for step, window in enumerate(plans[rank].split()):
        for micro, kind in enumerate(window):
            if kind == "c":
                optim.clip_master_grads(0.5)
            if kind in "-c":
                continue
            with nullcontext() if kind == "s" else ddp.no_sync():
                loss = ddp(batch(rank, step, micro)).float().square().mean() * {"0": 0.0, "!": float("inf")}.get(
                    kind, 1
                )
                with amp.scale_loss(loss, optim) as scaled:
                    scaled.backward()
        if how == "clipped":
            optim.clip_master_grads(0.5)
        optim.step()
        optim.zero_grad(set_to_none=how != "zeros")
        scales.append(amp.state_dict()["loss_scaler0"])
    skipped = amp.steps_skipped(optim)
    amp.deactivate()
    return {"masters": [p.detach().clone() for p in amp.master_params(optim)], "scales": scales, "skipped": skipped}


def check(ranks: Ranks, plan: str, *arguments: Any) -> None:
    """The ranks go on alike, as where the rank has a loss of zero instead of none."""
    plans = (PLANS | UNEXPECTED)[plan]
    expected, _ = ranks.run(train, tuple(each.replace("-", "0") for each in plans), *arguments)
    for found in ranks.run(train, plans, *arguments):
        assert found["scales"] == expected["scales"]
        assert found["skipped"] == expected["skipped"] == (0 if "!" not in plans[0] else 1)
        for left, right in zip(found["masters"], expected["masters"], strict=True):
            assert torch.equal(left, right)


@pytest.mark.every_combination  # some are skipped
@pytest.mark.parametrize("plan", PLANS | UNEXPECTED)
@pytest.mark.parametrize("scale", [1.0, 128.0, "dynamic"])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_it_counts_as_zero(ranks: Ranks, level: str, scale: Any, plan: str) -> None:
    if "!" in (PLANS | UNEXPECTED)[plan][0] and scale == 1.0:
        pytest.skip("a scale of 1.0 looks for no overflow")
    check(ranks, plan, level, scale, "sgd")


@pytest.mark.exhaustive
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("optimizer", ["adam", "fused", "ours"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_it_counts_as_zero_for_every_optimizer(ranks: Ranks, level: str, optimizer: str, plan: str) -> None:
    check(ranks, plan, level, 128.0, optimizer)


@pytest.mark.parametrize("how", ["clipped", "zeros"])
@pytest.mark.parametrize("plan", PLANS)
def test_it_counts_as_zero_however_gradients_are_treated(ranks: Ranks, plan: str, how: str) -> None:
    check(ranks, plan, "O2", "dynamic", "adam", how)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("plan", [plan for plan in PLANS if "s" not in PLANS[plan][0] and "!" not in PLANS[plan][0]])
def test_it_counts_as_zero_where_gradients_are_sparse(ranks: Ranks, plan: str, level: str) -> None:
    check(ranks, plan, level, 128.0, "sgd", "", True)


def error_of(rank: int, plans: tuple[str, str], how: str, backends: str) -> tuple[str, int]:
    """What a rank raises, and how many steps it took before."""
    scales: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: backends)
        try:
            train(rank, plans, "O2", 128.0, "sgd", how, scales=scales)
        except UsageError as error:
            return str(error), len(scales)
        finally:
            amp.deactivate()
    return "", len(scales)


@pytest.mark.parametrize("plan", UNEXPECTED)
def test_what_ranks_hear_of_too_late_to_clip_is_an_error_on_every_rank(ranks: Ranks, plan: str) -> None:
    first, second = ranks.run(error_of, UNEXPECTED[plan], "clipped", "cpu:gloo")
    assert first == second
    assert "clip_master_grads was called on some ranks" in first[0]
    assert "End every window with a synced pass" in first[0]
    assert first[1] == (1 if plan == "of a few passes" else 0)


@pytest.mark.parametrize("how", ["", "clipped"])
@pytest.mark.parametrize("plan", UNEXPECTED)
def test_without_a_cpu_backend_it_is_an_error_on_every_rank_before_the_next_step(
    ranks: Ranks, plan: str, how: str
) -> None:
    """No step waits for the device there, so ranks learn of it one step later."""
    first, second = ranks.run(error_of, UNEXPECTED[plan], how, "cuda:nccl")
    assert first == second
    assert first[1] == (2 if plan == "of a few passes" else 1)
    assert "Before the previous step some ranks had backward passes in no_sync()" in first[0]
    assert 'init_process_group("cpu:gloo,cuda:nccl")' in first[0]


def losses_of_their_own(rank: int, counts: tuple[int, int]) -> str:
    model: Any = nn.Linear(3, 2)
    optim: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optim = amp.initialize(model, optim, opt_level="O2", loss_scale=128.0, num_losses=2, verbosity=0)
    ddp = DistributedDataParallel(model)
    try:
        with ddp.no_sync():
            for loss_id in range(counts[rank]):
                with amp.scale_loss(ddp(torch.ones(2, 3)).float().sum(), optim, loss_id=loss_id) as scaled:
                    scaled.backward()
        optim.step()
    except UsageError as error:
        return str(error)
    finally:
        amp.deactivate()
    return ""


@pytest.mark.parametrize("counts", [(2, 1), (2, 0), (1, 0)])
def test_what_cannot_be_followed_is_an_error_on_every_rank(ranks: Ranks, counts: tuple[int, int]) -> None:
    for mine, message in zip(counts, ranks.run(losses_of_their_own, counts), strict=True):
        assert f"this rank had backward passes of {mine} loss scales, and another rank of another number" in message
        assert "times zero" in message
    assert ranks.run(losses_of_their_own, (2, 2)) == ["", ""]
