"""Adagrad."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..core.checks import arguments
from ..core.errors import ArgumentValueError
from ..kernels.expr import Columns, TorchUpdate, elementwise_kernel
from ..kernels.tensor_table import Number, Scalars, of_rows
from ..torch_internals.torch_compat import fused_adagrad_
from .base import FusedOptimizer, Hyper, Step
from .options import CommonOptions
from .param_rows import NUMBER, ParamRows, StateLayout, StateSpec

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FusedAdagrad", "adagrad", "adagrad_scalars"]


def _by_torch(numbers: Scalars) -> TorchUpdate:
    """Make the update of ``adagrad`` by torch's fused call, with decoupled weight decay in a pass before it."""
    l2, decay = float(numbers["l2"]), float(numbers["decay"])
    settings = {name: float(numbers[name]) for name in ("lr", "lr_decay", "eps")}

    def update(columns: Columns, rows: list[int]) -> None:
        if decay != 1.0:
            torch._foreach_mul_(columns["param"], decay)
        lists = [columns[name] for name in ("param", "grad", "sum")]
        fused_adagrad_(*lists, of_rows(numbers["t"], rows), weight_decay=l2, maximize=False, **settings)

    return update


@elementwise_kernel(by_torch=_by_torch)
def adagrad(
    grad: Any, param: Any, sum: Any, *, factor: Any, l2: Any, decay: Any, rate: Any, eps: Any
) -> dict[str, Any]:
    """Update one element by Adagrad (Duchi, Hazan and Singer, JMLR 12, 2011); ``decay`` is decoupled weight decay."""
    grad = grad * factor + param * l2
    sum = sum + grad * grad
    return {"param": param * decay - grad / (sum.sqrt() + eps) * rate, "sum": sum}


def adagrad_scalars(group: Hyper, t: torch.Tensor, factor: Number, of_torch: bool = False) -> dict[str, Number]:
    """Compute the numbers of ``adagrad``, and of torch's fused call.

    Args:
        group: ``lr``, ``eps``, ``weight_decay``, ``lr_decay`` and ``adagrad_w_mode``.
        t: the number of the step, from 1; used only with ``lr_decay``.
        factor: the factor for gradients.
        of_torch: True for a group of torch's ``Adagrad``, whose weight decay is never decoupled.
    """
    lr, weight_decay, decoupled = group["lr"], group["weight_decay"], not of_torch and group["adagrad_w_mode"]
    return {
        "factor": factor,
        "l2": 0.0 if decoupled else weight_decay,
        "decay": 1.0 - lr * weight_decay if decoupled else 1.0,
        "rate": lr / (1.0 + (t - 1.0) * group["lr_decay"]) if group["lr_decay"] else lr,
        "eps": group["eps"],
        "lr": lr,
        "lr_decay": group["lr_decay"],
        "t": t,
    }


class FusedAdagrad(FusedOptimizer):
    """``torch.optim.Adagrad`` in one pass over all parameters; its state is interchangeable: ``step`` and ``sum``.

    Args:
        params: parameters or groups of them.
        lr: learning rate, a number or 0-dim tensor.
        eps: added to the root of the sum.
        weight_decay: weight decay coefficient.
        set_grad_none: the default of ``zero_grad(set_to_none=...)``.
        adagrad_w_mode: decoupled weight decay; False adds weight decay to the gradient.
        lr_decay: the rate is divided by 1 + (step - 1) * lr_decay.
        initial_accumulator_value: the initial value of the sum.
        **common: the options that all fused optimizers share; see ``CommonOptions``.

    Raises:
        ArgumentValueError: for a value out of range.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
        *,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        **common: Unpack[CommonOptions],
    ) -> None:
        if common.get("state_dtype") is not None:
            raise ArgumentValueError(
                f"state_dtype={common['state_dtype']!r} is for moments, which are averages. FusedAdagrad adds up "
                "squares, and a sum that is rounded stops growing; leave state_dtype out."
            )
        super().__init__(**arguments(locals()))

    def _layout(self, group: Hyper) -> StateLayout:
        return {"step": NUMBER, "sum": StateSpec(torch.float32, group["initial_accumulator_value"])}

    def _update(self, group: Hyper, rows: ParamRows, step: Step) -> None:
        rows.launch(adagrad, adagrad_scalars(group, step.t, step.factor, self._groups_of_torch), step.skip)
