"""The machine on which a figure was measured. Imports torch and nothing else."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from .._version import __version__
from ..core.dtypes import HALF_DTYPES
from ..core.hardware import cpu_units
from ..core.text import counted

__all__ = ["describe_machine"]


def describe_machine(device: torch.device) -> dict[str, str]:
    """The machine and the versions, as label and text, in the order to show them."""
    facts = {"CPU": f"{_cpu_name()}, {counted(torch.get_num_threads(), 'thread')} used"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    else:
        facts["16-bit units"] = ", ".join(unit for dtype in HALF_DTYPES for unit in cpu_units(dtype)) or "none"
    facts["System"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    facts["Python"] = platform.python_version()
    facts["torch"] = torch.__version__
    facts["halfstep"] = __version__
    return facts


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
