"""The memory of training in bytes: a table for every level and optimizer, and a count for a live model.

The table is data: a new optimizer or option is one entry of ``OPTIMIZERS``. Tests train with each entry and count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...core.checks import check_kind
from ...kernels.shards import local
from ...parameters.masters import unsaved
from ...stepping.attached import attached_to
from ...torch_internals.torch_compat import is_traceable_wrapper_subclass
from ..observe.ops import tensors_in

__all__ = ["ACTIVATIONS", "LEVELS", "OPTIMIZERS", "Memory", "MemoryLine", "OptimizerMemory", "lines", "memory"]


class OptimizerMemory(NamedTuple):
    """The memory of an optimizer, in bytes per parameter.

    Attributes:
        name: the name of the optimizer, with its options.
        state: the moments and other state of fp32 weights and of weights at O2.
        state_of_halves: the state of weights without masters, at O3.
        split: True if bfloat16 weights have split masters, of 2 bytes.
        released: True if the backward pass frees gradients.
    """

    name: str
    state: int
    state_of_halves: int
    split: bool = True
    released: bool = False


OPTIMIZERS = (
    OptimizerMemory("torch.optim.SGD", 0, 0),
    OptimizerMemory("torch.optim.SGD, momentum", 4, 2),
    OptimizerMemory("torch.optim.AdamW", 8, 4),
    OptimizerMemory("torch.optim.Adagrad", 4, 2),
    OptimizerMemory("torch.optim.RMSprop", 4, 2, split=False),
    OptimizerMemory("torch.optim.Muon", 4, 2),
    OptimizerMemory("FusedSGD, momentum", 4, 4),
    OptimizerMemory("FusedAdam", 8, 8),
    OptimizerMemory("FusedAdam, bfloat16 state", 6, 6),
    OptimizerMemory("FusedAdam, release=True", 8, 8, released=True),
    OptimizerMemory("FusedLAMB", 8, 8),
    OptimizerMemory("FusedMuon", 4, 4),
    OptimizerMemory("FusedNovoGrad", 4, 4),
    OptimizerMemory("FusedAdagrad", 4, 4),
)
"""The optimizers of the table. Numbers stored once per tensor, such as step counts, are left out."""

LEVELS = (("O0", "float32"), ("O1", "bfloat16"), ("O2", "bfloat16"), ("O2", "float16"), ("O3", "bfloat16"))
"""The levels and dtypes of the table. O1 and O3 need the same memory in float16 as in bfloat16."""

ACTIVATIONS = {
    "O0": "4",
    "O1": "2 for inputs of products, 4 for inputs and results of ops on the float list; 2 for each cast of a weight",
    "O2": "2, and 4 around losses",
    "O3": "2",
}
"""Bytes per value that autograd saves for the backward pass, on a device with 16-bit units."""


class MemoryLine(NamedTuple):
    """Bytes per parameter of one optimizer at one level.

    Attributes:
        level: the level, O0 to O3.
        dtype: the dtype of products.
        optimizer: the name of the optimizer, with its options.
        weights: the parameters themselves.
        masters: the fp32 weights behind 16-bit weights, or the remainders that complete split ones.
        state: the state of the optimizer, without masters.
        gradients: the gradients between a backward pass and its step.
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
        """The sum of weights, masters, state and gradients."""
        return self.weights + self.masters + self.state + self.gradients


def lines() -> Iterator[MemoryLine]:
    """Yield the table: every optimizer at every level."""
    for kept in OPTIMIZERS:
        for level, dtype in LEVELS:
            full, split = level in ("O0", "O1"), kept.split and dtype == "bfloat16"
            masters = 0 if level != "O2" else 2 if split else 4
            weights, state = 4 if full else 2, kept.state_of_halves if level == "O3" else kept.state
            gradients = 0 if kept.released else 4 if level == "O2" and dtype == "float16" else weights
            yield MemoryLine(level, dtype, kept.name, weights, masters, state, gradients)


class Memory(NamedTuple):
    """The memory of a model and its optimizer in this process, in bytes.

    Attributes:
        parameters: the number of parameters (not bytes).
        weights: the parameters.
        masters: the fp32 masters of 16-bit parameters, or the remainders of split masters.
        state: the state of the optimizer, without masters.
        gradients: the gradients that exist now.
        buffers: the buffers of the model, such as BatchNorm statistics.
    """

    parameters: int
    weights: int
    masters: int
    state: int
    gradients: int
    buffers: int

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.weights + self.masters + self.state + self.gradients + self.buffers

    def __str__(self) -> str:
        found = self._asdict()
        count = found.pop("parameters")
        body = [*found.items(), ("total", self.total)]
        rows = [f"{name:<10}{size / 2**20:>12,.1f} MiB{size / max(count, 1):>8.2f} a parameter" for name, size in body]
        return "\n".join([f"{count:,} parameters", *rows])


def memory(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Memory:
    """Count the bytes of a model and its optimizer now: weights, masters, state, gradients, buffers.

    ::

        print(halfstep.memory(model, optimizer))

    Shared memory counts once. A sharded tensor counts with this process's shard, a sparse tensor with its indices and
    values, a quantized tensor with its codes and scales, and an uninitialized lazy parameter with nothing. Tensors on
    the meta device count with the size that they would have elsewhere. Optimizers create their state in their first
    step, and gradients exist from a backward pass to ``zero_grad``, so a count after the second backward pass is
    complete. ``halfstep memory`` prints the expected bytes per parameter.

    Args:
        model: any module, on any device.
        optimizer: the optimizer, prepared by halfstep or not; None counts neither masters nor state.

    Raises:
        ArgumentTypeError: for arguments of other types.
    """
    check_kind("model", model, nn.Module, "a torch.nn.Module")
    check_kind("optimizer", optimizer, (torch.optim.Optimizer, NoneType), "a torch.optim.Optimizer or None")
    masters: list[Any] = []
    state: list[Any] = []
    if optimizer is not None:
        attached = attached_to(optimizer)
        masters += [] if attached is None else [master for _, master in unsaved(attached.window.table)]
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
"""The methods of sparse tensors that return the dense tensors inside, by layout."""


def _bytes_of(values: Iterable[Any], seen: set[torch.UntypedStorage]) -> int:
    """Count the bytes of tensors without the storages in ``seen``, and add their storages to it.

    Tensors share memory if they have the same storage; addresses do not tell, because on the meta device, and for fake
    tensors, all addresses are 0.
    """
    found = {part.untyped_storage() for each in tensors_in(list(values)) for part in _plain_parts(each)} - seen
    seen |= found
    return sum(storage.nbytes() for storage in found)


def _plain_parts(tensor: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors with a storage that make up a tensor of any kind; none for a parameter without a shape."""
    is_wrapper = is_traceable_wrapper_subclass(tensor)
    names = tensor.__tensor_flatten__()[0] if is_wrapper else _INSIDE.get(tensor.layout, ())
    for name in names:
        yield from _plain_parts(getattr(tensor, name) if is_wrapper else getattr(tensor, name)())
    if not names and not is_lazy(tensor):
        yield tensor
