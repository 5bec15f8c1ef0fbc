"""ScheduleFree, whose ``train`` and ``eval`` write to weights, trains at O2 as in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp
from tests.integrations import direct_loop as direct
from tests.support.worlds import advance

schedulefree = pytest.importorskip(
    "schedulefree", reason="schedulefree is not installed; `make integrations` installs it"
)

OPTIMIZERS = {
    "SGD": lambda params: schedulefree.SGDScheduleFree(params, lr=1.0),
    "AdamW": lambda params: schedulefree.AdamWScheduleFree(params, lr=1e-2, warmup_steps=5),
    "RAdam": lambda params: schedulefree.RAdamScheduleFree(params, lr=5e-2),
    "wrapped": lambda params: schedulefree.ScheduleFreeWrapper(torch.optim.SGD(params, lr=1.0), momentum=0.9),
}


def losses(model: nn.Module, optimizer: Any) -> list[float]:
    """Losses of training, and after each of three epochs the loss in evaluation."""
    data, seen = direct.batches(10), []
    for _ in range(3):
        optimizer.train()
        for x, y in data:
            loss = F.cross_entropy(model(x), y)
            advance(loss, optimizer)
            seen.append(loss.item())
        optimizer.eval()
        with torch.no_grad():
            seen.append(sum(F.cross_entropy(model(x), y).item() for x, y in data) / len(data))
    return seen


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_in_fp32(optimizer: str, dtype: str) -> None:
    runs = []
    for options in ({"opt_level": "O0"}, {"opt_level": "O2", "dtype": dtype, "loss_scale": 128.0}):
        model = direct.classifier()
        pair = amp.initialize(model, OPTIMIZERS[optimizer](model.parameters()), verbosity=0, **options)
        runs.append(losses(*pair))
    assert runs[0][-1] < 0.95 * runs[0][0]
    assert runs[1] == pytest.approx(runs[0], rel=0.03, abs=0.01)
