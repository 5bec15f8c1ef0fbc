"""``halfstep doctor SCRIPT``: runs the script until its first optimizer step, and then checks its model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..amp.grad_scaler import GradScaler
from ..findings import Finding
from ..findings.checking import findings_of
from ..findings.facts import Facts
from ..findings.forward import Forward
from ..observe.watch import ModuleCall
from .script import Script

__all__ = ["first_step_of"]


class _FirstStep(BaseException):
    """Raised to end the script; not an ``Exception``, so that the script does not catch it."""


class _Run(Forward):
    """A record of a script until its first step.

    Attributes:
        models: the outermost modules that the script called.
        scalers: the loss scalers of the script.
        optimizer: the first optimizer that stepped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.models: list[nn.Module] = []
        self.scalers: list[Any] = []
        self.optimizer: torch.optim.Optimizer | None = None

    def entered(self, call: ModuleCall, args: Any, kwargs: Any) -> None:
        """Receive the start of a module call."""
        if self.running[0] is call and not any(call.of is model for model in self.models):
            self.models.append(call.of)

    def end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Receive the first step of an optimizer, and end the script."""
        self.optimizer = optimizer
        raise _FirstStep

    def trained(self) -> nn.Module | None:
        """Find the model with most of the optimizer's parameters; if none has any, with the most gradients."""
        if self.optimizer is None:
            return None
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}

        def parts(model: nn.Module) -> tuple[int, int]:
            params = list(model.parameters())
            return sum(id(p) in held for p in params), sum(p.grad is not None for p in params)

        return max(self.models, key=parts, default=None)

    @contextmanager
    def noting_scalers(self) -> Iterator[None]:
        """Record, within the block, the scalers that scale a loss."""
        classes: list[Any] = [torch.amp.GradScaler, GradScaler]
        own = [cls.scale for cls in classes]

        def noting(scale: Any) -> Any:
            def noted(scaler: Any, outputs: Any) -> Any:
                if not any(scaler is known for known in self.scalers):
                    self.scalers.append(scaler)
                return scale(scaler, outputs)

            return noted

        for cls, scale in zip(classes, own, strict=True):
            cls.scale = noting(scale)
        try:
            yield
        finally:
            for cls, scale in zip(classes, own, strict=True):
                cls.scale = scale


def first_step_of(script: Script) -> list[Finding] | None:
    """Run a prepared script until an optimizer has stepped, and check the model that it trains.

    Returns:
        The findings; None if no optimizer stepped or no model was called.
    """
    seen = _Run()
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_post_hook(seen.end).remove)
        stack.enter_context(seen.noting_scalers())
        stack.enter_context(seen.watching())
        stack.enter_context(warnings.catch_warnings())  # torch warns about compiled modules under global hooks
        warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")
        stack.enter_context(suppress(_FirstStep))
        script.run()
    model = seen.trained()
    if model is None:
        return None
    return findings_of(Facts(model, [seen.optimizer], seen.scalers, forward=seen))
