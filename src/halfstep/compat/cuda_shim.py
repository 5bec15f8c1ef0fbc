"""CUDA scripts on the CPU: ``halfstep run --device cpu``.

In the block, tensors and modules go to the CPU, functions of ``torch.cuda`` answer for the CPU, and process groups use
gloo. The end of the block restores everything. A function without a meaningful answer, such as memory statistics, logs
this once.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.nccl
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from .sync_batchnorm import SyncBatchNorm, convert_syncbn_model

__all__ = ["cuda_on_cpu"]

logger = logging.getLogger("halfstep")


class _Done:
    """A CUDA object on the CPU, where all work is already complete."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = 0.0

    def synchronize(self, other: Any = None) -> None:
        """Return at once."""

    wait = wait_stream = wait_event = synchronize

    def query(self) -> bool:
        """True: all work is complete."""
        return True


class _Event(_Done):
    """A ``torch.cuda.Event`` on the CPU, where all work is already complete."""

    def record(self, stream: Any = None) -> None:
        """Record the current time."""
        import time

        self._at = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        """Return the milliseconds between two events."""
        return 1e3 * (end._at - self._at)


class _Stream(_Done):
    """A ``torch.cuda.Stream`` on the CPU, where all work is already complete."""

    cuda_stream = priority = 0
    device = torch.device("cpu")

    def record_event(self, event: _Event | None = None) -> _Event:
        """Return an event recorded now."""
        event = event or _Event()
        event.record()
        return event


class _GeneratorType(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _OWN_GENERATOR)

    def __call__(cls, device: Any = "cpu") -> Any:
        return _OWN_GENERATOR(device=_moved(device))


_OWN_GENERATOR = torch.Generator


class _Generator(metaclass=_GeneratorType):
    """A class whose calls make a CPU ``torch.Generator``, and whose instances are all CPU generators."""


def _answer(value: Any) -> Callable[..., Any]:
    """Make a new function that returns ``value``. Torch.compile refuses one function under two names."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


_logged: set[str] = set()


def _pretend(name: str, value: Any) -> Callable[..., Any]:
    """Make a function that returns a made-up ``value`` and logs this once."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        if name not in _logged:
            _logged.add(name)
            logger.warning("torch.cuda.%s is always %r on the CPU.", name, value)
        return value

    return answer


def _block(*args: Any, **kwargs: Any) -> Any:
    """Return a block without effect, in place of a stream or device block."""
    return nullcontext()


def _memory() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_NOTHING = """synchronize empty_cache set_device init ipc_collect reset_peak_memory_stats reset_max_memory_allocated
    manual_seed_all seed seed_all set_stream reset_max_memory_cached reset_accumulated_memory_stats"""
_PROFILER = {"init": _answer(None), "start": _answer(None), "stop": _answer(None), "profile": _block}
_CUDART = SimpleNamespace(
    **{name: _answer(0) for name in ("cudaProfilerInitialize", "cudaProfilerStart", "cudaProfilerStop")},
    cudaGetDeviceCount=_answer(1),
    cudaMemGetInfo=lambda device=None: (_memory(), _memory()),
)
_NCCL = {"version": _answer((2, 18, 0)), "is_available": _answer(False), "unique_id": _answer(b"")}
_TENSOR_TYPES = "FloatTensor DoubleTensor HalfTensor BFloat16Tensor LongTensor IntTensor ByteTensor BoolTensor"
_ZERO = """memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached
    utilization"""
_NVTX = {"range_push": _answer(0), "range_pop": _answer(0), "mark": _answer(None), "range": _block}
_TORCH_CUDA: dict[str, Any] = {
    **{name: _answer(None) for name in _NOTHING.split()},
    **{name: _pretend(name, 0) for name in _ZERO.split()},
    "current_device": _answer(0),
    "is_available": _answer(True),
    "device_count": _answer(1),
    "get_device_name": _answer("cpu"),
    "get_device_capability": _answer((7, 0)),
    "get_device_properties": lambda device=None: SimpleNamespace(
        name="cpu", major=7, minor=0, total_memory=_memory(), multi_processor_count=os.cpu_count()
    ),
    "get_arch_list": _answer([]),
    "is_bf16_supported": _answer(True),
    "can_device_access_peer": _answer(False),
    "mem_get_info": lambda device=None: (_memory(), _memory()),
    "memory_summary": _pretend("memory_summary", ""),
    "memory_stats": _pretend("memory_stats", {}),
    "manual_seed": lambda seed: torch.manual_seed(seed),
    "initial_seed": lambda: torch.initial_seed(),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    "cudart": lambda: _CUDART,
    "Event": _Event,
    "Stream": _Stream,
    "current_stream": lambda device=None: _Stream(),
    "default_stream": lambda device=None: _Stream(),
    **dict.fromkeys(("stream", "device", "device_of"), _block),
    **{name: getattr(torch, name) for name in _TENSOR_TYPES.split()},
}


def _is_cuda(value: Any) -> bool:
    if isinstance(value, str):
        return value.partition(":")[0] == "cuda"
    return isinstance(value, torch.device) and value.type == "cuda"


def _moved(value: Any) -> Any:
    """Return the CPU for a CUDA device or a device index, and any other value unchanged."""
    return torch.device("cpu") if _is_cuda(value) or type(value) is int else value


def _asked_by_script() -> bool:
    """True if the caller is the script or a library that it uses; torch and halfstep need the real answer."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("halfstep.casting."):
        frame = frame.f_back  # ops of models at O1 come through there
    return frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "halfstep")


_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class _ToCpu(TorchFunctionMode):
    """A mode that redirects calls with a CUDA device to the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with the CPU in place of CUDA."""
        kwargs = dict(kwargs or {})
        if func == _IS_CUDA and _asked_by_script():
            return True
        if func is torch.Tensor.get_device and _asked_by_script():
            return 0
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and _asked_by_script():
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.type and len(args) > 1 and isinstance(args[1], str):
            args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
        if func is torch.device:
            asked = args[0] if args else kwargs.get("type", kwargs.get("device"))
            return torch.device("cpu") if type(asked) is int or _is_cuda(asked) else func(*args, **kwargs)
        if "device" in kwargs:
            kwargs["device"] = _moved(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *map(_moved, args[1:]))
        elif any(map(_is_cuda, args)):
            args = tuple(torch.device("cpu") if _is_cuda(arg) else arg for arg in args)
        return func(*args, **kwargs)


def _on_gloo(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes a process group to use gloo in place of NCCL."""
    signature = inspect.signature(own)

    @functools.wraps(own)
    def make(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        given.pop("device_id", None)
        if "nccl" in (given.get("backend") or "nccl"):
            given["backend"] = "gloo"
        return own(**given)

    return make


class _SyncBatchNorm(SyncBatchNorm):
    """``torch.nn.SyncBatchNorm``, which ``DistributedDataParallel`` refuses on a CPU."""

    def __init__(self, *args: Any, device: Any = None, dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.to(dtype=dtype)

    @staticmethod
    def convert_sync_batchnorm(module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
        """Convert the BatchNorms of a module, as torch's method does."""
        converted = convert_syncbn_model(module, process_group)
        for part in converted.modules():
            part.__class__ = _SyncBatchNorm if type(part) is SyncBatchNorm else part.__class__
        return converted


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Open a block in which CUDA means the CPU, and log this once through the logger "halfstep"."""
    logger.warning("Everything that asks for CUDA runs on the CPU: this tries a script, it does not time it.")
    own_load, own_ddp = torch.load, DistributedDataParallel.__init__
    own_to, own_autocast = torch.nn.Module.to, torch.autocast.__init__

    @functools.wraps(own_load)
    def load(*args: Any, **kwargs: Any) -> Any:
        where = kwargs.get("map_location", args[1] if len(args) > 1 else None)
        if not callable(where):
            args, kwargs["map_location"] = args[:1] + args[2:], "cpu"
        return own_load(*args, **kwargs)

    @functools.wraps(own_ddp)
    def ddp(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        own_ddp(self, module, None, None, *args, **kwargs)

    @functools.wraps(own_to)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _moved(kwargs["device"])
        return own_to(self, *map(_moved, args), **kwargs)

    @functools.wraps(own_autocast)
    def autocast(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any) -> None:
        dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype  # float16 on CUDA
        own_autocast(self, "cpu" if _is_cuda(device_type) else device_type, dtype, *args, **kwargs)

    def data_parallel(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        torch.nn.Module.__init__(self)
        self.module, self.device_ids, self.dim = module, [], dim  # without devices it calls the module

    replaced: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, value) for name, value in _TORCH_CUDA.items()),
        *((torch.cuda.nvtx, name, value) for name, value in _NVTX.items()),
        *((torch.cuda.profiler, name, value) for name, value in _PROFILER.items()),
        *((torch.cuda.nccl, name, value) for name, value in _NCCL.items()),
        (torch.version, "cuda", "12.1"),
        (torch, "Generator", _Generator),
        (torch.Tensor, "cuda", lambda self, *args, **kwargs: self),
        (torch.Tensor, "pin_memory", lambda self, *args, **kwargs: self),
        (torch.Tensor, "record_stream", lambda self, stream: None),
        (torch.nn.Module, "cuda", lambda self, device=None: self),
        (torch.nn.Module, "to", to),
        (torch.autocast, "__init__", autocast),
        (torch.nn.DataParallel, "__init__", data_parallel),
        (torch, "load", load),
        (torch.nn, "SyncBatchNorm", _SyncBatchNorm),
        *((dist, name, _on_gloo(getattr(dist, name))) for name in ("init_process_group", "new_group")),
        (DistributedDataParallel, "__init__", ddp),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)
        stack.enter_context(_ToCpu())
        yield
