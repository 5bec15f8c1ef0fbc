"""``apex.multi_tensor_apply``."""

from ..multi_tensor import MultiTensorApply, multi_tensor_applier
from ..submodules import add_submodules

__all__ = ["MultiTensorApply", "multi_tensor_applier"]

add_submodules(__name__, {"multi_tensor_apply": " ".join(__all__)})
