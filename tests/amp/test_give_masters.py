"""``amp.give_masters``: an optimizer that comes after the cast trains like one that was there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp, optimizers
from halfstep.core.errors import UsageError
from tests.support.worlds import unscaled_step, with_optimizer

OPTIMIZERS = [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, optimizers.FusedAdam]


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def trained(net: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    torch.manual_seed(2)
    for _ in range(5):
        with amp.auto_cast(level="O2", dtype="bfloat16"):
            loss = F.cross_entropy(net(torch.randn(6, 5)), torch.randint(3, (6,)))
        unscaled_step(loss, optimizer)
    return [p.detach().clone() for p in amp.master_params(optimizer)]


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_two_calls_do_what_one_does(cls: Any) -> None:
    net, twin = model(), model()
    optimizer = cls(net.parameters(), lr=1e-3)
    amp.decorate(net, optimizer, level="O2", dtype="bfloat16")

    weights = {p: p.detach() for p in twin.parameters()}
    amp.decorate(twin, level="O2", dtype="bfloat16", save_dtype="float32")
    late = cls(twin.parameters(), lr=1e-3)
    assert amp.give_masters(late, weights) is late

    torch.testing.assert_close([*trained(twin, late)], [*trained(net, optimizer)], rtol=0, atol=0)
    for name, saved in net.state_dict().items():
        torch.testing.assert_close(twin.state_dict()[name], saved, rtol=0, atol=0)


def test_masters_start_from_the_weights_as_they_are_where_no_others_are_given() -> None:
    net = amp.decorate(model(), level="O2", dtype="bfloat16")
    optimizer = amp.give_masters(torch.optim.SGD(net.parameters(), lr=0.1))
    assert net[0].weight.dtype is torch.bfloat16
    masters = list(amp.master_params(optimizer))
    assert {p.dtype for p in masters} == {torch.float32}
    assert torch.equal(masters[0], net[0].weight.float())


def test_a_weight_that_was_written_to_meanwhile_wins_over_the_one_given() -> None:
    net = model()
    weights = {p: p.detach() for p in net.parameters()}
    amp.decorate(net, level="O2", dtype="bfloat16")
    with torch.no_grad():
        net[0].weight.fill_(3.0)
    optimizer = amp.give_masters(torch.optim.SGD(net.parameters(), lr=0.1), weights)
    first, second = list(amp.master_params(optimizer))[:2]
    assert torch.equal(first, torch.full_like(first, 3.0))
    assert torch.equal(second, weights[net[0].bias])


def test_has_masters_says_whether_they_were_given() -> None:
    net = model()
    amp.decorate(net, level="O2", dtype="bfloat16")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert not amp.has_masters(optimizer)
    amp.give_masters(optimizer)
    assert amp.has_masters(optimizer)
    with pytest.raises(UsageError, match="can be prepared only once"):
        amp.give_masters(optimizer)


def test_an_optimizer_without_masters_has_none() -> None:
    _net, optimizer = amp.initialize(*with_optimizer(model(), torch.optim.SGD, lr=0.1), opt_level="O0", verbosity=0)
    assert not amp.has_masters(optimizer)
