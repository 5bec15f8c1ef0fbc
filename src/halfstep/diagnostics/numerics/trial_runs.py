"""Trial runs of one step: each begins with the same weights, buffers and random numbers, and leaves no trace.

During a run the model has copies of its parameters and buffers, so that its gradients do not change and no hook of a
parameter runs. The run stops before gradients are unscaled or an optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...casting import modules
from ...casting.scope import NO_CASTING, OpCasting
from ...core.dtypes import HALF_DTYPES
from ...core.errors import UsageError
from ...core.policy import Policy
from ...kernels.shards import is_sharded
from ...parameters.held_masters import master_of
from ...stepping.attached import observers
from ...stepping.prepare import prepare_model
from ...stepping.scaled_backward import before_unscaling
from ...torch_internals.torch_compat import buffers_of, hook_tables, parameters_of

__all__ = ["as_candidate", "as_reference", "refuse", "run_step"]


class _Ended(BaseException):
    """Raised when the step reaches its loss scaler or its optimizer."""


@contextmanager
def _copies(model: nn.Module, value_of: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Replace a model's parameters and buffers by the given values within the block; hooks and class may change too."""
    places: list[tuple[Any, str, Any]] = []
    hooks: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    made: dict[int, torch.Tensor] = {}
    cls = type(model)
    try:
        for module in model.modules():
            hooks += [(table, dict(table)) for table in hook_tables(module)]
            # What delayed scales come from; a step sets a new dict.
            places += [(m.history, "latest", m.history.latest) for m in [vars(module).get("_products")] if m]
            for name, tensor in [*parameters_of(module).items(), *buffers_of(module).items()]:
                if tensor is not None:
                    places.append((module, name, tensor))
                    if id(tensor) not in made:
                        made[id(tensor)] = _copy(tensor, value_of(tensor))
                    setattr(module, name, made[id(tensor)])
        yield
    finally:
        for module, name, tensor in places:
            setattr(module, name, tensor)
        for table, before in hooks:
            table.clear()
            table.update(before)
        object.__setattr__(model, "__class__", cls)


def _copy(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    value = value.clone() if value.data_ptr() == tensor.data_ptr() else value
    made = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
    made.__dict__.update(tensor.__dict__)
    return made


@contextmanager
def as_reference(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give a model weights in one wide dtype within the block, from masters if there are any, and disable casts.

    Args:
        model: any module, even one prepared at a level.
        dtype: torch.float32 or torch.float64.
    """

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        master = master_of(tensor)
        value = (tensor if master is None else master).detach()
        return value.to(dtype) if value.is_floating_point() and value.dtype.itemsize < dtype.itemsize else value

    with _copies(model, wide), OpCasting(**NO_CASTING.settings):
        modules.remove_hooks(model)
        yield


@contextmanager
def as_candidate(model: nn.Module, policy: Policy | None) -> Iterator[None]:
    """Apply a policy to a model, and to code outside the model, within the block.

    Args:
        model: any module.
        policy: None leaves the model as it is.
    """
    with ExitStack() as stack:
        if policy is None:
            stack.enter_context(_copies(model, torch.Tensor.detach))
        else:
            stack.enter_context(as_reference(model, torch.float32))
            half = policy.compute_dtype if policy.compute_dtype in HALF_DTYPES else None
            devices = modules.device_types([model])
            casting = OpCasting(
                half, policy.op_lists, enabled=policy.casts_ops, devices=devices, retries=policy.retries_ops
            )
            prepare_model(model, policy, casting=casting, wide_grads=policy.master_weights)
            stack.enter_context(casting)
        yield


def run_step(
    model: nn.Module, step: Callable[[], Any], scale: float, begin_backward: Callable[[torch.Tensor], None]
) -> bool:
    """Run the forward and backward pass of a step.

    Args:
        model: the model that the step trains.
        step: a function without arguments. If it returns a loss whose graph still exists, the backward pass runs here.
        scale: the factor for this loss.
        begin_backward: a function to call with the gradient of this loss, which is the scale.

    Returns:
        True if the backward pass ran here, with the scale.
    """
    with ExitStack() as stack:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            stack.enter_context(model.no_sync())
        stack.enter_context(_ending_early())
        try:
            loss = step()
        except _Ended:
            return False
        if any(p.grad is not None for p in model.parameters()) or not isinstance(loss, torch.Tensor):
            return False
        if loss.grad_fn is None or loss.numel() != 1:
            return False
        root = torch.full_like(loss, scale)
        begin_backward(root)
        loss.backward(root)
    return True


@contextmanager
def _ending_early() -> Iterator[None]:
    """End a step, within the block, just before gradients are unscaled or an optimizer steps."""
    scaler: Any = torch.amp.GradScaler
    unscale, scaler.unscale_ = scaler.unscale_, _end
    before_unscaling.append(_end)
    hook = register_optimizer_step_pre_hook(_end)
    ender: Any = SimpleNamespace(before_step=_end, after_step=_end)
    observers.append(ender)  # for attached optimizers, whose step checks the model before torch's hooks run
    try:
        yield
    finally:
        observers.remove(ender)
        hook.remove()
        before_unscaling.remove(_end)
        scaler.unscale_ = unscale


def _end(*_: Any) -> None:
    raise _Ended


def refuse(model: nn.Module) -> None:
    """Refuse a model whose weights cannot be replaced by copies.

    Raises:
        UsageError: for a sharded model.
    """
    sharded = next((name for name, p in model.named_parameters() if is_sharded(p)), None)
    if sharded is not None:
        raise UsageError(
            f"compare_step runs a model on copies of its weights, and {sharded} is sharded (FSDP2). Compare the model "
            "before fully_shard, or two saved runs: halfstep.numerics.Monitor(...).save and halfstep.numerics.compare."
        )
