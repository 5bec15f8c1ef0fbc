"""Adam and AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..core.checks import arguments
from ..kernels.expr import Columns, TorchUpdate, elementwise_kernel
from ..kernels.tensor_table import Number, Scalars, of_rows
from ..torch_internals.torch_compat import fused_adam_, fused_adamw_
from .base import FusedOptimizer, Hyper, Step, bias_corrections
from .options import MasterForm, NamedOptions
from .param_rows import FIRST_MOMENT, NUMBER, SECOND_MOMENT, ParamRows, StateLayout

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FusedAdam", "adam", "adam_scalars", "amsgrad"]


def _by_torch(numbers: Scalars) -> TorchUpdate:
    """Make the update of ``adam`` and ``amsgrad`` by torch's fused calls."""
    l2 = float(numbers["l2"])
    t = numbers["t"] if numbers["bias_correction"] else torch.inf  # at which the correction beta ** t is 0
    settings = {name: float(numbers[name]) for name in ("lr", "beta1", "beta2", "weight_decay", "eps")}

    def update(columns: Columns, rows: list[int]) -> None:
        lists = [columns[name] for name in ("param", "grad", "exp_avg", "exp_avg_sq")]
        largest = columns.get("max_exp_avg_sq", [])
        call = fused_adam_ if l2 else fused_adamw_
        call(*lists, largest, of_rows(t, rows), amsgrad=bool(largest), maximize=False, **settings)

    return update


@elementwise_kernel(by_torch=_by_torch)
def adam(
    grad: Any, param: Any, exp_avg: Any, exp_avg_sq: Any,
    *, factor: Any, l2: Any, decay: Any, new1: Any, beta2: Any, new2: Any, step_size: Any, root: Any, eps: Any,
) -> dict[str, Any]:  # fmt: skip
    """Update one element by Adam (Kingma and Ba, arXiv 1412.6980) with AdamW's weight decay (arXiv 1711.05101).

    ``l2`` adds to the gradient, and ``decay`` (1 - lr * weight_decay) shrinks the weight; one of the two is neutral.
    """
    grad = grad * factor + param * l2
    exp_avg = exp_avg + (grad - exp_avg) * new1
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * new2
    param = param * decay - exp_avg / (exp_avg_sq.sqrt() * root + eps) * step_size
    return {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


@elementwise_kernel(by_torch=_by_torch)
def amsgrad(
    grad: Any, param: Any, exp_avg: Any, exp_avg_sq: Any, max_exp_avg_sq: Any,
    *, factor: Any, l2: Any, decay: Any, new1: Any, beta2: Any, new2: Any, step_size: Any, root: Any, eps: Any,
) -> dict[str, Any]:  # fmt: skip
    """Update one element by Adam with a second moment that never shrinks (Reddi et al., arXiv 1904.09237)."""
    grad = grad * factor + param * l2
    exp_avg = exp_avg + (grad - exp_avg) * new1
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * new2
    max_exp_avg_sq = max_exp_avg_sq.maximum(exp_avg_sq)
    param = param * decay - exp_avg / (max_exp_avg_sq.sqrt() * root + eps) * step_size
    return {"param": param, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "max_exp_avg_sq": max_exp_avg_sq}


def adam_scalars(group: Hyper, t: Number, factor: Number, of_torch: bool = False) -> dict[str, Number]:
    """Compute the numbers of ``adam`` and ``amsgrad``, and of torch's fused calls.

    Args:
        group: ``lr``, ``betas``, ``eps``, ``weight_decay``, ``adam_w_mode`` and ``bias_correction``.
        t: the number of the step, from 1: a float or a float64 tensor.
        factor: the factor for gradients.
        of_torch: True for a group of torch's ``Adam`` or ``AdamW``, which has ``decoupled_weight_decay`` instead of
            the last two and always corrects the bias. A loaded state may add keys of ``FusedAdam``, which do not count.
    """
    lr, weight_decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
    decoupled = group["decoupled_weight_decay" if of_torch else "adam_w_mode"]
    corrected = of_torch or group["bias_correction"]
    first, second = bias_corrections((beta1, beta2), t) if corrected else (1.0, 1.0)
    return {
        "factor": factor,
        "l2": 0.0 if decoupled else weight_decay,
        "decay": 1.0 - lr * weight_decay if decoupled else 1.0,
        "new1": 1.0 - beta1,
        "beta2": beta2,
        "new2": 1.0 - beta2,
        "step_size": lr / first,
        "root": second**-0.5,
        "eps": group["eps"],
        "lr": lr,
        "beta1": beta1,
        "weight_decay": weight_decay,
        "t": t,
        "bias_correction": corrected,
    }


class FusedAdam(FusedOptimizer):
    """``torch.optim.AdamW``, or ``Adam`` with ``adam_w_mode=False``, in one pass over all parameters.

    The state is interchangeable with torch's: ``step``, ``exp_avg``, ``exp_avg_sq`` and, with ``amsgrad``,
    ``max_exp_avg_sq``; in float32 even for 16-bit parameters (float64 for float64 parameters).

    Args:
        params: parameters or groups of them.
        lr: learning rate, a number or 0-dim tensor.
        bias_correction: correct the moments for their start at zero.
        betas: decay rates of the first and the second moment.
        eps: added to the root of the second moment.
        adam_w_mode: decoupled weight decay (AdamW); False adds weight decay to the gradient (L2).
        weight_decay: weight decay coefficient.
        amsgrad: keep the largest second moment.
        set_grad_none: the default of ``zero_grad(set_to_none=...)``.
        capturable: accepted for Apex and torch; every step can be captured in a CUDA graph.
        master_weights: see ``CommonOptions``.
        max_grad_norm: see ``CommonOptions``.
        **common: the other options that all fused optimizers share; see ``CommonOptions``.

    Raises:
        ArgumentValueError: for a value out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: MasterForm = None,
        *,
        max_grad_norm: float | None = None,
        **common: Unpack[NamedOptions],
    ) -> None:
        super().__init__(**arguments(locals()))

    def _layout(self, group: Hyper) -> StateLayout:
        layout = {"step": NUMBER, "exp_avg": FIRST_MOMENT, "exp_avg_sq": SECOND_MOMENT}
        return {**layout, "max_exp_avg_sq": SECOND_MOMENT} if group["amsgrad"] else layout

    def _update(self, group: Hyper, rows: ParamRows, step: Step) -> None:
        kernel = amsgrad if group["amsgrad"] else adam
        # Next to an fp32 tensor a float counts as fp32, and a bias correction in fp32 loses digits.
        t = step.t if isinstance(group["lr"], torch.Tensor) else step.t_on_host
        rows.launch(kernel, adam_scalars(group, t, step.factor, self._groups_of_torch), step.skip)
