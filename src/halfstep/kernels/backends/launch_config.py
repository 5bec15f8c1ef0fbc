"""The division of a Triton kernel into programs and threads."""

from __future__ import annotations

from dataclasses import dataclass

from ..expr import ElementwiseKernel, trace

__all__ = ["DEFAULT", "READING", "LaunchConfig", "default"]


@dataclass(frozen=True)
class LaunchConfig:
    """The division of a kernel into programs.

    Attributes:
        elements: the number of elements of one program; a power of two.
        warps: the number of warps (32 threads each) that share them.
    """

    elements: int
    warps: int


DEFAULT = LaunchConfig(1024, 4)
"""The configuration of every kernel with stores.

``python -m benchmarks triton_offline --config ELEMENTS WARPS`` has the figures behind it. A pass is as fast as memory
if it requests enough bytes at once, which registers limit. FusedAdam on split masters needs, on an H100, 93 registers
for 8 elements a thread: 5 programs of 4 warps fit on a multiprocessor, with 70 KiB in flight. 4 elements need 53
registers (56 KiB in flight, and accesses half as wide on AMD), 16 elements 168: only 3 programs fit, and their loads
overlap less with arithmetic and stores of other programs, although 84 KiB are in flight. With 8 or 16 warps and
the same 8 elements a thread it is 56 KiB, and LAMB spills with 8.
"""

READING = LaunchConfig(4096, 8)
"""The configuration of every kernel without stores. Such kernels need few registers, so 16 elements per thread keep
more bytes in flight (40 KiB instead of 24 for 16-bit gradients), in accesses of 16 bytes, with fewer sums to add up."""


def default(kernel: ElementwiseKernel) -> LaunchConfig:
    """Choose the configuration of a kernel."""
    return DEFAULT if trace(kernel).stores else READING
