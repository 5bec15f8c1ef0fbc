"""The masters of one optimizer, wherever they are: beside it, or in the state of a fused optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from ..core.dtypes import is_half
from ..core.errors import UsageError
from ..torch_internals.torch_compat import HAS_GRAD_DTYPE
from .held_masters import WITH_MEMORY, hold, keep_held, settle
from .ledger import Gradients
from .master_registry import keeper_of, register
from .plain import PlainMasters
from .split import KeepsMasters
from .state_dict import patch_state_init
from .table import Master, OptimizerTable

__all__ = ["MasterKeeper"]


def _reset_grad_dtypes(params: list[weakref.ref[torch.Tensor]]) -> None:
    """The masters are gone: let gradients of their parameters have the parameters' own dtype again."""
    for param in [param for ref in params if (param := ref()) is not None] if HAS_GRAD_DTYPE else ():
        if param.grad is None and keeper_of(param) is None:
            param.grad_dtype = param.dtype


class MasterKeeper:
    """The fp32 masters of one optimizer's 16-bit parameters: each is in the row of its parameter.

    Args:
        optimizer: the optimizer, which must outlive the keeper.
        masters: True if there are masters. A fused optimizer of halfstep keeps them in its state, if torch has
            ``Tensor.grad_dtype``; any other has them in the places of its parameters while it steps. "elsewhere" if an
            attached optimizer inside of it has them.
        originals: the values at which masters start; see ``PlainMasters``.
        own: True if the optimizer may keep masters in its state.

    Attributes:
        plain: the masters that are not in the state of the optimizer; None if it has them, or there are none.
        replicated: True if this keeper has all masters, which are then to be the same on every rank.
        table: the parameters of the optimizer.
        gradients: their gradients.
    """

    def __init__(
        self,
        optimizer: Any,
        masters: bool | Literal["elsewhere"],
        originals: dict[int, torch.Tensor] | None = None,
        *,
        own: bool = True,
    ) -> None:
        self.replicated = masters is True
        self.plain: PlainMasters | None = None
        self._half: list[weakref.ref[torch.Tensor]] = []
        weakref.finalize(self, _reset_grad_dtypes, self._half).atexit = False
        if masters is True and own and HAS_GRAD_DTYPE and isinstance(optimizer, KeepsMasters):
            self.table = optimizer.table
            self.table.start(self.table.new_master, fp32_grads=True)
            optimizer.keep_masters(originals)
        else:
            self.table = OptimizerTable.of(optimizer, fp32_grads=bool(masters))
            self.plain = PlainMasters(self.table, originals) if masters is True else None
        self.gradients = Gradients(self.table)
        self.adopt()

    def keep_plain(self, originals: dict[int, torch.Tensor]) -> None:
        """Keep masters here from now on: the optimizer, which had them in its state, goes on without its fused step."""
        if self.any:
            held = [None if slot.master is None else slot.master.held for slot in self.table.slots]
            self.plain = PlainMasters(self.table, originals)
            for slot, its in zip(self.table.slots, held, strict=True):
                if slot.master is not None and its is not None:
                    keep_held(slot.master, its)
            self.adopt()

    @property
    def any(self) -> bool:
        """True if there are masters, here or in an optimizer inside of this one."""
        return self.table.fp32_grads

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self.table.optimizer()

    def adopt(self) -> None:
        """Take care of all parameters that the optimizer has now, new ones included."""
        self.table.refresh()
        if not self.any:
            return
        if self.plain is not None:
            self.plain.adopt()
        half = self.table.halves()
        register(half, self)
        self._half[:] = [weakref.ref(p) for p in half]
        self.gradients.expect()
        patch_state_init()

    # ---- masters

    def has(self, param: torch.Tensor) -> bool:
        """True if a parameter of the optimizer has a master. One that is frozen goes on having the one it has."""
        if not self.any or not is_half(param):
            return False
        return param.requires_grad or ((master := self.find(param)) is not None and master.exists)

    def find(self, param: torch.Tensor) -> Master | None:
        """The master of a parameter; None if it has none, or another optimizer has it."""
        return self.table.master_of(param)

    def master_params(self) -> Iterator[torch.Tensor]:
        """The tensors that the step updates: of a parameter with a master its ``MasterParameter``, else itself."""
        if self.plain is not None:
            self.plain.adopt()
        settle()
        self.table.refresh()
        for param in self.table.params:
            yield self.view(param) if self.has(param) else param

    def view(self, param: torch.Tensor) -> torch.Tensor:
        """The master of a parameter as a parameter, the same object as long as user code holds it.

        It is the parameter itself if this process has no master to give out: another rank steps the parameter
        (``ZeroRedundancyOptimizer``).
        """
        settle(param)
        keeper: Any = keeper_of(param) or self  # an optimizer inside of this one may have the master
        master = keeper.find(param)
        return param if master is None else hold(master, keeper.optimizer)

    def started(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters and the values of their masters, of all masters that are not in the optimizer's state."""
        settle(refresh=False)
        masters = [slot.master for slot in self.table.refresh() if slot.master is not None]
        return [(each.param, value) for each in masters if (value := each.unsaved()) is not None]

    # ---- around a step

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block plain masters take the places of their parameters in the optimizer, if they are kept here.

        What users have written to masters is stored before, and masters that they hold have what is new after it.
        """
        if WITH_MEMORY:
            settle(refresh=False)
        if self.plain is None or self.plain.places:
            try:
                yield
            finally:
                if WITH_MEMORY:
                    settle()
            return
        try:
            try:
                self.plain.enter()
                yield
            except KeyError as error:
                if error.args and self.plain.has_in_place(error.args[0]):
                    raise UsageError(
                        f"{type(self.optimizer).__name__}.step looked up a weight in a dict of its own, by the "
                        "parameter. At O2 fp32 masters have the places of 16-bit parameters while it steps. Keep what "
                        "belongs to a weight in self.state[p], which goes with it, or by its index in the group."
                    ) from error
                raise
            finally:
                self.plain.leave()
        finally:
            if self.plain.places:  # Ctrl-C has come before the first line of the other `finally`, or within
                self.plain.leave()
            if WITH_MEMORY:
                settle()

    @contextmanager
    def out_of_place(self) -> Iterator[None]:
        """Within the block, inside of one of ``in_place``, the parameters have their places again."""
        if self.plain is not None:
            self.plain.leave()
        yield
        if self.plain is not None:
            self.plain.enter()
