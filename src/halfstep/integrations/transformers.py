"""Transformers: ``HalfstepTrainer(..., halfstep=dict(level="O2"))``, or ``HalfstepMixin`` before another trainer."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

from transformers import PreTrainedModel, Trainer

from ..core.dtypes import is_half
from .accelerate import attach
from .figures import figures

__all__ = ["HalfstepMixin", "HalfstepTrainer"]


def _save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
    """Save a model whose ``state_dict()`` is fp32 with a config that says fp32, not the dtype of the weights."""
    type(self).save_pretrained(self, save_directory, *args, **kwargs)
    if kwargs.get("state_dict") is None and kwargs.get("is_main_process", True):
        config = copy.deepcopy(self.config)
        config.dtype = "float32"
        config.save_pretrained(save_directory)


class HalfstepMixin:
    """A mixin that adds a precision to ``Trainer`` or a subclass; list it before the trainer class.

    ::

        class MyTrainer(HalfstepMixin, SFTTrainer): ...

        MyTrainer(model, args, train_dataset=data, halfstep=dict(level="O2", dtype="bfloat16"))

    A model that ``from_pretrained`` loaded in 16 bits gets fp32 masters at O1 and O2. Do not set ``bf16`` or ``fp16``
    of ``TrainingArguments``.

    Logs that contain a loss also get ``halfstep.integrations.figures``: loss scale, overflows and findings.

    Args:
        *args: positional arguments of the trainer.
        halfstep: a dict with arguments of ``halfstep.integrations.training_precision.TrainingPrecision``; None for the
            defaults.
        monitor: any object whose ``latest()`` returns a dict of numbers, which is logged as well.
        **kwargs: keyword arguments of the trainer.
    """

    def __init__(self, *args: Any, halfstep: dict[str, Any] | None = None, monitor: Any = None, **kwargs: Any) -> None:
        self._halfstep, self._monitor = {} if halfstep is None else halfstep, monitor
        self._came_in_16_bits = False
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Attach the precision to the trainer's accelerator."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        attach(self.accelerator, **self._halfstep)  # type: ignore[attr-defined]

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the trainer's optimizer; ``accelerator.prepare`` gives it masters later."""
        trainer: Any = self
        chosen = trainer.model if model is None else model
        if isinstance(chosen, PreTrainedModel):
            self._came_in_16_bits = any(is_half(param) and param.requires_grad for param in chosen.parameters())
            if trainer.accelerator.halfstep.casts_weights:
                chosen.save_pretrained = MethodType(_save_pretrained, chosen)
        return super().create_optimizer(*(() if model is None else (model,)))  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the trainer does, with the figures about precision added."""
        trainer: Any = self
        if "loss" in logs:
            logs = logs | figures(trainer.model, trainer.optimizer.optimizer, trainer.accelerator.scaler, self._monitor)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        trainer: Any = self
        if checkpoint is not None and self._came_in_16_bits and not trainer.is_fsdp_enabled:
            trainer._load_from_checkpoint(checkpoint)  # a second time: the first load had no masters and rounded
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]


class HalfstepTrainer(HalfstepMixin, Trainer):
    """``transformers.Trainer`` with ``halfstep=dict(level=..., dtype=...)``; see ``HalfstepMixin``."""
