"""A model whose weights are the fp32 masters, for averages and exports."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..casting.modules import ModuleHooks, remove_hooks
from ..core.checks import check_kind
from ..core.errors import UsageError
from ..parameters.master_registry import find_master
from ..parameters.masters import held_master
from ..torch_internals.torch_compat import forward_hooks

__all__ = ["master_model"]


def master_model(model: nn.Module) -> nn.Module:
    """Return the model in fp32: a module of the same structure whose parameters are the masters.

    ::

        averaged = torch.optim.swa_utils.AveragedModel(amp.master_model(model), avg_fn=...)
        ...
        averaged.update_parameters(amp.master_model(model))

    The module casts no ops and no inputs. Op casts of O1 apply to every model of the process, including this one; call
    it in ``amp.disable_casts()`` to avoid them. It shares values with the model: its parameters are the masters that
    ``amp.master_params`` yields, and parameters and buffers that do not have 16 bits are the model's own tensors. A
    deep copy is an independent, ordinary fp32 model.

    Args:
        model: a model, prepared by ``amp`` or not; it does not change.

    Returns:
        The module. Its parameters for 16-bit parameters without masters are fp32 copies.

    Raises:
        ArgumentTypeError: if ``model`` is not a module.
        UsageError: if the model is sharded by ``fully_shard``.
    """
    check_kind("amp.master_model: model", model, nn.Module, "a torch.nn.Module")
    if any(hasattr(type(module), "unshard") for module in model.modules()):
        raise UsageError(
            "amp.master_model was given a model sharded by fully_shard (FSDP2), which torch cannot copy. Its fp32 "
            "values are in model.state_dict(), and amp.master_params(optimizer) yields the masters of this rank."
        )
    tables = (forward_hooks(module).values() for module in model.modules())
    memo: dict[int, Any] = {id(hook): hook for hook in chain(*tables) if isinstance(hook, ModuleHooks)}  # removed below
    for tensor in [*model.parameters(), *model.buffers()]:
        memo[id(tensor)] = _wide(tensor)
    twin = copy.deepcopy(model, memo)
    remove_hooks(twin)
    return twin


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in (torch.float16, torch.bfloat16):
        return tensor
    stored = find_master(tensor)
    if stored is not None and stored.exists:
        master = held_master(tensor) if isinstance(tensor, nn.Parameter) else stored.read()
        master.detach()  # materialize it, because exports and model transforms read its memory without a Python call
        return master
    wide = tensor.detach().float()
    return nn.Parameter(wide, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else wide
