"""The fused optimizers of 2018 and the ``FP16_Optimizer`` for them, of ``apex.optimizers`` and ``apex.contrib``.

A step takes gradients that are not those of its parameters, a scale to divide them by, and 16-bit copies to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .. import optimizers
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..kernels.expr import elementwise_kernel
from ..kernels.tensor_table import Number
from ..optimizers.base import FusedOptimizer, Hyper, Step
from ..optimizers.param_rows import GroupRows, ParamRows
from ..optimizers.release import GradientRelease
from . import fp16_utils

__all__ = ["FP16_Optimizer", "FusedAdam", "FusedAdamOf2018", "FusedSGD"]

Groups = Iterable[torch.Tensor] | Sequence[Sequence[torch.Tensor]] | None
"""A list of tensors, if there is one parameter group, or a list of them for each."""


class _StepOf2018(FusedOptimizer):
    """A ``step`` that also takes what ``FP16_Optimizer`` of 2018 handed to it."""

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
            closure: evaluates the model again and returns the loss.
            grads: gradients to use in the place of those of the parameters, of any floating dtype.
            output_params: written with the new parameters, in their own dtype.
            scale: gradients are divided by it.
            grad_norms: not used; norms are computed here.
            **kwargs: as for any fused optimizer.

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
            self.grad_scale = torch.tensor(float(scale))
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
    """One element of Adam as Apex had it: eps beside the second moment as it is, weight decay in the step."""
    grad = grad * factor
    exp_avg = exp_avg + (grad - exp_avg) * new1
    exp_avg_sq = exp_avg_sq * beta2 + grad * grad * new2
    step = exp_avg / ((exp_avg_sq + inside).sqrt() + outside) + param * decay
    return {"param": param - step * step_size, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


class FusedAdam(_StepOf2018, optimizers.FusedAdam):
    """``halfstep.optimizers.FusedAdam`` with the ``step`` of 2018, as ``apex.optimizers`` has it.

    Called with an argument that only the class of 2018 had (``eps_inside_sqrt``, ``use_mt``, ``amp_scale_adjustment``,
    ``max_grad_norm``) it makes a ``FusedAdamOf2018``, whose arithmetic is that of 2018.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> FusedAdam:
        """An instance of this class, or of that of 2018."""
        of_2018 = cls is FusedAdam and not _ONLY_2018.isdisjoint(kwargs)
        return super().__new__(FusedAdamOf2018 if of_2018 else cls)


_ONLY_2018 = {"eps_inside_sqrt", "use_mt", "amp_scale_adjustment", "max_grad_norm"}


class FusedAdamOf2018(FusedAdam):
    """Adam as ``apex.contrib.optimizers`` and, until 2019, ``apex.optimizers`` had it.

    ``m`` and ``v`` are Adam's moments and ``rate`` is ``lr``, times ``sqrt(1 - beta2 ** t) / (1 - beta1 ** t)`` with
    ``bias_correction``; a step is ``p -= rate * (m / (sqrt(v) + eps) + weight_decay * p)``.

    Args:
        params: parameters or groups of them, which may have a ``max_grad_norm`` of their own.
        lr: learning rate.
        bias_correction: divide the moments by what their start at zero left out.
        betas: decay of the first and the second moment.
        eps: added to the root of the second moment.
        eps_inside_sqrt: add ``eps`` inside of the root.
        weight_decay: strength of the decay.
        max_grad_norm: clip the 2-norm of the gradients of each group to this; 0 does not.
        amsgrad: must be False, as in Apex.
        use_mt: kept for Apex; all parameters are always updated together.
        amp_scale_adjustment: must be 1.0.

    Raises:
        ArgumentValueError: for a value out of range, or that is not supported.
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
        self._clipped: dict[int, Number] = {}

    def attach(self, *args: Any, **kwargs: Any) -> GradientRelease:
        """As for any fused optimizer, where no group is clipped: that takes all gradients of a group."""
        if any(group["max_grad_norm"] > 0 for group in self.param_groups):
            raise UsageError(
                "Gradient release steps parameters before all gradients of their group are there, and max_grad_norm "
                "clips a group by them. Use halfstep.optimizers.FusedAdam(max_grad_norm=), or keep the gradients."
            )
        return super().attach(*args, **kwargs)

    def _take(self, groups: Iterable[tuple[Hyper, GroupRows]], factor: Number, skip: torch.Tensor | None) -> None:
        groups = list(groups)
        self._clipped = {id(group): _clipped(group["max_grad_norm"], rows, factor) for group, rows in groups}
        super()._take(groups, factor, skip)

    def _step_rows(self, group: Hyper, rows: ParamRows, factor: Number, skip: torch.Tensor | None) -> None:
        super()._step_rows(group, rows, self._clipped[id(group)], skip)

    def _update(self, group: Hyper, rows: ParamRows, step: Step) -> None:
        beta1, beta2 = group["betas"]
        rate = group["lr"]
        if group["bias_correction"]:
            rate = rate * (1.0 - beta2**step.t).sqrt() / (1.0 - beta1**step.t)
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
    """The factor of the gradients of a group, made smaller where their norm is above the limit."""
    if not limit > 0:
        return factor
    device = rows.rows[0].device
    squares = [each.squared_norms().sum().to(device, non_blocking=True) for each in rows.rows]
    norm = sum(squares[1:], squares[0]).sqrt() * factor
    return factor * (limit / (norm + 1e-6)).clamp(max=1.0)


class FusedSGD(_StepOf2018, optimizers.FusedSGD):
    """``halfstep.optimizers.FusedSGD`` with the ``step`` of 2018, as ``apex.contrib.optimizers`` has it."""


class FP16_Optimizer(fp16_utils.FP16_Optimizer):  # noqa: N801 - Apex's name
    """Masters and a loss scale around a fused optimizer, in the form that ``apex.optimizers`` had in 2018.

    It differs from ``halfstep.fp16_utils.FP16_Optimizer`` in this: ``backward`` leaves the gradients scaled, ``step``
    unscales them and moves the scale, a dynamic scale starts at 2**16, and ``zero_grad`` sets to None.

    Args:
        init_optimizer: any ``torch.optim.Optimizer``; Apex took its fused ones only.
        static_loss_scale: a finite number above zero.
        dynamic_loss_scale: use a dynamic scale, whatever ``static_loss_scale`` says.
        dynamic_loss_args: keyword arguments of ``DynamicLossScaler``; Apex took none.
        verbose: kept for Apex. Skipped steps are logged.

    Raises:
        ArgumentTypeError: for an ``init_optimizer`` that is no optimizer, or an unknown key in ``dynamic_loss_args``.
        ArgumentValueError: for a scale or another value that is not allowed.
        UsageError: for an optimizer that has masters or a loss scale already.

    Source: Apex, ``apex.contrib.optimizers.fp16_optimizer``.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        args = {"init_scale": 2.0**16, "scale_window": 1000, **(dynamic_loss_args or {})}
        super().__init__(init_optimizer, static_loss_scale, dynamic_loss_scale, args, verbose=False)
        self.verbose = verbose

    def zero_grad(self, set_grads_to_None: bool = True, *, set_to_none: bool | None = None) -> None:  # type: ignore[override]  # noqa: N803
        """Clear the gradients: to None by default."""
        super().zero_grad(set_grads_to_None, set_to_none=set_to_none)

    def backward(self, loss: torch.Tensor, update_master_grads: bool = False, retain_graph: bool = False) -> None:
        """The backward pass of ``loss``, scaled. The gradients stay scaled until ``step``.

        Args:
            loss: 0-dim floating tensor; a 16-bit one is converted to fp32 before it is scaled.
            update_master_grads: True unscales them at once.
            retain_graph: as for ``Tensor.backward``.
        """
        super().backward(loss, update_master_grads, retain_graph)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Unscale the gradients and update the masters, or skip if a gradient was inf or NaN; move the scale."""
        if closure is None:
            self.update_master_grads()
        return super().step(closure, **kwargs)

    # ---- what scripts look at

    @property
    def cur_scale(self) -> float:
        """The present loss scale; set it to a finite number above zero. Reads the device."""
        return self.loss_scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self.loss_scale = value

    @property
    def cur_iter(self) -> int:
        """How many steps there were."""
        return self.loss_scaler.engine.cur_iter

    @cur_iter.setter
    def cur_iter(self, value: int) -> None:
        self.loss_scaler.engine.cur_iter = value

    @property
    def last_overflow_iter(self) -> int:
        """Which of them overflowed last, counted from 0; -1 if none did. Reads the device."""
        return int(self.loss_scaler.engine.last_overflow)

    @property
    def fp32_groups(self) -> list[list[torch.Tensor]]:
        """What the steps update, group by group: the masters of 16-bit parameters, and the other parameters."""
        masters = self._attached.keeper.master_params()
        return [[next(masters) for _ in group["params"]] for group in self.param_groups]

    @property
    def fp32_groups_flat(self) -> list[torch.Tensor]:
        """A copy of ``fp32_groups``, each group as one vector. Writing to it changes nothing."""
        return [torch.cat([p.detach().float().reshape(-1) for p in group]) for group in self.fp32_groups]

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Scale, masters and the wrapped optimizer's state: numbers, lists, dicts and tensors only.

        The keys are those of ``apex.optimizers``.
        """
        own = {
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "cur_scale": self.cur_scale,
            "cur_iter": self.cur_iter,
        }
        if self.dynamic_loss_scale:
            scaler: Any = self.loss_scaler
            own |= {"last_overflow_iter": self.last_overflow_iter}
            own |= {"scale_factor": scaler.scale_factor, "scale_window": scaler.scale_window}
        return {
            **own,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups_flat": self.fp32_groups_flat,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, or what the class of ``apex.optimizers`` or ``apex.contrib`` had saved.

        The masters are rounded into the model. Whether the scale is static or dynamic stays as constructed, and so do
        its window and factor.

        Raises:
            ArgumentValueError: if it does not fit this optimizer. Nothing has been changed then.
        """
        missing = [key for key in ("cur_scale", "cur_iter", "optimizer_state_dict") if key not in state_dict]
        masters = state_dict.get("fp32_groups_flat", state_dict.get("fp32_groups"))
        if missing or masters is None:
            raise ArgumentValueError(
                "This is no state_dict of an FP16_Optimizer of apex.optimizers: it has no "
                f"{', '.join(missing) or 'fp32_groups_flat'}. Its keys are {sorted(state_dict)}."
            )
        groups: list[list[torch.Tensor]] = [group["params"] for group in self.param_groups]
        values = [_pieces(saved, group) for saved, group in zip(masters, groups, strict=len(masters) == len(groups))]
        if len(values) != len(groups):
            raise ArgumentValueError(
                f"Masters of {len(values)} groups were saved, and this optimizer has {len(groups)}."
            )
        self.optimizer.load_state_dict(_unflattened(state_dict["optimizer_state_dict"], groups))
        iteration, last = int(state_dict["cur_iter"]), int(state_dict.get("last_overflow_iter", -1))
        scaler: Any = self.loss_scaler
        entry = {"loss_scale": float(state_dict["cur_scale"]), "cur_iter": iteration, "last_overflow_iter": last}
        window = getattr(scaler, "scale_window", 1000)
        scaler.load_state_dict({**entry, "unskipped": (iteration - last - 1) % window})
        with torch.no_grad():
            for group, pieces in zip(groups, values, strict=True):
                for param, value in zip(group, pieces, strict=True):
                    has = self._attached.keeper.has(param)
                    param.copy_(self._attached.keeper.write_master(param, value.to(param.device)) if has else value)


def _pieces(saved: Any, group: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a group in the shapes of its parameters, out of one vector or a list of them."""
    flat = torch.cat([t.detach().reshape(-1) for t in (saved if isinstance(saved, (list, tuple)) else [saved])])
    sizes = [param.numel() for param in group]
    if flat.numel() != sum(sizes):
        raise ArgumentValueError(f"A group was saved with {flat.numel()} values, and here it has {sum(sizes)}.")
    return [piece.view_as(param) for piece, param in zip(flat.split(sizes), group, strict=True)]


def _unflattened(saved: dict[str, Any], groups: list[list[torch.Tensor]]) -> dict[str, Any]:
    """The state of an optimizer over one vector for each group, as that of one over their parameters."""
    if all(_fits(saved, names, group) for names, group in zip(saved["param_groups"], groups, strict=True)):
        return saved
    state: dict[int, dict[str, Any]] = {}
    param_groups: list[dict[str, Any]] = []
    for names, group in zip(saved["param_groups"], groups, strict=True):
        if len(names["params"]) != 1:
            raise ArgumentTypeError(f"optimizer_state_dict has {len(names['params'])} parameters, here {len(group)}.")
        first = sum(len(other["params"]) for other in param_groups)
        numbers = list(range(first, first + len(group)))
        param_groups.append({**names, "params": numbers})
        entries = saved["state"].get(names["params"][0], {})
        for key, value in entries.items():
            vector = isinstance(value, torch.Tensor) and value.dim() > 0
            for number, piece in zip(numbers, _pieces(value, group) if vector else [value] * len(group), strict=True):
                state.setdefault(number, {})[key] = piece.clone() if isinstance(piece, torch.Tensor) else piece
    return {"state": state, "param_groups": param_groups}


def _fits(saved: dict[str, Any], names: dict[str, Any], group: list[torch.Tensor]) -> bool:
    entries = zip((saved["state"].get(name, {}) for name in names["params"]), group, strict=False)
    return len(names["params"]) == len(group) and all(
        value.shape == param.shape
        for entry, param in entries
        for value in entry.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
