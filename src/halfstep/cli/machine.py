"""A description of the machine on which a figure was measured. Imports no package except torch."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from .._version import __version__
from ..core.dtypes import HALF_DTYPES
from ..core.hardware import cpu_units
from ..core.text import counted
from ..diagnostics.pages import Markup, facts, section

__all__ = ["describe_machine", "machine_section"]


def describe_machine(device: torch.device) -> dict[str, str]:
    """Describe the machine and the versions: label to text, in display order."""
    found = {"CPU": f"{_cpu_name()}, {counted(torch.get_num_threads(), 'thread')} used"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["GPU"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    else:
        found["16-bit units"] = ", ".join(unit for dtype in HALF_DTYPES for unit in cpu_units(dtype)) or "none"
    found["System"] = f"{platform.system()} {platform.release()}, {platform.machine()}"
    found["Python"] = platform.python_version()
    found["torch"] = torch.__version__
    found["halfstep"] = __version__
    return found


def machine_section(device: torch.device) -> Markup:
    """Make the section of a page that describes the machine and the versions."""
    return section("The machine", facts(describe_machine(device)))


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
