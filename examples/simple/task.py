"""What the four scripts share: their arguments, and a linear layer that they learn to copy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class Task:
    """Inputs of shape [batch, inputs] and targets of shape [batch, outputs], fp32 on the device."""

    x: torch.Tensor
    y: torch.Tensor
    model: torch.nn.Linear


def make_task(device: str, batch: int = 64, inputs: int = 128, outputs: int = 16) -> Task:
    torch.manual_seed(0)
    truth, model = torch.nn.Linear(inputs, outputs), torch.nn.Linear(inputs, outputs)
    x = torch.randn(batch, inputs)
    with torch.no_grad():
        y = truth(x)
    return Task(x.to(device), y.to(device), model.to(device))


def parse(argv: Sequence[str] | None, doc: str | None, **defaults: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--steps", type=int, default=200)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default)
    return parser.parse_args(argv)


def report(first: torch.Tensor, last: torch.Tensor) -> tuple[float, float]:
    print(f"loss {first.item():.4f} -> {last.item():.6f}")
    return first.item(), last.item()
