"""The findings about formats, each in a training that has the fault and in one that has not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import amp
from halfstep.formats.recipe import Recipe

HEALTHY: dict[str, Any] = {"recipe": "nvfp4; layers=all"}
FAULTS: dict[str, dict[str, Any]] = {
    "HS128": {"recipe": "fp8_tensorwise; amax=delayed; layers=all", "grows": 2.5, "steps": 130},
    "HS129": {"recipe": "nvfp4; layers=all", "outlier": 1e4},
    "HS130": {"recipe": Recipe(weight_gradient=("mxfp4", "mxfp4"), layers="all"), "gradient": "cancels"},
    "HS131": {"recipe": "fp8_tensorwise; layers=all", "inputs": 60},
}


def trained(
    recipe: Any, grows: float = 1.0, steps: int = 1, outlier: float = 1.0, gradient: str = "", inputs: int = 64
) -> nn.Module:
    """A model after some steps; in the last one the batch is ``grows`` times as large as before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, 64))
    amp.set_products(model, recipe)
    for step in range(steps):
        x, g = torch.randn(64, inputs), torch.randn(64, 64)
        x[:, ::16] *= outlier
        if gradient:  # the sum over tokens cancels, and the noise does not
            x, g = torch.cat([x[:32], x[:32]]), torch.cat([g[:32], -g[:32] * 1.001])
        x = x * grows if step == 128 else x
        (model(x) * g).sum().backward()
    return model


@pytest.mark.parametrize("code", [*FAULTS, ""], ids=[*FAULTS, "healthy"])
def test_a_fault_has_its_finding_and_no_other(code: str) -> None:
    found = halfstep.check(trained(**FAULTS.get(code, HEALTHY)))
    about_formats = [each for each in found if "HS128" <= each.code <= "HS131"]
    assert [each.code for each in about_formats] == [code][: bool(code)]
    for each in about_formats:
        assert each.where.startswith("0: ")
        assert each.fix
        assert each.evidence


def test_measuring_changes_no_random_number() -> None:
    layer = nn.Linear(64, 64)
    amp.set_products(layer, "nvfp4")
    gradients = []
    for _ in range(2):  # the first pass is measured, the second is not
        torch.manual_seed(3)
        layer.zero_grad()
        layer(torch.randn(32, 64)).sum().backward()
        gradients.append((layer.weight.grad, torch.rand(1)))
    assert all(map(torch.equal, *gradients))  # type: ignore[arg-type]


def test_a_layer_that_has_not_trained_has_no_numbers() -> None:
    layer = nn.Linear(64, 64)
    amp.set_products(layer, "nvfp4")
    assert [each.code for each in halfstep.check(nn.Sequential(layer))] == []
