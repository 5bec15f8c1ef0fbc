"""What Paddle's checks say about one tensor: its inf, NaN and zeros, and its largest, smallest and mean value."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass

import torch

from ..core.errors import ArgumentTypeError, HalfstepError

__all__ = ["Checked", "DebugMode", "check_numerics"]

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_FP16 = torch.finfo(torch.float16)


class DebugMode(enum.Enum):
    """What a check prints, and whether it stops the script."""

    CHECK_NAN_INF_AND_ABORT = 0
    """Print tensors that hold inf or NaN, and raise an error at the first."""
    CHECK_NAN_INF = 1
    """Print tensors that hold inf or NaN."""
    CHECK_ALL_FOR_OVERFLOW = 2
    """Print these, and fp32 tensors with numbers beyond the range of float16."""
    CHECK_ALL = 3
    """Print all tensors."""


@dataclass(frozen=True)
class Checked:
    """The numbers of one tensor.

    Attributes:
        device: as Paddle writes it, "cpu" or "gpu:0".
        dtype: of the tensor.
        numel: how many numbers it has.
        nan: how many are NaN.
        inf: how many are inf.
        zeros: how many are 0.
        largest: of those that are not NaN.
        smallest: of those that are not NaN.
        mean: of all.
    """

    device: str
    dtype: torch.dtype
    numel: int
    nan: int
    inf: int
    zeros: int
    largest: float
    smallest: float
    mean: float

    @property
    def bad(self) -> bool:
        """Whether there is an inf or NaN."""
        return self.nan > 0 or self.inf > 0

    def wanted(self, mode: DebugMode) -> bool:
        """Whether a mode prints it."""
        if self.bad or mode is DebugMode.CHECK_ALL:
            return True
        beyond = self.largest > _FP16.max or self.smallest < _FP16.min
        return mode is DebugMode.CHECK_ALL_FOR_OVERFLOW and self.dtype is torch.float32 and beyond

    def line(self, op: str, tensor: str) -> str:
        """The line that Paddle prints."""
        error, counts = ("[ERROR] ", f"num_nan={self.nan}, num_inf={self.inf}, ") if self.bad else ("", "")
        extremes = f"max={self.largest:e}, min={self.smallest:e}, mean={self.mean:e}"
        where = self.where(op, tensor)
        return f"[PRECISION] {error}in {where}, numel={self.numel}, {counts}num_zero={self.zeros}, {extremes}\n"

    def error(self, op: str, tensor: str) -> HalfstepError:
        """What is raised where a bad tensor stops the script."""
        counts = f"num_nan={self.nan}, num_inf={self.inf}, num_zero={self.zeros}"
        return HalfstepError(f"(PreconditionNotMet) There are NAN or INF ({counts}) in {self.where(op, tensor)}.")

    def where(self, op: str, tensor: str) -> str:
        """Which tensor it is."""
        return f"[device={self.device}, op={op}, tensor={tensor}, dtype={_SHORT[self.dtype]}]"


def can_check(tensor: torch.Tensor) -> bool:
    """Whether a tensor has numbers that can be looked at."""
    return tensor.dtype in _SHORT and tensor.layout is torch.strided and tensor.device.type != "meta"


@torch.no_grad()
def facts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 counts of NaN, inf and 0, and float32 largest, smallest and mean value, on the device of the tensor."""
    values = tensor.detach()
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    nan = wide.isnan()
    counts = torch.stack([nan.sum(), wide.isinf().sum(), (wide == 0).sum()])
    if not values.numel():
        return counts, torch.full((3,), torch.nan, dtype=torch.float32, device=values.device)
    extremes = wide.masked_fill(nan, -torch.inf).amax(), wide.masked_fill(nan, torch.inf).amin()
    return counts, torch.stack([*extremes, wide.mean()]).float()


def read(tensor: torch.Tensor, counts: torch.Tensor, numbers: torch.Tensor) -> Checked:
    """The facts on the host, in one read."""
    found = torch.cat([counts.double(), numbers.double()]) + 0.0  # no -0.0
    nan, inf, zeros, largest, smallest, mean = found.tolist()
    device = tensor.device.type if tensor.device.type == "cpu" else f"gpu:{tensor.device.index}"
    return Checked(device, tensor.dtype, tensor.numel(), int(nan), int(inf), int(zeros), largest, smallest, mean)


def check_numerics(
    tensor: torch.Tensor,
    op_type: str,
    var_name: str,
    debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look for inf and NaN in a tensor. Reads the device once.

    Args:
        tensor: floating, dense.
        op_type: what made it, for the line that is printed.
        var_name: its name, likewise.
        debug_mode: what is printed, and whether inf and NaN raise an error.

    Returns:
        An int64 tensor with the number of NaN, inf and zeros, and a float32 one with the largest, the smallest and the
        mean value, on the device of ``tensor``. NaN do not count for the largest and the smallest.

    Raises:
        ArgumentTypeError: if it is no dense floating tensor, or ``debug_mode`` is no ``DebugMode``.
        HalfstepError: for inf or NaN in the mode ``CHECK_NAN_INF_AND_ABORT``.
    """
    if not isinstance(tensor, torch.Tensor) or not can_check(tensor):
        given = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ArgumentTypeError(f"check_numerics takes a dense floating tensor of 16 bits or more, not {given}.")
    check_mode(debug_mode)
    counts, numbers = facts_of(tensor)
    checked = read(tensor, counts, numbers)
    if checked.wanted(debug_mode):
        sys.stdout.write(checked.line(op_type, var_name))
    if checked.bad and debug_mode is DebugMode.CHECK_NAN_INF_AND_ABORT:
        raise checked.error(op_type, var_name)
    return counts, numbers


def check_mode(mode: object) -> None:
    """Refuse what is no ``DebugMode``."""
    if not isinstance(mode, DebugMode):
        raise ArgumentTypeError(f"debug_mode must be a DebugMode, such as DebugMode.CHECK_NAN_INF, not {mode!r}.")
