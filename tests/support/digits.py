"""scikit-learn's digits and a metric of torchmetrics.

Both libraries are imported when they are needed: they take seconds, which a run of other tests should not wait for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import torchmetrics


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 images of 8 x 8 with values from 0 to 16, as float32, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32), torch.tensor(data.target)


def accuracy(**options: Any) -> torchmetrics.Metric:
    import torchmetrics

    return torchmetrics.Accuracy(task="multiclass", num_classes=10, **options)
