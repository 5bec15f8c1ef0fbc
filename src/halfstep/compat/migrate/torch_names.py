"""The names of Apex that torch has too, and what ``amp.initialize`` was told."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from .names import Problem

__all__ = ["CONVERT", "OPTIMIZERS", "REPLACED", "Level", "level_of", "may_run", "options_problem"]

CONVERT = "apex.parallel.convert_syncbn_model"
"""A function that is a method in torch, so its uses change and not its import."""

OPTIMIZERS = {"apex.optimizers.FusedAdam": "torch.optim.AdamW", "apex.optimizers.FusedSGD": "torch.optim.SGD"}
_NORM = "torch.nn.LayerNorm"
REPLACED = {
    "apex.parallel.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "apex.parallel.SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "apex.normalization.FusedLayerNorm": _NORM,
    "apex.normalization.fused_layer_norm.FusedLayerNorm": _NORM,
    "apex.normalization.MixedFusedLayerNorm": _NORM,
    CONVERT: "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    **OPTIMIZERS,
}
"""A name of Apex -> the one of torch that does the same."""

_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "adam_w_mode")
_SGD = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
_ARGUMENTS = {
    "apex.parallel.DistributedDataParallel": ("delay_allreduce",),
    "apex.parallel.SyncBatchNorm": ("eps", "momentum", "affine", "track_running_stats", "process_group"),
    CONVERT: ("process_group",),
    "apex.optimizers.FusedAdam": _ADAM,
    "apex.optimizers.FusedSGD": _SGD,
}


def options_problem(name: str, call: ast.Call) -> str | None:
    """The argument of a call of a name in ``REPLACED`` that torch has not; None if it has all."""
    if name not in _ARGUMENTS:
        return None
    unknown = [keyword.arg or "**" for keyword in call.keywords if keyword.arg not in _ARGUMENTS[name]]
    if unknown:
        return f"{unknown[0]} of {name}"
    places = 2 if name in OPTIMIZERS else 1
    return f"{name} with arguments that are given by place" if len(call.args) > places else None


@dataclass
class Level:
    """The options of a call of ``amp.initialize``, as code.

    Attributes:
        enabled: an expression that is true at O1; "True" and "False" where that is known.
        checks: statements that refuse, at run time, what torch has not.
        problems: options that are known here, and that torch has not.
        losses: the number of loss scales.
        half: whether it is O3 of a model that is not trained.
        levels: the levels that it may have.
    """

    enabled: str = "True"
    checks: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    losses: int = 1
    half: bool = False
    levels: tuple[str, ...] = ("O0", "O1")


_ALLOWED = {
    "loss_scale": (None, "dynamic"),
    "keep_batchnorm_fp32": (None,),
    "master_weights": (None,),
    "cast_model_type": (None,),
    "cast_model_outputs": (None,),
    "patch_torch_functions": (None, True),
    "min_loss_scale": (None,),
    "max_loss_scale": (),
}
_SAID = {
    "loss_scale": "a static loss_scale: GradScaler has none",
}
_AT_O2 = dict.fromkeys(("keep_batchnorm_fp32", "master_weights"), (None, True, "True"))
"""Options of O2 that say what is so at O1, too."""


def level_of(call: ast.Call, *, trained: bool, o2_as_o1: bool) -> Level:
    """Read the options of a call of ``amp.initialize``; what is known at run time only is looked at there.

    Args:
        call: the call.
        trained: whether it has optimizers. Without any, O3 is a model in 16 bits.
        o2_as_o1: whether O2 becomes what O1 becomes.
    """
    level = Level(levels=("O0", "O1", "O2") if o2_as_o1 else ("O0", "O1"))
    allowed = {**_ALLOWED, **(_AT_O2 if o2_as_o1 else {})}
    conditions: list[str] = []
    for keyword in call.keywords:
        name, value = str(keyword.arg), keyword.value
        known = isinstance(value, ast.Constant)
        text = _operand(value)
        if name in ("models", "optimizers", "verbosity"):
            continue
        if keyword.arg is None:
            _options(level, conditions, value, text)
            continue
        if not known and any(isinstance(part, (ast.Call, ast.Await, ast.NamedExpr)) for part in ast.walk(value)):
            level.problems.append((value.lineno, f"{name} cannot be read here: {text}"))
        elif name == "opt_level":
            _opt_level(level, conditions, value, text, trained=trained)
        elif name == "enabled":
            conditions.append(text)
        elif name == "num_losses" and known and isinstance(value.value, int):  # type: ignore[attr-defined]
            level.losses = value.value  # type: ignore[attr-defined]
        elif name == "num_losses":
            level.problems.append((value.lineno, f"{name} cannot be read here: {text}; write the number"))
        elif name not in _ALLOWED:
            level.problems.append((value.lineno, f"{name} has no counterpart in torch.amp"))
        elif not known:
            level.checks += [f"if {text} not in {allowed[name]!r}:", f'    raise ValueError("torch.amp has no {name}")']
        elif value.value not in allowed[name]:  # type: ignore[attr-defined]
            level.problems.append((value.lineno, _SAID.get(name, f"{name} has no counterpart in torch.amp")))
    unknown = [each for each in conditions if each != "True"]
    level.enabled = "False" if "False" in unknown else " and ".join(unknown) or "True"
    return level


def _options(level: Level, conditions: list[str], value: ast.expr, text: str) -> None:
    """Options in a dict, ``**options``."""
    if not isinstance(value, (ast.Name, ast.Attribute, ast.Subscript)):
        level.problems.append((value.lineno, f"**{text} cannot be read here; give it a name before"))
        return
    _opt_level(level, conditions, ast.parse(f'{text}.get("opt_level", "O1")', mode="eval").body, text)
    conditions.append(f'{text}.get("enabled", True)')
    level.checks += [
        f"for name in set({text}) - {{'opt_level', 'enabled', 'verbosity'}}:",
        f"    if {text}[name] not in (None, 1, 'dynamic'):",
        '        raise ValueError(f"torch.amp has no {name}")',
    ]


def _operand(value: ast.expr) -> str:
    """An expression as text that may stand beside an operator."""
    text = ast.unparse(value)
    return f"({text})" if isinstance(value, (ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda)) else text


def _opt_level(level: Level, conditions: list[str], value: ast.expr, text: str, *, trained: bool = True) -> None:
    if not isinstance(value, ast.Constant):
        text = _operand(value)
        on = level.levels[1:]
        conditions.append(f'{text} == "O1"' if len(on) == 1 else f'{text} in ("O1", "O2")')
        o2 = "; halfstep migrate --o2-as-o1 makes O1 of O2" if len(on) == 1 else ""
        listed = ", ".join(f'"{each}"' for each in level.levels)
        said = f"torch.amp has O0 and O1 only; O2 and O3 keep 16-bit weights{o2}"
        level.checks += [f"if {text} not in ({listed}):", f'    raise ValueError("{said}")']
    elif value.value in level.levels:
        conditions.append(str(value.value != "O0"))
    else:
        o2 = "--o2-as-o1 makes O1 of it, which keeps fp32 weights" if value.value == "O2" else 'or write "O1"'
        said = f"O2 and O3 keep 16-bit weights, which torch.amp has not: use --to halfstep; {o2}"
        level.half = value.value == "O3" and not trained
        level.problems += [] if level.half else [(value.lineno, f"{text}: {said}")]


_NO_FORWARD = {
    *("train", "eval", "to", "cuda", "cpu", "half", "float", "zero_grad", "parameters", "named_parameters"),
    *("state_dict", "load_state_dict", "modules", "named_modules", "children", "requires_grad_", "apply"),
    *(
        "values",
        "items",
        "keys",
        "append",
        "save_pretrained",
        "save",
        "print",
        "isinstance",
        "hasattr",
        "getattr",
        "len",
        "list",
        "step",
    ),
}
_NO_CALL = ("Parallel", "DDP", "SyncBatchNorm", "initialize", "Adam", "AdamW", "SGD", "clip_grad_norm_", "Optimizer")


def may_run(call: ast.Call, models: set[str]) -> bool:
    """Whether a call may run one of the models: it is called, a method of it is, or it is an argument."""
    *owners, last = _parts(call.func)
    if last in _NO_FORWARD or last.endswith(_NO_CALL):
        return False
    if any(_names_one(each, models) for each in (last, *owners)):
        return True
    if last[:1].isupper():  # a class, whose object has the model
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return any(_names_one(_parts(each)[-1], models) for each in given)


def _parts(node: ast.expr) -> list[str]:
    """The names of ``self.models["first"].encode``: "self", "models", "encode"; nothing but "" for something else."""
    if isinstance(node, ast.Subscript):
        return _parts(node.value)
    if isinstance(node, ast.Attribute):
        return [*_parts(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def _names_one(name: str, models: set[str]) -> bool:
    """Whether a name is that of a model, such as ``student_model`` where there is a ``model``."""
    return any(name == each or name.endswith(f"_{each}") for each in models)
