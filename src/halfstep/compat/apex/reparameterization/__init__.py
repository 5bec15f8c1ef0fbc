"""``apex.reparameterization``: weights computed from other parameters, mainly weight normalization.

It is ``torch.nn.utils.parametrize`` under Apex's names. Each access computes the weight, so that it is never stale;
Apex kept the weight until the next backward pass.
"""

from __future__ import annotations

from torch import nn

from .reparameterization import Reparameterization, found_in, on_named
from .weight_norm import WeightNorm

__all__ = [
    "Reparameterization",
    "WeightNorm",
    "apply_reparameterization",
    "apply_weight_norm",
    "remove_reparameterization",
    "remove_weight_norm",
]


def apply_weight_norm(module: nn.Module, name: str = "", dim: int | None = 0, hook_child: bool = True) -> nn.Module:
    """Replace weights by ``g * v / ||v||``, with parameters ``{name}_g`` and ``{name}_v``.

    Args:
        module: any module; changed in place.
        name: the name of a parameter, dotted for a parameter of a submodule; "" means every parameter with more than
            one dimension outside embeddings.
        dim: the dimension with one norm per index; None for a single norm.
        hook_child: accepted; there are no hooks.

    Returns:
        The module.

    Source: Salimans and Kingma, arXiv 1602.07868.
    """
    return apply_reparameterization(module, WeightNorm, name, dim, hook_child)


def remove_weight_norm(module: nn.Module, name: str = "", remove_all: bool = False) -> nn.Module:
    """Turn normalized weights into ordinary parameters with their current values.

    Args:
        module: any module; changed in place.
        name: the name given to ``apply_weight_norm``; "" means all weights.
        remove_all: the same as ``name=""``.

    Raises:
        ArgumentValueError: if the module has no such weight.
    """
    return remove_reparameterization(module, WeightNorm, name, remove_all)


def apply_reparameterization(
    module: nn.Module,
    reparameterization: type[Reparameterization] | None = None,
    name: str = "",
    dim: int | None = 0,
    hook_child: bool = True,
) -> nn.Module:
    """Apply any subclass of ``Reparameterization``; see ``apply_weight_norm`` for the arguments.

    Raises:
        ArgumentTypeError: without a subclass.
        ArgumentValueError: if the name is not the name of a parameter.
    """
    for owner, own_name in on_named(module, reparameterization, name):
        assert reparameterization is not None
        reparameterization.apply(owner, own_name, dim, reparameterization, hook_child)
    return module


def remove_reparameterization(
    module: nn.Module,
    reparameterization: type[Reparameterization] = Reparameterization,
    name: str = "",
    remove_all: bool = False,
) -> nn.Module:
    """Remove any subclass; ``Reparameterization`` means all subclasses. See ``remove_weight_norm``."""
    for found in found_in(module, reparameterization, "" if remove_all else name):
        found.remove(found.module)
    return module
