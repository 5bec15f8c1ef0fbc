"""Messages of ranks that no training shows: wrappers that disagree, flat buckets, masters that round to the weights."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfstep import amp, optimizers, parallel
from halfstep.core.errors import UsageError
from halfstep.stepping.ranks import flat_buckets
from tests.support.processes import Ranks
from tests.support.worlds import BF16, FP32, scaled_backward, start_amp


def disagree(rank: int) -> None:
    model, optimizer = start_amp(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.optim.SGD, "O0", lr=0.1)
    summing = parallel.DistributedDataParallel(model[0], gradient_average=False)
    averaging = parallel.DistributedDataParallel(model[1])
    with pytest.raises(UsageError, match="gradient_average or gradient_predivide_factor"):
        scaled_backward(averaging(summing(torch.ones(1, 2))).sum(), optimizer)
    amp.deactivate()


def test_wrappers_that_disagree_are_refused(ranks: Ranks) -> None:
    ranks.run(disagree)


def test_flat_buckets_hold_one_dtype_and_not_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_buckets, "_BUCKET", 4)
    sizes = [(2, FP32), (2, FP32), (1, FP32), (9, FP32), (1, BF16), (3, BF16)]
    tensors = [torch.zeros(n, dtype=dtype) for n, dtype in sizes]
    chunks = [[t.numel() for t in chunk] for chunk in flat_buckets._chunks(tensors)]
    assert chunks == [[2, 2], [1], [9], [1, 3]]
    assert flat_buckets._chunks([]) == []
    assert [len(chunk) for chunk in flat_buckets._chunks([torch.zeros(n) for n in (1, 4, 1)])] == [1, 1, 1]


@pytest.mark.parametrize("other", [0.0, 1.0], ids=["the same masters", "others"])
def test_masters_are_exchanged_without_a_write_to_weights_that_they_round_to(
    other: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward pass may have kept them. Before the first step a master half way between two weights is at either."""
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(dist, "broadcast", lambda flat, source, group: flat.add_(other))
    ties = torch.tensor([[1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8]])
    model = nn.Linear(3, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(ties)
    optimizer = optimizers.FusedAdam(model.parameters(), master_weights="split")
    amp.initialize(model, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    before, version = model.weight.detach().clone(), model.weight._version
    flat_buckets.share_masters([model.weight], object())  # type: ignore[arg-type]
    assert (model.weight._version == version) == (other == 0.0)
    assert torch.equal(model.weight, before) == (other == 0.0)
    assert torch.equal(model.state_dict()["weight"], ties + other)
