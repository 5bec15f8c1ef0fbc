"""Training steps recorded as CUDA graphs and replayed: the host launches one or two graphs instead of every kernel.

A step is recorded in two parts, so that batches of several kinds share the second part::

    passes:  inputs in fixed places  ->  loss, gradients and overflow flag in fixed places     one graph a kind of batch
    update:  gradients and flag in fixed places  ->  weights, state, loss scale                one graph

The first batches of each kind run ordinary steps, in which libraries choose their algorithms and allocate memory.
Recording runs nothing; a recording is replayed at once, so every step trains. Each call compares the surroundings of
the graphs (``_compare_surroundings``) and discards all recordings if they changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd.graph import increment_version

from ...casting.current import clear_cache
from ...core.errors import UsageError
from ...core.inner_optimizers import params_of
from ...optimizers.base import FusedOptimizer
from ...parameters.held_masters import sync_held_masters
from ...parameters.ledger import get_grads, set_grads
from ...stepping.attached import attached_to, observers
from ...stepping.backward import any_overflow
from ...stepping.ranks.ddp_sync import BackwardRecord
from ...torch_internals.torch_compat import step_hooks, tree_flatten, tree_unflatten
from .recording import CudaGraph, GradientSlot
from .signature import PLAIN, Signature
from .surroundings import RecordableStep, surroundings

__all__ = ["GraphedSteps"]

logger = logging.getLogger("halfstep")

_WARM_UP = 3  # ordinary steps for each kind of batch, as torch's notes on CUDA graphs recommend
_MOST_GRAPHS = 16
_MOST_CHANGES = 8

T = TypeVar("T")


@dataclass
class _Passes:
    """The recorded passes of one kind of batch."""

    graph: CudaGraph
    inputs: list[Any]
    loss: torch.Tensor
    signature: Signature


class StepCount:
    """A hook that counts the calls of an optimizer's step. Replays do not call it."""

    def __init__(self) -> None:
        self.taken = 0

    def __call__(self, *_: Any) -> None:
        self.taken += 1

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> StepCount:
        """Return the counter of an optimizer, which all ``GraphedSteps`` of this optimizer share."""
        count = next((hook for hook in step_hooks(optimizer) if isinstance(hook, cls)), None)
        if count is None:
            count = cls()
            optimizer.register_step_post_hook(count)
        return count


class _Refused(Exception):  # noqa: N818 - not an error: the step runs in another way
    """The reason why a step cannot be recorded."""


class GraphedSteps:
    """Runs the steps of a ``TrainStep`` by replaying graphs where possible.

    Args:
        step: the ``TrainStep`` to record.
    """

    def __init__(self, step: RecordableStep) -> None:
        self._step = step
        self._stream: Any = None
        self._pool: Any = None
        self._surroundings: tuple[dict[str, object], object] | None = None
        self._changes: list[str] = []  # for each change of the surroundings, what changed
        self._steps = StepCount.of(step.optimizer)
        self._forget()

    def _forget(self) -> None:
        self._passes: dict[int, _Passes] = {}
        self._slot: GradientSlot | None = None  # where the passes leave the gradients for the update
        self._update: CudaGraph | None = None
        self._rates: list[tuple[torch.Tensor | None, list[float]]] = []
        # The step count after the latest step that read the gradients from where graphs leave them; -1 for none.
        self._steps_at_update = -1

    def __call__(self, batch: tuple[Any, ...], signature: Signature, *, first: bool, last: bool) -> torch.Tensor:
        """Take one step.

        Args:
            batch: the batch of the step.
            signature: the signature of the batch; receives how the step ran.
            first: True if no earlier call left gradients for the step.
            last: True if the optimizer steps at the end of this call.

        Returns:
            The detached loss, in a new tensor.
        """
        params = self._params()
        device = params[0].device if params else torch.device("cpu")
        reason = CudaGraph.obstacle(device) or self._obstacle(batch, params)
        if not (first and last):
            reason = reason or "gradients accumulate over several calls"
        if reason is not None:
            return self._plain(batch, signature, reason, last=last)
        with CudaGraph.stream(device, self._stream) as self._stream:
            if signature.calls > _WARM_UP:
                try:
                    return self._graphed(batch, signature, params)
                except _Refused as refused:
                    reason = str(refused)
            return self._plain(batch, signature, reason, last=True)

    # ---- without a graph

    def _plain(self, batch: tuple[Any, ...], signature: Signature, reason: str | None, *, last: bool) -> torch.Tensor:
        before = signature.reason
        signature.runs, signature.reason = "eager", None
        loss = self._step.backward(batch, signature, last=last)
        if last:
            self._step.update()
        if reason is not None:
            signature.reason = reason
            if reason != before:
                logger.warning("TrainStep(cuda_graph=True) takes steps without a graph: %s", reason)
        return loss

    # ---- with graphs

    def _graphed(self, batch: tuple[Any, ...], signature: Signature, params: list[torch.Tensor]) -> torch.Tensor:
        self._compare_surroundings(params)
        if any(p.grad is not None for p in params):
            raise _Refused("parameters have gradients from before the step")
        leaves, structure = tree_flatten(batch)
        passes = self._passes.get(id(signature))
        if passes is None:
            passes = self._record_passes(leaves, structure, signature)
        for place, value in zip(passes.inputs, leaves, strict=True):
            if isinstance(value, torch.Tensor):
                place.copy_(value, non_blocking=True)
        passes.graph.replay()
        loss = passes.loss.clone()
        signature.runs, signature.reason = "CUDA graph", None
        signature.replays += 1
        self._graphed_update()
        return loss

    def _record_passes(self, leaves: list[Any], structure: Any, signature: Signature) -> _Passes:
        if len(self._passes) >= _MOST_GRAPHS:
            raise _Refused(f"{_MOST_GRAPHS} kinds of batches already have graphs")
        places = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in leaves]

        def passes() -> tuple[torch.Tensor, GradientSlot]:
            loss = self._step.backward(tree_unflatten(places, structure), signature, last=True)
            grads, flag = self._gradients()
            slot = self._slot or GradientSlot(grads, flag)
            if not slot.accepts(grads, flag):
                raise _Refused("its gradients have other dtypes or shapes than the gradients of earlier graphs")
            slot.take(grads, flag)
            return loss, slot

        clear_cache()  # a graph must cast weights anew in each replay, and no other code may use its casts
        try:
            graph, (loss, self._slot) = self._record(passes)
        finally:
            self._step.optimizer.zero_grad(set_to_none=True)  # no gradients: nothing ran
            clear_cache()
        made = self._passes[id(signature)] = _Passes(graph, places, loss, signature)
        return made

    def _graphed_update(self) -> None:
        """Step the optimizer from the gradients in the slot."""
        if self._steps_at_update != self._steps.taken:
            # One ordinary step tells the optimizer where the gradients are; this needs copies from the host.
            self._update = None
            self._assign_gradients()
            self._step.update()
            self._steps_at_update = self._steps.taken
            return
        if self._update is None:
            self._assign_gradients()
            try:
                with self._rates_on_device():
                    self._update, _ = self._record(self._step.update)
            except _Refused as refused:
                raise UsageError(
                    f"TrainStep(cuda_graph=True): the step of {type(self._step.optimizer).__name__} cannot be recorded "
                    f"({refused}), and is half recorded now. Make it capturable, or use cuda_graph=False."
                ) from refused
            self._steps_at_update = self._steps.taken
        elif (attached := attached_to(self._step.optimizer)) is not None:
            attached.counts["calls"] += 1  # the recording already counted as one call
        for group, (rate, latest) in zip(self._step.optimizer.param_groups, self._rates, strict=True):
            if rate is not None and (lr := float(group["lr"])) != latest[0]:
                latest[0] = lr
                rate.fill_(lr)
        self._update.replay()
        increment_version(self._params())  # invalidate cached casts of the weights
        sync_held_masters()

    def _record(self, function: Callable[[], T]) -> tuple[CudaGraph, T]:
        graph = CudaGraph(self._pool)
        try:
            result = graph.record(function)
        except RuntimeError as error:
            raise _Refused(str(error).strip().splitlines()[0]) from error
        self._pool = graph.pool
        return graph, result

    @contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        """Make learning rates tensors within the block, so that replays read them."""
        optimizer = self._step.optimizer
        dtype = torch.float64 if isinstance(optimizer, FusedOptimizer) else torch.float32  # torch expects it
        given = [group["lr"] for group in optimizer.param_groups]
        self._rates = []
        for group, lr in zip(optimizer.param_groups, given, strict=True):
            there = isinstance(lr, torch.Tensor) and lr.device.type != "cpu"
            device = group["params"][0].device if group["params"] else None
            rate = None if there else torch.full((), float(lr), dtype=dtype, device=device)
            self._rates.append((rate, [float("nan") if rate is None else float(lr)]))
            group["lr"] = lr if rate is None else rate
        try:
            yield
        finally:
            for group, lr in zip(optimizer.param_groups, given, strict=True):
                group["lr"] = lr

    # ---- the gradients of the parameters

    def _params(self) -> list[torch.Tensor]:
        return params_of(self._step.optimizer)

    def _gradients(self) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
        """Return the parameters' gradients, and the flag that a pass since the last step overflowed."""
        attached = attached_to(self._step.optimizer)
        records = [] if attached is None else attached.window.records
        return get_grads(self._params()), any_overflow(records) if records else None

    def _assign_gradients(self) -> None:
        """Assign the gradients that a replay left in the slot to the parameters."""
        assert self._slot is not None
        pairs = [(p, g) for p, g in zip(self._params(), self._slot.grads, strict=True) if g is not None]
        set_grads([p for p, _ in pairs], [g for _, g in pairs])
        attached = attached_to(self._step.optimizer)
        if attached is not None and self._slot.flag is not None:
            attached.window.records = [BackwardRecord(self._slot.flag, None, shared=True)]

    # ---- changes that graphs cannot see

    def _obstacle(self, batch: tuple[Any, ...], params: list[torch.Tensor]) -> str | None:
        """Return the reason why steps cannot be recorded now; None if they can."""
        leaves, _ = tree_flatten(batch)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device != params[0].device:
                return f"a tensor of the batch is on {leaf.device}; move it to {params[0].device} before"
            if not isinstance(leaf, (torch.Tensor, *PLAIN)):
                return f"the batch has an item of type {type(leaf).__name__}, which may change unseen"
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            return "ranks exchange gradients"
        mine = set(map(id, params))
        if any(
            p.requires_grad and id(p) not in mine for m in self._step.modules() for p in m.parameters(recurse=False)
        ):
            return "the model has trainable parameters that the optimizer does not step"
        if observers or any(hook is not self._steps for hook in step_hooks(self._step.optimizer)):
            return "hooks or observers watch steps, which replays do not call"
        if len(self._changes) > _MOST_CHANGES:
            return f"values that the graphs had recorded changed {len(self._changes)} times ({self._changes[-1]})"
        return self._step.unrecordable()

    def _compare_surroundings(self, params: list[torch.Tensor]) -> None:
        """Discard all graphs if a value changed that replays do not read themselves."""
        before, self._surroundings = self._surroundings, surroundings(self._step, params)
        now = self._surroundings[0]
        if before is not None and (changed := [name for name, value in now.items() if value != before[0][name]]):
            self._changes.append(", ".join(changed))
            self._forget()
