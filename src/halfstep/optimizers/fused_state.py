"""The state of a fused optimizer: masters and moments, and how they are saved and loaded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from ..core.checks import check_optimizer_state
from ..core.dtypes import StateForm
from ..core.errors import ArgumentTypeError, UsageError
from ..core.inner_optimizers import params_of
from ..kernels.shards import is_sharded
from ..parameters.held_masters import sync_held_masters
from ..parameters.master_registry import is_saved_elsewhere
from ..parameters.split import InState, entries, master_value, take_back_rounding
from ..parameters.table import OptimizerTable
from ..torch_internals.callers import caller_in
from ..torch_internals.torch_compat import STATE_MODULE
from . import moments
from .options import CommonOptions, FusedOptions, check_hyperparameters
from .param_rows import GroupRows, StateLayout, codes_of

if TYPE_CHECKING:
    from .release import GradientRelease

__all__ = ["FusedData", "FusedState", "Hyper"]

Hyper = dict[str, Any]
"""A parameter group: its hyperparameters by name."""


@dataclass(slots=True, eq=False)
class FusedData:
    """All data that a fused optimizer adds to torch's. It is the only attribute that halfstep puts on the instance.

    Attributes:
        table: the parameters, and the masters of 16-bit parameters.
        options: the storage of weights and state, and the clipping norm.
        set_grad_none: the default of ``zero_grad(set_to_none=...)``.
        grad_norm: the 2-norm of the unscaled gradients at the last step, a 0-dim tensor, if the step clipped.
        warned: True if the warning about lost updates was issued, or does not apply.
        release: the gradient release started by ``attach``; None if there is none.
        groups: the rows of each parameter group from the last step, by the index of the group.
        known_state: the keys and the entries of ``state`` after the last step.
    """

    table: OptimizerTable
    options: FusedOptions = field(default_factory=FusedOptions)
    set_grad_none: bool = True
    grad_norm: torch.Tensor | None = None
    warned: bool = False
    release: GradientRelease | None = None
    groups: dict[int, GroupRows] = field(default_factory=dict)
    known_state: tuple[list[Any], list[Any]] = ([], [])

    @classmethod
    def of(cls, optimizer: Any, *args: Any) -> FusedData:
        """Return the data of a new optimizer.

        Args:
            optimizer: the optimizer, possibly without parameters yet.
            args: the values of the fields after ``table``.
        """
        ref = weakref.ref(optimizer)
        return cls(OptimizerTable(ref, new_master=partial(InState, optimizer=ref)), *args)


_SAVED = {"options": "options", "set_grad_none": "set_grad_none", "grad_norm": "grad_norm", "_warned": "warned"}
"""The fields of ``FusedData`` that are pickled: the name in the pickle, and the name of the field."""


def _field(name: str) -> Any:
    """Make a property of the optimizer for a field of its ``FusedData``."""
    return property(attrgetter(f"_fused.{name}"), lambda self, value: setattr(self._fused, name, value))


class FusedState(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` whose state may hold masters. ``base`` has its step.

    Args:
        params: parameters or groups of them.
        set_grad_none: the default of ``zero_grad(set_to_none=...)``.
        common: the options that all fused optimizers share.
        defaults: the defaults of the groups, and the shared options that a class takes by position.

    Raises:
        ArgumentTypeError: for an option that ``CommonOptions`` does not have.

    Attributes:
        table, options, set_grad_none, grad_norm, release: see ``FusedData``.
    """

    _fused: FusedData
    _layout: Callable[[Hyper], StateLayout]

    table: OptimizerTable = _field("table")
    options: FusedOptions = _field("options")
    set_grad_none: bool = _field("set_grad_none")
    grad_norm: torch.Tensor | None = _field("grad_norm")
    release: GradientRelease | None = _field("release")

    def __init__(self, params: Any, common: CommonOptions, *, set_grad_none: bool = True, **defaults: Any) -> None:
        if unknown := common.keys() - CommonOptions.__annotations__:
            raise ArgumentTypeError(
                f"{type(self).__name__} takes no argument {', '.join(sorted(unknown))}. The options of all fused "
                f"optimizers are {', '.join(CommonOptions.__annotations__)}."
            )
        defaults = {**defaults, "maximize": False, **common}
        options = {each.name: defaults.pop(each.name) for each in fields(FusedOptions) if each.name in defaults}
        self._fused = FusedData.of(self, FusedOptions(**options), set_grad_none)
        self._check(defaults)
        super().__init__(params, defaults)

    def _check(self, group: Hyper) -> None:
        """Refuse hyperparameters of a group that are out of range; a subclass may refuse more."""
        check_hyperparameters(group)

    def add_param_group(self, param_group: Hyper) -> None:
        """Add a group; missing hyperparameters get their defaults.

        Raises:
            ArgumentValueError: for a hyperparameter out of range.
            ArgumentTypeError: for a hyperparameter of the wrong type.
        """
        if isinstance(param_group, dict):
            self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def keep_masters(self, started: dict[int, torch.Tensor] | None = None) -> None:
        """Keep masters of 16-bit parameters from now on, unless the constructor's options say otherwise.

        Args:
            started: initial values of masters, by the ``id`` of the parameter, for its first step. Float64 values are
                rounded to fp32, the dtype of masters.
        """
        if not self.options.master_weights and self.options.rounding == "nearest":
            self.options = replace(self.options, master_weights=True)
            self._fused.groups.clear()
        for master in self._masters():
            start = (started or {}).get(id(master.param))
            master.start = None if start is None else start.to(torch.float32)

    def keep_moments(self, form: StateForm) -> None:
        """Store moments in another form from now on, unless the constructor's options say otherwise."""
        if self.options.state_dtype is None:
            self.options = replace(self.options, state_dtype=form)
            self._fused.groups.clear()

    def master_value(self, param: torch.Tensor) -> torch.Tensor:
        """Return the value of a parameter's master as a new float32 tensor; without a master, the parameter's value."""
        self.table.refresh()
        master = self.table.find(param)
        return master_value(param, self.state.get(param, {})) if master is None else master.read()

    def _masters(self) -> list[InState]:
        """List the masters of all 16-bit parameters; an empty list if this optimizer keeps none."""
        slots = self.table.refresh() if self.options.master_weights else []
        return [slot.master for slot in slots if isinstance(slot.master, InState)]

    def state_dict(self) -> dict[str, Any]:
        """Return the state in torch's form, with fp32 masters and fp32 moments for sharded weights.

        Collectives do not send int16, and blocks of 256 8-bit codes cannot be resharded. Loading fp32 moments into the
        same shards restores the same codes, bit for bit.

        ``torch.distributed.checkpoint`` reads the names of the entries from this state when it loads. They match a
        checkpoint of another sharding or level only if every state has the same form. So it also gets the fp32 form for
        weights that are not sharded, and no master that the state of the model already contains.
        """
        sync_held_masters(refresh=False)
        saved = super().state_dict()
        apart = caller_in(STATE_MODULE) is not None
        for group, names in zip(self.param_groups, saved["param_groups"], strict=True):
            for param, name in zip(group["params"], names["params"], strict=True):
                if (apart or is_sharded(param)) and name in saved["state"]:
                    kept = saved["state"][name] = dict(saved["state"][name])
                    if apart and is_saved_elsewhere(param):
                        kept.pop("remainder", None)
                        kept.pop("master", None)
                    if "remainder" in kept:
                        kept["master"] = master_value(param, kept)
                        del kept["remainder"]
                    self._widen_moments(group, kept)
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of the torch optimizer of the same name, without rounding it.

        torch's ``load_state_dict`` casts state to the dtype of the parameters, which destroys moments and remainders of
        16-bit parameters. The hooks below save the loaded values before the cast and put them back after it.

        Raises:
            ArgumentTypeError: unless it is a dict.
            ArgumentValueError: for a dict without ``state`` or ``param_groups``.
            UsageError: for a flattened state dict of torch whose 8-bit moments or masters have other names.
                An error leaves the optimizer unchanged.
        """
        check_optimizer_state(self, state_dict)
        seen: dict[str, Any] = {}
        params = params_of(self)
        _refuse_lost(state_dict["state"], masters=not any(map(is_saved_elsewhere, params)))
        masters = [(each, each.read()) for each in self._masters()]

        def capture(_: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
            seen.update(loaded)

        def restore(_: torch.optim.Optimizer) -> None:
            ids = (i for group in seen["param_groups"] for i in group["params"])
            for i, param in zip(ids, params, strict=True):
                if i in seen["state"]:
                    self.state[param] = {
                        name: value.to(param.device, copy=True) if isinstance(value, torch.Tensor) else value
                        for name, value in seen["state"][i].items()
                        if value != {}
                    }
            for master, value in masters:
                state = self.state.get(master.param, {})
                if "remainder" in state:
                    take_back_rounding(master.param, state["remainder"], value)
                elif "master" not in state:
                    master.start = value  # the loaded state is from an optimizer without masters
            self._fused.groups.clear()

        before = self.register_load_state_dict_pre_hook(capture)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self._fused, where) for name, where in _SAVED.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).setdefault("_fused", FusedData.of(self))  # torch's load_state_dict also calls __setstate__
        known = set(state.get("defaults") or self.defaults)
        super().__setstate__({name: value for name, value in state.items() if name not in _SAVED})
        for name in _SAVED.keys() & state.keys():
            setattr(self._fused, _SAVED[name], state[name])
        if "differentiable" not in known:
            self.defaults.pop("differentiable", None)  # torch adds it to every optimizer that it restores
        self._fused.groups, self._fused.known_state = {}, ([], [])
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)

    # ---- inside

    def _widen_moments(self, group: Hyper, state: dict[str, Any]) -> None:
        """Replace the 8-bit codes in the state of a parameter by float32 moments."""
        for name, spec in self._layout(group).items():
            codes, absmax = moments.keys(name, codes_of(spec))
            if codes in state:
                state[name] = moments.value(state, name, codes_of(spec))
                del state[codes], state[absmax]

    def _complete_state(self, group: Hyper, params: Iterable[torch.Tensor]) -> None:
        """Initialize the masters that are created in this step.

        A subclass may also add missing state here, before the tables of the step are built.

        Args:
            group: their hyperparameters.
            params: some parameters of the group.
        """
        for param in params:
            master = self.table.find(param) if param.grad is not None else None
            if isinstance(master, InState):
                master.begin()


def _refuse_lost(state: Any, *, masters: bool) -> None:
    """Refuse a flattened state dict whose entries have other names, because torch puts {} in place of each."""
    names = {name for kept in entries(state).values() for name, value in kept.items() if value == {}}
    lost = sorted(name for name in names if name.endswith("_codes") or (masters and name == "remainder"))
    if lost:
        raise UsageError(
            f"The flattened state dict has no {', '.join(lost)}, as this optimizer has: checkpoints hold float32 "
            "masters and moments, and torch reads a flattened one by the names in the optimizer. Save and load without "
            "flatten_optimizer_state_dict=True. Nothing was loaded."
        )
