"""The facts that Paddle's checks and logs report of a tensor: its inf, NaN, zeros, maximum, minimum and mean."""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...core.errors import ArgumentTypeError, HalfstepError

__all__ = ["EXTREMES", "Checked", "DebugMode", "check_numerics"]

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_FP16 = torch.finfo(torch.float16)
_LINE = re.compile(r"\[PRECISION\] (?:\[ERROR\] )?in \[device=(.*?), op=(.*?), tensor=(.*?), dtype=(.*?)\], (.*)")
_COUNTS = ("num_nan", "num_inf", "num_zero")
EXTREMES = ("max", "min", "mean")


class DebugMode(enum.Enum):
    """The tensors that a check prints, and whether it stops the script."""

    CHECK_NAN_INF_AND_ABORT = 0
    """Print tensors that hold inf or NaN, and raise an error at the first."""
    CHECK_NAN_INF = 1
    """Print tensors that hold inf or NaN."""
    CHECK_ALL_FOR_OVERFLOW = 2
    """Print tensors that hold inf or NaN, and fp32 tensors with numbers beyond the range of float16."""
    CHECK_ALL = 3
    """Print all tensors."""


@dataclass(frozen=True)
class Checked:
    """The numbers of one tensor: one line of a log.

    Attributes:
        device: as Paddle writes it, "cpu" or "gpu:0".
        op: the op that computed the tensor.
        tensor: the name of the tensor.
        dtype: a short name, such as "fp16".
        numbers: "numel", "num_nan", "num_inf", "num_zero", "max", "min" and "mean". The maximum and minimum ignore NaN.
            A log line leaves out the counts of NaN and inf if both are 0.
    """

    device: str
    op: str
    tensor: str
    dtype: str
    numbers: Mapping[str, float]

    @staticmethod
    def of(tensor: torch.Tensor, op: str, name: str, counts: torch.Tensor, extremes: torch.Tensor) -> Checked:
        """Bring the results of ``facts_of`` to the host in one read."""
        found = torch.cat([counts.double(), extremes.double()]) + 0.0  # no -0.0
        device = tensor.device.type if tensor.device.type == "cpu" else f"gpu:{tensor.device.index}"
        numbers = dict(zip((*_COUNTS, *EXTREMES), found.tolist(), strict=True))
        return Checked(device, op, name, _SHORT[tensor.dtype], {"numel": tensor.numel(), **numbers})

    @staticmethod
    def in_line(text: str) -> Checked | None:
        """Parse a line of a log; None if the line reports no tensor."""
        found = _LINE.search(text)
        if found is None:
            return None
        numbers = {name: float(value) for name, value in (pair.split("=") for pair in found[5].split(", "))}
        return Checked(found[1], found[2], found[3], found[4], numbers)

    def number(self, name: str) -> float:
        """Return one of the numbers, or 0 if the line does not have it."""
        return self.numbers.get(name, 0)

    @property
    def bad(self) -> bool:
        """True if the tensor has an inf or NaN."""
        return bool(self.number("num_nan") or self.number("num_inf"))

    @property
    def limit(self) -> float:
        """The largest number that the tensor's dtype can hold."""
        return torch.finfo(next((dtype for dtype, name in _SHORT.items() if name == self.dtype), torch.float32)).max

    def wanted(self, mode: DebugMode) -> bool:
        """True if ``mode`` prints this tensor."""
        if self.bad or mode is DebugMode.CHECK_ALL:
            return True
        beyond = self.number("max") > _FP16.max or self.number("min") < _FP16.min
        return mode is DebugMode.CHECK_ALL_FOR_OVERFLOW and self.dtype == "fp32" and beyond

    def line(self) -> str:
        """The line that Paddle prints."""
        counts = self._said("numel", *(_COUNTS if self.bad else ("num_zero",)))
        extremes = ", ".join(f"{name}={self.number(name):e}" for name in EXTREMES)
        return f"[PRECISION] {'[ERROR] ' if self.bad else ''}in {self._where}, {counts}, {extremes}\n"

    def error(self) -> HalfstepError:
        """The error to raise if a bad tensor stops the script."""
        counts = self._said(*_COUNTS)
        return HalfstepError(f"(PreconditionNotMet) There are NAN or INF ({counts}) in {self._where}.")

    @property
    def _where(self) -> str:
        return f"[device={self.device}, op={self.op}, tensor={self.tensor}, dtype={self.dtype}]"

    def _said(self, *names: str) -> str:
        return ", ".join(f"{name}={self.number(name):.0f}" for name in names)


def can_check(tensor: torch.Tensor) -> bool:
    """True if a tensor is dense, floating and not on the meta device, so that its numbers can be read."""
    return tensor.dtype in _SHORT and tensor.layout is torch.strided and tensor.device.type != "meta"


@torch.no_grad()
def facts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count NaN, inf and 0 (int64), and find the maximum, minimum and mean (float32), on the device of the tensor."""
    values = tensor.detach()
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    nan = wide.isnan()
    counts = torch.stack([nan.sum(), wide.isinf().sum(), (wide == 0).sum()])
    if not values.numel():
        return counts, torch.full((3,), torch.nan, dtype=torch.float32, device=values.device)
    extremes = wide.masked_fill(nan, -torch.inf).amax(), wide.masked_fill(nan, torch.inf).amin()
    return counts, torch.stack([*extremes, wide.mean()]).float()


def check_numerics(
    tensor: torch.Tensor, op_type: str, var_name: str, debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT
) -> tuple[torch.Tensor, torch.Tensor]:
    """Look for inf and NaN in a tensor. Reads the device once.

    Args:
        tensor: a dense floating tensor.
        op_type: the op that computed it, for the printed line.
        var_name: the tensor's name, for the printed line.
        debug_mode: the tensors to print, and whether inf and NaN raise an error.

    Returns:
        An int64 tensor with the counts of NaN, inf and zeros, and a float32 tensor with the maximum, minimum and mean,
        on the device of ``tensor``. The maximum and minimum ignore NaN.

    Raises:
        ArgumentTypeError: if ``tensor`` is not a dense floating tensor, or ``debug_mode`` not a ``DebugMode``.
        HalfstepError: for inf or NaN in the mode ``CHECK_NAN_INF_AND_ABORT``.
    """
    if not isinstance(tensor, torch.Tensor) or not can_check(tensor):
        given = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ArgumentTypeError(f"check_numerics takes a dense floating tensor of 16 bits or more, not {given}.")
    check_mode(debug_mode)
    counts, numbers = facts_of(tensor)
    checked = Checked.of(tensor, op_type, var_name, counts, numbers)
    if checked.wanted(debug_mode):
        sys.stdout.write(checked.line())
    if checked.bad and debug_mode is DebugMode.CHECK_NAN_INF_AND_ABORT:
        raise checked.error()
    return counts, numbers


def check_mode(mode: object) -> None:
    """Refuse anything but a ``DebugMode``."""
    if not isinstance(mode, DebugMode):
        raise ArgumentTypeError(f"debug_mode must be a DebugMode, such as DebugMode.CHECK_NAN_INF, not {mode!r}.")
