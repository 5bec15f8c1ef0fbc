"""Detection of model parameters that were replaced after the optimizer was attached, so that they would never train.

``parallelize_module``, ``fully_shard``, ``load_state_dict(assign=True)``, ``to_empty``, ``weight_norm`` and
``model.head = nn.Linear(...)`` put new parameters into a model, while its optimizer still steps the old ones.
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
from ..core.inner_optimizers import params_of
from ..core.text import listed
from ..kernels.shards import is_sharded
from ..torch_internals.torch_compat import children_of, parameters_of
from .backward import Subscriber, Window

__all__ = ["ReplacedParameters", "Replacement", "modules_in", "registrations"]

Ref = weakref.ref[torch.Tensor]

registrations = [0]
"""The number of registrations of submodules and parameters in any module of the process."""


def _count_registration(*_: object) -> None:
    registrations[0] += 1


register_module_module_registration_hook(_count_registration)
register_module_parameter_registration_hook(_count_registration)


class Replacement(NamedTuple):
    """A parameter of an optimizer that is no longer in its model, and the new parameter in its place.

    Attributes:
        old: the name that the old parameter had in the model.
        new: the name of the new parameter.
        param: the new parameter, which no optimizer has.
        old_param: the old parameter, which the optimizer still has.
    """

    old: str
    new: str
    param: torch.Tensor
    old_param: torch.Tensor


class ReplacedParameters(Subscriber):
    """A check for replaced parameters in the models of one optimizer.

    A parameter is replaced if the optimizer has it, a model had it when the optimizer was attached, no model has it
    now, and its place in the model has a new trainable parameter that no optimizer has. By this definition, parts that
    user code deletes, freezes, ties, shares or adds to an optimizer are not replaced.

    Args:
        models: weak references to the models that the optimizer trains.

    Attributes:
        models: as given.
        latest_key: the ``key`` of the latest call of ``refuse``.
        new: parameters that are new in the models since the optimizer was attached, and have had no gradient yet.
    """

    def __init__(self, models: Sequence[weakref.ref[nn.Module]]) -> None:
        self.models = models
        self.latest_key: object = None
        self.new: list[Ref] = []
        self._origin = {(i, name): weakref.ref(p) for i, name, p in self._named()}

    def refuse(self, optimizer: torch.optim.Optimizer, key: object) -> None:
        """Refuse to step if a replaced parameter has a gradient, which no optimizer would use.

        The walk over all modules runs only if ``key`` changes: in the first steps, after a module or parameter was
        registered, and when a different set of parameters has gradients. The last condition finds replacements that
        torch's registration hooks do not see, because the old parameters no longer get gradients.

        Args:
            optimizer: the optimizer of the models.
            key: a value that identifies the first steps, the count of registrations, and the parameters with gradients.

        Raises:
            UsageError: if a replaced parameter has a gradient.
        """
        if key != self.latest_key:
            before = {id(ref()) for ref in self._origin.values()}
            self.new = [weakref.ref(p) for p in self._present() if id(p) not in before]
        self.latest_key = key
        trained = {id(p) for ref in self.new if (p := ref()) is not None and p.grad is not None}
        if trained and (found := [one for one in self.find(optimizer) if id(one.param) in trained]):
            raise UsageError(_message(optimizer, found))
        self.new = [ref for ref in self.new if id(ref()) not in trained]

    def opened(self, window: Window) -> None:
        """Refuse the first backward pass if ``fully_shard`` or ``parallelize_module`` sharded the parameters.

        ``refuse`` would raise the same error at the first step; this check raises it before the pass.

        Raises:
            UsageError: if whole parameters of the optimizer were replaced by shards.
        """
        optimizer = window.table.optimizer()
        cut = any(map(is_sharded, self._present())) or any(hasattr(type(m), "unshard") for m in self._modules())
        # FSDP2 replaces shards by whole parameters while a model runs, which is not an error.
        found = [one for one in self.find(optimizer) if not is_sharded(one.old_param)] if cut else []
        if found:
            raise UsageError(_message(optimizer, found))
        window.subscribers.remove(self)

    def find(self, optimizer: torch.optim.Optimizer) -> list[Replacement]:
        """Return all replaced parameters, with or without gradients. Slow."""
        owned = {*map(id, params_of(optimizer))}
        named = list(self._named())
        present, before = {id(p) for _, _, p in named}, {id(ref()) for ref in self._origin.values()}
        gone = [
            (i, name, p)
            for (i, name), ref in self._origin.items()
            if (p := ref()) is not None and id(p) in owned and id(p) not in present
        ]
        new = [(i, name, p) for i, name, p in named if p.requires_grad and id(p) not in before and id(p) not in owned]
        if not gone or not new:
            return []
        elsewhere = _in_any_optimizer()
        return [
            Replacement(old, name, p, old_param)
            for i, name, p in new
            if id(p) not in elsewhere
            for j, old, old_param in gone
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
    """Return the models and all their submodules, each once. It is 5x faster than ``nn.Module.modules``."""
    found = list(models)
    seen = set(map(id, found))
    for module in found:  # the loop appends to this list
        if children := children_of(module):
            for child in children.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    found.append(child)
    return found


def _same_place(old: str, new: str) -> bool:
    """True if the modules with these parameters are the same module, or if either contains the other.

    A layer's new parameter is in the same module as the old one, in a submodule (parametrizations, LoRA, wrappers), or
    in a parent module (a flat parameter of FSDP).
    """
    first, second = (f"{name.rpartition('.')[0]}." for name in (old, new))
    return first == "." or second == "." or first.startswith(second) or second.startswith(first)


def _in_any_optimizer() -> set[int]:
    """Return the identities of the parameters of all optimizers in this process, attached or not."""
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
        f"This {type(optimizer).__name__} has parameters that are no longer in its model ({listed(old)}). The model "
        f"has new parameters in their places that no optimizer has, so they would never train ({listed(new)}). They "
        "were replaced after amp.initialize or amp.decorate: by parallelize_module, fully_shard, weight_norm, "
        "load_state_dict(assign=True), to_empty or a new layer. Change or shard the model first, make the optimizer "
        "from its new parameters, and initialize both afterwards. Or add the new parameters to the optimizer "
        "(add_param_group), or freeze them. Every level supports models sharded by fully_shard or parallelize_module."
    )
