"""Multi-tensor operations over cached lists of tensors, on three backends.

``eager`` runs on ``torch._foreach`` anywhere and is the reference; ``compiled`` is C++ built by the system's compiler
for the CPU; ``triton`` is for CUDA. ``backend`` or ``HALFSTEP_BACKEND`` chooses.
"""

from .launch import BACKENDS, backend, backend_for
from .multi_tensor import axpby, copy, l2norm, scale, unscale_

__all__ = ["BACKENDS", "axpby", "backend", "backend_for", "copy", "l2norm", "scale", "unscale_"]
