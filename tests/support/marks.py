"""What a library leaves on the objects of its user: attributes, hooks, classes, and what it exchanges in them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["Mark", "came", "marks", "on_module"]

Mark = tuple[str, str]
"""The kind of object, and what is on it."""


def marks(model: nn.Module, optimizer: Any) -> set[Mark]:
    """All that is on a model, its modules and parameters, their gradients, and an optimizer with its groups and state.

    Compare two of these to see what came. Hooks have the names of their functions, and a class has the name of the
    module that it, or its first base if it was made on the fly, is from.
    """
    found = {("module", mark) for module in model.modules() for mark in on_module(module)}
    found.update(("optimizer", mark) for mark in _on_optimizer(optimizer))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in [*model.parameters(), *params]:
        if isinstance(param, FakeTensor):  # which torch puts in the place of a parameter while it captures a model
            continue
        found.update(("parameter", mark) for mark in _on_tensor(param))
        if param.grad is not None:
            found.update(("gradient", mark) for mark in _on_tensor(param.grad))
    for group in optimizer.param_groups:
        found.update(("group", f"[{key!r}]") for key in group)
        found.update(("group", f"['params'] {id(param)}") for param in group["params"])
    for state in optimizer.state.values():
        found.update(("state", f"[{key!r}]") for key in state if isinstance(key, str))
    return found


def on_module(module: nn.Module) -> Iterator[str]:
    """All that is on a module itself."""
    yield from _attributes(module)
    yield from _hooks(module)
    yield from _classes(type(module))


def _on_optimizer(optimizer: Any) -> Iterator[str]:
    yield from _attributes(optimizer)
    yield from _hooks(optimizer)
    yield from _classes(type(optimizer))
    yield f"state {id(optimizer.state)}"


def _on_tensor(tensor: torch.Tensor) -> Iterator[str]:
    yield from _attributes(tensor)
    yield from _classes(type(tensor))
    if tensor.is_leaf:
        yield from (f"hook {_name(hook)}" for hook in (tensor._backward_hooks or {}).values())
        for hook in (tensor._post_accumulate_grad_hooks or {}).values():  # type: ignore[attr-defined]
            yield f"post_accumulate_grad_hook {_name(hook)}"
        if getattr(tensor, "grad_dtype", tensor.dtype) is not tensor.dtype:
            yield "grad_dtype"


def _attributes(thing: object) -> Iterator[str]:
    yield from (name for name in vars(thing) if "_hooks" not in name)


def _hooks(thing: object) -> Iterator[str]:
    for name, hooks in vars(thing).items():
        if name.endswith("_hooks"):
            kind = name.removeprefix("_optimizer").strip("_").removesuffix("s")
            for hook in hooks.values() if isinstance(hooks, dict) else hooks:
                yield f"{kind} {_name(hook)}"


def _name(hook: Any) -> str:
    """The name of a hook's function, or of its class; behind what torch and ``partial`` put around it."""
    while not hasattr(hook, "__qualname__") and hasattr(hook, "hook"):
        hook = hook.hook
    hook = hook[0] if isinstance(hook, tuple) else hook  # of a wrapper: the function, and what it is given
    while isinstance(hook, partial):
        hook = hook.func
    name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
    return name.replace(".<locals>", "")


def _classes(kind: type) -> Iterator[str]:
    """The modules of a class and of those below it, as far as they were made on the fly."""
    while getattr(sys.modules[kind.__module__], kind.__qualname__, None) is not kind and len(kind.__bases__) > 1:
        yield f"class of {kind.__bases__[0].__module__}"
        kind = kind.__bases__[1]
    yield f"class of {kind.__module__}"


def came(now: set[Mark], before: set[Mark]) -> set[Mark]:
    """The marks that are new; an object in the place of another is one too, under the name of the place."""
    return {(on, re.sub(r" \d+$", "", mark)) for on, mark in now - before}
