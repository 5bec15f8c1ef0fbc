"""``halfstep.metrics.Accuracy``: what it counts, as Paddle's does, and what it refuses."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from halfstep.core.errors import UsageError
from halfstep.metrics import Accuracy

N, C = 50, 7


def scores(*more: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random scores of seven classes, and labels."""
    return torch.randn(N, C, *more), torch.randint(C, (N, *more))


def by_hand(k: int, prediction: torch.Tensor, label: torch.Tensor) -> float:
    return (prediction.topk(k, 1).indices == label.unsqueeze(1)).any(1).float().mean().item()


@pytest.mark.parametrize("more", [(), (3,)], ids=["(N, C)", "(N, C, 3)"])
@pytest.mark.parametrize("k", [1, 2, 7])
def test_it_counts_over_batches_until_it_is_reset(k: int, more: tuple[int, ...]) -> None:
    prediction, label = scores(*more)
    metric = Accuracy(topk=k)
    metric.update(*scores(*more))
    metric.reset()
    for part in (slice(0, 20), slice(20, N)):
        metric.update(prediction[part], label[part])
    assert list(metric.compute().values()) == [pytest.approx(by_hand(k, prediction, label))]


def test_labels_may_be_a_column_or_one_hot() -> None:
    prediction, label = scores()
    found = []
    for given in (label, label.unsqueeze(1), torch.nn.functional.one_hot(label, C)):
        metric = Accuracy()
        metric.update(prediction, given)
        found.append(metric.compute())
    assert found == [{"acc": pytest.approx(by_hand(1, prediction, label))}] * 3


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, ["acc"]),
        ({"topk": (1, 5)}, ["acc_top1", "acc_top5"]),
        ({"topk": [5]}, ["acc_top5"]),
        ({"name": "digits"}, ["digits"]),
        ({"topk": (1, 2), "name": "digits"}, ["digits_top1", "digits_top2"]),
    ],
)
def test_names_are_those_of_paddle(arguments: dict[str, Any], names: list[str]) -> None:
    metric = Accuracy(**arguments)
    assert metric.compute() == {}, "nothing was counted"
    metric.update(*scores())
    assert list(metric.compute()) == names


def test_without_torchmetrics_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(UsageError, match=r"needs torchmetrics: pip install '\.\[metrics\]'"):
        Accuracy()
