"""Casts of the inputs of a model with 16-bit weights, and the way back for values that the model writes to them.

Finite values stay finite, so that a row that is masked with the lowest fp32 number still has a softmax in 16 bits. An
input that requires gradients is an activation of another model, so its overflow becomes inf, as it would in a model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

import torch

from ..core.dtypes import HALF_DTYPES, dtype_name
from ..torch_internals.compiler_compat import is_traced
from .containers import Made, cast_tree, items_of
from .finite import narrow_finite

__all__ = ["ModelInputs", "ModuleInputs", "write_back"]

logger = logging.getLogger("halfstep")

_MOST_DIMENSIONS = 2
"""The most dimensions of time steps and positions. Images, features and states that hold integers are rounded."""

_LARGEST_INTEGER = 2.0**24
"""Beyond it fp32 cannot represent every integer, so larger values are masks or stand for infinity."""

Place = tuple[tuple[Any, ...], int]
"""The place of an input: its index or key in each container around it, and its number of dimensions."""


class ModuleInputs:
    """Casts of the inputs of a module inside a model, which are activations.

    Args:
        dtype: the dtype of the weights.

    Attributes:
        stays: inputs that stay fp32, because they held integers that the weights' dtype cannot represent, such as time
            steps.
        looked: the modes (training or not) whose first pass was checked for such integers. Checking every pass would
            make a dtype depend on a later batch, and wait for the device each time.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.stays: set[Place] = set()
        self.looked: set[bool] = set()

    def cast(self, args: Any, kwargs: Any, training: bool | None, made: Made | None) -> tuple[Any, Any]:
        """Return the arguments of a call with floating tensors cast to the dtype of the weights.

        Args:
            args: the positional arguments.
            kwargs: the keyword arguments.
            training: the mode of the model. The first pass in each mode is checked for integers that the dtype cannot
                represent; None checks nothing.
            made: a list that gets the inputs and their casts, for ``write_back``; None while Dynamo traces.
        """
        args = tuple([cast_tree(each, self.dtype) for each in args])
        return args, cast_tree(kwargs, self.dtype) if kwargs else kwargs


class ModelInputs(ModuleInputs):
    """Casts of the inputs of a model; copies of the model share them."""

    def cast(self, args: Any, kwargs: Any, training: bool | None, made: Made | None) -> tuple[Any, Any]:
        """Cast the arguments, keeping finite values finite; ``made`` gets the casts, for ``write_back``."""
        cast = partial(self._cast, made, training is not None and training not in self.looked)
        args = tuple([cast_tree(each, self.dtype, partial(cast, place), made) for place, each in enumerate(args)])
        kwargs = cast_tree(kwargs, self.dtype, cast, made) if kwargs else kwargs
        if training is not None:
            self.looked.add(training)
        return args, kwargs

    def _cast(self, made: Made | None, look: bool, *place_and_tensor: Any) -> torch.Tensor:
        """Cast a floating tensor, which follows its index or key in each container around it."""
        *place, tensor = place_and_tensor
        dtype, key, traced = self.dtype, (tuple(place), tensor.dim()), is_traced()
        own = type(tensor) is torch.Tensor and not (traced or tensor.is_meta)
        narrow: Callable[..., torch.Tensor] = torch.Tensor.to
        if dtype in HALF_DTYPES and tensor.layout is torch.strided and not tensor.is_nested:
            if look and own and _holds_large_integers(tensor.detach(), dtype) and key not in self.stays:
                text = "Input %s of a model holds integers above %d, which %s has not all. It stays float32."
                logger.info(text, place[0], 2 / torch.finfo(dtype).eps, dtype_name(dtype))
                self.stays.add(key)
            if key in self.stays and tensor.dtype is torch.float32:
                return tensor  # type: ignore[no-any-return]
            narrow = torch.Tensor.to if tensor.requires_grad else partial(narrow_finite, traced=traced)
        if not own or made is None:
            return narrow(tensor, dtype)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # inference tensors have no version that would show a write
                cast = narrow(tensor.detach(), dtype)
        else:
            cast = narrow(tensor, dtype)
        made.append((tensor, cast, None))
        return cast


def _holds_large_integers(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """True for integers that a dtype cannot represent exactly. Reads the device, unless a CUDA graph is captured."""
    captured = values.is_cuda and torch.cuda.is_current_stream_capturing()
    if values.dtype is not torch.float32 or values.dim() > _MOST_DIMENSIONS or not values.numel() or captured:
        return False
    return 2 / torch.finfo(dtype).eps < float(values.abs().max()) <= _LARGEST_INTEGER and values.equal(values.round())


def write_back(casts: Made) -> None:
    """Copy to the inputs, after a pass, the values that the model wrote to their casts, and nothing else.

    An empty input is resized to its cast, like an empty ``out=`` tensor; no other input changes its shape. Items that
    the model put into a list, mapping or dataclass are put into the caller's container unchanged.
    """
    given = {id(cast): value for value, cast, _ in casts}
    for value, cast, before in casts:
        if before is not None:
            now = items_of(cast).items()
            new = {key: given.get(id(item), item) for key, item in now if before.get(key, before) is not item}
            if isinstance(value, list) and (new or len(now) != len(before)):
                value[:] = [given.get(id(item), item) for item in cast]
            elif new:
                (value if isinstance(value, MutableMapping) else value.__dict__).update(new)
        elif cast._version and not (value.is_leaf and value.requires_grad and torch.is_grad_enabled()):
            if cast.numel() and not value.numel():
                value.resize_(cast.shape)
            if cast.shape == value.shape:
                unwritten = cast == narrow_finite(value, cast.dtype)
                value.copy_(torch.where(unwritten, value, cast.to(value.dtype)))
