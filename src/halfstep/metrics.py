"""``Accuracy`` for ``Model.prepare``, after ``paddle.metric.Accuracy``; torchmetrics counts and sums over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .core.checks import check_count, check_kind
from .core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from .core.text import install_line

__all__ = ["Accuracy"]
__dir__ = __all__.copy


class Accuracy:
    """The share of samples whose label is among the classes with the highest scores.

    ::

        model.prepare(optimizer, nn.CrossEntropyLoss(), halfstep.metrics.Accuracy(topk=(1, 5)))

    Args:
        topk: a number k, or several: a label counts if it is among the k highest scores.
        name: the name under which the value is reported, "acc" by default. With ``topk=(1, 5)`` there are two values,
            "acc_top1" and "acc_top5".

    Raises:
        UsageError: if torchmetrics is not installed.
        ArgumentTypeError: if ``topk`` is neither a number nor a list of numbers, or ``name`` is not a string.
        ArgumentValueError: if ``topk`` is empty or has a number below 1.
    """

    def __init__(self, topk: int | Sequence[int] = (1,), name: str | None = None) -> None:
        check_kind("topk", topk, (int, tuple, list), "a number or a list of numbers")
        self.topk = (topk,) if isinstance(topk, int) else tuple(topk)
        for k in self.topk:
            check_count("topk", k)
        if not self.topk:
            raise ArgumentValueError("topk=() must have a number; (1,) is ordinary accuracy.")
        if name is not None:
            check_kind("name", name, str, "a text")
        self.names = [name or "acc"] if max(self.topk) == 1 else [f"{name or 'acc'}_top{k}" for k in self.topk]
        try:
            import torchmetrics  # noqa: F401 - takes a second; better here than in the first batch
        except ImportError:
            raise UsageError(f"metrics.Accuracy needs torchmetrics: {install_line('metrics')}") from None
        self._counts: list[Any] = []

    def reset(self) -> None:
        """Reset all counts."""
        self._counts = []

    def update(self, prediction: torch.Tensor, label: torch.Tensor) -> None:
        """Count a batch.

        Args:
            prediction: scores or probabilities of shape (N, C), or (N, C, ...), with the classes second.
            label: the class of each sample, of shape (N,) or (N, ...); or (N, 1); or one-hot, of the shape of
                ``prediction``.

        Raises:
            ArgumentTypeError: if an argument is not a tensor.
            ArgumentValueError: for shapes that do not match, and for fewer classes than ``topk`` counts.
        """
        for given, what in ((prediction, "prediction"), (label, "label")):
            if not isinstance(given, torch.Tensor):
                raise ArgumentTypeError(f"{what} must be a tensor, not {type(given).__name__}.")
        classes = prediction.shape[1] if prediction.dim() > 1 else 0
        if classes < max(self.topk):
            raise ArgumentValueError(
                f"prediction has the shape {list(prediction.shape)}, and topk={self.topk} needs scores of at least "
                f"{max(self.topk)} classes in its second dimension."
            )
        if label.dim() == prediction.dim() and label.shape[1] == 1:
            label = label.squeeze(1)
        elif label.shape == prediction.shape:
            label = label.argmax(1)
        if label.shape != prediction.shape[:1] + prediction.shape[2:]:
            raise ArgumentValueError(
                f"label has the shape {list(label.shape)}, which does not fit to predictions of the shape "
                f"{list(prediction.shape)}: give one class for each sample."
            )
        if not self._counts:
            from torchmetrics.classification import MulticlassAccuracy

            # torchmetrics' checks of values would read the device in every batch.
            options = {"num_classes": classes, "average": "micro", "validate_args": False}
            self._counts = [MulticlassAccuracy(top_k=k, **options).to(prediction.device) for k in self.topk]
        for count in self._counts:
            count.update(prediction, label)

    def compute(self) -> dict[str, float]:
        """Return the share by name over all batches since ``reset`` and all ranks; an empty dict if there were none."""
        return {name: count.compute().item() for name, count in zip(self.names, self._counts, strict=False)}
