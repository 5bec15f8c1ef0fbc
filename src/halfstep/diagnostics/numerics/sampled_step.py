"""A sampled step of a training: its hooks, and the tensors that the hooks have seen."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...core.dtypes import is_half
from ...parameters.ledger import get_grads
from ...torch_internals.compiler_compat import is_traced
from ...torch_internals.torch_compat import DisableTorchFunction, is_fake, tree_flatten, values_of
from ..observe.names import ROOT
from ..observe.notes import Notes
from ..observe.samples import column
from ..observe.updates import Change, before_step
from ..observe.watch import CallWatch, ModuleCall
from .survey import Callers, LossScale, Param, TensorSampler, can_survey

__all__ = ["Named", "SampledStep"]

_NOT_LOOKED_AT = -1  # instead of an index

Named = Sequence[tuple[str, torch.Tensor]]
"""Pairs (name, parameter)."""


class SampledStep:
    """The record of one step, which listens to the calls of modules. It begins when it is constructed.

    Args:
        index: the index of the step.
        root: the module whose forward passes begin passes.
        modules: the modules to sample, with their names.
        kinds: the kinds of tensors to sample, of which "output" and "output_grad" need hooks of the modules.
        graded: True to ignore forward passes without gradients.
        count: the number of elements to sample of each tensor.
        live_scale: a function that returns the current loss scale as a tensor; None if the scale is not known.
    """

    def __init__(
        self,
        index: int,
        root: nn.Module,
        modules: Mapping[nn.Module, str],
        kinds: Collection[str],
        *,
        graded: bool,
        count: int,
        live_scale: Callable[[], torch.Tensor | None],
    ) -> None:
        self._root = root
        self._modules = modules
        self._outputs, self._output_grads, self._graded = "output" in kinds, "output_grad" in kinds, graded
        self._count = count
        self._survey = TensorSampler(count, index)
        self._live_scale = live_scale
        self._scale: torch.Tensor | None = None
        self._changes: Callable[[], Iterable[Change]] = tuple
        self._names: dict[int, str] = {}  # of the parameters in ``_changes``
        self._calls: tuple[dict[str, int], ...] = (defaultdict(int), defaultdict(int))  # forward, and recomputed ones
        self._done: set[tuple[str, int]] = set()
        self._seen = Notes[tuple[int, bool]](stay=False)  # index of a tensor, and True if a module returned it
        self._closed = False
        self._hooks: list[RemovableHandle] = []  # of outputs
        watched = {**modules, root: ROOT} if self._outputs or self._output_grads else {}
        self._watch = CallWatch(watched, modules=self).begin()

    def close(self) -> None:
        """End the step and remove the hooks."""
        self._closed = True
        self._watch.end()
        del self._watch  # breaks the reference cycle, which would keep the model
        while self._hooks:
            self._hooks.pop().remove()

    def finish(self, skipped: torch.Tensor | None) -> TensorSampler:
        """Count the samples; for ``skipped`` see ``TensorSampler.finish``."""
        self._survey.finish(self._scale, skipped)
        return self._survey

    def note_scale(self, scale: torch.Tensor | None) -> None:
        """Copy the current loss scale, unless it is known already."""
        if self._scale is None and scale is not None:
            self._scale = scale.detach().clone()

    # ---- parameters

    @torch.no_grad()
    def add_gradients(self, params: Named, scale: LossScale) -> None:
        """Sample the current gradients of parameters.

        Args:
            params: the parameters.
            scale: the relation of the values to the loss scale.
        """
        grads = get_grads([param for _, param in params])
        found: dict[torch.device, list[Param]] = defaultdict(list)
        for (name, param), grad in zip(params, grads, strict=True):
            values = values_of(grad.coalesce()) if grad is not None and grad.is_sparse else grad
            if grad is not None and can_survey(values):
                dtype = param.dtype if is_half(param) else grad.dtype  # the gradient may have been widened since
                found[values.device].append((name, dtype, values))
        for each in found.values():
            samples = column((grad for *_, grad in each), [self._count] * len(each)).float()
            self._survey.add_params("grad", each, samples, scale, whole=True)

    @torch.no_grad()
    def before_update(self, optimizer: torch.optim.Optimizer, params: Named) -> None:
        """Sample the values that the step will change."""
        self._names = {id(param): name for name, param in params}
        stepping = [param for _, param in params if can_survey(param) and param.grad is not None]
        self._changes = before_step(optimizer, stepping, [self._count] * len(stepping))

    @torch.no_grad()
    def after_update(self) -> None:
        """Sample the same values after the step, and add the updates."""
        for change in self._changes():
            dtype = change.before.dtype
            delta = change.after.to(torch.promote_types(dtype, torch.float32)) - change.before
            params = [(self._names[id(param)], dtype, param) for param in change.params]
            self._survey.add_params("weight", params, change.before.float())
            self._survey.add_params("update", params, delta.float())
        self._changes = tuple

    # ---- modules

    def begin_inside(self, root: nn.Module, args: Any, kwargs: Any) -> None:
        """Enter the root module, if the step begins inside a forward pass whose beginning the watch did not see."""
        self.entered(self._watch.enter(root, ROOT), args, kwargs)

    def entered(self, call: ModuleCall, args: Any, kwargs: Any) -> None:
        """Receive the start of a module call."""
        if call.recomputed:
            return
        if call.of is self._root:
            self._begin_pass()
        if self._outputs and call.of in self._modules and self._is_looked_at():
            with DisableTorchFunction():  # otherwise a casting mode would see each attribute access
                call.note = tuple(map(self._input, _tensors((*args, *kwargs.values()))))

    def returned(self, call: ModuleCall, args: Any, output: Any) -> None:
        """Receive the end of a module call."""
        if call.of in self._modules and not self._closed and (call.note is not None or self._is_looked_at()):
            with DisableTorchFunction():
                self._see_output(call, output)

    def _see_output(self, call: ModuleCall, output: Any) -> None:
        name, calls = call.name, self._calls[call.recomputed]
        number_of_call, calls[name] = calls[name], calls[name] + 1
        for i, tensor in enumerate(_tensors(output)):
            like, was_returned = self._seen.get(tensor) or (None, False)
            if was_returned:
                continue
            of, number = (f"{name}[{i}]" if i else name, number_of_call), _NOT_LOOKED_AT
            if self._outputs and of not in self._done:
                number = self._survey.add(of[0], "output", tensor, number_of_call, self._callers(call), like)
            self._seen.add(tensor, (number, True))
            self._done.add(of)
            if self._output_grads and tensor.requires_grad:
                self._hooks.append(tensor.register_hook(functools.partial(self._gradient, *of)))

    def _callers(self, call: ModuleCall) -> Callers:
        """List the module that just returned and the running ones, the outermost last, with the inputs of each."""
        running = () if call.note is None else (call, *reversed(self._watch.running))
        return tuple((each.name, each.note) for each in running if each.note is not None)

    def _begin_pass(self) -> None:
        for calls in self._calls:
            calls.clear()
        self._done.clear()
        self._seen.clear()

    def _is_looked_at(self) -> bool:
        return not (self._closed or is_traced() or (self._graded and not torch.is_grad_enabled()))

    def _input(self, tensor: torch.Tensor) -> int:
        """Return the index of a module's input; a tensor that no module returned or received before is sampled."""
        seen = self._seen.get(tensor)
        if seen is None:
            seen = self._survey.add_input(tensor), False
            self._seen.add(tensor, seen)
        return seen[0]

    def _gradient(self, name: str, call: int, grad: torch.Tensor) -> None:
        with DisableTorchFunction():
            if not self._closed and can_survey(grad):
                self.note_scale(self._live_scale() if self._scale is None else None)
                self._survey.add(name, "output_grad", grad, call)


def _tensors(output: Any) -> list[torch.Tensor]:
    if type(output) is torch.Tensor:  # the usual case; arguments come as tuples
        return [output] if can_survey(output) else []
    if type(output) is tuple:
        return [t for each in output for t in _tensors(each)]
    if output is None or isinstance(output, bool):
        return []
    if dataclasses.is_dataclass(output):
        output = list(getattr(output, "__dict__", {}).values())
    return [t for t in tree_flatten(output)[0] if can_survey(t) and not is_fake(t)]
