"""What reports say of a model whose layers compute by a recipe."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn

from halfstep import amp, numerics

NAMES = {
    "mxfp8": {"mxfp8 (emulated)"},
    "nvfp4": {"nvfp4 (emulated)"},
    "fp8_rowwise_hp_wgrad": {"fp8_e4m3 (emulated)", "bfloat16"},
    "fp8_tensorwise; amax=delayed": {"fp8_e4m3 (emulated)", "fp8_e5m2 @ fp8_e4m3 (emulated)"},
}


def made(recipe: str) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    model = amp.initialize(model, opt_level="O2", dtype="bfloat16", products=f"{recipe}; layers=all", verbosity=0)
    x = torch.randn(32, 64)
    return model, lambda size=1.0: model(x * size).float().square().sum()


@pytest.mark.parametrize("recipe", NAMES)
def test_op_table_has_the_formats_of_products_and_the_step_has_its_numbers(recipe: str) -> None:
    plain, step = made(recipe)
    _ = [step().backward() for _ in range(2)]  # delayed scales of the second step are from the first
    model, watched = made(recipe)
    _, table = (numerics.op_table(lambda: watched().backward(), model) for _ in range(2))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    linear = [row for row in table.rows() if row.op == "linear"]
    assert {name for row in linear for name in row.calls} == NAMES[recipe]
    assert sum(sum(row.calls.values()) for row in linear) == 8  # the first layer has no gradient of its input
    assert not {row.op for row in table.rows()} & {"mm", "addmm", "amax", "copy_"}


@pytest.mark.parametrize("recipe", NAMES)
def test_compare_step_blames_rounding_on_products_and_leaves_no_trace(recipe: str) -> None:
    model, step = made(recipe)
    step().backward()
    before = step().item()
    found = numerics.compare_step(lambda: step(3.0), model, reference=torch.float64)
    assert step().item() == before
    assert found.first() is None
    forward = [each for each in found.entries if each.op == "linear" and not each.backward]
    assert [each.dtype for each in forward] == [sorted(NAMES[recipe])[-1 if recipe.endswith("wgrad") else 0]] * 3
    assert (0.05 if recipe == "nvfp4" else 0.01) < forward[0].added < 0.5
    assert all(each.inherited > 0.5 * last.error for last, each in pairwise(forward))
