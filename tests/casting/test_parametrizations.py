"""Weights that are computed from others in ``forward`` train at O2: torch's parametrizations, and its older hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from halfstep import amp
from tests.support.worlds import scaled_backward

KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "orthogonal, matrix_exp": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="matrix_exp"),
    "orthogonal, cayley": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley"),
    "orthogonal, householder": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="householder"),
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm, hook": nn.utils.spectral_norm,
    "weight_norm, hook": nn.utils.weight_norm,
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", KINDS)
def test_a_computed_weight_trains_at_o2(name: str, half: torch.dtype) -> None:
    losses = []
    for mixed in (False, True):
        torch.manual_seed(0)  # the hook of weight_norm cannot be copied
        model = nn.Sequential(KINDS[name](nn.Linear(6, 6)), nn.Tanh(), KINDS[name](nn.Linear(6, 6)))
        x, y = torch.randn(16, 6), torch.randn(16, 6)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if mixed:
            amp.initialize(model, optimizer, opt_level="O2", dtype=half, loss_scale=16.0, verbosity=0)
        for _ in range(12):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x).float(), y)
            if mixed:
                scaled_backward(loss, optimizer)
            else:
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
    begin, end = losses[0], losses[11]
    assert begin - end > 0.1 * begin
    assert losses[-1] == pytest.approx(end, rel=0.03)
