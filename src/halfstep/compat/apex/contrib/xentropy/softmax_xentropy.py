"""Cross entropy with label smoothing, on ``torch.nn.functional.cross_entropy``."""

from __future__ import annotations

import torch
from torch.nn import functional as F

__all__ = ["SoftmaxCrossEntropyLoss"]


class SoftmaxCrossEntropyLoss:
    """A namespace for ``apply``: in Apex this was an ``autograd.Function``, which has no instances."""

    @staticmethod
    def apply(
        logits: torch.Tensor,
        labels: torch.Tensor,
        smoothing: float = 0.0,
        padding_idx: int = 0,
        half_to_float: bool = False,
    ) -> torch.Tensor:
        """Compute each label's loss ``(1 - smoothing) * -log p[label] + smoothing * mean(-log p)`` in fp32.

        Args:
            logits: a floating tensor of shape [..., classes].
            labels: an int64 tensor of shape [...].
            smoothing: the share of a label that is spread over all classes.
            padding_idx: a label whose loss and gradient are zero. The default is class 0, as in Apex.
            half_to_float: return float32 losses instead of losses in the dtype of the logits.

        Returns:
            Losses of the shape of ``labels``. The gradient has the dtype of the logits.
        """
        in_fp32 = logits if logits.dtype is torch.float64 else logits.float()
        losses = F.cross_entropy(
            in_fp32.flatten(0, -2),
            labels.flatten(),
            ignore_index=padding_idx,
            reduction="none",
            label_smoothing=smoothing,
        ).view_as(labels)
        return losses.float() if half_to_float else losses.to(logits.dtype)
