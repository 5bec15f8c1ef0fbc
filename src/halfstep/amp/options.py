"""The arguments of ``amp.initialize`` that describe a precision recipe: a level with overrides, checked as Apex checked
them, or a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from ..core.checks import check_flag
from ..core.dtypes import HALF_DTYPES, dtype_name, parse_dtype, parse_half
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.loss_scale import LossScaleSpec, check_loss_scale
from ..core.oplists import OpLists
from ..core.policy import LEVELS, Policy, check_policy, parse_level

__all__ = ["Properties", "Recipe", "resolve"]


@dataclass(frozen=True)
class Properties:
    """An opt level's properties under Apex's names, after the overrides.

    Attributes:
        enabled: whether amp does anything.
        opt_level: "O0" to "O3".
        cast_model_type: dtype of the weights; False or None leaves them.
        patch_torch_functions: whether ops are cast (O1).
        keep_batchnorm_fp32: whether BatchNorm stays fp32 when the weights are cast.
        master_weights: whether the optimizer updates fp32 copies.
        loss_scale: a number, "dynamic", or a rule.
    """

    enabled: bool
    opt_level: str
    cast_model_type: Any
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: LossScaleSpec

    @property
    def options(self) -> dict[str, Any]:
        """The properties as a dict, where scripts written for Apex look for them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def policy(self, half: torch.dtype, output_dtype: torch.dtype | str | None, lists: OpLists) -> Policy:
        """The ``Policy`` that these properties describe, with ops cast to ``half`` by some lists."""
        cast = self.cast_model_type or None
        outputs = None if output_dtype is None else parse_dtype(output_dtype, "cast_model_outputs")
        return Policy(
            param_dtype=cast,
            compute_dtype=half if self.patch_torch_functions else cast,
            output_dtype=outputs or (torch.float32 if cast else None),
            op_lists=lists if self.patch_torch_functions else None,
            keep_batchnorm_fp32=bool(self.keep_batchnorm_fp32),
            master_weights=bool(self.master_weights),
            loss_scale=self.loss_scale,
        )

    @classmethod
    def of(cls, policy: Policy) -> Properties:
        """The properties of a policy, under the level that it is nearest to."""
        casts_ops, halves = policy.op_lists is not None, policy.param_dtype in HALF_DTYPES
        level = "O1" if casts_ops else ("O2" if policy.master_weights else "O3") if halves else "O0"
        return cls(
            enabled=True,
            opt_level=level,
            cast_model_type=policy.param_dtype,
            patch_torch_functions=casts_ops,
            keep_batchnorm_fp32=policy.keep_batchnorm_fp32 if halves else None,
            master_weights=None if casts_ops else policy.master_weights,
            loss_scale=policy.loss_scale,
        )

    def describe(self) -> list[str]:
        """One aligned ``name : value`` line for each property."""
        return [f"{name:<22} : {_show(value)}" for name, value in self.options.items()]


@dataclass(frozen=True)
class Recipe:
    """What the arguments of ``amp.initialize`` came to.

    Attributes:
        policy: what is done.
        half: the 16-bit dtype, also where the policy has none.
        options: the policy under Apex's names.
        defaults: of the level, before the overrides; None if a policy was given.
    """

    policy: Policy
    half: torch.dtype
    options: Properties
    defaults: Properties | None

    def banner(self) -> str:
        """What is said at verbosity 1: the level, its defaults, and what the overrides made of them; or the policy."""
        if self.defaults is None:
            lines = [f"Policy {self.policy}.", *("  " + line for line in self.options.describe())]
        else:
            level = self.defaults.opt_level
            lines = [
                f"Opt level {level} in {dtype_name(self.half)}: {LEVELS[level]}.",
                "Defaults of the level:",
                *("  " + line for line in self.defaults.describe()),
            ]
            if self.options != self.defaults:
                lines += ["With your overrides:", *("  " + line for line in self.options.describe())]
        return "\n".join(lines)


def resolve(
    policy: Policy | None,
    device_half: torch.dtype,
    *,
    opt_level: Any,
    dtype: Any,
    loss_scale: Any,
    cast_model_outputs: Any,
    op_lists: OpLists | None,
    custom_white_list: Iterable[object] | None,
    custom_black_list: Iterable[object] | None,
    keep_casts: bool,
    **overrides: Any,
) -> Recipe:
    """What the arguments of ``amp.initialize`` come to.

    Args:
        policy: a policy, which takes the place of everything below but for ``loss_scale``.
        device_half: the 16-bit dtype where none is named.
        opt_level: the level; the rest overrides it where it is not None.
        dtype: the 16-bit dtype.
        loss_scale: as users give it.
        cast_model_outputs: a floating dtype or its name.
        op_lists: op lists for O1.
        custom_white_list: what to move in them.
        custom_black_list: likewise.
        keep_casts: whether steps write the 16-bit casts of weights, at O1.
        **overrides: of the fields of ``Properties``.

    Raises:
        UsageError: for arguments, or parts of a policy, that contradict each other.
        ArgumentValueError: for a value that is not allowed.
        ArgumentTypeError: for a value of the wrong type.
    """
    if policy is not None:
        beside = {
            "opt_level": None if opt_level == "O1" else opt_level,  # the default
            "dtype": dtype,
            "cast_model_outputs": cast_model_outputs,
            "op_lists": op_lists,
            "custom_white_list": custom_white_list,
            "custom_black_list": custom_black_list,
            "keep_casts": keep_casts or None,
            **overrides,
        }
        return _from_policy(policy, loss_scale, beside, device_half)
    level, half = parse_level(opt_level, None if dtype is None else parse_half(dtype))
    half = half or device_half
    defaults = Properties.of(Policy.from_level(level, half))
    given = {name: value for name, value in {**overrides, "loss_scale": loss_scale}.items() if value is not None}
    options = replace(defaults, **{name: CHECKS[name](value, level) for name, value in given.items()})
    lists = _check_lists(level, options, op_lists, custom_white_list, custom_black_list)
    check_flag("keep_casts", keep_casts)
    if keep_casts and not options.patch_torch_functions:
        raise UsageError(
            f"keep_casts=True keeps the 16-bit casts of fp32 weights from step to step, and at {level} no weight is "
            'cast; leave it out, or use opt_level="O1".'
        )
    described = options.policy(half, cast_model_outputs, lists)
    return Recipe(described.replace(keep_casts=keep_casts), half, options, defaults)


# ---- from a policy


def _from_policy(policy: Policy, loss_scale: Any, beside: dict[str, Any], device_half: torch.dtype) -> Recipe:
    if not isinstance(policy, Policy):
        raise ArgumentTypeError(
            f"policy must be a halfstep.Policy, not {policy!r}; Policy.from_level(level, dtype) makes that of a level, "
            "and Policy.parse(text) reads one."
        )
    for name, value in beside.items():
        if value is not None:
            field = _FIELDS.get(name)
            instead = "it has everything that a level decides" if field is None else f"put it into its {field}"
            raise UsageError(
                f"policy= and {name}={value!r} were both given. Drop one of them; of the policy, {instead} "
                "(Policy.from_level, policy.replace). Only loss_scale= may stand beside a policy."
            )
    if loss_scale is not None:
        policy = policy.replace(loss_scale=loss_scale)
    policy = policy.replace(loss_scale=check_loss_scale(policy.loss_scale))
    check_policy(policy)
    dtypes = (policy.compute_dtype, policy.param_dtype, policy.output_dtype)
    half = next((each for each in dtypes if each in HALF_DTYPES), None) or device_half
    return Recipe(policy, half, Properties.of(policy), None)


_FIELDS = {
    "cast_model_type": "param_dtype",
    "patch_torch_functions": "op_lists",
    "keep_batchnorm_fp32": "keep_batchnorm_fp32",
    "master_weights": "master_weights",
    "cast_model_outputs": "output_dtype",
    "op_lists": "op_lists",
    "keep_casts": "keep_casts",
    "custom_white_list": "op_lists",
    "custom_black_list": "op_lists",
}
"""Which field of a policy says what an argument says."""


# ---- from a level and what overrides it


def _cast_model_type(value: Any, level: str) -> Any:
    if value is not False and not isinstance(value, torch.dtype):
        raise ArgumentTypeError(f"cast_model_type={value!r} must be a torch.dtype, or False to leave the model alone.")
    if value is not False:
        parse_dtype(value, "cast_model_type")
    if level == "O1" and value not in (False, torch.float32):
        raise UsageError(
            f"opt_level O1 casts around operations and leaves the weights fp32, so cast_model_type={value} contradicts "
            "it; leave it out, or use O2 or O3 to cast the model."
        )
    return value


def _patch_torch_functions(value: Any, level: str) -> bool:
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"patch_torch_functions={value!r} must be True, False or None.")
    if value and level != "O1":
        raise UsageError(f"patch_torch_functions=True works only at opt_level O1, and this is {level}.")
    return value


def _keep_batchnorm_fp32(value: Any, level: str) -> bool:
    if level == "O1":
        raise UsageError(
            f"At opt_level O1 all weights stay fp32, batchnorm too, so keep_batchnorm_fp32={value!r} has no meaning; "
            "it must be None."
        )
    if value in ("True", "False"):  # command lines hand strings over
        return bool(value == "True")
    if not isinstance(value, bool):
        raise ArgumentValueError(
            f"keep_batchnorm_fp32={value!r} must be a boolean, the string 'True' or 'False', or None."
        )
    return value


def _master_weights(value: Any, level: str) -> bool:
    if level == "O1":
        raise UsageError(
            f"At opt_level O1 the weights themselves are fp32, so master_weights={value!r} has no meaning; drop it."
        )
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"master_weights={value!r} must be True, False or None.")
    return value


CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "cast_model_type": _cast_model_type,
    "patch_torch_functions": _patch_torch_functions,
    "keep_batchnorm_fp32": _keep_batchnorm_fp32,
    "master_weights": _master_weights,
    "loss_scale": lambda value, level: check_loss_scale(value),
}


def _show(value: Any) -> str:
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)


def _check_lists(
    level: str,
    options: Properties,
    op_lists: OpLists | None,
    white: Iterable[object] | None,
    black: Iterable[object] | None,
) -> OpLists:
    """The op lists of O1."""
    if op_lists is None and white is None and black is None:
        return OpLists.default()
    if not options.patch_torch_functions:
        raise UsageError(
            f"op_lists, custom_white_list and custom_black_list say how ops are cast, and at {level} none are; use "
            'opt_level="O1".'
        )
    if op_lists is None:
        return OpLists.custom(white, black)
    if not isinstance(op_lists, OpLists):
        raise ArgumentTypeError(
            f"op_lists must be a halfstep.OpLists, not {op_lists!r}; lists of ops are custom_white_list= and "
            "custom_black_list=."
        )
    if white is not None or black is not None:
        raise UsageError(
            "op_lists and custom lists were both given; put the custom ones into op_lists: "
            "OpLists.custom(white, black)."
        )
    return op_lists
