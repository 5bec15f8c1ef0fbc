"""Where the bytes of training are: a table for every level and optimizer, and a count for a model that is there.

The table is data: a new optimizer or option is one entry of ``OPTIMIZERS``. Its tests train with each and count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..core.checks import check_kind
from ..core.torch_compat import is_traceable_wrapper_subclass
from ..kernels.shards import local
from ..observe.ops import tensors_in
from ..stepping.attached import attached_to

__all__ = ["ACTIVATIONS", "LEVELS", "OPTIMIZERS", "Kept", "Line", "Memory", "lines", "memory"]


class Kept(NamedTuple):
    """What an optimizer keeps, in bytes a parameter.

    Attributes:
        name: of the optimizer, with its options.
        state: moments and the like of fp32 and of O2's weights.
        state_of_halves: of weights without masters, at O3.
        split: True if bfloat16 weights have split masters, of 2 bytes.
        gradients: of bfloat16 weights with masters; None if they are freed inside of the backward pass at every level.
    """

    name: str
    state: int
    state_of_halves: int
    split: bool = True
    gradients: int | None = 4


OPTIMIZERS = (
    Kept("torch.optim.SGD", 0, 0),
    Kept("torch.optim.SGD, momentum", 4, 2),
    Kept("torch.optim.AdamW", 8, 4),
    Kept("torch.optim.Adagrad", 4, 2),
    Kept("torch.optim.RMSprop", 4, 2, split=False),
    Kept("torch.optim.Muon", 4, 2),
    Kept("FusedSGD, momentum", 4, 4),
    Kept("FusedAdam", 8, 8),
    Kept("FusedAdam, bfloat16 state", 6, 6),
    Kept("FusedAdam, max_grad_norm", 8, 8, gradients=2),
    Kept("FusedAdam, release=True", 8, 8, gradients=None),
    Kept("FusedLAMB", 8, 8, gradients=2),
    Kept("FusedMuon", 4, 4),
    Kept("FusedNovoGrad", 4, 4),
    Kept("FusedAdagrad", 4, 4),
)
"""The optimizers of the table. Numbers that a tensor has once, such as step counts, are left out."""

LEVELS = (("O0", "float32"), ("O1", "bfloat16"), ("O2", "bfloat16"), ("O2", "float16"), ("O3", "bfloat16"))
"""The levels and dtypes of the table. O1 and O3 keep in float16 what they keep in bfloat16."""

ACTIVATIONS = {
    "O0": "4",
    "O1": "2 for inputs of products, 4 for what the ops of the float list read or give; 2 for each cast of a weight",
    "O2": "2, and 4 around losses",
    "O3": "2",
}
"""Bytes of a number that is kept for the backward pass on a device with 16-bit units."""


class Line(NamedTuple):
    """Bytes a parameter of one optimizer at one level.

    Attributes:
        level: O0 to O3.
        dtype: of products.
        optimizer: with its options.
        weights: the parameters themselves.
        masters: fp32 weights behind 16-bit ones, or what makes a 16-bit weight one.
        state: of the optimizer, without masters.
        gradients: between a backward pass and its step.
    """

    level: str
    dtype: str
    optimizer: str
    weights: float
    masters: float
    state: float
    gradients: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.masters + self.state + self.gradients


def lines() -> Iterator[Line]:
    """The table of halfstep: every optimizer at every level."""
    for kept in OPTIMIZERS:
        for level, dtype in LEVELS:
            full, split = level in ("O0", "O1"), kept.split and dtype == "bfloat16"
            masters = 0 if level != "O2" else 2 if split else 4
            gradients = 4 if full else 2 if level == "O3" else (kept.gradients or 0) if split else 4
            weights, state = 4 if full else 2, kept.state_of_halves if level == "O3" else kept.state
            gradients = 0 if kept.gradients is None else gradients
            yield Line(level, dtype, kept.name, weights, masters, state, gradients)


class Memory(NamedTuple):
    """The bytes that a model and its optimizer hold, on this process.

    Attributes:
        parameters: the number of parameters, not bytes.
        weights: of parameters.
        masters: fp32 masters of 16-bit parameters, or the remainders that split masters are made of.
        state: of the optimizer, without masters.
        gradients: those that are there at the moment.
        buffers: of the model, such as BatchNorm statistics.
    """

    parameters: int
    weights: int
    masters: int
    state: int
    gradients: int
    buffers: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.weights + self.masters + self.state + self.gradients + self.buffers

    def __str__(self) -> str:
        found = self._asdict()
        count = found.pop("parameters")
        body = [*found.items(), ("total", self.total)]
        rows = [f"{name:<10}{size / 2**20:>12,.1f} MiB{size / max(count, 1):>8.2f} a parameter" for name, size in body]
        return "\n".join([f"{count:,} parameters", *rows])


def memory(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Memory:
    """Count the bytes that a model and its optimizer hold now: weights, masters, state, gradients, buffers.

    ::

        print(halfstep.memory(model, optimizer))

    Memory that several tensors share counts once. Of sharded tensors the shard of this process counts, of sparse ones
    indices and values, of quantized ones codes and scales, and parameters of lazy modules that have no shape yet count
    nothing. On the meta device it counts what the tensors would take elsewhere. Optimizers make
    their state in their first step, and gradients are there from a backward pass to ``zero_grad``: so a count after the
    second backward pass has all. ``halfstep memory`` prints what it comes to, in bytes a parameter.

    Args:
        model: any module, on any device.
        optimizer: that steps it, brought up by halfstep or not; None counts neither masters nor state.

    Raises:
        ArgumentTypeError: if they are something else.
    """
    check_kind("model", model, nn.Module, "a torch.nn.Module")
    check_kind("optimizer", optimizer, (torch.optim.Optimizer, NoneType), "a torch.optim.Optimizer or None")
    masters: list[Any] = []
    state: list[Any] = []
    if optimizer is not None:
        attached = attached_to(optimizer)
        masters += [] if attached is None else [master for _, master in attached.keeper.started()]
        for values in optimizer.state.values():
            for name, value in values.items() if isinstance(values, Mapping) else [("", values)]:
                (masters if name in ("master", "remainder") else state).append(value)
    params = list(model.parameters())
    seen: set[torch.UntypedStorage] = set()
    grads = [param.grad for param in params]
    sizes = [_bytes_of(tensors, seen) for tensors in (params, masters, state, grads, model.buffers())]
    return Memory(sum(local(param.detach()).numel() for param in params if not is_lazy(param)), *sizes)


_INSIDE = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}
"""The methods of sparse tensors that give the dense ones inside, by layout."""


def _bytes_of(values: Iterable[Any], seen: set[torch.UntypedStorage]) -> int:
    """The bytes of the memory of tensors, without what has been seen, and that is seen from now on.

    Two tensors share memory if they have one storage: on the meta device, and for fake tensors, all addresses are 0.
    """
    found = {part.untyped_storage() for each in tensors_in(list(values)) for part in _plain_parts(each)} - seen
    seen |= found
    return sum(storage.nbytes() for storage in found)


def _plain_parts(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors with a storage that a tensor of any kind is made of; none for a parameter without a shape."""
    is_wrapper = is_traceable_wrapper_subclass(tensor)
    names = tensor.__tensor_flatten__()[0] if is_wrapper else _INSIDE.get(tensor.layout, ())
    for name in names:
        yield from _plain_parts(getattr(tensor, name) if is_wrapper else getattr(tensor, name)())
    if not names and not is_lazy(tensor):
        yield tensor
