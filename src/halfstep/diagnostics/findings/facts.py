"""The facts for the rules: parameters and their masters, dtypes, loss scales, measured numbers.

A fact costs nothing until a rule reads it; a healthy model costs one walk over its modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...casting.modules import hooks_of
from ...core.dtypes import HALF_DTYPES, is_half
from ...core.inner_optimizers import unwrap
from ...core.policy import Policy
from ...parameters.ledger import get_grads
from ...parameters.loss_scaler import DeviceLossScaler
from ...stepping.attached import attached_to
from ...stepping.replaced import modules_in
from ...torch_internals.torch_compat import buffers_of, parameters_of
from ..observe.names import ROOT, parts_of, qualified_names
from ..observe.reading import Reading
from ..observe.samples import PROOF, can_sample, grid_flags, is_on_grid, sample
from .finding import grouped
from .forward import Forward
from .groups import Group, SecondMoment, dtypes_of, second_moments
from .lost import LostUpdates

__all__ = ["Facts", "Rules", "gradients_of"]

_STEPPED = 8
"""The approximate number of fp32 weights that are tested for values on a 16-bit grid."""

_TENSORS, _ELEMENTS = 16, 64
"""The numbers of gradients, and of elements of each, that are tested for a nonzero value."""


@dataclass(eq=False)
class Facts:
    """The facts about a model, its optimizers and its policy.

    Attributes:
        model: any module.
        optimizers: the optimizers that train the model.
        scalers: the scalers of its losses: ``torch.amp.GradScaler`` or ``DeviceLossScaler``.
        scaling_is_known: True if there are no other scalers.
        policy: the policy; None if not given.
        accumulate: the number of backward passes per step.
        forward: the record of a forward pass; empty if none was run.
    """

    model: nn.Module
    optimizers: Sequence[Any]
    scalers: Sequence[Any] = ()
    scaling_is_known: bool = True
    policy: Policy | None = None
    accumulate: int = 1
    forward: Forward = field(default_factory=Forward)

    def __post_init__(self) -> None:
        self.optimizers = list(map(unwrap, self.optimizers))
        self.scalers = [*self.scalers, *self._session_scalers()]
        self.modules = modules_in([self.model])
        self.own_params = [p for module in self.modules for p in parameters_of(module).values() if p is not None]
        self._buffers = [b for module in self.modules for b in buffers_of(module).values() if b is not None]
        self._where: dict[tuple[int, ...], str] = {}
        self.reading = Reading()
        self.groups = [Group.of(one, group) for one in self.optimizers for group in one.param_groups]
        self.lost = LostUpdates.of(self.groups, self.reading)
        self._stepped = self._ask_stepped()
        self._any_gradient = _ask_gradients(self.trained_params, self.reading)
        self._forward_flags = [(name, self.reading.ask(flags)) for name, flags in self.forward.flags]
        self._norms = [(name, self.reading.ask(inf)) for name, inf in self.forward.norms]
        self._largest = [(name, self.reading.ask(size)) for name, size in self.forward.largest]
        self.reading.send()

    def _session_scalers(self) -> list[DeviceLossScaler]:
        """Find the loss scalers of ``amp.initialize``, which attaches them to its optimizers."""
        found: dict[int, DeviceLossScaler] = {}
        for optimizer in self.optimizers:
            attached = attached_to(optimizer)
            scalers = getattr(attached.session, "loss_scalers", ()) if attached is not None else ()
            found |= {id(scaler): scaler for scaler in scalers}
        return list(found.values())

    def _ask_stepped(self) -> tuple[list[torch.Tensor], int]:
        """Queue a test of sampled fp32 weights that have stepped: do their values lie on a 16-bit grid?"""
        stepped = [group for group in self.groups if group.optimizer.state and torch.float32 in group.dtypes]
        wide = [p for group in stepped for p in group.params]
        states = [group.optimizer.state for group in stepped]
        some = [
            p
            for p in wide[:: max(len(wide) // _STEPPED, 1)]
            if p.dtype is torch.float32
            and p.numel() >= PROOF
            and p.device == wide[0].device
            and can_sample(p)
            and any(state.get(p) for state in states)
        ]
        if not some:
            return [], -1
        samples = [sample(p, 4 * PROOF) for p in some]
        shortest = min(map(len, samples))
        return some, self.reading.ask(grid_flags(torch.stack([values[:shortest] for values in samples])))

    # ---- measured

    @property
    def any_gradient(self) -> bool | None:
        """True if a sample of the gradients has a nonzero value; None without gradients."""
        return None if self._any_gradient is None else bool(self.reading[self._any_gradient][0])

    @cached_property
    def stepped_on_grid(self) -> list[torch.Tensor]:
        """The fp32 weights that have stepped and whose values still all lie on the grid of a 16-bit format."""
        params, place = self._stepped
        flags = self.reading[place] if params else []
        return [p for p, off, used in zip(params, flags[::2], flags[1::2], strict=True) if is_on_grid([off, used])]

    @cached_property
    def outputs_on_grid(self) -> list[str]:
        """The modules whose fp32 outputs in the forward pass all lie on the grid of a 16-bit format."""
        return [name for name, where in self._forward_flags if is_on_grid(self.reading[where])]

    @property
    def norms(self) -> list[str]:
        """The ops by which the forward pass took the root of a 16-bit sum of squares."""
        return list(dict.fromkeys(name for name, _ in self._norms))

    @cached_property
    def zero_norms(self) -> list[str]:
        """The ops by which the forward pass divided by inf, because a sum of squares overflowed."""
        return list(dict.fromkeys(name for name, where in self._norms if self.reading[where][0]))

    @cached_property
    def not_finite(self) -> list[tuple[str, str]]:
        """For a forward pass that ended with inf or NaN: the places that returned "inf" or "NaN", in order."""
        largest = [(name, self.reading[where][0]) for name, where in self._largest]
        found = [(name, "NaN" if size != size else "inf") for name, size in largest if not math.isfinite(size)]
        return found if found[-1:] and not math.isfinite(largest[-1][1]) else []

    # ---- dtypes

    @cached_property
    def halves(self) -> list[torch.Tensor]:
        """The trained 16-bit parameters without a master."""
        return [p for group in self.groups for p in group.halves]

    @cached_property
    def second_moments(self) -> list[SecondMoment]:
        """The second moments in 16 bits."""
        return list(second_moments(self.groups))

    @cached_property
    def trained_params(self) -> list[torch.Tensor]:
        """The parameters that the optimizers train; without optimizers, the parameters that require gradients."""
        held = [p for group in self.groups for p in group.params]
        return held if self.optimizers else [p for p in self.own_params if p.requires_grad]

    @cached_property
    def trained(self) -> set[torch.dtype]:
        """The dtypes of the parameters that the optimizers train."""
        return {dtype for group in self.groups for dtype in group.dtypes}

    @cached_property
    def computed(self) -> set[torch.dtype]:
        """The 16-bit dtypes in which the model computes, according to its hooks, its weights and the policy."""
        casting = hooks_of(self.model).casting
        cast = {casting.dtype} if casting is not None and casting.enabled else set()
        given = {self.policy.compute_dtype, self.policy.param_dtype} if self.policy is not None else set()
        return {dtype for dtype in (self.trained | cast | given | self.forward.dtypes) if dtype in HALF_DTYPES}

    # ---- names

    @cached_property
    def module_names(self) -> dict[nn.Module, str]:
        """The qualified names of the modules."""
        return qualified_names(self.model)

    @cached_property
    def _names(self) -> dict[int, str]:
        return parts_of(self.module_names)

    def name_of(self, module: nn.Module) -> str:
        """Return the qualified name of a module; "the model" for the root."""
        name = self.module_names[module]
        return "the model" if name == ROOT else name

    def where(self, params: Iterable[torch.Tensor]) -> str:
        """Summarize parameters in a few words."""
        some = list(params)
        key = tuple(map(id, some))
        if key not in self._where:
            nameless = f"{type(self.optimizers[0]).__name__}'s parameter" if self.optimizers else "parameter"
            named = {self._names.get(id(p)) or f"{nameless} {i}": p.numel() for i, p in enumerate(some)}
            self._where[key] = grouped(named)
        return self._where[key]

    @cached_property
    def has_halves(self) -> bool:
        """True if the model has a 16-bit parameter or buffer."""
        return not dtypes_of([*self.own_params, *self._buffers]).isdisjoint(HALF_DTYPES)

    @cached_property
    def half_modules(self) -> list[tuple[str, nn.Module]]:
        """The modules that have 16-bit buffers, or 16-bit parameters without masters, by their qualified names."""
        if not self.has_halves:
            return []
        half_ids = set(map(id, self.halves))
        return [
            (name, module)
            for module, name in self.module_names.items()
            if not half_ids.isdisjoint(map(id, parameters_of(module).values()))
            or any(b is not None and is_half(b) for b in buffers_of(module).values())
        ]


Rules = Mapping[str, tuple[Callable[[Facts], Iterable[Any]], str]]
"""By code, the function that yields the rule's results, and the fix for results without one."""


def _ask_gradients(params: Sequence[torch.Tensor], reading: Reading) -> int | None:
    """Queue a test of sampled gradients for a nonzero value; return None if there are no gradients."""
    have = [p for p, grad in zip(params, get_grads(params), strict=True) if grad is not None]
    some = [grad for _, grad in gradients_of(have[:: -(-len(have) // _TENSORS)])] if have else []
    some = [grad for grad in some if grad.device == some[0].device]
    return reading.ask(torch.cat([sample(grad, _ELEMENTS) for grad in some]).any()) if some else None


def gradients_of(params: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parameters that have dense gradients, with the gradients."""
    for param, grad in zip(params, get_grads(params), strict=True):
        if grad is not None and grad.numel() and can_sample(grad):
            yield param, grad
