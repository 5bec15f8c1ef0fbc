"""What the error of a collapsed loss scale says of the weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import amp, optimizers
from halfstep.core.errors import LossScaleCollapsed
from tests.support.worlds import scaled_step

SENTENCE = r"[12] of 2 parameters of \w+ are float16 and have no fp32 masters.*HS101.*HS106.*model\.float\(\).*O2"

CASES = {  # level, dtype of the first weight, masters in the optimizer -> whether the error says so
    "fp16 weights at O1": ("O1", torch.float16, False, True),
    "fp32 weights at O1": ("O1", torch.float32, False, False),
    "masters at O2": ("O2", torch.float16, False, False),
    "plain masters at O2": ("O2", torch.float16, False, False),
    "masters in the optimizer": ("O1", torch.float16, True, False),
}


@pytest.mark.parametrize("scaler", [False, True], ids=["scale_loss", "GradScaler"])
@pytest.mark.parametrize("case", CASES)
def test_16_bit_weights_without_masters_are_named_as_a_cause(case: str, scaler: bool) -> None:
    level, dtype, own, said = CASES[case]
    weights = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=dtype)), nn.Parameter(torch.ones(2))])
    make: Any = optimizers.FusedSGD if own else torch.optim.SGD
    optimizer: Any = make(weights.parameters(), lr=0.1, **({"master_weights": True} if own else {}))
    rule = halfstep.DynamicLossScale(init_scale=1.0, min_scale=1.0, collapse_after=1)
    model: Any = weights
    if not scaler or level == "O2":
        options: Any = {"opt_level": level, "loss_scale": rule, "verbosity": 0, "fused": "plain" not in case}
        model, optimizer = amp.initialize(model, optimizer, dtype=None if level == "O0" else torch.float16, **options)
    loss = sum(p.float().sum() for p in model.parameters()) * torch.nan

    with pytest.raises(LossScaleCollapsed, match=r"First gradient that is not finite: ") as error:
        scaled_step(loss, optimizer, amp.GradScaler.from_loss_scale(rule) if scaler else None)
    assert (re.search(SENTENCE, str(error.value)) is not None) is said
    name = f"parameter 0 of group 0 of {type(optimizer).__name__}" if scaler and level != "O2" else "0"
    assert f"not finite: {name} (2, " in str(error.value)  # as the model calls it, where that is known
