"""The common part of the fused optimizers: what a step is, from gradients to weights, whatever the update.

A subclass names the state it keeps and launches its kernels on rows of parameters. Where clipping or an overflow check
is asked for, one read of the gradients gives their norm and whether they are finite. The kernels unscale, clip, update
and round. Nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ..casting.weight_copies import WeightCopies
from ..core.dtypes import HALF_DTYPES
from ..core.errors import ArgumentTypeError
from ..kernels.shards import is_sharded
from ..kernels.storage import honoured, split
from ..kernels.tensor_table import Number
from ..masters.split import master_value
from .lost_updates import warn_of_lost_updates
from .options import FusedOptions
from .param_rows import NUMBER, GroupRows, ParamRows, StateLayout
from .release import GradientRelease

__all__ = ["FusedOptimizer", "Hyper", "Step"]

Hyper = dict[str, Any]
"""A parameter group: its hyperparameters by name."""


class Step(NamedTuple):
    """One step of some rows.

    Attributes:
        t: which step of each row this is, counted from 1: float64 of shape [rows]. None if the state has no ``step``.
        factor: what gradients are to be multiplied by: 1 / loss scale, clipping, the sign of ``maximize``.
        skip: 0-dim float32 tensor; where it is not 0 nothing may change.
    """

    t: Any
    factor: Number
    skip: torch.Tensor | None


class FusedOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose step is a few passes over all its parameters.

    It honours torch's contract for scalers: with ``found_inf`` set on it by a ``GradScaler`` the step happens only if
    that is 0, and ``grad_scale`` is divided out, both on the device.

    Attributes:
        options: see ``FusedOptions``.
        copies: the 16-bit copies of fp32 weights that its steps write as well, if it was told to; see ``keep_copies``.
        grad_norm: the 2-norm of the unscaled gradients at the last step, a 0-dim tensor, if the step clipped.
        release: what ``attach`` returned, while parameters step inside of the backward pass; else None.
    """

    _step_supports_amp_scaling = True
    copies: WeightCopies | None = None
    release: GradientRelease | None = None
    _seen: tuple[list[Any], list[Any]] = ([], [])

    def __init__(self, params: Any, defaults: Hyper, options: FusedOptions, *, set_grad_none: bool = True) -> None:
        self.options = options
        self.set_grad_none = set_grad_none
        self.grad_norm: torch.Tensor | None = None
        self._groups: dict[int, GroupRows] = {}
        self._started: dict[int, torch.Tensor] = {}  # where masters start from, by the identity of the parameter
        self._warned = False
        super().__init__(params, defaults)

    # ---- what a subclass says

    def _hyper(self, group: Hyper) -> Hyper:
        """The hyperparameters of a group under the names that ``_layout`` and ``_update`` know them by."""
        return group

    def _layout(self, group: Hyper) -> StateLayout:
        """What is kept for a parameter, by the name it has in ``state[param]``."""
        raise NotImplementedError

    def _update(self, group: Hyper, rows: ParamRows, step: Step) -> None:
        """Update the rows.

        Args:
            group: hyperparameters; ``lr`` may be a tensor.
            rows: parameters, gradients and state.
            step: its number, the factor of gradients and the flag.
        """
        raise NotImplementedError

    @property
    def checks_gradients(self) -> bool:
        """Whether a step that is given ``found_inf`` looks for inf and NaN itself, and notes what it finds there.

        It does where it clips, because it reads the norm of the gradients then.
        """
        return self.options.max_grad_norm is not None

    # ---- what a user calls

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.
            **kwargs: ``grad_scaler=`` takes a ``torch.amp.GradScaler`` whose scale is divided out and whose overflow
                check this step does itself, as Apex's capturable optimizers have it. The other arguments of Apex's
                oldest optimizers are refused.

        Returns:
            The closure's loss, or None.

        Raises:
            UsageError: for a sparse gradient.
        """
        scaler = kwargs.pop("grad_scaler", None)
        if any(value is not None for value in kwargs.values()):
            raise ArgumentTypeError(
                f"{type(self).__name__}.step takes closure= and grad_scaler=, not {', '.join(kwargs)}. Gradients are "
                "read from the parameters, 16-bit copies are written with master_weights=, and a scaler passes its "
                "scale by torch's contract."
            )
        if self.release is not None:
            self.release.begin_step(closure, scaler)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_all(scaler)
        if self.release is not None:
            self.release.end_step()
        return loss

    def attach(
        self, model: torch.nn.Module, *, release: bool = True, scaler: torch.amp.GradScaler | None = None
    ) -> GradientRelease:
        """Step each parameter inside of the backward pass from now on, and free its gradient.

        So no full set of gradients ever exists: those in memory are of one layer, or of 2**22 elements. ``step()`` is
        still called after each backward pass. It ends the step, and steps what has a gradient left. Without clipping
        and overflow every number is the same, to the bit.

        - A loss scale is divided out as ever: that of ``amp.scale_loss``, or of the ``scaler``. From the first gradient
          on that is inf or NaN, no more parameters step in this pass. Those that had finite gradients before it have
          stepped. The scale hears of the overflow as ever.
        - ``max_grad_norm`` clips by the larger of two norms: that of the last step, and that of the gradients that have
          come so far in this one. Other functions that clip find no gradients.
        - Gradients of several passes are added up within ``accumulate()`` of what this returns.

        Args:
            model: has all the parameters. Call ``amp.initialize`` or ``amp.decorate`` before.
            release: False changes nothing, for scripts that choose by a flag.
            scaler: the ``amp.GradScaler`` or ``torch.amp.GradScaler`` that scales the losses, if one does.

        Returns:
            A handle with ``accumulate()``, and ``remove()``, which ends it.

        Raises:
            UsageError: if it is attached already; for gradients that other ranks average (DistributedDataParallel,
                FSDP); if masters are kept outside of this optimizer. From a backward pass: for a second gradient of a
                parameter before ``step()``, for ``create_graph=True``, and for a sparse gradient.
            ArgumentValueError: if parameters are not in the model or are on several devices, or for a layer that makes
                sparse gradients.
        """
        handle = GradientRelease(self, scaler)
        if release:
            handle.start(model)
            self._warn_once()
        return handle

    def _step_all(self, scaler: torch.amp.GradScaler | None) -> None:
        """Step every parameter that has a gradient."""
        groups = self._gather()
        all_rows = [rows for _, group_rows in groups for rows in group_rows.rows]
        if not all_rows:
            return
        self._warn_once()
        grad_scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        device = all_rows[0].device
        skip = None if skip is None else skip.to(device, torch.float32, non_blocking=True).reshape(())
        if scaler is not None and scaler.is_enabled():
            grad_scale = scaler._get_scale_async()
            skip = torch.zeros((), device=device)
        factor, skip = self._factor(all_rows, grad_scale, skip, check=scaler is not None)
        if self.checks_gradients and (given := getattr(self, "found_inf", None)) is not None:
            given.copy_(skip)
        if scaler is not None and scaler.is_enabled():
            scaler._per_optimizer_states[id(self)]["found_inf_per_device"] = {device: skip}
        self._take(groups, factor, skip)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients: to None by default, or to zero if the optimizer was made with ``set_grad_none=False``."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
        if self.release is not None:
            self.release.forget()

    def keep_masters(self, started: dict[int, torch.Tensor] | None = None) -> None:
        """Keep masters of 16-bit parameters from now on, unless told otherwise when made: ``master_weights=True``.

        Args:
            started: fp32 values to start from, by the identity of the parameter; used in its first step.
        """
        if not self.options.master_weights and self.options.rounding == "nearest":
            self.options = replace(self.options, master_weights=True)
            self._groups.clear()
        if self.options.master_weights:
            mine = [p for group in self.param_groups for p in group["params"] if p.dtype in HALF_DTYPES]
            self._started = {id(p): started[id(p)] for p in mine if started is not None and id(p) in started}

    def master_value(self, param: torch.Tensor) -> torch.Tensor:
        """A new float32 tensor: the value of a parameter's master; without a master, of the parameter."""
        state = self.state.get(param, {})
        if "master" in state or "remainder" in state or id(param) not in self._started:
            return master_value(param, state)
        return self._start(param, self._started[id(param)])

    @torch.no_grad()
    def write_master(self, param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Set the master of a parameter to a float32 value; what to write to the parameter."""
        state = self.state.get(param, {})
        if "master" in state:
            state["master"].copy_(value)
        elif "remainder" in state:
            high, low = split(value)
            state["remainder"].copy_(low)
            return high
        elif self.options.master_weights:
            self._started[id(param)] = value.to(param.device, torch.float32, copy=True)
        return value.to(param.dtype)

    def unused_masters(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The parameters that have not stepped yet, with the fp32 values that their masters start from."""
        params = (p for group in self.param_groups for p in group["params"])
        return [(p, self._started[id(p)]) for p in params if id(p) in self._started]

    def keep_copies(self, dtype: torch.dtype) -> WeightCopies:
        """Write fp32 weights in this 16-bit dtype too from now on, for the forward passes of ``amp`` at O1."""
        self.copies = WeightCopies(self, dtype)
        for group in self.param_groups:
            self.copies.watch(group["params"])
        return self.copies

    def drop_copies(self) -> None:
        """Write no copies from now on, and let forward passes cast the weights: a recorded one uses no copy."""
        if self.copies is not None:
            self.copies.stop()
            self.copies = None

    def state_dict(self) -> dict[str, Any]:
        """What torch saves. The masters of sharded weights are in it in fp32: no backend of collectives sends int16."""
        saved = super().state_dict()
        for group, names in zip(self.param_groups, saved["param_groups"], strict=True):
            for param, name in zip(group["params"], names["params"], strict=True):
                if is_sharded(param) and "remainder" in (state := saved["state"].get(name, {})):
                    kept = {key: value for key, value in state.items() if key != "remainder"}
                    saved["state"][name] = {**kept, "master": master_value(param, state)}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state of this class or of the torch optimizer of the same name; nothing is rounded on the way.

        torch's own would cast state to the dtype of the parameters, which loses moments and remainders of 16-bit ones.
        """
        seen: dict[str, Any] = {}
        params = [p for group in self.param_groups for p in group["params"]]
        masters = {
            id(p): self.master_value(p) for p in params if self.options.master_weights and p.dtype in HALF_DTYPES
        }

        def capture(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
            seen.update(loaded)

        def restore(_: torch.optim.Optimizer) -> None:
            ids = (i for group in seen["param_groups"] for i in group["params"])
            for i, param in zip(ids, params, strict=True):
                if i in seen["state"]:
                    self.state[param] = {
                        name: value.to(param.device, copy=True) if isinstance(value, torch.Tensor) else value
                        for name, value in seen["state"][i].items()
                    }
            for param in params:
                if id(param) in masters and not {"master", "remainder"} & self.state.get(param, {}).keys():
                    self._started[id(param)] = masters[id(param)]  # the state comes from an optimizer without any
            self._groups.clear()

        before = self.register_load_state_dict_pre_hook(capture)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("options", "set_grad_none", "grad_norm", "_warned")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        known = set(state.get("defaults") or self.defaults)
        super().__setstate__(state)
        if "differentiable" not in known:
            self.defaults.pop("differentiable", None)  # torch adds it to whatever it restores
        self._groups, self._seen = {}, ([], [])
        self.__dict__.setdefault("_started", {})
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    # ---- inside

    def _gather(self) -> list[tuple[Hyper, GroupRows]]:
        """The rows of every group that has gradients, from the last step where nothing else changed."""
        groups = []
        first = 0
        same_state = self._state_is_known()
        if self.copies is not None:
            self.copies.begin_step()
        for index, group in enumerate(self.param_groups):
            params = group["params"]
            positions = range(first, first + len(params))
            hyper, rows = self._rows_of(self._groups.get(index), group, params, positions, same_state)
            self._groups[index] = rows
            if rows.rows:
                groups.append((hyper, rows))
            first += len(params)
        self._seen = list(self.state), list(self.state.values())
        return groups

    def _rows_of(
        self,
        known: GroupRows | None,
        group: Hyper,
        params: list[torch.Tensor],
        positions: Sequence[int],
        same_state: bool = False,
    ) -> tuple[Hyper, GroupRows]:
        """The rows of some parameters of a group: those known from an earlier step where nothing else changed.

        Args:
            known: the rows of the same parameters in an earlier step, if there are any.
            group: the group.
            params: some of its parameters.
            positions: the place of each in the optimizer.
            same_state: whether the entries of ``state`` are known to be those of that step.
        """
        hyper = self._hyper(group)
        layout = self._layout(hyper)
        if self.options.rounding == "stochastic":
            layout = {"step": NUMBER, **layout}
        copies = self._copies_of(params)
        if known is None or not known.renew(params, self.state, layout, copies, known=same_state):
            if self.copies is not None:
                self.copies.watch(params)  # some may have come since
            self._start_masters(params)
            known = GroupRows(params, self.state, layout, self.options, positions, copies)
        return hyper, known

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            if not self.options.master_weights and self.options.rounding == "nearest":
                warn_of_lost_updates(type(self).__name__, self.param_groups)

    def _state_is_known(self) -> bool:
        """Whether ``state`` has the very entries it had in the last step. No tensor is hashed, which takes long."""
        params, entries = self._seen
        if len(self.state) != len(params):
            return False
        return all(map(is_, self.state, params)) and all(map(is_, self.state.values(), entries))

    def _start_masters(self, params: Iterable[torch.Tensor]) -> None:
        """Let masters that are made in this step start from what they were given."""
        for param in params if self._started else ():
            if param.grad is not None and id(param) in self._started:
                start, state = self._started.pop(id(param)), self.state[param]
                if "master" not in state and "remainder" not in state:
                    state["master"] = self._start(param, start)

    @staticmethod
    def _start(param: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """The value a master was to start from, where the parameter is still what that rounds to."""
        return honoured(start.to(param.device), param.detach())

    def _copies_of(self, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """The copy that this step writes with each parameter."""
        if self.copies is None:
            return [None] * len(params)
        return [None if p.grad is None else self.copies.begin_write(p) for p in params]

    def _factor(
        self, all_rows: list[ParamRows], grad_scale: torch.Tensor | None, skip: torch.Tensor | None, *, check: bool
    ) -> tuple[Number, torch.Tensor | None]:
        """What to multiply gradients by, and the flag, from at most one read of them."""
        device = all_rows[0].device
        inverse: Number = 1.0
        if grad_scale is not None:
            inverse = grad_scale.to(device, non_blocking=True).double().reshape(()).reciprocal()
        limit = self.options.max_grad_norm
        if limit is None and not check:
            return inverse, skip
        sums = []
        for rows in all_rows:
            found = None if skip is None else torch.zeros((), device=rows.device)
            sums.append(rows.squared_norms(found).sum().to(device, non_blocking=True))
            if found is not None and skip is not None:
                skip = torch.maximum(skip, found.to(device, non_blocking=True))
        if limit is None:
            return inverse, skip
        norm = sum(sums[1:], sums[0]).sqrt()
        if grad_scale is None:  # each op on a GPU costs the host as much as a hundred lines of Python
            factor: Number = (limit / (norm + 1e-6)).clamp(max=1.0)
        else:
            norm = norm * inverse
            factor = inverse * (limit / (norm + 1e-6)).clamp(max=1.0)
        self.grad_norm = norm.float()
        return factor, skip

    def _take(self, groups: Iterable[tuple[Hyper, GroupRows]], factor: Number, skip: torch.Tensor | None) -> None:
        """Step the rows of some groups, and let go of their gradients."""
        for group, group_rows in groups:
            for rows in group_rows.rows:
                self._step_rows(group, rows, factor, skip)
                increment_version(rows.weights)  # kernels write to them behind autograd's back
                rows.table.release()
        if self.copies is not None:
            self.copies.end_write()

    def _step_rows(self, group: Hyper, rows: ParamRows, factor: Number, skip: torch.Tensor | None) -> None:
        if isinstance(factor, torch.Tensor):
            factor = factor.to(rows.device, non_blocking=True)
        if skip is not None:
            skip = skip.to(rows.device, non_blocking=True)
        if group.get("maximize"):
            factor = -factor
        taken = rows.numbers.get("step")
        t = None if taken is None else taken.double() + 1.0
        self._update(group, rows, Step(t, factor, skip))
        if taken is not None:
            taken.add_(1.0 if skip is None else 1.0 - skip)
