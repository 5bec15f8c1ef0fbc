"""Multi-tensor operations and elementwise kernels, on four backends.

``eager`` runs on ``torch._foreach`` anywhere and is the reference. ``compiled`` is C++ for the CPU, built by the
system's compiler; without one, ``torch`` runs torch's own fused steps. ``triton`` is for CUDA. ``backend`` or
``HALFSTEP_BACKEND`` chooses.
"""

from .launch import BACKENDS, backend, backend_for
from .multi_tensor import axpby, copy, l2norm, scale, unscale_

__all__ = ["BACKENDS", "axpby", "backend", "backend_for", "copy", "l2norm", "scale", "unscale_"]
__dir__ = __all__.copy
