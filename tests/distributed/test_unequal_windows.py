"""After the last synced pass all ranks have the same backward passes, or there is an error on all of them."""

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
from tests.distributed.test_accumulation_across_processes import data, net, words_net
from tests.support.processes import Ranks
from tests.support.worlds import assert_equal, scaled_backward, start_amp, step_and_clear, with_optimizer

# One string a rank, one word a window, one letter a micro-step: u is unsynced, s is synced, - is no pass, c clips, and
# z drops the gradients.
PASSES, CLIPS = "had different numbers of backward passes in no_sync()", "called clip_master_grads"
PLANS = {  # what ranks do, the window in which they part, the error
    "the first window": ("u u", "- u", 0, PASSES),
    "a window in the middle": ("u uu u", "u u- u", 1, PASSES),
    "after a synced pass": ("s su s", "s s- s", 1, PASSES),
    "after the first synced pass": ("su s", "s- s", 0, PASSES),
    "one clips more": ("su suc", "su su-", 1, CLIPS),
    "one clips after another pass": ("uc uc", "uc -c", 1, PASSES),
}
EQUAL = ("us usu u uuzu", "-s -su u -uzu")  # the ranks differ before the last synced pass, or in what they drop


def train(rank: int, plans: tuple[str, str], level: str, scale: float, backends: str) -> tuple[int, str, list[Any]]:
    """How many windows a rank gets through, the error, and its masters."""
    model, optim = with_optimizer(net(), torch.optim.SGD, lr=0.1)
    options = {"opt_level": level, "dtype": torch.bfloat16, "loss_scale": scale, "verbosity": 0}
    model, optim = amp.initialize(model, optim, **options)
    ddp = DistributedDataParallel(model)
    steps = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: backends)
        try:
            for step, window in enumerate(plans[rank].split()):
                for micro, kind in enumerate(window):
                    if kind == "c":
                        optim.clip_master_grads(0.5)
                    elif kind == "z":
                        optim.zero_grad()
                    elif kind != "-":
                        with nullcontext() if kind == "s" else ddp.no_sync():
                            loss = ddp(data(rank, step, micro)).float().square().mean()
                            scaled_backward(loss, optim)
                step_and_clear(optim)
                steps += 1
            return steps, "", [p.detach().clone() for p in amp.master_params(optim)]
        except UsageError as error:
            return steps, str(error), []
        finally:
            dist.barrier()  # nobody has sent anything else
            amp.deactivate()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_unequal_windows_are_an_error_on_every_rank_before_the_step(
    ranks: Ranks, level: str, scale: float, plan: str
) -> None:
    *plans, parts, words = PLANS[plan]
    for steps, error, _ in ranks.run(train, plans, level, scale, "cpu:gloo"):
        assert steps == parts
        assert error.startswith("Before this step some ranks")
        assert str(words) in error


@pytest.mark.parametrize("plan", ["after a synced pass", "after the first synced pass"])
def test_without_a_cpu_backend_it_is_an_error_on_every_rank_before_the_next_step(ranks: Ranks, plan: str) -> None:
    """No rank that has averaged everything waits for the device before its step."""
    *plans, parts, words = PLANS[plan]
    for steps, error, _ in ranks.run(train, plans, "O2", 128.0, "cuda:nccl"):
        assert steps == int(parts) + 1
        assert error.startswith("Before the previous step some ranks")
        assert str(words) in error
        assert 'init_process_group("cpu:gloo,cuda:nccl")' in error


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_what_differs_before_the_last_synced_pass_is_averaged(ranks: Ranks, level: str) -> None:
    first, second = ranks.run(train, EQUAL, level, 128.0, "cpu:gloo")
    assert first[:2] == second[:2] == (4, "")
    assert_equal(first[2], second[2])


def use_words(rank: int) -> list[torch.Tensor]:
    """Rank 1 alone uses the table, whose gradient is sparse, in an unsynced window."""
    model, optim = start_amp(words_net(), torch.optim.SGD, "O2", loss_scale=128.0, fused=False, lr=0.1)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    with ddp.no_sync():
        outputs = ddp(torch.tensor([[0, 1, 2]])).float()
        loss = outputs.sum() if rank else ddp.module[2].bias.float().sum() + 0.0 * outputs.sum().detach()
        scaled_backward(loss, optim)
    optim.step()
    assert model[0].weight.grad.is_sparse
    amp.deactivate()
    return [p.detach().clone() for p in amp.master_params(optim)]


def test_a_sparse_gradient_on_one_rank_alone_is_averaged(ranks: Ranks) -> None:
    first, second = ranks.run(use_words)
    for left, right, before in zip(first, second, words_net().parameters(), strict=True):
        assert torch.equal(left, right)
        assert not torch.equal(left, before.detach())


def losses_of_their_own(rank: int, losses: tuple[int, int]) -> str:
    model, optim = start_amp(nn.Linear(3, 2), torch.optim.SGD, "O2", loss_scale=128.0, num_losses=2, lr=0.1)
    ddp = DistributedDataParallel(model)
    try:
        with ddp.no_sync():
            for loss_id in (0, losses[rank]):
                scaled_backward(ddp(torch.ones(2, 3)).float().sum(), optim, loss_id=loss_id)
        optim.step()
    except UsageError as error:
        return str(error)
    finally:
        amp.deactivate()
    return ""


def test_loss_scales_of_their_own_are_an_error_on_every_rank(ranks: Ranks) -> None:
    for message in ranks.run(losses_of_their_own, (1, 0)):
        assert "some ranks had backward passes with different numbers of loss scales" in message
        assert "times zero" in message
    assert ranks.run(losses_of_their_own, (1, 1)) == ["", ""]
