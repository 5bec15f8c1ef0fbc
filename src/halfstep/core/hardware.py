"""Hardware support of the 16-bit formats: which devices have units for them, op class by op class.

Every device runs both formats. Where it has no units for one, ``casting.emulation`` runs the products in fp32 kernels
instead, as ``has_units`` says. Nothing here stops a training.
"""

from __future__ import annotations

import functools
import os
import warnings

import torch

from .callers import callers_level
from .dtypes import dtype_name
from .errors import ArgumentTypeError, ArgumentValueError, PrecisionWarning

__all__ = [
    "accelerator",
    "cpu_units",
    "has_units",
    "is_bfloat16_supported",
    "is_float16_supported",
    "slow_reason",
    "warn_if_slow",
]

CUDA_CAPABILITY = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}
"""The compute capability from which an NVIDIA GPU has tensor cores for a dtype."""

# Names of torch.cpu.get_capabilities(). Arm's are fp16_arith, bf16 and sve_bf16.
_CPU_UNITS = {
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
}
# The variable limits what oneDNN uses, and so what torch uses: each row has the levels of one limit, and the units that
# are not used under it. Source: https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html
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

# What torch 2.11 can be asked, which has no get_capabilities yet.
_CPU_UNITS_BEFORE_2_12 = {
    torch.float16: {"amx_fp16": "_is_amx_fp16_supported"},
    torch.bfloat16: {"avx512_bf16": "_is_avx512_bf16_supported", "amx_bf16": "_is_amx_tile_supported"},
}


def is_float16_supported(device: torch.device | str | int | None = None) -> bool:
    """Whether a device has units for matrix products in float16.

    True for a CUDA device of compute capability 7.0 or more and for a CPU with AVX512-FP16, AMX-FP16 or Arm's FP16
    arithmetic. False does not mean that it fails, nor that it is slow: there, models that halfstep brought up compute
    in fp32 kernels with the rounding of float16.

    Args:
        device: a ``torch.device``, its name ("gpu" means "cuda"), or the index of a CUDA device; None means CUDA
            where there is one and the CPU elsewhere.

    Raises:
        ArgumentValueError: for a device that is neither CPU nor CUDA, or that is not there.
        ArgumentTypeError: for what is no device at all.
    """
    return slow_reason(_parse_device(device), torch.float16) is None


def is_bfloat16_supported(device: torch.device | str | int | None = None) -> bool:
    """Whether a device has units for matrix products in bfloat16.

    True for a CUDA device of compute capability 8.0 or more and for a CPU with AVX512-BF16, AMX or Arm's BF16.
    False is no obstacle, as with ``is_float16_supported``.

    Args:
        device: as for ``is_float16_supported``.

    Raises:
        ArgumentValueError: for a device that is neither CPU nor CUDA, or that is not there.
        ArgumentTypeError: for what is no device at all.
    """
    return slow_reason(_parse_device(device), torch.bfloat16) is None


@functools.cache
def accelerator() -> str | None:
    """The type of the accelerator that torch was built for and finds here ("cuda", "xpu", "mps", "npu"), or None."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def cpu_units(dtype: torch.dtype) -> list[str]:
    """The instruction sets of this CPU that compute in a 16-bit dtype, by torch's names; an empty list means no units.

    Those that the environment variable ``ONEDNN_MAX_CPU_ISA`` keeps torch from using are left out.
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
    """Whether a device has units that compute one class of ops in a 16-bit dtype.

    Args:
        device: any; True for other devices than CPU and CUDA, of which nothing is known.
        dtype: torch.float16 or torch.bfloat16.
        kind: one of ``core.oplists.tables.KINDS``.
    """
    if device.type == "cpu":
        fast = dtype is torch.bfloat16 or kind in _FLOAT16_ON_CPU
        return fast and bool(cpu_units(dtype))
    capability = _cuda_capability(device)
    return capability is None or capability >= CUDA_CAPABILITY[dtype]


def _cuda_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU; None where the question has no answer."""
    # ROCm calls its devices cuda and numbers capabilities in its own way. Without a GPU the tensors are fake ones.
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


def slow_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a device has no units for a 16-bit dtype and what follows, in two sentences; None if it has.

    None also for other devices than CPU and CUDA, of which nothing is known.
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

    It names the line of the script, whichever function of halfstep that has called.

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
