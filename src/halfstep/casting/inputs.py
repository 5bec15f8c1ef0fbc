"""The inputs of a model with 16-bit weights: how they are cast, and what the model writes to them.

Finite numbers stay finite, so that a row hidden by a mask of the lowest fp32 number has a softmax in 16 bits, too. An
input that requires gradients is an activation of another model: its overflow becomes an infinity, as inside a model.
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
"""Time steps and positions have no more: images, features and states that hold integers are rounded."""

_LARGEST_INTEGER = 2.0**24
"""All floats beyond are integers, and fp32 has not all of those: they are masks, or mean infinity."""

Place = tuple[tuple[Any, ...], int]
"""The place of an input: a number or name for each container around it; and its number of dimensions."""


class ModuleInputs:
    """Casts of the inputs of a module inside of a model, whose inputs are activations.

    Args:
        dtype: the dtype of the weights.

    Attributes:
        stays: inputs that held integers beyond the exact ones of the weights' dtype, as time steps do. They stay fp32.
        looked: the modes (training or not) whose first pass has been looked at for such integers. A look in every pass
            would let a dtype depend on a late batch, and a device would have to wait for it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.stays: set[Place] = set()
        self.looked: set[bool] = set()

    def cast(self, args: Any, kwargs: Any, training: bool | None, made: Made | None) -> tuple[Any, Any]:
        """The arguments of a call, in which floating tensors have the dtype of the weights, or stay fp32.

        Args:
            args: the positional arguments.
            kwargs: the keyword arguments.
            training: the mode of the model. The first pass in each is looked at for integers that the dtype does not
                have; None looks at none.
            made: gets what was cast, and the casts, for ``write_back``; None where Dynamo traces.
        """
        args = tuple([cast_tree(each, self.dtype) for each in args])
        return args, cast_tree(kwargs, self.dtype) if kwargs else kwargs


class ModelInputs(ModuleInputs):
    """Casts of the inputs of a model; copies of the model share them."""

    def cast(self, args: Any, kwargs: Any, training: bool | None, made: Made | None) -> tuple[Any, Any]:
        """Cast the arguments, keeping finite numbers finite; ``made`` gets the casts, for ``write_back``."""
        cast = partial(self._cast, made, training is not None and training not in self.looked)
        args = tuple([cast_tree(each, self.dtype, partial(cast, place), made) for place, each in enumerate(args)])
        kwargs = cast_tree(kwargs, self.dtype, cast, made) if kwargs else kwargs
        if training is not None:
            self.looked.add(training)
        return args, kwargs

    def _cast(self, made: Made | None, look: bool, *place_and_tensor: Any) -> torch.Tensor:
        """A floating tensor, after a number or name for each container around it."""
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
            with torch.inference_mode(False):  # tensors of that mode do not say whether they were written
                cast = narrow(tensor.detach(), dtype)
        else:
            cast = narrow(tensor, dtype)
        made.append((tensor, cast, None))
        return cast


def _holds_large_integers(values: torch.Tensor, dtype: torch.dtype) -> bool:
    """True for integers beyond the exact ones of a dtype. Reads the device, unless a CUDA graph is captured."""
    captured = values.is_cuda and torch.cuda.is_current_stream_capturing()
    if values.dtype is not torch.float32 or values.dim() > _MOST_DIMENSIONS or not values.numel() or captured:
        return False
    largest = float(values.abs().max())
    return 2 / torch.finfo(dtype).eps < largest <= _LARGEST_INTEGER and values.equal(values.round())


def write_back(casts: Made) -> None:
    """Copy to the inputs, after a pass, what the model has written to their casts, and nothing else.

    An empty input becomes as large as its cast, as an empty ``out=`` tensor does. No other input gets another shape.
    Items that the model has put into a list, a mapping or a data class are put into the given container as they are.
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
