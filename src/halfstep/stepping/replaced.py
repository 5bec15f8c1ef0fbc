"""Parameters that were replaced in a model after its optimizer was attached, so that the optimizer steps the old ones.

``parallelize_module``, ``fully_shard``, ``load_state_dict(assign=True)``, ``to_empty``, ``weight_norm`` and
``model.head = nn.Linear(...)`` put new parameters into a model. Every parameter that trains must be one that an
optimizer has.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..core.errors import UsageError
from ..core.text import listed
from ..kernels.shards import is_sharded
from ..torch_internals.torch_compat import children_of, parameters_of
from .backward import Subscriber, Window

__all__ = ["ReplacedParameters", "Replacement", "modules_in", "registered"]

Ref = weakref.ref[torch.Tensor]

registered = [0]
"""Number of modules and parameters that were put into any module of the process."""


def _count_registration(*_: object) -> None:
    registered[0] += 1


register_module_module_registration_hook(_count_registration)
register_module_parameter_registration_hook(_count_registration)


class Replacement(NamedTuple):
    """A parameter of an optimizer that is no longer in its model, and a new one in its place.

    Attributes:
        old: the name that the parameter had in the model.
        new: the name of the new one, which no optimizer has.
        param: the new one.
        was: the parameter of the optimizer.
    """

    old: str
    new: str
    param: torch.Tensor
    was: torch.Tensor


class ReplacedParameters(Subscriber):
    """The replaced parameters of one optimizer's models.

    A parameter counts as replaced if the optimizer has it, it was in a model when the optimizer was attached, it is in
    no model now, and in its place is a trainable parameter that was in no model then and that no optimizer has. So a
    part that was deleted, frozen, tied, shared or given to an optimizer is none.

    Args:
        models: weak references to the models that the optimizer trains.

    Attributes:
        models: as given.
        seen: the value that the latest call of ``refuse`` was given.
        new: parameters that came after the origin, and that no optimizer is known to have.
    """

    def __init__(self, models: Sequence[weakref.ref[nn.Module]]) -> None:
        self.models = models
        self.seen: object = None
        self.new: list[Ref] = []
        self._origin = {(i, name): weakref.ref(p) for i, name, p in self._named()}

    def refuse(self, optimizer: torch.optim.Optimizer, seen: object) -> None:
        """Refuse to step if a replaced parameter has got a gradient, which no optimizer would use.

        The walk over all modules is left out unless this is one of the first steps, or a module or a parameter was
        registered since the last step, or other parameters have gradients: one may have been replaced in a way that
        torch's hooks do not see, and has none then.

        Args:
            optimizer: the optimizer of the models.
            seen: a value that says which step this is of the first ones, what was registered, and what has gradients.

        Raises:
            UsageError: if so.
        """
        if seen != self.seen:
            before = {id(ref()) for ref in self._origin.values()}
            self.new = [weakref.ref(p) for p in self._present() if id(p) not in before]
        self.seen = seen
        trained = {id(p) for ref in self.new if (p := ref()) is not None and p.grad is not None}
        if trained and (found := [one for one in self.find(optimizer) if id(one.param) in trained]):
            raise UsageError(_message(optimizer, found))
        self.new = [ref for ref in self.new if id(ref()) not in trained]

    def opened(self, window: Window) -> None:
        """Refuse a first backward pass if ``fully_shard`` or ``parallelize_module`` has cut whole parameters by now.

        The first step would be refused, too.

        Raises:
            UsageError: if so.
        """
        optimizer = window.keeper.optimizer
        cut = any(map(is_sharded, self._present())) or any(hasattr(type(m), "unshard") for m in self._modules())
        # FSDP2 puts whole parameters in the places of parts while a model runs. That is no replacement.
        found = [one for one in self.find(optimizer) if not is_sharded(one.was)] if cut else []
        if found:
            raise UsageError(_message(optimizer, found))
        window.subscribers.remove(self)

    def find(self, optimizer: torch.optim.Optimizer) -> list[Replacement]:
        """All replaced parameters, with or without gradients. Slow."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = list(self._named())
        present, before = {id(p) for _, _, p in named}, {id(ref()) for ref in self._origin.values()}
        gone = [
            (i, name, p)
            for (i, name), ref in self._origin.items()
            if (p := ref()) is not None and id(p) in held and id(p) not in present
        ]
        new = [(i, name, p) for i, name, p in named if p.requires_grad and id(p) not in before and id(p) not in held]
        if not gone or not new:
            return []
        elsewhere = _in_any_optimizer()
        return [
            Replacement(old, name, p, was)
            for i, name, p in new
            if id(p) not in elsewhere
            for j, old, was in gone
            if i == j and _same_place(old, name)
        ]

    def _modules(self) -> list[nn.Module]:
        return modules_in([model for ref in self.models if (model := ref()) is not None])

    def _present(self) -> list[torch.Tensor]:
        return [p for module in self._modules() for p in parameters_of(module).values() if p is not None]

    def _named(self) -> Iterator[tuple[int, str, torch.Tensor]]:
        for i, ref in enumerate(self.models):
            if (model := ref()) is not None:
                for name, param in model.named_parameters():
                    yield i, name, param


def modules_in(models: Iterable[nn.Module]) -> list[nn.Module]:
    """Some models and all modules inside of them, each once, in a fifth of the time of ``nn.Module.modules``."""
    found = list(models)
    seen = set(map(id, found))
    for module in found:  # which grows
        if children := children_of(module):
            for child in children.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    found.append(child)
    return found


def _same_place(old: str, new: str) -> bool:
    """True if, of two modules with these parameters, one is inside of the other, or both are the same.

    A layer has its new parameters where it had the old ones, or in a submodule (parametrizations, LoRA, wrappers), or
    outside of it, in a flat parameter of FSDP.
    """
    first, second = (f"{name.rpartition('.')[0]}." for name in (old, new))
    return first == "." or second == "." or first.startswith(second) or second.startswith(first)


def _in_any_optimizer() -> set[int]:
    """Identities of the parameters of all optimizers in this process, also of optimizers that ``amp`` has never met."""
    return {
        id(param)
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.optim.Optimizer)
        for group in getattr(thing, "param_groups", ())
        for param in group["params"]
    }


def _message(optimizer: torch.optim.Optimizer, found: Iterable[Replacement]) -> str:
    old, new = (list(dict.fromkeys(names)) for names in zip(*((one.old, one.new) for one in found), strict=True))
    return (
        f"This {type(optimizer).__name__} has parameters that are no longer in its model ({listed(old)}). Others are "
        f"in their places, which no optimizer has, so they would never train ({listed(new)}). Something has replaced "
        "them after amp.initialize or amp.decorate, as parallelize_module, fully_shard, load_state_dict(assign=True), "
        "to_empty, weight_norm or a new layer do. Change or shard the model first, make the optimizer from its new "
        "parameters, and initialize then, which gives them their dtype, too; or give the new ones to the optimizer "
        "(add_param_group), or freeze them. Every level takes a model that fully_shard or parallelize_module has cut."
    )
