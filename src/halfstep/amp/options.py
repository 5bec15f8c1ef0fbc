"""The arguments of ``amp.initialize`` that describe a precision recipe: a level with overrides, checked as Apex checked
them, or a policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core.checks import check_kind, check_switch
from ..core.dtypes import HALF_DTYPES, dtype_name, parse_dtype, parse_half, parse_state_form
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.loss_scale import check_loss_scale, loss_scale_text
from ..core.oplists import OpLists
from ..core.policy import LEVELS, Policy, check_policy, parse_level

__all__ = ["ARGUMENTS", "Resolved", "ResolvedProperties", "check_cast_ops", "lists_of", "resolve", "with_precision"]


@dataclass(frozen=True)
class ResolvedProperties:
    """A policy with Apex's names for the properties of an opt level, read-only.

    Attributes:
        policy: the policy.
        opt_level: "O0" to "O3".
        enabled: False if all amp calls are no-ops.
        given: the user's overrides, unchanged, because the policy does not keep all of them: at O0 it ignores most.
    """

    policy: Policy
    opt_level: str
    enabled: bool = True
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, policy: Policy) -> ResolvedProperties:
        """Return the properties of a policy, with the nearest level."""
        level = "O2" if policy.master_weights else "O3" if policy.param_dtype in HALF_DTYPES else "O0"
        return cls(policy, "O1" if policy.casts_ops else level)

    @property
    def options(self) -> dict[str, Any]:
        """The properties as a dict, as in Apex."""
        policy = self.policy
        return {
            "enabled": self.enabled,
            "opt_level": self.opt_level,
            "cast_model_type": policy.param_dtype,
            "patch_torch_functions": policy.casts_ops,
            "keep_batchnorm_fp32": policy.keep_batchnorm_fp32 if self.opt_level in ("O2", "O3") else None,
            "master_weights": None if self.opt_level == "O1" else policy.master_weights,
            "loss_scale": policy.loss_scale,
            **self.given,
        }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self.options:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.options[name]


@dataclass(frozen=True)
class Resolved:
    """The policy that the arguments of ``amp.initialize`` describe, with Apex's property names.

    Attributes:
        half: the 16-bit dtype, even if the policy has none.
        options: the policy with Apex's property names.
        level: the level; None if the user passed a policy.
    """

    half: torch.dtype
    options: ResolvedProperties
    level: str | None

    def banner(self, *, emulated: bool) -> str:
        """Return the log line at verbosity 1: the level with its dtype and overrides, or the policy.

        Args:
            emulated: True if matrix products run in fp32 kernels, on a device without 16-bit units.
        """
        how = " Matrix products run in fp32 kernels, on 16-bit values." if emulated else ""
        if self.level is None:
            return f"Policy {self.options.policy}.{how}"
        given = "".join(f", {name}={value}" for name, value in self.options.given.items() if name != "loss_scale")
        name = self.level if self.level == "O0" else f"{self.level} in {dtype_name(self.half)}"
        given += f", loss scale {loss_scale_text(self.options.policy.loss_scale)}"
        return f"Opt level {name}: {LEVELS[self.level]}{given}.{how}"


def resolve(policy: Policy | None, device_half: torch.dtype, given: Mapping[str, Any]) -> Resolved:
    """Resolve the arguments of ``amp.initialize`` to a policy.

    Args:
        policy: a policy, which replaces all arguments except ``loss_scale``.
        device_half: the 16-bit dtype to use if ``given`` has none.
        given: arguments of ``amp.initialize``; only arguments in ``ARGUMENTS`` are read.

    Raises:
        UsageError: for arguments, or parts of a policy, that contradict each other.
        ArgumentValueError: for a value that is not allowed.
        ArgumentTypeError: for a value of the wrong type.
    """
    if policy is not None:
        return _from_policy(policy, device_half, given)
    dtype = given["dtype"]
    level, half = parse_level(given["opt_level"], None if dtype is None else parse_half(dtype))
    half = half or device_half
    defaults = Policy.from_level(level, half)
    checked = {name: each.check(given[name], level) for name, each in ARGUMENTS.items() if each.check is not None}
    overrides = {name: value for name, value in checked.items() if value is not None}
    fields = dict(overrides)
    casts_ops = fields.pop("patch_torch_functions", defaults.op_lists is not None)
    cast = fields.pop("cast_model_type", defaults.param_dtype) or None
    cast_ops, outputs = given["cast_ops"], given["cast_model_outputs"]
    check_cast_ops(cast_ops, level, cast)
    policy = defaults.replace(
        **fields,
        param_dtype=cast,
        compute_dtype=half if casts_ops else cast,
        output_dtype=parse_dtype(outputs, "cast_model_outputs") if outputs is not None else cast and torch.float32,
        op_lists=_check_lists(level, casts_ops, cast, given),
        cast_ops=cast_ops,
        state_dtype=parse_state_form(given["state_dtype"]),
    )
    if policy.state_dtype is not None and not policy.master_weights:
        raise UsageError(
            f"state_dtype={given['state_dtype']!r} is for optimizers with master weights, and {level} has none; use "
            'opt_level="O2", or pass it to the optimizer: optimizers.fuse(optimizer, state_dtype=...).'
        )
    return Resolved(half, ResolvedProperties(policy, level, given=overrides), level)


def with_precision(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``amp.initialize``, including the arguments in ``precision``.

    Raises:
        ArgumentValueError: if the file is not a saved search result, or a name is not an argument.
        UsageError: if an argument in ``precision`` was also passed directly.
    """
    precision = given.pop("precision")
    try:
        found = precision if isinstance(precision, Mapping) else json.loads(Path(precision).read_bytes())["options"]
        more = dict(found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentValueError(f"precision={precision!r} is neither a dict nor a saved search: {error!r}.") from error
    for name, value in more.items():
        if name not in _OF_PRECISION:
            raise ArgumentValueError(f"precision={precision!r} has {name!r}; it may have {', '.join(_OF_PRECISION)}.")
        if ARGUMENTS.get(name, Argument()).is_given(given[name]):
            raise UsageError(f"precision= has {name}={value!r} beside {name}={given[name]!r}. Drop one of them.")
    return given | more


def check_cast_ops(cast_ops: Any, level: str, dtype: torch.dtype | None) -> None:
    """Check ``cast_ops``, which needs a level with 16-bit weights."""
    check_switch("cast_ops", cast_ops, or_none=True)
    if cast_ops is not None and dtype not in HALF_DTYPES:
        raise UsageError(
            f"cast_ops={cast_ops} chooses if ops that mix dtypes with 16-bit weights are cast, but at {level} the "
            "weights are not 16-bit; leave it out, or use O2."
        )


def _from_policy(policy: Policy, device_half: torch.dtype, given: Mapping[str, Any]) -> Resolved:
    what = "a halfstep.Policy, which Policy.from_level(level, dtype) and Policy.parse(text) make"
    check_kind("policy", policy, Policy, what)
    for name, each in ARGUMENTS.items():
        if name != "loss_scale" and each.is_given(given[name]):
            instead = f"put it into its {each.field}" if each.field else "it has everything that a level decides"
            raise UsageError(
                f"policy= and {name}={given[name]!r} were both given. Drop one of them; of the policy, {instead} "
                "(Policy.from_level, policy.replace). Only loss_scale= may stand beside a policy."
            )
    scale = policy.loss_scale if given["loss_scale"] is None else given["loss_scale"]
    policy = policy.replace(loss_scale=check_loss_scale(scale))
    check_policy(policy)
    dtypes = (policy.compute_dtype, policy.param_dtype, policy.output_dtype)
    half = next((each for each in dtypes if each in HALF_DTYPES), None) or device_half
    return Resolved(half, ResolvedProperties.of(policy), None)


# ---- the properties of a level; None keeps the default of the level


def _cast_model_type(value: Any, level: str) -> Any:
    if value is None or value is False:
        return value
    if not isinstance(value, torch.dtype):
        raise ArgumentTypeError(f"cast_model_type={value!r} must be a torch.dtype, or False to leave the model alone.")
    if value is not torch.float32:
        _refuse_at_o1("cast_model_type", value, level)
    return parse_dtype(value, "cast_model_type")


def _patch_torch_functions(value: Any, level: str) -> Any:
    check_switch("patch_torch_functions", value, or_none=True)
    if value and level != "O1":
        raise UsageError(f"patch_torch_functions=True works only at opt_level O1, and this is {level}.")
    return value


def _keep_batchnorm_fp32(value: Any, level: str) -> Any:
    _refuse_at_o1("keep_batchnorm_fp32", value, level)
    if value in ("True", "False"):  # command-line scripts pass strings
        return bool(value == "True")
    if not isinstance(value, (bool, type(None))):
        raise ArgumentValueError(
            f"keep_batchnorm_fp32={value!r} must be a boolean, the string 'True' or 'False', or None."
        )
    return value


def _master_weights(value: Any, level: str) -> Any:
    _refuse_at_o1("master_weights", value, level)
    check_switch("master_weights", value, or_none=True)
    return value


def _refuse_at_o1(name: str, value: Any, level: str) -> None:
    """Refuse an argument about weights at O1, which does not change weights."""
    if value is not None and level == "O1":
        raise UsageError(
            f"opt_level O1 casts around operations and all weights stay fp32, so {name}={value!r} has no meaning; it "
            "must be None. Use O2 or O3 to cast the model."
        )


@dataclass(frozen=True)
class Argument:
    """An argument of ``amp.initialize`` that is a part of a recipe.

    Attributes:
        field: the equivalent field of ``Policy``; None for an argument that determines several fields.
        check: a function of a value and a level that returns the property of the level, or raises an error; None for an
            argument that is not a property in Apex.
        default: the default value of the argument.
    """

    field: str | None = None
    check: Callable[[Any, str], Any] | None = None
    default: Any = None

    def is_given(self, value: Any) -> bool:
        """True if a value differs from the argument's default."""
        return value is not None and (self.default is None or value != self.default)


ARGUMENTS = {
    "opt_level": Argument(default="O1"),
    "dtype": Argument(),
    "cast_model_type": Argument("param_dtype", _cast_model_type),
    "patch_torch_functions": Argument("op_lists", _patch_torch_functions),
    "keep_batchnorm_fp32": Argument("keep_batchnorm_fp32", _keep_batchnorm_fp32),
    "master_weights": Argument("master_weights", _master_weights),
    "loss_scale": Argument("loss_scale", lambda value, level: None if value is None else check_loss_scale(value)),
    "cast_model_outputs": Argument("output_dtype"),
    **{name: Argument(name) for name in ("op_lists", "cast_ops", "state_dtype")},
    **{f"custom_{name}_list": Argument("op_lists") for name in ("white", "black", "wide")},
}
"""The arguments of ``amp.initialize`` that describe a recipe, by name."""

_OF_PRECISION = (*ARGUMENTS, "policy", "excluded_layers", "module_filter", "products")


def _check_lists(level: str, casts_ops: bool, dtype: Any, given: Mapping[str, Any]) -> OpLists | None:
    """Return the op lists: at O1 the lists of the level, with 16-bit weights only the ops that the user listed."""
    custom = {name: each for name in ("white", "black", "wide") if (each := given[f"custom_{name}_list"]) is not None}
    if given["op_lists"] is None and not custom:
        return OpLists.default() if casts_ops else None
    if not casts_ops and dtype not in HALF_DTYPES:
        raise UsageError(f'op lists choose how ops are cast, and {level} casts no ops; use opt_level="O1" or "O2".')
    lists = lists_of(given["op_lists"], custom)
    return lists if casts_ops else lists.replace(level="none")


def lists_of(op_lists: OpLists | None, custom: dict[str, Any], **settings: Any) -> OpLists:
    """Return the given op lists, or if there are none, the lists of a level with custom lists.

    Raises:
        ArgumentTypeError: if ``op_lists`` is something else.
        UsageError: if both were given.
    """
    if op_lists is None:
        return OpLists.custom(**custom, **settings)
    check_kind("op_lists", op_lists, OpLists, "a halfstep.OpLists, and custom_white_list= and the like lists of ops")
    if any(each is not None for each in custom.values()):
        raise UsageError("op_lists and custom lists were both given; put them into one: OpLists.custom(white, black).")
    return op_lists
