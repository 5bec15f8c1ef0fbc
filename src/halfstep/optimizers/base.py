"""The common part of the fused optimizers: what a step is, from gradients to weights, whatever the update.

A subclass names the state it keeps and launches its kernels on rows of parameters. Where clipping or an overflow check
is asked for, one read of the gradients gives their norm and whether they are finite. The kernels unscale, clip, update
and round. Nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ..core.checks import check_kind
from ..core.errors import ArgumentTypeError
from ..core.scalars import in_scalar_dtype
from ..core.torch_compat import scale_of, set_found_inf
from ..kernels.tensor_table import Number
from .fused_state import FusedState, Hyper
from .lost_updates import warn_of_lost_updates
from .param_rows import NUMBER, GroupRows, ParamRows, StateLayout
from .release import GradientRelease

__all__ = ["FusedOptimizer", "Hyper", "Step"]


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


OnGradients = Callable[[Sequence[ParamRows], Number], None]
"""Called with all rows of a step, whose ``survey()`` has been read, and with what makes their gradients unscaled. The
read is the one that clipping and the overflow check need, too."""


class FusedOptimizer(FusedState):
    """A ``torch.optim.Optimizer`` whose step is a few passes over all its parameters.

    It honours torch's contract for scalers: with ``found_inf`` set on it by a ``GradScaler`` the step happens only if
    that is 0, and ``grad_scale`` is divided out, both on the device.

    Attributes:
        release: the gradient release that ``attach`` began; None if there is none.
        on_gradients: called in each step with what every gradient looks like; see ``OnGradients``.
    """

    _step_supports_amp_scaling = True
    release: GradientRelease | None = None
    on_gradients: tuple[OnGradients, ...] = ()

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
        if closure is not None and not callable(closure):
            raise ArgumentTypeError(
                f"{type(self).__name__}.step takes a closure, a function that evaluates the model and returns the "
                f"loss, not {closure!r} of type {type(closure).__name__}."
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

        - Gradients are divided by the loss scale as ever: that of ``amp.scale_loss``, or of the ``scaler``. At the
          first gradient that is inf or NaN, stepping ends for this pass. Parameters that have stepped by then keep the
          step: their gradients were finite. The overflow lowers the scale as ever.
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
            ArgumentTypeError: for something else than a module.
            ArgumentValueError: if parameters are not in the model or are on several devices, or for a layer that makes
                sparse gradients.
        """
        check_kind("attach: model", model, torch.nn.Module, "a torch.nn.Module")
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
        if not self._warned:
            self._warn_once()
        grad_scale, skip = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        device = all_rows[0].device
        skip = None if skip is None else skip.to(device, torch.float32, non_blocking=True).reshape(())
        if scaler is not None and scaler.is_enabled():
            grad_scale = scale_of(scaler)
            skip = torch.zeros((), dtype=torch.float32, device=device)
        factor, skip = self._factor(all_rows, grad_scale, skip, check=scaler is not None)
        if self.options.max_grad_norm is not None and (given := getattr(self, "found_inf", None)) is not None:
            given.copy_(skip)
        if scaler is not None and scaler.is_enabled():
            set_found_inf(scaler, self, {device: skip})
        self._take(groups, factor, skip)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients: to None by default, or to zero if the optimizer was made with ``set_grad_none=False``."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
        if self.release is not None:
            self.release.forget()

    # ---- inside

    def _gather(self) -> list[tuple[Hyper, GroupRows]]:
        """The rows of every group that has gradients, from the last step where nothing else changed."""
        groups = []
        first = 0
        same_state = self._state_is_known()
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
        copies: list[torch.Tensor | None] = [None] * len(params)
        if self.copies is not None and self.copies.keeps:
            copies = [None if p.grad is None else self.copies.begin_write(p) for p in params]
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

    def _factor(
        self, all_rows: list[ParamRows], grad_scale: torch.Tensor | None, skip: torch.Tensor | None, *, check: bool
    ) -> tuple[Number, torch.Tensor | None]:
        """What to multiply gradients by, and the flag, from at most one read of them."""
        device = all_rows[0].device
        inverse: Number = 1.0
        if grad_scale is not None:
            inverse = in_scalar_dtype(grad_scale.to(device, non_blocking=True)).reshape(()).reciprocal()
        limit, watched = self.options.max_grad_norm, self.on_gradients
        if limit is None and not check and not watched:
            return inverse, skip
        sums = []
        for rows in all_rows:
            found = None if skip is None else torch.zeros((), dtype=torch.float32, device=rows.device)
            if watched:
                rows.survey(found)
            if limit is not None or check:
                sums.append(rows.squared_norms(found).sum().to(device, non_blocking=True))
            if found is not None and skip is not None:
                skip = torch.maximum(skip, found.to(device, non_blocking=True))
        for callback in watched:
            callback(all_rows, inverse)
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
                if self.copies is not None and self.copies.keeps:
                    self.copies.end_write(rows.params)

    def _step_rows(self, group: Hyper, rows: ParamRows, factor: Number, skip: torch.Tensor | None) -> None:
        if isinstance(factor, torch.Tensor):
            factor = factor.to(rows.device, non_blocking=True)
        if skip is not None:
            skip = skip.to(rows.device, non_blocking=True)
        if group.get("maximize"):
            factor = -factor
        taken = rows.numbers.get("step")
        t = None if taken is None else in_scalar_dtype(taken) + 1.0
        self._update(group, rows, Step(t, factor, skip))
        if taken is not None:
            taken.add_(1.0 if skip is None else 1.0 - skip)
