"""``apex.contrib.clip_grad``."""

from torch.nn.utils import clip_grad_norm_

from ...submodules import add_submodules

__all__ = ["clip_grad_norm_"]

add_submodules(__name__, {"clip_grad": " ".join(__all__)})
