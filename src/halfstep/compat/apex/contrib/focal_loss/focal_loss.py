"""The focal loss of detectors (Lin et al., arXiv 1708.02002), on torch's binary cross entropy."""

from __future__ import annotations

import torch
from torch.nn import functional as F

__all__ = ["FocalLoss", "focal_loss"]

_IGNORED = -2


def focal_loss(
    cls_output: torch.Tensor,
    cls_targets_at_level: torch.Tensor,
    num_positives_sum: torch.Tensor,
    num_real_classes: int,
    alpha: float,
    gamma: float,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute the focal loss of sigmoids in fp32, summed over anchors and classes, divided by the count of positives.

    Args:
        cls_output: logits of shape [..., classes].
        cls_targets_at_level: int64 of shape [...]: the class; -1 for background; -2 for an ignored anchor.
        num_positives_sum: the divisor, a tensor with one element.
        num_real_classes: the count of classes; logits of further classes are padding and are ignored.
        alpha: the weight of positives; negatives have the weight ``1 - alpha``.
        gamma: the focusing exponent, which reduces the weight of well classified examples.
        label_smoothing: ``s`` turns the targets 0 and 1 into ``s / 2`` and ``1 - s / 2``.

    Returns:
        A 0-dim tensor. The gradient has the dtype of ``cls_output``.
    """
    logits = cls_output[..., :num_real_classes]
    logits = logits if logits.dtype is torch.float64 else logits.float()
    target = cls_targets_at_level.unsqueeze(-1)
    positive = target == torch.arange(num_real_classes, dtype=torch.int64, device=logits.device)

    def where_positive(yes: float, no: float) -> torch.Tensor:
        return torch.where(positive, logits.new_full((), yes), logits.new_full((), no))

    smooth = where_positive(1.0 - label_smoothing / 2, label_smoothing / 2)
    entropy = F.binary_cross_entropy_with_logits(logits, smooth, reduction="none")
    # Compute (1 - p_t) ** gamma from its logarithm, whose gradient is finite even if p_t rounds to 1.
    missed = F.logsigmoid(torch.where(positive, -logits, logits))
    weight = where_positive(alpha, 1.0 - alpha) * torch.exp(gamma * missed)
    counts = torch.where(target == _IGNORED, 0.0, weight * entropy)
    return counts.sum() / num_positives_sum.to(logits.dtype).reshape(())


class FocalLoss:
    """A namespace for ``apply``: in Apex this was an ``autograd.Function``."""

    apply = staticmethod(focal_loss)
