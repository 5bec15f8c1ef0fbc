"""The parameters of one group that step together: their table of tensors, and their step counts in one vector."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, Literal, NamedTuple

import torch

from ..core.errors import ArgumentTypeError, UsageError
from ..kernels.blockwise import SIGNED, UNSIGNED
from ..kernels.expr import ElementwiseKernel
from ..kernels.launch import launch
from ..kernels.multi_tensor import group_rows, read_gradients
from ..kernels.shards import ORDINARY, Domain, complete_sum, domain_of, local, locals_of
from ..kernels.storage import Storage, dense
from ..kernels.tensor_table import Column, Scalars, TensorTable
from ..parameters import split
from . import moments
from .options import FusedOptions

__all__ = [
    "FIRST_MOMENT",
    "NUMBER",
    "SECOND_MOMENT",
    "GroupRows",
    "ParamRows",
    "SparseGradient",
    "StateLayout",
    "StateSpec",
    "check_gradient",
]


class SparseGradient(UsageError):  # noqa: N818 - what it says
    """A fused step was given a sparse gradient."""


class StateSpec(NamedTuple):
    """A spec for one entry in a parameter's state: a tensor of its shape, or a float32 number if ``dtype`` is None.

    ``FusedOptions`` choose the storage of a moment. A first moment has values of both signs, a second moment does not.
    """

    dtype: torch.dtype | None
    initial: float = 0.0
    moment: Literal["first", "second"] | None = None


NUMBER = StateSpec(None)
FIRST_MOMENT, SECOND_MOMENT = StateSpec(torch.float32, 0.0, "first"), StateSpec(torch.float32, 0.0, "second")
_GRAD, _ADDRESS, _NONES = attrgetter("grad"), torch.Tensor.data_ptr, itertools.repeat(None)
StateLayout = Mapping[str, StateSpec]

_ODD = 0x85EBCA6B, 0x9E3779B1  # large odd constants: parameters and steps draw from far-apart seeds


class ParamRows:
    """Parameters that share a device, a weight dtype and a gradient dtype, with their state; for sharded parameters,
    their local shards.

    Numbers in the state (``step``) are 0-dim views of one vector per name, so that one op advances all of them.

    Args:
        params: the parameters.
        grads: their gradients.
        states: the state of each.
        layout: the state that the update keeps.
        options: the storage of weights.
        positions: the place of each parameter in the optimizer; it sets the seeds of stochastic rounding.

    Attributes:
        params: the parameters.
        table: columns ``grad``, ``param`` and the tensors of the state.
        device: the device of the rows.
        weights: the parameters, without gradients.
        numbers: the numbers of the state, float32 of shape [rows].
        one: the number 1, a 0-dim float32 tensor. On a CPU, adding it takes a third of the time of adding a float.
        domain: the processes that hold the other shards.
        state_names: the names of the tensors in the state of each parameter.
        squares: the sums of squares from this step's read of the gradients; None before it.
    """

    def __init__(
        self,
        params: list[torch.Tensor],
        grads: list[torch.Tensor],
        states: list[dict[str, Any]],
        layout: StateLayout,
        options: FusedOptions,
        positions: list[int],
    ) -> None:
        self.params = params
        self.states = states
        self.weights = [local(p.detach()) for p in params]
        self.domain: Domain = domain_of(params[0])
        self.device = params[0].device
        storage = options.storage(params[0].dtype, self.device)
        kept = {
            name: options.state_storage(spec.moment, params[0])
            for name, spec in layout.items()
            if spec.dtype is not None
        }
        for param, state in zip(params, states, strict=True):
            _prepare(param, state, layout, kept)
            split.adapt(param, state, storage)
        self.numbers = {name: _vector(states, name, self.device) for name, spec in layout.items() if spec.dtype is None}
        columns: dict[str, Column] = {
            "grad": (dense(grads[0].dtype), (grads,)),
            "param": (storage, _parts(self.weights, states, storage)),
        }
        for name, form in kept.items():
            columns[name] = (form, moments.parts(states, name, form))
        # The second part of a weight's storage is also in the state, where user code can replace it.
        extra = {"split": "remainder", "plain": "master"}.get(storage.kind)
        tensors = [key for name, form in kept.items() for key in moments.keys(name, form)]
        self.state_names = [*self.numbers, *tensors, *([extra] if extra else [])]
        self.table = TensorTable(columns)
        _check_shapes(self.table.columns)
        self._seeds = torch.tensor(positions, dtype=torch.int64, device=self.device) * _ODD[0] + options.seed
        self.one = torch.ones((), dtype=torch.float32, device=self.device)
        self._random = storage.kind == "stochastic"
        self.squares: torch.Tensor | None = None

    def launch(
        self,
        kernel: ElementwiseKernel,
        scalars: Scalars,
        skip: torch.Tensor | None = None,
        found: torch.Tensor | None = None,
        beside: Mapping[str, list[torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """Run a kernel on the table; stochastic rounding gets its seeds from the step counts.

        Args:
            kernel: the kernel.
            scalars: the numbers that the kernel reads.
            skip: see ``Launcher``.
            found: see ``Launcher``.
            beside: additional columns for this call, by name.

        Returns:
            The sums of squares that the kernel names, of whole tensors if they are sharded.
        """
        if self._random:
            drawn = (self._seeds + self.numbers["step"].long() * _ODD[1]) & 0xFFFF_FFFF
            scalars = {**scalars, "seed": torch.where(drawn > 0x7FFF_FFFF, drawn - (1 << 32), drawn).to(torch.int32)}
        table = self.table if beside is None else self.table.beside(beside)
        results = launch(table, kernel, scalars, skip=skip, found=found)
        if kernel.squares and self.domain:
            complete_sum(results, self.domain)
            if found is not None:  # inf or NaN on any rank makes the sum inf or NaN
                found.logical_or_(results.isfinite().all().logical_not_())
        return results

    def squared_norms(self, found: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of squares of each gradient, still scaled: float64 of shape [rows]; read once per step.

        Args:
            found: 0-dim float32 tensor, set to 1.0 if a gradient that is read holds inf or NaN.
        """
        if self.squares is None:
            self.squares = self.launch(read_gradients, {}, None, found)[0]
        return self.squares


class GroupRows:
    """All rows of one parameter group, which are reused from step to step as long as only gradients change.

    Args:
        params: the parameters of the group.
        state: the state of the optimizer.
        layout: the state that its update keeps.
        options: the options of the optimizer.
        places: the positions of the parameters in the optimizer.
        marks: a mark for each parameter; parameters with the same mark share rows.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        state: Mapping[torch.Tensor, dict[str, Any]],
        layout: StateLayout,
        options: FusedOptions,
        places: Sequence[int],
        marks: Sequence[Hashable],
    ) -> None:
        self._params = list(params)
        self._plain = ORDINARY.issuperset(map(type, params))
        self._addresses = list(map(_ADDRESS, locals_of(params)))
        self._layout = dict(layout)
        self._state = state
        grads = [p.grad for p in params]
        self._missing = list(map(is_, grads, _NONES))
        there = [i for i, grad in enumerate(grads) if grad is not None]
        for i in there:
            check_gradient(params[i], grads[i])  # type: ignore[arg-type]
        here: list[Any] = [None if grad is None else local(grad) for grad in grads]
        columns = [[column[i] for i in there] for column in (params, here)]
        alike = group_rows(*columns, marks=[marks[i] for i in there])
        self._positions = [[there[k] for k in rows] for rows in alike]
        self.rows = [
            ParamRows(
                [params[i] for i in positions],
                [grads[i] for i in positions],  # type: ignore[misc]
                [state[params[i]] for i in positions],
                layout,
                options,
                [places[i] for i in positions],
            )
            for positions in self._positions
        ]
        # The state tensors of the rows, and where each was found, to notice a replaced one.
        kept = [(entry, name, entry[name]) for rows in self.rows for name in rows.state_names for entry in rows.states]
        self._entries, self._names, self._tensors = map(list, zip(*kept, strict=True)) if kept else ([], [], [])

    def renew(
        self,
        params: Sequence[torch.Tensor],
        state: Mapping[torch.Tensor, dict[str, Any]],
        layout: StateLayout,
        *,
        known: bool = False,
    ) -> bool:
        """Use the present gradients. Returns False if the parameters, their storage or state changed.

        ``known`` is True if the entries of the state are the same objects as in the last step.
        """
        if state is not self._state or layout != self._layout:
            return False
        grads = list(map(_GRAD, params))
        if list(map(is_, grads, _NONES)) != self._missing or not all(map(is_, params, self._params)):
            return False
        here = params if self._plain else locals_of(params)
        if list(map(_ADDRESS, here)) != self._addresses:  # param.data = x
            return False
        for rows in self.rows:
            if not known and not all(map(is_, map(state.get, rows.params), rows.states)):
                return False
            rows.squares = None
        if not all(map(is_, map(dict.get, self._entries, self._names), self._tensors)):
            return False
        if len(self.rows) == 1 and len(self._positions[0]) == len(params):  # the usual group
            return self.rows[0].table.renew(grads)
        parts = zip(self.rows, self._positions, strict=True)
        return all(rows.table.renew([grads[i] for i in positions]) for rows, positions in parts)


def check_gradient(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Refuse gradients and parameters that a fused step cannot read.

    Raises:
        SparseGradient: for a sparse gradient.
        ArgumentTypeError: for a parameter that is not real and floating.
    """
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


def _prepare(param: torch.Tensor, state: dict[str, Any], layout: StateLayout, kept: Mapping[str, Storage]) -> None:
    """Create missing state, and convert loaded state to the storage that this optimizer uses."""
    for name, spec in layout.items():
        if spec.dtype is not None:
            moments.adapt(param, state, name, spec.initial, kept[name], codes_of(spec))
        elif not isinstance(value := state.get(name), torch.Tensor):
            state[name] = torch.tensor(spec.initial if value is None else value, dtype=torch.float32, device="cpu")


def codes_of(spec: StateSpec) -> Storage:
    """Return the storage that decodes the 8-bit codes of a state."""
    return SIGNED if spec.moment == "first" else UNSIGNED


def _check_shapes(columns: Mapping[str, Column]) -> None:
    """Check that all columns have the shapes of the weights, because kernels do not check."""
    weights = columns["param"][1][-1]
    for name, (_, parts) in columns.items():
        for weight, tensor in zip(weights, parts[0], strict=True):
            if tensor.shape != weight.shape:
                raise _misshapen(name, tensor, f"where the parameter has {tuple(weight.shape)}")


def _misshapen(name: str, tensor: torch.Tensor, needs: str) -> UsageError:
    return UsageError(
        f"{name} of a parameter has shape {tuple(tensor.shape)} here, {needs}. Load state of the same kind of "
        "optimizer: where Adam and LAMB keep a tensor exp_avg_sq, NovoGrad keeps a number. State of sharded parameters "
        "is loaded with torch.distributed.checkpoint, which cuts it as the parameters are cut."
    )


def _vector(states: list[dict[str, Any]], name: str, device: torch.device) -> torch.Tensor:
    for state in states:
        if state[name].numel() != 1:
            raise _misshapen(name, state[name], "where this optimizer keeps one number")
    vector = torch.stack([state[name].detach().to(device, torch.float32).reshape(()) for state in states])
    for state, view in zip(states, vector.unbind(), strict=True):
        state[name] = view
    return vector


def _parts(
    weights: list[torch.Tensor], states: list[dict[str, Any]], storage: Storage
) -> tuple[list[torch.Tensor], ...]:
    if storage.kind == "split":
        return weights, [state["remainder"] for state in states]
    if storage.kind == "plain":
        return [state["master"] for state in states], weights
    return (weights,)
