"""``apex.reparameterization``: weights computed from other parameters, weight normalization above all.

It is ``torch.nn.utils.parametrize`` under Apex's names: a weight is worked out whenever it is asked for, so it is never
an old one, where Apex's was kept until the next backward pass.
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
    """Let weights be ``g * v / ||v||``, with parameters ``{name}_g`` and ``{name}_v``.

    Args:
        module: any; it is changed in place.
        name: of a parameter, dotted for that of a submodule; "" means every one of more than one dimension outside
            of embeddings.
        dim: the dimension that has a norm for each index; None for one norm.
        hook_child: accepted; there are no hooks.

    Returns:
        The module.

    Source: Salimans and Kingma, arXiv 1602.07868.
    """
    return apply_reparameterization(module, WeightNorm, name, dim, hook_child)


def remove_weight_norm(module: nn.Module, name: str = "", remove_all: bool = False) -> nn.Module:
    """Make ordinary parameters of normalized weights, with the value they have.

    Args:
        module: any; it is changed in place.
        name: as given before; "" means all.
        remove_all: as ``name=""``.

    Raises:
        ArgumentValueError: where there is none.
    """
    return remove_reparameterization(module, WeightNorm, name, remove_all)


def apply_reparameterization(
    module: nn.Module,
    reparameterization: type[Reparameterization] | None = None,
    name: str = "",
    dim: int | None = 0,
    hook_child: bool = True,
) -> nn.Module:
    """``apply_weight_norm`` for any subclass of ``Reparameterization``.

    Raises:
        ArgumentTypeError: without one.
        ArgumentValueError: for a name that is no parameter.
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
    """``remove_weight_norm`` for any subclass; ``Reparameterization`` itself means whichever there is."""
    for found in found_in(module, reparameterization, "" if remove_all else name):
        found.remove(found.module)
    return module
