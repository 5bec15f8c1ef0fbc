"""Sparse gradients whose indices repeat: the parts are added up in fp32, where they do not overflow."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfstep import amp
from halfstep.parameters.ledger import Gradients
from halfstep.parameters.table import OptimizerTable
from halfstep.parameters.unscale import Unscaler
from tests.support.worlds import FP16, start_amp

BIG = 60_000.0  # two of them are more than fp16 holds


def in_parts(values: list[float]) -> torch.Tensor:
    """Row 1 of three, in fp16, as the sum of some values."""
    rows = torch.tensor([[value, value] for value in values], dtype=torch.float16)
    return torch.sparse_coo_tensor([[1] * len(values)], rows, (3, 2), check_invariants=True)


def test_parts_that_overflow_on_the_way_do_not_count_as_overflow() -> None:
    param, found_inf = torch.zeros(3, 2, dtype=torch.float16, requires_grad=True), torch.zeros(())
    param.grad = in_parts([BIG, BIG, -BIG])
    unscaler = Unscaler()
    unscaler.unscale(unscaler.gather([param]), torch.tensor(0.5), found_inf)
    assert found_inf == 0
    assert param.grad.dtype is torch.float16
    assert param.grad.is_coalesced()
    assert param.grad.to_dense().tolist() == [[0.0, 0.0], [BIG / 2, BIG / 2], [0.0, 0.0]]


def test_parts_that_were_set_aside_do_not_overflow_when_a_dense_gradient_comes() -> None:
    param = torch.zeros(3, 2, dtype=torch.float16, requires_grad=True)
    param.grad = in_parts([BIG, BIG, -BIG])
    optimizer, scale = torch.optim.SGD([param]), torch.tensor(128.0)
    gradients = Gradients(OptimizerTable.of(optimizer))
    gradients.begin(scale, optimizer)
    param.grad = torch.full_like(param, 128.0)
    gradients.finish(scale, torch.zeros(()))
    assert param.grad is not None
    assert param.grad.dtype is torch.float16
    assert param.grad.tolist() == [[1.0, 1.0], [BIG, BIG], [1.0, 1.0]]  # BIG + 1 is BIG in fp16


@pytest.mark.filterwarnings("ignore:The amp.scale_loss block ended:UserWarning")  # gradients are set by hand
@pytest.mark.parametrize("values", [[BIG, BIG], [BIG, BIG, -BIG], [1.0]])
def test_a_master_gets_the_sum_even_if_16_bits_do_not_hold_it(values: list[float]) -> None:
    model, optimizer = start_amp(
        nn.Embedding(3, 2, sparse=True), torch.optim.SGD, "O2", dtype=FP16, fused=False, loss_scale=128.0, lr=1.0
    )
    before = model.state_dict()["weight"].clone()
    with amp.scale_loss(model.weight.float().sum(), optimizer):
        model.weight.grad = in_parts(values)
    assert model.weight.grad.dtype is torch.float32
    optimizer.step()
    moved = before - model.state_dict()["weight"]
    torch.testing.assert_close(moved[1], torch.full((2,), sum(values) / 128))
    assert amp.steps_skipped(optimizer) == 0
