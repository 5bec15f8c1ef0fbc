"""The window of one optimizer: its backward passes since the last step, and what it needs before and after each.

``scaled_backward.py`` has the block in which a face runs a pass.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from threading import get_ident
from typing import Any

import torch

from ..core.errors import UsageError
from ..core.text import counted
from ..optimizers.release import GradientRelease
from ..parameters.keeper import MasterKeeper
from ..parameters.loss_scaler import DeviceLossScaler
from ..parameters.table import REDUCTIONS, Slot
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
    """Progress of the backward passes of an optimizer.

    ::

                 begin         finish             close            step, zero_grad
        IDLE -----------> OPEN -------> FINISHING ------> READY -------------------> IDLE
                           ^                       |      | ^
                           |          begin        |      | | close, of the next pass
                           +-----------------------|------+ |
                                                   v        |
                                                 SCALED ----+
        step of gradients with an overflow, or whose overflow only the device knows: DIRTY --begin, zero_grad--> IDLE
        a block of other optimizers:    each but OPEN -----> REACHED -----> FINISHING -----> READY, or SCALED as before
                                        (nothing was brought: REACHED ---------------------> READY, or SCALED as before)
        a GradScaler:   each without an open block -----> FINISHING -----> READY

    - **OPEN**: gradients are multiplied by the loss scale; what was there before is set aside. An optimizer never
      steps. A second ``begin`` is an error, unless the block is gone: then an interrupt came before its exit, and the
      pass is abandoned.
    - **REACHED**: as OPEN, by a block of other optimizers, whose pass may reach parameters of this one, too. A block of
      this optimizer ends it.
    - **FINISHING**: gradients are unscaled in part, or inf without a record of it. After an interrupt they are dropped.
      A GradScaler begins here where it unscales, from any state without an open block: its passes have been.
    - **READY**: the next step may use the gradients.
    - **SCALED**: as READY after a pass with ``delay_unscale=True``. The next pass adds to the gradients where they are,
      because scripts average ``p.grad`` by hand in the block of the last pass of a window.
    - **DIRTY**: the step was skipped, or may have been, and its gradients may still be there. Their values tell: they
      are cleared before anything else uses them if one is inf or NaN.
    """

    IDLE = "idle"
    OPEN = "open"
    REACHED = "reached"
    FINISHING = "finishing"
    READY = "ready"
    SCALED = "scaled"
    DIRTY = "dirty"


UNSAFE = (WindowState.OPEN, WindowState.REACHED, WindowState.FINISHING)
"""The states in which gradients are in the middle of something."""


class Subscriber:
    """Looks at the passes and steps of one optimizer, and changes none of their values: a warning, a finding, a report.

    Each method is an event of the window that has it in ``subscribers``. One that has nothing to look at any more takes
    itself out, so that a settled training calls none. One that raises leaves no block open: the pass is abandoned. An
    error that prevents a silently wrong step is no subscriber: the engine calls it itself.
    """

    def opened(self, window: Window) -> None:
        """A block is opened for a pass of the optimizer. Nothing has changed yet."""

    def closed(self, window: Window, scaler: DeviceLossScaler, scale: torch.Tensor) -> None:
        """A scaled pass is over; its gradients are there, and still multiplied by ``scale``.

        Args:
            window: the window of the optimizer.
            scaler: the loss scale that ``scale`` is the value of.
            scale: 0-dim tensor.
        """

    def stepping(self, window: Window) -> None:
        """The optimizer is about to step, without a closure."""

    def stepped(self, window: Window) -> None:
        """The optimizer has stepped, or skipped its step on the device."""


class Window:
    """The scaled backward passes that one optimizer has had since its last step.

    Args:
        keeper: the masters, which know the optimizer.
        delegates_to_outer: True if another attached optimizer contains this optimizer and sends the messages to ranks.

    Attributes:
        keeper, delegates_to_outer: as given.
        records: one for each pass; the next step asks them whether gradients overflowed.
        sharing: weak references to the windows of other optimizers that share a parameter with this one.
        state: the stage of the passes.
        thread: the thread that uses the optimizer.
        subscribers: the objects that look at the passes and steps.
        clipped: looks for gradients that were clipped before they are unscaled, which may begin in any step; None
            before the first scaled pass.
        known: the generation of the table at the latest look for parameters that have come; None before the first
            scaled pass.
        scale: the factor of the loss of the present pass, or of the latest, a 0-dim tensor; None for none.
    """

    ranks = RankSync()
    """The messages to other processes; an instance gets its own object as soon as there are wrappers."""

    def __init__(self, keeper: MasterKeeper, *, delegates_to_outer: bool = False) -> None:
        self.keeper = keeper
        self.delegates_to_outer = delegates_to_outer
        self.records: list[BackwardRecord] = []
        self.sharing: tuple[weakref.ref[Window], ...] = ()
        self.state = WindowState.IDLE
        self.subscribers: list[Subscriber] = []
        self.clipped: ClippedGradients | None = None
        self.scale: torch.Tensor | None = None
        # The open block. Nobody but its `with` statement holds it: it is gone if an interrupt came before its exit.
        self._block: weakref.ref[Any] | None = None
        self.thread = get_ident()
        self._mixes = False  # the open pass changes gradients of earlier passes, so that an interrupt loses these, too
        self._release: GradientRelease | None = None  # of the open pass
        self.known: int | None = None

    @property
    def release(self) -> GradientRelease | None:
        """Return the gradient release that steps parameters inside of backward passes, if there is one."""
        found = getattr(self.keeper.table.optimizer(), "release", None)
        return found if isinstance(found, GradientRelease) else None

    def params(self) -> list[torch.Tensor]:
        """The parameters in the optimizer's groups."""
        self.keeper.table.refresh()
        return self.keeper.table.params

    @property
    def device(self) -> torch.device:
        """Return the device of the first parameter: flags and scales are kept there."""
        return next((param.device for param in self.params()), torch.device("cpu"))

    @property
    def block(self) -> Any:
        """The block that is open; None for none."""
        return None if self._block is None else self._block()

    def close(self, state: WindowState = WindowState.READY) -> None:
        """The gradients are unscaled, and their overflow is noted."""
        self._block, self._mixes, self.state = None, False, state

    def is_open(self) -> bool:
        """True if a block is open. A pass that an interrupt, such as Ctrl-C, has left half done is abandoned."""
        if self.state not in UNSAFE:
            return False
        if self.block is not None:
            return True
        logger.info("A scale_loss block was interrupted; its backward pass does not count")
        self.abandon()
        return False

    def begin(
        self, scale: torch.Tensor | None, *, block: Any, guard: Callable[[], None] | None = None, named: bool = True
    ) -> None:
        """Set aside the present gradients, so that a backward pass scaled by ``scale`` brings only its own.

        Args:
            scale: the 0-dim tensor that the loss is multiplied by; None if it is not scaled.
            block: the block that is opened; not kept alive.
            guard: a function that is called before a gradient is used inside of the pass; raises an error if it must
                not be used.
            named: False if the block belongs to other optimizers, and its pass may reach parameters of this one, too.
                If a block of this one is opened meanwhile, ``block.finish_reached`` ends this pass for it.

        Raises:
            UsageError: if a block is open already, or if the model was cut after its optimizer was attached.
        """
        # Refuse by state.
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
        # Refresh: what has come since the last pass, and what has gone.
        if self.state is WindowState.DIRTY:
            self.settle()
        table = self.keeper.table
        table.refresh()
        params = table.params
        if self.known is not None and self.known != table.generation:
            self.drop_brought()
        if scale is not None:
            self.known = table.generation
        alone = not (REDUCTIONS or self.ranks.reductions)
        if not alone:
            self._find_wrappers(params)
            scale = self.ranks.gradient_scale(scale)
            self.ranks.abandon_plain()
        gone = release is None or not release.has_stepped
        if gone and self.records and not self.ranks.reductions and all(param.grad is None for param in params):
            self.records = [record for record in self.records if record.scaler is None]  # of gradients that are gone
        # Set aside. Release and ranks change gradients, and their order matters: they are called here, by name.
        self.thread = get_ident()
        self._mixes = self.state is WindowState.SCALED and release is None and not self.ranks.will_sync and named
        if release is not None:
            release.begin(params, scale, guard)
        self._block, self.state = weakref.ref(block), WindowState.OPEN if named else WindowState.REACHED
        stay = list if self._mixes else None if alone else self._averaged_next
        self.keeper.gradients.begin(scale, block, stay)
        if not alone:
            self.ranks.begin_backward(scale, table.slots)

    def begin_plain(self, scaler: object, found_inf: torch.Tensor) -> None:
        """Begin to unscale what passes without a block have brought: ``finish`` and ``record_pass`` follow.

        The table is to be up to date.

        Args:
            scaler: the ``GradScaler`` that has scaled the losses.
            found_inf: 0-dim float32 tensor, set to 1.0 if a parameter has met inf or NaN inside of a pass.

        Raises:
            UsageError: if a block is open, or if parameters step inside of the passes by another scaler.
        """
        if self.state in UNSAFE:
            self._refuse_open()
        release = self._release = self.release
        if release is not None:
            release.refuse_other_scaler(scaler)
            release.add_overflow(found_inf)

    def _refuse_open(self) -> None:
        if self.is_open():
            name = type(self.keeper.table.optimizer()).__name__
            raise UsageError(
                f"A scale_loss block of this {name} is open already, and two backward "
                "passes at two scales would mix. Close the first block before the second; gradients add up across "
                "blocks."
            )

    def finish_reached(self, scaler: DeviceLossScaler, scale: torch.Tensor, before: WindowState) -> None:
        """After ``begin(named=False)`` in state ``before``, and the pass: unscale what it brought here, if anything.

        An overflow is noted for this optimizer alone, whose ``zero_grad`` clears it: it skips no step of the optimizers
        that the block belongs to. With wrappers the record is made in any case, because all ranks must send alike.
        """
        after = before if before is WindowState.SCALED else WindowState.READY
        if not (self.keeper.gradients.arrived() or self.ranks.reductions):
            self.abandon(after)
            return
        found_inf = torch.zeros_like(scale, dtype=torch.float32)
        self.finish(scale, found_inf, scaler)
        record_pass([self], found_inf)
        self.close(after)

    def settle(self) -> torch.Tensor | None:
        """Clear the gradients of a skipped step if they are still there, so that no later step takes them.

        Their values tell whether they are. The gradients may have been cleared in a way that no hook sees, and after
        a step that skips itself on the device the host does not know whether it did.

        Returns:
            0-dim float32 tensor, 1.0 if gradients were cleared; None if there are none.
        """
        self.state = WindowState.IDLE
        self.keeper.table.refresh()
        return self.keeper.gradients.clear_overflow()

    def drop_brought(self) -> None:
        """Drop the gradients that parameters brought with them when they came to the optimizer after a scaled pass.

        The passes before they came have multiplied them by the loss scale, and nothing has divided them. This cannot
        be seen from a gradient, so a gradient that was not scaled is dropped too.
        """
        slots, known = self.keeper.table.refresh(), self.known
        if known is None or known == self.keeper.table.generation:
            return
        self.known = self.keeper.table.generation
        brought = [slot.param for slot in slots if slot.since > known and slot.param.grad is not None]
        if not brought:
            return
        for param in brought:
            param.grad = None
        name = type(self.keeper.table.optimizer()).__name__
        warnings.warn(
            f"{counted(len(brought), 'parameter')} had gradients when added to this {name}, and these "
            "were dropped. Backward passes have multiplied them by the loss scale, and only gradients of parameters in "
            "the optimizer are divided by it. To have nothing to drop, keep such parameters frozen "
            "(requires_grad_(False)) until they are added, or set their gradients to None before.",
            UserWarning,
            stacklevel=callers_level(),
        )

    def abandon(self, state: WindowState = WindowState.READY) -> None:
        """After ``begin``, when the backward pass failed: drop what it brought and put back what was set aside.

        If gradients went to other ranks, were added to others in place, or are unscaled in part, there is no way back:
        the next step is skipped.
        """
        params = self.params()
        lost = self.ranks.abandon_backward() or self._mixes
        if self.state is not WindowState.FINISHING:
            self.keeper.gradients.restore()
        else:
            self.keeper.gradients.forget()
            for param in params:
                param.grad = None
        if self.release is not None:
            self.release.abandon()
        if lost:
            found_inf = torch.ones((), dtype=torch.float32, device=self.device)
            record_pass([self], found_inf)
        self.close(state)

    def tell_closed(self, scaler: DeviceLossScaler, scale: torch.Tensor) -> None:
        """Tell the subscribers that a pass is over; see ``Subscriber.closed``."""
        for each in list(self.subscribers):
            each.closed(self, scaler, scale)

    def finish(
        self,
        scale: torch.Tensor | None,
        found_inf: torch.Tensor,
        scaler: DeviceLossScaler,
        *,
        plain: bool = False,
        done: Collection[int] = (),
    ) -> bool:
        """After ``begin`` and the backward pass: unscale what it brought and add what was set aside.

        Until ``record_pass`` or ``close`` an interrupt drops the gradients: they may be unscaled in part, or inf
        without a record.

        Args:
            scale: as given to ``begin``. Without ``begin``, what the gradients that are there are multiplied by.
            found_inf: 0-dim float32 tensor, set to 1.0 if a new gradient holds inf or NaN.
            scaler: the loss scale, for the subscribers.
            plain: True after ``begin_plain``. Wrappers have sent what their user chose, and nothing more is divided by.
            done: identities of parameters whose gradients are unscaled already.

        Returns:
            Whether any parameter has a gradient, or has stepped with one.
        """
        if scale is not None and not plain:
            if self.subscribers:
                self.tell_closed(scaler, scale)
            self.clipped = self.clipped or ClippedGradients()
            self.clipped.look(self.keeper.table.params, scale, by="block")
        release, table = self._release, self.keeper.table
        if not plain:
            release = release if self.state in UNSAFE[:2] else self.release
            table.refresh()
        found = (release is not None and release.finish(found_inf)) or any(p.grad is not None for p in table.params)
        if self.ranks.reductions and not plain:
            self.ranks.end_backward()
            scale = self.ranks.gradient_scale(scale)
        self._mixes = self._mixes or self.keeper.gradients.has_saved
        self.state = WindowState.FINISHING
        self.keeper.gradients.finish(scale, found_inf, done)
        return found

    def multiply(self, scale: torch.Tensor) -> None:
        """Scale the gradients again, as ``finish`` unscales them. An interrupt meanwhile drops them."""
        divisor = self.ranks.gradient_scale(scale)
        assert divisor is not None
        self._mixes, self.state = True, WindowState.FINISHING
        self.keeper.gradients.multiply(self.params(), divisor)
        self.close()

    def sync(self, *, steps: bool = True) -> None:
        """Average gradients and overflows since the last step with the ranks that have not got them yet.

        Args:
            steps: True if a step follows.

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
            agreed: True to let the ranks agree on them before; False if they have done so already.
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
        """The gradients were cleared: forget what is known about them."""
        if self.state in UNSAFE and self.block is None:
            if self.release is not None:
                self.release.abandon()
            self.close()
        self.keeper.table.refresh()
        self.keeper.gradients.clear()
        if self.state not in UNSAFE:
            self.state = WindowState.IDLE
        self.records.clear()
        if REDUCTIONS:
            self.ranks.end_window()

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients that the next step uses to a total norm, taken over all of them as one vector.

        Args:
            max_norm: the largest norm allowed.
            norm_type: the p of the p-norm; ``float("inf")`` for the largest element.

        Returns:
            The norm before, a 0-dim tensor; -1 if a scaled backward pass overflowed, since there is nothing to clip
            then. No device is read.
        """
        if self.release is not None:
            self.release.refuse_clipping("clip_master_grads")
        self.drop_brought()
        self.sync(steps=False)
        norm = self.keeper.gradients.clip(max_norm, norm_type)
        return torch.where(any_overflow(self.records) != 0, -1.0, norm) if self.records else norm

    def _averaged_next(self, slots: Sequence[Slot]) -> list[Slot]:
        """The rows whose gradients the ranks average in place; none whose gradient is to be fp32."""
        return self.ranks.averaged_next([slot for slot in slots if not slot.fp32])

    def _find_wrappers(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Find the wrappers around the parameters. Returns the parameters that have masters."""
        half = self.keeper.table.halves() if self.keeper.any else []
        if not self.delegates_to_outer:
            if "ranks" not in vars(self):
                self.ranks = RankSync()
            self.ranks.find_wrappers(params, half, half if self.keeper.replicated else [])
        return half


WINDOWS: weakref.WeakKeyDictionary[Window, None] = weakref.WeakKeyDictionary()
"""The windows of attached optimizers, in the order of the calls of ``attach``, which is the same on every rank."""


def reachable(named: Sequence[Window]) -> list[Window]:
    """The windows of further optimizers whose parameters a pass in a block may reach.

    A pass belongs to the parameters that it reaches, not to the optimizers that the block names: of two optimizers over
    one trunk, or of a GAN's two networks, either loss brings gradients to both, and all are multiplied by the scale.

    Args:
        named: the windows of the optimizers that the block belongs to.
    """
    here = get_ident()
    beside = [one for one in WINDOWS if one not in named and one.thread == here and not one.delegates_to_outer]
    return [one for one in beside if one.keeper.table.optimizer() is not None and not one.is_open()]


def record_pass(
    windows: Sequence[Window],
    found_inf: torch.Tensor,
    scaler: DeviceLossScaler | None = None,
    *,
    moves: DeviceLossScaler | None = None,
    told: bool = True,
) -> None:
    """Note a pass for the next step of some optimizers, whose gradients are whole from here on, and for the loss scale.

    A loss scale that is given twice hears of it at once, unless other ranks do not have these gradients yet: then it
    hears when they are averaged.

    Args:
        windows: the windows of the optimizers.
        found_inf: 0-dim float32 tensor, 1.0 if a gradient holds inf or NaN.
        scaler: the loss scale that is yet to be updated with it; see ``BackwardRecord``.
        moves: the loss scale that an overflow lowers.
        told: True if the optimizers that share a parameter with one of these skip their steps by it, too.
    """
    alone = not any(window.ranks.reductions for window in windows)
    record = BackwardRecord(found_inf, scaler if moves or alone else None, shared=alone, moves=moves)
    for window in windows:
        others = [other for ref in window.sharing if (other := ref()) is not None] if told else []
        for each in (window, *others):
            if record not in each.records:
                each.records.append(record)
            if len(each.records) >= _MANY:
                each.records = _merged(each.records)
        window.close()
    if scaler is not None and moves is not None:
        if alone:
            scaler.update(found_inf, lambda: blame(windows))
        elif not any(window.ranks.has_unsynced for window in windows):
            sync_overflow(windows)


def any_overflow(records: Sequence[BackwardRecord]) -> torch.Tensor:
    """Return whether any pass overflowed, as a 0-dim float32 tensor."""
    if len(records) == 1:
        return records[0].found_inf
    device = records[0].found_inf.device
    return torch.stack([p.found_inf.to(device) for p in records]).amax()


_MANY = 64
"""The number of passes without a step after which their records are merged: user code may never step."""


def _merged(records: list[BackwardRecord]) -> list[BackwardRecord]:
    """Merge the records of many passes without a step: one for each loss scale for the passes that all ranks have."""
    found = [record for record in records if not record.shared]
    alike: dict[tuple[DeviceLossScaler | None, DeviceLossScaler | None], list[BackwardRecord]] = {}
    for record in records:
        if record.shared:
            alike.setdefault((record.scaler, record.moves), []).append(record)
    for (scaler, moves), row in alike.items():
        found.append(BackwardRecord(any_overflow(row), scaler, shared=True, moves=moves))
    return found


def sync_overflow(optimizers: Sequence[Window]) -> None:
    """Let all ranks agree on which of the latest passes overflowed, and update the loss scales."""
    records = {id(record): record for window in optimizers for record in window.records}
    for scaler, found_inf in share_overflow(records.values(), [window.ranks for window in optimizers]).items():
        scaler.update(found_inf, lambda: blame(optimizers))


def blame(windows: Sequence[Window]) -> str:
    """The first gradient of some optimizers that is not finite, for the message of an error. Reads the device."""
    return first_bad_gradient([window.keeper.optimizer for window in windows])
