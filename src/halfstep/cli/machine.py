"""What a figure was measured on, and whether the hardware computes in 16 bits. Needs torch and nothing else."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from .._version import __version__

__all__ = ["describe_machine", "emulation_note"]

_FAST_ON_CPU = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16", "fp16_arith"),
}


def describe_machine(device: torch.device) -> dict[str, str]:
    """The machine and the versions, as label and text, in the order to show them."""
    facts = {"CPU": f"{_cpu_name()}, {torch.get_num_threads()} threads used"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    else:
        units = [name for names in _FAST_ON_CPU.values() for name in names if _cpu_capabilities().get(name)]
        facts["16-bit units"] = ", ".join(units) or "none"
    facts["System"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    facts["Python"] = platform.python_version()
    facts["torch"] = torch.__version__
    facts["halfstep"] = __version__
    return facts


def emulation_note(device: torch.device, dtype: torch.dtype) -> str | None:
    """One sentence if the device has no units for a 16-bit dtype, so that nobody is puzzled by its speed."""
    name = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        if dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            return f"This GPU has no {name} units: {name} is emulated, and slower than float16 would be."
        return None
    if any(_cpu_capabilities().get(unit) for unit in _FAST_ON_CPU[dtype]):
        return None
    return f"This CPU has no {name} units: {name} is emulated, saves memory and costs time."


def _cpu_capabilities() -> dict[str, object]:
    query = getattr(torch.cpu, "get_capabilities", None)  # since torch 2.12
    return dict(query()) if query is not None else {}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
