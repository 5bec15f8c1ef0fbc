"""``DistributedDataParallel.join``: ranks with different numbers of batches train as without mixed precision."""

from __future__ import annotations

import copy
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from halfstep import amp
from halfstep.core.errors import UsageError
from tests.distributed.test_accumulation_across_processes import OPTIMIZERS, WRAPPERS, data, micro_step, net
from tests.distributed.test_torch_algorithms import of_distributed
from tests.support.processes import Ranks
from tests.support.worlds import assert_equal, start_amp, step_and_clear, with_optimizer


def train(
    rank: int, level: str, scale: Any, wrapper: str, batches: tuple[int, int], initial: bool, rounds: int
) -> dict[str, Any]:
    """Some rounds of uneven inputs, after each of which come two ordinary steps: one synced, one not."""
    model = net()
    model, optim = amp.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),  # with momentum, ranks that ran out would have another one
        opt_level=level,
        dtype=torch.bfloat16,
        loss_scale=scale,
        verbosity=0,
    )
    ddp: Any = DistributedDataParallel(model, **WRAPPERS[wrapper])
    steps = []

    def step(number: int, how: str) -> None:
        micro_step(ddp, optim, how, data(rank, number, 0))
        step_and_clear(optim)
        steps.append([p.detach().float().clone() for p in amp.master_params(optim)])

    for once in range(rounds):
        with warnings.catch_warnings(), ddp.join(divide_by_initial_world_size=initial):
            for i in range(batches[rank]):
                step(10 * once + i, "s")
        step(10 * once + 8, "s")
        step(10 * once + 9, "u")
    amp.deactivate()
    return {"masters": steps[-1], "steps": len(steps), "half": [p.detach().clone() for p in model.parameters()]}


def by_hand(batches: tuple[int, int], initial: bool, rounds: int) -> list[torch.Tensor]:
    """In fp32, in one process."""
    model, optim = with_optimizer(net(), torch.optim.SGD, lr=0.1)
    for once in range(rounds):
        numbers = [10 * once + i for i in range(max(batches))] + [10 * once + 8, 10 * once + 9]
        for number in numbers:
            active = [rank for rank in (0, 1) if number % 10 >= 8 or number % 10 < batches[rank]]
            for rank in active:
                divisor = 2 if initial else len(active)
                (model(data(rank, number, 0)).square().mean() / divisor).backward()
            step_and_clear(optim)
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("batches", [(3, 5), (4, 2), (3, 3)])
@pytest.mark.parametrize(("level", "scale"), [("O0", 1.0), ("O1", 1.0), ("O2", 1.0), ("O2", 128.0), ("O2", "dynamic")])
def test_ranks_with_different_numbers_of_batches(
    ranks: Ranks, level: str, scale: Any, batches: tuple[int, int], initial: bool
) -> None:
    first, second = ranks.run(train, level, scale, "plain", batches, initial, 2)
    assert (first["steps"], second["steps"]) == (2 * (batches[0] + 2), 2 * (batches[1] + 2))
    expected = by_hand(batches, initial, 2)
    start = [p.detach() for p in net().parameters()]
    for a, b, e, s in zip(first["masters"], second["masters"], expected, start, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a - s, e - s, rtol=0.1, atol=1e-5 if level == "O0" else 2e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrapper", ["views", "unused", "small buckets, copied"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_wrapper(ranks: Ranks, level: str, wrapper: str) -> None:
    first, second = ranks.run(train, level, 128.0, wrapper, (2, 4), True, 1)
    expected = by_hand((2, 4), True, 1)
    torch.testing.assert_close(first["masters"], expected, rtol=0.1, atol=0.02)
    assert second["steps"] == 6


def masters_after(rank: int, optimizer: str, grouped: bool) -> list[Any]:
    """What this rank has at the end of ``join``, and after one more step."""
    model, optim = start_amp(net(), OPTIMIZERS[optimizer], "O2", dtype=torch.bfloat16)
    ddp: Any = DistributedDataParallel(model)
    with warnings.catch_warnings(), Join([ddp]) if grouped else ddp.join():
        for i in range(2 + 2 * rank):
            micro_step(ddp, optim, "s", data(rank, i, 0))
            step_and_clear(optim)
        own = [p.detach().clone() for p in amp.master_params(optim)]
    joined = [p.detach().clone() for p in amp.master_params(optim)]
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    optim.zero_grad()
    optim.step()
    weights = [p.detach().clone() for p in model.parameters()]
    amp.deactivate()
    return [own, joined, saved, weights]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "ours"])
def test_all_ranks_have_the_masters_of_one_that_was_active_to_the_end(
    ranks: Ranks, optimizer: str, grouped: bool
) -> None:
    """At once: what a rank reads or saves alone afterwards must be right."""
    (early, first, saved, weights), (own, last, expected, others) = ranks.run(masters_after, optimizer, grouped)
    assert not all(torch.equal(a, b) for a, b in zip(early, own, strict=True))
    for a, b, c in zip(first, last, own, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(b, c)
        assert not torch.equal(b, b.bfloat16().float())
    assert all(torch.equal(saved[name], value) for name, value in expected.items())
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def sharded_state(rank: int) -> list[torch.Tensor]:
    """The weights after ``join`` with an optimizer that gives each rank the masters of its own parameters only."""
    make = partial(of_distributed("ZeroRedundancyOptimizer"), optimizer_class=torch.optim.SGD)
    model, optim = start_amp(net(), make, "O2", dtype=torch.bfloat16)
    ddp: Any = DistributedDataParallel(model)
    with warnings.catch_warnings(), Join([ddp, optim]):
        for i in range(2 + 2 * rank):
            micro_step(ddp, optim, "s", data(rank, i, 0))
            step_and_clear(optim)
    amp.deactivate()
    return [p.detach().clone() for p in model.parameters()]


def test_ranks_with_their_own_masters_end_with_equal_weights(ranks: Ranks) -> None:
    first, second = ranks.run(sharded_state)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def over(rank: int) -> list[Any]:
    """After ``join`` ranks may differ in what they leave to the step again."""
    model, optim = start_amp(net(), torch.optim.SGD, "O2", dtype=torch.bfloat16, lr=0.1)
    ddp: Any = DistributedDataParallel(model)
    copied = copy.deepcopy(ddp)
    again = copied.join_hook.__reduce__()[1][0] is copied
    with warnings.catch_warnings(), ddp.join():
        for i in range(1 + rank):
            micro_step(ddp, optim, "s", data(rank, i, 0))
            step_and_clear(optim)
    micro_step(ddp, optim, "u", data(rank, 7, 0))
    optim.step()
    masters = [p.detach().clone() for p in amp.master_params(optim)]
    amp.deactivate()
    gone = weakref.ref(ddp)
    del ddp
    return [masters, again, gone() is None]


def test_a_wrapper_is_as_before_when_join_is_over(ranks: Ranks) -> None:
    (first, *same), (second, *_) = ranks.run(over)
    assert same == [True, True]  # a copy has its own hook, and nothing keeps a wrapper alive
    assert_equal(first, second)


def unsynced(rank: int) -> tuple[str, float]:
    model, optim = start_amp(net(), OPTIMIZERS["sgd"], "O2", dtype=torch.bfloat16, loss_scale="dynamic")
    ddp: Any = DistributedDataParallel(model)
    try:
        with warnings.catch_warnings(), ddp.join():
            micro_step(ddp, optim, "u", data(rank, 0, 0))
            micro_step(ddp, optim, "s", data(rank, 0, 0), poison=True)
            optim.step()
            micro_step(ddp, optim, "u", data(rank, 0, 0))
            optim.step()
    except UsageError as error:
        return str(error), amp.state_dict()["loss_scaler0"]["loss_scale"]
    finally:
        amp.deactivate()
    return "", 0.0


def test_a_window_that_ends_unsynced_is_refused(ranks: Ranks) -> None:
    for message, scale in ranks.run(unsynced):
        assert "DistributedDataParallel.join()" in message
        assert scale == 2.0**15, "the overflow in the second of two passes counts"
