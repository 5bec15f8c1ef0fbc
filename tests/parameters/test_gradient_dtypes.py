"""In which dtype a step finds the gradients of a model, by level, who keeps the masters, and what was done to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfstep import amp, optimizers
from tests.support.backends import skip_without_compiler
from tests.support.worlds import FP32, scaled_backward, step_and_clear, with_optimizer


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 128.0])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_gradient_after_a_block_is_fp32(
    level: str, fused: bool, scale: float, passes: int, half: torch.dtype
) -> None:
    skip_without_compiler(level == "O2" and fused)
    model, optimizer = with_optimizer(nn.Linear(4, 3), torch.optim.AdamW, lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, dtype=half, fused=fused, loss_scale=scale, verbosity=0
    )
    for _ in range(2):
        for _ in range(passes):
            scaled_backward(model(torch.ones(2, 4)).float().sum(), optimizer)
        assert model.weight.grad.dtype is FP32
        assert torch.equal(model.weight.grad.float(), torch.full((3, 4), 2.0 * passes))
        step_and_clear(optimizer)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_it_stays_in_16_bits_where_the_optimizer_clips_by_itself(scale: float, passes: int) -> None:
    skip_without_compiler(True)
    model, optimizer = with_optimizer(nn.Linear(4, 3), optimizers.FusedAdam, lr=0.1, max_grad_norm=1.0)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", dtype=torch.bfloat16, loss_scale=scale, verbosity=0
    )
    for _ in range(2):
        for _ in range(passes):
            scaled_backward(model(torch.ones(2, 4)).float().sum(), optimizer)
        assert model.weight.grad.dtype is (torch.bfloat16 if passes == 1 and scale == 1.0 else FP32)
        optimizer.step()
        assert optimizer.grad_norm.item() == pytest.approx(passes * (15 * 4) ** 0.5, rel=1e-6)
        optimizer.zero_grad()
