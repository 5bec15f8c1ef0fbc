"""Let ``torch.distributed.checkpoint`` make the state of optimizers whose 16-bit parameters have fp32 gradients."""

from __future__ import annotations

import functools
import sys
from typing import Any

from ..core.dtypes import HALF_DTYPES
from ..core.torch_compat import HAS_GRAD_DTYPE, STATE_INIT

__all__ = ["patch_state_init"]

_PATCHED = "_halfstep_patched"


def patch_state_init() -> None:
    """Wrap the one function of it that puts zeros of the parameter's dtype into ``p.grad`` (torch 2.13).

    Does nothing if ``torch.distributed.checkpoint.state_dict`` has not been imported.
    """
    module: Any = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if module is None or hasattr(module, _PATCHED) or not HAS_GRAD_DTYPE:
        return
    own = getattr(module, STATE_INIT)

    @functools.wraps(own)
    def init(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        attached = getattr(optimizer, "_amp_stash", None)
        if attached is None:
            return own(optimizer, *args, **kwargs)
        params = attached.params()
        for param in params:
            if param.grad is None and param.dtype in HALF_DTYPES:
                param.grad_dtype = None
        result = own(optimizer, *args, **kwargs)
        attached.passes.gradients.expect(params)
        return result

    setattr(module, STATE_INIT, init)
    setattr(module, _PATCHED, True)
