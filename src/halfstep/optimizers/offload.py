"""Parameters on a device that the host steps: masters and state are in host memory, and so is the arithmetic.

How the copies are ordered:

1. ``fetch`` is called where the gradients are complete. The side stream ``down`` waits for what the current stream has
   queued so far. That has written the gradients, and it has read the weights for the last time.
2. ``down`` copies weights and gradients to the host. Their memory is not given away before (``record_stream``).
3. A thread of the host waits for these copies, and steps.
4. It queues the copies of the new weights on the side stream ``up``, which need not wait for anything: 3 was after 1.
5. ``join``, at the end of the backward pass, waits for the thread, and lets the current stream wait for ``up``.

So a step never meets a weight of another moment. The weights go to the host with their gradients, because somebody may
have written to them since. On a CPU nothing runs late, and the same calls copy at once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from typing import Any, NamedTuple

import torch

from ..gradients.ledger import set_grads
from .param_rows import check_gradient

__all__ = ["HOST", "Fetched", "Offload"]

HOST = torch.device("cpu")


def _runs_late(device: torch.device) -> bool:
    """Whether work on a device is queued, and is done later than the host goes on."""
    return device.type != "cpu"


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


class Fetched(NamedTuple):
    """Copies of tensors that are on their way to the host.

    Attributes:
        copies: the copies of parameters.
        grads: the copies of their gradients, in the same order; None where there is none.
        numbers: the copies of other tensors, in the order in which they were given; None for None.
        arrived: the event after which all are there; None if they are.
    """

    copies: list[torch.Tensor]
    grads: list[torch.Tensor | None]
    numbers: list[torch.Tensor | None]
    arrived: torch.Event | None


class _States(Mapping[torch.Tensor, dict[str, Any]]):
    """``optimizer.state``, looked up by the copies of parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer, params: Mapping[int, torch.Tensor]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._params = params

    def __getitem__(self, copy: torch.Tensor) -> dict[str, Any]:
        return self._optimizer().state[self._params[id(copy)]]  # type: ignore[union-attr, no-any-return]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._params.values())

    def __len__(self) -> int:
        return len(self._params)


class Offload:
    """The copies of an optimizer's parameters in host memory, and the thread that steps them.

    What travels lies in pinned memory: weights and gradients. Masters and state never do, so theirs is not pinned.

    Args:
        optimizer: a fused one. This must not outlive it.
        device: where its parameters are.

    Attributes:
        state: ``optimizer.state`` by the copies.
    """

    def __init__(self, optimizer: Any, device: torch.device) -> None:
        self._optimizer: Callable[[], Any] = weakref.ref(optimizer)
        self._device = device
        self._down = torch.Stream(device) if _runs_late(device) else None
        self._up = torch.Stream(device) if _runs_late(device) else None
        self._copies: dict[int, torch.Tensor] = {}  # by the identity of the parameter
        self._params: dict[int, torch.Tensor] = {}  # by the identity of the copy
        self._worker = ThreadPoolExecutor(1, "halfstep offload")
        self._running: deque[Future[None]] = deque()
        self.state = _States(optimizer, self._params)

    @property
    def copies(self) -> list[torch.Tensor]:
        """The copies of the parameters, in host memory."""
        return list(self._copies.values())

    def adopt(self, params: Iterable[torch.Tensor]) -> None:
        """Forget the copies of all parameters but these."""
        known = set(map(id, params))
        for gone in self._copies.keys() - known:
            del self._params[id(self._copies.pop(gone))]

    def fetch(self, params: Sequence[torch.Tensor], *numbers: torch.Tensor | None) -> Fetched:
        """Begin to copy parameters that have gradients, these gradients, and other tensors to the host.

        Raises:
            SparseGradient, ArgumentTypeError: see ``check_gradient``.
        """
        for param in params:
            if param.grad is not None:
                check_gradient(param, param.grad)
        self._optimizer().begin_masters(params)
        copies = [self._copy_of(param) for param in params]
        there = [(param, copy) for param, copy in zip(params, copies, strict=True) if param.grad is not None]
        passing = [*(param.grad for param in params), *numbers]
        rooms = [None if tensor is None else self._room(tensor) for tensor in passing]
        sources = [*(param.detach() for param, _ in there), *(tensor for tensor in passing if tensor is not None)]
        targets = [*(copy for _, copy in there), *(room for room in rooms if room is not None)]
        if self._down is None:
            for target, source in zip(targets, sources, strict=True):
                _copy(target, source)
            return Fetched(copies, rooms[: len(params)], rooms[len(params) :], None)
        ready, arrived = torch.Event(self._device), torch.Event(self._device)
        ready.record(torch.accelerator.current_stream(self._device))
        self._down.wait_event(ready)
        with self._down:
            for target, source in zip(targets, sources, strict=True):
                _copy(target, source)
        for tensor in sources:
            tensor.record_stream(self._down)
        arrived.record(self._down)
        return Fetched(copies, rooms[: len(params)], rooms[len(params) :], arrived)

    @staticmethod
    def arrive(fetched: Fetched) -> list[torch.Tensor]:
        """Wait for what was fetched. Returns the copies of the parameters, with gradients."""
        if fetched.arrived is not None:
            fetched.arrived.synchronize()
        for copy, grad in zip(fetched.copies, fetched.grads, strict=True):
            if grad is None:
                copy.grad = None
            else:
                set_grads([copy], [grad])
        return fetched.copies

    def give_back(self, copies: Sequence[torch.Tensor]) -> None:
        """Copies have stepped: write them to their parameters, and free their gradients."""
        with nullcontext() if self._up is None else self._up:
            for copy in copies:
                copy.grad = None
                _copy(self._params[id(copy)].detach(), copy)

    def submit(self, step: Callable[..., None], *args: Any) -> None:
        """Call a function in the thread, after those that were given before, with the context variables of now."""
        self._running.append(self._worker.submit(copy_context().run, step, *args))

    def join(self) -> None:
        """Wait for the thread, and let the current stream wait for the weights that it has written.

        Raises:
            Exception: the first that a step in the thread has raised.
        """
        errors = []
        while self._running:
            errors.append(self._running[0].exception())
            self._running.popleft()
        if self._up is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._up)
        for error in errors:
            if error is not None:
                raise error

    # ---- inside

    def _copy_of(self, param: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get(id(param))
        if copy is None or copy.dtype is not param.dtype or copy.shape != param.shape:
            if copy is not None:
                del self._params[id(copy)]
            copy = self._copies[id(param)] = self._room(param.detach())
            self._params[id(copy)] = param
        return copy

    def _room(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device=HOST, pin_memory=self._down is not None)
