"""Accelerate: ``attach(accelerator, level="O2")`` before ``accelerator.prepare``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

from ..core.errors import UsageError
from .training_precision import Level, TrainingPrecision

__all__ = ["HalfstepAccelerator", "HalfstepOptimizer", "attach"]


class HalfstepOptimizer(AcceleratedOptimizer):
    """The optimizer that ``prepare`` returns."""

    precision: TrainingPrecision
    _result: Any = True

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Step at the end of an accumulation window, unless the gradients overflowed."""
        if self.gradient_state.sync_gradients:
            self._result = self.precision.step(self.optimizer, *(() if closure is None else (closure,)))

    @property
    def step_was_skipped(self) -> bool:
        """True if the latest step was skipped, even by a fused optimizer. Reads the device."""
        return not self._result


def _with_bare_optimizers(method: Any) -> Any:
    @functools.wraps(method)
    def bare(self: Any, *args: Any, **kwargs: Any) -> Any:
        # torch.distributed.checkpoint creates state by a step outside of the training, which must not be scaled.
        prepared, self._optimizers = self._optimizers, [each.optimizer for each in self._optimizers]
        try:
            return method(self, *args, **kwargs)
        finally:
            self._optimizers = prepared

    return bare


class HalfstepAccelerator(Accelerator):
    """The class of an accelerator after ``attach``."""

    halfstep: TrainingPrecision
    save_state = _with_bare_optimizers(Accelerator.save_state)
    load_state = _with_bare_optimizers(Accelerator.load_state)

    def __reduce__(self) -> Any:
        return _new, (type(self).__bases__[1],), vars(self)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as Accelerate does, after casting the weights and before giving masters to the optimizers."""
        for model in [arg for arg in args if isinstance(arg, nn.Module) and not hasattr(arg, "_original_forward")]:
            if self.is_fsdp2 and self.halfstep.casts_weights:
                self.state.fsdp_plugin.mixed_precision_policy = self.halfstep.shard_policy()
            else:
                self.halfstep.cast(model)
            # Accelerate's autocast uses the same attribute: unwrap_model undoes it, and a copy runs its own weights.
            vars(model)["_original_forward"] = model.forward
            model.forward = self.halfstep.scoped(model.forward, convert_outputs_to_fp32)
        prepared = super().prepare(*args, device_placement=device_placement)
        for optimizer in self._optimizers:
            self.halfstep.give_masters(optimizer.optimizer)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer as Accelerate does, and make it a ``HalfstepOptimizer``."""
        made = super().prepare_optimizer(optimizer, device_placement)
        made.__class__, made.precision = HalfstepOptimizer, self.halfstep
        return made

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients of all optimizers, or of the given ones, by the loss scale."""
        some: Any = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for each in self._optimizers if optimizer is None else some:
            self.halfstep.scaler.unscale_(getattr(each, "optimizer", each))

    def clip_grad_norm_(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2) -> Any:
        """Clip as Accelerate does; for all parameters of an optimizer, clip the gradients that its step uses."""
        params = list(parameters)
        for optimizer in self._optimizers:
            if self.halfstep.has_masters_of(optimizer.optimizer, params):
                self.unscale_gradients()
                return optimizer.optimizer.clip_master_grads(max_norm, norm_type)
        return super().clip_grad_norm_(params, max_norm, norm_type)

    def autocast(self, autocast_handler: Any = None) -> Any:
        """Return the casting scope of the level, for code outside of prepared models."""
        return self.halfstep.scope()


def _new(base: type) -> Any:
    return object.__new__(type("HalfstepAccelerator", (HalfstepAccelerator, base), {}))


def attach(accelerator: Accelerator, level: Level = "O1", dtype: Any = None, **options: Any) -> Any:
    """Give an accelerator the casts, masters and loss scale of halfstep, before it prepares anything.

    The arguments are the ones of ``halfstep.integrations.training_precision.TrainingPrecision``; the precision becomes
    ``accelerator.halfstep``.

    Raises:
        UsageError: for an accelerator that casts or steps by itself, or has already prepared an object.
    """
    mode, kind = accelerator.mixed_precision, accelerator.distributed_type
    if mode != "no":
        raise UsageError(f"The Accelerator has mixed_precision={mode!r}, which would cast a second time; make it 'no'.")
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA") or (kind == "FSDP" and not accelerator.is_fsdp2):
        raise UsageError(f"{kind} keeps weights in its own way; attach takes one process, DDP and FSDP version 2.")
    if accelerator._models or accelerator._optimizers:
        raise UsageError("attach() comes before accelerator.prepare(), and something is prepared already.")
    precision = TrainingPrecision.of(level, dtype, **options)
    accelerator.__class__ = type(_new(type(accelerator)))
    accelerator.halfstep, accelerator.scaler = precision, precision.scaler
    return accelerator
