"""An ordinary optimizer in the hands of others: ranks, shards, schedulers, checkpoints, copies, averages, compilers."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from halfstep.apex.parallel.LARC import LARC as ApexLARC
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from halfstep import amp, optimizers
from tests.stepping.test_ordinary_optimizer import (
    LEVELS,
    backward,
    data,
    in_both_halves,
    loss_of,
    near,
    net,
    sgd,
    start,
    torch_optimizer,
    train,
    truth,
    with_both_masters,
)
from tests.support.processes import Ranks
from tests.support.worlds import advance, read_back, step_and_clear, unscaled_step, with_optimizer

# ---- rows 9 to 11: ranks and shards


def trained_on_ranks(rank: int, zero: bool, half: torch.dtype, fused: bool) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(params: Any) -> Any:
        if zero:
            return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01, eps=1e-4)
        return torch.optim.AdamW(params, lr=0.01, eps=1e-4)

    model, optimizer = start(half, fused, make)
    parallel = DistributedDataParallel(model)
    for t in range(4):
        backward(parallel, optimizer, 2 * t + rank)
        step_and_clear(optimizer)
    return {"weights": torch.cat([p.detach().flatten() for p in model.parameters()]), "start": truth(net())}


@in_both_halves
@with_both_masters
def test_zero_redundancy_trains_as_the_unsharded(ranks: Ranks, fused: bool, half: torch.dtype) -> None:
    first, second = ranks.run(trained_on_ranks, True, half, fused)
    expected, _ = ranks.run(trained_on_ranks, False, half, fused)
    assert not torch.equal(expected["weights"], expected["start"].to(half))
    assert torch.equal(first["weights"], second["weights"])
    assert torch.equal(first["weights"], expected["weights"])


# ---- schedulers and hooks


@in_both_halves
@with_both_masters
@pytest.mark.parametrize("when", ["before", "after"])
def test_step_hooks_run_once_and_see_the_parameters_of_the_model(when: str, fused: bool, half: torch.dtype) -> None:
    model = net()
    optimizer, seen = sgd(model.parameters()), []

    def pre(o: Any, args: Any, options: Any) -> None:
        seen.append(("pre", o.param_groups[0]["params"][0] is model[0].weight))
        clip_grad_norm_(o.param_groups[0]["params"], 0.1)

    def post(o: Any, args: Any, options: Any) -> None:
        seen.append(("post", o.param_groups[0]["params"][0] is model[0].weight))

    def register() -> None:
        optimizer.register_step_pre_hook(pre)
        optimizer.register_step_post_hook(post)

    if when == "before":
        register()
    start(half, fused, lambda _: optimizer, model)
    if when == "after":
        register()
    backward(model, optimizer)
    optimizer.step()
    assert seen == [("pre", True), ("post", True)]
    assert float((truth(model) - truth(net())).norm()) == pytest.approx(0.1, rel=0.01)


# ---- row 14: averages


@in_both_halves
@with_both_masters
def test_the_master_model_is_the_masters_as_a_model(fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused, model=net(batchnorm=True))
    master_model = amp.master_model(model)
    for steps in (0, 2):
        train(model, optimizer, range(steps))
        assert {p.dtype for p in master_model.parameters()} == {torch.float32}
        assert master_model.state_dict().keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert torch.equal(master_model.state_dict()[name], value), name
        assert torch.equal(truth(amp.master_model(model)), truth(model))
    near(loss_of(master_model.eval()).detach(), loss_of(model.eval()).detach(), 0.02)


# ---- copies and row 15: any order of load and initialize


def pickled(pair: Any) -> Any:
    return pickle.loads(pickle.dumps(pair))


@in_both_halves
@with_both_masters
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("way", [copy.deepcopy, pickled])
def test_a_copy_of_model_and_optimizer_trains(
    way: Callable[[Any], Any], name: str, fused: bool, half: torch.dtype
) -> None:
    pair = start(half, fused, torch_optimizer(name))
    train(*pair, range(2))
    twins = way(pair)
    train(*pair, range(2, 4))
    assert not torch.equal(truth(twins[0]), truth(pair[0]))
    for t in range(2, 4):  # a copy that has lost its session would still train like this
        unscaled_step(loss_of(twins[0], t), twins[1])
    near(truth(twins[0]) - truth(net()), truth(pair[0]) - truth(net()), 0.02)


@pytest.mark.exhaustive
@in_both_halves
@with_both_masters
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam"])
@pytest.mark.parametrize("order", list(itertools.permutations(["model", "optimizer", "initialize"])), ids="-".join)
def test_resume_is_bit_for_bit_in_every_order(
    order: tuple[str, ...], name: str, fused: bool, half: torch.dtype
) -> None:
    model, optimizer = start(half, fused, torch_optimizer(name))
    train(model, optimizer, range(4))
    saved_at, saved = truth(model), read_back({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, range(4, 8))
    again, again_optimizer = with_optimizer(net(), torch_optimizer(name))
    with torch.no_grad():
        again[0].weight.add_(1.0)
    for what in order:
        if what == "model":
            again.load_state_dict(saved["model"])
        elif what == "optimizer":
            again_optimizer.load_state_dict(saved["optimizer"])
        else:
            start(half, fused, lambda _: again_optimizer, again)
    assert torch.equal(truth(again), saved_at)
    train(again, again_optimizer, range(4, 8))
    assert torch.equal(truth(again), truth(model))


@in_both_halves
@with_both_masters
@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_torch_s_checkpoint_functions_save_and_load(name: str, fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused, torch_optimizer(name))
    train(model, optimizer, range(3))
    weights, state = copy.deepcopy(get_state_dict(model, optimizer))
    assert {"0.weight", "2.bias"} <= state["state"].keys()
    again, again_optimizer = start(half, fused, torch_optimizer(name))
    set_state_dict(again, again_optimizer, model_state_dict=weights, optim_state_dict=state)
    assert torch.equal(truth(again), truth(model))
    for pair in ((model, optimizer), (again, again_optimizer)):
        train(*pair, range(3, 6))
    assert torch.equal(truth(again), truth(model))


# ---- rows 16 and 17: what initialize takes


@in_both_halves
@with_both_masters
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("wrapper", [optimizers.LARC, ApexLARC], ids=["ours", "Apex's"])
def test_larc_is_taken_at_every_level(wrapper: Any, level: str, fused: bool, half: torch.dtype) -> None:
    def larc(params: Any) -> Any:
        return wrapper(torch.optim.SGD(params, lr=0.5, momentum=0.9))

    plain, reference = with_optimizer(net(), larc)
    for t in range(5):
        unscaled_step(loss_of(plain, t), reference)
    model, optimizer = start(half, fused, larc, level=level)
    assert type(optimizer) is wrapper
    train(model, optimizer, range(5))
    near(truth(model) - truth(net()), truth(plain) - truth(net()), 1e-4 if level == "O0" else 0.2)


@in_both_halves
@with_both_masters
def test_a_model_that_comes_in_16_bits_is_taken(
    fused: bool, half: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    logs = []
    for model in (net(), net().to(half)):
        caplog.clear()
        weights = truth(model)
        with caplog.at_level(logging.INFO, logger="halfstep"):
            model, optimizer = start(half, fused, model=model, verbosity=1)
        logs.append({record.getMessage() for record in caplog.records if record.name.startswith("halfstep")})
        assert torch.equal(truth(model), weights)
        backward(model, optimizer)
        clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        assert float((truth(model) - weights).norm()) == pytest.approx(1e-3, rel=0.02)
    (said,) = logs[1] - logs[0]
    assert str(half).removeprefix("torch.") in said


# ---- row 18: a whole step compiled


@pytest.mark.costly
@pytest.mark.exhaustive
@in_both_halves
@with_both_masters
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_a_compiled_step_is_the_eager_one(level: str, fused: bool, half: torch.dtype) -> None:
    results = []
    for compiled in (False, True):
        model, optimizer = start(half, fused, lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4), level=level)

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> None:
            advance((model(x).float() - 1).square().mean(), optimizer)

        torch._dynamo.reset()
        run = torch.compile(step, backend="aot_eager") if compiled else step
        for t in range(6):
            run(data(t))
        amp.deactivate()
        results.append(truth(model))
    near(results[1] - truth(net()), results[0] - truth(net()), 1e-4)
