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
from ..parameters.master_registry import find_master, keeper_of
from ..torch_internals.torch_compat import forward_hooks

__all__ = ["master_model"]


def master_model(model: nn.Module) -> nn.Module:
    """The model in fp32: a module of the same structure whose parameters are the masters of the model's.

    ::

        averaged = torch.optim.swa_utils.AveragedModel(amp.master_model(model), avg_fn=...)
        ...
        averaged.update_parameters(amp.master_model(model))

    It has no casts of its own. The casts of ops at O1 reach every model of the process, and this one too, unless it is
    called in ``amp.disable_casts()``. It shares its values with the model: a parameter with a master is what
    ``amp.master_params`` yields, and parameters and buffers that are not of 16 bits are the model's own. A deep copy of
    it is an ordinary fp32 model with values of its own.

    Args:
        model: one that ``amp.initialize`` or ``amp.decorate`` returned, or any other; not changed.

    Returns:
        The module. 16-bit parameters without a master are fp32 copies in it.

    Raises:
        ArgumentTypeError: for something else than a module.
        UsageError: for a model that ``fully_shard`` has cut.
    """
    check_kind("amp.master_model: model", model, nn.Module, "a torch.nn.Module")
    if any(hasattr(type(module), "unshard") for module in model.modules()):
        raise UsageError(
            "amp.master_model was given a model that fully_shard (FSDP2) has cut, and torch copies no such model. Its "
            "fp32 values are in model.state_dict(), and amp.master_params(optimizer) has the masters of this rank."
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
    keeper, stored = keeper_of(tensor), find_master(tensor)
    if keeper is not None and stored is not None and stored.exists:
        master = keeper.view(tensor)
        master.detach()  # has memory from here on: exports and transforms of models read it past Python
        return master
    wide = tensor.detach().float()
    return nn.Parameter(wide, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else wide
