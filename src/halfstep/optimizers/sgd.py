"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import ArgumentValueError
from ..kernels.expr import Pass
from ._base import FusedOptimizer, Hyper, check_number
from ._options import MasterForm, Options
from ._rows import NUMBER, GroupRows, Kept, Rows, StateLayout

__all__ = ["FusedSGD", "momentum_sgd", "sgd"]


def sgd(grad: Any, param: Any, *, factor: Any, l2: Any, lr: Any) -> dict[str, Any]:
    """One element of gradient descent with L2 weight decay."""
    return {"param": param - (grad * factor + param * l2) * lr}


def momentum_sgd(
    grad: Any, param: Any, momentum_buffer: Any,
    *, factor: Any, l2: Any, old: Any, new: Any, direct: Any, smoothed: Any, late_l2: Any, lr: Any,
) -> dict[str, Any]:  # fmt: skip
    """One element of momentum as torch has it (Sutskever et al., ICML 2013, with the rate outside).

    The step is ``direct * gradient + smoothed * buffer``: 0 and 1, or 1 and the momentum for Nesterov's.
    """
    grad = grad * factor + param * l2
    momentum_buffer = momentum_buffer * old + grad * new
    step = grad * direct + momentum_buffer * smoothed + param * late_l2
    return {"param": param - step * lr, "momentum_buffer": momentum_buffer}


_SGD = Pass("sgd", sgd)
_MOMENTUM_SGD = Pass("momentum_sgd", momentum_sgd)


class FusedSGD(FusedOptimizer):
    """``torch.optim.SGD`` in one pass over all parameters.

    With momentum the state is torch's ``momentum_buffer``; with ``dampening`` it is ``step``, too, which torch ignores:
    whether a parameter has stepped yet decides if ``dampening`` applies.

    Args:
        params: parameters or groups of them.
        lr: learning rate, a number or 0-dim tensor.
        momentum: share of the buffer that is kept.
        dampening: share of the gradient that does not enter the buffer after its first step.
        weight_decay: added to the gradient times the weight.
        nesterov: look ahead by one momentum step.
        wd_after_momentum: apply weight decay to the step, not to what enters the buffer.
        materialize_master_grads: kept for Apex; gradients are never copied here.
        set_grad_none: what ``zero_grad()`` does by default.
        master_weights: see ``Options``.
        maximize: go up the gradient.
        max_grad_norm: see ``Options``.
        state_dtype: of ``momentum_buffer``; see ``Options``.
        rounding: see ``Options``.
        seed: of stochastic rounding.

    Raises:
        ArgumentValueError: for a value out of range, or Nesterov's without momentum or with dampening.
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
        set_grad_none: bool = False,
        *,
        master_weights: MasterForm = None,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        state_dtype: torch.dtype | None = None,
        rounding: Any = "nearest",
        seed: int = 0,
    ) -> None:
        check_number("lr", lr)
        check_number("momentum", momentum)
        check_number("weight_decay", weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ArgumentValueError(
                f"nesterov=True with momentum={momentum} and dampening={dampening}: it needs momentum above 0 and no "
                "dampening."
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "wd_after_momentum": wd_after_momentum,
            "maximize": maximize,
        }
        self.materialize_master_grads = materialize_master_grads
        options = Options(max_grad_norm, master_weights, state_dtype, rounding, seed)
        super().__init__(params, defaults, options, set_grad_none=set_grad_none)

    def _gather(self) -> list[tuple[Hyper, GroupRows]]:
        if any(group["dampening"] for group in self.param_groups):
            for state in self.state.values():  # buffers without a count are torch's, or from before there was dampening
                if isinstance(state.get("momentum_buffer"), torch.Tensor):
                    state.setdefault("step", torch.tensor(1.0))
        return super()._gather()

    def _layout(self, group: Hyper) -> StateLayout:
        if not group["momentum"]:
            return {}
        layout = {"momentum_buffer": Kept(self.options.state_dtype or torch.float32)}
        return {"step": NUMBER, **layout} if group["dampening"] else layout

    def _update(
        self, group: Hyper, rows: Rows, t: torch.Tensor | None, factor: torch.Tensor | float, skip: torch.Tensor | None
    ) -> None:
        momentum, dampening, weight_decay = group["momentum"], group["dampening"], group["weight_decay"]
        late = group["wd_after_momentum"] and momentum
        scalars = {"factor": factor, "l2": 0.0 if late else weight_decay, "lr": group["lr"]}
        if not momentum:
            rows.run(_SGD, scalars, skip)
            return
        new: float | torch.Tensor = 1.0
        if dampening:
            assert t is not None
            new = 1.0 - dampening * (t > 1.0).to(t)  # the first step takes the gradient whole; the buffer is zero then
        scalars |= {
            "old": momentum,
            "new": new,
            "direct": 1.0 if group["nesterov"] else 0.0,
            "smoothed": momentum if group["nesterov"] else 1.0,
            "late_l2": weight_decay if late else 0.0,
        }
        rows.run(_MOMENTUM_SGD, scalars, skip)
