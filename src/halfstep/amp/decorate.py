"""``amp.decorate``: Paddle's way to 16-bit weights, for training under ``amp.auto_cast(level="O2")``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..casting import modules
from ..casting.emulation import Emulate, check_emulate
from ..casting.scope import OpCasting
from ..core.checks import check_flag, check_switch
from ..core.dtypes import default_half, parse_dtype, parse_half
from ..core.errors import ArgumentValueError, UsageError
from ..core.policy import Policy
from ..core.removed import removed_arguments
from ..stepping.prepare import check, prepare
from ..torch_internals.torch_compat import InstanceNorm
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
from .options import check_cast_ops

__all__ = ["decorate"]

_NORMS = (modules.BatchNorm, nn.LayerNorm, InstanceNorm)


@removed_arguments("keep_casts", opt_level="level")
@typed
def decorate(
    models: Any,
    optimizers: Any = None,
    level: str = "O1",
    dtype: torch.dtype | str | None = None,
    master_weight: bool | None = None,
    save_dtype: torch.dtype | str | None = None,
    master_grad: bool = False,
    excluded_layers: Layers = None,
    *,
    module_filter: ModuleFilter | None = None,
    emulate: Emulate = "auto",
    fused: bool = True,
    cast_ops: bool | None = None,
    products: RecipeChoice = None,
) -> Any:
    """Cast models to 16-bit weights and give optimizers fp32 masters; call it before any parallel wrapper.

    ::

        model, optimizer = amp.decorate(model, optimizer, level="O2")
        with amp.auto_cast(level="O2"):
            loss = loss_fn(model(x), y)

    Parameters of BatchNorm, LayerNorm and InstanceNorm stay fp32, and their inputs and outputs have 16 bits. Excluded
    layers compute in fp32.

    Args:
        models: a module or a list of modules; changed in place.
        optimizers: a ``torch.optim.Optimizer``, a list of them, or None; changed in place.
        level: "O2" casts; "O1" leaves everything as it is, because its casts happen in ``auto_cast``. At both levels
            the casts of other sessions do not reach the models. ``opt_level=`` is taken too.
        dtype: torch.float16, torch.bfloat16 or their names; None means float16 for a model on CUDA and bfloat16
            elsewhere.
        master_weight: True if the optimizers update fp32 masters; None means True.
        save_dtype: dtype of floating entries in ``state_dict()``. None means fp32 if there are masters, which are saved
            then, and the dtype of the parameters otherwise. With 16 bits ``optimizer.state_dict()`` has the masters.
        master_grad: let gradients of the 16-bit parameters be fp32. It needs masters, and with masters plain backward
            passes bring fp32 gradients anyway, except under DistributedDataParallel, which refuses such gradients. For
            blocks of ``amp.scale_loss`` it is an argument of ``amp.initialize``, too.
        excluded_layers: modules that compute in fp32, as in ``amp.initialize``; here at both levels.
        module_filter: their long form, as in ``amp.initialize``.
        emulate: as in ``amp.initialize``, for what the models compute outside of ``amp.auto_cast``, which has an
            argument of its own.
        fused: as in ``amp.initialize``.
        cast_ops: as in ``amp.initialize``, in forward passes; only at level "O2".
        products: as in ``amp.initialize``.

    Returns:
        What was given, in the same shape: ``models`` alone if ``optimizers`` is None, else ``(models, optimizers)``.

    Raises:
        ArgumentTypeError: models, optimizers or excluded layers of the wrong kind.
        ArgumentValueError: a level or dtype that is not allowed.
        UsageError: a model that is traced or wrapped for parallel training, an optimizer that was decorated before, one
            of them twice, or ``master_grad`` without masters or on a torch without ``Tensor.grad_dtype``. Nothing has
            been changed then.

    Warns:
        PrecisionWarning: once, where the device of a model has no units for the dtype and ``emulate=False``.

    Source: Paddle's AMP guide, section 2.1.3.
    """
    if level not in ("O1", "O2"):
        raise ArgumentValueError(f"level={level!r} should be O1 or O2: O1 casts in amp.auto_cast, O2 casts the model.")
    model_list, optimizer_list = as_models("amp.decorate", models), as_optimizers("amp.decorate", optimizers)
    half = default_half(device_of(model_list)) if dtype is None else parse_half(dtype)
    saved = None if save_dtype is None else parse_dtype(save_dtype, "save_dtype")
    chosen = chosen_dtypes(model_list, excluded_layers, module_filter)
    masters = _check_masters(master_weight, master_grad, optimizer_list)
    check("amp.decorate", model_list, optimizer_list, half if level == "O2" else None, again=True)
    check_emulate(emulate)
    check_flag("fused", fused)
    check_cast_ops(cast_ops, level, half if level == "O2" else None)
    if products is not None or chosen:
        from ..formats.layers import give_products  # imported when asked for

        give_products(model_list, products, chosen)
    if level == "O2" and emulate is False:
        warn_of_slow_devices(model_list, half)
    casting = OpCasting(
        half,
        enabled=False,
        devices=modules.device_types(model_list),
        emulate=emulate,
        keeps_autocast=True,
        meets=level == "O2" and cast_ops is not False,
    )
    if level == "O1":
        prepare(model_list, [], Policy(), casting=casting, chosen=chosen, fused=fused)
        return returned(models, optimizers)
    norms = {id(part) for model in model_list for m in model.modules() if isinstance(m, _NORMS) for part in m.modules()}
    prepare(
        model_list,
        optimizer_list,
        Policy(param_dtype=half, master_weights=masters, cast_ops=cast_ops),
        casting=casting,
        keep=lambda module: id(module) in norms,
        chosen=chosen,
        save_dtype=saved or (torch.float32 if masters else None),
        wide_grads=master_grad,
        fused=fused,
    )
    from ..diagnostics.findings.checking import log_findings  # imported when asked for

    log_findings(model_list, optimizer_list, scaling_is_known=False)
    return returned(models, optimizers)


def _check_masters(master_weight: Any, master_grad: Any, optimizers: list[torch.optim.Optimizer]) -> bool:
    """Check what was asked for; True if the optimizers get masters."""
    check_switch("master_weight", master_weight, or_none=True)
    check_switch("master_grad", master_grad)
    if master_grad and master_weight is False:
        raise UsageError(
            "master_grad=True keeps fp32 gradients of 16-bit parameters, which torch's optimizers step with only "
            "through fp32 masters; leave out master_weight=False."
        )
    if master_grad and not hasattr(torch.Tensor, "grad_dtype"):
        raise UsageError(
            f"master_grad=True needs Tensor.grad_dtype, which torch {torch.__version__} has not; leave it out."
        )
    return master_weight is not False and bool(optimizers)
