"""The record of a model's first passes, which decides whether its ops need the function mode of ``meeting``.

A function mode costs a Python call per op, and most models never mix dtypes. So the mode is on in the first passes of
each kind of call. If torch refuses no op in them, later passes of that kind run without the mode; otherwise the mode
stays on for the model. Calls of one kind take the same path through ``forward``: they agree in training mode, grad
mode, and the types, dtypes and dimensions of the arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn

from .current import OpScope
from .dispatch import changed_ops
from .scope import OpCasting, enter, leave

__all__ = ["FirstPasses"]

PASSES = 3
"""The number of first passes of each kind in which the mode is on."""

_REFUSALS = ("dtype", "scalar type", "not implemented for", "same type", "converted to type", "Float but expected")
"""Phrases in torch's errors about dtypes."""


class FirstPasses:
    """The record of the first passes of one model, which copies of the model share.

    Args:
        casting: the casting of the model, with ``retries``.
        always: keep the mode on, even if the first passes do not need it.
        fp32_buffers: names of buffers that stayed fp32.

    Attributes:
        on: True if the mode is on in every pass.
        ended: the number of passes of each kind that ended without an error, up to ``PASSES``.
        plain: the casting of the model without the mode.
    """

    def __init__(self, casting: OpCasting, *, always: bool = False, fp32_buffers: Iterable[str] = ()) -> None:
        self.fp32_buffers = tuple(fp32_buffers)
        self.on = always
        self.ended: Counter[Hashable] = Counter()
        self.follow(casting)

    def recorded(self) -> OpCasting:
        """Return the casting of a pass that a compiler records; before the first passes it includes the mode."""
        return self.casting if self.on or PASSES not in self.ended.values() else self.plain

    def follow(self, casting: OpCasting) -> None:
        """Follow a new casting of the model."""
        self.casting = casting
        self.plain = OpCasting(**{**casting.settings, "retries": False})
        self.on = self.on or bool(casting.emulated)

    def begin(
        self, name: str, model: Any, args: Any, kwargs: Any, owner: Any, frame: Any = None, *, foreign: bool = False
    ) -> OpScope:
        """Begin a call of a method of the model, and watch it if it is among the first of its kind.

        Args:
            name: the name of the method.
            model: the model.
            args: the arguments, cast.
            kwargs: the keyword arguments, cast.
            owner: see ``enter``.
            frame: see ``enter``.
            foreign: True if weights in another dtype replace the model's own, so that the mode must be on.
        """
        names = sorted(kwargs)
        arguments = [
            (a.dtype, a.ndim) if isinstance(a, torch.Tensor) else a if a is None or isinstance(a, bool) else type(a)
            for a in (*args, *map(kwargs.get, names))
        ]
        kind = (name, model.training, torch.is_grad_enabled(), *names, *arguments)
        first = self.ended[kind] < PASSES
        scope = enter(self.casting if first or self.on or foreign else self.plain, owner, frame)
        scope.watched = (kind, changed_ops.count) if first else None
        return scope

    def end(self, scope: OpScope, error: BaseException | None = None) -> None:
        """End a call. A watched call turns the mode on for good if an op was retried in it."""
        if scope.watched is None:
            self._note_refusal(error)
        elif error is None:
            kind, before = scope.watched
            self.on = self.on or changed_ops.count != before
            self.ended[kind] = min(self.ended[kind] + 1, PASSES)

    def run(self, method: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a method of the model other than ``forward``, without casting its arguments."""
        scope = self.begin(method.__name__, model, args, kwargs, object())
        try:
            result = method(model, *args, **kwargs)
        except RuntimeError as error:
            self.end(scope, error)
            raise
        finally:
            leave(scope.owner)
        self.end(scope)
        return result

    def _note_refusal(self, error: BaseException | None) -> None:
        """Turn the mode on for good if a pass without it failed because torch refused dtypes."""
        if not self.on and isinstance(error, RuntimeError) and any(word in str(error) for word in _REFUSALS):
            self.on = True
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(_NOTE)


_NOTE = (
    "halfstep: this model mixed no dtypes in its first passes, so halfstep had stopped checking its ops. From now on "
    "it casts ops whose dtypes differ: call the model again. cast_ops=True (amp.initialize, amp.decorate, Policy) "
    "checks ops in every pass."
)
