"""The first passes of a model with 16-bit weights: whether dtypes meet in it, and what a cast of its inputs destroys.

A function mode costs a call for each op, and most models never mix dtypes. So the mode in which ops meet (``meeting``)
is on in the first passes of each kind of call. If no op was refused in these, passes of that kind go on without it; if
one was, it stays on for the model. A kind of call is what chooses another way through ``forward``: training or not,
with gradients or not, and the types, dtypes and numbers of dimensions of the arguments.

A look at an input costs some microseconds on a CPU, and a wait on a device. So it is for all inputs in the first passes
and in the 4th, 8th, 16th and so on, and in all passes for those that may be masks, time steps or caches.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn

from ..core.compiler_compat import is_traced
from ..core.dtypes import HALF_DTYPES, dtype_name
from .dispatch import meetings
from .finite import narrow_finite
from .scope import OpCasting, enter, leave

__all__ = ["Cast", "FirstPasses"]

logger = logging.getLogger("halfstep")

PASSES = 3
"""How many passes of a kind are looked at."""

_MOST_DIMENSIONS = 2
"""Time steps and positions have no more: images, features and states that hold integers are rounded."""

_LARGEST_INTEGER = 2.0**24
"""All floats beyond are integers, and fp32 has not all of those: they are masks, or mean infinity."""

_REFUSALS = ("dtype", "scalar type", "not implemented for", "same type", "converted to type", "Float but expected")
"""Words in torch's errors about dtypes."""

Place = tuple[tuple[Any, ...], int]
"""Where an input is: a number or name for each container around it; and its number of dimensions."""

Cast = tuple[Place, torch.Tensor, torch.Tensor]
"""Where an input is, the input, and its cast."""


class FirstPasses:
    """What the passes of one model have shown; copies of the model share it.

    Args:
        casting: of the model, in which ops meet.
        always: keep the mode on, whatever they show.
        spared: names of buffers that have stayed fp32.

    Attributes:
        on: whether the mode is on in every pass.
        begun: how many passes of each kind there were.
        known: the kinds of calls whose first passes are over. Without ``on`` they run in ``plain``.
        plain: the casting of the model without the mode.
        watched: inputs that are looked at in every pass: they held nothing but integers, as small time steps and masks
            without padding do, or what a cast destroys, or the model wrote to them.
        stays: inputs that were integers beyond the exact ones of the weights' dtype, and stay fp32.
        saturates: inputs that had finite numbers beyond those of the dtype, such as masks; they stay finite.
    """

    def __init__(self, casting: OpCasting, *, always: bool = False, spared: Iterable[str] = ()) -> None:
        self.spared = tuple(spared)
        self.on = always
        self.begun: Counter[Hashable] = Counter()
        self.known: set[Hashable] = set()
        self.follow(casting)
        self.watched: set[Place] = set()
        self.stays: set[Place] = set()
        self.saturates: set[Place] = set()

    def follow(self, casting: OpCasting) -> None:
        """The casting of the model is another one."""
        self.casting = casting
        self.plain = OpCasting(**{**casting.settings, "meets": False})
        self.on = self.on or bool(casting.emulated)

    def cast(self, casts: list[Cast], dtype: torch.dtype, look: bool, *place_and_tensor: Any) -> torch.Tensor:
        """A floating tensor among the arguments in the dtype of the weights, but for what a cast would destroy.

        On a CPU a watched input is looked at in every pass. On a device that would wait for the device. There what is
        beyond the range is made finite without a look.

        Args:
            casts: gets the tensor and its cast, for ``write_back``. A tensor that is given twice has one cast.
            dtype: of the weights.
            look: whether to look at any input, on any device.
            place_and_tensor: a number or name for each container around it, and then the tensor.
        """
        tensor: torch.Tensor = place_and_tensor[-1]
        key = place_and_tensor[:-1], tensor.dim()
        cast: torch.Tensor
        for _, given, cast in casts:
            if given is tensor:
                return cast
        if not look and key not in self.watched:
            return tensor.to(dtype)
        wide = tensor.dtype is torch.float32 and dtype in HALF_DTYPES
        wide = wide and tensor.layout is torch.strided and not tensor.is_nested
        traced = is_traced()
        own = type(tensor) is torch.Tensor and not (traced or tensor.is_meta)
        if wide and own and tensor.numel() and (tensor.is_cpu or (look and not _is_captured(tensor))):
            self._look(key, tensor.detach(), dtype)
        if wide and key in self.stays:
            return tensor
        unseen = traced or not tensor.is_cpu
        narrow: Any = narrow_finite if wide and (unseen or key in self.saturates) else torch.Tensor.to
        if not own:
            return narrow(tensor, dtype)  # type: ignore[no-any-return]
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # tensors of that mode do not say whether they were written
                cast = narrow(tensor.detach(), dtype)
        else:
            cast = narrow(tensor, dtype)
        casts.append((key, tensor, cast))
        return cast

    def _look(self, key: Place, values: torch.Tensor, dtype: torch.dtype) -> None:
        lowest, highest = values.aminmax()
        largest, exact = max(-float(lowest), float(highest)), 2 / torch.finfo(dtype).eps
        if key in self.watched and largest <= exact:
            return
        whole = values.equal(values.round())
        if whole:
            self.watched.add(key)
        if whole and exact < largest <= _LARGEST_INTEGER and values.dim() <= _MOST_DIMENSIONS:
            if key not in self.stays:
                text = "Input %s of a model holds integers above %d, which %s has not all. It stays float32."
                logger.info(text, key[0][0], exact, dtype_name(dtype))
            self.stays.add(key)
        elif not largest <= exact and bool((values.isfinite() & values.to(dtype).isinf()).any()):  # it may be NaN
            self.saturates.add(key)
            self.watched.add(key)

    def write_back(self, casts: Iterable[Cast]) -> None:
        """After a pass: what the model has written to casts of its inputs goes to the inputs, and nothing else does.

        An empty input becomes as large as its cast, as that of ``out=`` does. No other input gets another shape.
        """
        for key, tensor, cast in casts:
            if cast._version and not (tensor.is_leaf and tensor.requires_grad and torch.is_grad_enabled()):
                self.watched.add(key)
                if cast.numel() and not tensor.numel():
                    tensor.resize_(cast.shape)
                if cast.shape != tensor.shape:
                    continue
                unwritten = cast == narrow_finite(tensor, cast.dtype)
                tensor.copy_(torch.where(unwritten, tensor, cast.to(tensor.dtype)))

    def end(self, kind: Hashable, *, met: bool) -> None:
        """One of the first passes of a kind has ended; ``met`` says whether an op in it was called again."""
        if met:
            self.on = True
        if self.begun[kind] >= PASSES:
            self.known.add(kind)

    def run(self, method: Callable[..., Any], model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a method of the model. It has kinds of calls as ``forward`` has, and its arguments are not cast."""
        names = sorted(kwargs)
        kinds = [a.dtype if isinstance(a, torch.Tensor) else type(a) for a in (*args, *map(kwargs.get, names))]
        kind = (method.__name__, model.training, torch.is_grad_enabled(), *names, *kinds)
        first, before, owner = kind not in self.known, meetings.count, object()
        self.begun[kind] += 1
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


def _is_captured(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
