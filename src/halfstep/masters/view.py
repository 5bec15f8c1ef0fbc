"""What ``amp.master_params`` yields: the fp32 master of a weight as a parameter to read, write and clip.

Its gradient is the gradient of the weight, so clipping one clips the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.dtypes import is_half
from ..core.torch_compat import schema_of, subclass_over, subclass_without_memory, tree_map_only
from ..gradients.ledger import get_grads, set_grads

__all__ = ["MasterParameter", "SplitMasterParameter"]


class MasterParameter(torch.nn.Parameter):
    """The master of one weight, float32, in the shape and on the device of the weight.

    Of a plain master it shares the memory, and the next step rounds that into the weight. A master that a fused
    optimizer keeps in parts is put together when an operation reads it, and an operation that writes to it changes the
    parts and the weight.

    Attributes:
        weight: the weight in the model.
    """

    weight: torch.Tensor

    @staticmethod
    def over(weight: torch.Tensor, master: torch.Tensor) -> MasterParameter:
        """The view of a master that lies in memory of its own."""
        view: MasterParameter = subclass_over(MasterParameter, master.detach(), True)
        view.weight = weight
        return view

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the weight, in fp32 from here on."""
        (grad,) = get_grads([self.weight])
        if grad is not None and is_half(grad):
            set_grads([self.weight], [grad.float()])
            (grad,) = get_grads([self.weight])
        return grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        if grad is None:
            self.weight.grad = None
        else:
            set_grads([self.weight], [grad])

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """An ordinary fp32 parameter."""
        found = memo.get(id(self))
        if found is None:
            found = memo[id(self)] = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as an ordinary fp32 parameter."""
        return torch.nn.Parameter(self.detach().clone(), self.requires_grad).__reduce_ex__(protocol)


class SplitMasterParameter(MasterParameter):
    """The view of a master that is kept in parts."""

    without_memory = True
    """Kernels ask this, and work on a copy."""

    _read: Callable[[torch.Tensor], torch.Tensor]
    _write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    @staticmethod
    def of(
        weight: torch.Tensor,
        read: Callable[[torch.Tensor], torch.Tensor],
        write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        requires_grad: bool = True,
    ) -> SplitMasterParameter:
        """The view of a master that ``read`` puts together, and of which ``write`` returns what the weight becomes."""
        view: Any = subclass_without_memory(
            SplitMasterParameter,
            weight.shape,
            strides=weight.stride(),
            dtype=torch.float32,
            device=weight.device,
            requires_grad=requires_grad,
        )
        view.weight, view._read, view._write = weight, read, write
        return view  # type: ignore[no-any-return]

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array of their own: there is no memory to share. TensorBoard and wandb ask for it."""
        return self.detach().clone().numpy(force=force)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:  # ``view.data`` is written to as well
            (view,) = args
            return cls.of(view.weight, view._read, view._write, requires_grad=False)
        values: dict[int, tuple[SplitMasterParameter, torch.Tensor]] = {}

        def value_of(view: SplitMasterParameter) -> torch.Tensor:
            if id(view) not in values:
                value = view._read(view.weight)
                values[id(view)] = (view, value)
            return values[id(view)][1]

        kwargs = kwargs or {}
        written = [each for each in _written(func, args, kwargs) if isinstance(each, SplitMasterParameter)]
        result = func(*tree_map_only(cls, value_of, args), **tree_map_only(cls, value_of, kwargs))
        for view in written:
            _, value = values[id(view)]
            with torch.no_grad():
                view.weight.copy_(view._write(view.weight, value))
        if result is not None and len(written) == 1 and result is values[id(written[0])][1]:
            return written[0]
        return result


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes to."""
    found: list[Any] = []
    for i, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or i >= len(args) else args[i]
            found.extend(value if isinstance(value, (list, tuple)) else [value])
    return found
