"""Casts of ``DTensor`` parameters: shards of FSDP2 and HSDP, and parameters split by tensor parallelism.

Such a parameter wraps a local tensor, which FSDP2 also keeps. So its data cannot be replaced like the data of a plain
parameter: torch swaps the contents of the two tensors, and FSDP2 then reads its parameters again.
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
    """Refuse sharded models whose parameters have no values yet, or can no longer be cast.

    Args:
        models: the models.
        dtype: the target dtype of their weights; None if they are not cast.
        trains: True if there is an optimizer.

    Raises:
        UsageError: if an optimizer would get parameters on the meta device, for which torch cannot allocate memory
            later; if FSDP2 casts to another dtype; if a model has run; or if a parameter has a weak reference, because
            torch then cannot swap it.
    """
    for model in models:
        names = {name: p for name, p in model.named_parameters() if is_sharded(p)}
        if trains and (empty := next((name for name, p in names.items() if p.is_meta), None)):
            raise UsageError(
                f"The sharded parameter {empty} is on the meta device, so it has no values from which a master could "
                "start, and to_empty() could no longer swap it. Use this order: create the model on the meta device, "
                "call parallelize_module or fully_shard, call model.to_empty(device=...), initialize the weights, "
                "create the optimizer, and call amp.initialize."
            )
        if dtype is None or all(p.dtype is dtype for p in names.values()):
            continue
        for module, policy in fsdp_policies(model.modules()):
            if policy.param_dtype not in (None, dtype):
                raise UsageError(
                    f"fully_shard was given MixedPrecisionPolicy(param_dtype={policy.param_dtype}), and this level "
                    f"casts the weights to {dtype}. Leave param_dtype out: then the shards are {dtype} and compute in "
                    "it. Or use O0 with that policy: it computes in 16 bits, and the fp32 shards are the masters."
                )
            if fsdp_has_run(module):
                raise UsageError(
                    "This model has already run since fully_shard, and FSDP2 keeps the dtypes of its first forward "
                    "pass. Call amp.initialize after fully_shard and before the first forward pass."
                )
        for name, param in names.items():
            if weakref.getweakrefcount(param):
                raise UsageError(
                    f"Other code holds a weak reference to the sharded parameter {name}, so torch cannot change its "
                    "dtype (torch.utils.swap_tensors). Call amp.initialize directly after fully_shard or "
                    "parallelize_module, before other tools get the model."
                )


def check_groups(model: nn.Module, dtypes: Mapping[int, torch.dtype]) -> None:
    """Refuse to give different dtypes to parameters that FSDP2 gathers together.

    Args:
        model: the model.
        dtypes: the target dtypes, by the ``id`` of the parameter; other parameters keep theirs.

    Raises:
        UsageError: if a group would have more than one dtype.
    """
    for names in fsdp_params(model):
        found = {name: dtypes.get(id(p), p.dtype) for name, p in names.items() if p.requires_grad}
        if len(set(found.values())) > 1:
            kinds = {dtype: name for name, dtype in reversed(found.items())}
            listed = " and ".join(f"{name} {dtype}" for dtype, name in reversed(kinds.items()))
            raise UsageError(
                f"FSDP2 gathers parameters together that would have different dtypes at this level: {listed}. First "
                "call fully_shard on each module that stays fp32 (BatchNorm, or modules of excluded_layers: here "
                f"{kinds.get(torch.float32, '').rpartition('.')[0]!r}). Nothing was changed."
            )


def cast_shards(model: nn.Module, dtypes: Mapping[int, torch.dtype]) -> None:
    """Cast sharded parameters and their gradients in place; parameters keep their identity.

    From now on FSDP2 reduces the gradients of 16-bit parameters in fp32, unless its policy names a dtype.

    Args:
        model: the model.
        dtypes: the target dtypes, by the ``id`` of the sharded parameter.
    """
    wanted = dict(dtypes)
    for param in model.parameters():
        if param.grad is not None and id(param) in dtypes:
            wanted[id(param.grad)] = dtypes[id(param)]
    of_fsdp = fsdp_policies(model.modules())
    own = {id(module) for module, _ in of_fsdp}
    for module in reversed(list(model.modules())):  # FSDP2 reads the parameters of a module and its submodules
        if id(module) in own or any(id(param) in dtypes for param in module.parameters(recurse=False)):
            apply_to_own(module, lambda tensor: tensor.to(wanted.get(id(tensor), tensor.dtype)))
    for module, policy in of_fsdp:
        if policy.reduce_dtype is None:
            set_fsdp_policy(module, dataclasses.replace(policy, reduce_dtype=torch.float32))
