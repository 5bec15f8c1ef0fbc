"""The state dicts of a cast model: they hold fp32 values for weights with masters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..core.dtypes import HALF_DTYPES
from ..core.errors import UsageError
from ..parameters.held_masters import master_of, write_master
from ..parameters.master_registry import is_saved_elsewhere
from ..torch_internals.torch_compat import buffers_of, parameters_of, public_hook

__all__ = ["SaveAs", "load_masters"]


class SaveAs:
    """A state-dict hook of one module: its floating parameters and buffers are saved in ``dtype``.

    A parameter with an fp32 master is saved from the master, so that a checkpoint loses nothing. Most entries are
    copies: writing to them does not change the weights. A deep copy of the module has no masters, so its
    ``state_dict()`` holds its own tensors, and it can keep an average of weights.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._copied = False

    def __deepcopy__(self, memo: Any) -> SaveAs:
        made = SaveAs(self.dtype)
        made._copied = True
        return public_hook(made)

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Replace the module's own entries."""
        for name, tensor in [*parameters_of(module).items(), *buffers_of(module).items()]:
            key = prefix + name
            if tensor is None or tensor.dtype not in (torch.float32, *HALF_DTYPES) or key not in state_dict:
                continue  # no level casts float64
            master = master_of(tensor)
            if master is not None or not self._copied:
                # A copy of a master: torch.distributed.checkpoint loads into it before it calls load_state_dict.
                kept = state_dict[key] if master is None else master.detach()
                state_dict[key] = kept.to(self.dtype, copy=master is not None)


def load_masters(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any) -> None:
    """Load-state-dict pre-hook of one module: load masters from the values before they are rounded to 16 bits.

    The fp32 values of buffers (``buffers.UpdatedBuffers``) are loaded the same way.

    Raises:
        UsageError: if torch is set to swap parameters, which it refuses for those with masters.
    """
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    if swaps and any(master_of(param) is not None for param in module.parameters()):
        raise UsageError(
            "load_state_dict() cannot swap parameters that have fp32 masters, and "
            "torch.__future__.set_swap_module_params_on_conversion(True) asks for that. Set it to False before "
            "load_state_dict(): then the values are copied into the parameters and their masters. Nothing was loaded."
        )
    for name, param in [*parameters_of(module).items(), *buffers_of(module).items()]:
        value = state_dict.get(prefix + name)
        if param is None or param.is_meta:  # a master on the meta device has no value either
            continue
        if not isinstance(value, torch.Tensor) or value.shape != param.shape:
            continue
        # If the optimizer saves the masters, a 16-bit value here is a rounded master, whose fp32 value is in its state.
        if value.dtype is not param.dtype or is_saved_elsewhere(param):
            rounded = write_master(param, value)
            if rounded is not None:
                state_dict[prefix + name] = rounded
