"""LARC: the learning rate of each parameter bounded by the ratio of its norm to its gradient's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..core.checks import check_kind, check_number
from ..core.errors import UsageError
from ..kernels.expr import elementwise_kernel
from ..parameters.ledger import widen
from ..parameters.master_registry import find_master
from .base import Hyper
from .options import FusedOptions
from .param_rows import GroupRows

__all__ = ["LARC"]


@elementwise_kernel(squares=("grad_norm", "param_norm"))
def larc_norms(grad: Any, param: Any) -> dict[str, Any]:
    """The sums of squares of a gradient and its parameter."""
    return {"grad_norm": grad, "param_norm": param}


@elementwise_kernel()
def larc_rescale(grad: Any, param: Any, *, l2: Any, rate: Any) -> dict[str, Any]:
    """The gradient with weight decay, times the rate of its parameter."""
    return {"grad": (grad + param * l2) * rate}


class LARC:
    """A wrapper of any optimizer that rescales gradients before its step (You, Gitman and Ginsburg, arXiv 1708.03888).

    For each parameter, ``local = trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)``. Clipping takes
    min(local, lr) as the rate, scaling takes local * lr. Weight decay is applied here and withheld from the optimizer
    for the step. A parameter whose weight or gradient is all zero is left as it is. Nothing is read from the device.

    Args:
        optimizer: the optimizer to wrap.
        trust_coefficient: eta of the paper.
        clip: bound the rate; False multiplies it.
        eps: added to the denominator.

    Attributes:
        optim: the wrapped optimizer. Other attributes of it are reached through the wrapper.

    Raises:
        ArgumentTypeError: for something else than an optimizer, or a number of another type.
        ArgumentValueError: for a number below 0, or not finite.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        check_kind("LARC: optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        check_number("trust_coefficient", trust_coefficient)
        check_number("eps", eps)
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip
        self._rows: dict[int, tuple[dict[torch.Tensor, dict[str, Any]], GroupRows | None]] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # not there yet while a copy is being made
            raise AttributeError(name)
        return getattr(self.optim, name)

    def attach(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: gradients are rescaled in ``step``, so parameters cannot step before it."""
        raise UsageError(
            "LARC rescales gradients in step(), and gradient release steps parameters before that. Use FusedLAMB, "
            "which has a rate for each parameter in its own step, or keep the gradients."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_rows": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"LARC({self.optim!r})"

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Rescale the gradients, then step with the wrapped optimizer.

        Args:
            closure: evaluated here, once, before the gradients are rescaled.

        Returns:
            The closure's loss, or what the optimizer's step returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decays = [group.get("weight_decay") for group in self.optim.param_groups]
        for index, group in enumerate(self.optim.param_groups):
            self._rescale(index, group, decays[index] or 0.0)
        try:
            for group in self.optim.param_groups:
                if "weight_decay" in group:
                    group["weight_decay"] = 0.0
            result = self.optim.step()  # type: ignore[no-untyped-call, unused-ignore]
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                if decay is not None:
                    group["weight_decay"] = decay
        return result if closure is None else loss

    def _rescale(self, index: int, group: Hyper, decay: float) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        # 16 bits would lose the weight decay.
        widen([p for p in params if p.dtype is torch.float32 or find_master(p) is not None])
        states, known = self._rows.get(index, ({}, None))
        if known is None or not known.renew(params, states, {}):
            states = {p: {} for p in params}  # LARC keeps no state
            known = GroupRows(params, states, {}, FusedOptions(), range(len(params)), [None] * len(params))
            self._rows[index] = states, known
        for rows in known.rows:
            grad_norm, param_norm = rows.launch(larc_norms, {}).sqrt()
            rate = self.trust_coefficient * param_norm / (grad_norm + param_norm * decay + self.eps)
            if self.clip:
                rate = (rate / group["lr"]).clamp(max=1.0)
            used = (param_norm != 0) & (grad_norm != 0)
            l2 = torch.where(used, torch.full_like(rate, decay), 0.0)
            rows.launch(larc_rescale, {"l2": l2, "rate": torch.where(used, rate, 1.0)})
            rows.table.columns["grad"][1][0].clear()
