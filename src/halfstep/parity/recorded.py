"""One side of a comparison: its ops, recorded with a digest of all bits of each result."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.files import replacing
from ..diagnostics.findings.forward import same_random_numbers
from ..diagnostics.numerics.linked_rows import LinkedRow
from ..diagnostics.numerics.recording import Recorder
from ..diagnostics.observe.names import OUTSIDE, ROOT, qualified_names
from ..diagnostics.observe.ops import OpCall, tensors_in, widened, written
from ..diagnostics.observe.samples import can_sample
from ..diagnostics.observe.watch import CallWatch
from ..torch_internals.compiler_compat import compiled_from
from ..torch_internals.torch_compat import TorchDispatchMode, buffers_of, parameters_of, tree_flatten

__all__ = ["OUTPUT", "SideRun", "Wide", "run"]

OUTPUT = "(output)"
"""The name for what a side returns."""

_PART, _GROUP = 1 << 16, 64
"""The numbers that a digest reads at once, and that it adds before it mixes their sum."""
_FORMAT = "halfstep parity 4"


Facts = tuple[int, tuple[Any, ...]]
"""Facts about the op of a row: the number of rows when it began, and its arguments that are not tensors."""


class BitRecorder(Recorder):
    """Records the ops of one run; in place of a sketch, each row has a digest of the bits of all values.

    The digest is equal for equal numbers in different dtypes, and for all NaN.

    Args:
        keep: the indices of rows whose tensors to keep as a whole.
        alone: the run of the first row alone. Of each result only the part of this row's shape is looked at, which
            is at the beginning of all dimensions: the first row of a batch, without its padding. None looks at all.
    """

    def __init__(self, keep: Collection[int] = (), alone: SideRun | None = None) -> None:
        super().__init__(4096, torch.float64)
        self.facts: dict[int, Facts] = {}
        self.kept: dict[int, torch.Tensor] = {}
        self._keep = keep
        self._alone: dict[Any, list[torch.Size]] = defaultdict(list)
        for row in reversed(alone.rows if alone else ()):
            self._alone[row.module, row.op, row.index].append(row.shape)

    def notice(self, call: OpCall) -> None:
        """Record the result of an op, unless it is a view."""
        before = len(self.rows)
        super().notice(call)
        constants = tuple(x for x in tree_flatten((call.args, call.kwargs))[0] if isinstance(x, (int, float, str)))
        self.facts |= {i: (before, constants) for i in range(before, len(self.rows)) if self.rows[i].op == call.name}

    def begin(self, names: dict[nn.Module, str], *inputs: Any) -> None:
        """Record parameters and buffers, and the arguments of the run, which ops perhaps read as views."""
        super().begin(names)
        list(self._came_from(OUTSIDE, *inputs))

    def finish(self, output: Any) -> list[int]:
        """Record what the run returned, and fetch the samples; returns the rows of the outputs."""
        for i, tensor in enumerate(tensors_in(output)):
            if not can_sample(tensor):
                raise ArgumentTypeError(f"Output {i} is {tensor.layout} {tensor.dtype}: return dense values.")
            made = self._made.get(tensor.untyped_storage().data_ptr())
            known, inputs = (tensor.dtype, tensor.shape), () if made is None else (made,)
            self._write(LinkedRow(OUTPUT, "output", i, False, *known, *self._look(tensor), inputs), tensor, keep=True)
        self._fetch()
        return [i for i, row in enumerate(self.rows) if row.module == OUTPUT]

    def _has_row(self, tensor: torch.Tensor) -> bool:
        """True for tensors of all dtypes, as indices and masks decide on numbers."""
        return can_sample(tensor) and tensor.numel() > 0

    def _look(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute the sample and a digest of the numbers, which the same numbers have in every dtype."""
        digest = _digest(values := _real(tensor))
        if values.dtype.itemsize > 4 or not values.is_floating_point():
            wide = values if values.is_floating_point() else values.long()  # unsigned and bool have no difference
            # 0, which adds nothing to a digest, if float32 has the number
            rest = wide - wide.float().nan_to_num(0.0, 0.0, 0.0).to(wide.dtype)
            digest += _digest(rest.double().nan_to_num(0.0, 0.0, 0.0), torch.float64)
        return self._sample(values), digest.new_zeros(()), digest

    def _write(self, row: LinkedRow, tensor: torch.Tensor, keep: bool = False) -> None:
        seen = tensor
        if known := self._alone[row.module, row.op, row.index]:
            alone = known.pop()
            seen = tensor[tuple(map(slice, alone))] if len(alone) == tensor.dim() else tensor
            row.shape = seen.shape
            row.sample, row.amax, row.sketch = self._look(seen)
        if keep or len(self.rows) in self._keep:
            self.kept[len(self.rows)] = _real(seen).clone()
        super()._write(row, tensor)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor; of complex numbers their two parts."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()


@functools.cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    fixed, end = torch.Generator("cpu").manual_seed(0), 2**62
    return torch.randint(-end, end, (_PART // _GROUP,), generator=fixed, device="cpu", dtype=torch.int64).to(device) | 1


def _digest(values: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Sum the bits times fixed random odd numbers, modulo 2**64: all NaN are alike, and 0 adds nothing.

    A pair of float32 is read as one integer. The second of a pair reaches only the upper bits of a sum: the sums are of
    small groups, and are mixed before they are summed up.
    """
    odd, digest = _odd_numbers(values.device), torch.zeros((), device=values.device, dtype=torch.int64)
    for part in values.reshape(-1).split(_PART):  # which a cache holds
        part = part.to(dtype).nan_to_num(torch.nan, torch.inf, -torch.inf)
        if rest := len(part) % (2 * _GROUP):
            part = nn.functional.pad(part, (0, 2 * _GROUP - rest))
        sums = _product(part.view(torch.int64).view(-1, _GROUP), odd[:_GROUP])
        digest = digest * 0x2545F4914F6CDD1D + _product((sums ^ (sums >> 31)), odd[: len(sums)])
    return digest.reshape(1)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b if a.is_cpu else (a * b).sum(-1)  # GPUs have no products of integers


class Wide(TorchDispatchMode):
    """Computes in float64 from a row of a recorder on."""

    def __init__(self, start: int, recorder: BitRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder, self._start = recorder, start

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(self._recorder.rows) >= self._start and not func.is_view:
            args, kwargs = widened(args, kwargs, torch.float64, list(written(func, args, kwargs)))
        return func(*args, **kwargs)


@dataclass
class SideRun:
    """A recorded side.

    Attributes:
        name: the name in reports.
        rows: a row for each parameter, input and result of an op, in order of execution.
        facts: more about the op of a row.
        outputs: the rows of what the side returned.
        kept: whole tensors by row: of outputs, and of rows that were asked for. A saved run has none.
        again: runs the side again, with the keyword arguments of ``run``; None for a saved run.
    """

    name: str
    rows: list[LinkedRow]
    facts: dict[int, Facts]
    outputs: list[int]
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    again: Any = None

    def save(self, path: str | Path) -> None:
        """Save the run, to compare it in another process. The file has samples and digests, no whole tensors.

        Args:
            path: the file; missing folders are created, and an existing file is replaced as a whole.
        """
        rows = [{**vars(row), "cast": None, "source": None} for row in self.rows]
        with replacing(path) as file:
            torch.save((_FORMAT, self.name, rows, self.facts, self.outputs), file)

    @staticmethod
    def load(path: str | Path) -> SideRun:
        """Load a saved run.

        Raises:
            ArgumentValueError: for any other file, or a run that another version of halfstep saved in another format.
        """
        try:
            saved = torch.load(path, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError):
            saved = None
        if not isinstance(saved, tuple) or saved[0] != _FORMAT:
            raise ArgumentValueError(f"{path} has no run ({_FORMAT}); parity.record(...).save(path) writes one.")
        return SideRun(saved[1], [LinkedRow(**row) for row in saved[2]], *saved[3:])


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments: copies, also of objects in them, so that no side can change them."""
    tensors = {id(x): x.detach().clone().requires_grad_(x.requires_grad) for x in tensors_in(inputs)}
    copied = copy.deepcopy(inputs, tensors)
    if isinstance(copied, Mapping):
        return (), dict(copied)
    return (tuple(copied) if isinstance(copied, (tuple, list)) else (copied,)), {}


def _models_in(side: Callable[..., Any]) -> list[nn.Module]:
    """List the models that a callable uses: itself, or the models that it names."""
    inner: Any = compiled_from(side) or side
    values = [side, getattr(inner, "__self__", None)]
    if inspect.isfunction(function := getattr(inner, "__func__", inner)):
        values += [value for named in inspect.getclosurevars(function)[:2] for value in named.values()]
    return [value for value in values if isinstance(value, nn.Module)]


def run(name: str, side: Any, inputs: Any, below: Any = nullcontext, watched: bool = True, **how: Any) -> SideRun:
    """Run one side, recorded, from the same random state as the other.

    Weights, buffers, gradients and random state are as before afterwards.

    Args:
        name: the name in reports.
        side: the callable.
        inputs: the arguments.
        below: a function that takes the recorder and returns a mode to run below it.
        watched: False to record only what the side returns, so that compiled code runs as compiled.
        how: the arguments of ``BitRecorder``.

    Raises:
        UsageError: if the side raises.
        ArgumentTypeError: if it returns no tensor.
    """
    recorder = BitRecorder(**how)
    models = _models_in(side)
    names = qualified_names(side) if isinstance(side, nn.Module) else None
    args, kwargs = _arguments(inputs)
    with _as_before(models), same_random_numbers(nn.ModuleList(models)), below(recorder):
        if watched:
            recorder.begin(names or {}, args, kwargs)
        with CallWatch(names, ops=recorder.notice, casts=True) if watched else nullcontext():
            try:
                output = side(*args, **kwargs)
            except Exception as error:
                what = f"{name} raised {type(error).__name__}: {error}."
                raise UsageError(f"{what} Call it with these inputs by itself.") from error
    if not (outputs := recorder.finish(output)):
        raise ArgumentTypeError(f"{name} returns {type(output).__name__} without a tensor: return what to compare.")
    inside = [row for row in recorder.rows if row.module not in (OUTSIDE, OUTPUT)]
    if names is None and len({row.module.partition(".")[0] for row in inside}) == 1:
        for row in inside:  # leave out the class, as a function called only one outermost module
            row.module = row.module.partition(".")[2] or ROOT
    again = functools.partial(run, name, side, inputs, alone=how.get("alone"))
    return SideRun(name, recorder.rows, recorder.facts, outputs, recorder.kept, again)


@contextmanager
def _as_before(models: list[nn.Module]) -> Iterator[None]:
    """Restore the dense parameters and buffers of models, and their gradients, after the block."""
    tables: list[Any] = [table(m) for model in models for m in model.modules() for table in (parameters_of, buffers_of)]
    saved = [(of, name, x, x.detach().clone(), x.grad) for of in tables for name, x in of.items() if x is not None]
    try:
        for _, _, tensor, *_, grad in saved:
            tensor.grad = None if grad is None else grad.clone()
        yield
    finally:
        for table, name, tensor, value, grad in saved:
            table[name], tensor.grad = tensor, grad
            if not torch.equal(_bits(tensor), _bits(value)):  # the kernel of a batch norm writes without a new version
                tensor.detach().copy_(value)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers, which take a sixth of the time to compare; its last size must allow it."""
    sizes = tensor.shape[-1:].numel(), tensor.storage_offset()
    whole = tensor.dim() and tensor.is_contiguous() and not any(n * tensor.element_size() % 8 for n in sizes)
    return tensor.detach().view(torch.int64) if whole else tensor
