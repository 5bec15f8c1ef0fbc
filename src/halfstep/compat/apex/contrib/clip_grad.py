"""``apex.contrib.clip_grad``."""

from torch.nn.utils import clip_grad_norm_

__all__ = ["clip_grad_norm_"]
