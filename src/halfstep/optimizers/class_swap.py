"""The one place where the class of an optimizer changes: to a fused one, to one with our methods, and back."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..torch_internals.torch_compat import wrap_step

__all__ = ["counts_steps", "rebase"]

_HOOKED: Any = torch.optim.Optimizer.profile_hook_step(torch.optim.Optimizer.step)


def rebase(optimizer: Any, base: type, attached: Any = None) -> None:
    """Give an optimizer another class, put our methods before the methods of its class, or take our methods away.

    What torch and its schedulers do to the ``step`` of a class is done for the new one, too.

    Args:
        optimizer: any.
        base: the class of the optimizer from now on, apart from our methods.
        attached: the ``AttachedOptimizer`` of an optimizer that is to have our methods; None for one that is not.
    """
    before: Any = vars(optimizer).pop("_amp_stash", None)
    counted = counts_steps(optimizer)
    if attached is None:
        optimizer.__class__ = base
        wrap_step(optimizer)  # the first of its class may be this one
        if before is not None and before.instance_step is not None:
            optimizer.step = before.instance_step
        elif counted or (before is not None and any("initial_lr" in group for group in optimizer.param_groups)):
            _count_steps(optimizer)
        return
    if before is None:
        step = vars(optimizer).pop("step", None)
        attached.instance_step = None if counted else step
    attached.original_step, hooked = _unhooked(base)
    attached.hooked = hooked and attached.instance_step is None  # a step on the instance runs torch's hooks itself
    optimizer.__class__ = attached.class_over(base)
    optimizer._amp_stash = attached


def _unhooked(base: Any) -> tuple[Callable[..., Any], bool]:
    """The step of a class without torch's hooks, and whether it has hooks."""
    owner = next(cls for cls in base.__mro__ if "step" in vars(cls))
    if "_unhooked_step" in vars(owner):
        return owner._unhooked_step, True
    hooked = getattr(base.step, "__code__", None) is _HOOKED.__code__
    return (base.step.__wrapped__ if hooked else base.step), hooked


def counts_steps(optimizer: Any) -> bool:
    """True if the ``step`` on the instance is only the ``step`` of its class with the mark of torch's schedulers.

    Schedulers put a ``step`` on the instance that counts calls, to warn of a wrong order.
    """
    step = vars(optimizer).get("step")
    inner = getattr(step, "__wrapped__", None)
    return hasattr(step, "_wrapped_by_lr_sched") and getattr(inner, "__func__", inner) is type(optimizer).step


def _count_steps(optimizer: Any) -> None:
    """Put the mark of torch's schedulers on an optimizer."""
    weak = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        marked: Any = weak()
        marked._opt_called = True
        return type(marked).step(marked, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step
