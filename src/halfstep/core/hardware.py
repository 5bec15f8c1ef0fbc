"""Hardware support of the 16-bit formats: the devices that have units for them, by class of ops.

Every device runs both formats. If it has no units for one (``has_units``), ``casting.emulation`` runs the products in
fp32 kernels instead. No function here stops a training.
"""

from __future__ import annotations

import functools
import os
import warnings

import torch

from ..torch_internals.callers import callers_level
from .dtypes import dtype_name
from .errors import ArgumentTypeError, ArgumentValueError, PrecisionWarning

__all__ = [
    "accelerator",
    "cpu_units",
    "has_units",
    "is_bfloat16_supported",
    "is_float16_supported",
    "slow_reason",
    "warn_if_absent",
    "warn_if_slow",
]

CUDA_CAPABILITY = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}
"""The compute capability from which an NVIDIA GPU has tensor cores for a dtype."""

# Names of torch.cpu.get_capabilities(). Arm's are fp16_arith, bf16 and sve_bf16.
_CPU_UNITS = {
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
}
# The variable limits the instruction sets of oneDNN, and so of torch: each row has the names of one limit, and the
# units that it disables. Source: https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
_ISA_VARIABLE = "ONEDNN_MAX_CPU_ISA"
_ISA_LEVELS: tuple[tuple[frozenset[str], tuple[str, ...]], ...] = (
    (
        frozenset(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")),
        ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16"),
    ),
    (frozenset(("AVX512_CORE_BF16",)), ("avx512_fp16", "amx_bf16", "amx_fp16")),
    (frozenset(("AVX512_CORE_FP16", "AVX10_1_512")), ("amx_bf16", "amx_fp16")),
    (frozenset(("AVX512_CORE_AMX", "AVX10_1_512_AMX")), ("amx_fp16",)),
)
# On a CPU, float16 is fast in matrix products only. torch 2.13 on a Xeon with AVX512-FP16, 2 cores: a convolution takes
# 107 times the time of fp32, forward and backward, an LSTM 3.4 times, attention 2.5 times.
_FLOAT16_ON_CPU = frozenset(("product",))

# The queries of torch 2.11, which does not have get_capabilities yet.
_CPU_UNITS_BEFORE_2_12 = {
    torch.float16: {"amx_fp16": "_is_amx_fp16_supported"},
    torch.bfloat16: {"avx512_bf16": "_is_avx512_bf16_supported", "amx_bf16": "_is_amx_tile_supported"},
}


def is_float16_supported(device: torch.device | str | int | None = None) -> bool:
    """True if a device has units for matrix products in float16.

    These are CUDA devices of compute capability 7.0 or more, and CPUs with AVX512-FP16, AMX-FP16 or Arm's FP16
    arithmetic. On other devices float16 works as well: models that halfstep prepared compute in fp32 kernels with the
    rounding of float16.

    Args:
        device: a ``torch.device``, its name ("gpu" means "cuda"), or the index of a CUDA device; None means CUDA
                if available, else the CPU.

    Raises:
        ArgumentValueError: for a device that is neither CPU nor CUDA, or does not exist.
        ArgumentTypeError: for a value that is not a device.
    """
    return slow_reason(_parse_device(device), torch.float16) is None


def is_bfloat16_supported(device: torch.device | str | int | None = None) -> bool:
    """True if a device has units for matrix products in bfloat16.

    These are CUDA devices of compute capability 8.0 or more, and CPUs with AVX512-BF16, AMX or Arm's BF16. Other
    devices work as well, as with ``is_float16_supported``.

    Args:
        device: see ``is_float16_supported``.

    Raises:
        ArgumentValueError: for a device that is neither CPU nor CUDA, or does not exist.
        ArgumentTypeError: for a value that is not a device.
    """
    return slow_reason(_parse_device(device), torch.bfloat16) is None


@functools.cache
def accelerator() -> str | None:
    """Return the type of the accelerator that this torch build finds ("cuda", "xpu", "mps", "npu"), or None."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def cpu_units(dtype: torch.dtype) -> list[str]:
    """List the instruction sets of this CPU that compute in a 16-bit dtype, by torch's names; [] means no units.

    Instruction sets that the environment variable ``ONEDNN_MAX_CPU_ISA`` disables are left out.
    """
    limit = os.environ.get(_ISA_VARIABLE, "").upper()
    taken = next((units for names, units in _ISA_LEVELS if limit in names), ())
    query = getattr(torch.cpu, "get_capabilities", None)  # since torch 2.12
    if query is not None:
        capabilities = query()
    else:
        questions = _CPU_UNITS_BEFORE_2_12[dtype].items()
        capabilities = {unit: getattr(torch.cpu, question, lambda: False)() for unit, question in questions}
    return [unit for unit in _CPU_UNITS[dtype] if capabilities.get(unit) and unit not in taken]


def has_units(device: torch.device, dtype: torch.dtype, kind: str) -> bool:
    """True if a device has units that compute a class of ops in a 16-bit dtype.

    Args:
        device: any device; the result is True for devices other than CPU and CUDA, about which nothing is known.
        dtype: torch.float16 or torch.bfloat16.
        kind: one of ``core.oplists.tables.KINDS``.
    """
    if device.type == "cpu":
        return (dtype is torch.bfloat16 or kind in _FLOAT16_ON_CPU) and bool(cpu_units(dtype))
    capability = _cuda_capability(device)
    return capability is None or capability >= CUDA_CAPABILITY[dtype]


def _cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU; None for other devices."""
    # ROCm names its devices cuda and has other capability numbers. Without a GPU the tensors are fake.
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def slow_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Explain in two sentences that a device has no units for a 16-bit dtype, and the effect; None if it has units.

    The result is also None for devices other than CPU and CUDA, about which nothing is known.
    """
    if has_units(device, dtype, "product"):
        return None
    name = dtype_name(dtype)
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
    if device.type == "cpu":
        lack = f"This CPU has no {name} units: matrix products and convolutions take about as long as in fp32."
        where = ", or on a GPU,"
    else:
        found, needed = torch.cuda.get_device_capability(device), CUDA_CAPABILITY[dtype]
        lack = (
            f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]} and so no tensor cores "
            f"for {name}, which came with {needed[0]}.{needed[1]}."
        )
        where = ""
    if has_units(device, other, "product"):
        return f"{lack} It has them for {dtype_name(other)}: use dtype={other}."
    return f'{lack} Train in fp32 (opt_level="O0"){where} if time matters more than memory.'


@functools.cache
def warn_if_slow(device: torch.device, dtype: torch.dtype) -> None:
    """Warn of slow 16-bit ops on a device without units for them, once per process, device and dtype.

    The warning names the line of the script, even through several functions of halfstep.

    Only ``emulate=False`` runs them; with emulation there is nothing to warn of.

    Args:
        device: any device.
        dtype: torch.float16 or torch.bfloat16.
    """
    if not has_units(device, dtype, "product"):
        warnings.warn(
            f"{slow_reason(device, dtype)} With emulate=False they take many times as long; leave it out.",
            PrecisionWarning,
            stacklevel=callers_level(),
        )


@functools.cache
def warn_if_absent(device_types: tuple[str, ...]) -> None:
    """Warn of a scope on devices of which this machine has none, once per process and types of devices.

    Args:
        device_types: as of ``torch.device.type``. Types for which torch has no module may be present.
    """
    if not any(getattr(getattr(torch, each, None), "is_available", lambda: True)() for each in device_types):
        text = f"This machine has none of device_type={device_types}, so nothing is cast here. Leave device_type out."
        warnings.warn(text, PrecisionWarning, stacklevel=callers_level())


def _parse_device(given: torch.device | str | int | None) -> torch.device:
    if given is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if isinstance(given, bool) or not isinstance(given, (torch.device, str, int)):
        raise ArgumentTypeError(f'device={given!r} must be a torch.device, a name such as "cuda:0", or an index.')
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
