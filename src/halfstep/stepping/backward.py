"""The scaled backward passes of one optimizer since its last step, and what it needs before and after each.

``scaled_backward.py`` has the block in which a face runs one.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch

from ..core.callers import callers_level
from ..core.errors import UsageError
from ..core.text import counted
from ..distributed.ddp_sync import BackwardRecord, RankSync, share_overflow
from ..gradients.ledger import REDUCTIONS, halves
from ..gradients.loss_scaler import DeviceLossScaler
from ..masters.keeper import MasterKeeper
from ..optimizers.release import GradientRelease
from .diagnosis import first_bad_gradient
from .replaced import ReplacedParameters
from .scaling_checks import ScalingChecks

__all__ = ["BackwardPasses", "any_overflow", "sync_overflow"]

_CLIP_AFTER = (
    "Clip after the block, where they are unscaled: torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), ...)."
)

logger = logging.getLogger("halfstep")


class BackwardPasses:
    """The scaled backward passes that one optimizer has had since its last step.

    Args:
        keeper: its masters, which know the optimizer.

    Attributes:
        keeper: as given; ``gradients`` are those that it knows of.
        ranks: what it knows about other processes.
        records: one for each pass; the next step asks them whether gradients overflowed.
        scales: what the losses since the last step were multiplied by, 0-dim tensors, by the loss scale they came from.
        replaced: the parameters of the models that it trains, where these are known.
        sharing: weak references to the passes of other optimizers that share a parameter with this one.
        unsettled: whether a step was skipped, or may have been, and nobody has cleared its gradients since.
        scaling: the warnings about gradients that went past the loss scale.
        known: the parameters at the latest pass; None before a scaled one.
        in_place: True if the next pass adds to the gradients where they are, because a pass with ``delay_unscale`` came
            before it: some scripts add up a window of passes and average ``p.grad`` by hand in the block of the last.
        scale: what the loss of the present pass, or of the latest, was multiplied by, a 0-dim tensor; None for none.
        unsafe: whether gradients are in the middle of something: from ``begin`` to ``close``.
    """

    def __init__(self, keeper: MasterKeeper) -> None:
        self._optimizer = weakref.ref(keeper.optimizer)
        self.keeper = keeper
        self.gradients = keeper.gradients
        self.ranks = RankSync()
        self.records: list[BackwardRecord] = []
        self.scales: dict[DeviceLossScaler, torch.Tensor] = {}
        self.replaced = ReplacedParameters(())
        self.sharing: tuple[weakref.ref[BackwardPasses], ...] = ()
        self.unsettled = False
        self.scaling = ScalingChecks()
        self.in_place = False
        self.scale: torch.Tensor | None = None
        self.unsafe = False
        # The open block. Nobody but its `with` statement holds it: it is gone if an interrupt came before its exit.
        self._block: weakref.ref[object] | None = None
        # While gradients are unscaled until their overflow is noted: whether older ones are among them.
        self._finishing: bool | None = None
        self.known: list[torch.Tensor] | None = None

    @property
    def release(self) -> GradientRelease | None:
        """What steps the parameters inside of backward passes, if something does."""
        found = getattr(self._optimizer(), "release", None)
        return found if isinstance(found, GradientRelease) else None

    def params(self) -> list[torch.Tensor]:
        """The parameters in the optimizer's groups."""
        optimizer: Any = self._optimizer()
        return [p for group in optimizer.param_groups for p in group["params"]]

    @property
    def device(self) -> torch.device:
        """Where the first parameter lives: flags and scales are kept there."""
        return next((param.device for param in self.params()), torch.device("cpu"))

    @property
    def block(self) -> object | None:
        """The block that is open; None for none."""
        return None if self._block is None else self._block()

    def close(self) -> None:
        """The gradients are unscaled, and their overflow is noted."""
        self._finishing = self._block = None
        self.unsafe = False

    def recover(self) -> bool:
        """If gradients are ``unsafe``: abandon what an interrupt, such as Ctrl-C in a line of ours, has left half done.

        Returns:
            Whether a block is open, which was not interrupted.
        """
        if self.block is not None:
            return True
        logger.info("A scale_loss block was interrupted; its backward pass does not count")
        self.abandon()
        return False

    def begin(
        self,
        scale: torch.Tensor | None,
        seen: set[int] | None,
        *,
        block: object,
        guard: Callable[[], None] | None = None,
    ) -> None:
        """Set aside the present gradients, so that a backward pass scaled by ``scale`` brings only its own.

        Args:
            scale: the 0-dim tensor that the loss is multiplied by; None if it is not scaled.
            seen: identities of parameters that another optimizer has set aside for this pass; extended. None if there
                is no other optimizer.
            block: which is opened; not kept alive.
            guard: called before a gradient is used inside of the pass; raises an error if it must not be.

        Raises:
            UsageError: if a block is open already, or if the model was cut after its optimizer was attached.
        """
        if self.unsafe and self.recover():
            raise UsageError(
                f"A scale_loss block of this {type(self._optimizer()).__name__} is open already, and two backward "
                "passes at two scales would mix. Close the first block before the second; gradients add up across "
                "blocks."
            )
        self.scale = scale
        if self.replaced.unseen:
            self.replaced.refuse_cut(self.keeper.optimizer)
        release = self.release
        if release is not None:
            release.refuse_block()
        params = self.params()
        if self.unsettled:
            self.settle(params)
        if self.known is not None:
            self.drop_brought(params)
        elif scale is not None:
            self.known = params
        alone = not (REDUCTIONS or self.ranks.reductions)
        if not alone:
            self._find_wrappers(params)
            scale = self.ranks.gradient_scale(scale)
        gone = release is None or not release.has_stepped
        if gone and self.records and not self.ranks.reductions and all(param.grad is None for param in params):
            self.records = [record for record in self.records if record.scaler is None]  # of gradients that are gone
        self.in_place = self.in_place and release is None and not self.ranks.will_sync
        self._block, self.unsafe = weakref.ref(block), True
        stay = list if self.in_place else None if alone else self._averaged_next
        self.gradients.begin(params, scale, seen, stay)
        if release is not None:
            release.begin(self.gradients, scale, delay=False)
            release.guard = guard
            self.gradients.expect(params, as_computed=True)
        if not alone:
            self.ranks.begin_backward(scale, params, self.gradients.saved)

    def settle(self, params: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Clear the gradients of a skipped step if they are still there, so that no later step takes them.

        Their values tell whether they are. The gradients may have been cleared in a way that nobody hears of, and after
        a step that skips itself on the device the host does not know whether it did.

        Args:
            params: those of the optimizer.

        Returns:
            0-dim float32 tensor, 1.0 if gradients were cleared; None if there are none.
        """
        self.unsettled = False
        return self.gradients.clear_overflow(params)

    def drop_brought(self, params: list[torch.Tensor] | None = None) -> None:
        """Drop the gradients that parameters brought with them when they came to the optimizer after a scaled pass.

        The passes that they were outside of have multiplied them by the loss scale, and nothing has divided them. This
        cannot be seen from a gradient, so one that was not scaled is dropped too.

        Args:
            params: those of the optimizer; None to look them up.
        """
        if self.known is None:
            return
        params = self.params() if params is None else params
        known, self.known = self.known, params
        if len(params) == len(known) and all(map(is_, params, known)):
            return
        before = set(map(id, known))
        brought = [p for p in params if p.grad is not None and id(p) not in before]
        if not brought:
            return
        for param in brought:
            param.grad = None
        name = type(self._optimizer()).__name__
        warnings.warn(
            f"{counted(len(brought), 'parameter')} had gradients when added to this {name}, and these "
            "were dropped. Backward passes have multiplied them by the loss scale, and only gradients of parameters in "
            "the optimizer are divided by it. To have nothing to drop, keep such parameters frozen "
            "(requires_grad_(False)) until they are added, or set their gradients to None before.",
            UserWarning,
            stacklevel=callers_level(),
        )

    def abandon(self) -> None:
        """After ``begin``, when the backward pass failed: drop what it brought and put back what was set aside.

        If gradients went to other ranks, were added to others in place, or are unscaled in part, there is no way back:
        the next step is skipped.
        """
        params = self.params()
        lost = self.ranks.abandon_backward(params) or self.in_place or bool(self._finishing)
        self.in_place = False
        if self._finishing is None:
            self.gradients.restore()
        else:
            self.gradients.forget()
            for param in params:
                param.grad = None
        if self.release is not None:
            self.release.abandon()
        if lost:
            found_inf = torch.ones((), dtype=torch.float32, device=self.device)
            self.note(BackwardRecord(found_inf, None, shared=not self.ranks.reductions))
        self.close()

    def finish(self, scale: torch.Tensor | None, found_inf: torch.Tensor, seen: set[int] | None) -> bool:
        """After ``begin`` and the backward pass: unscale what it brought and add what was set aside.

        Until ``close`` an interrupt drops the gradients: they may be unscaled in part, or inf without a record.

        Args:
            scale: as given to ``begin``.
            found_inf: 0-dim float32 tensor, set to 1.0 if a new gradient holds inf or NaN.
            seen: identities of parameters that another optimizer has finished in this pass; extended.

        Returns:
            Whether any parameter has a gradient, or has stepped with one.
        """
        params = self.params()
        if scale is not None:
            self.scaling.scaled = True
            self.scaling.look_for_clipping(params, scale, _CLIP_AFTER)
        release = self.release
        found = (release is not None and release.finish(found_inf)) or any(param.grad is not None for param in params)
        if self.ranks.reductions:
            self.ranks.end_backward(params)
            scale = self.ranks.gradient_scale(scale)
        self._finishing, self.unsafe = self.in_place or bool(self.gradients.saved), True
        self.gradients.finish(params, scale, found_inf, seen)
        return found

    def multiply(self, scale: torch.Tensor) -> None:
        """Scale the gradients again, as ``finish`` unscales them. An interrupt meanwhile drops them."""
        divisor = self.ranks.gradient_scale(scale)
        assert divisor is not None
        self._finishing = self.unsafe = True
        self.gradients.multiply(self.params(), divisor)
        self.close()

    def check_scaling(self) -> None:
        """Warn if the gradients for a step have not come through the loss scale."""
        if self.block is None:
            released = self.release is not None and self.release.has_stepped
            self.scaling.at_step(self.keeper.optimizer, released=released)

    def note(self, record: BackwardRecord) -> None:
        """Note a pass for the next step of this optimizer, and of each that shares a parameter with it."""
        others = [passes for ref in self.sharing if (passes := ref()) is not None]
        for passes in (self, *others):
            if record not in passes.records:
                passes.records.append(record)
            if len(passes.records) >= _MANY:
                passes.records = _merged(passes.records)

    def sync(self, *, steps: bool = True) -> None:
        """Average gradients and overflows since the last step with the ranks that have not got them yet.

        Args:
            steps: whether a step follows.

        Raises:
            UsageError: as ``RankSync.sync_gradients``.
        """
        params = self.params()
        half = self._find_wrappers(params)
        if self.ranks.reductions:
            self.ranks.sync_gradients(params, half, self.records, steps=steps)
            sync_overflow([self])

    def take_records(self, *, agreed: bool = True) -> list[BackwardRecord]:
        """The records since the last call; there are none afterwards, and passes to come belong to another step.

        Args:
            agreed: whether the ranks agree on them before. If not, they have done so already.
        """
        if agreed and REDUCTIONS:
            self.sync()
        records, self.records = self.records, []
        if records:
            self.unsettled = True
        if REDUCTIONS:
            self.ranks.end_window()
        return records

    def clear(self) -> None:
        """The gradients were cleared: forget what is known about them."""
        if self.unsafe and self.block is None:
            if self.release is not None:
                self.release.abandon()
            self.close()
        self.gradients.clear(self.params())
        self.in_place = self.unsettled = False
        self.records.clear()
        if REDUCTIONS:
            self.ranks.end_window()

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients that the next step uses to a total norm, taken over all of them as one vector.

        Args:
            max_norm: the largest norm allowed.
            norm_type: of the p-norm; ``float("inf")`` for the largest element.

        Returns:
            The norm before, a 0-dim tensor; -1 if a scaled backward pass overflowed, since there is nothing to clip
            then. No device is read.
        """
        if self.release is not None:
            self.release.refuse_clipping("clip_master_grads")
        self.drop_brought()
        self.sync(steps=False)
        norm = self.gradients.clip(self.params(), max_norm, norm_type)
        return torch.where(any_overflow(self.records) != 0, -1.0, norm) if self.records else norm

    def _averaged_next(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of some parameters whose gradients the ranks average in place; none that is to be fp32."""
        wide = set(map(id, self.gradients.wide(params)))
        return self.ranks.averaged_next([p for p in params if id(p) not in wide])

    def _find_wrappers(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Find the wrappers around the parameters. Returns the parameters that have masters."""
        half = halves(params) if self.keeper.any else []
        self.ranks.find_wrappers(params, half, half if self.keeper.replicated else [])
        return half


def any_overflow(records: Sequence[BackwardRecord]) -> torch.Tensor:
    """Whether any pass overflowed: a 0-dim float32 tensor."""
    if len(records) == 1:
        return records[0].found_inf
    device = records[0].found_inf.device
    return torch.stack([p.found_inf.to(device) for p in records]).amax()


_MANY = 64
"""So many passes without a step have their records merged: somebody may never step."""


def _merged(records: list[BackwardRecord]) -> list[BackwardRecord]:
    """The records of many passes without a step as few: those that all ranks have are one for each loss scale."""
    found = [record for record in records if not record.shared]
    alike: dict[tuple[DeviceLossScaler | None, DeviceLossScaler | None], list[BackwardRecord]] = {}
    for record in records:
        if record.shared:
            alike.setdefault((record.scaler, record.moves), []).append(record)
    for (scaler, moves), row in alike.items():
        found.append(BackwardRecord(any_overflow(row), scaler, shared=True, moves=moves))
    return found


def sync_overflow(optimizers: Sequence[BackwardPasses]) -> None:
    """Let all ranks agree on which of the latest passes overflowed, and update the loss scales."""
    records = {id(record): record for passes in optimizers for record in passes.records}
    for scaler, found_inf in share_overflow(records.values(), [passes.ranks for passes in optimizers]).items():
        scaler.update(found_inf, lambda: first_bad_gradient([passes.keeper.optimizer for passes in optimizers]))
