"""One side of a comparison: its ops, recorded with a digest of all bits of each result."""

from __future__ import annotations

import functools
import inspect
import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.files import replacing
from ..core.torch_compat import TorchDispatchMode, buffers_of, parameters_of, tree_flatten, tree_unflatten
from ..findings.forward import same_random_numbers
from ..numerics.linked_rows import LinkedRow
from ..numerics.recording import Recorder
from ..observe.names import OUTSIDE, ROOT, qualified_names
from ..observe.ops import OpCall, tensors_in, widened, written
from ..observe.watch import CallWatch

__all__ = ["OUTPUT", "Run", "run"]

OUTPUT = "(output)"
"""The name for what a side returns."""

_SAMPLES = 4096
_FORMAT = "halfstep parity 1"


class Facts(NamedTuple):
    """What a row does not say of its op.

    Attributes:
        before: the number of rows when the op began.
        constants: the arguments that are not tensors.
    """

    before: int
    constants: tuple[Any, ...]


class BitRecorder(Recorder):
    """Records the ops of one run; in place of a sketch, each row has a digest of the bits of all values.

    The digest is equal for equal numbers in different dtypes, and for all NaN.

    Args:
        keep: the indices of rows whose tensors to keep as a whole.
        batch: the number of rows in the batch of this run, of which only the first is looked at, and the run of one
            row, whose shapes tell where the batch is; None looks at all.
    """

    def __init__(self, keep: Collection[int] = (), batch: tuple[int, Run] | None = None) -> None:
        super().__init__(_SAMPLES, torch.float64)
        self.facts: dict[int, Facts] = {}
        self.kept: dict[int, torch.Tensor] = {}
        self._keep, self._size = keep, batch[0] if batch else 1
        self._alone: dict[Any, list[torch.Size]] = defaultdict(list)
        for row in reversed(batch[1].rows if batch else ()):
            self._alone[row.module, row.op, row.index].append(row.shape)
        self._weights: dict[torch.device, torch.Tensor] = {}

    def notice(self, call: OpCall) -> None:
        """Record the result of an op, unless it is a view."""
        before = len(self.rows)
        super().notice(call)
        made = [i for i in range(before, len(self.rows)) if self.rows[i].op == call.name]
        given = tree_flatten((call.args, call.kwargs))[0] if made else []
        constants = tuple(x for x in given if isinstance(x, (bool, int, float, str)))
        self.facts |= dict.fromkeys(made, Facts(before, constants))

    def begin_inputs(self, *inputs: Any) -> None:
        """Record the arguments of the run, which ops perhaps read as views."""
        list(self._came_from(OUTSIDE, *inputs))

    def finish(self, output: Any) -> list[int]:
        """Record what the run returned, and fetch the samples; returns the rows of the outputs."""
        first = len(self.rows)
        for i, tensor in enumerate(tensors_in(output)):
            values = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
            made = self._made.get(tensor.untyped_storage().data_ptr())
            known, inputs = (tensor.dtype, tensor.shape), () if made is None else (made,)
            self._write(LinkedRow(OUTPUT, "output", i, False, *known, *self._look(values), inputs), values, keep=True)
        self._fetch()
        return list(range(first, len(self.rows)))

    def _look(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values = tensor.detach().to(torch.float64)
        return self._sample(values), values.new_zeros(()), self._digest(values.reshape(-1))

    def _digest(self, values: torch.Tensor) -> torch.Tensor:
        bits = values.masked_fill(values.isnan(), torch.nan).view(torch.int64)
        weights = self._weights.get(values.device)
        if weights is None or len(weights) < len(bits):
            made = torch.arange(len(bits), device=values.device, dtype=torch.int64)
            weights = self._weights[values.device] = (made * 0x9E3779B97F4A7C1) ^ (made >> 7) | 1
        mixed = bits ^ (bits >> 32) ^ (bits >> 47)
        return (mixed * weights[: len(bits)]).sum().reshape(1)

    def _write(self, row: LinkedRow, tensor: torch.Tensor, keep: bool = False) -> None:
        seen = tensor
        if known := self._alone[row.module, row.op, row.index]:
            alone = known.pop()
            for dim, length in enumerate(alone if len(alone) == tensor.dim() else ()):
                if tensor.shape[dim] == self._size * length:
                    seen = seen.narrow(dim, 0, length)
            row.shape = seen.shape
            row.sample, row.amax, row.sketch = self._look(seen)
        if keep or len(self.rows) in self._keep:
            self.kept[len(self.rows)] = seen.detach().clone()
        super()._write(row, tensor)


class _Wide(TorchDispatchMode):
    """Computes in float64 from a row of a recorder on."""

    def __init__(self, recorder: BitRecorder, start: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder, self._start = recorder, start

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(self._recorder.rows) >= self._start and not func.is_view:
            args, kwargs = widened(args, kwargs, torch.float64, list(written(func, args, kwargs)))
        return func(*args, **kwargs)


@dataclass
class Run:
    """A recorded side.

    Attributes:
        name: how reports call it.
        rows: a row for each parameter, input and result of an op, in order of execution.
        facts: more about the op of a row.
        outputs: the rows of what the side returned.
        kept: whole tensors by row: of outputs, and of rows that were asked for. A saved run has none.
    """

    name: str
    rows: list[LinkedRow]
    facts: dict[int, Facts]
    outputs: list[int]
    kept: dict[int, torch.Tensor] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Save the run, to compare it in another process. The file has samples and digests, no whole tensors.

        Args:
            path: the file; missing folders are created, and an existing file is replaced as a whole.
        """
        rows = [{**vars(row), "cast": None, "source": None} for row in self.rows]
        facts = {i: tuple(each) for i, each in self.facts.items()}
        with replacing(path) as file:
            torch.save((_FORMAT, self.name, rows, facts, self.outputs), file)

    @staticmethod
    def load(path: str | Path) -> Run:
        """Load a saved run.

        Raises:
            ArgumentValueError: for any other file.
        """
        try:
            saved = torch.load(path, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError):
            saved = None
        if not isinstance(saved, tuple) or saved[0] != _FORMAT:
            raise ArgumentValueError(f"{path} is no saved run. parity.record(model, inputs).save(path) writes one.")
        _, name, rows, facts, outputs = saved
        return Run(name, [LinkedRow(**row) for row in rows], {i: Facts(*each) for i, each in facts.items()}, outputs)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments for a call; tensors are copied, so that no side can change them."""
    leaves, tree = tree_flatten(inputs)
    tensors = [(i, x) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    for i, x in tensors:
        leaves[i] = x.detach().clone().requires_grad_(x.requires_grad)
    copied = tree_unflatten(leaves, tree)
    if isinstance(copied, Mapping):
        return (), dict(copied)
    return (tuple(copied) if isinstance(copied, (tuple, list)) else (copied,)), {}


def _models_in(side: Callable[..., Any]) -> list[nn.Module]:
    """List the models that a callable uses: itself, or those that it names."""
    if isinstance(side, nn.Module):
        return [side]
    if isinstance(side, functools.partial):
        return [model for each in (side.func, *side.args) if callable(each) for model in _models_in(each)]
    inner: Any = getattr(side, "_torchdynamo_orig_callable", side)
    values, function = [getattr(inner, "__self__", None)], getattr(inner, "__func__", inner)
    if inspect.isfunction(function):
        closed = inspect.getclosurevars(function)
        values += [*closed.nonlocals.values(), *closed.globals.values()]
    return [value for value in values if isinstance(value, nn.Module)]


def run(
    name: str,
    side: Callable[..., Any],
    inputs: Any,
    *,
    keep: Collection[int] = (),
    batch: tuple[int, Run] | None = None,
    wide_from: int | None = None,
    below: Any = None,
    watched: bool = True,
) -> Run:
    """Run one side, recorded, from the same random state as the other.

    Weights, buffers, gradients and random state are as before afterwards.

    Args:
        name: how reports call the side.
        side: the callable.
        inputs: its arguments.
        keep: see ``BitRecorder``.
        batch: see ``BitRecorder``.
        wide_from: the number of rows from which ops compute in float64; None for none.
        below: a mode to run below the recorder; None for none.
        watched: False to record only what the side returns, so that compiled code runs as compiled.

    Raises:
        UsageError: if the side raises.
        ArgumentTypeError: if it returns no tensor.
    """
    recorder = BitRecorder(keep, batch)
    below = below if wide_from is None else _Wide(recorder, wide_from)
    models = _models_in(side)
    names = qualified_names(side) if isinstance(side, nn.Module) else None
    args, kwargs = _arguments(inputs)
    with _as_before(models), same_random_numbers(nn.ModuleList(models)), below or nullcontext():
        recorder.begin(names or {})
        recorder.begin_inputs(args, kwargs)
        with CallWatch(names, ops=recorder.notice, casts=True) if watched else nullcontext():
            try:
                output = side(*args, **kwargs)
            except Exception as error:
                what = f"{name} raised {type(error).__name__}: {error}."
                raise UsageError(f"{what} Call it with these inputs by itself.") from error
    outputs = recorder.finish(output)
    if not outputs:
        raise ArgumentTypeError(f"{name} returns {type(output).__name__} without a tensor: return what to compare.")
    if names is None:
        _strip(recorder.rows)
    return Run(name, recorder.rows, recorder.facts, outputs, recorder.kept)


def _strip(rows: list[LinkedRow]) -> None:
    """Leave the class out of the names of modules, if a function called only one outermost module."""
    inside = [row for row in rows if row.module not in (OUTSIDE, OUTPUT)]
    if len({row.module.partition(".")[0] for row in inside}) == 1:
        for row in inside:
            row.module = row.module.partition(".")[2] or ROOT


@contextmanager
def _as_before(models: list[nn.Module]) -> Iterator[None]:
    """Restore the parameters and buffers of models, and their gradients, after the block."""
    tables = [table(m) for model in models for m in model.modules() for table in (parameters_of, buffers_of)]
    named = [(table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None]
    saved = [(*each, each[2]._version, each[2].detach().clone(), each[2].grad) for each in named]
    try:
        for _, _, tensor, *_, grad in saved:
            tensor.grad = None if grad is None else grad.clone()
        yield
    finally:
        for table, name, tensor, version, value, grad in saved:
            table[name], tensor.grad = tensor, grad
            if tensor._version != version:
                tensor.detach().copy_(value)
