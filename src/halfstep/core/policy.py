"""A precision recipe as one value: ``Policy``. Opt levels are policies; ``stepping.prepare`` applies one to models."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from types import NoneType

import torch

from .checks import check_kind
from .dtypes import HALF_DTYPES, StateForm, dtype_name, parse_dtype, parse_half, parse_state_form
from .errors import ArgumentValueError, HalfstepError, UsageError
from .loss_scale import LossScaleSpec, loss_scale_text, parse_loss_scale
from .oplists import OpLists

__all__ = ["LEVELS", "LossScaleSpec", "Policy", "check_policy", "parse_level"]

LEVELS = {
    "O0": "fp32 training",
    "O1": "casts inserted around torch operations; the weights stay as they are",
    "O2": "16-bit weights, fp32 BatchNorm and fp32 master weights",
    "O3": "everything in 16 bits, the yardstick for speed",
}
"""The opt levels of Apex, each with its meaning."""

_ROCM_ALIASES = {"O4": "O1", "O5": "O2"}


def parse_level(level: object, dtype: torch.dtype | None = None) -> tuple[str, torch.dtype | None]:
    """Check an opt level; the ROCm fork's "O4" and "O5" are "O1" and "O2" in bfloat16.

    Raises:
        ArgumentValueError: for anything but "O0" to "O5", or for "O4"/"O5" together with another dtype.
    """
    if isinstance(level, str) and level in _ROCM_ALIASES:
        if dtype not in (None, torch.bfloat16):
            raise ArgumentValueError(
                f"opt_level={level!r} means {_ROCM_ALIASES[level]} in bfloat16 and dtype={dtype} says otherwise; "
                f"pass opt_level={_ROCM_ALIASES[level]!r} with that dtype."
            )
        return _ROCM_ALIASES[level], torch.bfloat16
    if not isinstance(level, str) or level not in LEVELS:
        raise ArgumentValueError(
            f"Unexpected optimization level {level!r}. Options are 'O0', 'O1', 'O2', 'O3' "
            "(and 'O4', 'O5' for O1, O2 in bfloat16): the letter O followed by a digit, not the digit zero."
        )
    return level, dtype


_SWITCHES = ("keep_batchnorm_fp32", "master_weights")


@dataclass(frozen=True)
class Policy:
    """A precision policy: the dtypes of weights, computation and outputs, the op lists, and the loss scale.

    A policy prints as one line and parses back from it: ``Policy.parse(str(policy)) == policy``.

    Attributes:
        param_dtype: the dtype of floating parameters and buffers; ``None`` does not cast them.
        compute_dtype: with ``op_lists``, the 16-bit dtype of the ops on the half list; without them, the dtype of
            floating inputs of the model; ``None`` casts nothing.
        output_dtype: the dtype of floating outputs of the model; ``None`` does not cast them.
        op_lists: the precision of each op; ``None`` casts no ops. With 16-bit weights, of level ``"none"``.
        keep_batchnorm_fp32: keep BatchNorm parameters and statistics in fp32 when the rest is cast.
        master_weights: update fp32 copies of 16-bit weights.
        loss_scale: a number, ``"dynamic"``, or a ``StaticLossScale`` or ``DynamicLossScale``.
        cast_ops: with a 16-bit ``param_dtype``, the passes in which an op whose dtypes torch refuses is retried with
            equal dtypes: True for every pass of a model, False for none, and None for its first passes, and for all
            passes if they had such an op.
        state_dtype: with ``master_weights``, the storage of optimizers' moments: ``"8bit"``, the dtype of first
            moments, or ``None`` for fp32.
    """

    param_dtype: torch.dtype | None = None
    compute_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    op_lists: OpLists | None = None
    keep_batchnorm_fp32: bool = False
    master_weights: bool = False
    loss_scale: LossScaleSpec = 1.0
    cast_ops: bool | None = None
    state_dtype: StateForm = None

    @property
    def casts_ops(self) -> bool:
        """True if ops are cast by lists and the weights stay as they are; with 16-bit weights ops meet."""
        return self.op_lists is not None and self.param_dtype not in HALF_DTYPES

    @property
    def retries_ops(self) -> bool:
        """True if an op whose dtypes torch refuses is called again with dtypes that agree."""
        return self.casts_ops or (self.param_dtype in HALF_DTYPES and self.cast_ops is not False)

    @classmethod
    def from_level(cls, level: str, dtype: torch.dtype | str = torch.float16) -> Policy:
        """Make the policy of an opt level in a 16-bit dtype.

        A bfloat16 policy has the exponent range of fp32 and so starts with a static loss scale of 1.0; a float16 policy
        scales dynamically at O1 and O2.

        Raises:
            ArgumentValueError: for an unknown level, or a dtype of other than 16 bits.
        """
        level, implied = parse_level(level)
        half = implied or parse_half(dtype)
        scale: LossScaleSpec = "dynamic" if half is torch.float16 else 1.0
        if level == "O0":
            return cls(torch.float32, torch.float32, torch.float32)
        if level == "O1":
            return cls(compute_dtype=half, op_lists=OpLists.default(), loss_scale=scale)
        if level == "O2":
            return cls(half, half, torch.float32, None, True, True, scale)
        return cls(half, half, torch.float32)

    def replace(self, **changes: object) -> Policy:
        """Copy the policy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["loss_scale"] = loss_scale_text(self.loss_scale)
        return ",".join(f"{name}={_shown(value)}" for name, value in values.items())

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Parse the policy that prints as ``text``; a missing field gets its default.

        Raises:
            ArgumentTypeError: if ``text`` is not a string.
            ArgumentValueError: for an unknown field or a value that its field does not accept.
        """
        check_kind("text", text, str, "name=value,name=value, as a policy prints")
        names = [field.name for field in fields(cls)]
        values: dict[str, object] = {}
        for part in text.split(","):
            name, found, value = part.strip().partition("=")
            if not found or name not in names:
                raise ArgumentValueError(
                    f"{part!r} is no field of a policy. Write name=value with a name among {', '.join(names)}."
                )
            values[name] = cls._parse_field(name, value)
        return cls(**values)  # type: ignore[arg-type]

    @staticmethod
    def _parse_field(name: str, value: str) -> object:
        if name == "loss_scale":
            return parse_loss_scale(value)
        if name in _SWITCHES or (name == "cast_ops" and value != "None"):
            if value not in ("True", "False"):
                raise ArgumentValueError(f"{name}={value!r} must be True or False.")
            return value == "True"
        if value == "None":
            return None
        try:
            if name == "state_dtype":
                return parse_state_form(value)
            return OpLists.parse(value) if name == "op_lists" else parse_dtype(value)
        except HalfstepError as error:
            raise ArgumentValueError(f"{name}={value!r}: {error}") from None


def _shown(value: object) -> str:
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)


def check_policy(policy: Policy) -> None:
    """Check that the fields of a policy have valid and compatible values.

    Raises:
        ArgumentTypeError: for a value of another type.
        ArgumentValueError: for a dtype that is not a floating format.
        UsageError: for fields that contradict each other.
    """
    for name in ("param_dtype", "compute_dtype", "output_dtype"):
        check_kind(f"{name} of the policy", getattr(policy, name), (torch.dtype, NoneType), "a torch.dtype or None")
        parse_dtype(getattr(policy, name) or torch.float32, f"{name} of the policy")
    for name in _SWITCHES:
        check_kind(f"{name} of the policy", getattr(policy, name), bool, "True or False")
    check_kind("cast_ops of the policy", policy.cast_ops, (bool, NoneType), "True, False or None")
    check_kind("op_lists of the policy", policy.op_lists, (OpLists, NoneType), "a halfstep.OpLists or None")
    parse_state_form(policy.state_dtype, "state_dtype of the policy")
    problem = _contradiction(policy)
    if problem is not None:
        raise UsageError(f"The policy contradicts itself: {problem}.\nIt is {policy}.")


def _contradiction(policy: Policy) -> str | None:
    """Describe a contradiction between fields of a policy; None if there is none."""
    params, compute = policy.param_dtype, policy.compute_dtype
    param_dtype = f"param_dtype={dtype_name(params) if params else None}"
    compute_dtype = f"compute_dtype={dtype_name(compute) if compute else None}"
    if policy.op_lists is not None:
        if params in HALF_DTYPES and (policy.cast_ops is False or (compute, policy.op_lists.level) != (params, "none")):
            return f"op_lists with {param_dtype} need that compute_dtype, no cast_ops=False, and the level 'none'"
        if compute not in HALF_DTYPES:
            return f"op_lists need a 16-bit compute_dtype to cast ops to, and it has {compute_dtype}"
    elif compute is not None and compute is not params and (params is not None or compute in HALF_DTYPES):
        return (
            f"without op_lists the inputs of the model are cast to {compute_dtype}, and its weights, with "
            f"{param_dtype}, do not have that dtype"
        )
    if policy.state_dtype is not None and not policy.master_weights:
        return (
            f"state_dtype={_shown(policy.state_dtype)} is for optimizers that step on master weights, and it has none. "
            "Elsewhere it is an argument of the optimizer: optimizers.fuse(optimizer, state_dtype=...) and "
            "optimizers.FusedAdam"
        )
    if params not in HALF_DTYPES:
        if policy.cast_ops is not None:
            return f"cast_ops={policy.cast_ops} is for models with a 16-bit param_dtype, and it has {param_dtype}"
        for name in ("master_weights", "keep_batchnorm_fp32"):
            if getattr(policy, name):
                return f"{name}=True needs a 16-bit param_dtype, and it has {param_dtype}"
    return None
