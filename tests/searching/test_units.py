"""What one watched pass in fp32 says of a module is what ModelOpt's AutoCast says of a node of ONNX.

The tensors, limits and answers are the cases of AutoCast's ``test_nodeclassifier.py``. Axes that a tensor does not have
are errors in torch. AutoCast's lists of names and types are ``keep=``; what it forces to 16 bits, a search decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from halfstep.searching.units import Seen, chosen, watched


class Node(nn.Module):
    """A node: a function, with weights."""

    def __init__(self, function: Callable[..., Any], *weights: torch.Tensor) -> None:
        super().__init__()
        self.function, self.weights = function, nn.ParameterList(weights)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(*inputs, *self.weights)
        return result


def seen(node: nn.Module, *inputs: torch.Tensor) -> Seen:
    model = nn.ModuleDict({"node": node})
    return watched(model, lambda: model["node"](*inputs))


def ones(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes)


@pytest.mark.parametrize("size", [9e3, 11e3, -9e3, -11e3])
@pytest.mark.parametrize("place", ["a weight", "an input", "a result"])
def test_a_number_beyond_the_limit_is_noted(size: float, place: str) -> None:
    value = torch.tensor([size])
    node, inputs = {
        "a weight": (Own(value), ()),
        "an input": (Node(torch.zeros_like), (value,)),
        "a result": (Node(lambda x: x + value), (torch.zeros(1),)),
    }[place]
    assert seen(node, *inputs).beyond(1e4, math.inf) == ({"node"} if abs(size) > 1e4 else set())


class Own(nn.Module):
    """A module with a weight of its own that it does not read."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(value)

    def forward(self) -> torch.Tensor:
        return torch.zeros(1)


SUMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], bool]] = {
    "matmul of 50": (torch.matmul, (ones(10, 50), ones(50, 30)), True),
    "matmul of 10": (torch.matmul, (ones(5, 10), ones(10, 8)), False),
    "convolution of 288": (functional.conv2d, (ones(1, 32, 64, 64), ones(64, 32, 3, 3)), True),
    "convolution of 32": (functional.conv2d, (ones(1, 8, 16, 16), ones(16, 8, 2, 2)), False),
    "sum of 100": (lambda x: x.sum(1), (ones(10, 100, 20),), True),
    "sum of 20": (lambda x: torch.sum(x, dim=2), (ones(10, 100, 20),), False),
    "sum of a weight": (lambda x: x.sum(dim=[1]), (ones(10, 50),), True),
    "running sum of 100": (lambda x: x.cumsum(-1), (ones(10, 20, 100),), True),
    "running sum of 20": (lambda x: x.cumsum(-2), (ones(10, 20, 100),), False),
    "running sum of 10": (lambda x: torch.cumsum(x, -3), (ones(10, 20, 100),), False),
    "linear of 50": (functional.linear, (ones(10, 50), ones(30, 50)), True),
    "addmm of 10": (torch.addmm, (ones(5, 50), ones(5, 10), ones(10, 50)), False),
    "mean of all": (torch.mean, (ones(5, 10),), True),
    "no sum": (torch.add, (ones(100), ones(100)), False),
}


@pytest.mark.parametrize("case", SUMS)
def test_a_sum_of_many_terms_is_noted(case: str) -> None:
    function, inputs, many = SUMS[case]
    assert seen(Node(function), *inputs).beyond(math.inf, 40) == ({"node"} if many else set())


@pytest.mark.parametrize(
    ("batches", "beyond"),
    [
        ([[[0.2, 0.3], [0.3, 0.4]]], {"add", "mul"}),  # what one returns, the next reads
        ([[[-0.5, -1.5], [-3.0, -4.0]]], set()),
        ([[[0.1, 0.2], [0.2, -0.3]], [[0.3, 0.4], [0.4, 0.5]]], {"add", "mul"}),  # the largest of all batches
    ],
)
def test_the_limit_holds_along_a_model(batches: list[Any], beyond: set[str]) -> None:
    y = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    model = nn.ModuleDict({"add": Node(torch.add, y), "mul": Node(torch.mul, torch.full((2, 2), 0.5))})
    record = watched(model, lambda: [model["mul"](model["add"](torch.tensor(batch))) for batch in batches])
    assert {name.partition(".")[0] for name in record.beyond(4.1, math.inf)} == beyond


def test_ops_that_are_in_fp32_at_o1_are_no_units() -> None:
    assert seen(Node(lambda x, w: (x @ w).softmax(-1).relu()), ones(2, 2), ones(2, 2)).ops() == ["matmul", "relu"]


def test_names_are_patterns() -> None:
    names = ["layer.0.add_1", "layer.1.mul_2", "layer.2.sub_1", "layer.2.mul_2"]
    assert chosen(names, ["*add*", "layer.1"]) == names[:2]
