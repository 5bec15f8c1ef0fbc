"""The first passes of a model with 16-bit weights: whether dtypes meet in it, and what a cast of its inputs destroys.

A function mode costs a call for each op, and most models never mix dtypes. So the mode in which ops meet (``meeting``)
is on in the first passes of each kind of call. If no op was refused in these, passes of that kind go on without it; if
one was, it stays on for the model. A kind of call is what chooses another way through ``forward``: training or not,
with gradients or not, and the types, dtypes and numbers of dimensions of the arguments.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..core.dtypes import HALF_DTYPES, dtype_name
from ..core.torch_compat import forward_hooks, functorch_level, jit_tracing_state
from .containers import cast_tree
from .current import thread
from .dispatch import meetings
from .finite import narrow_finite
from .scope import OpCasting, enter, leave

__all__ = ["FirstPasses", "watch_methods"]

logger = logging.getLogger("halfstep")

PASSES = 3
"""How many passes of a kind are looked at."""

_MOST_DIMENSIONS = 2
"""Time steps and positions have no more: images, features and states that hold integers are rounded."""

_REFUSALS = ("dtype", "scalar type", "not implemented for", "same type", "converted to type", "Float but expected")
"""Words in torch's errors about dtypes."""


class FirstPasses:
    """What the first passes of one model have shown; copies of the model share it.

    Args:
        casting: of the model, in which ops meet.
        always: keep the mode on, whatever they show.
        spared: names of buffers that have stayed fp32.

    Attributes:
        on: whether the mode is on in every pass.
        known: the kinds of calls that were looked at. Without ``on`` they run in ``plain``.
        plain: the casting of the model without the mode.
        stays: inputs that are integers beyond the exact ones of the weights' dtype, and stay fp32: the place among all
            tensors of the arguments, and the number of dimensions.
        saturates: inputs with finite numbers beyond those of the dtype, such as masks; they stay finite.
    """

    def __init__(self, casting: OpCasting, *, always: bool = False, spared: Iterable[str] = ()) -> None:
        self.spared = tuple(spared)
        self.on = always
        self.known: set[Hashable] = set()
        self.follow(casting)
        self.stays: set[tuple[int, int]] = set()
        self.saturates: set[tuple[int, int]] = set()
        self._passes: Counter[Hashable] = Counter()

    def follow(self, casting: OpCasting) -> None:
        """The casting of the model is another one."""
        self.casting = casting
        self.plain = OpCasting(**{**casting.settings, "meets": False})
        self.on = self.on or bool(casting.emulated)

    def cast(self, args: Any, kwargs: Any, dtype: torch.dtype, *, look: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the model in the dtype of its weights, but for what a cast would destroy.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            dtype: of the weights.
            look: whether to look at them before, which reads the device.
        """
        places = itertools.count()

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            key = next(places), tensor.dim()
            if look and dtype in HALF_DTYPES and tensor.dtype is torch.float32 and _can_look(tensor):
                self._look(key, tensor.detach(), dtype)
            if key in self.stays and tensor.dtype is torch.float32:
                return tensor
            return narrow_finite(tensor, dtype) if key in self.saturates else tensor.to(dtype)

        args = tuple([cast_tree(arg, dtype, cast) for arg in args])
        return args, cast_tree(kwargs, dtype, cast) if kwargs else kwargs

    def _look(self, key: tuple[int, int], values: torch.Tensor, dtype: torch.dtype) -> None:
        exact = 2 / torch.finfo(dtype).eps
        small = values.dim() <= _MOST_DIMENSIONS
        if small and bool((values.abs().amax() > exact) & (values == values.round()).all()):
            if key not in self.stays:
                text = "Input %d of a model holds integers above %d, which %s has not all. It stays float32."
                logger.info(text, key[0], exact, dtype_name(dtype))
            self.stays.add(key)
        elif bool(((values.abs() > torch.finfo(dtype).max) & values.isfinite()).any()):
            self.saturates.add(key)

    def end(self, kind: Hashable, *, met: bool) -> None:
        """One of the first passes of a kind has ended; ``met`` says whether an op in it was called again."""
        if met:
            self.on = True
        self._passes[kind] += 1
        if self._passes[kind] == PASSES:
            self.known.add(kind)

    def run(self, method: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a method of the model. It has kinds of calls as ``forward`` has, and its arguments are not cast."""
        kinds = [a.dtype if isinstance(a, torch.Tensor) else type(a) for a in (*args, *kwargs.values())]
        kind = (method.__name__, model.training, torch.is_grad_enabled(), *kwargs, *kinds)
        first, before, owner = kind not in self.known, meetings.count, object()
        enter(self.casting if first or self.on else self.plain, owner)
        try:
            result = method(model, *args, **kwargs)
        except RuntimeError as error:
            if not (first or self.on):
                self.note_refusal(error)
            raise
        finally:
            leave(owner)
        if first:
            self.end(kind, met=meetings.count != before)
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


def _can_look(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor may be read here."""
    if type(tensor) is not torch.Tensor or tensor.numel() == 0 or tensor.is_meta or torch.compiler.is_compiling():
        return False
    if jit_tracing_state() is not None:
        return False
    return functorch_level() is None and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def watch_methods(model: nn.Module) -> None:
    """Let ops meet in the public methods of a model's own class, which run without the hooks of ``forward``.

    The methods are replaced in the class, by wrappers that do nothing for models without ``FirstPasses``: an attribute
    of the model would not follow its copies.
    """
    for cls in type(model).__mro__:
        if cls.__module__.partition(".")[0] in _FRAMEWORKS:
            continue
        for name, function in list(vars(cls).items()):
            own = isinstance(function, FunctionType) and not hasattr(function, "watched_by_halfstep")
            if own and (inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function)):
                continue  # its code runs after the call has returned
            if own and not name.startswith("_") and name != "forward" and not hasattr(nn.Module, name):
                setattr(cls, name, _watched(function))


_FRAMEWORKS = ("accelerate", "builtins", "lightning", "peft", "pytorch_lightning", "torch", "transformers", "typing")
"""Packages whose classes have many methods that compute nothing."""


def _watched(own: Callable[..., Any]) -> Callable[..., Any]:
    """A method in which ops meet where the first passes have shown that they must."""

    @functools.wraps(own)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not thread.open and not torch.compiler.is_compiling() and isinstance(self, nn.Module):
            for hook in forward_hooks(self).values():
                passes = getattr(hook, "passes", None)
                if isinstance(passes, FirstPasses):
                    return passes.run(own, self, args, kwargs)
        return own(self, *args, **kwargs)

    watched.watched_by_halfstep = True  # type: ignore[attr-defined]
    return watched
