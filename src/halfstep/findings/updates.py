"""The update that a known optimizer makes of its weights, from its state and learning rate alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["Update", "columns_of", "decays_apart", "rounds_once", "update_of"]

Update = Callable[[Mapping[str, Any], Mapping[str, torch.Tensor], Any], Any]
"""Called with a parameter group, fp32 columns by name ("param", "grad" and what the state has), and the step number.
Gives the absolute change of each weight, None where the columns do not tell."""


def _adam(group: Mapping[str, Any], columns: Mapping[str, torch.Tensor], t: Any) -> Any:
    """Kingma and Ba, arXiv 1412.6980. The first step of Adam moves every weight by the learning rate."""
    lr = group["lr"]
    first, second = columns.get("exp_avg"), columns.get("max_exp_avg_sq", columns.get("exp_avg_sq"))
    if first is None or second is None:
        return torch.ones_like(columns["param"]) * lr
    if group.get("bias_correction", True):
        beta1, beta2 = group["betas"]
        first = first / (1 - beta1**t)
        second = second / (1 - beta2**t)
    return first.div_(second.sqrt().add_(group["eps"])).mul_(lr)


def _sgd(group: Mapping[str, Any], columns: Mapping[str, torch.Tensor], t: Any) -> Any:
    grad, buffer, momentum = columns.get("grad"), columns.get("momentum_buffer"), group["momentum"]
    if grad is not None and group["weight_decay"]:
        grad = grad + columns["param"] * group["weight_decay"]
    if momentum and buffer is not None:
        step = grad + buffer * momentum if group["nesterov"] and grad is not None else buffer
        return step * group["lr"]
    return None if grad is None else grad * group["lr"]


def _adagrad(group: Mapping[str, Any], columns: Mapping[str, torch.Tensor], t: Any) -> Any:
    grad, total = columns.get("grad"), columns.get("sum")
    if grad is None or total is None:
        return None
    lr = group["lr"] / (1 + (t - 1) * group.get("lr_decay", 0.0))
    return grad / (total.sqrt() + group["eps"]) * lr


def _rmsprop(group: Mapping[str, Any], columns: Mapping[str, torch.Tensor], t: Any) -> Any:
    grad, buffer = columns.get("grad"), columns.get("momentum_buffer")
    if group["momentum"] and buffer is not None:
        return buffer * group["lr"]
    square, mean = columns.get("square_avg"), columns.get("grad_avg")
    if grad is None or square is None:
        return None
    square = square if mean is None else square - mean * mean
    return grad / (square.sqrt() + group["eps"]) * group["lr"]


def _lion(group: Mapping[str, Any], columns: Mapping[str, torch.Tensor], t: Any) -> Any:
    """Chen et al., arXiv 2302.06675: every weight moves by the learning rate."""
    return torch.ones_like(columns["param"]) * group["lr"]


_KNOWN: dict[str, tuple[Update, tuple[str, ...]]] = {
    "Adam": (_adam, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "SGD": (_sgd, ("momentum_buffer",)),
    "Adagrad": (_adagrad, ("sum",)),
    "RMSprop": (_rmsprop, ("square_avg", "grad_avg", "momentum_buffer")),
    "Lion": (_lion, ()),
}
_KNOWN |= {f"Fused{name}": _KNOWN[name] for name in ("Adam", "SGD", "Adagrad")}


def _known(optimizer: torch.optim.Optimizer) -> tuple[Update, tuple[str, ...]] | None:
    for cls in type(optimizer).__mro__:
        whose = cls.__module__.partition(".")[0]
        if cls.__name__ in _KNOWN and (whose in ("torch", "halfstep") or cls.__name__ == "Lion"):
            return _KNOWN[cls.__name__]
    return None


def update_of(optimizer: torch.optim.Optimizer) -> Update | None:
    """The update of torch's Adam, AdamW, SGD, Adagrad and RMSprop, of their fused forms, and of what is called Lion."""
    found = _known(optimizer)
    return None if found is None else found[0]


def columns_of(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The entries of the state that its update reads."""
    found = _known(optimizer)
    return () if found is None else found[1]


def decays_apart(group: Mapping[str, Any]) -> bool:
    """Whether the group's weight decay multiplies the weight instead of being added to the gradient (AdamW)."""
    decoupled = group.get("decoupled_weight_decay", group.get("adam_w_mode", False))
    return bool(decoupled) and bool(group.get("weight_decay"))


def rounds_once(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a step rounds a weight once, decay and update together: in fused kernels, halfstep's and torch's."""
    return bool(group.get("fused")) or hasattr(optimizer, "keep_masters")
