"""Bring models and optimizers to a policy: what ``initialize``, ``decorate`` and ``Model`` have in common.

``prepare`` does both. ``prepare_optimizer`` can be called later than ``prepare_model``, for an optimizer made later.
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
from ..core.inner_optimizers import bare, inner_optimizer
from ..core.policy import Policy
from ..kernels.launch import backend_for
from ..optimizers.base import FusedOptimizer
from ..optimizers.fuse import can_fuse, has_moments
from ..optimizers.release import release_of
from ..parameters.ledger import set_grads
from ..parameters.master_registry import keeper_of
from ..parameters.table import record_of
from ..torch_internals.torch_compat import HAS_GRAD_DTYPE, is_flattened
from .attached import AttachedOptimizer, attach, attached_to, share_overflows

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
    """Bring models, and the optimizers that train them, to a policy. Check both before: this does not fail half-way.

    Args:
        models: changed in place; see ``prepare_model``.
        optimizers: changed in place; see ``prepare_optimizer``.
        policy: the dtypes in which values are held and computed.
        fused: run torch's optimizers as fused ones where they can be.
        verbose: True to log skipped steps.
        options: further arguments of ``prepare_model``.
    """
    originals: dict[int, torch.Tensor] = {}
    for model in models:
        originals |= prepare_model(model, policy, keep_originals=policy.master_weights and bool(optimizers), **options)
    # A fused step keeps masters in its own state, but optimizers that share a parameter must share its master.
    owners = Counter(id(p) for one in optimizers for group in one.param_groups for p in group["params"])
    alone = max(owners.values(), default=1) == 1
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
    """Cast a model and put its hooks on.

    Args:
        model: changed in place.
        policy: the dtypes in which values are held and computed.
        casting: the casting of ops while the model runs.
        keep: returns True for modules that keep their dtype; None keeps BatchNorm if the policy says so.
        chosen: the dtypes of single modules; see ``casting.modules.cast_module``. With fp32 weights, fp32 is the one.
        save_dtype: dtype of floating entries in ``state_dict()`` of the model; None leaves them.
        keep_originals: return the fp32 weights, and leave the gradients that are there in fp32.
        wide_grads: let 16-bit parameters have fp32 gradients also without masters.

    Returns:
        With ``keep_originals`` the weights that were cast to 16 bits, as they were, by the identity of the parameter.
    """
    originals: dict[int, torch.Tensor] = {}
    spared: list[str] = []
    if policy.param_dtype is not None:
        before = {id(p): p.detach() for p in model.parameters() if keep_originals and p.requires_grad}
        stays_wide = wide_grads or keep_originals
        grads = [(p, p.grad) for p in model.parameters() if stays_wide and p.grad is not None]
        for param, _ in grads:
            param.grad = None
        try:
            spared = modules.cast_module(
                model,
                policy.param_dtype,
                keep=keep or (lambda module: policy.keep_batchnorm_fp32 and isinstance(module, modules.BatchNorm)),
                chosen=chosen,
                spare_buffers=casting is not None and casting.meets,
            )
        finally:  # a group of FSDP2 may be refused
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
        modules.add_borders(model, wide, None, meets=policy.casts_ops)
    modules.add_hooks(
        model,
        inputs=None if policy.casts_ops else policy.compute_dtype,
        outputs=policy.output_dtype,
        saved=save_dtype,
        casting=None if modules.has_casting(model) else casting,
        always_meets=bool(policy.cast_ops or policy.op_lists or torch.float32 in chosen.values()),
        spared=spared,
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
    """Attach to an optimizer, with masters if the policy has them.

    Args:
        optimizer: a ``torch.optim.Optimizer``, or a wrapper of one, which goes on calling its ``step``.
        policy: the policy of its models.
        models: the models that it trains.
        originals: the result of ``prepare_model``: the values at which masters start.
        fused: run Adam, AdamW, SGD, Adagrad, Muon of torch as the fused optimizers of the same arithmetic, with
            masters, where their settings allow it and there are kernels for the device.
        own: True if an optimizer that can may keep its masters itself; False if it shares a parameter.
        verbose: True to log skipped steps.
        delegates_to_outer: True if another attached optimizer contains this optimizer and sends the messages to ranks.
    """
    optimizer = bare(optimizer)
    masters = policy.master_weights
    sharded = _sharded_state(optimizer)
    if sharded is not None:  # an optimizer over the parameters of this rank, which does the step
        prepare_optimizer(
            sharded, policy, (), originals=originals, fused=fused, verbose=verbose, delegates_to_outer=True
        )
    elif inner_optimizer(optimizer) is not None:
        own = False  # a wrapper whose step may write to weights has to find the masters in their places
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
        optimizer.register_load_state_dict_post_hook(_leave_broken_step)  # which brings the options that were saved
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
    """Refuse models and optimizers that ``prepare`` cannot bring to a policy.

    Args:
        caller: the function that was given these arguments, for messages.
        models: the models.
        optimizers: the optimizers.
        dtype: the dtype that the weights are to be cast to; None if they are not cast.
        again: True if models may have been prepared before.

    Raises:
        UsageError: for what is in a list twice, was prepared before, or cannot be prepared as it is.
    """
    if len(set(map(id, models))) < len(models) or len({id(bare(one)) for one in optimizers}) < len(optimizers):
        raise UsageError(f"A model or optimizer is in the list twice; {caller} takes each once.")
    for optimizer in map(bare, optimizers) if dtype is not None else ():
        if _sharded_state(optimizer) is not None and optimizer.parameters_as_bucket_view:
            raise UsageError(
                f"{caller}: the ZeroRedundancyOptimizer was made with parameters_as_bucket_view=True. It sends weights "
                "from buckets that hold them in fp32, and casting takes the weights out of these: each rank would "
                f"train a model of its own. Leave that argument out, or cast the weights to {dtype} before it is made."
            )
    for model in models:
        if any(isinstance(part, torch.jit.ScriptModule) for part in (model.modules() if dtype else (model,))):
            raise UsageError(f"{caller} cannot change a torch.jit.ScriptModule; give it the module before tracing.")
        lazy = next((name for name, p in model.named_parameters() if is_lazy(p)), None)
        if lazy is not None:
            raise UsageError(
                f"The parameter {lazy} has no shape yet (a lazy module), so {caller} cannot cast it; run one batch "
                "through the model before."
            )
        if not again and modules.has_casting(model):
            raise UsageError(
                "This model has been through amp.initialize or amp.decorate once, and once is all it can. To train "
                "layers that were frozen, call optimizer.add_param_group({'params': layer.parameters()}). In a "
                "notebook, run the cell again that makes the model and the optimizer, and then this one."
            )
    check_sharded(models, dtype, trains=bool(optimizers))
    for name, param in [named for model in models for named in model.named_parameters()] if dtype is not None else []:
        if is_flattened(param) and param.dtype is not dtype:
            raise UsageError(
                f"FullyShardedDataParallel (FSDP1) has flattened the parameter {name}, and {caller} would cast it at "
                "this level. FSDP goes on in the dtype it knows. Use O0 or O1, whose weights stay fp32; or let FSDP "
                "cast: MixedPrecision(param_dtype=torch.bfloat16) computes in 16 bits. fully_shard (FSDP2) takes "
                "16-bit shards."
            )
    known = {id(param) for model in models for param in model.parameters()}
    for optimizer in map(bare, optimizers):
        kind = type(optimizer).__name__
        if attached_to(optimizer) is not None:
            raise UsageError(
                f"This {kind} has been through amp.initialize or amp.decorate once, and once is all it can; make a new "
                "optimizer to start over."
            )
        if release_of(optimizer) is not None:
            raise UsageError(
                f"attach() was called on this {kind} before {caller}, which changes what its step does; call {caller} "
                "first and attach() after it."
            )
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if known and params and known.isdisjoint(map(id, params)):
            raise UsageError(
                f"None of the parameters of this {kind} is in the models given to {caller}, so it would train nothing "
                "of theirs. Make the optimizer from the parameters of these very models, after they were moved or "
                "changed, or give the models that it trains, too."
            )


def check_state_form(caller: str, optimizers: Sequence[Any], form: StateForm, *, fused: bool) -> None:
    """Refuse a ``state_dtype`` for optimizers whose moments ``prepare`` cannot store so.

    Args:
        caller: the function that was given these arguments, for messages.
        optimizers: the optimizers.
        form: the ``state_dtype``; None is for every optimizer.
        fused: True if torch's optimizers may be fused.

    Raises:
        UsageError: for the first of them.
    """
    if form is None:
        return
    params = Counter(id(p) for one in optimizers for group in one.param_groups for p in group["params"])
    alone = max(params.values(), default=1) == 1
    for optimizer in optimizers:
        inside = bare(optimizer)
        wrapped = inner_optimizer(inside) is not None or _sharded_state(inside) is not None
        if not has_moments(inside) or wrapped or (not isinstance(inside, FusedOptimizer) and not (fused and alone)):
            raise UsageError(
                f"{caller}: state_dtype={form!r} is for Adam, AdamW and SGD of torch.optim where they can be fused, "
                "and for FusedAdam, FusedSGD, FusedLAMB and FusedNovoGrad, unwrapped and with fused=True. This is "
                f"{type(inside).__name__}: leave state_dtype out, or let every parameter have one such optimizer."
            )


def _gains(optimizer: torch.optim.Optimizer, smaller: bool = False) -> bool:
    """True if an optimizer has 16-bit parameters and a fused form with masters that is faster on their device.

    With ``smaller`` it need not be faster.
    """
    half = [p for group in optimizer.param_groups for p in group["params"] if is_half(p)]
    devices = {p.device.type for p in half}
    return (
        bool(half)
        and all(keeper_of(p) is None for p in half)
        and HAS_GRAD_DTYPE
        and can_fuse(optimizer)
        and (smaller or all(backend_for(device) not in ("eager", "torch") for device in devices))
    )


def _leave_broken_step(optimizer: Any) -> None:
    """Without ``fused=True``, which leaves most 16-bit weights on a CPU as they are (as of torch 2.13)."""
    groups = [group for group in optimizer.param_groups if group.get("fused")]
    if any(is_half(p) and p.is_cpu for group in groups for p in group["params"]):
        for options in (*groups, optimizer.defaults):
            options["fused"] = False
        optimizer._step_supports_amp_scaling = False  # only its fused step reads flags
        logger.info("SGD goes on without fused=True, whose step changes few of the 16-bit weights on a CPU")


def _sharded_state(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer in which a ``ZeroRedundancyOptimizer`` keeps its share of the state."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return optimizer.optim if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer) else None
