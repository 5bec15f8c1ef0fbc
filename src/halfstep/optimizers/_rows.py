"""The parameters of one group that step together: their batch of tensors, and their step counts in one vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from ..casting.weight_copies import memory_of
from ..core.errors import ArgumentTypeError, UsageError
from ..kernels.expr import Pass
from ..kernels.shards import Domain, complete_sum, domain_of, is_sharded, local, locals_of
from ..kernels.storage import Storage, copied, dense
from ..kernels.tensor_table import Batch, Scalars
from ..masters import split
from ._options import Options

__all__ = ["NUMBER", "GroupRows", "Kept", "Rows", "SparseGradient", "StateLayout"]


class SparseGradient(UsageError):  # noqa: N818 - what it says
    """A fused step was given a sparse gradient."""


class Kept(NamedTuple):
    """One thing an update keeps for a parameter: a tensor like it, or one float32 number where ``dtype`` is None."""

    dtype: torch.dtype | None
    initial: float = 0.0


NUMBER = Kept(None)
StateLayout = Mapping[str, Kept]

_ODD = 0x85EBCA6B, 0x9E3779B1  # large odd constants: parameters and steps draw from far-apart seeds


class Rows:
    """Parameters of one device, one dtype of weights and one of gradients, with their state; of sharded ones, the parts
    that lie here.

    The numbers of the state (``step``) are 0-dim views of one vector each, so that all of them advance at once.

    Attributes:
        batch: columns ``grad``, ``param`` and the tensors of the state.
        weights: the parameters, without gradients.
        vectors: the numbers of the state, float32 of shape [rows].
        domain: the processes that hold the other parts.
        squares: sums of squares of this step's scaled gradients, float64 of shape [rows], if they have been read.
    """

    def __init__(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: list[dict[str, Any]],
        layout: StateLayout,
        options: Options,
        numbers: list[int],
        copies: list[torch.Tensor] | None,
    ) -> None:
        self.states = states
        self.weights = [local(memory_of(p)) for p in params]
        self.domain: Domain = domain_of(params[0])
        self._sharded = is_sharded(params[0])
        device, dtype = params[0].device, params[0].dtype
        storage = options.storage(dtype)
        for param, state in zip(params, states, strict=True):
            _prepare(param, state, layout, storage)
        self.vectors = {name: _vector(states, name, device) for name, kept in layout.items() if kept.dtype is None}
        tensors = {name: [state[name] for state in states] for name, kept in layout.items() if kept.dtype is not None}
        columns: dict[str, tuple[Storage, tuple[list[torch.Tensor], ...]]] = {
            "grad": (dense(grads[0].dtype), (locals_of(grads),)),
            "param": (storage, _parts(self.weights, states, storage)),
        }
        if copies is not None:  # an fp32 weight is the master of its copy
            columns["param"] = (copied(copies[0].dtype), (self.weights, copies))
        columns.update({name: (dense(column[0].dtype), (locals_of(column),)) for name, column in tensors.items()})
        _check_shapes(columns)
        # The second part of a weight's storage lives in the state too and can be replaced there.
        extra = {"split": "remainder", "plain": "master"}.get(storage.kind)
        names = [*layout, *([extra] if extra else [])]
        self._expected = {name: [state[name] for state in states] for name in names}
        self.batch = Batch(columns)
        self._seeds = torch.tensor(numbers, device=device) * _ODD[0] + options.seed
        self.squares: torch.Tensor | None = None
        self._random = storage.kind == "stochastic"

    def renew(self, grads: list[torch.Tensor]) -> bool:
        """Take this step's gradients; False if they or the state are not what this was made for."""
        try:
            for name, tensors in self._expected.items():
                if not all(map(is_, [state[name] for state in self.states], tensors)):
                    return False
        except KeyError:
            return False
        return self.batch.renew(locals_of(grads) if self._sharded else grads)

    def run(
        self, pass_: Pass, scalars: Scalars, skip: torch.Tensor | None, found: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a pass on the batch; stochastic rounding gets its seeds from the step counts.

        Returns:
            The sums of squares it names, of whole tensors where they are sharded.
        """
        if self._random:
            drawn = (self._seeds + self.vectors["step"].long() * _ODD[1]) & 0xFFFF_FFFF
            scalars = {**scalars, "seed": torch.where(drawn > 0x7FFF_FFFF, drawn - (1 << 32), drawn).to(torch.int32)}
        sums = self.batch.run(pass_, scalars, skip=skip, found=found)
        if self.domain and pass_.squares:
            complete_sum(sums, self.domain)
            if found is not None:  # what is not finite elsewhere shows in the sum
                found.logical_or_(sums.isfinite().all().logical_not_())
        return sums


class GroupRows:
    """All the rows of one parameter group, kept from step to step while nothing but gradients changes."""

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        state: Mapping[torch.Tensor, dict[str, Any]],
        layout: StateLayout,
        options: Options,
        first: int,
        copies: list[torch.Tensor | None],
    ) -> None:
        self._params = list(params)
        self._sharded = any(map(is_sharded, params))
        self._addresses = self._read(params)
        self._copies = copies
        self._layout = dict(layout)
        self._state = state
        grads = [p.grad for p in params]
        self._missing = [g is None for g in grads]
        kinds: dict[tuple[torch.device, torch.dtype, torch.dtype, Domain, bool], list[int]] = {}
        for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is not None:
                _refuse(param, grad)
                kind = (param.device, param.dtype, grad.dtype, domain_of(param), copies[i] is not None)
                kinds.setdefault(kind, []).append(i)
        self._positions = list(kinds.values())
        self.rows = [
            Rows(
                [params[i] for i in rows],
                [g for i in rows if (g := grads[i]) is not None],
                [state[params[i]] for i in rows],
                layout,
                options,
                [first + i for i in rows],
                [copies[i] for i in rows] if copies[rows[0]] is not None else None,  # type: ignore[misc]
            )
            for rows in self._positions
        ]

    def renew(
        self,
        params: Sequence[torch.Tensor],
        state: Mapping[torch.Tensor, dict[str, Any]],
        layout: StateLayout,
        copies: list[torch.Tensor | None],
    ) -> bool:
        """Take the gradients that are there now; False if another set of parameters, state or copies takes part."""
        if state is not self._state or len(params) != len(self._params) or layout != self._layout:
            return False
        if not all(map(is_, copies, self._copies)):
            return False
        grads = [p.grad for p in params]
        if [g is None for g in grads] != self._missing or not all(map(is_, params, self._params)):
            return False
        if self._read(params) != self._addresses:  # param.data = x
            return False
        for positions, rows in zip(self._positions, self.rows, strict=True):
            if not all(map(is_, [state.get(params[i]) for i in positions], rows.states)):
                return False
            if not rows.renew([grads[i] for i in positions]):  # type: ignore[misc]
                return False
        return True

    def _read(self, params: Sequence[torch.Tensor]) -> list[int]:
        return [p.data_ptr() for p in (locals_of(params) if self._sharded else params)]


def _refuse(param: torch.Tensor, grad: torch.Tensor) -> None:
    if grad.layout is not torch.strided:
        raise SparseGradient(
            f"A gradient of shape {tuple(grad.shape)} is sparse ({grad.layout}); fused optimizers need dense ones. Use "
            "nn.Embedding(sparse=False), or torch.optim.SparseAdam for these parameters."
        )
    if not param.is_floating_point():
        raise ArgumentTypeError(
            f"A parameter of shape {tuple(param.shape)} is {param.dtype}; fused optimizers update real floating-point "
            "parameters. Give the others to a torch.optim optimizer."
        )


def _prepare(param: torch.Tensor, state: dict[str, Any], layout: StateLayout, storage: Storage) -> None:
    """Make what state is missing, and bring what was loaded from elsewhere into the form kept here."""
    wide = torch.float64 if param.dtype is torch.float64 else None
    for name, (dtype, initial) in layout.items():
        value = state.get(name)
        if dtype is None:
            if not isinstance(value, torch.Tensor):
                state[name] = torch.tensor(float(initial if value is None else value))
        elif not isinstance(value, torch.Tensor):
            state[name] = torch.full_like(param, initial, dtype=wide or dtype, memory_format=torch.preserve_format)
        elif value.dtype is not (wide or dtype) or value.device != param.device:
            state[name] = value.to(param.device, wide or dtype)
    split.adapt(param, state, storage)


def _check_shapes(columns: Mapping[str, tuple[Storage, tuple[list[torch.Tensor], ...]]]) -> None:
    """Kernels trust the shapes of what they are given."""
    weights = columns["param"][1][-1]
    for name, (_, parts) in columns.items():
        for weight, tensor in zip(weights, parts[0], strict=True):
            if tensor.shape != weight.shape:
                raise UsageError(
                    f"{name} of a parameter has shape {tuple(tensor.shape)} here, where the parameter has "
                    f"{tuple(weight.shape)}. State of sharded parameters is loaded with torch.distributed.checkpoint, "
                    "which cuts it as the parameters are cut."
                )


def _vector(states: list[dict[str, Any]], name: str, device: torch.device) -> torch.Tensor:
    vector = torch.stack([state[name].detach().to(device, torch.float32).reshape(()) for state in states])
    for state, view in zip(states, vector.unbind(), strict=True):
        state[name] = view
    return vector


def _parts(
    weights: list[torch.Tensor], states: list[dict[str, Any]], storage: Storage
) -> tuple[list[torch.Tensor], ...]:
    if storage.kind == "split":
        return weights, [local(state["remainder"]) for state in states]
    if storage.kind == "plain":
        return [local(state["master"]) for state in states], weights
    return (weights,)
