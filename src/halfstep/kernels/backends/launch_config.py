"""Division of a Triton kernel into programs and threads."""

from __future__ import annotations

from dataclasses import dataclass

from ..expr import ElementwiseKernel, trace

__all__ = ["DEFAULT", "READING", "LaunchConfig", "default"]


@dataclass(frozen=True)
class LaunchConfig:
    """Division of a kernel into programs.

    Attributes:
        elements: how many one program works on; a power of two.
        warps: how many warps of 32 threads share them.
    """

    elements: int
    warps: int


DEFAULT = LaunchConfig(1024, 4)
"""The configuration of every kernel that stores something.

``python -m benchmarks triton_offline --config ELEMENTS WARPS`` has the figures behind it. A pass is as fast as memory
if enough bytes are asked for at once, and registers limit that. FusedAdam on split masters needs, on an H100, 93
registers for 8 elements a thread: 5 programs of 4 warps fit on a multiprocessor, with 70 KiB in flight. 4 elements need
53 registers (56 KiB in flight, and accesses half as wide on AMD), 16 elements 168: there is room for 3 programs only,
and loads of one overlap less with arithmetic and stores of others, though 84 KiB are in flight. With 8 or 16 warps and
the same 8 elements a thread it is 56 KiB, and LAMB spills with 8.
"""

READING = LaunchConfig(4096, 8)
"""The same for kernels that store nothing. They need few registers, so that 16 elements a thread keep more in flight
(40 KiB for 16-bit gradients, not 24), in accesses of 16 bytes, and there are fewer sums to add up."""


def default(kernel: ElementwiseKernel) -> LaunchConfig:
    """The configuration of a kernel."""
    return DEFAULT if trace(kernel).stores else READING
