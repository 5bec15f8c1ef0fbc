"""The cast of parameters that are ``DTensor``: shards of FSDP2 and of HSDP, and what tensor parallelism has cut.

Such a parameter is a tensor around a local one, and FSDP2 remembers the local one. So its data cannot be replaced as
the data of a plain parameter can: torch swaps the contents of the two tensors, and FSDP2 looks at its parameters anew.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ..core.errors import UsageError
from ..kernels.shards import is_sharded
from ..torch_internals.torch_compat import apply_to_own, fsdp_has_run, fsdp_params, fsdp_policies, set_fsdp_policy

__all__ = ["cast_shards", "check_groups", "check_sharded"]


def check_sharded(models: Iterable[nn.Module], dtype: torch.dtype | None, *, trains: bool = False) -> None:
    """Refuse sharded models whose parameters have no values yet, or cannot be cast any more.

    Args:
        models: the models.
        dtype: the dtype that their weights are to be cast to; None if they are not cast.
        trains: True if there is an optimizer.

    Raises:
        UsageError: if an optimizer would get parameters on the meta device, which torch cannot give memory later; if
            FSDP2 casts to another dtype; if a model has run; or if there is a weak reference to a parameter,
            which torch cannot swap then.
    """
    for model in models:
        names = {name: p for name, p in model.named_parameters() if is_sharded(p)}
        if trains and (empty := next((name for name, p in names.items() if p.is_meta), None)):
            raise UsageError(
                f"The sharded parameter {empty} is on the meta device, so it has no values from which a master could "
                "start, and to_empty() could not swap it any more. The order is: the model on the meta device, "
                "parallelize_module or fully_shard, model.to_empty(device=...), the weights, the optimizer, and then "
                "amp.initialize."
            )
        if dtype is None or all(p.dtype is dtype for p in names.values()):
            continue
        for module, policy in fsdp_policies(model.modules()):
            if policy.param_dtype not in (None, dtype):
                raise UsageError(
                    f"fully_shard was given MixedPrecisionPolicy(param_dtype={policy.param_dtype}), and this level "
                    f"makes the weights {dtype}. Leave param_dtype out: the shards are {dtype} then, and so is what "
                    "they compute. Or use O0 with that policy: it computes in 16 bits, and fp32 shards are the masters."
                )
            if fsdp_has_run(module):
                raise UsageError(
                    "This model has run once since fully_shard, and FSDP2 goes on with the dtypes that it found then. "
                    "Call amp.initialize after fully_shard and before the first forward pass."
                )
        for name, param in names.items():
            if weakref.getweakrefcount(param):
                raise UsageError(
                    f"Somebody holds a weak reference to the sharded parameter {name}, and torch cannot change the "
                    "dtype of one that has them (torch.utils.swap_tensors). Call amp.initialize directly after "
                    "fully_shard or parallelize_module, before other tools see the model."
                )


def check_groups(model: nn.Module, dtypes: Mapping[int, torch.dtype]) -> None:
    """Refuse to give parameters that FSDP2 gathers together more than one dtype, which it cannot do.

    Args:
        model: the model.
        dtypes: the dtype that each parameter is to be cast to, by the parameter's identity. Others stay as they are.

    Raises:
        UsageError: if they are.
    """
    for names in fsdp_params(model):
        found = {name: dtypes.get(id(p), p.dtype) for name, p in names.items() if p.requires_grad}
        if len(set(found.values())) > 1:
            kinds = {dtype: name for name, dtype in reversed(found.items())}
            listed = " and ".join(f"{name} {dtype}" for dtype, name in reversed(kinds.items()))
            raise UsageError(
                f"FSDP2 gathers parameters together that would have different dtypes at this level: {listed}. Call "
                "fully_shard on the modules that stay fp32 first (BatchNorm, or those of excluded_layers: here "
                f"{kinds.get(torch.float32, '').rpartition('.')[0]!r}), each by itself. Nothing was changed."
            )


def cast_shards(model: nn.Module, dtypes: Mapping[int, torch.dtype]) -> None:
    """Cast sharded parameters in place, and their gradients. Parameters keep identity.

    FSDP2 reduces the gradients of what is cast to 16 bits in fp32 from now on, unless its policy names a dtype.

    Args:
        model: the model.
        dtypes: the dtype that each sharded parameter is to be cast to, by the parameter's identity.
    """
    wanted = dict(dtypes)
    for param in model.parameters():
        if param.grad is not None and id(param) in dtypes:
            wanted[id(param.grad)] = dtypes[id(param)]
    of_fsdp = fsdp_policies(model.modules())
    own = {id(module) for module, _ in of_fsdp}
    for module in reversed(list(model.modules())):  # FSDP2 looks at the parameters of a module and of those below it
        if id(module) in own or any(id(param) in dtypes for param in module.parameters(recurse=False)):
            apply_to_own(module, lambda tensor: tensor.to(wanted.get(id(tensor), tensor.dtype)))
    for module, policy in of_fsdp:
        if policy.reduce_dtype is None:
            set_fsdp_policy(module, dataclasses.replace(policy, reduce_dtype=torch.float32))
