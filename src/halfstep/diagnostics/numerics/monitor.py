"""``Monitor``: samples statistics of a training's tensors at every n-th step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import nn

from ...casting.scope import NO_CASTING
from ...core.checks import check_count, check_kind
from ...core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ...core.inner_optimizers import params_of, unwrap
from ...formats.findings import RULES as OF_FORMATS
from ...parameters.async_reader import capturing
from ...stepping.attached import AttachedOptimizer, attached_to, observers
from ...torch_internals.torch_compat import backward_pass_id, scale_of
from ..findings.checking import findings_of
from ..findings.facts import Facts
from ..findings.finding import Finding, log, logger
from ..observe.names import ROOT, parts_of, qualified_names
from ..observe.row import Row, save_rows
from ..observe.watch import Hook
from .alarms import Alarms
from .report import write_report
from .sampled_step import Named, SampledStep
from .survey import TensorSampler

__all__ = ["TENSORS", "Monitor"]

TENSORS = ("output", "output_grad", "grad", "update")
"""The kinds of tensors that a monitor can sample."""

_LEAST = 256  # minimum sample size of a tensor with as many elements
_SHOWN = ("amax", "rms", "zeros", "overflow", "nan", "headroom", "subnormal", "flushed")


class Monitor:
    """Sample statistics of a training's tensors at every n-th step.

    ::

        monitor = halfstep.numerics.Monitor(model, optimizer, every=100)
        with monitor:
            train()
        monitor.report("numerics.html")

    A sampled step covers the outputs of modules and their gradients, the gradients of parameters, and the update of the
    values behind them (masters, if there are any). Between sampled steps the modules have no hooks.

    The monitor does not wait for the device: it fetches statistics after they have arrived. Compiled modules run
    eagerly at sampled steps. With an optimizer, forward passes without gradients do not count, and neither does a step
    that torch's GradScaler skips: its passes count for the next step. The monitor does not see gradients that are freed
    in the backward pass (``attach(model, release=True)``) or computed by a closure, replays of CUDA graphs, and modules
    of TorchScript. A monitor stays alive until ``detach``.

    Args:
        model: any module; the modules in a wrapper (DistributedDataParallel) are named without the wrapper.
        optimizer: the optimizer of its parameters, before or after ``amp`` prepares it. Without one, each forward pass
            of the model is a step, and there are no "grad" and "update".
        every: the number of steps from one sampled step to the next; the first step is sampled. None samples the first
            20 steps, then every 100th.
        tensors: a subset of ``TENSORS``. "update" also gives rows of "weight": the values before the step.
        sample: the number of elements per step whose exponents are counted. All tensors share them equally, but each
            gets at least 256.
        scaler: the ``torch.amp.GradScaler`` that scales the losses, if there is one. The monitor finds halfstep's
            scalers itself.

    Raises:
        ArgumentTypeError: for a model or an optimizer of another type.
        ArgumentValueError: for any other value of an argument.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        every: int | None = 100,
        tensors: Sequence[str] = TENSORS,
        sample: int = 65536,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(f"Monitor takes a torch.nn.Module, not {type(model).__name__}.")
        self._optimizer = None if optimizer is None else unwrap(optimizer)
        if self._optimizer is not None and not isinstance(self._optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(f"Monitor takes a torch.optim.Optimizer, not {type(optimizer).__name__}.")
        for name, number in (("every", 100 if every is None else every), ("sample", sample)):
            check_count(name, number)
        if isinstance(tensors, str) or not tensors or not set(tensors) <= set(TENSORS):
            raise ArgumentValueError(f"tensors={tensors!r} must be a tuple of some of {TENSORS}.")
        check_kind("scaler of Monitor", scaler, (torch.amp.GradScaler, NoneType), "a torch.amp.GradScaler or None")
        self._model = model
        self._every = every
        self._kinds = frozenset(tensors)
        self._sample, self._scaler = sample, scaler
        self._root = model
        self._modules: dict[nn.Module, str] = {}
        self._names: dict[int, str] = {}
        self._params: list[torch.Tensor] = []  # keeps the parameters' ids unique
        self._hooks: list[Any] = []  # while attached
        self._next = 0
        self._open: SampledStep | None = None
        self._stepping = False
        self._attached: AttachedOptimizer | None = None
        self._steps: list[TensorSampler] = []
        self._ready = 0  # number of steps whose numbers have arrived
        self._alarms = Alarms()

    def __repr__(self) -> str:
        kinds = f"{type(self._model).__name__}, {type(self._optimizer).__name__}"
        return f"Monitor({kinds}, every={self._every}, attached={bool(self._hooks)}, steps={self._next})"

    # ---- on and off

    def attach(self) -> Monitor:
        """Start to monitor at the next step.

        Raises:
            UsageError: if the monitor is attached already.
        """
        if self._hooks:
            raise UsageError("This Monitor is attached already; detach() it first.")
        self._look_at_model()
        optimizer = self._optimizer
        if optimizer is None:
            before = Hook(self._before_forward)
            self._hooks = [self._root.register_forward_pre_hook(before, prepend=True, with_kwargs=True)]
            return self
        self._hooks = [
            optimizer.register_step_pre_hook(Hook(self._before_plain_step)),
            optimizer.register_step_post_hook(Hook(self._after_plain_step)),
        ]
        observers.append(self)
        self._begin()
        return self

    def detach(self) -> None:
        """Stop monitoring. The samples remain, including the samples of an unfinished step.

        All hooks are removed first, because the final count can fail.
        """
        while self._hooks:
            self._hooks.pop().remove()
        if self in observers:
            observers.remove(self)
        self._next += self._finish(None)
        self._poll(wait=True)

    def __enter__(self) -> Monitor:
        return self.attach()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.detach()
        except Exception as own:  # for example from a device that the error left unusable
            if error is None:
                raise
            logger.warning("Monitor was detached after %s, and could not count: %r", type(error).__name__, own)

    # ---- results

    def latest(self) -> dict[str, float]:
        """Return the statistics of the newest sampled step that has arrived, for TensorBoard, wandb and so on.

        Does not wait for the device. The keys are ``numerics/{module}/{tensor}/{what}``, for example
        ``numerics/blocks.3.mlp/output/headroom``. The dict is empty until the first step has arrived.
        """
        self._poll(wait=False)
        rows = self._steps[self._ready - 1].rows() if self._ready else []
        names = (f"numerics/{row.module}{f'[{row.call}]' if row.call else ''}/{row.tensor}" for row in rows)
        named = zip(names, rows, strict=True)
        return {f"{name}/{what}": getattr(row, what) for name, row in named for what in _SHOWN}

    def rows(self) -> list[Row]:
        """Return all rows so far, in the order of the steps, and within a step in order of execution.

        Several backward passes of one step are merged. Waits for outstanding statistics.
        """
        self._poll(wait=True)
        return [row for step in self._steps for row in step.rows()]

    def findings(self) -> list[Finding]:
        """Return the findings from the rows so far, the likely cause first: HS116, HS117, HS120 and HS121.

        For layers with a recipe (``amp.initialize(products=)``), HS128 to HS131 follow: what rounding lost in the
        latest sampled step.

        Waits for outstanding statistics from the device.
        """
        self._poll(wait=True)
        return self._alarms.findings() + findings_of(Facts(self._root, []), OF_FORMATS)

    def save(self, path: str | Path) -> None:
        """Write all rows as JSON lines, for ``halfstep.numerics.compare`` and ``load_rows``."""
        save_rows(path, self.rows())

    def report(self, path: str | Path) -> None:
        """Write one self-contained HTML page with the pictures of all rows, their tables and ``findings()``.

        Args:
            path: the file; missing folders are created.

        Raises:
            ArgumentValueError: if there are no rows.
        """
        write_report(self.rows(), path, findings=[each for each in self.findings() if each.code in OF_FORMATS])

    # ---- steps

    def before_step(self, attached: AttachedOptimizer) -> None:
        """Receive the start of a step of an optimizer under ``amp``."""
        if attached.optimizer is self._optimizer:
            self._stepping, self._attached = True, attached
            self._begin_update(attached.grad_scale)

    def after_step(self, attached: AttachedOptimizer) -> None:
        """Receive the end of a step, taken or skipped."""
        if attached.optimizer is self._optimizer:
            self._stepping = False
            self._end_update(attached.was_skipped)

    def _before_plain_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._observed(optimizer):
            self._begin_update(getattr(optimizer, "grad_scale", None))

    def _after_plain_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._observed(optimizer):
            self._end_update(getattr(optimizer, "found_inf", None))

    def _observed(self, optimizer: torch.optim.Optimizer) -> bool:
        """True if ``before_step`` sees this step: the optimizer went through ``amp``, or a GradScaler steps it."""
        return self._stepping or attached_to(optimizer) is not None

    def _begin_update(self, grad_scale: torch.Tensor | None) -> None:
        step, optimizer = self._open, self._optimizer
        if step is None or optimizer is None:
            return
        step.note_scale(self._live_scale() if grad_scale is None else grad_scale)
        params = self._named(params_of(optimizer))
        with NO_CASTING:
            if "grad" in self._kinds:
                step.add_gradients(params, "out" if grad_scale is None else "in")
            if "update" in self._kinds:
                step.before_update(optimizer, params)

    def _end_update(self, skipped: torch.Tensor | None) -> None:
        if self._open is not None:
            with NO_CASTING:
                self._open.after_update()
        self._finish(skipped)
        self._next += 1
        self._poll(wait=False)
        self._begin()

    def _before_forward(self, root: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a step with a forward pass of the whole model, if there is no optimizer."""
        if backward_pass_id() == -1:
            self._finish(None)
            self._poll(wait=False)
            self._begin()
            if self._open is not None:
                self._open.begin_inside(root, args, kwargs)
            self._next += 1

    def _begin(self) -> None:
        skips = self._next >= 20 and self._next % 100 if self._every is None else self._next % self._every
        if skips or any(capturing(p.device) for p in self._root.parameters()):
            return
        self._look_at_model()
        tensors = len(self._modules) * len(self._kinds & {"output", "output_grad"})
        graded = self._optimizer is not None
        if graded:
            tensors += len(self._names) * (("grad" in self._kinds) + 2 * ("update" in self._kinds))
        self._open = SampledStep(
            self._next,
            self._root,
            self._modules,
            self._kinds,
            graded=graded,
            count=max(_LEAST, self._sample // max(tensors, 1)),
            live_scale=self._live_scale,
        )

    def _finish(self, skipped: torch.Tensor | None) -> bool:
        """End the sampled step, if there is one; True if the step had any rows."""
        step, self._open = self._open, None
        if step is None:
            return False
        step.close()
        with NO_CASTING:
            survey = step.finish(skipped)
        self._steps += [survey] if survey else []  # empty if the step had only begun
        return bool(survey)

    def _look_at_model(self) -> None:
        """Update names and parameters: user code may have added layers or replaced parameters."""
        modules = {name: module for module, name in qualified_names(self._model).items()}
        self._root = modules[ROOT]  # inside all wrappers
        self._modules = {module: name for name, module in modules.items()}
        self._names, self._params = parts_of(self._modules), list(self._root.parameters())

    def _poll(self, *, wait: bool) -> None:
        while self._ready < len(self._steps) and (wait or self._steps[self._ready].ready):
            self._alarms.add(self._steps[self._ready].rows())
            self._ready += 1
            log(self._alarms.news(), by="halfstep.numerics.Monitor")

    def _live_scale(self) -> torch.Tensor | None:
        if self._scaler is not None:
            return scale_of(self._scaler)
        attached = attached_to(self._optimizer) or self._attached
        return None if attached is None else attached.window.scale

    def _named(self, params: Iterable[torch.Tensor]) -> Named:
        return [(self._names[id(p)], p) for p in params if id(p) in self._names]
