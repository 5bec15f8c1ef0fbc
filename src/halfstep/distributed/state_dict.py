"""``torch.distributed.checkpoint`` and gradients that are fp32 on 16-bit parameters."""

from __future__ import annotations

import functools
import sys
from typing import Any

from ..core.dtypes import HALF_DTYPES
from ..gradients.ledger import HAS_GRAD_DTYPE

__all__ = ["soften"]

_SOFTENED = "_halfstep_softened"


def soften() -> None:
    """Let it make the state of an attached optimizer, for which it puts zeros of the parameter's dtype into ``p.grad``.

    Does nothing before ``torch.distributed.checkpoint.state_dict`` is imported.
    """
    module: Any = sys.modules.get("torch.distributed.checkpoint.state_dict")
    if module is None or hasattr(module, _SOFTENED) or not HAS_GRAD_DTYPE:
        return
    own = module._init_optim_state

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
        attached.gradients.expect(params)
        return result

    module._init_optim_state = init
    setattr(module, _SOFTENED, True)
