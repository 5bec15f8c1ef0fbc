"""Forward pass, scaling of the loss and backward pass as one compiled graph.

The graph excludes the update on purpose: Inductor does not vectorize the int16 half of a split weight (torch 2.13; 16
to 29 times slower than the fused step on a CPU), and the fused step already is one compiled kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ...kernels.shards import is_sharded
from ...parameters.ledger import get_grads, set_grads
from ...torch_internals.compiler_compat import compile_errors, compile_with_autograd, own_code
from ...torch_internals.torch_compat import tensor_hooks
from .signature import Signature

__all__ = ["CompiledPasses"]

logger = logging.getLogger("halfstep")

Scaled = Callable[[torch.Tensor], AbstractContextManager[torch.Tensor]]


class CompiledPasses:
    """The compiled passes of one training step.

    If they cannot be one graph, the forward and backward passes are compiled separately, as by ``torch.compile``; if
    that fails as well, they run eagerly. The log reports this once.

    Args:
        loss: a function that computes the loss of a batch.
    """

    def __init__(self, loss: Callable[[tuple[Any, ...]], torch.Tensor]) -> None:
        self._loss = self._forward = loss
        self._params: list[torch.Tensor] = []
        self._whole = compile_with_autograd(self._passes)
        self._runs = "compiled"
        self._reason: str | None = None
        if self._whole is None:
            self._fall_back("in parts", f"torch {torch.__version__} cannot put a backward pass into a graph")

    def backward(
        self, batch: tuple[Any, ...], signature: Signature, params: list[torch.Tensor], scaled: Scaled, share: int
    ) -> torch.Tensor:
        """Run the passes, and leave the gradients in the parameters as ``loss.backward()`` would.

        Args:
            batch: the batch.
            signature: the signature of the batch; receives how the passes ran.
            params: the parameters that get gradients.
            scaled: makes the context manager around a backward pass.
            share: the divisor of the loss.

        Returns:
            The detached loss.
        """
        if self._runs == "compiled" and (obstacle := _obstacle(params)):
            self._fall_back("in parts", obstacle)
        runs, reason = self._runs, self._reason
        while True:
            try:
                if runs == "compiled":
                    loss = self._run_whole(params, batch, scaled, share)
                else:
                    loss = self._run_parts(batch, scaled, share, compiled=runs == "in parts")
                break
            except compile_errors() as error:
                if runs == "eager":  # raised by code that the model itself compiles
                    raise
                runs, reason = "in parts" if runs == "compiled" else "eager", _first_line(error)
        if runs != self._runs:  # the passes succeeded, so the batch was not the cause
            self._fall_back(runs, reason)
        signature.runs, signature.reason = runs, reason
        return loss

    def _run_whole(
        self, params: list[torch.Tensor], batch: tuple[Any, ...], scaled: Scaled, share: int
    ) -> torch.Tensor:
        assert self._whole is not None
        self._params = params
        # The graph starts from a gradient of 1.0, which the context multiplies by the loss scale.
        with scaled(torch.full((), 1 / share, dtype=torch.float32, device=params[0].device)) as scale:
            loss, grads = self._whole(scale, batch)
            _add_grads(params, grads)
        return loss

    def _passes(self, scale: torch.Tensor, batch: tuple[Any, ...]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run forward, scaling and backward; ``torch.compile`` compiles this function."""
        loss = self._loss(batch)
        scaled_loss = loss.float() * scale if loss.dtype.itemsize == 2 else loss * scale
        return loss.detach(), torch.autograd.grad(scaled_loss, self._params, allow_unused=True)

    def _run_parts(self, batch: tuple[Any, ...], scaled: Scaled, share: int, *, compiled: bool) -> torch.Tensor:
        if compiled and self._forward is self._loss:
            self._forward = torch.compile(own_code(self._loss))
        loss = (self._forward if compiled else self._loss)(batch)
        with scaled(loss / share if share > 1 else loss) as scaled_loss:
            scaled_loss.backward()
        return loss.detach()

    def _fall_back(self, runs: str, reason: str | None) -> None:
        self._runs, self._reason = runs, reason
        logger.warning("TrainStep(compiled=True) runs %s: %s", runs, reason)


def _obstacle(params: list[torch.Tensor]) -> str | None:
    """Return a reason, known before trying, why the passes of these parameters cannot be one graph; else None."""
    if not params:
        return "no parameter of the optimizer requires gradients"
    if any(map(is_sharded, params)) or (torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1):
        return "ranks exchange gradients during the backward pass, outside the graph"
    if any(map(tensor_hooks, params)):
        return "a parameter has hooks on its gradient, which a graph would not call"
    return None


def _first_line(error: Exception) -> str:
    """Return the first line of an error, without the backend name that Dynamo puts before it."""
    lines = [line for line in map(str.strip, str(error).splitlines()) if line and not line.endswith("raised:")]
    return lines[0] if lines else type(error).__name__


@torch.no_grad()
def _add_grads(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    """Add to parameters' gradients, as autograd does at the end of a backward pass; None adds nothing."""
    for param, present, grad in zip(params, get_grads(params), grads, strict=True):
        if grad is not None:
            dtype = getattr(param, "grad_dtype", None) or grad.dtype
            set_grads([param], [grad.to(dtype) if present is None else present.add_(grad)])
