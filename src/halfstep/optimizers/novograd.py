"""NovoGrad: gradients normalized by a moving norm per parameter, a number instead of Adam's second-moment tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..core.checks import arguments
from ..core.errors import ArgumentValueError
from ..core.scalars import in_scalar_dtype, scalar_dtype
from ..kernels.expr import elementwise_kernel
from ..kernels.shards import complete_max
from ..kernels.tensor_table import Number
from .base import FusedOptimizer, Hyper, Step, bias_corrections
from .options import CommonOptions
from .param_rows import FIRST_MOMENT, NUMBER, ParamRows, StateLayout

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FusedNovoGrad", "moving_norm", "novograd", "novograd_scalars"]


@elementwise_kernel()
def novograd(
    grad: Any, param: Any, exp_avg: Any,
    *, factor: Any, l2: Any, beta1: Any, new1: Any, rate: Any, decay: Any,
) -> dict[str, Any]:  # fmt: skip
    """Update one element by NovoGrad (Ginsburg et al., arXiv 1905.11286); the numbers include the gradient's norm."""
    exp_avg = exp_avg * beta1 + (grad * factor + param * l2) * new1
    return {"param": param * decay - exp_avg * rate, "exp_avg": exp_avg}


def moving_norm(before: torch.Tensor, norm: torch.Tensor, beta2: float, norm_type: int) -> torch.Tensor:
    """Update the moving norm of gradients by the norms of a step's gradients."""
    if norm_type == 2:
        return (beta2 * before.square() + (1.0 - beta2) * norm.square()).sqrt()
    return beta2 * before + (1.0 - beta2) * norm


def novograd_scalars(group: Hyper, t: torch.Tensor, factor: Number, moving: torch.Tensor) -> dict[str, Number]:
    """Compute the numbers of ``novograd``.

    Args:
        group: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``bias_correction``, ``reg_inside_moment`` and
            ``grad_averaging``.
        t: the number of the step, from 1, in float64.
        factor: the factor for gradients.
        moving: the moving norms: float64 of shape [rows].
    """
    beta1, beta2 = group["betas"]
    lr, weight_decay, inside = group["lr"], group["weight_decay"], group["reg_inside_moment"]
    corrected = group["bias_correction"]
    first, second = bias_corrections((beta1, beta2), t)
    denominator = (moving / second.sqrt() if corrected else moving) + group["eps"]
    rate = lr / first if corrected else lr
    return {
        "factor": factor / denominator if inside else factor,
        "l2": weight_decay if inside else 0.0,
        "beta1": beta1,
        "new1": 1.0 - beta1 if group["grad_averaging"] else 1.0,
        "rate": rate if inside else rate / denominator,
        "decay": 1.0 if inside else 1.0 - lr * weight_decay,
    }


class FusedNovoGrad(FusedOptimizer):
    """Apex's NovoGrad: one read of the gradients for their norms, one pass for the update.

    State: ``step``, ``exp_avg``, and ``exp_avg_sq``, a single number: the moving norm (not its square).

    Args:
        params: parameters or groups of them.
        lr: learning rate, a number or 0-dim tensor.
        bias_correction: correct the moments for their start at zero.
        betas: decay rates of the first moment and of the norm.
        eps: added to the norm.
        weight_decay: weight decay coefficient.
        amsgrad: refused, as in Apex.
        reg_inside_moment: normalize the gradient and add weight decay before the first moment; False does so after it.
        grad_averaging: weight the gradient by 1 - betas[0] in the first moment; False uses a weight of 1.
        norm_type: 2, or 0 for the largest magnitude.
        init_zero: start the norm at zero; False starts at the first gradient's norm.
        set_grad_none: the default of ``zero_grad(set_to_none=...)``.
        **common: the options that all fused optimizers share; see ``CommonOptions``.

    Raises:
        ArgumentValueError: for a value out of range, another norm, or ``amsgrad``.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
        **common: Unpack[CommonOptions],
    ) -> None:
        if amsgrad:
            raise ArgumentValueError("amsgrad=True: NovoGrad has no AMSGrad variant here; leave it False.")
        super().__init__(**arguments(locals(), "amsgrad"))

    def _check(self, group: Hyper) -> None:
        super()._check(group)
        if group["norm_type"] not in (0, 2):
            raise ArgumentValueError(f"norm_type={group['norm_type']!r} must be 2, or 0 for the largest magnitude.")

    def _layout(self, group: Hyper) -> StateLayout:
        return {"step": NUMBER, "exp_avg": FIRST_MOMENT, "exp_avg_sq": NUMBER}

    def _update(self, group: Hyper, rows: ParamRows, step: Step) -> None:
        stored, t, skip = rows.numbers["exp_avg_sq"], step.t, step.skip
        before = in_scalar_dtype(stored)
        scale: Any = abs(step.factor)
        norm = (rows.squared_norms().sqrt() if group["norm_type"] == 2 else _largest(rows)) * scale
        after = moving_norm(before, norm, group["betas"][1], group["norm_type"])
        if not group["init_zero"]:
            after = torch.where(t == 1.0, norm, after)
        stored.copy_(after if skip is None else torch.where(skip != 0, before, after))
        rows.launch(novograd, novograd_scalars(group, t, step.factor, after), skip)


def _largest(rows: ParamRows) -> torch.Tensor:
    """Find the largest magnitude of each gradient: shape [rows], in the ``scalar_dtype`` of the device."""
    grads = rows.table.columns["grad"][1][0]
    result = torch.zeros(len(grads), dtype=scalar_dtype(rows.device), device=rows.device)
    filled = [i for i, g in enumerate(grads) if g.numel()]
    if filled:
        result[filled] = torch.stack(torch._foreach_norm([grads[i] for i in filled], torch.inf)).to(result.dtype)
    return complete_max(result, rows.domain)
