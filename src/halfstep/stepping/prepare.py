"""Preparation of models and optimizers for a policy, shared by ``initialize``, ``decorate`` and ``Model``.

``prepare`` does both. ``prepare_optimizer`` can run after ``prepare_model``, for an optimizer created later.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..casting import modules
from ..casting.scope import OpCasting
from ..casting.sharded import check_sharded
from ..core.dtypes import HALF_DTYPES, StateForm, is_half
from ..core.errors import UsageError
from ..core.inner_optimizers import inner_optimizer, params_of, unwrap
from ..core.policy import Policy
from ..kernels.launch import backend_for
from ..optimizers.base import FusedOptimizer
from ..optimizers.fuse import can_fuse, has_moments
from ..optimizers.release import release_of
from ..parameters.ledger import set_grads
from ..parameters.master_registry import keeper_of
from ..parameters.table import record_of
from ..torch_internals.torch_compat import HAS_GRAD_DTYPE, is_flattened
from .attached import AttachedOptimizer, attach, refuse_attached, share_overflows

__all__ = ["check", "check_state_form", "prepare", "prepare_model", "prepare_optimizer"]

logger = logging.getLogger("halfstep")


def prepare(
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    policy: Policy,
    *,
    fused: bool,
    verbose: bool = True,
    **options: Any,
) -> list[AttachedOptimizer]:
    """Prepare models, and the optimizers that train them, for a policy.

    Call ``check`` first: an error in the middle of ``prepare`` would leave some models and optimizers changed.

    Args:
        models: the models, changed in place; see ``prepare_model``.
        optimizers: the optimizers, changed in place; see ``prepare_optimizer``.
        policy: the dtypes of weights, computation, gradients and state.
        fused: True to fuse torch's optimizers if possible.
        verbose: True to log skipped steps.
        options: further arguments of ``prepare_model``.
    """
    originals: dict[int, torch.Tensor] = {}
    for model in models:
        originals |= prepare_model(model, policy, keep_originals=policy.master_weights and bool(optimizers), **options)
    # A fused optimizer keeps masters in its own state, but optimizers that share a parameter must share its master.
    owners = Counter(map(id, params_of(*optimizers)))
    alone = set(owners.values()) <= {1}
    attached = [
        prepare_optimizer(one, policy, models, originals=originals, fused=fused and alone, own=alone, verbose=verbose)
        for one in optimizers
    ]
    if not alone:
        share_overflows(attached)
    for param in {p for model in models for p in model.parameters() if options.get("save_dtype") is torch.float32}:
        record_of(param).saved_by_model = keeper_of(param) is not None
    return attached


def prepare_model(
    model: nn.Module,
    policy: Policy,
    *,
    casting: OpCasting | None = None,
    keep: Callable[[nn.Module], bool] | None = None,
    chosen: Mapping[nn.Module, torch.dtype] = MappingProxyType({}),
    save_dtype: torch.dtype | None = None,
    keep_originals: bool = False,
    wide_grads: bool = False,
) -> dict[int, torch.Tensor]:
    """Cast a model and register its hooks.

    Args:
        model: the model, changed in place.
        policy: the dtypes of weights, computation, gradients and state.
        casting: the op casting while the model runs.
        keep: a function that returns True for modules that keep their dtype; None keeps BatchNorm if the policy does.
        chosen: the dtypes of single modules; see ``casting.modules.cast_module``. With fp32 weights only fp32 is valid.
        save_dtype: the dtype of floating-point entries in ``state_dict()`` of the model; None leaves them unchanged.
        keep_originals: True to return the fp32 weights, and to keep existing gradients in fp32.
        wide_grads: True to give 16-bit parameters fp32 gradients even without masters.

    Returns:
        With ``keep_originals``, the fp32 values of the weights that were cast to 16 bits, by the ``id`` of the
        parameter.
    """
    originals: dict[int, torch.Tensor] = {}
    fp32_buffers: list[str] = []
    if policy.param_dtype is not None:
        before = {id(p): p.detach() for p in model.parameters() if keep_originals and p.requires_grad}
        stays_wide = wide_grads or keep_originals
        grads = [(p, p.grad) for p in model.parameters() if stays_wide and p.grad is not None]
        for param, _ in grads:
            param.grad = None
        try:
            fp32_buffers = modules.cast_module(
                model,
                policy.param_dtype,
                keep=keep or (lambda module: policy.keep_batchnorm_fp32 and isinstance(module, modules.BatchNorm)),
                chosen=chosen,
                spare_buffers=casting is not None and casting.retries,
            )
        finally:  # `cast_module` may refuse a group of FSDP2
            for param, grad in grads:
                set_grads([param], [grad.to(torch.promote_types(param.dtype, torch.float32))])
        for param in model.parameters():
            weight = before.get(id(param))
            if weight is not None and is_half(param) and not is_half(weight):
                originals[id(param)] = weight
            if wide_grads and HAS_GRAD_DTYPE and is_half(param):
                param.grad_dtype = torch.float32
    if policy.param_dtype not in HALF_DTYPES:
        wide = {module: dtype for module, dtype in chosen.items() if dtype is torch.float32}
        modules.add_borders(model, wide, None, retries=policy.casts_ops)
    modules.add_hooks(
        model,
        inputs=None if policy.casts_ops else policy.compute_dtype,
        outputs=policy.output_dtype,
        saved=save_dtype,
        casting=None if modules.has_casting(model) else casting,
        always_retries=bool(policy.cast_ops or policy.op_lists or torch.float32 in chosen.values()),
        fp32_buffers=fp32_buffers,
    )
    return originals


def prepare_optimizer(
    optimizer: Any,
    policy: Policy,
    models: Iterable[nn.Module] = (),
    *,
    originals: dict[int, torch.Tensor] | None = None,
    fused: bool,
    own: bool = True,
    verbose: bool = True,
    delegates_to_outer: bool = False,
) -> AttachedOptimizer:
    """Attach an optimizer, with masters if the policy has them.

    Args:
        optimizer: a ``torch.optim.Optimizer``, or a wrapper, which still calls the ``step`` of its inner optimizer.
        policy: the policy of its models.
        models: the models that it trains.
        originals: the result of ``prepare_model``: the initial values of masters.
        fused: True to fuse torch's Adam, AdamW, SGD, Adagrad and Muon, if their settings allow it and the device has
            kernels. A fused optimizer has the same arithmetic, and keeps masters.
        own: True if an optimizer may keep its masters in its own state; False if it shares a parameter.
        verbose: True to log skipped steps.
        delegates_to_outer: True if another attached optimizer contains this optimizer and sends the messages to ranks.
    """
    optimizer = unwrap(optimizer)
    masters = policy.master_weights
    sharded = _sharded_state(optimizer)
    if sharded is not None:  # the inner optimizer steps the parameters of this rank
        prepare_optimizer(
            sharded, policy, (), originals=originals, fused=fused, verbose=verbose, delegates_to_outer=True
        )
    elif inner_optimizer(optimizer) is not None:
        own = False  # the step of a wrapper may write to weights, so it must find masters in the groups
    attached = attach(
        optimizer,
        fused=masters and fused and sharded is None and _gains(optimizer, policy.state_dtype is not None),
        masters="elsewhere" if masters and sharded is not None else masters,
        originals=originals,
        own=own,
        models=models,
        verbose=verbose,
        delegates_to_outer=delegates_to_outer,
    )
    if not masters and isinstance(optimizer, torch.optim.SGD) and not isinstance(optimizer, FusedOptimizer):
        _leave_broken_step(optimizer)
        optimizer.register_load_state_dict_post_hook(_leave_broken_step)  # loading restores the saved options
    if policy.state_dtype is not None and isinstance(optimizer, FusedOptimizer):
        optimizer.keep_moments(policy.state_dtype)
    if not masters and optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # torch casts the state to the parameters' new dtype
    return attached


def check(
    caller: str,
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    dtype: torch.dtype | None,
    *,
    again: bool = False,
) -> None:
    """Refuse models and optimizers that ``prepare`` does not support.

    Args:
        caller: the function that user code called, for error messages.
        models: the models.
        optimizers: the optimizers.
        dtype: the dtype to which ``prepare`` will cast the weights; None if it does not cast them.
        again: True if the models may already be prepared.

    Raises:
        UsageError: if a model or optimizer is in a list twice, is already prepared, or is not supported.
    """
    if len(set(map(id, models))) < len(models) or len({id(unwrap(one)) for one in optimizers}) < len(optimizers):
        raise UsageError(f"A model or optimizer is in the list twice; give {caller} each one once.")
    for optimizer in map(unwrap, optimizers):
        if _sharded_state(optimizer) is not None and dtype is not None and optimizer.parameters_as_bucket_view:
            raise UsageError(
                f"{caller}: the ZeroRedundancyOptimizer was made with parameters_as_bucket_view=True. It sends weights "
                "from fp32 buckets, and casting would detach the weights from them, so each rank would train a "
                f"different model. Remove that argument, or cast the weights to {dtype} before you make the optimizer."
            )
    for model in models:
        if any(isinstance(part, torch.jit.ScriptModule) for part in (model.modules() if dtype else (model,))):
            raise UsageError(f"{caller} cannot change a torch.jit.ScriptModule; pass the module before you script it.")
        if not again and modules.has_casting(model):
            raise UsageError(
                "This model was already prepared by amp.initialize or amp.decorate, and a model can be prepared only "
                "once. To train layers that were frozen, call optimizer.add_param_group({'params': "
                "layer.parameters()}). In a notebook, first rerun the cell that makes the model and the optimizer."
            )
        for name, param in model.named_parameters():
            if is_lazy(param):
                raise UsageError(
                    f"The parameter {name} has no shape yet (a lazy module), so {caller} cannot cast it; run one batch "
                    "through the model first."
                )
            if dtype is not None and is_flattened(param) and param.dtype is not dtype:
                raise UsageError(
                    f"FullyShardedDataParallel (FSDP1) has flattened the parameter {name}, and {caller} would cast it "
                    "at this level, but FSDP would keep using the original dtype. Use O0 or O1, whose weights stay "
                    "fp32, MixedPrecision(param_dtype=torch.bfloat16), or fully_shard (FSDP2) with 16-bit shards."
                )
    check_sharded(models, dtype, trains=bool(optimizers))
    known = {id(param) for model in models for param in model.parameters()}
    for optimizer in map(unwrap, optimizers):
        kind = type(optimizer).__name__
        refuse_attached(optimizer)
        if release_of(optimizer) is not None:
            raise UsageError(
                f"attach() was called on this {kind} before {caller}, which changes the optimizer's step; call "
                f"{caller} first and attach() afterwards."
            )
        params = params_of(optimizer)
        if known and params and known.isdisjoint(map(id, params)):
            raise UsageError(
                f"None of the parameters of this {kind} is in the models given to {caller}, so it would not train "
                "these models. Make the optimizer from the parameters of these models after you move or change them, "
                "or also pass the models that it trains."
            )


def check_state_form(caller: str, optimizers: Sequence[Any], form: StateForm, *, fused: bool) -> None:
    """Refuse a ``state_dtype`` for optimizers whose moments ``prepare`` cannot store in it.

    Args:
        caller: the function that user code called, for error messages.
        optimizers: the optimizers.
        form: the ``state_dtype``; every optimizer supports None.
        fused: True if torch's optimizers may be fused.

    Raises:
        UsageError: for the first optimizer that does not support ``form``.
    """
    if form is None:
        return
    params = Counter(map(id, params_of(*optimizers)))
    alone = set(params.values()) <= {1}
    for optimizer in optimizers:
        inside = unwrap(optimizer)
        wrapped = inner_optimizer(inside) is not None or _sharded_state(inside) is not None
        if not has_moments(inside) or wrapped or (not isinstance(inside, FusedOptimizer) and not (fused and alone)):
            raise UsageError(
                f"{caller}: state_dtype={form!r} requires fused=True and an unwrapped optimizer: Adam, AdamW or SGD of "
                "torch.optim with settings that can be fused, or FusedAdam, FusedSGD, FusedLAMB or FusedNovoGrad. This "
                f"is {type(inside).__name__}: remove state_dtype, or give every parameter one such optimizer."
            )


def _gains(optimizer: torch.optim.Optimizer, smaller: bool = False) -> bool:
    """True if an optimizer has 16-bit parameters and a fused form with masters that is faster on their device.

    With ``smaller``, the fused form saves memory and need not be faster.
    """
    half = list(filter(is_half, params_of(optimizer)))
    return (
        bool(half)
        and all(keeper_of(p) is None for p in half)
        and HAS_GRAD_DTYPE
        and can_fuse(optimizer)
        and (smaller or all(backend_for(p.device.type) not in ("eager", "torch") for p in half))
    )


def _leave_broken_step(optimizer: Any) -> None:
    """Turn off ``fused=True`` of torch's SGD, whose step leaves most 16-bit CPU weights unchanged (torch 2.13)."""
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    if any(is_half(p) and p.is_cpu for group in groups for p in group["params"]):
        for options in (*groups, optimizer.defaults):
            options["fused"] = False
        optimizer._step_supports_amp_scaling = False  # only its fused step reads flags
        logger.info("SGD continues without fused=True, whose step leaves most 16-bit weights on a CPU unchanged")


def _sharded_state(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the inner optimizer of a ``ZeroRedundancyOptimizer``, which has this rank's state; None for others.

    Raises:
        UsageError: for one that was made with ``overlap_with_ddp=True``.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return None
    if not hasattr(optimizer, "optim"):
        raise UsageError(
            "This ZeroRedundancyOptimizer was made with overlap_with_ddp=True, so it steps in backward passes, before "
            "their gradients are unscaled and checked. Leave that argument out."
        )
    return optimizer.optim  # type: ignore[no-any-return]
