"""``amp.initialize``: prepare models and optimizers for an opt level."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn

from ..casting import modules
from ..casting.emulation import Emulate, check_emulate
from ..casting.scope import OpCasting, begin_session
from ..core.aliases import aliases
from ..core.checks import check_count, check_flag, check_kind
from ..core.dtypes import HALF_DTYPES, StateForm, default_half, dtype_name, is_half
from ..core.loss_scale import LossScaleSpec, make_loss_scale
from ..core.oplists import OpLists
from ..core.policy import Policy
from ..core.text import show_log
from ..stepping.prepare import check, check_state_form, prepare
from ..stepping.scaling_checks import ForgottenScale
from .arguments import (
    Layers,
    ModuleFilter,
    RecipeChoice,
    as_models,
    as_optimizers,
    chosen_dtypes,
    device_of,
    returned,
    typed,
    warn_of_slow_devices,
)
from .loss_scaler import LossScaler
from .options import ResolvedProperties, resolve, with_precision
from .session import Session, latest

__all__ = ["initialize"]

logger = logging.getLogger("halfstep")


@aliases(level="opt_level")
@typed
def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | str | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: LossScaleSpec | str | None = None,
    cast_model_outputs: torch.dtype | str | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    dtype: torch.dtype | str | None = None,
    module_filter: ModuleFilter | None = None,
    *,
    excluded_layers: Layers = None,
    op_lists: OpLists | None = None,
    custom_white_list: Iterable[object] | None = None,
    custom_black_list: Iterable[object] | None = None,
    custom_wide_list: Iterable[object] | None = None,
    emulate: Emulate = "auto",
    policy: Policy | None = None,
    fused: bool = True,
    cast_ops: bool | None = None,
    state_dtype: StateForm | str = None,
    products: RecipeChoice = None,
    precision: str | PathLike[str] | Mapping[str, Any] | None = None,
    master_grad: bool = False,
) -> Any:
    """Prepare models and optimizers for an opt level; call it once, before any parallel wrapper.

    ::

        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")

    "O0" trains in fp32. "O1" casts the inputs of ops, in the model and also outside any model, such as in loss
    functions, for the whole process and every thread that runs the model. "O2" has 16-bit weights, fp32 BatchNorm, and
    fp32 masters in the optimizer; it casts inputs to 16 bits and outputs to fp32, and ``state_dict()`` of the model
    contains the fp32 masters. "O3" uses 16 bits for everything. Other arguments that are not None override single
    properties of the level.

    Each model of the process computes at its own level. An ``amp.auto_cast`` or ``amp.disable_casts`` block around the
    call of a model overrides the level. Outside models, the casts of the latest O1 session apply on the device types of
    its models, until its models and optimizers are freed.

    Args:
        models: a module, or a list of modules, on any device; changed in place. Masters start from the current weights,
            so load a checkpoint in fp32 before or after.
        optimizers: a ``torch.optim.Optimizer``, a ``LARC`` around an optimizer, a list of optimizers, or None; changed
            in place. Wrappers of optimizers, such as the wrappers of Fabric, Accelerate and ScheduleFree, also work.
        enabled: False turns this and every other amp call into a no-op, so that a script can train with and without
            amp.
        opt_level: "O0", "O1", "O2" or "O3"; the ROCm fork's "O4" and "O5" are O1 and O2 in bfloat16.
            ``level=`` is an alias.
        cast_model_type: the dtype of the weights; False leaves the model unchanged. Not at O1.
        patch_torch_functions: True to cast ops; only at O1.
        keep_batchnorm_fp32: True to keep BatchNorm in fp32; also "True" and "False" as strings. Not at O1.
        master_weights: True if optimizers update fp32 masters. Not at O1.
        loss_scale: a number above zero, the number as a string, "dynamic", or a ``halfstep.DynamicLossScale`` or
            ``StaticLossScale``, which has its own bounds.
        cast_model_outputs: the dtype of the models' outputs, or its name; by default fp32 if the model is cast.
        num_losses: the number of losses with separate loss scales (``loss_id`` of ``amp.scale_loss``).
        verbosity: 0 is silent; 1 logs the level, each of the first skipped steps and then every hundredth, at level
            INFO of the logger "halfstep"; 2 also logs each cast. If the program has not configured logging, the logger
            writes to stderr.
        min_loss_scale: the floor of the dynamic scale; None or 0 for no floor.
        max_loss_scale: the ceiling of the dynamic scale.
        dtype: the 16-bit dtype; None means float16 for a model on CUDA and bfloat16 elsewhere.
        module_filter: a function ``module_filter(module, qualified_name)`` that returns a dtype for the module and its
            submodules, or None to leave the module to the level or to its parent module. Only O2 and O3 support dtypes
            other than fp32.
        excluded_layers: modules that compute in fp32, including their submodules, at every level: qualified names,
            module types, modules, functions of ``(module, qualified_name)`` that return True, or a list of these. Their
            parameters and buffers are fp32, even if other modules share them. When called, the outermost excluded
            module casts its arguments to fp32, and its result stays fp32: later ops cast it if they need 16 bits, and
            the model returns it unrounded. Inside, an op with a 16-bit input computes in fp32. Code outside the module
            that calls ``layer.forward`` or uses ``layer.weight`` is cast as at the level. A name, type or module that
            no model has is an error.
        op_lists: the precision of each op; at O2 and O3 see ``custom_white_list``.
        custom_white_list: ops to run in 16 bits: names or torch functions. It overrides the lists of O1. At O2 and O3,
            only the custom lists cast the ops of the models, and the function mode stays on in every pass.
        custom_black_list: ops to run in fp32; see ``custom_white_list``.
        custom_wide_list: matrix products that read 16-bit operands and return an fp32 result; see
            ``custom_white_list``.
        emulate: "auto" runs matrix products, convolutions, attention and recurrent layers in fp32 kernels, with 16-bit
            inputs and results, if the device has no 16-bit units. True does so on every device, False on none. The
            dtypes are the same in all cases.
        policy: a ``halfstep.Policy``, which replaces the level and its overrides. Only ``loss_scale`` may be passed
            with it, and overrides the loss scale of the policy.
        fused: True to fuse torch's ``Adam``, ``AdamW``, ``SGD``, ``Adagrad`` and ``Muon`` if they get masters
            (``halfstep.optimizers.fuse``), if their settings allow it and the device has kernels. The arithmetic is the
            same. False keeps torch's own step, on plain fp32 masters.
        cast_ops: True to retry an op with dtypes that agree, if torch refuses it because it mixes fp32 and 16-bit
            tensors or has no 16-bit kernel; only at O2 and O3. None checks for such ops in the first passes of each
            kind of call, in ``forward`` and the other public methods of a model's own class, and continues if it found
            one. True always checks, also outside models; False never does.
        state_dtype: the dtype in which optimizers with masters store their moments. "8bit" takes one byte per value, so
            that bfloat16 weights, masters and state of AdamW take 6 bytes per parameter instead of 12.
            ``torch.bfloat16`` applies to first moments. It is supported by torch's ``Adam``, ``AdamW`` and ``SGD``, and
            by fused optimizers created without another ``state_dtype``. None keeps moments in fp32.
        products: a ``halfstep.formats.Recipe``, or the name of a recipe such as "mxfp8": linear layers multiply
            operands of eight bits or fewer, at any level. ``amp.set_products`` chooses layers, and changes them later.
        precision: further arguments of this function, as a dict or as a file that ``save`` of a ``halfstep.search``
            result wrote: the level, the dtype, and the modules that stay in fp32. Do not pass an argument twice.
        master_grad: True to make gradients of weights with masters fp32 after every block. With False, the gradient of
            a bfloat16 weight stays in bfloat16 if a single pass without a loss scale computed it.

    Returns:
        The arguments, in the same structure: ``models`` if ``optimizers`` is None, else ``(models, optimizers)``.

    Raises:
        ArgumentTypeError: if models or optimizers have a wrong type.
        ArgumentValueError: for a value that is not allowed.
        UsageError: if options contradict the level or each other, if a policy is passed together with them, if a model
            is scripted, traced, lazy or already wrapped for parallel training, if an optimizer has no parameter of the
            models, or if a model or optimizer is already initialized. Nothing has changed then.

    Warns:
        PrecisionWarning: once, if the device of a model has no units for the 16-bit dtype and ``emulate=False``.
    """
    given = dict(locals())  # all arguments; ``resolve`` reads the arguments in its table
    if precision is not None:
        return initialize(**with_precision(given))
    if not check_flag("enabled", enabled):
        latest.session = Session(ResolvedProperties(Policy(), "O1", enabled=False), 0)
        return returned(models, optimizers)

    model_list = as_models("amp.initialize", models)
    optimizer_list = as_optimizers("amp.initialize", optimizers, wrapped=True)
    recipe = resolve(policy, default_half(device_of(model_list)), given)
    policy, half = recipe.options.policy, recipe.half
    check_count("num_losses", num_losses)
    check_flag("fused", fused)
    check_flag("master_grad", master_grad)
    check_kind("verbosity", verbosity, int, "0, 1 or 2")
    check_emulate(emulate)
    rule = make_loss_scale(policy.loss_scale, min_loss_scale, max_loss_scale)
    chosen = chosen_dtypes(model_list, excluded_layers, module_filter)
    check("amp.initialize", model_list, optimizer_list, policy.param_dtype)
    check_state_form("amp.initialize", optimizer_list, policy.state_dtype, fused=fused)
    if products is not None or chosen:
        from ..formats.layers import give_products  # imported when asked for

        give_products(model_list, products, chosen)
    if verbosity > 0:
        show_log(asked=False)
        _log_half_params(model_list, policy)
    if policy.compute_dtype in HALF_DTYPES and emulate is False:
        warn_of_slow_devices(model_list, policy.compute_dtype)

    casting = OpCasting(
        half,
        policy.op_lists,
        enabled=policy.casts_ops,
        verbose=verbosity > 1,
        devices=modules.device_types(model_list),
        emulate=emulate,
        retries=policy.retries_ops,
    )
    scalers = [LossScaler(rule, name=f"loss scaler {i}", verbose=verbosity > 0) for i in range(num_losses)]
    session = Session(recipe.options, verbosity, scalers)
    for attached in prepare(
        model_list,
        optimizer_list,
        policy,
        casting=casting,
        chosen=chosen,
        save_dtype=torch.float32 if policy.param_dtype is not None else None,
        fused=fused,
        verbose=verbosity > 0,
    ):
        attached.session = session
        attached.window.table.always_fp32 = master_grad
        if not all(scaler.neutral for scaler in scalers):
            attached.window.subscribers.append(ForgottenScale(policy.compute_dtype is torch.float16))
    if policy.casts_ops or policy.cast_ops:
        begin_session(casting, [*model_list, *optimizer_list])
    latest.session = session
    if verbosity > 0:
        logger.info(recipe.banner(emulated=any(e[1:] == (policy.compute_dtype, "product") for e in casting.emulated)))
        from ..diagnostics.findings.checking import log_findings  # imported when asked for

        log_findings(model_list, optimizer_list, policy)
    return returned(models, optimizers)


def _log_half_params(models: list[nn.Module], policy: Policy) -> None:
    """Log that a model is already in 16 bits, so that its masters start from 16-bit values."""
    halves = [(name, p.dtype) for model in models for name, p in model.named_parameters() if is_half(p)]
    if halves and policy.param_dtype is not torch.float32:
        logger.info(
            "amp.initialize: %d parameters of the model are already in 16 bits (%s is %s)%s. Load the weights in fp32 "
            "to start from more precise values.",
            len(halves),
            halves[0][0],
            dtype_name(halves[0][1]),
            "; their fp32 masters start from the 16-bit values" if policy.master_weights else "",
        )
