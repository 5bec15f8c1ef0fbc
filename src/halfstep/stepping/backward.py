"""The accumulation window of one optimizer: its backward passes since the last step, and the work around each pass.

``scaled_backward.py`` has the block in which a face runs a pass.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from threading import get_ident
from typing import Any

import torch

from ..core.errors import UsageError
from ..core.text import counted
from ..optimizers.release import GradientRelease
from ..parameters.ledger import Gradients
from ..parameters.loss_scaler import DeviceLossScaler
from ..parameters.plain import PlainMasters
from ..parameters.table import REDUCTIONS, OptimizerTable
from ..torch_internals.callers import callers_level
from .diagnosis import ClippedGradients, first_bad_gradient
from .ranks.ddp_sync import BackwardRecord, RankSync, share_overflow

__all__ = [
    "UNSAFE",
    "WINDOWS",
    "Subscriber",
    "Window",
    "WindowState",
    "any_overflow",
    "blame",
    "reachable",
    "record_pass",
    "sync_overflow",
]

logger = logging.getLogger("halfstep")


class WindowState(Enum):
    """The state of an optimizer's gradients between two steps.

    ::

                 begin         finish             close            step, zero_grad
        IDLE -----------> OPEN -------> FINISHING ------> READY -------------------> IDLE
                           ^                       |      | ^
                           |          begin        |      | | close, of the next pass
                           +-----------------------|------+ |
                                                   v        |
                                                 SCALED ----+
        step of gradients that overflowed, or whose overflow only the device knows: DIRTY --begin, zero_grad--> IDLE
        a block of other optimizers:    all but OPEN ------> REACHED -----> FINISHING -----> READY, or SCALED as before
                                        (no new gradients:   REACHED ----------------------> READY, or SCALED as before)
        a GradScaler:   all without an open block ------> FINISHING -----> READY

    - **OPEN**: a block is open. New gradients are multiplied by the loss scale, and earlier gradients are set aside.
      The optimizer cannot step. A second ``begin`` is an error, unless the block no longer exists: then an interrupt
      prevented its exit, and the pass is abandoned.
    - **REACHED**: a block of other optimizers is open, and its pass may also reach parameters of this optimizer. A
      block of this optimizer ends the state.
    - **FINISHING**: some gradients may be unscaled and others not, or inf without a record. An interrupt drops them.
      A ``GradScaler`` enters this state when it unscales, because its passes have already run.
    - **READY**: the next step may use the gradients.
    - **SCALED**: like READY, after a pass with ``delay_unscale=True``. The next pass accumulates into ``p.grad``,
      because scripts average ``p.grad`` manually in the block of the last pass of a window.
    - **DIRTY**: the step was skipped, or the device may have skipped it, and its gradients may still be in ``p.grad``.
      Their values decide: if one is inf or NaN, they are cleared before anything else uses them.
    """

    IDLE = "idle"
    OPEN = "open"
    REACHED = "reached"
    FINISHING = "finishing"
    READY = "ready"
    SCALED = "scaled"
    DIRTY = "dirty"


UNSAFE = (WindowState.OPEN, WindowState.REACHED, WindowState.FINISHING)
"""The states in which gradients may still be multiplied by the loss scale, so that no step may use them."""


class Subscriber:
    """Base class for warnings, findings and reports that read the passes and steps of one optimizer.

    The window calls the methods of each object in its ``subscribers``. A subscriber changes no gradient or weight. It
    removes itself from the list when it has nothing left to check, so that most steps of a training call none. If a
    subscriber raises, the pass is abandoned and no block stays open. A check that prevents a silently wrong step must
    not be a subscriber, because subscribers can be removed: the engine calls such checks itself.
    """

    def opened(self, window: Window) -> None:
        """Run when a block opens, before anything changes."""

    def closed(self, window: Window, scaler: DeviceLossScaler, scale: torch.Tensor) -> None:
        """Run after a scaled pass, while its gradients are still multiplied by ``scale``.

        Args:
            window: the window of the optimizer.
            scaler: the loss scaler that gave ``scale``.
            scale: the loss scale, a 0-dim tensor.
        """

    def stepping(self, window: Window) -> None:
        """Run before the optimizer steps without a closure."""

    def stepped(self, window: Window) -> None:
        """Run after the optimizer stepped, or skipped its step on the device."""


class Window:
    """The backward passes of one optimizer since its last step.

    Args:
        table: the parameters of the optimizer.
        plain: the masters outside the optimizer; None if they are in its state, or if it has none.
        delegates_to_outer: True if another attached optimizer contains this optimizer and sends the messages to ranks.

    Attributes:
        table, plain, delegates_to_outer: as given.
        gradients: the gradients of the parameters.
        records: the overflow check of each scaled pass; the next step skips if a pass overflowed.
        peers: weak references to the windows of other optimizers that share a parameter with this optimizer.
        state: the state of the gradients.
        thread: the thread that uses the optimizer.
        subscribers: the objects to notify of passes and steps.
        clip_check: warns if user code clips gradients before they are unscaled, in any step; None before the first
            scaled pass.
        forgot_records: True if records were dropped together with their gradients since the last step. User code may
            have kept the gradients, and may assign them again before the step.
        checked_generation: the generation of the table when ``drop_foreign_grads`` last ran; None before the first
            scaled pass.
        scale: the loss scale of the current or latest pass, a 0-dim tensor; None without a loss scale.
    """

    ranks = RankSync()
    """The messages to other ranks. An instance gets its own object as soon as a DDP wrapper exists."""

    def __init__(
        self, table: OptimizerTable, plain: PlainMasters | None = None, *, delegates_to_outer: bool = False
    ) -> None:
        self.table, self.plain, self.gradients = table, plain, Gradients(table)
        self.gradients.expect()
        self.delegates_to_outer = delegates_to_outer
        self.records: list[BackwardRecord] = []
        self.peers: tuple[weakref.ref[Window], ...] = ()
        self.state = WindowState.IDLE
        self.subscribers: list[Subscriber] = []
        self.clip_check: ClippedGradients | None = None
        self.scale: torch.Tensor | None = None
        # The open block. Only its `with` statement may hold a strong reference: if an interrupt prevents the exit, the
        # block is freed, and `is_open` knows by the dead reference that it must abandon the pass.
        self._block: weakref.ref[Any] | None = None
        self.thread = get_ident()
        # True if the open pass changes gradients of earlier passes, which are then lost if the pass is interrupted.
        self._in_place = False
        self._release: GradientRelease | None = None  # the gradient release of the open pass
        self.checked_generation: int | None = None
        self.forgot_records = False

    @property
    def release(self) -> GradientRelease | None:
        """The gradient release of the optimizer; None if it does not step parameters in backward passes."""
        found = getattr(self.table.optimizer(), "release", None)
        return found if isinstance(found, GradientRelease) else None

    def params(self) -> list[torch.Tensor]:
        """Return the parameters in the optimizer's groups."""
        self.table.refresh()
        return self.table.params

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, on which overflow flags and scales are kept."""
        return next((param.device for param in self.params()), torch.device("cpu"))

    @property
    def block(self) -> Any:
        """The open block; None if no block is open."""
        return None if self._block is None else self._block()

    def close(self, state: WindowState = WindowState.READY) -> None:
        """Close the block, after ``finish`` unscaled the gradients and ``record_pass`` recorded their overflow."""
        self._block, self._in_place, self.state = None, False, state

    def is_open(self) -> bool:
        """True if a block is open. If an interrupt such as Ctrl-C prevented the block's exit, abandon its pass."""
        if self.state not in UNSAFE:
            return False
        if self.block is not None:
            return True
        logger.info("A scale_loss block was interrupted; its backward pass is discarded")
        self.abandon()
        return False

    def begin(
        self, scale: torch.Tensor | None, *, block: Any, guard: Callable[[], None] | None = None, named: bool = True
    ) -> None:
        """Set aside the gradients in ``p.grad``, so that the next backward pass leaves only its own gradients there.

        Args:
            scale: the 0-dim tensor that multiplies the loss; None if the loss is not scaled.
            block: the block to open; the window keeps a weak reference to it.
            guard: a function that gradient release calls before it uses a gradient in the pass; it raises an error to
                refuse the gradient.
            named: False if the block belongs to other optimizers, and its pass may reach parameters of this optimizer.
                If a block of this optimizer opens before the pass ends, ``block.finish_reached`` ends the pass here.

        Raises:
            UsageError: if a block is already open, or if user code sharded the model after its optimizer was attached.
        """
        # Refuse calls that the state does not allow.
        if self.state is WindowState.REACHED and (open_block := self.block) is not None:
            open_block.finish_reached(self)
        if self.state in UNSAFE:
            self._refuse_open()
        self.scale = scale
        for subscriber in list(self.subscribers) if named else ():
            subscriber.opened(self)
        release = self._release = self.release
        if release is not None and named:
            release.refuse_block()
        # Refresh: parameters, wrappers and gradients that were added or removed since the last pass.
        if self.state is WindowState.DIRTY:
            self.clear_stale_overflow()
        table = self.table
        table.refresh()
        params = table.params
        if self.checked_generation is not None and self.checked_generation != table.generation:
            self.drop_foreign_grads()
        if scale is not None:
            self.checked_generation = table.generation
        alone = not (REDUCTIONS or self.ranks.reductions)
        if not alone:
            self._find_wrappers(params)
            scale = self.ranks.gradient_scale(scale)
            self.ranks.abandon_plain()
        gone = release is None or not release.stepped
        if gone and self.records and not self.ranks.reductions and all(param.grad is None for param in params):
            # User code removed the gradients of these records.
            self.records, self.forgot_records = [r for r in self.records if r.pending_scaler is None], True
        # Set aside. Gradient release and ranks change gradients, so their order matters. That is why they are called
        # here by name instead of subscribing.
        self.thread = get_ident()
        self._in_place = self.state is WindowState.SCALED and release is None and not self.ranks.will_sync and named
        if release is not None:
            release.begin(scale, guard)
        self._block, self.state = weakref.ref(block), WindowState.OPEN if named else WindowState.REACHED
        in_place = list if self._in_place else None if alone else self.ranks.averaged_next
        self.gradients.begin(scale, block, in_place)
        if not alone:
            self.ranks.begin_backward(scale, table.slots)

    def begin_plain(self, scaler: object, found_inf: torch.Tensor) -> None:
        """Begin to unscale the gradients of passes without a block.

        The caller must have refreshed the table. It unscales the gradients itself, adds a record, and calls ``close``.
        DDP wrappers have averaged the gradients as the user configured them.

        Args:
            scaler: the ``GradScaler`` that scaled the losses.
            found_inf: 0-dim float32 tensor, set to 1.0 if gradient release found inf or NaN during a pass.

        Raises:
            UsageError: if a block is open, or if gradient release uses another scaler.
        """
        if self.state in UNSAFE:
            self._refuse_open()
        release = self._release = self.release
        if release is not None:
            release.refuse_other_scaler(scaler)
            release.add_overflow(found_inf)

    def _refuse_open(self) -> None:
        if self.is_open():
            name = type(self.table.optimizer()).__name__
            raise UsageError(
                f"A scale_loss block of this {name} is already open, and gradients of two backward passes with "
                "different loss scales would mix. Close the first block before you open the second; gradients "
                "accumulate across blocks."
            )

    def finish_reached(self, scaler: DeviceLossScaler, scale: torch.Tensor, before: WindowState) -> None:
        """Unscale the new gradients of a pass that began with ``begin(named=False)`` in the state ``before``.

        The overflow is recorded for this optimizer only, whose ``zero_grad`` clears the record: the optimizers that the
        block names do not skip their steps by it. With DDP wrappers a record is made even without new gradients,
        because all ranks must send the same messages.
        """
        after = before if before is WindowState.SCALED else WindowState.READY
        if not (self.gradients.arrived() or self.ranks.reductions):
            self.abandon(after)
            return
        found_inf = torch.zeros_like(scale, dtype=torch.float32)
        self.finish(scale, found_inf, scaler)
        record_pass([self], found_inf)
        self.close(after)

    def clear_stale_overflow(self) -> torch.Tensor | None:
        """Clear the gradients of a skipped step if they are still in ``p.grad``, so that no later step uses them.

        Only the values of the gradients can tell: user code may have cleared them without ``zero_grad``, and if a step
        skips itself on the device, the host does not know that it was skipped.

        Returns:
            0-dim float32 tensor, 1.0 if gradients were cleared; None if there are no gradients.
        """
        self.state = WindowState.IDLE
        self.table.refresh()
        return self.gradients.clear_overflow()

    def drop_foreign_grads(self) -> None:
        """Drop the gradients of parameters that user code added to the optimizer after a scaled pass.

        Passes before the addition multiplied these gradients by the loss scale, and the optimizer did not unscale them.
        A gradient does not show if it is scaled, so gradients that were not scaled are dropped as well.
        """
        slots, checked = self.table.refresh(), self.checked_generation
        if checked is None or checked == self.table.generation:
            return
        self.checked_generation = self.table.generation
        foreign = [slot.param for slot in slots if slot.since > checked and slot.param.grad is not None]
        if not foreign:
            return
        for param in foreign:
            param.grad = None
        name = type(self.table.optimizer()).__name__
        warnings.warn(
            f"{counted(len(foreign), 'parameter')} had gradients when added to this {name}, and these "
            "were dropped. Backward passes multiplied them by the loss scale, and only the gradients of parameters in "
            "the optimizer are divided by it. To avoid this warning, freeze such parameters (requires_grad_(False)) "
            "until you add them, or set their gradients to None before.",
            UserWarning,
            stacklevel=callers_level(),
        )

    def abandon(self, state: WindowState = WindowState.READY) -> None:
        """Drop the gradients of a failed backward pass, and put back the gradients that ``begin`` set aside.

        If the pass already sent gradients to other ranks, accumulated into earlier gradients, or unscaled some of them,
        the earlier gradients are lost, and the next step is skipped.
        """
        lost = self.ranks.abandon_backward(self.gradients.arrived()) or self._in_place
        if self.state is not WindowState.FINISHING:
            self.gradients.restore()
        else:
            self.gradients.forget()
            for param in self.params():
                param.grad = None
        if self.release is not None:
            self.release.abandon()
        if lost:
            record_pass([self], torch.ones((), dtype=torch.float32, device=self.device))
        self.close(state)

    def notify_closed(self, scaler: DeviceLossScaler, scale: torch.Tensor, *, by: str) -> None:
        """Call ``Subscriber.closed`` of each subscriber, and check if user code clipped the scaled gradients.

        Args:
            scaler: see ``Subscriber.closed``.
            scale: see ``Subscriber.closed``.
            by: see ``ClippedGradients.check``; empty to check nothing.
        """
        for each in list(self.subscribers):
            each.closed(self, scaler, scale)
        if by:
            self.clip_check = self.clip_check or ClippedGradients()
            self.clip_check.check(self.table.params, scale, by=by)

    def finish(self, scale: torch.Tensor | None, found_inf: torch.Tensor, scaler: DeviceLossScaler) -> bool:
        """Unscale the new gradients of a pass, and add the gradients that ``begin`` set aside.

        An interrupt before ``record_pass`` or ``close`` drops the gradients, because some may be unscaled and others
        not, or inf without a record.

        Args:
            scale: the scale given to ``begin``.
            found_inf: 0-dim float32 tensor, set to 1.0 if a new gradient holds inf or NaN.
            scaler: the loss scaler, for the subscribers.

        Returns:
            True if any parameter has a gradient, or gradient release stepped one.
        """
        if scale is not None:
            self.notify_closed(scaler, scale, by="block")
        release, table = self._release if self.state in UNSAFE[:2] else self.release, self.table
        table.refresh()
        found = (release is not None and release.finish(found_inf)) or any(p.grad is not None for p in table.params)
        if self.ranks.reductions:
            self.ranks.end_backward()
            scale = self.ranks.gradient_scale(scale)
        self._in_place = self._in_place or self.gradients.has_saved
        self.state = WindowState.FINISHING
        self.gradients.finish(scale, found_inf)
        return found

    def multiply(self, scale: torch.Tensor) -> None:
        """Multiply the gradients by the loss scale again, the inverse of ``finish``. An interrupt drops them."""
        divisor = self.ranks.gradient_scale(scale)
        assert divisor is not None
        self._in_place, self.state = True, WindowState.FINISHING
        self.gradients.multiply(self.params(), divisor)
        self.close()

    def sync(self, *, steps: bool = True) -> None:
        """Average the gradients, and share the overflows, that the ranks have not exchanged since the last step.

        Args:
            steps: True if a step follows.

        Raises:
            UsageError: see ``RankSync.sync_gradients``.
        """
        params = self.params()
        half = self._find_wrappers(params)
        if self.ranks.reductions:
            self.ranks.sync_gradients(params, half, self.records, steps=steps)
            sync_overflow([self])

    def take_records(self, *, agreed: bool = True) -> list[BackwardRecord]:
        """Return the records of this window and clear them: later passes belong to the next step.

        Args:
            agreed: True to let the ranks agree on the records first; False if they already agreed.
        """
        if agreed and REDUCTIONS:
            self.sync()
        records, self.records = self.records, []
        if records:
            self.state = WindowState.DIRTY
        if REDUCTIONS:
            self.ranks.end_window()
        return records

    def clear(self) -> None:
        """Reset the window after ``zero_grad`` cleared the gradients."""
        if self.state in UNSAFE and self.block is None:
            if self.release is not None:
                self.release.abandon()
            self.close()
        self.gradients.clear()
        if self.state not in UNSAFE:
            self.state = WindowState.IDLE
        self.forgot_records |= bool(self.records)
        self.records.clear()
        if REDUCTIONS:
            self.ranks.end_window()

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients that the next step uses, to a norm over all of them as one vector.

        Args:
            max_norm: the largest norm allowed.
            norm_type: the p of the p-norm; ``float("inf")`` for the largest element.

        Returns:
            The norm before clipping, a 0-dim tensor; -1 if a scaled backward pass overflowed, because the step is
            skipped then. The call does not read the device.
        """
        if self.release is not None:
            self.release.refuse_clipping("clip_master_grads")
        self.drop_foreign_grads()
        self.sync(steps=False)
        norm = self.gradients.clip(max_norm, norm_type)
        return torch.where(any_overflow(self.records) != 0, -1.0, norm) if self.records else norm

    def _find_wrappers(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Find the DDP wrappers around the parameters, and return the parameters that have masters."""
        half = [slot.param for slot in self.table.slots if slot.fp32]
        if not self.delegates_to_outer:
            if "ranks" not in vars(self):
                self.ranks = RankSync()
            self.ranks.find_wrappers(params, half, half if self.table.replicated else [])
        return half


WINDOWS: weakref.WeakKeyDictionary[Window, None] = weakref.WeakKeyDictionary()
"""The windows of attached optimizers, in the order of the ``attach`` calls, which is the same on every rank."""


def reachable(named: Sequence[Window]) -> list[Window]:
    """Return the windows of optimizers that a block does not name but whose parameters its pass may reach.

    A pass writes gradients of every parameter that it reaches, and multiplies all of them by the loss scale. With two
    optimizers over one trunk, or with the two networks of a GAN, either loss reaches parameters of both optimizers.

    Args:
        named: the windows of the optimizers that the block names.
    """
    here = get_ident()
    unnamed = [one for one in WINDOWS if one not in named and one.thread == here and not one.delegates_to_outer]
    return [one for one in unnamed if one.table.optimizer() is not None and not one.is_open()]


def record_pass(
    windows: Sequence[Window],
    found_inf: torch.Tensor,
    pending_scaler: DeviceLossScaler | None = None,
    *,
    scaler: DeviceLossScaler | None = None,
) -> None:
    """Record the overflow check of a pass, close the windows, and update the loss scale.

    Optimizers that share a parameter with one of these also skip their steps.

    With both ``pending_scaler`` and ``scaler``, the loss scale is updated at once; but if the ranks have not averaged
    these gradients yet, it is updated when they have.

    Args:
        windows: the windows of the optimizers.
        found_inf: 0-dim float32 tensor, 1.0 if a gradient holds inf or NaN.
        pending_scaler: see ``BackwardRecord``.
        scaler: see ``BackwardRecord``.
    """
    alone = not any(window.ranks.reductions for window in windows)
    record = BackwardRecord(found_inf, pending_scaler if scaler or alone else None, shared=alone, scaler=scaler)
    for window in windows:
        peers = [peer for ref in window.peers if (peer := ref()) is not None]
        for each in (window, *peers):
            if record not in each.records:
                each.records.append(record)
            if len(each.records) >= _MANY:
                each.records = _merged(each.records)
        window.close()
    if pending_scaler is not None and scaler is not None:
        if alone:
            pending_scaler.update(found_inf, lambda: blame(windows))
        elif not any(window.ranks.unsynced for window in windows):
            sync_overflow(windows)


def any_overflow(records: Sequence[BackwardRecord]) -> torch.Tensor:
    """Return a 0-dim float32 tensor, 1.0 if any pass overflowed."""
    if len(records) == 1:
        return records[0].found_inf
    return torch.stack([p.found_inf.to(records[0].found_inf.device) for p in records]).amax()


_MANY = 64
"""Records are merged above this number of passes, so that user code that never steps does not leak memory."""


def _merged(records: list[BackwardRecord]) -> list[BackwardRecord]:
    """Merge the records of passes that all ranks share into one record per loss scaler."""
    found = [record for record in records if not record.shared]
    alike: dict[tuple[DeviceLossScaler | None, DeviceLossScaler | None], list[BackwardRecord]] = {}
    for record in [record for record in records if record.shared]:
        alike.setdefault((record.pending_scaler, record.scaler), []).append(record)
    return found + [BackwardRecord(any_overflow(row), pending, True, by) for (pending, by), row in alike.items()]


def sync_overflow(optimizers: Sequence[Window]) -> None:
    """Share with all ranks which passes overflowed, and update the loss scales."""
    records = {id(record): record for window in optimizers for record in window.records}
    for scaler, found_inf in share_overflow(records.values(), [window.ranks for window in optimizers]).items():
        scaler.update(found_inf, lambda: blame(optimizers))


def blame(windows: Sequence[Window]) -> str:
    """Describe the first gradient that is inf or NaN, for an error message. Reads the device."""
    return first_bad_gradient([window.table.optimizer() for window in windows])
