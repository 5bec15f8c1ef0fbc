"""Gradient accumulation on two ranks at O2, as an article on Apex did it, with the article's numbers where right.

Apex got wrong gradients with reduction off, and the article has two ways around that. Its model is ``Linear(1, 1)``,
and the inputs of the two ranks are 1 and 2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import amp
from tests.support.processes import Ranks

Row = tuple[list[float], list[float | None], list[float]]


def run(rank: int, method: str, scale: float) -> list[Row]:
    """(weights, master gradients, model gradients) after each micro-step, before the optimizer's step."""
    model: Any = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(torch.tensor(0.1121).half())  # masters start from there in Apex
        model.bias.fill_(torch.tensor(0.5968).half())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", dtype=torch.float16, loss_scale=scale, verbosity=0
    )
    model = DistributedDataParallel(model, find_unused_parameters=True)
    model.zero_grad()
    optimizer.zero_grad()
    x, rows = torch.tensor([[1.0 + rank]]), []
    for i in range(6):
        last = i % 3 == 2
        model.require_backward_grad_sync = last and method != "by hand"
        assert amp._amp_state.loss_scalers[0].loss_scale() == scale  # the article prints it
        loss = model(x).mean()
        with amp.scale_loss(loss, optimizer, delay_unscale=method != "plain" and not last) as scaled_loss:
            scaled_loss.backward()
            if last and method == "by hand":
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad.div_(2)
        masters = list(amp.master_params(optimizer))
        rows.append(
            (
                [p.item() for p in model.parameters()],
                [None if p.grad is None else p.grad.item() for p in masters],
                [p.grad.item() for p in model.parameters()],
            )
        )
        if last:
            optimizer.step()
            optimizer.zero_grad()
    rows.append(([p.item() for p in model.parameters()], [], []))
    return rows


@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("method", ["delayed", "by hand", "plain"])
def test_windows_of_three(ranks: Ranks, method: str, scale: float) -> None:
    """Method 1 delays the unscaling, method 2 reduces what the window has so far by hand; here neither is needed."""
    first, second = ranks.run(run, method, scale)
    assert [row[0] for row in first] == [row[0] for row in second]
    for row in (first[2], second[2], first[5], second[5]):
        assert row[1] == [4.5, 3.0]
    assert first[3][0] == pytest.approx([-0.3379, 0.2966], abs=1e-4)
    if method == "delayed":
        assert [row[1] for row in first[:2]] == [row[2] for row in first[:2]], "one gradient"
        assert [row[2] for row in first[:2]] == [[1.0, 1.0], [2.0, 2.0]], "unscaled at once"
        assert [row[2] for row in second[:2]] == [[2.0, 1.0], [4.0, 2.0]]
        assert first[2][2] == second[2][2] == [4.5, 3.0]
