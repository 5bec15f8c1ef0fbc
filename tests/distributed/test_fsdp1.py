"""``FullyShardedDataParallel`` does not say over which processes it cuts parameters: right, or refused in words."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from halfstep import amp
from halfstep.core.errors import UsageError
from tests.distributed.test_fsdp import OPTIMIZERS, data, net
from tests.support.processes import Ranks
from tests.support.worlds import scaled_backward, scaled_step, step_and_clear, with_optimizer

FLAT = [False, True]
CUT = "FullyShardedDataParallel (FSDP1) has cut these parameters"


def flat(model: Any, orig: bool) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=orig)


def loss_of(model: Any, rank: int, step: int) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out: torch.Tensor = model(data(rank, step))
    return (out.float() * 3 - 1).square().mean()


def train(rank: int, name: str, level: str, orig: bool) -> list[torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = flat(net(), orig)
    optimizer = OPTIMIZERS[name](model.parameters())
    if level != "no amp":
        amp.initialize(model, optimizer, opt_level=level, dtype=torch.bfloat16, verbosity=0)
    for step in range(4):
        if level == "no amp":
            loss_of(model, rank, step).backward()
        else:
            scaled_backward(loss_of(model, rank, step), optimizer)
        model.clip_grad_norm_(0.5)
        step_and_clear(optimizer)
    amp.deactivate()
    with FullyShardedDataParallel.summon_full_params(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("orig", FLAT)
@pytest.mark.parametrize("level", ["no amp", "O0", "O1"])
@pytest.mark.parametrize("name", ["adamw", "FusedAdam", "FusedSGD"])
def test_steps_without_norms_and_scales_are_right(ranks: Ranks, name: str, level: str, orig: bool) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(4):
        sum(loss_of(model, rank, step) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        step_and_clear(optimizer)
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    for found in ranks.run(train, name, level, orig):
        found = torch.cat([p.flatten() for p in found])[: len(expected)]
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02 if level == "O1" else 1e-5)


def refused(rank: int, what: str, orig: bool) -> str:
    model = flat(net(), orig)
    name = what if what in OPTIMIZERS else "adamw"
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = amp.GradScaler(what == "GradScaler", init_scale=8.0)
    if what == "scale_loss":
        amp.initialize(model, optimizer, opt_level="O1", loss_scale="dynamic", verbosity=0)
    try:
        if what == "scale_loss":
            scaled_backward(loss_of(model, rank, 0), optimizer)
        else:
            scaler.scale(loss_of(model, rank, 0)).backward()
            if what == "clip_grad_norm_":
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
    except UsageError as error:
        return str(error)
    finally:
        amp.deactivate()
    return "nobody minded"


@pytest.mark.costly
@pytest.mark.parametrize("orig", FLAT)
@pytest.mark.parametrize(
    "what",
    [
        *("clip_grad_norm_", "GradScaler", "scale_loss"),
        *("FusedAdam, clipped", "FusedLAMB", "FusedNovoGrad", "FusedNovoGrad, largest", "LARC"),
    ],
)
def test_norms_and_loss_scales_are_refused(ranks: Ranks, what: str, orig: bool) -> None:
    for message in ranks.run(refused, what, orig):
        assert message.startswith(CUT)
        assert "fully_shard" in message


def cast(rank: int, level: str, orig: bool, late: bool) -> str:
    model, optimizer = with_optimizer(net() if late else flat(net(), orig), torch.optim.SGD, lr=0.1)
    try:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=torch.bfloat16, verbosity=0)
        if late:
            model = flat(model, orig)
            scaled_step(loss_of(model, rank, 0), optimizer)
    except UsageError as error:
        return str(error)
    finally:
        amp.deactivate()
    return "nobody minded"


@pytest.mark.parametrize("orig", FLAT)
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_16_bit_weights_are_refused(ranks: Ranks, level: str, orig: bool) -> None:
    for message in ranks.run(cast, level, orig, False):
        assert message.startswith("FullyShardedDataParallel (FSDP1) has flattened the parameter _fsdp_wrapped_module.")
        assert "O0 or O1" in message


def test_a_model_with_masters_is_not_wrapped(ranks: Ranks) -> None:
    """Without original parameters all are replaced, which has an error of its own."""
    for message in ranks.run(cast, "O2", True, True):
        assert message.startswith("FullyShardedDataParallel (FSDP1) was given a model whose optimizer has fp32 masters")
