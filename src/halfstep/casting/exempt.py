"""Models that the process-wide op casting leaves alone."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from ..core.errors import ArgumentTypeError
from .modules import AtLevel, is_attached
from .scopes import OpCasting

__all__ = ["exempt"]

M = TypeVar("M", bound=nn.Module)


def exempt(model: M) -> M:
    """Leave a model as it is while O1 is on in the process: its forward passes run without op casting.

    ::

        student, optimizer = amp.initialize(student, optimizer, opt_level="O1")
        teacher = amp.exempt(teacher)  # computes as if there were no amp

    What it computes outside of ``forward`` (a loss, say) is cast like everything else; ``amp.disable_casts`` is a block
    without it.

    Args:
        model: any module; calling this twice is calling it once.

    Returns:
        The model.

    Raises:
        ArgumentTypeError: for something else than a module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"amp.exempt takes a torch.nn.Module, not {type(model).__name__}.")
    if not is_attached(model, explicit=True):
        AtLevel(OpCasting(None, enabled=False), explicit=True).attach_to(model)
    return model
