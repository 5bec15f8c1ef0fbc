"""LAMB: Adam's step, scaled per parameter by the ratio of the parameter's norm to the step's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..core.checks import arguments
from ..core.errors import ArgumentValueError
from ..kernels.expr import elementwise_kernel
from ..kernels.tensor_table import Number
from .base import FusedOptimizer, Hyper, Step, bias_corrections
from .options import MasterForm, NamedOptions
from .param_rows import FIRST_MOMENT, NUMBER, SECOND_MOMENT, ParamRows, StateLayout, StateSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "FusedLAMB",
    "FusedMixedPrecisionLamb",
    "lamb_apply",
    "lamb_direction",
    "lamb_moments",
    "lamb_scalars",
    "trust_ratio",
]


def _direction(param: Any, exp_avg: Any, exp_avg_sq: Any, scale: Any, root: Any, eps: Any, decay: Any) -> Any:
    return exp_avg * scale / (exp_avg_sq.sqrt() * root + eps) + param * decay


@elementwise_kernel(squares=("weight", "direction"))
def lamb_moments(
    grad: Any, param: Any, exp_avg: Any, exp_avg_sq: Any,
    *, factor: Any, l2: Any, beta1: Any, new1: Any, beta2: Any, new2: Any, scale: Any, root: Any, eps: Any, decay: Any,
) -> dict[str, Any]:  # fmt: skip
    """Run LAMB's first pass (You et al., arXiv 1904.00962): the moments, and the norms of weight and direction."""
    grad = grad * factor + param * l2
    exp_avg = exp_avg * beta1 + grad * new1
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * new2
    direction = _direction(param, exp_avg, exp_avg_sq, scale, root, eps, decay)
    return {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "weight": param, "direction": direction}


@elementwise_kernel()
def lamb_apply(
    param: Any, exp_avg: Any, exp_avg_sq: Any, *, scale: Any, root: Any, eps: Any, decay: Any, rate: Any
) -> dict[str, Any]:
    """Apply the step: LAMB's second pass, which recomputes the direction and moves no more bytes than a stored one."""
    return {"param": param - _direction(param, exp_avg, exp_avg_sq, scale, root, eps, decay) * rate}


@elementwise_kernel()
def lamb_direction(
    grad: Any, param: Any, exp_avg: Any, exp_avg_sq: Any, update: Any,
    *, factor: Any, l2: Any, beta1: Any, new1: Any, beta2: Any, new2: Any, scale: Any, root: Any, eps: Any, decay: Any,
) -> dict[str, Any]:  # fmt: skip
    """Run the first pass and store the direction, for callers that compute its norm themselves."""
    moments = lamb_moments.fn(
        grad, param, exp_avg, exp_avg_sq,
        factor=factor, l2=l2, beta1=beta1, new1=new1, beta2=beta2, new2=new2,
        scale=scale, root=root, eps=eps, decay=decay,
    )  # fmt: skip
    return {"exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"], "update": moments["direction"]}


def trust_ratio(weight: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
    """Divide the norm of a weight by the norm of its step; 1 if either is zero."""
    return torch.where((weight > 0) & (direction > 0), weight / direction, 1.0)


def lamb_scalars(group: Hyper, t: torch.Tensor, factor: Number) -> dict[str, Number]:
    """Compute the numbers of the three kernels, without the ``rate`` of ``lamb_apply``.

    Args:
        group: ``betas``, ``eps``, ``weight_decay``, ``adam_w_mode``, ``bias_correction`` and ``grad_averaging``.
        t: the number of the step, from 1, in float64.
        factor: the factor for gradients.
    """
    beta1, beta2 = group["betas"]
    weight_decay, decoupled, corrected = group["weight_decay"], group["adam_w_mode"], group["bias_correction"]
    first, second = bias_corrections((beta1, beta2), t)
    return {
        "factor": factor,
        "l2": 0.0 if decoupled else weight_decay,
        "decay": weight_decay if decoupled else 0.0,
        "beta1": beta1,
        "new1": 1.0 - beta1 if group["grad_averaging"] else 1.0,
        "beta2": beta2,
        "new2": 1.0 - beta2,
        "scale": first.reciprocal() if corrected else 1.0,
        "root": second.rsqrt() if corrected else 1.0,
        "eps": group["eps"],
    }


class FusedLAMB(FusedOptimizer):
    """Apex's LAMB, in two passes over all parameters.

    The gradients of all groups together are clipped to ``max_grad_norm`` first. The state equals Adam's; gradients are
    not changed.

    Args:
        params: parameters or groups of them.
        lr: learning rate, a number or 0-dim tensor.
        bias_correction: correct the moments for their start at zero.
        betas: decay rates of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: weight decay coefficient.
        amsgrad: refused, as in Apex.
        adam_w_mode: decoupled weight decay; False adds weight decay to the gradient.
        grad_averaging: weight the gradient by 1 - betas[0] in the first moment; False uses a weight of 1.
        set_grad_none: the default of ``zero_grad(set_to_none=...)``.
        max_grad_norm: see ``CommonOptions``; None does not clip.
        use_nvlamb: scale by the ratio of norms even if ``weight_decay`` is 0.
        master_weights: see ``CommonOptions``.
        **common: the other options that all fused optimizers share; see ``CommonOptions``.

    Raises:
        ArgumentValueError: for a value out of range, or ``amsgrad``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        *,
        master_weights: MasterForm = None,
        **common: Unpack[NamedOptions],
    ) -> None:
        if amsgrad:
            raise ArgumentValueError("amsgrad=True: LAMB has no AMSGrad variant; leave it False.")
        max_grad_norm = max_grad_norm or None
        super().__init__(**arguments(locals(), "amsgrad"))

    def _layout(self, group: Hyper) -> StateLayout:
        return {"step": NUMBER, "exp_avg": FIRST_MOMENT, "exp_avg_sq": SECOND_MOMENT}

    def _update(self, group: Hyper, rows: ParamRows, step: Step) -> None:
        scalars = lamb_scalars(group, step.t, step.factor)
        weight, direction = rows.launch(lamb_moments, scalars, step.skip).sqrt()
        rate = group["lr"]
        if group["weight_decay"] or group["use_nvlamb"]:
            rate = rate * trust_ratio(weight, direction)
        rows.launch(lamb_apply, {**scalars, "rate": rate}, step.skip)


class FusedMixedPrecisionLamb(FusedLAMB):
    """``FusedLAMB`` with fp32 masters for its 16-bit parameters, with Apex's name and arguments.

    Args:
        params: parameters or groups of them.
        lr: learning rate, a number or 0-dim tensor.
        step: the initial step count.
        bias_correction: as in ``FusedLAMB``.
        betas: as in ``FusedLAMB``.
        eps: as in ``FusedLAMB``.
        weight_decay: as in ``FusedLAMB``.
        amsgrad: refused.
        adam_w_mode: as in ``FusedLAMB``.
        grad_averaging: as in ``FusedLAMB``.
        max_grad_norm: as in ``FusedLAMB``.
        use_nvlamb: as in ``FusedLAMB``.
        reduced_precision_dtype: accepted for Apex; every 16-bit parameter gets a master.
        master_weights: see ``CommonOptions``.

    Raises:
        ArgumentValueError: for a value out of range, or ``amsgrad``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
        *,
        master_weights: MasterForm = True,
    ) -> None:
        self._first_step = step
        super().__init__(**arguments(locals(), "step", "reduced_precision_dtype"))

    def _layout(self, group: Hyper) -> StateLayout:
        return {**super()._layout(group), "step": StateSpec(None, float(self._first_step))}
