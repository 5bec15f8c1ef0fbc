"""Every way to get a loss's backward pass and its step, so that a rule about overflows or scales is one table of doors.

A door is named as a user would: a level ("O2, fused=False"), "handle", "wrap_optimizer", "FP16_Optimizer", "GradScaler"
(with ", unscale_" and ", attached"), "torch's GradScaler", or "TrainStep" before a level or "GradScaler".
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from halfstep import DynamicLossScale, TrainStep, amp
from halfstep.fp16_utils import FP16_Optimizer
from tests.support.worlds import FP16, FP32

__all__ = ["DYNAMIC", "Door", "open_door"]

DYNAMIC = DynamicLossScale(init_scale=256.0)


def nothing() -> None:
    """Leave gradients as they came."""


class Door:
    """A model, its optimizer, and how a loss gets its backward pass: here in a block of ``amp.scale_loss``."""

    name = ""

    def __init__(self, words: list[str], model: Any, optimizer: Any, half: torch.dtype, rule: Any) -> None:
        self.words, self.model, self.optimizer = words, model, optimizer
        self.dtype = FP32
        self.start(half, rule)

    def start(self, half: torch.dtype, rule: Any) -> None:
        amp.initialize(
            self.model,
            self.optimizer,
            opt_level=self.name,
            dtype=half,
            loss_scale=rule,
            fused="fused=False" not in self.words,
            verbosity=0,
        )
        self.engine = self.optimizer._amp_stash.session.loss_scalers[0]

    def block(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        return amp.scale_loss(loss, self.optimizer)

    def backward(self, loss: torch.Tensor, spoil: Callable[[], Any] = nothing) -> None:
        """Run a backward pass; ``spoil`` changes the scaled gradients."""
        with self.block(loss) as scaled:
            scaled.backward()
            spoil()

    def step(self) -> None:
        self.optimizer.step()

    def run(self, closure: Callable[[], torch.Tensor]) -> Any:
        """Run a step with a closure, and return its loss."""
        return self.optimizer.step(closure)

    def train(self, loss: Callable[[], torch.Tensor]) -> None:
        """Run a whole step, and clear gradients."""
        self.backward(loss())
        self.step()
        self.optimizer.zero_grad()

    def loss(self, i: int, factor: float = 1.0) -> torch.Tensor:
        """Return the loss of batch ``i``."""
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i)).to(self.dtype)
        return self.model(x).float().square().mean() * factor

    def clip(self, norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(amp.master_params(self.optimizer), norm, norm_type)

    def scale(self) -> float:
        return self.engine.loss_scale()

    def skipped(self) -> bool | None:
        """True if the latest step was skipped; None where only the weights tell."""
        return bool(getattr(self.optimizer, "optimizer", self.optimizer).step_was_skipped)

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def everything(self) -> list[torch.Tensor]:
        """Return copies of parameters, masters and the optimizer's state."""
        state = torch.utils._pytree.tree_leaves(self.optimizer.state_dict()["state"] if self.dtype is FP32 else [])
        parts = [*self.model.parameters(), *amp.master_params(self.optimizer), *map(torch.as_tensor, state)]
        return [part.detach().to_dense().clone() for part in parts]


class Handle(Door):
    def start(self, half: torch.dtype, rule: Any) -> None:
        self.handle = amp.init(dtype=half, loss_scale=rule)
        self.engine = self.handle._scaler
        if self.name == "wrap_optimizer":
            self.optimizer = self.handle.wrap_optimizer(self.optimizer, num_loss=2)
            self.engine = self.optimizer._scalers[0]

    def block(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        return self.handle.scale_loss(loss, self.optimizer)


class Explicit(Door):
    def start(self, half: torch.dtype, rule: Any) -> None:
        self.dtype = half
        args = {"init_scale": rule.init_scale, "scale_factor": rule.growth_factor, "scale_window": rule.growth_interval}
        self.optimizer = FP16_Optimizer(self.optimizer, dynamic_loss_scale=True, dynamic_loss_args=args, verbose=False)
        self.engine = self.optimizer.loss_scaler.engine

    def backward(self, loss: torch.Tensor, spoil: Callable[[], Any] = nothing) -> None:
        self.optimizer.backward(loss, update_master_grads=False)
        spoil()
        self.optimizer.update_master_grads()

    def clip(self, norm: float, norm_type: float = 2.0) -> Any:
        return self.optimizer.clip_master_grads(norm, norm_type)


class Scaler(Door):
    def start(self, half: torch.dtype, rule: Any) -> None:
        if "attached" in self.words:
            amp.initialize(self.model, self.optimizer, opt_level="O0", verbosity=0)
        if self.name == "GradScaler":
            self.scaler: Any = amp.GradScaler.from_loss_scale(rule)
            self.engine = self.scaler.loss_scaler
        else:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=rule.init_scale)  # always dynamic

    def backward(self, loss: torch.Tensor, spoil: Callable[[], Any] = nothing) -> None:
        self.scaler.scale(loss).backward()
        spoil()
        if "unscale_" in self.words:
            self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        self.stepped = self.scaler.step(self.optimizer)
        self.scaler.update()

    def run(self, closure: Callable[[], torch.Tensor]) -> Any:
        self.stepped = self.scaler.step(self.optimizer, closure=closure)
        self.scaler.update()
        return self.stepped.returned

    def clip(self, norm: float, norm_type: float = 2.0) -> Any:
        assert norm_type == 2.0, "a scaler clips by this norm alone"
        return self.scaler.clip_grad_norm_(self.optimizer, norm)

    def scale(self) -> float:
        return self.scaler.get_scale()

    def skipped(self) -> bool | None:
        return not self.stepped if self.name == "GradScaler" else None


class AllInOne(Door):
    """``TrainStep``, which runs the whole step behind another door."""

    def start(self, half: torch.dtype, rule: Any) -> None:
        inner = open_door(self.words[0], None, half, self.model, rule, self.optimizer)
        self.engine, self.inner = inner.engine, inner
        self.one_step = TrainStep(lambda: self.current(), None, self.optimizer, scaler=getattr(inner, "scaler", None))

    def train(self, loss: Callable[[], torch.Tensor]) -> None:
        self.current = loss
        self.one_step()

    def skipped(self) -> bool | None:
        return None if isinstance(self.inner, Scaler) else super().skipped()


KINDS = {"handle": Handle, "wrap_optimizer": Handle, "FP16_Optimizer": Explicit, "TrainStep": AllInOne}
KINDS |= {"GradScaler": Scaler, "torch's GradScaler": Scaler}


def open_door(
    name: str, make: Any, half: torch.dtype = FP16, model: Any = None, rule: Any = DYNAMIC, optimizer: Any = None
) -> Any:
    """Start a training of a small model behind a door."""
    kind, *words = name.split(", ")
    if model is None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))  # O2 keeps the norm in fp32
        model = model.to(half) if kind == "FP16_Optimizer" else model
    optimizer = make(model.parameters()) if optimizer is None else optimizer
    cls = KINDS.get(kind, Door)
    door = cls.__new__(cls)
    door.name = kind
    door.__init__(words, model, optimizer, half, rule)
    return door
