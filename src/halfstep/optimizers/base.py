"""The common part of the fused optimizers: the steps that every update shares, from gradients to weights.

A subclass names the state it keeps and launches its kernels on rows of parameters. If a step clips or checks for
overflow, it reads the gradients once, for both their norm and whether they are finite. The kernels unscale, clip,
update and round. The host reads nothing back from the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from operator import is_
from types import NoneType
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd.graph import increment_version

from ..core.checks import check_kind
from ..core.errors import ArgumentTypeError
from ..core.scalars import in_scalar_dtype
from ..kernels.tensor_table import Number
from ..parameters.unscale import clip_factor
from ..torch_internals.torch_compat import dispatch_mode_count, scale_of, set_found_inf, set_grad_mode
from .fused_state import FusedState, Hyper
from .options import warn_of_lost_updates
from .param_rows import NUMBER, GroupRows, ParamRows, StateLayout
from .release import GradientRelease

__all__ = ["FusedOptimizer", "Hyper", "Step", "bias_corrections"]


_FEW = 64  # step counts; reading so few costs less than one op on them


class Step(NamedTuple):
    """One step of some rows.

    Attributes:
        steps_done: the number of earlier steps of each row, float32 of shape [rows]; None if the state has no ``step``.
        factor: the multiplier of the gradients, which combines 1 / loss scale, clipping and the sign of ``maximize``.
        skip: 0-dim float32 tensor; a nonzero value leaves weights and state unchanged.
    """

    steps_done: torch.Tensor | None
    factor: Number
    skip: torch.Tensor | None

    @property
    def t(self) -> Any:
        """The index of this step for each row, from 1: float64 of shape [rows]; None if the state has no ``step``."""
        return None if self.steps_done is None else in_scalar_dtype(self.steps_done) + 1.0

    @property
    def t_on_host(self) -> Any:
        """``t``, as one float if it is equal for all rows and the counts are few and in host memory.

        An op on a small tensor costs the host as much as fifty operations on a float. While ops are recorded or
        compiled, the result stays a tensor, so that a replay reads the counts of its own step.
        """
        taken = self.steps_done
        repeated = dispatch_mode_count() or torch.compiler.is_compiling()
        if type(taken) is torch.Tensor and taken.is_cpu and taken.numel() <= _FEW and not repeated:
            values = set(taken.tolist())
            if len(values) == 1:
                return values.pop() + 1.0
        return self.t


def bias_corrections(betas: Iterable[float], t: float | torch.Tensor) -> list[Any]:
    """``1 - beta ** t`` of each beta, where ``t`` is the ``t`` of a ``Step``."""
    if not isinstance(t, torch.Tensor) or t.dtype is torch.float64:
        return [1.0 - beta**t for beta in betas]
    # 1 - 0.999 ** 1 has four digits in float32
    return [-torch.expm1(t * math.log(beta)) if 0.0 < beta < 1.0 else 1.0 - beta**t for beta in betas]


class FusedOptimizer(FusedState):
    """A ``torch.optim.Optimizer`` that steps all its parameters in a few passes.

    It follows torch's contract for scalers. If a ``GradScaler`` sets ``found_inf`` and ``grad_scale`` on it, ``step``
    divides the gradients by ``grad_scale``, and changes nothing unless ``found_inf`` is 0; both happen on the device.

    Attributes:
        options, set_grad_none, grad_norm, release: see ``FusedData``.
    """

    _step_supports_amp_scaling = True
    _groups_of_torch: ClassVar[bool] = False  # True for a class of torch, whose groups have other hyperparameters

    # ---- what a subclass defines

    def _layout(self, group: Hyper) -> StateLayout:
        """Return the layout of a parameter's state: the names in ``state[param]``, each with its spec."""
        raise NotImplementedError

    def _marks(self, group: Hyper, params: Sequence[torch.Tensor]) -> list[Hashable]:
        """Return a mark for each parameter of a group; only parameters with equal marks share rows."""
        return [self.options.quantizes(param) for param in params]

    def _update(self, group: Hyper, rows: ParamRows, step: Step) -> None:
        """Update the rows.

        Args:
            group: hyperparameters; ``lr`` may be a tensor.
            rows: parameters, gradients and state.
            step: the step counts, the factor of the gradients and the skip flag.
        """
        raise NotImplementedError

    # ---- what a user calls

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: evaluates the model again and returns the loss.
            **kwargs: ``grad_scaler=`` takes a ``torch.amp.GradScaler``, as in Apex's capturable optimizers: ``step``
                divides by its scale and checks for overflow itself. Other arguments of Apex's oldest optimizers raise
                an error.

        Returns:
            The closure's loss, or None.

        Raises:
            UsageError: for a sparse gradient.
        """
        scaler = kwargs.pop("grad_scaler", None)
        if kwargs or closure is not None:
            self._check_arguments(closure, kwargs)
        fused, with_grad, loss = self._fused, torch.is_grad_enabled(), None
        try:
            try:
                set_grad_mode(False)  # a context manager costs the host ten times as much
                if fused.release is not None:
                    fused.release.begin_step(closure, scaler)
                if closure is not None:
                    with torch.enable_grad():
                        loss = closure()
                groups = self._gather()
                if groups:
                    factor, skip = self._factor(groups, scaler)
                    self._take(groups, factor, skip)
                if fused.release is not None:
                    fused.release.end_step()
            finally:
                set_grad_mode(with_grad)
        finally:
            set_grad_mode(with_grad)  # Ctrl-C has come before the first line of the other `finally`
        return loss

    def attach(
        self, model: torch.nn.Module, *, release: bool = True, scaler: torch.amp.GradScaler | None = None
    ) -> GradientRelease:
        """Step each parameter during the backward pass from now on, and free its gradient right away.

        A full set of gradients never exists: at any time memory holds the gradients of one layer, or 8 MiB of them.
        You still call ``step()`` after each backward pass; it ends the step, and steps any parameter that still has a
        gradient. Without overflow, the results are bit-for-bit equal to a step after the pass.

        - The gradients are divided by the loss scale as usual, from ``amp.scale_loss`` or from ``scaler``. The first
          inf or NaN ends stepping for this pass. Parameters that have stepped before it keep their step, because their
          gradients were finite. The overflow lowers the scale as usual.
        - Gradients are not clipped: by the time their norm is known, most of them are freed. ``FusedLAMB`` clips by
          default, so it needs ``max_grad_norm=None`` here.
        - Each step has one backward pass. Do not attach if you accumulate gradients.

        Args:
            model: the model that has all the parameters. Call ``amp.initialize`` or ``amp.decorate`` first.
            release: False changes nothing, for scripts that choose by a flag.
            scaler: the ``amp.GradScaler`` or ``torch.amp.GradScaler`` that scales the losses, if there is one.

        Returns:
            A handle; ``remove()`` restores the normal step.

        Raises:
            UsageError: if the optimizer is already attached; with ``max_grad_norm``; if ranks average the gradients
                (DistributedDataParallel, FSDP); if masters are kept outside this optimizer. A backward pass raises it
                for a second gradient of a parameter before ``step()``, for ``create_graph=True``, and for a sparse
                gradient.
            ArgumentTypeError: unless ``model`` is a module.
            ArgumentValueError: if parameters are not in the model or are on several devices, or for a layer that makes
                sparse gradients.
        """
        check_kind("attach: model", model, torch.nn.Module, "a torch.nn.Module")
        handle = GradientRelease(self, scaler)
        if release:
            handle.start(model)
            if not self._fused.warned:
                self._warn_once()
        return handle

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients: set them to None, or to zero if the optimizer was created with ``set_grad_none=False``.

        With gradient release they always become None.
        """
        if self.release is not None:
            self.release.forget()
            set_to_none = True
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    # ---- inside

    def _check_arguments(self, closure: object, others: dict[str, Any]) -> None:
        """Refuse arguments that ``step`` does not take."""
        if any(value is not None for value in others.values()):
            raise ArgumentTypeError(
                f"{type(self).__name__}.step takes closure= and grad_scaler=, not {', '.join(others)}. Gradients are "
                "read from the parameters, 16-bit copies are written with master_weights=, and a scaler passes its "
                "scale by torch's contract."
            )
        what = "a function that evaluates the model and returns the loss"
        check_kind("closure", closure, (Callable, NoneType), what)  # type: ignore[arg-type]

    def _gather(self) -> list[tuple[Hyper, GroupRows]]:
        """Return the groups with gradients and their rows; rows of the last step are reused if nothing else changed."""
        fused, groups, first = self._fused, [], 0
        # Compare the entries of the state with the last step by identity: hashing tensors is slow.
        (params, entries), state = fused.known_state, self.state
        same = len(state) == len(params) and all(map(is_, state, params)) and all(map(is_, state.values(), entries))
        for index, group in enumerate(self.param_groups):
            params = group["params"]
            positions = range(first, first + len(params))
            rows = fused.groups[index] = self._rows_of(fused.groups.get(index), group, params, positions, same)
            if rows.rows:
                groups.append((group, rows))
            first += len(params)
        if not same:  # entries that these rows added are found in the next step
            fused.known_state = list(state), list(state.values())
        if groups and not fused.warned:
            self._warn_once()
        return groups

    def _rows_of(
        self,
        known: GroupRows | None,
        group: Hyper,
        params: list[torch.Tensor],
        positions: Sequence[int],
        same_state: bool = False,
    ) -> GroupRows:
        """Return the rows of some parameters of a group; rows of an earlier step are reused if nothing else changed.

        Args:
            known: the rows of the same parameters in an earlier step; None if there are none.
            group: the group.
            params: some of its parameters.
            positions: the place of each parameter in the optimizer.
            same_state: True if ``state`` has the same entries as in the earlier step.
        """
        fused = self._fused
        layout = self._layout(group)
        if fused.options.rounding == "stochastic":
            layout = {"step": NUMBER, **layout}
        if known is None or not known.renew(params, self.state, layout, known=same_state):
            self._complete_state(group, params)
            known = GroupRows(params, self.state, layout, fused.options, positions, self._marks(group, params))
        return known

    def _warn_once(self) -> None:
        self._fused.warned = True
        if not self.options.master_weights and self.options.rounding == "nearest":
            warn_of_lost_updates(type(self).__name__, self.param_groups)

    def _factor(
        self, groups: Iterable[tuple[Hyper, GroupRows]], scaler: torch.amp.GradScaler | None
    ) -> tuple[Number, torch.Tensor | None]:
        """Return the factor of the gradients and the skip flag, from at most one read of the gradients.

        With clipping or a scaler, the flag is also written to the given ``found_inf`` or scaler.
        """
        all_rows = [rows for _, group_rows in groups for rows in group_rows.rows]
        device = all_rows[0].device
        given = getattr(self, "found_inf", None)
        grad_scale, skip = getattr(self, "grad_scale", None), given
        if skip is not None:
            skip = skip.to(device, torch.float32, non_blocking=True).reshape(())
        scales = scaler is not None and scaler.is_enabled()
        if scales:
            grad_scale, skip = scale_of(scaler), torch.zeros((), dtype=torch.float32, device=device)
        inverse: Number = 1.0
        if grad_scale is not None:
            inverse = in_scalar_dtype(grad_scale.to(device, non_blocking=True)).reshape(()).reciprocal()
        limit = self._fused.options.max_grad_norm
        if limit is None and scaler is None:
            return inverse, skip
        factor, skip = self._read_gradients(all_rows, inverse, skip)
        if limit is not None and given is not None:
            given.copy_(skip)
        if scales:
            set_found_inf(scaler, self, {device: skip})
        return factor, skip

    def _read_gradients(
        self, all_rows: list[ParamRows], inverse: Number, skip: torch.Tensor | None
    ) -> tuple[Number, torch.Tensor | None]:
        """Read all gradients once, for the clipping norm and the overflow check.

        Args:
            all_rows: the rows of the step.
            inverse: the factor that unscales the gradients before they are clipped.
            skip: the given skip flag, or None.
        """
        device, limit = all_rows[0].device, self.options.max_grad_norm
        sums = []
        for rows in all_rows:
            found = None if skip is None else torch.zeros((), dtype=torch.float32, device=rows.device)
            sums.append(rows.squared_norms(found).sum().to(device, non_blocking=True))
            if found is not None and skip is not None:
                skip = torch.maximum(skip, found.to(device, non_blocking=True))
        if limit is None:
            return inverse, skip
        norm = sum(sums[1:], sums[0]).sqrt()
        # Each op on a GPU costs the host as much as a hundred lines of Python.
        scaled = isinstance(inverse, torch.Tensor)
        norm = norm * inverse if scaled else norm
        self.grad_norm, factor = norm.float(), clip_factor(norm, limit)
        return (inverse * factor if scaled else factor), skip

    def _take(self, groups: Iterable[tuple[Hyper, GroupRows]], factor: Number, skip: torch.Tensor | None) -> None:
        """Step the rows of some groups, and release their gradients."""
        for group, group_rows in groups:
            for rows in group_rows.rows:
                scale = factor
                if isinstance(scale, torch.Tensor):
                    scale = scale.to(rows.device, non_blocking=True)
                flag = None if skip is None else skip.to(rows.device, non_blocking=True)
                steps_done = rows.numbers.get("step")
                self._update(group, rows, Step(steps_done, -scale if group.get("maximize") else scale, flag))
                if steps_done is not None:
                    steps_done.add_(rows.one if flag is None else rows.one - flag)
                increment_version(rows.weights)  # autograd does not see what kernels write
                rows.table.columns["grad"][1][0].clear()  # so that `zero_grad` frees them
