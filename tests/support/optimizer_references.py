"""The updates in float64, straight from the papers' formulas, with no thought of speed. Tests compare with these."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from halfstep import optimizers

State = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """An optimizer, its arguments, and what one step of it does to one parameter."""

    name: str
    cls: Callable[..., torch.optim.Optimizer]
    update: Callable[..., torch.Tensor]
    arguments: dict[str, Any] = field(default_factory=dict)
    clips: float | None = None

    def __str__(self) -> str:
        return self.name


def adam(p, g, s: State, t, *, lr, weight_decay, adam_w_mode=True, amsgrad=False, beta1=0.9, beta2=0.999, eps=1e-8):
    """Kingma and Ba, algorithm 1; Loshchilov and Hutter, algorithm 2; Reddi et al., algorithm 2."""
    if not adam_w_mode:
        g = g + weight_decay * p
    s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * g
    s["v"] = beta2 * s.get("v", 0) + (1 - beta2) * g * g
    s["top"] = torch.maximum(s["v"], s.get("top", torch.zeros_like(p))) if amsgrad else s["v"]
    new = p - lr * (s["m"] / (1 - beta1**t)) / ((s["top"] / (1 - beta2**t)).sqrt() + eps)
    return new - lr * weight_decay * p if adam_w_mode else new


def sgd(p, g, s: State, t, *, lr, weight_decay, momentum=0.0, dampening=0.0, nesterov=False, wd_after_momentum=False):
    """The pseudo-code of torch.optim.SGD."""
    late = wd_after_momentum and momentum
    if not late:
        g = g + weight_decay * p
    if momentum:
        s["b"] = g if t == 1 else momentum * s["b"] + (1 - dampening) * g
        g = g + momentum * s["b"] if nesterov else s["b"]
    if late:
        g = g + weight_decay * p
    return p - lr * g


def adagrad(p, g, s: State, t, *, lr, weight_decay, lr_decay=0.0, adagrad_w_mode=False, eps=1e-10):
    """Duchi et al., figure 1, with a diagonal matrix."""
    if not adagrad_w_mode:
        g = g + weight_decay * p
    s["sum"] = s.get("sum", 0) + g * g
    step = g / (s["sum"].sqrt() + eps)
    if adagrad_w_mode:
        step = step + weight_decay * p
    return p - lr / (1 + (t - 1) * lr_decay) * step


def lamb(p, g, s: State, t, *, lr, weight_decay, adam_w_mode=True, grad_averaging=True, use_nvlamb=False):
    """You et al., algorithm 2, with phi the identity."""
    beta1, beta2, eps = 0.9, 0.999, 1e-6
    if not adam_w_mode:
        g = g + weight_decay * p
    s["m"] = beta1 * s.get("m", 0) + (1 - beta1 if grad_averaging else 1) * g
    s["v"] = beta2 * s.get("v", 0) + (1 - beta2) * g * g
    step = (s["m"] / (1 - beta1**t)) / ((s["v"] / (1 - beta2**t)).sqrt() + eps)
    if adam_w_mode:
        step = step + weight_decay * p
    ratio = 1.0
    if (weight_decay or use_nvlamb) and p.norm() > 0 and step.norm() > 0:
        ratio = p.norm() / step.norm()
    return p - lr * ratio * step


def novograd(p, g, s: State, t, *, lr, weight_decay, reg_inside_moment=False, norm_type=2, init_zero=False):
    """Ginsburg et al., algorithm 1, with Adam's bias corrections as Apex adds them."""
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    norm = (g.norm() if norm_type == 2 else g.abs().max()) if g.numel() else torch.zeros(())
    old = s.get("v", torch.zeros(()).double() if init_zero else norm)
    if norm_type == 2:
        s["v"] = (beta2 * old**2 + (1 - beta2) * norm**2).sqrt()
    else:
        s["v"] = beta2 * old + (1 - beta2) * norm
    denominator = s["v"] / math.sqrt(1 - beta2**t) + eps
    if reg_inside_moment:
        s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * (g / denominator + weight_decay * p)
        return p - lr * s["m"] / (1 - beta1**t)
    s["m"] = beta1 * s.get("m", 0) + (1 - beta1) * g
    return p - lr * (s["m"] / (1 - beta1**t) / denominator + weight_decay * p)


CASES = [
    Case("adamw", optimizers.FusedAdam, adam),
    Case("adam", optimizers.FusedAdam, adam, {"adam_w_mode": False}),
    Case("amsgrad", optimizers.FusedAdam, adam, {"amsgrad": True}),
    Case("sgd", optimizers.FusedSGD, sgd),
    Case("momentum", optimizers.FusedSGD, sgd, {"momentum": 0.9, "dampening": 0.3}),
    Case("nesterov", optimizers.FusedSGD, sgd, {"momentum": 0.9, "nesterov": True, "wd_after_momentum": True}),
    Case("adagrad", optimizers.FusedAdagrad, adagrad, {"lr_decay": 0.1}),
    Case("adagradw", optimizers.FusedAdagrad, adagrad, {"adagrad_w_mode": True}),
    Case("lamb", optimizers.FusedLAMB, lamb, clips=1.0),
    Case("lamb-l2", optimizers.FusedLAMB, lamb, {"adam_w_mode": False, "grad_averaging": False}, clips=1.0),
    Case("novograd", optimizers.FusedNovoGrad, novograd),
    Case("novograd-inside", optimizers.FusedNovoGrad, novograd, {"reg_inside_moment": True, "init_zero": True}),
    Case("novograd-max", optimizers.FusedNovoGrad, novograd, {"norm_type": 0}),
]


class Reference:
    """Parameters in float64 that follow the formulas, rounded after each step by ``store``."""

    def __init__(self, case: Case, params: list[torch.Tensor], lr: float, weight_decay: float, clip: float | None):
        self.params = [p.detach().to(torch.float64, copy=True) for p in params]
        self.states: list[State] = [{} for _ in params]
        self.t = 0
        self.case, self.lr, self.weight_decay, self.clip = case, lr, weight_decay, clip

    def step(self, grads: list[torch.Tensor], store: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.t += 1
        grads = [g.double() for g in grads]
        if self.clip is not None:
            norm = torch.cat([g.flatten() for g in grads]).norm()
            grads = [g * min(1.0, self.clip / (norm + 1e-6)) for g in grads]
        for i, (p, g, s) in enumerate(zip(self.params, grads, self.states, strict=True)):
            hyper = {"lr": self.lr, "weight_decay": self.weight_decay, **self.case.arguments}
            self.params[i] = store(self.case.update(p, g, s, self.t, **hyper))
