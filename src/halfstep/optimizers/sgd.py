"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..core.checks import arguments
from ..core.errors import ArgumentTypeError, ArgumentValueError
from ..kernels.expr import Columns, TorchUpdate, elementwise_kernel
from ..kernels.tensor_table import Number, Scalars
from ..torch_internals.torch_compat import fused_sgd_
from .base import FusedOptimizer, Hyper, Step
from .options import CommonOptions
from .param_rows import FIRST_MOMENT, NUMBER, ParamRows, StateLayout

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FusedSGD", "momentum_sgd", "sgd", "sgd_scalars"]


def _by_torch(numbers: Scalars) -> TorchUpdate | None:
    """Make the update by torch's fused call; None for late weight decay and for a dampened gradient."""
    new = numbers["new"]
    if numbers["late_l2"] or isinstance(new, torch.Tensor) or new != 1.0:
        return None
    settings = {
        "lr": float(numbers["lr"]),
        "momentum": float(numbers["old"]),
        "weight_decay": float(numbers["l2"]),
        "nesterov": bool(numbers["direct"]),
    }

    def update(columns: Columns, rows: list[int]) -> None:
        buffers = columns.get("momentum_buffer", [])
        fused_sgd_(
            columns["param"], columns["grad"], buffers, dampening=0.0, maximize=False, is_first_step=False, **settings
        )

    return update


@elementwise_kernel(by_torch=_by_torch)
def sgd(grad: Any, param: Any, *, factor: Any, l2: Any, lr: Any) -> dict[str, Any]:
    """Update one element by gradient descent with L2 weight decay."""
    return {"param": param - (grad * factor + param * l2) * lr}


# Without momentum torch writes no buffer.
@elementwise_kernel(by_torch=lambda numbers: _by_torch(numbers) if numbers["old"] else None)
def momentum_sgd(
    grad: Any, param: Any, momentum_buffer: Any,
    *, factor: Any, l2: Any, old: Any, new: Any, direct: Any, smoothed: Any, late_l2: Any, lr: Any,
) -> dict[str, Any]:  # fmt: skip
    """Update one element by torch's momentum (Sutskever et al., ICML 2013, with the rate outside).

    The step is ``direct * gradient + smoothed * buffer``: with 0 and 1, or for Nesterov with 1 and the momentum.
    """
    grad = grad * factor + param * l2
    momentum_buffer = momentum_buffer * old + grad * new
    step = grad * direct + momentum_buffer * smoothed + param * late_l2
    return {"param": param - step * lr, "momentum_buffer": momentum_buffer}


def sgd_scalars(group: Hyper, new: Number, factor: Number, of_torch: bool = False) -> dict[str, Number]:
    """Compute the numbers of ``sgd`` and ``momentum_sgd``.

    Args:
        group: ``lr``, ``momentum``, ``weight_decay``, ``nesterov`` and ``wd_after_momentum``.
        new: the share of the gradient that enters the buffer.
        factor: the factor for gradients.
        of_torch: True for a group of torch's ``SGD``, whose weight decay enters before the momentum.
    """
    momentum, weight_decay, nesterov = group["momentum"], group["weight_decay"], group["nesterov"]
    late = not of_torch and group["wd_after_momentum"] and momentum
    return {
        "factor": factor,
        "l2": 0.0 if late else weight_decay,
        "lr": group["lr"],
        "old": momentum,
        "new": new,
        "direct": 1.0 if nesterov else 0.0,
        "smoothed": momentum if nesterov else 1.0,
        "late_l2": weight_decay if late else 0.0,
    }


class FusedSGD(FusedOptimizer):
    """``torch.optim.SGD`` in one pass over all parameters.

    With momentum the state is torch's ``momentum_buffer``; with ``dampening`` also ``step``, which torch ignores:
    ``dampening`` does not apply to a parameter's first step.

    Args:
        params: parameters or groups of them.
        lr: learning rate, a number or 0-dim tensor.
        momentum: momentum factor.
        dampening: share of the gradient that does not enter the buffer, after the first step.
        weight_decay: weight decay coefficient (L2).
        nesterov: look ahead by one momentum step.
        wd_after_momentum: apply weight decay to the step instead of the gradient that enters the buffer.
        materialize_master_grads: accepted for Apex; gradients are never copied.
        set_grad_none: the default of ``zero_grad(set_to_none=...)``. Apex's default is False, which keeps gradients in
            memory and lets parameters that a loss does not reach continue to move by their momentum.
        **common: the options that all fused optimizers share; see ``CommonOptions``.

    Raises:
        ArgumentValueError: for a value out of range, or ``nesterov`` without momentum or with dampening.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = True,
        **common: Unpack[CommonOptions],
    ) -> None:
        self.materialize_master_grads = materialize_master_grads
        super().__init__(**arguments(locals(), "materialize_master_grads"))

    def _check(self, group: Hyper) -> None:
        super()._check(group)
        momentum, dampening = group["momentum"], group["dampening"]
        if isinstance(dampening, bool) or not isinstance(dampening, (int, float)):
            raise ArgumentTypeError(f"dampening must be a number, not {dampening!r}.")
        if group["nesterov"] and (momentum <= 0 or dampening != 0):
            raise ArgumentValueError(
                f"nesterov=True with momentum={momentum} and dampening={dampening}: it needs momentum above 0 and no "
                "dampening."
            )

    def _complete_state(self, group: Hyper, params: Iterable[torch.Tensor]) -> None:
        for param in params if group["dampening"] else ():
            state = self.state.get(param, {})
            if isinstance(state.get("momentum_buffer"), torch.Tensor):  # from torch, or from before dampening was set
                state.setdefault("step", torch.tensor(1.0, dtype=torch.float32, device="cpu"))
        super()._complete_state(group, params)

    def _layout(self, group: Hyper) -> StateLayout:
        if not group["momentum"]:
            return {}
        layout = {"momentum_buffer": FIRST_MOMENT}
        return {"step": NUMBER, **layout} if group["dampening"] else layout

    def _update(self, group: Hyper, rows: ParamRows, step: Step) -> None:
        new: Number = 1.0
        if group["momentum"] and group["dampening"]:
            # The first step takes the whole gradient, and the buffer is zero then.
            t = step.t
            new = 1.0 - group["dampening"] * (t > 1.0).to(t)
        kernel = momentum_sgd if group["momentum"] else sgd
        rows.launch(kernel, sgd_scalars(group, new, step.factor, self._groups_of_torch), step.skip)
