"""A script with CUDA written all over it, on the CPU: ``halfstep run --device cpu``.

What it asks of CUDA is answered by the CPU: where tensors and modules go, what ``torch.cuda`` says and waits for, and
the backend of process groups. Everything is put back when the block ends.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

__all__ = ["cuda_on_cpu"]

logger = logging.getLogger("halfstep")


class _Event:
    """A ``torch.cuda.Event`` on the CPU, where everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        import time

        self._at = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds between two events."""
        return 1e3 * (end._at - self._at)


def _answer(value: Any) -> Callable[..., Any]:
    """A function for each name of its own: torch.compile takes one under two names for a mistake."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


_NOTHING = """synchronize empty_cache set_device init ipc_collect reset_peak_memory_stats reset_max_memory_allocated
    manual_seed_all"""
_TENSOR_TYPES = "FloatTensor DoubleTensor HalfTensor LongTensor IntTensor ByteTensor BoolTensor"
_ZERO = "current_device memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
_TORCH_CUDA: dict[str, Any] = {
    **{name: _answer(None) for name in _NOTHING.split()},
    **{name: _answer(0) for name in _ZERO.split()},
    "is_available": _answer(True),
    "device_count": _answer(1),
    "get_device_name": _answer("cpu"),
    "get_device_capability": _answer((7, 0)),
    "manual_seed": lambda seed: torch.manual_seed(seed),
    "Event": _Event,
    **{name: getattr(torch, name) for name in _TENSOR_TYPES.split()},
}


def _is_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


def _moved(value: Any) -> Any:
    return torch.device("cpu") if _is_cuda(value) else value


class _ToCpu(TorchFunctionMode):
    """Sends what asks for a CUDA device to the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with the CPU in the place of CUDA."""
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.device:
            asked = args[0] if args else kwargs.get("type", kwargs.get("device"))
            return torch.device("cpu") if type(asked) is int or _is_cuda(asked) else func(*args, **kwargs)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.to:
            # .to(0) means a CUDA device by its number
            args = (args[0], *[torch.device("cpu") if type(a) is int else _moved(a) for a in args[1:]])
        elif any(map(_is_cuda, args)):
            args = tuple(map(_moved, args))
        return func(*args, **kwargs)


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """A block in which CUDA means the CPU; it says so once, through the logger "halfstep"."""
    logger.warning("Everything that asks for CUDA runs on the CPU: this tries a script, it does not time it.")
    own_load, own_group, own_ddp = (
        torch.load,
        dist.init_process_group,
        torch.nn.parallel.DistributedDataParallel.__init__,
    )

    @functools.wraps(own_load)
    def load(*args: Any, **kwargs: Any) -> Any:
        where = kwargs.get("map_location", args[1] if len(args) > 1 else None)
        if not callable(where):
            args, kwargs["map_location"] = args[:1] + args[2:], "cpu"
        return own_load(*args, **kwargs)

    @functools.wraps(own_group)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return own_group("gloo" if backend in (None, "nccl") else backend, *args, **kwargs)

    @functools.wraps(own_ddp)
    def ddp(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        own_ddp(self, module, None, None, *args, **kwargs)

    replaced: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, value) for name, value in _TORCH_CUDA.items()),
        (torch.nn.Module, "cuda", lambda self, device=None: self),
        (torch, "load", load),
        (dist, "init_process_group", init_process_group),
        (DistributedDataParallel, "__init__", ddp),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        with _ToCpu():
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
