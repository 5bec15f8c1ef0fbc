"""Bug reports of other projects, each in its smallest form, and the code that would have told.

Those with numbers to be met are in ``test_predictions.py``, that of FSDP2 (Modalities#464) in ``test_wrapped.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import halfstep

Report = tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]


def net(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    for p in model.parameters():
        p.data += 0.02 * torch.randn_like(p)
    return model.to(dtype)


def areal_1292() -> Report:
    """FSDP kept bfloat16 weights and no masters: the loss ended three times higher."""
    model = net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0), {}


def torchtune_2254() -> Report:
    """Very bad convergence with bf16, at a learning rate of 6e-7."""
    model = net()
    return model, torch.optim.AdamW(model.parameters(), lr=6e-7, weight_decay=0.0), {}


def onetrainer_996() -> Report:
    """Weight decay is never applied in bfloat16."""
    model = net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01), {}


def axolotl_3670() -> Report:
    """Norms in 16 bits beside fp32 weights."""
    model = net(torch.float32)
    model[1].bfloat16()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), {}


def hello_agents_459() -> Report:
    """A gradient scaler on bfloat16 weights: "... not implemented for 'BFloat16'"."""
    model = net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), {"scaler": torch.amp.GradScaler("cpu")}


def transformer_engine_3193() -> Report:
    """A loss in fp32 that lies on the grid of bfloat16."""
    model = net(torch.float32)
    x, y = torch.randn(64, 32), torch.randint(8, (64,))
    loss = {"batch": lambda: F.cross_entropy(model(x), y).bfloat16().float()}
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loss


REPORTS: dict[Callable[[], Report], str] = {
    areal_1292: "HS101",
    torchtune_2254: "HS101",
    onetrainer_996: "HS103",
    axolotl_3670: "HS104",
    hello_agents_459: "HS108",
    transformer_engine_3193: "HS112",
}


@pytest.mark.parametrize(("report", "code"), REPORTS.items(), ids=lambda value: getattr(value, "__name__", value))
def test_a_bug_report_is_flagged(report: Callable[[], Report], code: str) -> None:
    model, optimizer, about = report()
    assert code in {each.code for each in halfstep.check(model, optimizer, **about)}
