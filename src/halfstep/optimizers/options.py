"""The options that all fused optimizers share, and the check of the arguments of their updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..core.checks import check_number
from ..core.dtypes import HALF_DTYPES, dtype_name, parse_dtype
from ..core.errors import ArgumentTypeError, ArgumentValueError
from ..kernels.launch import backend_for
from ..kernels.storage import SPLIT, Storage, dense, plain, stochastic

__all__ = ["FusedOptions", "MasterForm", "check_hyperparameters"]

MasterForm = Literal["split", "plain"] | bool | None


@dataclass(frozen=True)
class FusedOptions:
    """How one optimizer stores weights and state, and whether it clips.

    Attributes:
        max_grad_norm: clip the 2-norm of all gradients together to this, as ``clip_grad_norm_`` would; None does not.
        master_weights: ``"split"`` keeps the fp32 value of a bfloat16 weight as the weight and an int16 remainder,
            ``"plain"`` keeps an fp32 copy, True the former for bfloat16 and the latter for float16, or for both on a
            CPU without a C++ compiler; None or False updates the 16-bit weight itself.
        state_dtype: of the first moment; None is float32. Second moments are always float32.
        rounding: ``"nearest"`` or, for bfloat16 weights without masters, ``"stochastic"``.
        seed: of stochastic rounding.

    Raises:
        ArgumentValueError: for a value that is not one of these.
        ArgumentTypeError: for a value of the wrong type.
    """

    max_grad_norm: float | None = None
    master_weights: MasterForm = None
    state_dtype: torch.dtype | None = None
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_grad_norm is not None:
            check_number("max_grad_norm", self.max_grad_norm, finite=False)
        if self.master_weights not in ("split", "plain", True, False, None):
            raise ArgumentValueError(
                f"master_weights={self.master_weights!r} must be 'split', 'plain', True (split for bfloat16, plain for "
                "float16) or None."
            )
        if self.rounding not in ("nearest", "stochastic"):
            raise ArgumentValueError(f"rounding={self.rounding!r} must be 'nearest' or 'stochastic'.")
        if self.rounding == "stochastic" and self.master_weights:
            raise ArgumentValueError(
                f"rounding='stochastic' with master_weights={self.master_weights!r}: masters lose nothing, so there "
                "is nothing to round at random; choose one of the two."
            )
        if not isinstance(self.seed, int):
            raise ArgumentTypeError(f"seed must be an int, not {self.seed!r}.")
        if self.state_dtype is not None:
            dtype = parse_dtype(self.state_dtype, "state_dtype")
            if dtype not in (torch.float32, torch.bfloat16):
                raise ArgumentValueError(
                    f"state_dtype={dtype_name(dtype)}: first moments are kept in float32 or bfloat16; float16 has no "
                    "room for small gradients."
                )
            object.__setattr__(self, "state_dtype", dtype)

    def storage(self, dtype: torch.dtype, device: torch.device | str) -> Storage:
        """How a weight of this dtype is stored on a device.

        Raises:
            ArgumentValueError: for a float16 weight where only bfloat16 can be.
        """
        if dtype not in HALF_DTYPES:
            return dense(dtype)
        if dtype is torch.float16 and (self.master_weights == "split" or self.rounding == "stochastic"):
            wrong = "master_weights='split'" if self.master_weights else "rounding='stochastic'"
            raise ArgumentValueError(
                f"{wrong} works on bfloat16 weights, whose bits are the upper half of an fp32 number; a weight here "
                "is float16. Use master_weights='plain' or True, or bfloat16 weights."
            )
        if self.master_weights == "plain":
            return plain(dtype)
        # torch's own steps, on which the backend of this name runs, take masters that are whole.
        if self.master_weights is True and (dtype is torch.float16 or backend_for(device) == "torch"):
            return plain(dtype)
        if self.master_weights:
            return SPLIT
        return stochastic(dtype) if self.rounding == "stochastic" else dense(dtype)


def check_hyperparameters(group: Mapping[str, Any], *names: str) -> None:
    """Refuse hyperparameters of a group below 0 or not finite, and ``betas`` that are not two numbers in [0, 1).

    Args:
        group: a parameter group, or the defaults of all groups. A tensor in it is read.
        names: which of its entries to look at.

    Raises:
        ArgumentValueError: if a number is outside.
        ArgumentTypeError: if it is no number.
    """
    for name in names:
        value = group[name]
        if name != "betas":
            check_number(name, value)
            continue
        if not isinstance(value, (tuple, list)):
            raise ArgumentTypeError(f"betas={value!r} must be two numbers, each at least 0 and below 1.")
        if len(value) != 2:
            raise ArgumentValueError(f"betas={value!r} must be two numbers, each at least 0 and below 1.")
        check_number("betas[0]", value[0], below=1.0)
        check_number("betas[1]", value[1], below=1.0)
