"""Lightning: ``Trainer(plugins=HalfstepPrecision("O2"))`` and ``Fabric(plugins=HalfstepFabricPrecision("O2"))``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from .. import amp
from ..core.errors import UsageError
from .fabric import BasePrecision, HalfstepFabricPrecision
from .figures import figures
from .training_precision import Level

__all__ = ["HalfstepCallback", "HalfstepFabricPrecision", "HalfstepPrecision"]


class HalfstepPrecision(BasePrecision, Precision):
    """The precision plugin of a Trainer.

    ::

        trainer = Trainer(plugins=HalfstepPrecision("O2"), gradient_clip_val=1.0)

    Works with fused and other optimizers, accumulation, clipping and several optimizers. A skipped step does not
    advance a schedule whose interval is "step".

    Args:
        level: a level or a ``TrainingPrecision``; see ``halfstep.integrations.training_precision.TrainingPrecision``.
        dtype: see ``TrainingPrecision``.
        **options: see ``TrainingPrecision``.
    """

    def __init__(self, level: Level = "O1", dtype: torch.dtype | str | None = None, **options: Any) -> None:
        super().__init__(level, dtype, **options)
        self._results: dict[int, Any] = {}  # id of an optimizer -> the result of its latest step
        self._patches = ExitStack()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast the weights. Lightning calls step methods of the module, and only these call the networks in it."""
        parts = [child for child in module.children() if next(child.parameters(), None) is not None]
        return self._precision.cast(module, parts)

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Give masters to the optimizers; Lightning has wrapped the model by now."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise UsageError("LBFGS evaluates its closure many times a step, which Lightning's hooks do not allow.")
            self._precision.give_masters(optimizer)
        module = getattr(model, "module", model)
        averages = [c for c in module.trainer.callbacks if isinstance(c, getattr(callbacks, "WeightAveraging", ()))]
        if averages and any(map(amp.has_masters, optimizers)):
            raise UsageError(
                f"{type(averages[0]).__name__} would average 16-bit weights and not their fp32 masters. Use O1, or a "
                "callback of your own that averages amp.master_model(module) in on_train_batch_end."
            )
        if lr_schedulers:
            self._hold_schedules(module, lr_schedulers)
        return model, optimizers, lr_schedulers

    def _hold_schedules(self, module: Any, configs: list[Any]) -> None:
        advance, per_step = module.lr_scheduler_step, {id(c.scheduler) for c in configs if c.interval == "step"}

        def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
            if id(scheduler) not in per_step or self._results.get(id(scheduler.optimizer), True):
                advance(scheduler, metric)

        module.lr_scheduler_step = lr_scheduler_step
        self._patches.callback(delattr, module, "lr_scheduler_step")

    def teardown(self) -> None:
        """Restore the module's methods."""
        self._patches.close()
        super().teardown()

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        """Scale the loss."""
        return super().pre_backward(self.scaler.scale(tensor), module)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip the gradients that the step uses."""
        if amp.has_masters(optimizer):
            optimizer.clip_master_grads(clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure (forward and backward), then hooks and clipping on unscaled gradients, then the step."""
        loss = closure()
        if loss is None and model.automatic_optimization:  # training_step returned None: no backward pass ran
            return loss
        self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        self._results[id(optimizer)] = self._precision.step(optimizer, **kwargs)
        return loss


class HalfstepCallback(callbacks.Callback):
    """Log ``halfstep.integrations.figures`` to the loggers of a Trainer: TensorBoard, wandb, CSV and so on.

    Args:
        every_n_steps: steps between two logs.
        monitor: any object whose ``latest()`` returns a dict of numbers.
    """

    def __init__(self, every_n_steps: int = 50, monitor: Any = None) -> None:
        self._every, self._monitor = every_n_steps, monitor

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Log after every ``every_n_steps`` steps."""
        if trainer.global_step % self._every == 0:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            found = figures(pl_module, trainer.optimizers, scaler, self._monitor)
            for logger in trainer.loggers:
                logger.log_metrics(found, step=trainer.global_step)
