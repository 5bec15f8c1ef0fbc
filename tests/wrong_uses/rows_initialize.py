"""Wrong uses of ``amp.initialize``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from halfstep import DynamicLossScale, OpLists, Policy, amp, optimizers
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, NotScriptableError, UsageError

from .worlds import World, Wrong, at, net, old, plain

__all__ = ["ROWS"]


def _initialize(name: str, error: Any, *words: str, **options: Any) -> Wrong:
    """A row that gives ``amp.initialize`` a wrong option."""
    return Wrong(
        f"initialize {name}",
        plain,
        lambda w: amp.initialize(w.model, w.optimizer, **{"opt_level": "O2", "verbosity": 0, **options}),
        error,
        words,
    )


def _given(name: str, error: Any, change: Callable[[World], Any], *words: str) -> Wrong:
    """A row that gives ``amp.initialize`` wrong models or optimizers: ``change`` returns both."""
    return Wrong(
        f"initialize {name}", plain, lambda w: amp.initialize(*change(w), opt_level="O2", verbosity=0), error, words
    )


def scripted(model: nn.Module) -> Any:
    """What ``torch.jit.script`` makes, which newer versions of torch warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(model)


def _two_models() -> World:
    world = plain()
    world.second = nn.Dropout()
    return world


def _only_dropout(module: nn.Module, name: str) -> torch.dtype | None:
    return torch.int32 if isinstance(module, nn.Dropout) else None


VALUE, TYPE = ArgumentValueError, ArgumentTypeError

ROWS = [
    _given("a string as model", TYPE, lambda w: ("resnet50", w.optimizer), "models must be", "not str"),
    _given("no model", TYPE, lambda w: (None, w.optimizer), "models must be", "NoneType"),
    _given("a list with a string", TYPE, lambda w: ([w.model, "x"], w.optimizer), "models must be", "str in it"),
    _given("an empty list of models", TYPE, lambda w: ([], w.optimizer), "models", "empty"),
    _given("a model twice", UsageError, lambda w: ([w.model, w.model], w.optimizer), "twice", "takes each once"),
    _given("an optimizer twice", UsageError, lambda w: (w.model, [w.optimizer] * 2), "twice", "takes each once"),
    _given("a string as optimizer", TYPE, lambda w: (w.model, "adam"), "optimizers must be", "not str"),
    _given("a class as optimizer", TYPE, lambda w: (w.model, torch.optim.SGD), "optimizers must be", "not type"),
    _given("model and optimizer exchanged", TYPE, lambda w: (w.optimizer, w.model), "models must be", "not Adam"),
    _given(
        "an optimizer of another model",
        UsageError,
        lambda w: (w.model, torch.optim.SGD(net().parameters(), 0.1)),
        "None of the parameters of this SGD",
        "Make the optimizer from the parameters of these very models",
    ),
    _given("a ScriptModule", UsageError, lambda w: (scripted(w.model), w.optimizer), "ScriptModule", "before"),
    _given("a lazy layer", UsageError, lambda w: (nn.LazyLinear(3), None), "weight has no shape yet", "run one batch"),
    _given("a lazy layer in the second model", UsageError, lambda w: ([w.model, nn.LazyLinear(3)], None), "no shape"),
    _given("DataParallel", UsageError, lambda w: (nn.DataParallel(w.model), w.optimizer), "DataParallel", "original"),
    _given("FP16_Optimizer", UsageError, lambda w: (w.model, old().optimizer), "FP16_Optimizer", "bare optimizer"),
    _initialize("opt_level='O9'", VALUE, "level 'O9'", "'O0', 'O1', 'O2', 'O3'", opt_level="O9"),
    _initialize("opt_level='02'", VALUE, "level '02'", "not the digit zero", opt_level="02"),
    _initialize("opt_level=2", VALUE, "level 2", "the letter O", opt_level=2),
    _initialize("opt_level=None", VALUE, "level None", "Options are", opt_level=None),
    _initialize("O5 in float16", VALUE, "opt_level='O5'", "pass opt_level='O2'", opt_level="O5", dtype="float16"),
    _initialize("dtype=torch.int8", VALUE, "dtype=torch.int8", "use one of", dtype=torch.int8),
    _initialize("dtype=torch.float32", VALUE, "dtype=float32", "torch.float16 or torch.bfloat16", dtype=torch.float32),
    _initialize("dtype='float8'", VALUE, "dtype='float8'", "use one of", dtype="float8"),
    _initialize("dtype=16", TYPE, "not 16", "torch.dtype or its name", dtype=16),
    _initialize(
        "cast_model_type=torch.int8", VALUE, "cast_model_type=torch.int8", "use one of", cast_model_type=torch.int8
    ),
    _initialize("cast_model_type='half'", TYPE, "cast_model_type='half'", "torch.dtype", cast_model_type="half"),
    _initialize(
        "cast_model_type at O1",
        UsageError,
        "cast_model_type=torch.float16",
        "use O2",
        opt_level="O1",
        cast_model_type=torch.float16,
    ),
    _initialize("patch_torch_functions at O2", UsageError, "only at opt_level O1", "O2", patch_torch_functions=True),
    _initialize("patch_torch_functions='yes'", TYPE, "'yes'", "True, False or None", patch_torch_functions="yes"),
    _initialize("keep_batchnorm_fp32 at O1", UsageError, "must be None", opt_level="O1", keep_batchnorm_fp32=True),
    _initialize("keep_batchnorm_fp32='maybe'", VALUE, "'maybe'", "a boolean", keep_batchnorm_fp32="maybe"),
    _initialize("keep_batchnorm_fp32=3", VALUE, "keep_batchnorm_fp32=3", "a boolean", keep_batchnorm_fp32=3),
    _initialize(
        "master_weights at O1", UsageError, "master_weights=True", "drop it", opt_level="O1", master_weights=True
    ),
    _initialize("master_weights='yes'", TYPE, "'yes'", "True, False or None", master_weights="yes"),
    _initialize("loss_scale=0", VALUE, "loss_scale=0", '"dynamic"', "above zero", loss_scale=0),
    _initialize("loss_scale=-1", VALUE, "loss_scale=-1", "above zero", loss_scale=-1.0),
    _initialize("loss_scale=inf", VALUE, "loss_scale=inf", "finite", loss_scale=float("inf")),
    _initialize("loss_scale='high'", VALUE, "loss_scale='high'", '"dynamic"', loss_scale="high"),
    _initialize("loss_scale=True", VALUE, "loss_scale=True", "a finite float", loss_scale=True),
    _initialize("cast_model_outputs='bla'", VALUE, "cast_model_outputs='bla'", "use one of", cast_model_outputs="bla"),
    _initialize(
        "cast_model_outputs=torch.int32",
        VALUE,
        "cast_model_outputs=torch.int32",
        "use one of",
        cast_model_outputs=torch.int32,
    ),
    _initialize("num_losses=0", VALUE, "num_losses=0", "1 or more", num_losses=0),
    _initialize("num_losses=-1", VALUE, "num_losses=-1", "1 or more", num_losses=-1),
    _initialize("num_losses=1.5", VALUE, "num_losses=1.5", "whole number", num_losses=1.5),
    _initialize("num_losses='2'", VALUE, "num_losses='2'", "whole number", num_losses="2"),
    _initialize("verbosity='loud'", TYPE, "verbosity must be 0, 1 or 2", "'loud'", verbosity="loud"),
    _initialize("min_loss_scale=-1", VALUE, "min_scale=-1", "above 0", min_loss_scale=-1.0, loss_scale="dynamic"),
    _initialize("min_loss_scale='a'", VALUE, "min_scale='a'", "number", min_loss_scale="a", loss_scale="dynamic"),
    _initialize("max_loss_scale=0", VALUE, "max_scale=0", "above 0", max_loss_scale=0.0, loss_scale="dynamic"),
    _initialize(
        "bounds the wrong way round",
        VALUE,
        "min_scale=4",
        "max_scale=2",
        "swap",
        min_loss_scale=4.0,
        max_loss_scale=2.0,
        loss_scale="dynamic",
    ),
    _initialize(
        "bounds beside a rule",
        UsageError,
        "min_loss_scale=2",
        "put them into it",
        min_loss_scale=2.0,
        loss_scale=DynamicLossScale(),
    ),
    _initialize("module_filter=3", TYPE, "module_filter=3", "(module, name)", module_filter=3),
    _initialize(
        "a module_filter that returns an integer dtype",
        VALUE,
        "torch.int32",
        "use one of",
        module_filter=lambda module, name: torch.int32,
    ),
    _initialize("a module_filter that returns 5", TYPE, "not 5", "torch.dtype", module_filter=lambda module, name: 5),
    _initialize("op_lists='O1'", TYPE, "op_lists", "'O1'", "halfstep.OpLists", opt_level="O1", op_lists="O1"),
    _initialize("op_lists at O2", UsageError, "op_lists", 'opt_level="O1"', op_lists=OpLists.default()),
    _initialize("a bare string as list", TYPE, "'softmax'", "list", opt_level="O1", custom_white_list="softmax"),
    _initialize(
        "an unknown op", VALUE, "'sofmax'", "Did you mean 'softmax'", opt_level="O1", custom_black_list=["sofmax"]
    ),
    _initialize(
        "an op on both lists",
        VALUE,
        "softmax",
        "leave each on one",
        opt_level="O1",
        custom_white_list=["softmax"],
        custom_black_list=["softmax"],
    ),
    Wrong(
        "initialize a module_filter that is wrong in the second model",
        _two_models,
        lambda w: amp.initialize([w.model, w.second], w.optimizer, opt_level="O2", module_filter=_only_dropout),
        VALUE,
        ("torch.int32", "use one of"),
    ),
    _initialize(
        "emulate='maybe'", VALUE, "emulate='maybe'", '"auto"', "True (everywhere) or False (nowhere)", emulate="maybe"
    ),
    _initialize("policy='O2'", TYPE, "'O2'", "Policy.from_level", opt_level="O1", policy="O2"),
    _initialize("policy beside opt_level", UsageError, "opt_level='O2'", "Drop one", policy=Policy()),
    _initialize(
        "a policy that contradicts itself",
        UsageError,
        "contradicts itself",
        "param_dtype",
        opt_level="O1",
        policy=Policy(master_weights=True),
    ),
    _initialize(
        "a policy with an integer dtype",
        VALUE,
        "torch.int8",
        "param_dtype of the policy",
        opt_level="O1",
        policy=Policy(param_dtype=torch.int8),
    ),
    Wrong(
        "initialize twice",
        at(),
        lambda w: amp.initialize(w.model, w.optimizer, verbosity=0),
        UsageError,
        ("has been through amp.initialize", "once"),
    ),
    Wrong(
        "initialize LARC(3)",
        plain,
        lambda w: amp.initialize(w.model, optimizers.LARC(3)),
        TYPE,
        ("LARC", "torch.optim.Optimizer", "int"),
    ),
    *(
        Wrong(
            f"torch.jit.script of a model at {level}",
            at(level),
            lambda w: scripted(w.model),
            NotScriptableError,
            ("torch.jit.script cannot compile", "before it is cast", "torch.jit.trace or torch.export"),
        )
        for level in ("O0", "O1", "O2", "O3")
    ),
]
