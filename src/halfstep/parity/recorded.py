"""One side of a comparison: its ops, recorded with a digest of all bits of each result."""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.files import replacing
from ..core.torch_compat import buffers_of, parameters_of, tree_flatten, tree_unflatten
from ..findings.forward import same_random_numbers
from ..numerics.linked_rows import LinkedRow
from ..numerics.recording import Recorder
from ..observe.names import OUTSIDE, ROOT, qualified_names
from ..observe.ops import OpCall, tensors_in
from ..observe.watch import CallWatch

__all__ = ["OUTPUT", "BitRecorder", "Facts", "Run", "arguments", "models_in", "run"]

OUTPUT = "(output)"
"""The name for what a side returns."""

_SAMPLES = 4096
_FORMAT = 1


class Facts(NamedTuple):
    """What a row does not say of its op.

    Attributes:
        before: the number of rows when the op began.
        constants: the arguments that are not tensors.
        strides: the strides of the arguments that are tensors.
    """

    before: int
    constants: tuple[Any, ...]
    strides: tuple[tuple[int, ...], ...]


class BitRecorder(Recorder):
    """Records the ops of one run; in place of a sketch, each row has a digest of the bits of all values.

    The digest is equal for equal numbers in different dtypes, and for all NaN.

    Args:
        keep: the indices of rows whose tensors to keep as a whole.
        batch: the number of rows in the batch of this run, of which only the first is looked at, and the shapes of a
            run of one row by key of a row; None looks at all.
    """

    def __init__(
        self, keep: Collection[int] = (), batch: tuple[int, dict[Any, list[torch.Size]]] | None = None
    ) -> None:
        super().__init__(_SAMPLES, torch.float64)
        self.facts: dict[int, Facts] = {}
        self.kept: dict[int, torch.Tensor] = {}
        self._keep, self._batch = keep, batch
        self._weights: dict[torch.device, torch.Tensor] = {}

    def notice(self, call: OpCall) -> None:
        """Record the result of an op, unless it is a view."""
        before = len(self.rows)
        super().notice(call)
        if len(self.rows) > before:
            leaves = tree_flatten((call.args, call.kwargs))[0]
            given = tuple(x.stride() for x in leaves if isinstance(x, torch.Tensor) and x.layout is torch.strided)
            others = tuple(x for x in leaves if isinstance(x, (bool, int, float, str)))
            made = [i for i in range(before, len(self.rows)) if self.rows[i].op == call.name]
            self.facts |= dict.fromkeys(made, Facts(before, others, given))

    def begin_inputs(self, *inputs: Any) -> None:
        """Record the arguments of the run, which ops perhaps read as views."""
        list(self._came_from(OUTSIDE, *inputs))

    def finish(self, output: Any) -> list[int]:
        """Record what the run returned, and fetch the samples; returns the rows of the outputs."""
        found = list(tensors_in(output))
        first = len(self.rows)
        for i, tensor in enumerate(found):
            values = torch.view_as_real(tensor) if tensor.is_complex() else tensor.detach()
            made = self._made.get(tensor.untyped_storage().data_ptr())
            inputs = () if made is None else (made,)
            self._write(
                LinkedRow(OUTPUT, "output", i, False, tensor.dtype, tensor.shape, *self._look(values), inputs), values
            )
        self._fetch()
        return list(range(first, first + len(found)))

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

    def _write(self, row: LinkedRow, tensor: torch.Tensor) -> None:
        seen = tensor
        if self._batch is not None:
            size, shapes = self._batch
            known = shapes.get((row.module, row.op, row.index))
            alone = known.pop(0) if known else tensor.shape
            for dim, length in enumerate(alone if len(alone) == tensor.dim() else ()):
                if tensor.shape[dim] == size * length:
                    seen = seen.narrow(dim, 0, length)
            row.shape = seen.shape
            row.sample, row.amax, row.sketch = self._look(seen)
        if len(self.rows) in self._keep:
            self.kept[len(self.rows)] = seen.detach().clone()
        super()._write(row, tensor)


@dataclass
class Run:
    """A recorded side.

    Attributes:
        name: how reports call it.
        rows: a row for each parameter, input and result of an op, in order of execution.
        facts: more about the op of a row.
        outputs: the rows of what the side returned.
        kept: whole tensors by row.
        returned: what compiled code returned when it ran as compiled; None for any other side.
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
        rows = [{**vars(row), "cast": row.cast and tuple(row.cast), "saved": None} for row in self.rows]
        facts = {i: tuple(each) for i, each in self.facts.items()}
        with replacing(path) as file:
            torch.save(
                {"halfstep parity": _FORMAT, "name": self.name, "rows": rows, "facts": facts, "outputs": self.outputs},
                file,
            )

    @staticmethod
    def load(path: str | Path) -> Run:
        """Load a saved run.

        Raises:
            ArgumentValueError: for any other file.
        """
        from ..observe.ops import Cast

        try:
            saved = torch.load(path, weights_only=True)
            known = saved["halfstep parity"] == _FORMAT
        except (pickle.UnpicklingError, RuntimeError, KeyError, TypeError, EOFError):
            known = False
        if not known:
            raise ArgumentValueError(
                f"{path} is no saved run. Save one: parity.record(model, inputs).save({str(path)!r})."
            )
        rows = [LinkedRow(**{**row, "cast": row["cast"] and Cast(*row["cast"])}) for row in saved["rows"]]
        return Run(saved["name"], rows, {i: Facts(*each) for i, each in saved["facts"].items()}, saved["outputs"])


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments for a call; tensors are copied, so that no side can change them."""
    leaves, tree = tree_flatten(inputs)
    copied = tree_unflatten(
        [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves], tree
    )
    if isinstance(copied, Mapping):
        return (), dict(copied)
    return (tuple(copied) if isinstance(copied, (tuple, list)) else (copied,)), {}


def models_in(side: Callable[..., Any]) -> list[nn.Module]:
    """List the models that a callable uses: itself, or those that it names."""
    if isinstance(side, nn.Module):
        return [side]
    if isinstance(side, functools.partial):
        found = [side.func, *side.args, *side.keywords.values()]
        return [model for each in found if callable(each) for model in models_in(each)]
    inner = inspect.unwrap(getattr(side, "_torchdynamo_orig_callable", side))
    values = [getattr(inner, "__self__", None)]
    if inspect.isfunction(getattr(inner, "__func__", inner)):
        closed = inspect.getclosurevars(inner)
        values += [*closed.nonlocals.values(), *closed.globals.values()]
    return [value for value in values if isinstance(value, nn.Module)]


def run(
    name: str,
    side: Callable[..., Any],
    inputs: Any,
    recorder: BitRecorder | None = None,
    around: Callable[[BitRecorder], Any] | None = None,
) -> tuple[Run, Any]:
    """Run one side, recorded, from the same random state as the other; returns its record and what it returned.

    Weights, buffers, gradients and random state are as before afterwards.

    Args:
        name: how reports call the side.
        side: the callable.
        inputs: its arguments.
        recorder: what records it.
        around: a function that returns a mode to run below the recorder.

    Raises:
        UsageError: if the side raises.
        ArgumentTypeError: if it returns no tensor.
    """
    recorder = recorder or BitRecorder()
    models = models_in(side)
    names = qualified_names(side) if isinstance(side, nn.Module) else None
    args, kwargs = arguments(inputs)
    with ExitStack() as stack:
        stack.enter_context(_as_before(models))
        stack.enter_context(same_random_numbers(nn.ModuleList(models)))
        if around is not None:
            stack.enter_context(around(recorder))
        recorder.begin(names or {})
        recorder.begin_inputs(args, kwargs)
        stack.enter_context(CallWatch(names, ops=recorder.notice, casts=True))
        output = called(name, side, args, kwargs)
    outputs = recorder.finish(output)
    if not outputs:
        raise ArgumentTypeError(f"{name} returns {type(output).__name__} without a tensor: return what to compare.")
    if names is None:
        _strip(recorder.rows)
    return Run(name, recorder.rows, recorder.facts, outputs, recorder.kept), output


def plain(name: str, side: Callable[..., Any], inputs: Any) -> Any:
    """Return what a side returns when nothing watches it, from the same state as in ``run``."""
    models = models_in(side)
    args, kwargs = arguments(inputs)
    with _as_before(models), same_random_numbers(nn.ModuleList(models)):
        return called(name, side, args, kwargs)


def called(name: str, side: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a side; what it raises becomes an error that names the side."""
    try:
        return side(*args, **kwargs)
    except Exception as error:
        raise UsageError(
            f"{name} raised {type(error).__name__}: {error}. Call it with these inputs by itself."
        ) from error


def _strip(rows: list[LinkedRow]) -> None:
    """Leave the class out of the names of modules, if a function called only one outermost module."""
    outer = {row.module.partition(".")[0] for row in rows if row.module not in (OUTSIDE, OUTPUT)}
    if len(outer) == 1:
        for row in rows:
            if row.module not in (OUTSIDE, OUTPUT):
                row.module = row.module.partition(".")[2] or ROOT


@contextmanager
def _as_before(models: list[nn.Module]) -> Iterator[None]:
    """Restore the parameters and buffers of models, and their gradients, after the block."""
    modules = {module for model in models for module in model.modules()}
    tensors = [t for m in modules for t in (*parameters_of(m).values(), *buffers_of(m).values()) if t is not None]
    saved = [(t, t._version, t.detach().clone(), t.grad, None if t.grad is None else t.grad.clone()) for t in tensors]
    places = [(buffers_of(m), name, t) for m in modules for name, t in buffers_of(m).items()]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, value, grad, was in saved:
                if tensor._version != version:
                    tensor.copy_(value)
                tensor.grad = grad
                if grad is not None:
                    grad.copy_(was)
        for table, name, tensor in places:
            table[name] = tensor
