"""One step of a training, looked at: hooks for as long as it lasts, and what they have seen."""

from __future__ import annotations

import dataclasses
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..core.dtypes import is_half
from ..core.torch_compat import (
    DisableTorchFunction,
    backward_pass_id,
    functorch_level,
    is_fake,
    jit_tracing_state,
    tree_flatten,
    values_of,
)
from ..findings.watching import numbers_behind
from ..gradients.ledger import get_grads
from ..kernels.shards import local
from ..kernels.storage import join
from ..kernels.tensor_table import Number
from ..observe.compiled import compiled_code_eager
from ..observe.names import ROOT
from .survey import About, Callers, Inputs, Survey, Surveyed, can_survey, spread

__all__ = ["Hook", "Named", "SampledStep"]

_NOT_LOOKED_AT = -1  # in place of a number

Named = Sequence[tuple[str, torch.Tensor]]
"""Parameters with their names."""


class SampledStep:
    """The record of one step. It begins when it is made.

    Args:
        index: which step it is.
        root: its forward passes begin passes.
        modules: those to look at, with their names.
        outputs: whether to look at what they return.
        output_grads: whether to look at the gradients of that.
        graded: whether forward passes without gradients are none of the step's.
        count: how many elements of each tensor to sample.
        live_scale: gives the tensor that losses are multiplied by at the moment; None if that is not known.
    """

    def __init__(
        self,
        index: int,
        root: nn.Module,
        modules: Sequence[tuple[str, nn.Module]],
        *,
        outputs: bool,
        output_grads: bool,
        graded: bool,
        count: int,
        live_scale: Callable[[], torch.Tensor | None],
    ) -> None:
        self._index = index
        self._outputs, self._output_grads, self._graded = outputs, output_grads, graded
        self._count = count
        self._survey = Survey(count)
        self._live_scale = live_scale
        self._scale: torch.Tensor | None = None
        self._before: list[_Numbers] = []
        self._calls: tuple[Counter[str], Counter[str]] = (Counter(), Counter())  # forward passes, and recomputed ones
        self._done: set[About] = set()
        self._returned = _Known()
        self._entered = _Known()
        self._open: list[tuple[str, tuple[int, ...]]] = []  # the modules that run, and what went into them
        self._closed = False
        self._hooks: list[RemovableHandle] = []
        # What is compiled has no hooks. Whoever never imported the compiler has compiled nothing.
        self._is_eager = bool(outputs or output_grads) and "torch._dynamo" in sys.modules
        if self._is_eager:
            compiled_code_eager.__enter__()
        if outputs or output_grads:
            self._hooks = [m.register_forward_hook(Hook(functools.partial(self._output, name))) for name, m in modules]
            if outputs:  # before others, which may cast: what another module returned is known
                for name, module in modules:
                    enter = Hook(functools.partial(self._enter, name))
                    self._hooks.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            self._hooks.append(root.register_forward_pre_hook(Hook(self._begin_pass), prepend=True))

    def close(self) -> None:
        """The step is over: remove the hooks."""
        self._closed = True
        if self._is_eager:
            compiled_code_eager.__exit__()
        while self._hooks:
            self._hooks.pop().remove()

    def finish(self, skipped: torch.Tensor | None) -> tuple[list[Surveyed], Inputs]:
        """Count what was seen; ``skipped`` as for ``Survey.finish``."""
        return self._survey.finish(self._scale, skipped), self._survey.finish_inputs()

    def note_scale(self, scale: torch.Tensor | None) -> None:
        """Remember the loss scale as it is now, unless it is known."""
        if self._scale is None and scale is not None:
            self._scale = scale.detach().clone()

    # ---- parameters

    def add_gradients(self, params: Named, *, scaled: bool) -> None:
        """Look at the gradients that parameters have now; ``scaled`` says whether the loss scale is in them."""
        for (name, param), grad in zip(params, get_grads([p for _, p in params]), strict=True):
            if grad is not None:
                values = values_of(grad.coalesce()) if grad.is_sparse else grad
                if can_survey(values):
                    about, dtype = About(self._index, name, "grad"), _computed(param, grad)
                    self._survey.add(about, values, dtype=dtype, scale="in" if scaled else "out")

    @torch.no_grad()
    def sample_gradients(self, params: Named, inverse: Number) -> None:
        """Sample the gradients that parameters have now, multiplied by ``inverse``; the rest is known of them."""
        for name, param in params:
            grad = param.grad
            if grad is not None and can_survey(grad):
                values = spread(grad, self._count).float() * inverse
                about, numel = About(self._index, name, "grad"), local(grad).numel()
                self._survey.add_values(about, _computed(param, grad), numel, values, scale="out")

    @torch.no_grad()
    def before_update(self, optimizer: torch.optim.Optimizer, params: Named) -> None:
        """Keep a sample of the numbers that the step will change."""
        groups: dict[tuple[Any, ...], list[tuple[str, torch.Tensor]]] = {}
        for name, param in params:
            if can_survey(param) and param.grad is not None:
                kinds = [number.dtype for number in numbers_behind(optimizer, param)]
                groups.setdefault((param.device, *kinds), []).append((name, param))
        self._before = [_Numbers(optimizer, each, self._count) for each in groups.values()]

    @torch.no_grad()
    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare them with what they are after the step, unless masters were made in it."""
        for before in self._before:
            after = _Numbers(optimizer, before.params, self._count)
            if after.values.dtype is before.values.dtype:
                dtype = before.values.dtype
                delta = after.values.to(torch.promote_types(dtype, torch.float32)) - before.values
                for kind, values in (("weight", before.values), ("update", delta)):
                    for (name, param), sample in zip(before.params, values.split(before.lengths), strict=True):
                        self._survey.add_values(About(self._index, name, kind), dtype, local(param).numel(), sample)
        self._before = []

    # ---- hooks

    def _begin_pass(self, module: nn.Module, args: Any) -> None:
        if backward_pass_id() == -1:
            for calls in self._calls:
                calls.clear()
            self._done.clear()
            self._returned.clear()
            self._entered.clear()
            self._open.clear()

    def enter_root(self, root: nn.Module, args: Any, kwargs: Any) -> None:
        """To be called where the step begins inside of a forward pass, for which the hooks come too late."""
        if self._outputs:
            self._enter(ROOT, root, args, kwargs)

    def _is_looked_at(self) -> bool:
        return not (self._closed or (self._graded and not torch.is_grad_enabled()) or _is_traced())

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._is_looked_at() and backward_pass_id() == -1:
            self._open.append((name, tuple(map(self._input, _tensors((args, kwargs))))))

    def _input(self, tensor: torch.Tensor) -> int:
        """The number of what goes into a module. It is looked at if no module has returned it, nor got it before."""
        number = self._returned.get(tensor)
        number = self._entered.get(tensor) if number is None else number
        if number is None:
            with DisableTorchFunction():
                number = self._survey.add_input(tensor)
            self._entered.add(tensor, number)
        return number

    def _callers(self, name: str) -> Callers:
        """The modules that run, and this one, which is about to return, first. Those that an error has ended do not."""
        places = [i for i, (each, _) in enumerate(self._open) if each == name]
        if not places:
            return ()
        callers = tuple(reversed(self._open[: places[-1] + 1]))
        del self._open[places[-1] :]
        return callers

    def _output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        recomputed = backward_pass_id() != -1  # by a checkpoint
        if not self._is_looked_at():
            return
        callers = () if recomputed else self._callers(name)
        calls = self._calls[recomputed]
        call, calls[name] = calls[name], calls[name] + 1
        for i, tensor in enumerate(_tensors(output)):
            if self._returned.get(tensor) is not None:
                continue
            about = About(self._index, f"{name}[{i}]" if i else name, "output", call)
            number = _NOT_LOOKED_AT
            if self._outputs and about not in self._done:
                with DisableTorchFunction():
                    number = self._survey.add(about, tensor, callers=callers)
            self._returned.add(tensor, number)
            self._done.add(about)
            if self._output_grads and tensor.requires_grad:
                hook = functools.partial(self._gradient, about._replace(tensor="output_grad"))
                self._hooks.append(tensor.register_hook(hook))

    def _gradient(self, about: About, grad: torch.Tensor) -> None:
        if not self._closed and can_survey(grad):
            self.note_scale(self._live_scale())
            with DisableTorchFunction():
                self._survey.add(about, grad, scale="in")


class _Known:
    """Tensors of one pass, with their numbers, as long as nobody writes to them."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}

    def add(self, tensor: torch.Tensor, number: int) -> None:
        """Remember a tensor."""
        self._found[id(tensor)] = weakref.ref(tensor), _version(tensor), number

    def get(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor; None if it is unknown, or has been written to since."""
        known, version, number = self._found.get(id(tensor), (None, -1, -1))
        return number if known is not None and known() is tensor and version == _version(tensor) else None

    def clear(self) -> None:
        """Forget all."""
        self._found.clear()


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Hook:
    """A function as a hook of a module. In a copy or pickle of the module it does nothing: that one is not watched."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Call the function."""
        self._function(*args)

    def __reduce__(self) -> tuple[type[Hook], tuple[Callable[..., None]]]:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def _is_traced() -> bool:
    return functorch_level() is not None or jit_tracing_state() is not None or torch.compiler.is_compiling()


class _Numbers:
    """A sample of the numbers behind parameters, whose masters are of one kind, in one tensor."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Named, count: int) -> None:
        self.params = params
        columns = zip(*([spread(n, count) for n in numbers_behind(optimizer, p)] for _, p in params), strict=True)
        parts = [list(column) for column in columns]
        self.lengths = [sample.numel() for sample in parts[0]]
        joined = [torch.cat(samples) for samples in parts]
        self.values = join(*joined) if len(joined) == 2 else joined[0]


def _tensors(output: Any) -> Iterable[torch.Tensor]:
    if dataclasses.is_dataclass(output):
        output = list(vars(output).values())
    return [t for t in tree_flatten(output)[0] if can_survey(t) and not is_fake(t)]


def _computed(param: torch.Tensor, grad: torch.Tensor) -> torch.dtype:
    """In which dtype a backward pass computed a gradient, which may have become wider since."""
    return param.dtype if is_half(param) else grad.dtype
