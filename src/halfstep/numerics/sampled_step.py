"""One step of a training, looked at: hooks for as long as it lasts, and what they have seen."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..core.compiler_compat import is_traced
from ..core.dtypes import dtype_name, is_half
from ..core.torch_compat import DisableTorchFunction, is_fake, tree_flatten, values_of
from ..gradients.ledger import get_grads
from ..kernels.shards import local
from ..kernels.tensor_table import Number
from ..observe.names import ROOT
from ..observe.notes import Notes
from ..observe.samples import sample
from ..observe.updates import Change, before_step
from ..observe.watch import ModuleCall, Watch
from .survey import About, Callers, Survey, can_survey

__all__ = ["Named", "SampledStep"]

_NOT_LOOKED_AT = -1  # in place of a number

Named = Sequence[tuple[str, torch.Tensor]]
"""Parameters with their names."""


class SampledStep:
    """The record of one step, which listens to the calls of modules. It begins when it is made.

    Args:
        index: which step it is.
        root: its forward passes begin passes.
        modules: the names of those to look at.
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
        modules: Mapping[nn.Module, str],
        *,
        outputs: bool,
        output_grads: bool,
        graded: bool,
        count: int,
        live_scale: Callable[[], torch.Tensor | None],
    ) -> None:
        self._index = index
        self._root = root
        self._modules = modules
        self._outputs, self._output_grads, self._graded = outputs, output_grads, graded
        self._count = count
        self._survey = Survey(count)
        self._live_scale = live_scale
        self._scale: torch.Tensor | None = None
        self._changes: Callable[[], Iterable[Change]] = tuple
        self._names: dict[int, str] = {}  # of the parameters in it
        self._calls: tuple[Counter[str], Counter[str]] = (Counter(), Counter())  # forward passes, and recomputed ones
        self._done: set[tuple[str, int]] = set()
        self._returned = Notes[int](stay=False)
        self._entered = Notes[int](stay=False)
        self._closed = False
        self._hooks: list[RemovableHandle] = []  # of outputs
        self._watch = Watch({**modules, root: ROOT} if outputs or output_grads else {}, modules=self).begin()

    def close(self) -> None:
        """The step is over: remove the hooks."""
        self._closed = True
        self._watch.end()
        del self._watch  # it refers to this, and both to the model
        while self._hooks:
            self._hooks.pop().remove()

    def finish(self, skipped: torch.Tensor | None) -> Survey:
        """Count what was seen; ``skipped`` as for ``Survey.finish``."""
        self._survey.finish(self._scale, skipped)
        return self._survey

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
                    about = self._about(name, "grad", values, _computed(param, grad))
                    self._survey.add(about, values, scale="in" if scaled else "out")

    @torch.no_grad()
    def sample_gradients(self, params: Named, inverse: Number) -> None:
        """Sample the gradients that parameters have now, multiplied by ``inverse``; the rest is known of them."""
        for name, param in params:
            grad = param.grad
            if grad is not None and can_survey(grad):
                values = sample(grad, self._count).float() * inverse
                about = self._about(name, "grad", grad, _computed(param, grad))
                self._survey.add_values(about, values, scale="out")

    @torch.no_grad()
    def before_update(self, optimizer: torch.optim.Optimizer, params: Named) -> None:
        """Keep a sample of the numbers that the step will change."""
        self._names = {id(param): name for name, param in params}
        stepping = [param for _, param in params if can_survey(param) and param.grad is not None]
        self._changes = before_step(optimizer, stepping, [self._count] * len(stepping))

    @torch.no_grad()
    def after_update(self) -> None:
        """Compare them with what they are after the step."""
        for change in self._changes():
            dtype = change.before.dtype
            delta = change.after.to(torch.promote_types(dtype, torch.float32)) - change.before
            for kind, values in (("weight", change.before.float()), ("update", delta.float())):
                for param, part in zip(change.params, values.split(change.lengths), strict=True):
                    self._survey.add_values(self._about(self._names[id(param)], kind, param, dtype), part)
        self._changes = tuple

    # ---- modules

    def begin_inside(self, root: nn.Module, args: Any, kwargs: Any) -> None:
        """To be called where the step begins inside of a forward pass, for which the watch comes too late."""
        self.entered(self._watch.enter(root, ROOT), args, kwargs)

    def entered(self, call: ModuleCall, args: Any, kwargs: Any) -> None:
        """A module is called."""
        if call.recomputed:
            return
        if call.of is self._root:
            self._begin_pass()
        if self._outputs and call.of in self._modules and self._is_looked_at():
            with DisableTorchFunction():  # a casting would hear of each attribute that is read
                call.note = tuple(map(self._input, _tensors((args, kwargs) if kwargs else args)))

    def returned(self, call: ModuleCall, args: Any, output: Any) -> None:
        """A module has returned."""
        if call.of not in self._modules or not self._is_looked_at():
            return
        with DisableTorchFunction():
            self._see_output(call, output)

    def _see_output(self, call: ModuleCall, output: Any) -> None:
        name, calls = call.name, self._calls[call.recomputed]
        number_of_call, calls[name] = calls[name], calls[name] + 1
        for i, tensor in enumerate(_tensors(output)):
            if self._returned.get(tensor) is not None:
                continue
            of, number = (f"{name}[{i}]" if i else name, number_of_call), _NOT_LOOKED_AT
            if self._outputs and of not in self._done:
                about = self._about(of[0], "output", tensor, tensor.dtype, number_of_call)
                number = self._survey.add(about, tensor, callers=self._callers(call))
            self._returned.add(tensor, number)
            self._done.add(of)
            if self._output_grads and tensor.requires_grad:
                self._hooks.append(tensor.register_hook(functools.partial(self._gradient, *of)))

    def _callers(self, call: ModuleCall) -> Callers:
        """The module that has just returned and those that run, the outermost last, with what went into each."""
        running = () if call.note is None else (call, *reversed(self._watch.running))
        return tuple((each.name, each.note) for each in running if each.note is not None)

    def _begin_pass(self) -> None:
        for calls in self._calls:
            calls.clear()
        self._done.clear()
        self._returned.clear()
        self._entered.clear()

    def _is_looked_at(self) -> bool:
        return not (self._closed or (self._graded and not torch.is_grad_enabled()) or is_traced())

    def _input(self, tensor: torch.Tensor) -> int:
        """The number of what goes into a module. It is looked at if no module has returned it, nor got it before."""
        number = self._returned.get(tensor)
        number = self._entered.get(tensor) if number is None else number
        if number is None:
            number = self._survey.add_input(tensor)
            self._entered.add(tensor, number)
        return number

    def _gradient(self, name: str, call: int, grad: torch.Tensor) -> None:
        with DisableTorchFunction():
            if not self._closed and can_survey(grad):
                self.note_scale(self._live_scale())
                self._survey.add(self._about(name, "output_grad", grad, grad.dtype, call), grad, scale="in")

    def _about(self, name: str, kind: str, tensor: torch.Tensor, dtype: torch.dtype, call: int = 0) -> About:
        return About(self._index, name, kind, call, dtype_name(dtype), local(tensor).numel())


def _tensors(output: Any) -> Iterable[torch.Tensor]:
    plain = (output,) if type(output) is torch.Tensor else output
    if type(plain) is tuple and all(type(each) is torch.Tensor for each in plain):  # as nearly always
        return [each for each in plain if can_survey(each)]
    if dataclasses.is_dataclass(output):
        output = list(vars(output).values())
    return [t for t in tree_flatten(output)[0] if can_survey(t) and not is_fake(t)]


def _computed(param: torch.Tensor, grad: torch.Tensor) -> torch.dtype:
    """In which dtype a backward pass computed a gradient, which may have become wider since."""
    return param.dtype if is_half(param) else grad.dtype
