"""The inputs behind ``golden/apex_amp.json``, rebuilt from the formulas its ``setup`` entries state.

Integers, one division, one product, one sum and one rounding: any machine makes the same bits.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

GOLDEN = Path(__file__).parents[1] / "golden"


@cache
def golden(name: str) -> dict[str, Any]:
    """The facts of one JSON file."""
    return json.loads((GOLDEN / f"{name}.json").read_text())


def grid(shape: tuple[int, ...], k: int = 0, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
    """``((37 i + 17 k) mod 101 - 50) / 97 * scale + shift`` over the row-major index i, in float64, as float32."""
    index = torch.arange(torch.Size(shape).numel())
    whole = ((37 * index + 17 * k) % 101 - 50).double()
    return (whole / 97.0 * scale + shift).float().reshape(shape)


def fill(module: nn.Module, **values: torch.Tensor) -> None:
    with torch.no_grad():
        for name, value in values.items():
            getattr(module, name).copy_(value)


def net() -> nn.Sequential:
    """Linear(3, 4, no bias), BatchNorm1d(4), ReLU, Linear(4, 3)."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    fill(model[0], weight=grid((4, 3), 1))
    fill(model[1], weight=grid((4,), 3, 0.25, 1.0), bias=grid((4,), 4, 0.25))
    fill(model[3], weight=grid((3, 4), 5), bias=grid((3,), 6, 0.5))
    return model


def batch(t: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input (8, 3), class target (8,), regression target (8, 3) of step t."""
    return grid((8, 3), 100 + 7 * t, 2.0), (5 * torch.arange(8) + t) % 3, grid((8, 3), 200 + 3 * t)


def branch(k: int) -> nn.Sequential:
    """Linear(3, 3), Tanh, Linear(3, 2) from the grids k to k + 3."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    fill(model[0], weight=grid((3, 3), k), bias=grid((3,), k + 1, 0.5))
    fill(model[2], weight=grid((2, 3), k + 2), bias=grid((2,), k + 3, 0.5))
    return model


def optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    """The optimizers under their recorded names."""
    makers = {
        "sgd": lambda: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        "sgd64": lambda: torch.optim.SGD(params, lr=0.1 / 64, momentum=0.9),
        "adam": lambda: torch.optim.Adam(params, lr=0.01, eps=1e-4),
        "adam_eps1e-8": lambda: torch.optim.Adam(params, lr=0.01),
    }
    return makers[name]()


def flat(tensor: torch.Tensor) -> list[float]:
    return tensor.detach().double().flatten().tolist()


def numbers(values: list[Any]) -> torch.Tensor:
    """A recorded list, with "inf" and "nan" as numbers."""
    return torch.tensor([float(v) for v in values], dtype=torch.float64)


def assert_near(ours: Any, theirs: list[Any], relative: float = 1e-3, what: str = "") -> None:
    """Equal within ``relative`` of the largest recorded magnitude, non-finite values exactly."""
    a = torch.as_tensor(ours, dtype=torch.float64).flatten() if not isinstance(ours, torch.Tensor) else ours.double()
    b = numbers(theirs)
    finite = b[b.isfinite()]
    floor = relative * (float(finite.abs().max()) if finite.numel() else 1.0)
    torch.testing.assert_close(a.flatten(), b, rtol=relative, atol=floor, equal_nan=True, msg=lambda m: f"{what}: {m}")
