"""The objects of halfstep behind one attached optimizer: kinds and fields that a reader has to keep in the head.

Counted from ``_amp_stash`` after five steps at O2, as in ``walks``, through attributes, containers and weak references.
A kind is a class
of halfstep, once however many objects there are; its fields are the attributes of its instances, by slots or
``__dict__``. The settings in ``core`` and ``amp`` (policy, loss scale, session), the user's model and optimizer,
modules, functions and objects of torch are not entered.
"""

from __future__ import annotations

import argparse
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from halfstep import amp

__all__ = ["add_arguments", "attached_kinds", "fields_by_kind", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--brief", action="store_true", help="print only the two numbers")


def run(args: argparse.Namespace) -> int:
    kinds = attached_kinds()
    print(f"{len(kinds)} kinds of objects, {sum(map(len, kinds.values()))} fields")
    for kind, fields in sorted(() if args.brief else kinds.items()):
        print(f"    {kind}: {', '.join(sorted(fields))}")
    return 0


def attached_kinds() -> dict[str, set[str]]:
    """Train a model at O2 for five steps and count what its optimizer has, as ``fields_by_kind`` does."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", dtype="bfloat16", verbosity=0)
    for _ in range(5):
        with amp.scale_loss(model(torch.ones(4, 8)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return fields_by_kind(optimizer._amp_stash)


def fields_by_kind(root: object) -> dict[str, set[str]]:
    """Map each class of halfstep among the objects reachable from ``root``, by name, to the fields of its objects."""
    kinds: dict[str, set[str]] = {}
    seen: set[int] = set()
    waiting: deque[Any] = deque([root])
    kept: list[Any] = []  # so that no identity is used twice
    while waiting:
        value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kept.append(value)
        if isinstance(value, weakref.ReferenceType):
            waiting.append(value())
        elif isinstance(value, Mapping):
            waiting.extend([*value.keys(), *value.values()])
        elif isinstance(value, Collection) and not isinstance(value, (str, bytes, torch.Tensor, nn.Module)):
            waiting.extend(value)
        elif isinstance(value, MethodType):
            waiting.append(value.__self__)
        elif _is_ours(value):
            fields = dict(_fields(value))
            kinds.setdefault(type(value).__qualname__, set()).update(fields)
            waiting.extend(fields.values())
    return kinds


def _is_ours(value: object) -> bool:
    others = (type, Enum, FunctionType, nn.Module, torch.Tensor, torch.optim.Optimizer)
    package, _, path = type(value).__module__.partition(".")
    return package == "halfstep" and not path.startswith(("core.", "amp.")) and not isinstance(value, others)


def _fields(value: object) -> Iterator[tuple[str, object]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)
