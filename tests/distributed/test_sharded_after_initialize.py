"""What replaces parameters comes before ``amp.initialize``; later it is refused, parts before any backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import halfstep
from halfstep import amp
from halfstep.core.errors import UsageError
from tests.distributed.test_fsdp import data, net, sharded
from tests.support.processes import Ranks
from tests.support.shards import mesh
from tests.support.worlds import scaled_backward, scaled_step, start_amp, step_and_clear, with_optimizer


def one_row(model: Any) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    return parallelize_module(model, mesh(), {"0": RowwiseParallel(input_layouts=Replicate())})


def one_shard(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[2], mesh=mesh())
    return model


def flat(model: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def wrapped_late(rank: int, level: str, wrap: Callable[[Any], Any]) -> tuple[str, list[str], bool]:
    model, optimizer = start_amp(net(), torch.optim.SGD, level, dtype=torch.bfloat16, lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = wrap(model)
        found = [each.severity for each in halfstep.check(model, optimizer) if each.code == "HS115"]
        passed: list[bool] = []
        for param in model.parameters():
            param.register_hook(lambda _: passed.append(True))
        try:
            scaled_step(whole(data(rank, 0)).float().square().mean(), optimizer)
        except UsageError as error:
            return str(error), found, bool(passed)
        finally:
            amp.deactivate()
    return "nobody minded", found, True


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize(
    ("wrap", "gone"),
    [(one_row, "0.weight, 0.bias"), (one_shard, "2.weight, 2.bias"), (flat, "0.weight, 0.bias, 2.weight and 1 more")],
)
def test_parameters_that_were_replaced_are_refused(
    ranks: Ranks, level: str, wrap: Callable[[Any], Any], gone: str
) -> None:
    for message, found, passed in ranks.run(wrapped_late, level, wrap):
        assert passed == (wrap is flat)  # parts are found before gradients have come
        assert message.startswith(f"This SGD has parameters that are no longer in its model ({gone}).")
        assert found == ["error"]


def on_meta(rank: int) -> list[str]:
    """The order of torch: shard without memory, ``to_empty``, the weights, the optimizer. Then ``initialize``."""
    from torch.distributed.fsdp import fully_shard

    said = []
    for empties in (False, True):
        with torch.device("meta"):
            model: Any = net()
        fully_shard(model, mesh=mesh())
        if empties:
            model.to_empty(device="cpu")
            for param in model.parameters():
                torch.nn.init.ones_(param)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for level in ("O1", "O2"):
            try:
                amp.initialize(model, optimizer, opt_level=level, dtype=torch.bfloat16, verbosity=0)
                said.append("fine")
                break
            except UsageError as error:
                said.append(str(error))
        amp.deactivate()
    return said


def test_shards_without_memory_are_refused_with_the_order(ranks: Ranks) -> None:
    for first, second, emptied in ranks.run(on_meta):
        assert first == second
        assert first.startswith("The sharded parameter 0.weight is on the meta device")
        assert "to_empty" in first
        assert emptied == "fine"


def kept_whole(rank: int) -> int:
    """Between a pass and the step the whole parameters of FSDP2 are in the places of the shards."""
    model, optimizer = with_optimizer(sharded(), torch.optim.SGD, lr=0.1)
    shards = set(map(id, model.parameters()))
    model, optimizer = amp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    model.set_reshard_after_backward(False)
    for step in range(3):
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            scaled_backward(model(data(rank, step, micro)).square().mean(), optimizer)
        others = sum(id(p) not in shards for p in model.parameters())
        step_and_clear(optimizer)
        model.reshard()
    amp.deactivate()
    return others


def test_parameters_that_fsdp2_has_gathered_are_no_replacement(ranks: Ranks) -> None:
    assert ranks.run(kept_whole) == [4, 4]
