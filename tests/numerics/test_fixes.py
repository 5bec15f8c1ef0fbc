"""What a finding prints as its fix is executed: the model that was broken trains with it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import amp, numerics
from tests.support.worlds import advance


class Squares(nn.Module):
    """They overflow in float16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1e3).square() / (x * 1e3).square().mean(-1, keepdim=True)


class Angles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** -torch.linspace(0, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (4096 * self.inv_freq).sin()


def trained(layer: nn.Module, broken: bool, **options: Any) -> tuple[list[float], list[Any]]:
    """The losses, and what is found before and in the steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(layer), nn.Linear(8, 4))
    found = halfstep.check(model.half() if broken and isinstance(layer, Angles) else model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", dtype="float16", loss_scale=1.0, **options)
    x, losses = torch.randn(16, 8), []
    with numerics.Monitor(model, optimizer, every=1) as monitor:
        for _ in range(5):
            loss = nn.functional.cross_entropy(model(x), torch.arange(16) % 4)
            advance(loss, optimizer)
            losses.append(loss.item())
    return losses, found + monitor.findings()


@pytest.mark.parametrize(("layer", "code"), [(Squares, "HS116"), (Angles, "HS104")])
def test_excluded_layers_as_printed(layer: Callable[[], nn.Module], code: str) -> None:
    finding = next(each for each in trained(layer(), True)[1] if each.code == code)
    layers = ast.literal_eval(re.search(r"excluded_layers=(\[.*?\])", finding.fix)[1])
    losses, found = trained(layer(), False, excluded_layers=layers)
    assert (layers, losses[-1] < losses[0]) == (["1.0"], True)
    assert code not in [each.code for each in found]
