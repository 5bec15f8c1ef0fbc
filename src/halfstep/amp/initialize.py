"""``amp.initialize``: bring models and optimizers to an opt level."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.formats import HALF_DTYPES, default_half, dtype_name
from ..core.hardware import warn_if_slow
from ..core.loss_scale import LossScale, LossScaleSpec, make_loss_scale
from ..core.oplists import OpLists
from ..core.policy import Policy
from ..engine.casting import modules, ops, sessions
from ..engine.casting.emulation import Emulate, check_emulate
from ..engine.scaling import LossScaler
from ..engine.stepping import bind, binding_of
from .options import Options, resolve
from .session import Session, _amp_state

__all__ = ["initialize"]

logger = logging.getLogger("halfstep")


def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: Any = None,
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
    module_filter: modules.ModuleFilter | None = None,
    *,
    op_lists: OpLists | None = None,
    custom_white_list: Iterable[object] | None = None,
    custom_black_list: Iterable[object] | None = None,
    emulate: Emulate = "auto",
    policy: Policy | None = None,
) -> Any:
    """Bring models and optimizers to an opt level; call it once for them, before any parallel wrapper.

    ::

        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")

    The levels: "O0" trains in fp32. "O1" casts around operations, in the model and, for the whole process from then
    on, outside of any model: in loss functions, in every thread that runs the model. "O2" has 16-bit weights, fp32
    BatchNorm, and fp32 masters in the optimizer; inputs are cast in and outputs to fp32; ``state_dict()`` of the model
    is fp32 and holds the masters. "O3" has everything in 16 bits. The other arguments override single properties of
    the level where they are not None.

    While a model is called it computes by its own level, whatever else was brought up in the process; an
    ``amp.auto_cast`` or ``amp.disable_casts`` around the call has its way. The casts outside of models are those of the
    latest O1 session, on the device types of its models, and end when its models and optimizers are gone.

    Args:
        models: a module, or a list of modules, with fp32 parameters, on any device; changed in place.
        optimizers: a ``torch.optim.Optimizer``, a list of them, or None; changed in place.
        enabled: False makes this and every other amp call do nothing, so that one script serves both.
        opt_level: "O0", "O1", "O2" or "O3"; the ROCm fork's "O4" and "O5" are O1 and O2 in bfloat16.
        cast_model_type: dtype of the weights; False leaves the model alone. Not at O1.
        patch_torch_functions: whether to cast ops; only O1 may.
        keep_batchnorm_fp32: whether BatchNorm stays fp32; "True" and "False" as strings are taken too. Not at O1.
        master_weights: whether optimizers update fp32 masters. Not at O1.
        loss_scale: a number above zero, the number as a string, "dynamic", or a ``halfstep.DynamicLossScale`` or
            ``StaticLossScale``, which has bounds of its own.
        cast_model_outputs: dtype of the models' outputs, or its name; by default fp32 wherever the model is cast.
        num_losses: how many losses have a scale of their own (``loss_id`` of ``amp.scale_loss``).
        verbosity: 0 is silent; 1 logs the options and each skipped step at level INFO of the logger "halfstep";
            2 also logs each cast.
        min_loss_scale: floor of the dynamic scale; None or 0 for none.
        max_loss_scale: ceiling of the dynamic scale.
        dtype: the 16-bit dtype; None means float16 for a model on CUDA and bfloat16 elsewhere.
        module_filter: called as ``module_filter(module, qualified_name)``; a dtype it returns is that module's own
            at O2 and O3, whatever the level says, and None leaves it to the level.
        op_lists: which ops run in which precision; only at O1.
        custom_white_list: ops to run in 16 bits, names or torch functions, against the lists of O1; only there.
        custom_black_list: ops to run in fp32, likewise.
        emulate: "auto" runs matrix products, convolutions, attention and recurrent layers in fp32 kernels, on 16-bit
            numbers and with 16-bit results, where the device has no 16-bit units. True does so everywhere, False
            nowhere. The dtypes are the same in all cases.
        policy: a ``halfstep.Policy`` in the place of the level and of all that overrides one; only ``loss_scale`` may
            stand beside it, and goes before its own.

    Returns:
        What was given, in the same shape: ``models`` alone if ``optimizers`` is None, else ``(models, optimizers)``.

    Raises:
        ArgumentTypeError: models or optimizers of the wrong kind.
        ArgumentValueError: a value that is not allowed.
        UsageError: options that contradict the level, a policy beside them or one that contradicts itself, a model
            that is not fp32 or is wrapped for parallel training already, or a model or optimizer that was initialized
            before. Nothing has been changed then.

    Warns:
        PrecisionWarning: once, where the device of a model has no units for the 16-bit dtype and ``emulate=False``.
    """
    if not enabled:
        _amp_state.session = Session(Options(False, "O1", None, False, None, None, 1.0), 0)
        return models if optimizers is None else (models, optimizers)

    model_list = _check_models(models)
    optimizer_list = _check_optimizers(optimizers)
    recipe = resolve(
        policy,
        default_half(_device(model_list)),
        opt_level=opt_level,
        dtype=dtype,
        cast_model_type=cast_model_type,
        patch_torch_functions=patch_torch_functions,
        keep_batchnorm_fp32=keep_batchnorm_fp32,
        master_weights=master_weights,
        loss_scale=loss_scale,
        cast_model_outputs=cast_model_outputs,
        op_lists=op_lists,
        custom_white_list=custom_white_list,
        custom_black_list=custom_black_list,
    )
    policy, half = recipe.policy, recipe.half
    if isinstance(num_losses, bool) or not isinstance(num_losses, int) or num_losses < 0:
        raise ArgumentValueError(f"num_losses={num_losses!r} must be a whole number, 1 or more.")
    check_emulate(emulate)
    rule = make_loss_scale(policy.loss_scale, min_loss_scale, max_loss_scale)
    _check_untouched(model_list, optimizer_list)
    modules.refuse_sharded(model_list, policy.param_dtype)
    if policy.compute_dtype in HALF_DTYPES and emulate is False:
        for device in {param.device for model in model_list for param in model.parameters()}:
            warn_if_slow(device, policy.compute_dtype)

    casting = ops.OpCasting(
        half,
        policy.op_lists,
        enabled=policy.op_lists is not None,
        verbose=verbosity > 1,
        devices=modules.device_types(model_list),
        emulate=emulate,
    )
    session = Session(recipe.options, verbosity, _scalers(rule, num_losses, verbosity))
    for model in model_list:
        _prepare_model(model, policy, casting, module_filter)
    for optimizer in optimizer_list:
        binding = bind(
            optimizer,
            master_weights=policy.master_weights,
            own_masters=True,
            copies=None if policy.op_lists is None else half,
            verbose=verbosity > 0,
        )
        binding.session, binding.models = session, tuple(map(weakref.ref, model_list))
        if not policy.master_weights and optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # torch casts the state to the parameters' new dtype
    if policy.op_lists is not None:
        sessions.activate(casting, [*model_list, *optimizer_list])
    _amp_state.session = session
    if verbosity > 0:
        logger.info("%s", recipe.banner())
    return models if optimizers is None else (models, optimizers)


def _scalers(rule: LossScale, count: int, verbosity: int) -> list[LossScaler]:
    return [LossScaler(rule, name=f"loss scaler {i}", verbose=verbosity > 0) for i in range(count)]


def _check_models(models: Any) -> list[nn.Module]:
    found = models if isinstance(models, list) else [models]
    for model in found:
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(
                f"models must be either a single model or a list of models (torch.nn.Module), not "
                f"{type(models).__name__}" + (f" with a {type(model).__name__} in it." if model is not models else ".")
            )
        if isinstance(model, modules.PARALLEL):
            raise UsageError(
                f"The model is wrapped in {type(model).__name__} already. Give amp.initialize the bare model and wrap "
                "it for parallel training after that."
            )
    return found


def _check_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    if optimizers is None:
        return []
    found = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in found:
        if type(optimizer).__name__ == "FP16_Optimizer":
            raise UsageError(
                "An FP16_Optimizer manages its own masters and loss scale; give amp.initialize the bare optimizer."
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(
                f"optimizers must be either a single torch.optim.Optimizer or a list of optimizers, not "
                f"{type(optimizers).__name__}."
            )
    return found


def _device(models: list[nn.Module]) -> torch.device:
    for model in models:
        for param in model.parameters():
            return param.device
    return torch.device("cpu")


def _check_untouched(models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    if len({id(model) for model in models}) < len(models) or len({id(o) for o in optimizers}) < len(optimizers):
        raise UsageError("A model or optimizer is in the list twice; amp.initialize takes each once.")
    for optimizer in optimizers:
        if binding_of(optimizer) is not None:
            raise UsageError(
                f"This {type(optimizer).__name__} has been through amp.initialize once, and once is all it can; "
                "make a new optimizer to start over."
            )
    for model in models:
        if not _amp_state.allow_incoming_model_not_fp32:
            for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
                for name, tensor in tensors:
                    if tensor.dtype in HALF_DTYPES:
                        raise UsageError(
                            f"amp.initialize needs an fp32 model, and its {kind} {name} is {dtype_name(tensor.dtype)}. "
                            "There is no need to call .half() or .bfloat16(): the opt level casts the model."
                        )
        if modules.is_attached(model):
            raise UsageError("This model has been through amp.initialize or amp.decorate once, and once is all it can.")


def _prepare_model(
    model: nn.Module, policy: Policy, casting: ops.OpCasting, module_filter: modules.ModuleFilter | None
) -> None:
    if policy.param_dtype is not None:
        modules.cast_module(
            model,
            policy.param_dtype,
            keep=lambda module: policy.keep_batchnorm_fp32 and isinstance(module, modules.BatchNorm),
            module_filter=module_filter,
        )
    modules.attach(
        model,
        inputs=None if policy.op_lists is not None else policy.compute_dtype,
        outputs=policy.output_dtype,
        saved=torch.float32 if policy.param_dtype is not None else None,
        casting=casting,
    )
