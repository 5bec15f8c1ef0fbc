"""The options that all fused optimizers share, the check of hyperparameters, and the warning about lost updates."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch

from ..core.checks import check_kind, check_number
from ..core.dtypes import HALF_DTYPES, StateForm, dtype_name, parse_state_form
from ..core.errors import ArgumentTypeError, ArgumentValueError
from ..kernels.blockwise import SIGNED, UNSIGNED
from ..kernels.launch import backend_for
from ..kernels.storage import SPLIT, Storage, dense, plain, stochastic
from ..torch_internals.callers import callers_level
from ..torch_internals.torch_compat import is_flattened

__all__ = [
    "CommonOptions",
    "FusedOptions",
    "MasterForm",
    "NamedOptions",
    "check_hyperparameters",
    "warn_of_lost_updates",
]

MasterForm = Literal["split", "plain"] | bool | None
_SMALL = 4096  # elements; a tensor of fewer is not worth 8 bits (Dettmers et al., section 2.3)


class NamedOptions(TypedDict, total=False):
    """The common options that no constructor takes by position; see ``CommonOptions``."""

    state_dtype: StateForm
    rounding: Literal["nearest", "stochastic"]
    seed: int
    maximize: bool


class CommonOptions(NamedOptions, total=False):
    """The keyword arguments that the constructors of all fused optimizers take.

    Attributes:
        max_grad_norm: the maximum 2-norm of all gradients together, clipped within the step as by ``clip_grad_norm_``;
            None does not clip, which is the default but for ``FusedLAMB``.
        master_weights: ``"split"`` keeps the fp32 value of a bfloat16 weight as the weight and an int16 remainder,
            ``"plain"`` keeps an fp32 copy, True the former for bfloat16 and the latter for float16, or for both on a
            CPU without a C++ compiler; None (default) or False updates the 16-bit weight itself.
        state_dtype: the storage of the moments. ``"8bit"`` keeps 8-bit codes for each moment and one float32 number per
            block of 256 elements (``kernels.blockwise``), except for parameters with fewer than two dimensions, such as
            norms and biases, with fewer than 4,096 elements, or in float64. ``torch.bfloat16`` applies to the first
            moment, and second moments are float32 then. None (default) is float32. ``FusedAdagrad`` has no moments and
            refuses any other value.
        rounding: ``"nearest"`` (default) or, for bfloat16 weights without masters, ``"stochastic"``.
        seed: the seed of stochastic rounding, 0 by default.
        maximize: maximize the objective instead of minimizing it; False by default.
    """

    max_grad_norm: float | None
    master_weights: MasterForm


@dataclass(frozen=True)
class FusedOptions:
    """The checked values of ``CommonOptions`` for one optimizer, without ``maximize``, which each group may change.

    Raises:
        ArgumentValueError: for a value that is not allowed.
        ArgumentTypeError: for a value of the wrong type.
    """

    max_grad_norm: float | None = None
    master_weights: MasterForm = None
    state_dtype: StateForm = None
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
        check_kind("seed", self.seed, int, "an int")
        object.__setattr__(self, "state_dtype", parse_state_form(self.state_dtype))

    def storage(self, dtype: torch.dtype, device: torch.device | str) -> Storage:
        """Choose the storage of a weight of this dtype on a device.

        Raises:
            ArgumentValueError: for a float16 weight with an option that needs bfloat16.
        """
        if dtype not in HALF_DTYPES:
            return dense(dtype)
        if dtype is torch.float16 and (self.master_weights == "split" or self.rounding == "stochastic"):
            wrong = "master_weights='split'" if self.master_weights else "rounding='stochastic'"
            raise ArgumentValueError(
                f"{wrong} works on bfloat16 weights, whose bits are the upper half of an fp32 number; a weight here "
                "is float16. Use master_weights='plain' or True, or bfloat16 weights."
            )
        # torch's fused steps, which the backend "torch" uses, need whole masters.
        whole = self.master_weights is True and (dtype is torch.float16 or backend_for(device) == "torch")
        if whole or self.master_weights == "plain":
            return plain(dtype)
        if self.master_weights:
            return SPLIT
        return stochastic(dtype) if self.rounding == "stochastic" else dense(dtype)

    def quantizes(self, param: torch.Tensor) -> bool:
        """True if a parameter's moments are 8-bit codes. The whole size of a sharded parameter decides, on any mesh."""
        matrix = param.dim() >= 2 or is_flattened(param)
        return self.state_dtype == "8bit" and matrix and param.numel() >= _SMALL and param.dtype is not torch.float64

    def state_storage(self, moment: Literal["first", "second"] | None, param: torch.Tensor) -> Storage:
        """Choose the storage of a parameter's moment, or of other state per element (``moment=None``)."""
        if moment is not None and self.quantizes(param):
            return SIGNED if moment == "first" else UNSIGNED
        if param.dtype is torch.float64:
            return dense(torch.float64)
        lower = moment == "first" and isinstance(self.state_dtype, torch.dtype)
        return dense(self.state_dtype if lower else torch.float32)  # type: ignore[arg-type]


_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "adam_eps", "lr_decay", "initial_accumulator_value")


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Refuse hyperparameters of a group below 0 or not finite, and ``betas`` that are not two numbers in [0, 1).

    Args:
        group: a parameter group, or the defaults of all groups. A tensor in it is read.

    Raises:
        ArgumentValueError: if a number is out of range.
        ArgumentTypeError: if a value is not a number.
    """
    for name in _NUMBERS:
        if name in group:
            check_number(name, group[name])
    if "betas" in group:
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            kind = ArgumentValueError if isinstance(betas, (tuple, list)) else ArgumentTypeError
            raise kind(f"betas={betas!r} must be two numbers, each at least 0 and below 1.")
        for place, beta in enumerate(betas):
            check_number(f"betas[{place}]", beta, below=1.0)


def warn_of_lost_updates(optimizer: str, groups: Iterable[dict[str, Any]]) -> None:
    """Warn if a learning rate changes 16-bit weights by less than half of their last bit.

    Args:
        optimizer: the name of the optimizer's class.
        groups: the parameter groups; the warning names the first affected one.
    """
    for group in groups:
        lr = group["lr"]
        halves = {p.dtype for p in group["params"] if p.dtype in HALF_DTYPES}
        if isinstance(lr, torch.Tensor) or not halves:
            continue
        dtype = max(halves, key=lambda d: torch.finfo(d).eps)
        half_ulp = torch.finfo(dtype).eps / 4  # of a weight just below a power of two
        decay = lr * group.get("weight_decay", 0.0)
        small = {name: x for name, x in (("lr", lr), ("lr * weight_decay", decay)) if 0 < x < half_ulp}
        if small:
            given = " and ".join(f"{name} = {x:g}" for name, x in small.items())
            warnings.warn(
                f"{optimizer} updates {dtype_name(dtype)} weights in place with {given}: a relative change below "
                f"{half_ulp:g} rounds away. Pass master_weights=True to keep it, or rounding='stochastic' for "
                "bfloat16.",
                UserWarning,
                stacklevel=callers_level(),
            )
            return
