"""The findings about formats, each in a training that has the fault and in one that has not."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import amp, formats
from halfstep.formats.recipe import Recipe

HEALTHY: dict[str, Any] = {"recipe": "nvfp4; layers=all"}
FAULTS: dict[str, dict[str, Any]] = {
    "HS128": {"recipe": "fp8_tensorwise; amax=delayed; layers=all", "grows": 2.5, "steps": 3},
    "HS129": {"recipe": "nvfp4; layers=all", "outlier": 1e4},
    "HS130": {"recipe": Recipe(weight_gradient=("mxfp4", "mxfp4"), layers="all"), "gradient": "cancels"},
    "HS131": {"recipe": "fp8_tensorwise; layers=all", "inputs": 60},
}


def trained(
    recipe: Any,
    grows: float = 1.0,
    steps: int = 1,
    outlier: float = 1.0,
    gradient: str = "",
    inputs: int = 64,
    measured: bool = True,
) -> nn.Module:
    """A model after some steps; in the last one, which is measured, the batch is ``grows`` times as large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, 64))
    amp.set_products(model, recipe)
    for step in range(steps):
        x, g = torch.randn(64, inputs), torch.randn(64, 64)
        x[:, ::16] *= outlier
        if gradient:  # the sum over tokens cancels, and the noise does not
            x, g = torch.cat([x[:32], x[:32]]), torch.cat([g[:32], -g[:32] * 1.001])
        x = x * grows if step == steps - 1 else x
        with formats.measuring() if measured and step == steps - 1 else nullcontext():
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


@pytest.mark.parametrize("name", ["nvfp4", "fp8_tensorwise; amax=delayed", "mxfp8_hp_wgrad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measuring_changes_no_number(name: str, dtype: torch.dtype) -> None:
    found = []
    for block in (nullcontext, formats.measuring):
        torch.manual_seed(3)
        layer = nn.Linear(64, 64, dtype=dtype)
        amp.set_products(layer, name)
        for _ in range(2):
            with block():
                layer(torch.randn(32, 64, dtype=dtype)).square().sum().backward()
        found.append([*(p.grad for p in layer.parameters()), torch.rand(1)])
    assert all(map(torch.equal, *found))


def places(model: nn.Module) -> list[str]:
    """The operands in which blocks become zero."""
    return [place for each in halfstep.check(model) if each.code == "HS129" for place in each.evidence["flushed"]]


def test_a_training_is_measured_where_it_is_asked_for(tmp_path: Path) -> None:
    recipe = "nvfp4; layers=all; hadamard=0"
    model = trained(recipe, outlier=1e4, measured=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x, g = torch.randn(64, 64), torch.randn(64, 64)
    x[:, ::16], g[::16] = x[:, ::16] * 1e4, g[::16] * 1e4
    with pytest.raises(ValueError, match="stop"), formats.measuring():
        raise ValueError("stop")
    (model(x) * g).sum().backward()
    assert places(model) == []
    halfstep.check(model, batch=x)
    assert places(model) == ["0: input"]
    amp.set_products(model, recipe)  # begins anew
    with halfstep.numerics.Monitor(model, optimizer) as monitor:
        (model(x) * g).sum().backward()
        optimizer.step()
    assert places(model) == ["0: input", "0: gradient, tokens"]
    assert "0: input, 0: gradient, tokens" in [each.where for each in monitor.findings() if each.code == "HS129"]
    monitor.report(tmp_path / "page.html")
    assert "HS129 warning at 0: input, 0: gradient, tokens" in (tmp_path / "page.html").read_text(encoding="utf-8")
    amp.set_products(model, recipe)
    found = halfstep.diagnose(lambda: (model(x) * g).sum(), model, optimizer).findings
    assert [each.where for each in found if each.code == "HS129"] == ["0: input, 0: gradient, tokens"]


def test_a_layer_that_has_not_trained_has_no_numbers() -> None:
    layer = nn.Linear(64, 64)
    amp.set_products(layer, "nvfp4")
    assert [each.code for each in halfstep.check(nn.Sequential(layer))] == []
