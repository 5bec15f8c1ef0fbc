"""Trial runs of one step. Each begins with the same weights, buffers and random numbers, and leaves no trace.

During a run the model has copies of its parameters and buffers. So the model's own gradients do not change, and no hook
on a parameter runs. The run is stopped before gradients are unscaled or an optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..casting import modules
from ..casting.scope import NO_CASTING, OpCasting
from ..core.dtypes import HALF_DTYPES
from ..core.errors import UsageError
from ..core.policy import Policy
from ..core.torch_compat import buffers_of, hook_tables, parameters_of
from ..gradients.master_registry import master_of
from ..kernels.shards import is_sharded
from ..stepping.attached import observers
from ..stepping.prepare import prepare_model
from ..stepping.scaled_backward import before_unscaling

__all__ = ["as_candidate", "as_reference", "refuse", "run_step"]


class _Ended(BaseException):
    """The step has come to its loss scaler or its optimizer."""


@contextmanager
def _copies(model: nn.Module, value_of: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Within the block a model has other parameters and buffers, of these values, and may get hooks or a class."""
    places: list[tuple[nn.Module, str, torch.Tensor]] = []
    hooks: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    made: dict[int, torch.Tensor] = {}
    cls = type(model)
    try:
        for module in model.modules():
            hooks += [(table, dict(table)) for table in hook_tables(module)]
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
    """Within the block a model has weights in one wide dtype, from their masters if they have some, and casts nothing.

    Args:
        model: any module; one that was brought up at a level too.
        dtype: torch.float32 or torch.float64.
    """

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        master = master_of(tensor)
        value = (tensor if master is None else master).detach()
        return value.to(dtype) if value.is_floating_point() and value.dtype.itemsize < dtype.itemsize else value

    with _copies(model, wide), NO_CASTING:
        modules.remove_hooks(model)
        yield


@contextmanager
def as_candidate(model: nn.Module, policy: Policy | None) -> Iterator[None]:
    """Within the block a model, and what runs outside of it, computes by a policy.

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
            lists = policy.op_lists
            casting = OpCasting(half, lists, enabled=lists is not None, devices=modules.device_types([model]))
            prepare_model(model, policy, casting=casting, wide_grads=policy.master_weights)
            stack.enter_context(casting)
        yield


def run_step(
    model: nn.Module, step: Callable[[], Any], scale: float, begin_backward: Callable[[torch.Tensor], None]
) -> bool:
    """Run forward and backward pass of a step.

    Args:
        model: that it trains.
        step: a function without arguments. If it returns a loss whose graph is still there, its backward pass is run.
        scale: that loss is multiplied by this.
        begin_backward: is given the gradient of that loss, which is the scale.

    Returns:
        Whether the backward pass was run here, with the scale.
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
    """Within the block a step ends where gradients are about to be unscaled, or an optimizer is about to step."""
    scaler: Any = torch.amp.GradScaler
    unscale, scaler.unscale_ = scaler.unscale_, _end
    before_unscaling.append(_end)
    hook = register_optimizer_step_pre_hook(_end)
    ender: Any = SimpleNamespace(before_step=_end, after_step=_end)
    observers.append(ender)  # of attached optimizers, whose step looks at the model before torch's hooks run
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
    """Refuse a model whose weights cannot be exchanged for copies.

    Raises:
        UsageError: for one that is sharded.
    """
    sharded = next((name for name, p in model.named_parameters() if is_sharded(p)), None)
    if sharded is not None:
        raise UsageError(
            f"compare_step runs a model on copies of its weights, and {sharded} is sharded (FSDP2). Compare the model "
            "before fully_shard, or two saved runs: halfstep.numerics.Monitor(...).save and halfstep.numerics.compare."
        )
