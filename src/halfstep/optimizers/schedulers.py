"""The mark of torch's schedulers on an optimizer: a ``step`` on the instance that counts, to warn of a wrong order."""

from __future__ import annotations

import functools
import weakref
from typing import Any

__all__ = ["count_steps", "counts_steps"]


def counts_steps(optimizer: Any) -> bool:
    """Whether the instance's ``step`` is its class's with that mark, and nothing else."""
    step = vars(optimizer).get("step")
    inner = getattr(step, "__wrapped__", None)
    return hasattr(step, "_wrapped_by_lr_sched") and getattr(inner, "__func__", inner) is type(optimizer).step


def count_steps(optimizer: Any) -> None:
    """Put the mark on an optimizer."""
    weak = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        marked: Any = weak()
        marked._opt_called = True
        return type(marked).step(marked, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step
