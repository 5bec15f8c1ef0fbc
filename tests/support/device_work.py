"""What a step asks of a GPU, counted on a fake one: launches of Triton kernels, ops, and copies from the host."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep import kernels
from halfstep.kernels import launch
from halfstep.kernels.backends import triton
from halfstep.parameters.async_reader import AsyncReader
from tests.support.fake_cuda import fake_cuda

__all__ = ["DeviceWork", "fake_steps"]

_NO_KERNEL = ("prim::", "profiler::", "aten::detach", "aten::alias", "aten::view", "aten::select", "aten::unbind")
_NO_KERNEL_EITHER = ("aten::empty", "aten::expand", "aten::as_strided", "aten::_unsafe_view", "aten::slice")


def _record_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the Triton backend run without Triton: a launch only writes the name of its kernel into this list."""
    launches: list[str] = []

    class Module:
        def __init__(self, kernel: Any) -> None:
            self.kernel = {(chunks,): self._launch for chunks in range(1, 9999)}
            self._name = kernel.name

        def _launch(self, *args: Any, **options: Any) -> None:
            launches.append(self._name)

    monkeypatch.setattr(launch, "_has_triton", lambda: True)
    monkeypatch.setattr(triton, "_module", lambda kernel, *_: Module(kernel))
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    # Fake tensors have nothing to pin.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    return launches


@contextlib.contextmanager
def fake_steps(monkeypatch: pytest.MonkeyPatch, backend: str = "triton") -> Iterator[list[str]]:
    """A block on a fake CUDA device with a backend; gives the names of the Triton kernels that are launched in it."""
    launches = _record_launches(monkeypatch) if backend == "triton" else []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    # What is read late, without a wait, is copied through pinned memory, and there is nothing to pin.
    monkeypatch.setattr(AsyncReader, "post", lambda *_: None)
    with fake_cuda() as name, torch.device(name), kernels.backend(backend):
        yield launches


class DeviceWork(TorchDispatchMode):
    """Counts the ops of a block, inside of a fake device.

    Attributes:
        ops: by name, those that run a kernel; views and allocations are left out.
        copies: those that bring something from the host, or to it.
        read: the identities of the tensors that were read.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.copies: list[str] = []
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name() if hasattr(func, "name") else str(func)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not name.startswith(_NO_KERNEL + _NO_KERNEL_EITHER) and any(t.numel() for t in outputs or inputs):
            self.ops[name] += 1
            self.read |= set(map(id, inputs))
            if len({t.device.type for t in [*inputs, *outputs]}) > 1:
                self.copies.append(name)
        return result
