"""``TrainStep``: forward, loss scaling, backward, clipping, the optimizer's step and the scale's update in one call.

This file has the step as a training loop would write it. ``program`` compiles its forward and backward passes, and
``graphed_steps`` records all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...core.checks import check_count, check_flag
from ...core.dtypes import dtype_name
from ...core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ...core.inner_optimizers import params_of
from ...kernels.shards import placements_of
from ...optimizers.base import FusedOptimizer
from ...optimizers.release import release_of
from ...parameters.held_masters import sync_held_masters
from ...parameters.loss_scaler import DeviceLossScaler
from ...parameters.unscale import Unscaler
from ...stepping.attached import attached_to
from ..grad_scaler import GradScaler
from ..session import scale_loss
from .graphed_steps import GraphedSteps
from .program import CompiledPasses
from .signature import Signature, roots_of, signature_key, signature_of

__all__ = ["TrainStep"]

_MOST_SIGNATURES = 64


class TrainStep:
    """One training step as one call.

    ::

        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
        step = halfstep.TrainStep(model, nn.CrossEntropyLoss(), optimizer, max_grad_norm=1.0)
        for x, y in loader:
            loss = step(x, y)
            scheduler.step()

    A call equals one iteration of this loop, bit for bit, with ``amp.initialize``, ``amp.decorate`` or neither before
    it::

        loss = loss_fn(model(x), y)
        with amp.scale_loss(loss / accumulate, optimizer) as scaled_loss:   # or scaler.scale(...), or neither
            scaled_loss.backward()
        if calls % accumulate == 0:
            nn.utils.clip_grad_norm_(parameters, max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

    With ``compiled=True`` the forward pass, the scaling of the loss and the backward pass are one compiled graph. The
    update is the optimizer's own step; for a fused optimizer this already is one compiled kernel. With
    ``cuda_graph=True`` the whole step is recorded and replayed, unless gradients accumulate. A new kind of batch causes
    a new compilation or recording (see ``signatures``); a change of the learning rate or the loss scale, and a skipped
    step, do not.

    Args:
        model: a module, or any callable that returns the input of ``loss_fn``. It brings its own casts, by
            ``amp.initialize``, ``amp.decorate`` or an ``amp.auto_cast`` inside the callable.
        loss_fn: a function of the model's output and the last item of the batch; the items before it are the model's
            arguments. None if the model takes the whole batch and returns the loss.
        optimizer: any optimizer that steps without a closure.
        scaler: a ``GradScaler`` of ``amp`` or torch, unless ``amp.initialize`` scales the losses.
        max_grad_norm: the 2-norm to which the optimizer's gradients are clipped; None does not clip. A fused optimizer
            clips faster by itself: set its ``max_grad_norm`` instead.
        accumulate: the number of calls per step. Each loss is divided by ``accumulate`` for its backward pass; a call
            returns its loss undivided. See ``finish``.
        compiled: compile the forward and backward passes.
        cuda_graph: record the steps on a CUDA device and replay them.

    Attributes:
        grad_norm: the norm before the latest clipping, a 0-dim tensor that the next step may overwrite; None before the
            first clipping and without ``max_grad_norm``.

    Raises:
        ArgumentTypeError: for an argument of the wrong type, or an optimizer that needs a closure.
        ArgumentValueError: for a number out of range, or a model with no parameter in the optimizer.
        UsageError: for ``max_grad_norm`` or ``accumulate`` with an optimizer that uses gradient release.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
        optimizer: torch.optim.Optimizer,
        *,
        scaler: torch.amp.GradScaler | None = None,
        max_grad_norm: float | None = None,
        accumulate: int = 1,
        compiled: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        _check(model, loss_fn, optimizer, scaler, max_grad_norm, accumulate)
        check_flag("compiled", compiled)
        check_flag("cuda_graph", cuda_graph)
        self.model = model
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.scaler = scaler
        self.max_grad_norm = max_grad_norm
        self.accumulate = accumulate
        self.grad_norm: torch.Tensor | None = None
        self._calls = 0  # since the latest step
        self._signatures: dict[Hashable, Signature] = {}
        self._program = CompiledPasses(self.loss) if compiled else None
        self._graphed = GraphedSteps(self) if cuda_graph else None

    @property
    def signatures(self) -> list[Signature]:
        """The kinds of batches seen so far (the latest 64), each with the way its steps run."""
        return list(self._signatures.values())

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Run one step, or one part of a step with ``accumulate``.

        Args:
            *batch: the arguments of the model and, with a ``loss_fn``, the target as the last item.

        Returns:
            The loss, a detached 0-dim tensor on its device. The call does not wait for the device.

        Raises:
            UsageError: if gradients are disabled, or the loss does not require gradients.
            ArgumentTypeError: if the batch has no target for ``loss_fn``.
        """
        if not torch.is_grad_enabled():
            raise UsageError(
                "TrainStep: gradients are disabled (no_grad or inference_mode); call it where they are enabled."
            )
        if self.loss_fn is not None and len(batch) < 2:
            raise ArgumentTypeError(
                f"TrainStep: a batch is the arguments of the model and then the target for loss_fn; {len(batch)} came. "
                "Write step(x, y), or step(*batch)."
            )
        _refuse_release(self.optimizer, self.max_grad_norm, self.accumulate)  # user code may have enabled it
        sync_held_masters(refresh=False)  # a recorded step runs no hooks of the model
        signature = self._signature(batch)
        last = self._calls + 1 >= self.accumulate  # user code may have lowered ``accumulate``
        if self._graphed is not None:
            loss = self._graphed(batch, signature, first=not self._calls, last=last)
        else:
            loss = self.backward(batch, signature, last=last)
            if last:
                self.update()
        self._calls = 0 if last else self._calls + 1
        return loss

    def finish(self) -> None:
        """Step now if the window of ``accumulate`` calls is not full, for example at the end of an epoch.

        Without this call the window continues in the next epoch. Each loss is still divided by ``accumulate``.
        """
        if self._calls:
            self.update()
            self._calls = 0

    # ---- the parts of a step, in their order

    def loss(self, batch: tuple[Any, ...]) -> torch.Tensor:
        """Compute the loss of a batch.

        Raises:
            ArgumentTypeError: if the loss is not a floating tensor.
            ArgumentValueError: if the loss has more than one element.
        """
        loss = self.model(*batch) if self.loss_fn is None else self.loss_fn(self.model(*batch[:-1]), batch[-1])
        if not isinstance(loss, torch.Tensor) or not loss.is_floating_point():
            kind = dtype_name(loss.dtype) if isinstance(loss, torch.Tensor) else type(loss).__name__
            maker = "model" if self.loss_fn is None else "loss_fn"
            raise ArgumentTypeError(f"TrainStep: {maker} must return a floating tensor as loss, not {kind}.")
        if loss.numel() != 1:
            raise ArgumentValueError(
                f"TrainStep: the loss has shape {tuple(loss.shape)}; reduce it to one number, for example by mean()."
            )
        return loss.reshape(())

    def backward(self, batch: tuple[Any, ...], signature: Signature, *, last: bool) -> torch.Tensor:
        """Run the forward and backward passes; returns the detached loss."""
        model = self.model
        with nullcontext() if last or not isinstance(model, DistributedDataParallel) else model.no_sync():
            if self._program is not None:
                return self._program.backward(batch, signature, self._trained(), self._scaled, self.accumulate)
            loss = self.loss(batch)
            if not loss.requires_grad:
                raise UsageError(
                    "TrainStep: the loss requires no gradient, so there is nothing to train. Compute it from "
                    "parameters that require gradients, without detach() or no_grad on the way."
                )
            with self._scaled(loss / self.accumulate if self.accumulate > 1 else loss) as scaled_loss:
                scaled_loss.backward()
            return loss.detach()

    def update(self) -> None:
        """Clip, step, update the loss scale, and clear the gradients."""
        if self.max_grad_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            elif (attached := attached_to(self.optimizer)) is not None:
                attached.window.gradients.widen()
            params = params_of(self.optimizer)
            # torch cannot clip plain tensors together with shards, nor shards on several meshes.
            meshes = {id(place and place[0]) for place in placements_of(params)}
            clip = nn.utils.clip_grad_norm_ if len(meshes) < 2 else Unscaler().clip
            self.grad_norm = clip(params, self.max_grad_norm, 2.0)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self._graphed is None:
            self.optimizer.zero_grad()
        else:  # a recorded step begins without gradients
            self.optimizer.zero_grad(set_to_none=True)

    # ---- properties that a recording needs

    def loss_scalers(self) -> list[DeviceLossScaler]:
        """Return the loss scalers that a step updates."""
        if isinstance(self.scaler, GradScaler):
            return [self.scaler.loss_scaler] if self.scaler.is_enable() else []
        attached = attached_to(self.optimizer)
        return [] if attached is None or attached.session is None else attached.session.loss_scalers[:1]

    def unrecordable(self) -> str | None:
        """Return the reason why a step cannot be recorded; None if it can."""
        name = type(self.optimizer).__name__
        if release_of(self.optimizer) is not None:
            return f"{name} steps during the backward pass"
        if self.scaler is not None and self.scaler.is_enabled() and not isinstance(self.scaler, GradScaler):
            return "a torch.amp.GradScaler reads the device in its step; use halfstep.amp.GradScaler"
        supports_found_inf = getattr(self.optimizer, "_step_supports_amp_scaling", False)
        if not supports_found_inf and any(not scaler.neutral for scaler in self.loss_scalers()):
            return (
                f"{name} does not skip a step by itself, so the host reads whether it overflowed; use a fused optimizer"
            )
        capturable = all(group.get("capturable", group.get("fused")) for group in self.optimizer.param_groups)
        if not capturable and not isinstance(self.optimizer, FusedOptimizer):
            return f"{name} reads numbers on the host; use halfstep.optimizers.fuse(optimizer), or capturable=True"
        return None

    # ---- inside

    def _scaled(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Return the context of a backward pass, which yields the loss to call ``backward`` on."""
        if self.scaler is not None:
            return nullcontext(self.scaler.scale(loss))
        attached = attached_to(self.optimizer)
        if attached is not None and attached.session is not None:
            # The dtype of a window's gradients must not depend on the call.
            attached.window.table.always_fp32 |= self.accumulate > 1
            return scale_loss(loss, self.optimizer)
        return nullcontext(loss)

    def _trained(self) -> list[torch.Tensor]:
        """Return the parameters that get gradients: the optimizer's, and the model's that other optimizers step."""
        of_model = self.model.parameters() if isinstance(self.model, nn.Module) else ()
        return [p for p in dict.fromkeys((*params_of(self.optimizer), *of_model)) if p.requires_grad]

    def modules(self) -> list[nn.Module]:
        """Return the modules that a step runs; for a function, the modules that it closes over or refers to by name."""
        roots = (*roots_of(self.model), *roots_of(self.loss_fn))
        return list(dict.fromkeys(module for root in roots for module in root.modules()))

    def settings(self) -> tuple[object, ...]:
        """Return the settings that user code may change between steps."""
        options = getattr(self.optimizer, "options", None)
        return self.model, self.loss_fn, self.scaler, self.max_grad_norm, options

    def __getstate__(self) -> dict[str, Any]:
        """Leave out compiled and recorded code; a copy compiles and records anew."""
        names = ("model", "loss_fn", "optimizer", "scaler", "max_grad_norm", "accumulate")
        ways = {"compiled": self._program is not None, "cuda_graph": self._graphed is not None}
        return {**{name: getattr(self, name) for name in names}, **ways, "calls": self._calls}

    def __setstate__(self, state: dict[str, Any]) -> None:
        calls = state.pop("calls")
        TrainStep.__init__(self, **state)
        self._calls = calls

    def _signature(self, batch: tuple[Any, ...]) -> Signature:
        training = all(root.training for root in roots_of(self.model))
        key = signature_key(batch, training)
        signature = self._signatures.get(key)
        if signature is None:
            if len(self._signatures) >= _MOST_SIGNATURES:
                del self._signatures[next(iter(self._signatures))]
            signature = self._signatures[key] = signature_of(batch, training)
        signature.calls += 1
        return signature


def _refuse_release(optimizer: torch.optim.Optimizer, max_grad_norm: float | None, accumulate: Any) -> None:
    """Refuse gradient release where gradients must outlive their pass."""
    if release_of(optimizer) is not None and (max_grad_norm is not None or accumulate > 1):
        what = f"accumulate={accumulate}" if max_grad_norm is None else f"max_grad_norm={max_grad_norm}"
        raise UsageError(
            f"TrainStep: {what} needs the gradients after their backward pass, and this {type(optimizer).__name__} has "
            "released them by then (attach). Leave it out, or end the release with remove()."
        )


def _check(
    model: Any, loss_fn: Any, optimizer: Any, scaler: Any, max_grad_norm: float | None, accumulate: object
) -> None:
    if not callable(model):
        raise ArgumentTypeError(f"TrainStep: model must be a module or another callable, not {type(model).__name__}.")
    if loss_fn is not None and not callable(loss_fn):
        raise ArgumentTypeError(
            f"TrainStep: loss_fn must be called with (output, target), or be None if the model returns the loss; it "
            f"is of type {type(loss_fn).__name__}."
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise ArgumentTypeError(
            f"TrainStep: optimizer must be a torch.optim.Optimizer that steps without a closure, not "
            f"{type(optimizer).__name__}."
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentTypeError(
            f"TrainStep: scaler must be an amp.GradScaler, a torch.amp.GradScaler or None, not "
            f"{type(scaler).__name__}. amp.initialize needs none: its loss scale comes with the optimizer."
        )
    if max_grad_norm is not None and (
        isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, (int, float)) or not max_grad_norm > 0
    ):
        raise ArgumentValueError(f"TrainStep: max_grad_norm={max_grad_norm!r} must be a number above 0, or None.")
    check_count("TrainStep: accumulate", accumulate)
    _refuse_release(optimizer, max_grad_norm, accumulate)
    if isinstance(model, nn.Module):
        mine = {id(p) for p in model.parameters()}
        if mine and not any(id(p) in mine for p in params_of(optimizer)):
            raise ArgumentValueError(
                "TrainStep: the optimizer has none of the model's parameters, so the model would not be trained. Make "
                "the optimizer from model.parameters(), after the model is in its place (moved, wrapped, replaced)."
            )
