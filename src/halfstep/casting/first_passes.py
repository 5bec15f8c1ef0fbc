"""The first passes of a model with 16-bit weights show whether dtypes meet in it.

A function mode costs a call for each op, and most models never mix dtypes. So the mode in which ops meet (``meeting``)
is on in the first passes of each kind of call. If no op was refused in these, passes of that kind go on without it; if
one was, it stays on for the model. A kind of call is what chooses another way through ``forward``: training or not,
with gradients or not, and the types, dtypes and numbers of dimensions of the arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn

from .current import Scope
from .dispatch import meetings
from .scope import OpCasting, enter, leave

__all__ = ["FirstPasses"]

PASSES = 3
"""The number of passes of a kind in which the mode is on."""

_REFUSALS = ("dtype", "scalar type", "not implemented for", "same type", "converted to type", "Float but expected")
"""Words in torch's errors about dtypes."""


class FirstPasses:
    """The record of what the first passes of one model have shown; copies of the model share it.

    Args:
        casting: the casting of the model, in which ops meet.
        always: keep the mode on, even if the first passes do not need it.
        spared: names of buffers that have stayed fp32.

    Attributes:
        on: True if the mode is on in every pass.
        ended: the number of passes of each kind that have ended without an error, up to ``PASSES``.
        plain: the casting of the model without the mode.
    """

    def __init__(self, casting: OpCasting, *, always: bool = False, spared: Iterable[str] = ()) -> None:
        self.spared = tuple(spared)
        self.on = always
        self.ended: Counter[Hashable] = Counter()
        self.follow(casting)

    def recorded(self) -> OpCasting:
        """The casting of a pass that a compiler records: in a model that has not shown anything yet, ops meet."""
        return self.casting if self.on or PASSES not in self.ended.values() else self.plain

    def follow(self, casting: OpCasting) -> None:
        """The casting of the model is another one."""
        self.casting = casting
        self.plain = OpCasting(**{**casting.settings, "meets": False})
        self.on = self.on or bool(casting.emulated)

    def begin(
        self, name: str, model: Any, args: Any, kwargs: Any, owner: Any, frame: Any = None, *, foreign: bool = False
    ) -> Scope:
        """Begin a call of a method of the model. The first calls of each kind are watched.

        Args:
            name: the name of the method.
            model: the model.
            args: the arguments, cast.
            kwargs: the keyword arguments, cast.
            owner: see ``enter``.
            frame: see ``enter``.
            foreign: True if weights in another dtype stand for the model's own, so that ops must meet.
        """
        names = sorted(kwargs)
        arguments = [
            (a.dtype, a.ndim) if isinstance(a, torch.Tensor) else a if a is None or isinstance(a, bool) else type(a)
            for a in (*args, *map(kwargs.get, names))
        ]
        kind = (name, model.training, torch.is_grad_enabled(), *names, *arguments)
        first = self.ended[kind] < PASSES
        scope = enter(self.casting if first or self.on or foreign else self.plain, owner, frame)
        scope.watched = (kind, meetings.count) if first else None
        return scope

    def end(self, scope: Scope, error: BaseException | None = None) -> None:
        """End a call. If it was watched, it has shown if ops were called again in it."""
        if scope.watched is None:
            if not self.on:
                self.note_refusal(error)
        elif error is None:
            kind, before = scope.watched
            self.on = self.on or meetings.count != before
            self.ended[kind] = min(self.ended[kind] + 1, PASSES)

    def run(self, method: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a method of the model other than ``forward``. Its arguments are not cast."""
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

    def note_refusal(self, error: BaseException | None) -> None:
        """A pass without the mode has failed. If torch has refused dtypes, the mode is on from now on."""
        if isinstance(error, RuntimeError) and any(word in str(error) for word in _REFUSALS):
            self.on = True
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(_NOTE)


_NOTE = (
    "halfstep: in its first passes this model had mixed no dtypes, so ops in it were not looked at any more. From now "
    "on they are cast where their dtypes differ: call the model again. cast_ops=True (amp.initialize, amp.decorate, "
    "Policy) casts them in every pass."
)
