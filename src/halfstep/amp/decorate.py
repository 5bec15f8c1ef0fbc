"""``amp.decorate``: Paddle's function for 16-bit weights, for training in ``amp.auto_cast(level="O2")``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..casting import modules
from ..casting.emulation import Emulate, check_emulate
from ..casting.scope import OpCasting
from ..core.aliases import aliases
from ..core.checks import check_flag, check_switch
from ..core.dtypes import default_half, parse_dtype, parse_half
from ..core.errors import ArgumentValueError, UsageError
from ..core.policy import Policy
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


@aliases(opt_level="level")
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
        optimizers: a ``torch.optim.Optimizer``, a list of optimizers, or None; changed in place.
        level: "O2" casts the models; "O1" changes no weights, because its casts happen in ``auto_cast``. At both
            levels, casts of other sessions do not apply to the models. ``opt_level=`` is an alias.
        dtype: torch.float16, torch.bfloat16 or their names; None means float16 for a model on CUDA and bfloat16
            elsewhere.
        master_weight: True if the optimizers update fp32 masters; None means True.
        save_dtype: the dtype of floating-point entries in ``state_dict()``. None means fp32 if there are masters, whose
            values are then saved, and the dtype of the parameters otherwise. With a 16-bit dtype,
            ``optimizer.state_dict()`` contains the masters.
        master_grad: True to make gradients of 16-bit parameters fp32. It requires masters. With masters, backward
            passes without a block compute fp32 gradients anyway, except under DistributedDataParallel, which refuses
            them. For ``amp.scale_loss`` blocks, ``amp.initialize`` has an argument of the same name.
        excluded_layers: modules that compute in fp32, at both levels; see ``amp.initialize``.
        module_filter: see ``amp.initialize``.
        emulate: see ``amp.initialize``. It applies to the models outside ``amp.auto_cast``, which has its own argument.
        fused: see ``amp.initialize``.
        cast_ops: see ``amp.initialize``. It applies to forward passes, only at level "O2".
        products: see ``amp.initialize``.

    Returns:
        The arguments, in the same structure: ``models`` if ``optimizers`` is None, else ``(models, optimizers)``.

    Raises:
        ArgumentTypeError: if models, optimizers or excluded layers have a wrong type.
        ArgumentValueError: for a level or dtype that is not allowed.
        UsageError: if a model is traced or wrapped for parallel training, an optimizer is already decorated, a model or
            optimizer is in a list twice, or for ``master_grad`` without masters or without ``Tensor.grad_dtype`` in
            torch. Nothing has changed then.

    Warns:
        PrecisionWarning: once, if the device of a model has no units for the dtype and ``emulate=False``.

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
        retries=level == "O2" and cast_ops is not False,
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
    """Check the two arguments; True if the optimizers get masters."""
    check_switch("master_weight", master_weight, or_none=True)
    check_switch("master_grad", master_grad)
    if master_grad and master_weight is False:
        raise UsageError(
            "master_grad=True keeps fp32 gradients of 16-bit parameters, which torch's optimizers can use only with "
            "fp32 masters; leave out master_weight=False."
        )
    if master_grad and not hasattr(torch.Tensor, "grad_dtype"):
        raise UsageError(
            f"master_grad=True needs Tensor.grad_dtype, which torch {torch.__version__} does not have; leave it out."
        )
    return master_weight is not False and bool(optimizers)
