"""What devices can do with the 16-bit formats: which they compute in at speed, and a warning where they do not.

Every device runs both formats: without units of its own it converts to fp32 and back, which is correct and slow.
"Supported" therefore means at speed, and nothing here ever stops a training.
"""

from __future__ import annotations

import functools
import warnings

import torch

from .errors import ArgumentTypeError, ArgumentValueError, PrecisionWarning
from .formats import dtype_name

__all__ = ["cpu_units", "is_bfloat16_supported", "is_float16_supported", "slow_reason", "warn_if_slow"]

CUDA_CAPABILITY = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}
"""The compute capability from which an NVIDIA GPU has tensor cores for a dtype."""

# Names of torch.cpu.get_capabilities(). Arm's are fp16_arith, bf16 and sve_bf16.
_CPU_UNITS = {
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
}
# The same questions as torch 2.11 answers them, which has no get_capabilities yet.
_CPU_UNITS_BEFORE_2_12 = {
    torch.float16: {"amx_fp16": "_is_amx_fp16_supported"},
    torch.bfloat16: {"avx512_bf16": "_is_avx512_bf16_supported", "amx_bf16": "_is_amx_tile_supported"},
}


def is_float16_supported(device: torch.device | str | int | None = None) -> bool:
    """Whether a device computes in float16 at speed.

    True for a CUDA device of compute capability 7.0 or more and for a CPU with AVX512-FP16, AMX-FP16 or Arm's FP16
    arithmetic. False does not mean that it fails: training in float16 works on every CPU and GPU, for example in
    tests; on a CPU without such units it is many times slower than fp32.

    Args:
        device: a ``torch.device``, its name ("gpu" means "cuda"), or the index of a CUDA device; None means CUDA
            where there is one and the CPU elsewhere.

    Raises:
        ArgumentValueError: for a device that is neither CPU nor CUDA, or that is not there.
        ArgumentTypeError: for what is no device at all.
    """
    return slow_reason(_parse_device(device), torch.float16) is None


def is_bfloat16_supported(device: torch.device | str | int | None = None) -> bool:
    """Whether a device computes in bfloat16 at speed.

    True for a CUDA device of compute capability 8.0 or more and for a CPU with AVX512-BF16, AMX or Arm's BF16.
    False does not mean that it fails: elsewhere bfloat16 is emulated, which saves memory and costs time.

    Args:
        device: as for ``is_float16_supported``.

    Raises:
        ArgumentValueError: for a device that is neither CPU nor CUDA, or that is not there.
        ArgumentTypeError: for what is no device at all.
    """
    return slow_reason(_parse_device(device), torch.bfloat16) is None


def cpu_units(dtype: torch.dtype) -> list[str]:
    """The instruction sets of this CPU that compute in a 16-bit dtype, by torch's names; none means emulation."""
    query = getattr(torch.cpu, "get_capabilities", None)  # since torch 2.12
    if query is not None:
        capabilities = query()
        return [unit for unit in _CPU_UNITS[dtype] if capabilities.get(unit)]
    return [unit for unit, asked in _CPU_UNITS_BEFORE_2_12[dtype].items() if _ask_torch_cpu(asked)]


def slow_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a device does not compute in a 16-bit dtype at speed and what to do, in two sentences; None if it does.

    Of other devices than CPU and CUDA nothing is known, and None is returned.
    """
    name = dtype_name(dtype)
    if device.type == "cpu":
        if cpu_units(dtype):
            return None
        if dtype is torch.float16 and cpu_units(torch.bfloat16):
            advice = "It has bfloat16 units: use dtype=torch.bfloat16."
        else:
            advice = 'Train in fp32 (opt_level="O0"), or on a GPU, if time matters more than memory.'
        cost = "is many times slower than fp32" if dtype is torch.float16 else "saves memory and costs time"
        return f"This CPU has no {name} units: {name} is emulated and {cost}. {advice}"
    # ROCm reports capabilities of its own numbering under the name of cuda.
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    found, needed = torch.cuda.get_device_capability(device), CUDA_CAPABILITY[dtype]
    if found >= needed:
        return None
    if dtype is torch.bfloat16 and found >= CUDA_CAPABILITY[torch.float16]:
        advice = "It has them for float16: use dtype=torch.float16."
    else:
        advice = 'Train in fp32 (opt_level="O0") if time matters more than memory.'
    return (
        f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]} and so no tensor cores for "
        f"{name}, which came with {needed[0]}.{needed[1]}. {advice}"
    )


@functools.cache
def warn_if_slow(device: torch.device, dtype: torch.dtype, stacklevel: int = 3) -> None:
    """Warn that a device is slow in a dtype, once per process for each device and dtype; then go on.

    Args:
        device: any device.
        dtype: torch.float16 or torch.bfloat16.
        stacklevel: as in ``warnings.warn``; 3 blames the caller of the public function that calls this.
    """
    reason = slow_reason(device, dtype)
    if reason is not None:
        warnings.warn(reason, PrecisionWarning, stacklevel=stacklevel)


def _parse_device(given: torch.device | str | int | None) -> torch.device:
    if given is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(given, bool) or not isinstance(given, (torch.device, str, int)):
        raise ArgumentTypeError(
            f'device must be a torch.device, a name such as "cuda:0", or an index, not {given!r}; '
            "leave it out for the default."
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = ", ".join(["cpu", *(f"cuda:{i}" for i in range(count))])
    name = f"cuda:{given}" if isinstance(given, int) else str(given)
    if name.startswith("gpu"):  # Paddle's word
        name = "cuda" + name.removeprefix("gpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArgumentValueError(f"device={given!r} is no device; here there are: {there}.") from None
    if device.type == "cpu" or (device.type == "cuda" and count and (device.index or 0) < count):
        return device
    if device.type == "cuda":
        raise ArgumentValueError(f"device={given!r} is not there; here there are: {there}.")
    raise ArgumentValueError(f"device={given!r} is neither CPU nor CUDA; here there are: {there}.")


def _ask_torch_cpu(name: str) -> bool:
    query = getattr(torch.cpu, name, None)
    return query is not None and bool(query())
