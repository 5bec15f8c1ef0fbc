"""The masters of one optimizer, wherever they are: beside it, or in the state of a fused optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from ..core.dtypes import is_half
from ..core.errors import UsageError
from ..core.torch_compat import HAS_GRAD_DTYPE
from ..distributed.state_dict import patch_state_init
from ..gradients.held_masters import WITH_MEMORY, HeldMasters, settle
from ..gradients.ledger import Gradients
from ..gradients.master_registry import keeper_of, register
from ..gradients.table import OptimizerTable
from .plain import PlainMasters

__all__ = ["MasterKeeper"]


def _reset_grad_dtypes(params: list[weakref.ref[torch.Tensor]]) -> None:
    """The masters are gone: let gradients of their parameters have the parameters' own dtype again."""
    for param in [param for ref in params if (param := ref()) is not None] if HAS_GRAD_DTYPE else ():
        if param.grad is None and keeper_of(param) is None:
            param.grad_dtype = param.dtype


class MasterKeeper:
    """The fp32 masters of one optimizer's 16-bit parameters.

    Args:
        optimizer: this must not outlive it.
        masters: whether there are masters. A fused optimizer of halfstep keeps them in its state, if torch has
            ``Tensor.grad_dtype``; those of any other are kept here. "elsewhere" if an attached optimizer inside of it
            has them.
        originals: where masters start; see ``PlainMasters``.
        own: whether the optimizer may keep masters in its state.

    Attributes:
        plain: the masters that are kept here, or None.
        any: whether there are masters.
        replicated: whether this keeper has all masters, which are then to be the same on every rank.
        saved_elsewhere: identities of parameters whose masters the optimizer does not save, but their model.
        table: the parameters of the optimizer.
        gradients: their gradients.
        held: the masters that users hold.
    """

    def __init__(
        self,
        optimizer: Any,
        masters: bool | Literal["elsewhere"],
        originals: dict[int, torch.Tensor] | None = None,
        *,
        own: bool = True,
    ) -> None:
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self.any = bool(masters)
        self.replicated = masters is True
        self.saved_elsewhere: set[int] = set()
        self.plain: PlainMasters | None = None
        self.held = HeldMasters()
        self._half: list[weakref.ref[torch.Tensor]] = []
        weakref.finalize(self, _reset_grad_dtypes, self._half).atexit = False
        # Whoever clips by hand needs fp32 gradients: torch takes a norm in the dtype of the gradient.
        narrow = HAS_GRAD_DTYPE and getattr(getattr(optimizer, "options", None), "max_grad_norm", None) is not None
        self.table = OptimizerTable.of(optimizer, fp32_grads=bool(masters))
        if masters is True and own and hasattr(optimizer, "keep_masters") and HAS_GRAD_DTYPE:
            optimizer.keep_masters(originals)
        elif masters is True:
            self.plain, narrow = PlainMasters(self.table, originals), False
        self.gradients = Gradients(self.table, narrow=narrow)
        self.adopt()

    def keep_plain(self, originals: dict[int, torch.Tensor]) -> None:
        """Keep masters here from now on: the optimizer, which had them in its state, goes on without its fused step."""
        if self.any:
            self.plain, self.gradients.narrow = PlainMasters(self.table, originals), False
            self.adopt()

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self._optimizer()

    def params(self) -> list[torch.Tensor]:
        """The parameters in the optimizer's groups."""
        self.table.refresh()
        return self.table.params

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
        """Whether a parameter of the optimizer has a master."""
        if not self.any or not is_half(param):
            return False
        return param.requires_grad or self._keeps(param)

    def _keeps(self, param: torch.Tensor) -> bool:
        """Whether there is a master already: a parameter that is frozen goes on having the one it has."""
        if self.plain is not None:
            return self.plain.keeps(param)
        keeps = getattr(self.optimizer, "keeps_master", None)
        return keeps is not None and keeps(param)

    def master_params(self) -> Iterator[torch.Tensor]:
        """The tensors that the step updates: of a parameter with a master its ``MasterParameter``, else itself."""
        if self.plain is not None:
            self.plain.adopt()
        settle()
        for param in self.params():
            yield self._held_master(param) if self.has(param) else param

    def view(self, param: torch.Tensor) -> torch.Tensor:
        """The master of a parameter as a parameter, the same object as long as somebody holds it.

        It is the parameter itself if this process has no master to give out: another rank steps the parameter
        (``ZeroRedundancyOptimizer``).
        """
        settle(param)
        return self._held_master(param)

    def _held_master(self, param: torch.Tensor) -> torch.Tensor:
        keeper: Any = keeper_of(param)  # an optimizer inside of this one may have the master
        keeper = self if keeper is None else keeper
        plain = keeper.plain is not None and keeper.plain.keeps(param)
        if not plain and not hasattr(keeper.optimizer, "master_value"):
            return param
        return keeper.held.of(param, keeper.optimizer)  # type: ignore[no-any-return]

    def master(self, param: torch.Tensor) -> torch.Tensor | None:
        """The fp32 value of a parameter's master; None if it has none."""
        settle(param)
        return self.stored(param)

    def write_master(self, param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Set the master of a parameter. Returns what to write to the parameter."""
        settle(param, refresh=False)
        return self.store(param, value)

    def stored(self, param: torch.Tensor) -> torch.Tensor | None:
        """``master``, without what users have written to masters that they hold and that are not settled."""
        if self.plain is None:
            value = getattr(self.optimizer, "master_value", None)
            return None if value is None else value(param)
        master = self.plain.of(param)
        return None if master is None else master.detach()

    def store(self, param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``write_master``, without a look at masters that users hold."""
        if self.plain is not None:
            return self.plain.write(param, value)
        return self.optimizer.write_master(param, value)  # type: ignore[no-any-return]

    def started(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters and the values of their masters, of all masters that are not in the optimizer's state."""
        settle(refresh=False)
        plain = [] if self.plain is None else self.plain.pairs()
        return plain + getattr(self.optimizer, "unused_masters", list)()

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
        optimizer: Any = self._optimizer()
        try:
            try:
                self.plain.enter()
                yield
            except KeyError as error:
                if error.args and self.plain.has_in_place(error.args[0]):
                    raise UsageError(
                        f"{type(optimizer).__name__}.step looked up a weight in a dict of its own, by the parameter. "
                        "At O2 fp32 masters have the places of 16-bit parameters while it steps. Keep what belongs to "
                        "a weight in self.state[p], which goes with it, or by its index in the group."
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
