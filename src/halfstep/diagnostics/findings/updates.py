"""The update of a known optimizer: the expression of its fused form, run on samples.

The expressions come from ``optimizers``; Lion, which has no fused form, is defined here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ...kernels.expr import ElementwiseKernel, elementwise_kernel, trace
from ...kernels.tensor_table import Scalars
from ...optimizers.adagrad import adagrad, adagrad_scalars
from ...optimizers.adam import adam, adam_scalars, amsgrad
from ...optimizers.base import Hyper
from ...optimizers.sgd import momentum_sgd, sgd, sgd_scalars

__all__ = ["KnownUpdate", "decays_apart", "known_update", "rounds_once"]

Update = tuple[ElementwiseKernel, Scalars]
"""The expression of an update, and the numbers in it."""


def _adam(group: Hyper, t: torch.Tensor) -> Update:
    return amsgrad if group["amsgrad"] else adam, adam_scalars(group, t, 1.0, "adam_w_mode" not in group)


def _sgd(group: Hyper, t: torch.Tensor) -> Update:
    return momentum_sgd if group["momentum"] else sgd, sgd_scalars({"wd_after_momentum": False, **group}, 1.0, 1.0)


def _adagrad(group: Hyper, t: torch.Tensor) -> Update:
    return adagrad, adagrad_scalars({"lr_decay": 0.0, "adagrad_w_mode": False, **group}, t, 1.0)


@elementwise_kernel()
def lion(param: Any, *, lr: Any) -> dict[str, Any]:
    """Update one element by Lion (Chen et al., arXiv 2302.06675), with a gradient sign of 1: every step has size lr."""
    return {"param": param - lr}


def _lion(group: Hyper, t: torch.Tensor) -> Update:
    return lion, {"lr": group["lr"]}


_OPS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "sqrt": torch.sqrt,
    "maximum": torch.maximum,
}


class KnownUpdate(NamedTuple):
    """The update of a known optimizer.

    Attributes:
        of_group: makes the update from a parameter group and the step number.
        state_names: the state entries that the update reads.
    """

    of_group: Callable[[Hyper, torch.Tensor], Update]
    state_names: tuple[str, ...]

    def weights(
        self, group: Hyper, columns: Mapping[str, torch.Tensor], t: torch.Tensor, *, stepped: bool
    ) -> torch.Tensor | None:
        """Compute the weights after an update, before rounding; None if they are not known.

        A state that has stepped is used as the update left it: the entries that the expression would store are not
        computed again. Before the first step the state is 0, and Adam's expression makes the same step for any
        gradient.

        Args:
            group: the hyperparameters of a parameter group.
            columns: "param", and, if they exist, "grad" and the state entries, in one dtype.
            t: the number of this step, from 1, in a ``scalar_dtype``.
            stepped: True if the state is from after a step.
        """
        kernel, numbers = self.of_group(group, t)
        known = trace(kernel)
        loads: dict[str, torch.Tensor | None] = dict(columns)
        left: dict[int, torch.Tensor] = {}
        if stepped:
            left = {at: columns[name] for name, at in known.stores.items() if name in columns and name != "param"}
        else:
            param = columns["param"]
            any_gradient = torch.ones_like(param) if "exp_avg_sq" in known.columns else None
            loads = {**dict.fromkeys(known.columns, torch.zeros_like(param)), "grad": any_gradient, **columns}

        def value(at: int) -> Any:
            op, args = known.nodes[at].op, known.nodes[at].args
            if at in left or op == "load":
                return left[at] if at in left else loads.get(str(args[0]))
            if op == "scalar" or op == "const":
                return numbers[str(args[0])] if op == "scalar" else args[0]
            operands = [value(int(each)) for each in args]
            if op == "mul" and any(isinstance(each, (int, float)) and each == 0 for each in operands):
                return 0.0  # so a gradient with the factor 0 may be missing
            return None if any(each is None for each in operands) else _OPS[op](*operands)

        weights: torch.Tensor | None = value(known.stores["param"])
        return weights


_KNOWN = {
    "Adam": KnownUpdate(_adam, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "SGD": KnownUpdate(_sgd, ("momentum_buffer",)),
    "Adagrad": KnownUpdate(_adagrad, ("sum",)),
    "Lion": KnownUpdate(_lion, ()),
}
_KNOWN |= {f"Fused{name}": _KNOWN[name] for name in ("Adam", "SGD", "Adagrad")}


def known_update(optimizer: torch.optim.Optimizer) -> KnownUpdate | None:
    """Find the update of torch's Adam, AdamW, SGD and Adagrad, their fused forms, and classes named Lion."""
    for cls in type(optimizer).__mro__:
        whose = cls.__module__.partition(".")[0]
        if cls.__name__ in _KNOWN and (whose in ("torch", "halfstep") or cls.__name__ == "Lion"):
            return _KNOWN[cls.__name__]
    return None


def decays_apart(group: Mapping[str, Any]) -> bool:
    """True if the group's weight decay multiplies the weight instead of being added to the gradient (AdamW)."""
    decoupled = group.get("decoupled_weight_decay", group.get("adam_w_mode", False))
    return bool(decoupled) and bool(group.get("weight_decay"))


def rounds_once(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """True if a step rounds a weight once, after decay and update: in fused kernels, halfstep's and torch's."""
    return bool(group.get("fused")) or hasattr(optimizer, "keep_masters")
