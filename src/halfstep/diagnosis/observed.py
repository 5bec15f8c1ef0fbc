"""The record of a few training steps, from which ``rules.py`` and ``judge`` make findings.

The record hears of modules and functions by a ``Watch``, of steps by the hooks of optimizers and scalers, and has a
``Monitor`` on every pair of a model and an optimizer from the first forward pass on.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..amp.grad_scaler import GradScaler
from ..core.inner_optimizers import params_of
from ..diagnostics.findings.checking import findings_of
from ..diagnostics.findings.facts import Facts
from ..diagnostics.findings.finding import Finding, logger
from ..diagnostics.findings.forward import Forward
from ..diagnostics.numerics import Monitor
from ..diagnostics.numerics.monitor import TENSORS
from ..diagnostics.observe.ops import FunctionCall
from ..diagnostics.observe.watch import ModuleCall
from ..parameters.held_masters import master_of, write_master
from ..parameters.table import record_of
from ..stepping.attached import AttachedOptimizer, attached_to, observers
from ..stepping.diagnosis import ClippedGradients
from ..torch_internals.torch_compat import DisableTorchFunction, tree_flatten
from .within_steps import on_grid, scaled_gradients, without_gradient

__all__ = ["STEPS", "Ended", "Observed", "Pass"]

STEPS = 8
"""The number of steps that are observed, without skipped steps."""


class Ended(BaseException):
    """Raised to end a script after its last observed step; not an ``Exception``, which the script may catch."""


@dataclass(eq=False)
class Pass:
    """The first forward pass of a step.

    Attributes:
        args: the positional arguments of the model.
        kwargs: the keyword arguments.
        values: the parameters and buffers of the model, with their values, and their masters' values, before the pass.
        random: the state of torch's random numbers before the pass.
        loss: the latest loss of the step.
        output: True if the model returned finite values; None if it has not returned.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    random: torch.Tensor
    loss: float | None = None
    output: bool | None = None

    def put_back(self) -> None:
        """Write the values from before the pass into the model."""
        for tensor, value, master in self.values:
            tensor.data.copy_(value if master is None or (rounded := write_master(tensor, master)) is None else rounded)


class Observed(Forward):
    """A record of training steps.

    Args:
        model: the model; None for the modules that are called and that an optimizer trains.
        optimizers: the optimizers; none for all that have parameters of the model.
        ends: True to raise ``Ended`` after the last step.

    Attributes:
        models: the outermost modules that were called and are trained.
        optimizers: their optimizers.
        scalers: the loss scalers that were called.
        monitors: a monitor for each pair.
        steps: the number of finished steps.
        skipped: the number of optimizer steps that were skipped.
        history: the losses of the steps.
        bad: the first pass with a loss or an output that is not finite.
        last: the latest pass.
        found: findings so far.
        kept: the number of passes that began with gradients of the step before.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizers: Sequence[torch.optim.Optimizer] = (), *, ends: bool = False
    ) -> None:
        super().__init__(model)
        self._given, self._ends = model, ends
        self.models: list[nn.Module] = []
        self.optimizers = list(optimizers)
        self.scalers: list[Any] = []
        self.monitors: list[Monitor] = []
        self.steps = self.skipped = 0
        self.history: list[float] = []
        self.bad: Pass | None = None
        self.last: Pass | None = None
        self.first: Pass | None = None
        self.found: list[Finding] = []
        self.others: list[tuple[nn.Module, int]] = []
        self.wrappers: dict[nn.Module, bool] = {}  # DistributedDataParallel, and True if it sent gradients
        self._scaled_by: list[Any] = []  # the scalers, and the optimizers that they unscaled, since the last step
        self._unscaled: list[Any] = []
        self._checks: dict[int, ClippedGradients] = {}
        self.warned: list[str] = []
        self.repeats_random_numbers = self.stays_on_grid = False
        self._random = torch.get_rng_state()
        self._passes = self.kept = self._began = 0  # the last is the number of steps before the latest backward pass
        self._removals: list[Callable[[], None]] = []

    @property
    def model(self) -> nn.Module | None:
        """The model that has most of the trained parameters."""
        held = {*map(id, params_of(*self.optimizers))}
        return max(self.models, key=lambda each: sum(id(p) in held for p in each.parameters()), default=None)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Record, within the block, what this thread trains. Warnings of halfstep become findings, logs are silent."""
        with ExitStack() as stack:
            stack.enter_context(_patched(torch.amp.GradScaler, self._of_scaler))
            stack.enter_context(_patched(GradScaler, self._of_scaler))
            stack.callback(register_optimizer_step_pre_hook(self._before_any).remove)
            stack.callback(register_optimizer_step_post_hook(lambda *_: self.end_step()).remove)
            stack.callback(register_module_forward_pre_hook(self._see_wrapper).remove)
            observers.append(self)
            stack.callback(observers.remove, self)
            quiet, logger.disabled = logger.disabled, True
            stack.callback(setattr, logger, "disabled", quiet)
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            stack.enter_context(self.watching())
            try:
                yield
            finally:
                with DisableTorchFunction():
                    for end in [*self._removals, *(monitor.detach for monitor in self.monitors)]:
                        end()
                self.warned = [str(each.message) for each in caught]

    # ---- modules and functions

    def entered(self, call: ModuleCall, args: Any, kwargs: Any) -> None:
        """Receive the start of a module call; the outermost call of a model that is trained begins a pass."""
        model, grad = call.of, torch.is_grad_enabled() and not call.recomputed
        if grad and self.running and self.running[0] is call and self._monitor_if_trained(model):
            with DisableTorchFunction():
                self._begin_pass(model, args, kwargs)

    def returned(self, call: ModuleCall, args: Any, output: Any) -> None:
        """Receive the end of a module call."""
        if self.steps == 0:
            super().returned(call, args, output)
        if self.last is not None and self.last.output is None and call.of in self.models:
            tensors = [t for t in tree_flatten(output)[0] if isinstance(t, torch.Tensor) and t.is_floating_point()]
            with DisableTorchFunction():
                self.last.output = all(bool(t.isfinite().all()) for t in tensors)

    def _note_function(self, call: FunctionCall) -> None:
        if self.steps == 0:
            super()._note_function(call)
        if call.function is torch.Tensor.backward and not self._scaled_by:
            with DisableTorchFunction():
                self._see_loss(call.args[0])

    def _monitor_if_trained(self, model: nn.Module) -> bool:
        """Attach monitors to a model at its first call, if it is trained; return True if it is."""
        if any(model is each for each in self.models):
            return True
        trains = self._optimizers_of(model)
        if not trains and self._given is None:
            return False
        self.models.append(model)
        own = set(map(id, model.parameters()))
        mine = [p for p in params_of(*trains) if id(p) in own and p.requires_grad]
        self._removals += [p.register_hook(partial(self._see_kept, p)).remove for p in mine[-1:]]
        for i, optimizer in enumerate(trains):
            if not any(optimizer is each for each in self.optimizers):
                self.optimizers.append(optimizer)
            kinds = TENSORS if i == 0 else TENSORS[2:]
            self.monitors.append(Monitor(model, optimizer, every=1, tensors=kinds).attach())
        if not trains:
            self.monitors.append(Monitor(model, every=1).attach())
        return True

    def _optimizers_of(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        """List the optimizers of a model's parameters, or else the optimizers of hand-made masters of its shapes."""
        own, shapes = set(map(id, model.parameters())), [p.shape for p in model.parameters()]
        known = dict.fromkeys([*self.optimizers, *(_live(torch.optim.Optimizer) if self._given is None else ())])
        of_masters = [each for each in known if [p.shape for p in params_of(each)] == shapes]
        return [each for each in known if not own.isdisjoint(map(id, params_of(each)))] or of_masters

    def _begin_pass(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._passes += 1
        if self._passes > 1:
            return
        self._scaled_by, self._unscaled = [], []
        random = torch.get_rng_state()
        if self.steps == 1 and self.first is not None:
            drew = not torch.equal(self._random, self.first.random)
            self.repeats_random_numbers = drew and torch.equal(random, self.first.random)
            self.stays_on_grid = on_grid(model)
        pairs = [(t, master_of(t)) for t in (*model.parameters(), *model.buffers())]
        values = [(t, t.detach().clone(), None if master is None else master.clone()) for t, master in pairs]
        self.last = Pass(args, kwargs, values, random)
        if self.first is None:
            self.first = self.last
            own = {id(each) for one in self.models for each in one.modules()}
            self.others = [(each, _versions(each)) for each in _live(nn.Module) if id(each) not in own]

    def _see_wrapper(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, nn.parallel.DistributedDataParallel) and torch.is_grad_enabled():
            sends = module.require_backward_grad_sync
            self.wrappers[module] = self.wrappers.get(module, False) or sends

    def _see_loss(self, loss: Any) -> None:
        if self.steps == 0:
            self.note_loss(loss)
        if self.last is not None and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            attached = next(filter(None, map(attached_to, self.optimizers)), None)
            scale = None if attached is None else attached.window.scale
            self.last.loss = float(loss.detach()) / (1.0 if scale is None else float(scale))

    def _see_kept(self, param: torch.Tensor, _: torch.Tensor) -> None:
        """Look, at the first backward pass after a step, for a gradient that no ``zero_grad`` has cleared."""
        old = param.grad if (saved := record_of(param).saved) is None else saved  # a block sets gradients aside
        with DisableTorchFunction():
            self.kept += self._began < self.steps and old is not None and bool(old.any())
        self._began = self.steps

    def written(self) -> list[nn.Module]:
        """Return the modules beside the models whose parameters were written, such as averages."""
        return [module for module, versions in self.others if _versions(module) != versions]

    # ---- steps

    def before_step(self, attached: AttachedOptimizer) -> None:
        """Receive the start of a step under ``amp``."""

    def after_step(self, attached: AttachedOptimizer) -> None:
        """Receive the end of a step under ``amp``, which may have been skipped."""
        skipped = attached.was_skipped
        self.skipped += skipped is not None and bool(skipped)
        self.end_step()

    def end_step(self) -> None:
        """End a step, if a pass came since the last one."""
        if not self._passes or self.last is None:
            return
        self._passes, self._random = 0, torch.get_rng_state()
        self.history += [] if self.last.loss is None else [self.last.loss]
        if self.bad is None and not (self.last.output is not False and abs(self.last.loss or 0.0) < float("inf")):
            self.bad = self.last
        if self.steps == 0 and (model := self.model) is not None:
            with DisableTorchFunction():
                self.found += findings_of(Facts(model, self.optimizers, self.scalers, forward=self))
                self.found += without_gradient(model)
        self.steps += 1
        if self._ends and not self.wants_more():
            raise Ended

    def wants_more(self) -> bool:
        """True as long as fewer than ``STEPS`` steps were taken; skipped ones are added, up to three times as many."""
        return self.steps - self.skipped < STEPS and self.steps < 3 * STEPS

    def _before_any(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Look, at a step, for gradients that are still multiplied by a loss scale."""
        if self._scaled_by and not any(optimizer is each for each in self._unscaled) and optimizer in self.optimizers:
            self.found += scaled_gradients(optimizer, self._scaled_by[0])
        elif attached_to(optimizer) is None and not self._scaled_by and optimizer in self.optimizers:
            beside = [each.session for one in self.optimizers if (each := attached_to(one)) is not None]
            scalers = [s for session in beside for s in getattr(session, "loss_scalers", ()) if not s.neutral]
            for scaler in scalers[:1]:
                self.found += scaled_gradients(optimizer, scaler)

    def _of_scaler(self, name: str, scaler: Any, given: Any) -> None:
        """Hear of a scaler that scales a loss, unscales or steps an optimizer, or updates its scale."""
        if not scaler.is_enabled():
            return
        if name == "scale":
            if not any(scaler is each for each in self.scalers):
                self.scalers.append(scaler)
            self._scaled_by.append(scaler)
            self._see_loss(given)
        elif name == "update":
            self.end_step()
        elif not any(given is each for each in self._unscaled):
            self._unscaled.append(given)
            self._look_for_clipping(scaler, given)

    def _look_for_clipping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if type(scaler) is torch.amp.GradScaler and self._scaled_by:  # halfstep's scaler looks itself
            checks = self._checks.setdefault(id(optimizer), ClippedGradients())
            params = params_of(optimizer)
            scale = torch.tensor(scaler.get_scale(), dtype=torch.float32, device=params[0].device)
            checks.check(params, scale, by="GradScaler")


def _live(kind: type) -> list[Any]:
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _versions(module: nn.Module) -> int:
    return sum(p._version for p in module.parameters())


@contextmanager
def _patched(cls: Any, hear: Callable[[str, Any, Any], None]) -> Iterator[None]:
    """Report calls of a scaler class's methods, before they run, within the block; ``update`` after it has run."""
    own = {name: vars(cls)[name] for name in ("scale", "unscale_", "step", "update") if name in vars(cls)}

    def hearing(name: str, function: Any) -> Any:
        def call(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if name != "update":
                hear(name, scaler, args[0] if args else next(iter(kwargs.values()), None))
            result = function(scaler, *args, **kwargs)
            if name == "update":
                hear(name, scaler, None)
            return result

        return call

    try:
        for name, function in own.items():
            setattr(cls, name, hearing(name, function))
        yield
    finally:
        for name, function in own.items():
            setattr(cls, name, function)
