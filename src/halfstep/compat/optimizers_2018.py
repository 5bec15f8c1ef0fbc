"""The fused optimizers of 2018, of ``apex.optimizers`` and ``apex.contrib``; ``fp16_optimizer_2018.py`` wraps them.

A step takes separate gradients, the scale of these gradients, and 16-bit copies of the parameters to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .. import optimizers
from ..core.errors import ArgumentValueError
from ..kernels.expr import elementwise_kernel
from ..kernels.tensor_table import Number
from ..optimizers.base import FusedOptimizer, Hyper, Step
from ..optimizers.param_rows import GroupRows, ParamRows
from ..parameters.unscale import clip_factor

__all__ = ["ApexFusedAdam", "ApexFusedSGD", "FusedAdamOf2018"]

Groups = Iterable[torch.Tensor] | Sequence[Sequence[torch.Tensor]] | None
"""A list of tensors for a single parameter group, or a list of tensors per group."""


class _StepOf2018(FusedOptimizer):
    """A fused optimizer whose ``step`` also takes the arguments that ``FP16_Optimizer`` of 2018 passed."""

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Groups = None,
        output_params: Groups = None,
        scale: float = 1.0,
        grad_norms: object = None,
        **kwargs: Any,
    ) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: a function that evaluates the model again and returns the loss.
            grads: gradients of any floating dtype to use in place of the parameters' ``grad``.
            output_params: tensors that get the new parameters, in their dtypes.
            scale: the divisor of the gradients.
            grad_norms: not used; the step computes the norms.
            **kwargs: the arguments of any fused optimizer's ``step``.

        Returns:
            The closure's loss, or None.

        Raises:
            ArgumentValueError: for lists that do not fit the parameter groups.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given = [] if grads is None else self._pairs(grads, "grads")
        before = [param.grad for param, _ in given]
        for param, grad in given:
            param.grad = None if grad is None else grad.to(param).view_as(param)
        scaled = scale != 1.0
        if scaled:
            self.grad_scale = torch.tensor(float(scale), dtype=torch.float32, device="cpu")
        try:
            FusedOptimizer.step(self, **kwargs)
        finally:
            if scaled:
                del self.grad_scale
            for (param, _), grad in zip(given, before, strict=True):
                param.grad = grad
        for param, output in [] if output_params is None else self._pairs(output_params, "output_params"):
            if output is not None:
                output.copy_(param.view_as(output))
        return loss

    def _pairs(self, given: Groups, name: str) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        lists: list[Any] = list(given or ())
        if not lists or not isinstance(lists[0], (list, tuple)):
            lists = [lists]
        params = [group["params"] for group in self.param_groups]
        if [len(tensors) for tensors in lists] != [len(group) for group in params]:
            raise ArgumentValueError(
                f"{name} has {' + '.join(str(len(tensors)) for tensors in lists)} tensors, and the parameter groups "
                f"have {' + '.join(str(len(group)) for group in params)} parameters."
            )
        return [pair for group, tensors in zip(params, lists, strict=True) for pair in zip(group, tensors, strict=True)]


@elementwise_kernel()
def adam_of_2018(
    grad: Any, param: Any, exp_avg: Any, exp_avg_sq: Any,
    *, factor: Any, new1: Any, beta2: Any, new2: Any, step_size: Any, decay: Any, inside: Any, outside: Any,
) -> dict[str, Any]:  # fmt: skip
    """Update an element as Apex's Adam did: eps added to the uncorrected second moment, weight decay in the step."""
    grad = grad * factor
    exp_avg = exp_avg + (grad - exp_avg) * new1
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * new2
    step = exp_avg / ((exp_avg_sq + inside).sqrt() + outside) + param * decay
    return {"param": param - step * step_size, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


class ApexFusedAdam(_StepOf2018, optimizers.FusedAdam):
    """``halfstep.optimizers.FusedAdam`` with the ``step`` of 2018, as ``apex.optimizers`` has it.

    A call with an argument that only the class of 2018 had (``eps_inside_sqrt``, ``use_mt``, ``amp_scale_adjustment``,
    ``max_grad_norm``) returns a ``FusedAdamOf2018``, which has the arithmetic of 2018.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> ApexFusedAdam:
        """Return an instance of this class, or of ``FusedAdamOf2018`` for an argument of 2018."""
        of_2018 = cls is ApexFusedAdam and not _ONLY_2018.isdisjoint(kwargs)
        return super().__new__(FusedAdamOf2018 if of_2018 else cls)


_ONLY_2018 = {"eps_inside_sqrt", "use_mt", "amp_scale_adjustment", "max_grad_norm"}


class FusedAdamOf2018(ApexFusedAdam):
    """Adam with the arithmetic of ``apex.contrib.optimizers`` and, until 2019, of ``apex.optimizers``.

    ``m`` and ``v`` are Adam's moments and ``rate`` is ``lr``, times ``sqrt(1 - beta2 ** t) / (1 - beta1 ** t)`` with
    ``bias_correction``; a step is ``p -= rate * (m / (sqrt(v) + eps) + weight_decay * p)``.

    Args:
        params: parameters or parameter groups, which may each have a ``max_grad_norm``.
        lr: learning rate.
        bias_correction: correct the moments for their start at zero.
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment.
        eps_inside_sqrt: add ``eps`` under the root.
        weight_decay: strength of the decay.
        max_grad_norm: clip the 2-norm of the gradients of each group to this; 0 does not.
        amsgrad: must be False, as in Apex.
        use_mt: kept for Apex; one call always updates all parameters.
        amp_scale_adjustment: must be 1.0.

    Raises:
        ArgumentValueError: for a value that is out of range or not supported.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        if amsgrad:
            raise ArgumentValueError("amsgrad=True: this FusedAdam has none; use halfstep.optimizers.FusedAdam.")
        if amp_scale_adjustment != 1.0:
            raise ArgumentValueError("amp_scale_adjustment must be 1.0; set the loss scale instead.")
        super().__init__(params, lr, bias_correction, betas, eps, True, weight_decay)
        self.eps_inside_sqrt = eps_inside_sqrt
        self.defaults["max_grad_norm"] = max_grad_norm
        for group in self.param_groups:
            group.setdefault("max_grad_norm", max_grad_norm)

    def _take(self, groups: Iterable[tuple[Hyper, GroupRows]], factor: Number, skip: torch.Tensor | None) -> None:
        for group, rows in groups:
            super()._take([(group, rows)], _clipped(group["max_grad_norm"], rows, factor), skip)

    def _update(self, group: Hyper, rows: ParamRows, step: Step) -> None:
        beta1, beta2 = group["betas"]
        rate = group["lr"]
        if group["bias_correction"]:
            t = step.t
            rate = rate * (1.0 - beta2**t).sqrt() / (1.0 - beta1**t)
        numbers = {
            "factor": step.factor,
            "new1": 1.0 - beta1,
            "beta2": beta2,
            "new2": 1.0 - beta2,
            "step_size": rate,
            "decay": group["weight_decay"],
            "inside": group["eps"] if self.eps_inside_sqrt else 0.0,
            "outside": 0.0 if self.eps_inside_sqrt else group["eps"],
        }
        rows.launch(adam_of_2018, numbers, step.skip)


def _clipped(limit: float, rows: GroupRows, factor: Number) -> Number:
    """Return the factor of a group's gradients, lowered if their norm is above the limit."""
    if not limit > 0:
        return factor
    device = rows.rows[0].device
    squares = [each.squared_norms().sum().to(device, non_blocking=True) for each in rows.rows]
    norm = sum(squares[1:], squares[0]).sqrt() * factor
    return factor * clip_factor(norm, limit)


class ApexFusedSGD(_StepOf2018, optimizers.FusedSGD):
    """``halfstep.optimizers.FusedSGD`` with the ``step`` of 2018, as ``apex.contrib.optimizers`` has it."""
