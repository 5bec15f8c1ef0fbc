"""``amp.initialize``: bring models and optimizers to an opt level."""

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
from ..core.checks import check_count, check_flag, check_kind
from ..core.dtypes import HALF_DTYPES, StateForm, default_half, dtype_name, is_half
from ..core.loss_scale import LossScaleSpec, make_loss_scale
from ..core.oplists import OpLists
from ..core.policy import Policy
from ..core.removed import removed_arguments
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
from .options import Properties, resolve, with_precision
from .session import Session, latest

__all__ = ["initialize"]

logger = logging.getLogger("halfstep")


@removed_arguments("keep_casts", level="opt_level")
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
    """Bring models and optimizers to an opt level; call it once for them, before any parallel wrapper.

    ::

        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")

    The levels: "O0" trains in fp32. "O1" casts around operations, in the model and, for the whole process from then
    on, outside of any model: in loss functions, in every thread that runs the model. "O2" has 16-bit weights, fp32
    BatchNorm, and fp32 masters in the optimizer; inputs are cast in and outputs to fp32; ``state_dict()`` of the model
    is fp32 and holds the masters. "O3" has everything in 16 bits. The other arguments override single properties of
    the level where they are not None.

    While a model is called it computes by its own level, beside any other models of the process. An ``amp.auto_cast``
    or ``amp.disable_casts`` around the call overrides the level. Outside of models the casts of the latest O1 session
    hold, on the device types of its models, until its models and optimizers are gone.

    Args:
        models: a module, or a list of modules, on any device; changed in place. Masters start from their weights as
            they are, so load a checkpoint in fp32 before or after.
        optimizers: a ``torch.optim.Optimizer``, a ``LARC`` around one, a list of them, or None; changed in place.
            Wrappers of optimizers, such as the wrappers of Fabric, Accelerate and ScheduleFree, are taken too.
        enabled: False makes this and every other amp call do nothing, so that one script serves both.
        opt_level: "O0", "O1", "O2" or "O3"; the ROCm fork's "O4" and "O5" are O1 and O2 in bfloat16.
            ``level=`` is taken too.
        cast_model_type: dtype of the weights; False leaves the model alone. Not at O1.
        patch_torch_functions: True to cast ops; only O1 may.
        keep_batchnorm_fp32: True if BatchNorm stays fp32; "True" and "False" as strings are taken too. Not at O1.
        master_weights: True if optimizers update fp32 masters. Not at O1.
        loss_scale: a number above zero, the number as a string, "dynamic", or a ``halfstep.DynamicLossScale`` or
            ``StaticLossScale``, which has bounds of its own.
        cast_model_outputs: dtype of the models' outputs, or its name; by default fp32 wherever the model is cast.
        num_losses: the number of losses that have a scale of their own (``loss_id`` of ``amp.scale_loss``).
        verbosity: 0 is silent; 1 logs a line on the level and one for each of the first skipped steps, then for every
            hundredth, at level INFO of the logger "halfstep"; 2 also logs each cast. If a program has not set up
            logging, the logger writes to stderr.
        min_loss_scale: floor of the dynamic scale; None or 0 for none.
        max_loss_scale: ceiling of the dynamic scale.
        dtype: the 16-bit dtype; None means float16 for a model on CUDA and bfloat16 elsewhere.
        module_filter: the long form of ``excluded_layers``, called as ``module_filter(module, qualified_name)``. A
            dtype it returns is the dtype of that module and of all modules in it; None leaves a module to the level, or
            to the module that has it. Dtypes other than fp32 are for O2 and O3.
        excluded_layers: modules that compute in fp32 with all modules in them, at every level: qualified names, module
            types, modules, functions of ``(module, qualified_name)`` that return True, or a list of such. Their
            parameters and buffers are fp32, also where they share them with others. The outermost of them that is
            called gets its arguments in fp32, and its result stays fp32: ops that follow cast it where they need 16
            bits, and the model returns it unrounded. An op in it that meets a 16-bit tensor computes in fp32. What
            calls ``layer.forward`` or uses ``layer.weight`` from outside is not in the module, and is cast as the level
            says. A name, type or module that the models do not have is an error.
        op_lists: the lists that give each op its precision; at O2 and O3 see ``custom_white_list``.
        custom_white_list: ops to run in 16 bits, names or torch functions, against the lists of O1. At O2 and O3
            these lists move the ops of the models, and no list of the level counts; the function mode stays on then.
        custom_black_list: ops to run in fp32, likewise.
        custom_wide_list: matrix products that read 16-bit operands and give an fp32 result, likewise.
        emulate: "auto" runs matrix products, convolutions, attention and recurrent layers in fp32 kernels, on 16-bit
            numbers and with 16-bit results, where the device has no 16-bit units. True does so everywhere, False
            nowhere. The dtypes are the same in all cases.
        policy: a ``halfstep.Policy`` instead of the level and all that overrides one. Only ``loss_scale`` may be given
            with it, and replaces the loss scale of the policy.
        fused: if optimizers get masters, run ``Adam``, ``AdamW``, ``SGD``, ``Adagrad`` and ``Muon`` of torch as the
            fused optimizers of the same arithmetic (``halfstep.optimizers.fuse``), if their settings allow it and there
            are kernels for the device. False leaves torch's own step, on plain fp32 masters.
        cast_ops: True to call an op again, with dtypes that agree, if torch refuses it because an fp32 tensor meets a
            16-bit one in it or it has no 16-bit kernel; only at O2 and O3. None looks for such ops in the first
            passes of each kind of call, and goes on where it has found one, in ``forward`` and in the other public
            methods of a model's own class; True looks always, also outside of models; False never.
        state_dtype: the form in which optimizers store their moments if they get masters. "8bit" is one byte for each
            number, so that bfloat16 weights, masters and state of AdamW take 6 bytes a parameter, not 12.
            ``torch.bfloat16`` is for first moments. For ``Adam``, ``AdamW`` and ``SGD`` of torch, and for fused
            optimizers that were not made with another; None leaves them at fp32.
        products: a ``halfstep.formats.Recipe``, or the name of one such as "mxfp8": linear layers multiply operands of
            eight bits and fewer, at any level. ``amp.set_products`` says which layers, and changes them later.
        precision: more of these arguments, as a dict or as a file that ``save`` of a ``halfstep.search`` result wrote:
            the level, the dtype, and what stays in fp32. Do not give any of them twice.
        master_grad: True to have fp32 gradients of weights with masters after every block. With False a gradient of a
            bfloat16 weight stays in bfloat16 if one pass, without a loss scale, has computed it.

    Returns:
        What was given, in the same shape: ``models`` alone if ``optimizers`` is None, else ``(models, optimizers)``.

    Raises:
        ArgumentTypeError: models or optimizers of the wrong kind.
        ArgumentValueError: a value that is not allowed.
        UsageError: options that contradict the level, a policy beside them or one that contradicts itself, a model
            that is scripted, traced, lazy or wrapped for parallel training already, an optimizer that holds none of the
            models' parameters, or a model or optimizer that was initialized before. Nothing has been changed then.

    Warns:
        PrecisionWarning: once, where the device of a model has no units for the 16-bit dtype and ``emulate=False``.
    """
    given = dict(locals())  # all arguments; ``resolve`` takes those in its table
    if precision is not None:
        return initialize(**with_precision(given))
    if not check_flag("enabled", enabled):
        latest.session = Session(Properties(Policy(), "O1", enabled=False), 0)
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
        meets=policy.casts_ops or (policy.param_dtype in HALF_DTYPES and policy.cast_ops is not False),
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
        attached.keeper.table.always_fp32 = master_grad
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
    """Say that a model has come in 16 bits: its masters can only start from there."""
    halves = [(name, p.dtype) for model in models for name, p in model.named_parameters() if is_half(p)]
    if halves and policy.param_dtype is not torch.float32:
        logger.info(
            "amp.initialize: %d parameters of the model are in 16 bits already (%s is %s)%s. Weights loaded in fp32 "
            "would start from more digits.",
            len(halves),
            halves[0][0],
            dtype_name(halves[0][1]),
            "; their fp32 masters start from what is there" if policy.master_weights else "",
        )
