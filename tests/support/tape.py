"""A stand-in for CUDA graphs on a CPU: a tape of the ops that a function calls, which runs them again.

As a CUDA graph it records addresses, not values: a replay reads and writes the very tensors of the recording. As in a
capture nothing has happened when the recording ends (it runs, and what it wrote is put back), and reading a number on
the host is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from halfstep.kernels.backends.cpp import CppLauncher
from halfstep.parameters import async_reader, loss_scaler

READS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero")
recording: list[Tape] = []


class Tape:
    """Has the methods of ``halfstep.amp.train_step.recording.CudaGraph``."""

    def __init__(self, pool: Any = None) -> None:
        self.pool = pool or object()
        self.calls: list[Callable[[], object]] = []
        self.replays = 0

    @staticmethod
    def obstacle(device: torch.device) -> str | None:
        return None

    @staticmethod
    @contextlib.contextmanager
    def stream(device: torch.device, stream: Any) -> Iterator[Any]:
        yield stream or object()

    def record(self, function: Callable[[], Any]) -> Any:
        self.undo: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        recording.append(self)
        try:
            with _Recorder(self):
                return function()
        finally:
            recording.pop()
            with torch.no_grad():
                for tensor, before in self.undo.values():
                    tensor.copy_(before)

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad(), DisableTorchFunction(), torch._C._DisableAutocast():  # a graph's replay makes no calls
            for call in self.calls:
                call()

    def will_write(self, tensor: torch.Tensor) -> None:
        """Remember what a tensor held before the recording wrote to it."""
        if tensor.data_ptr() not in self.undo:
            self.undo[tensor.data_ptr()] = (tensor.detach(), tensor.detach().clone())


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in READS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        mutable = [
            value
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in tree_flatten(args[i] if i < len(args) else kwargs.get(argument.name))[0]
            if isinstance(value, torch.Tensor)
        ]
        if (
            func is torch.ops.aten.native_batch_norm.default
        ):  # its schema does not say that it writes running statistics
            mutable += [tensor for tensor in args[3:5] if tensor is not None]
        for tensor in mutable:
            self.tape.will_write(tensor)
        result = func(*args, **kwargs)
        inputs = {t.data_ptr() for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)}
        made = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
        views = any(r.alias_info is not None for r in func._schema.returns)

        def again() -> None:
            outputs = tree_flatten(func(*args, **kwargs))[0]
            if not views:
                for kept, output in zip(made, (o for o in outputs if isinstance(o, torch.Tensor)), strict=True):
                    if kept.data_ptr() not in inputs:
                        kept.copy_(output)

        if mutable or not views:
            self.tape.calls.append(again)
        return result


@contextlib.contextmanager
def imitation() -> Iterator[type[Tape]]:
    """Within the block, C++ kernels go onto tapes too, and the loss scaler knows of a recording."""
    launch = CppLauncher.__call__

    def run(launcher: Any, scalars: Any, *, skip: Any = None, found: Any = None) -> Any:
        if recording:
            tape = recording[-1]
            lists = launcher._pointers.memory.parts
            written = [tensor for part in launcher._written for tensor in lists[part]]
            for tensor in (*written, found, launcher._results, launcher._partial):
                if tensor is not None:
                    tape.will_write(tensor)
            keep = [list(part) for part in lists]  # their memory stays where it is
            tape.calls.append(lambda: (keep, results.copy_(launch(launcher, scalars, skip=skip, found=found))))
        with _disable_current_modes():  # what it does with tensors is a part of it
            results = launch(launcher, scalars, skip=skip, found=found)
        return results

    known = async_reader.capturing
    CppLauncher.__call__ = run  # type: ignore[method-assign]
    async_reader.capturing = loss_scaler.capturing = lambda device: bool(recording)  # type: ignore[attr-defined]
    try:
        yield Tape
    finally:
        CppLauncher.__call__ = launch  # type: ignore[method-assign]
        async_reader.capturing = loss_scaler.capturing = known  # type: ignore[attr-defined]
