"""Weights that are computed from parameters with other names: the base class."""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from ....core.errors import ArgumentTypeError, ArgumentValueError
from ....torch_internals.torch_compat import hook_tables, register_state_dict_hook, renew_flat_weights

__all__ = ["Reparameterization", "found_in", "on_named"]


class Reparameterization:
    """The computation of one weight of one module. Subclasses define ``compute_weight`` and ``reparameterize``.

    Args:
        name: the name of the weight.
        dim: a dimension for the subclass.
        module: the module with the weight.
        retain_forward: accepted without effect; nothing is kept.

    Attributes:
        reparameterization_names: the names of the module's parameters from which the weight is computed.
    """

    def __init__(self, name: str, dim: int | None, module: nn.Module | None, retain_forward: bool = True) -> None:
        self.name, self.dim, self.retain_forward = name, dim, retain_forward
        self.module: Any = module
        self.reparameterization_names: list[str] = []

    def compute_weight(self, module: Any = None, name: str | None = None) -> torch.Tensor:
        """Compute the weight from the attributes of ``module`` that ``reparameterize`` has named."""
        raise NotImplementedError

    def reparameterize(self, name: str, weight: torch.Tensor, dim: int | None) -> tuple[list[str], list[torch.Tensor]]:
        """Return the names and values of the parameters from which to compute ``weight``."""
        raise NotImplementedError

    @staticmethod
    def apply(
        module: nn.Module,
        name: str,
        dim: int | None,
        reparameterization: type[Reparameterization],
        hook_child: bool = True,
    ) -> Reparameterization:
        """Replace the parameter ``name`` of ``module`` by a computed weight."""
        owner, own_name = Reparameterization.get_module_and_name(module, name)
        made = reparameterization(own_name, dim, owner)
        parametrize.register_parametrization(owner, own_name, _Computed(made))
        aliases = made.reparameterization_names
        originals = [f"parametrizations.{own_name}.original{i}" for i, _ in enumerate(aliases)]
        for alias, original in zip(aliases, originals, strict=True):
            setattr(type(owner), alias, property(attrgetter(original)))  # only this module has the class
        register_state_dict_hook(owner, _Renaming(own_name, originals, aliases))
        owner.register_load_state_dict_pre_hook(_Renaming(own_name, aliases, originals))
        if isinstance(owner, nn.RNNBase):
            owner.register_forward_pre_hook(renew_flat_weights)
        return made

    @staticmethod
    def get_module_and_name(module: nn.Module, name: str) -> tuple[nn.Module, str]:
        """Return the submodule of a dotted name, and the last part of the name."""
        path, _, own_name = name.rpartition(".")
        return module.get_submodule(path), own_name

    def get_params(self, module: Any) -> list[torch.Tensor]:
        """Return the parameters from which the weight is computed."""
        return [getattr(module, name) for name in self.reparameterization_names]

    def remove(self, module: nn.Module) -> None:
        """Turn the weight into an ordinary parameter with its current value."""
        parametrize.remove_parametrizations(module, self.name, leave_parametrized=True)
        for table in hook_tables(module):
            for key, hook in list(table.items()):
                renaming = getattr(hook, "hook", hook)
                if isinstance(renaming, _Renaming) and renaming.weight == self.name:
                    del table[key]
        if isinstance(module, nn.RNNBase):
            renew_flat_weights(module)


class _Computed(nn.Module):
    """The module that torch's parametrization calls."""

    def __init__(self, how: Reparameterization) -> None:
        super().__init__()
        self.how = how

    def forward(self, *params: torch.Tensor) -> torch.Tensor:
        names = self.how.reparameterization_names
        return self.how.compute_weight(SimpleNamespace(**dict(zip(names, params, strict=True))), self.how.name)

    def right_inverse(self, weight: torch.Tensor) -> list[torch.Tensor]:
        names, params = self.how.reparameterize(self.how.name, weight, self.how.dim)
        self.how.reparameterization_names = list(names)
        return [param.detach().clone() for param in params]


class _Renaming:
    """A hook on a ``state_dict`` that renames the parameters of one weight.

    Args:
        weight: the name of the weight.
        old: the names of the parameters in the ``state_dict``, without the prefix of the module.
        new: the names that they get.
    """

    def __init__(self, weight: str, old: list[str], new: list[str]) -> None:
        self.weight = weight
        self.names = list(zip(old, new, strict=True))

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        for old, new in self.names:
            if prefix + old in state_dict:
                state_dict[prefix + new] = state_dict.pop(prefix + old)


def on_named(module: nn.Module, kind: type[Reparameterization] | None, name: str) -> list[tuple[nn.Module, str]]:
    """Return the parameters that a name denotes, as pairs of a submodule and the parameter's name in it."""
    if kind is None:
        raise ArgumentTypeError("reparameterization must be a subclass of Reparameterization, such as WeightNorm.")
    if name:
        owner, own_name = Reparameterization.get_module_and_name(module, name)
        if not isinstance(getattr(owner, own_name, None), nn.Parameter):
            known = ", ".join(key for key, _ in module.named_parameters()) or "none"
            raise ArgumentValueError(f"{name!r} is no parameter of this {type(module).__name__}; it has {known}.")
        return [(owner, own_name)]
    return [
        (owner, own_name)
        for owner in list(module.modules())
        if not isinstance(owner, (nn.Embedding, nn.EmbeddingBag, parametrize.ParametrizationList))
        for own_name, param in list(owner.named_parameters(recurse=False))
        if param.dim() > 1
    ]


def found_in(module: nn.Module, kind: type[Reparameterization], name: str) -> list[Reparameterization]:
    """Return the reparameterizations of one kind in a module.

    Raises:
        ArgumentValueError: if there are none.
    """
    found = []
    for prefix, owner in module.named_modules():
        for own_name, parts in getattr(owner, "parametrizations", {}).items():
            how = getattr(parts[0], "how", None)
            if isinstance(how, kind) and name in ("", f"{prefix}.{own_name}".lstrip(".")):
                how.module = owner
                found.append(how)
    if not found:
        where = f"{name!r}" if name else "no parameter"
        raise ArgumentValueError(f"{kind.__name__}: {where} of this {type(module).__name__} is reparameterized.")
    return found
