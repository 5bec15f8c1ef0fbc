"""Wrong uses of fused optimizers and LARC."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from halfstep import optimizers
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, UsageError

from .worlds import World, Wrong, at, fused, net, nothing, plain

__all__ = ["ROWS"]

VALUE, TYPE = ArgumentValueError, ArgumentTypeError


def _weights() -> World:
    return World(weight=nn.Parameter(torch.ones(3)))


def _fused(name: str, error: Any, *words: str, make: Any = optimizers.FusedAdam, **options: Any) -> Wrong:
    """A row that makes a fused optimizer with wrong options."""
    return Wrong(f"{make.__name__} {name}", _weights, lambda w: make([w.weight], **options), error, words)


def _group(name: str, error: Any, *words: str, make: Any = optimizers.FusedAdam, **options: Any) -> Wrong:
    """A row that makes a fused optimizer with wrong options of one group."""
    return Wrong(
        f"{make.__name__} a group with {name}",
        _weights,
        lambda w: make([{"params": [w.weight], **options}]),
        error,
        words,
    )


def _added(name: str, error: Any, *words: str, **options: Any) -> Wrong:
    """A row that adds a wrong group to FusedAdam."""
    return Wrong(
        f"add_param_group {name}",
        fused,
        lambda w: w.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], **options}),
        error,
        words,
    )


FusedSGD, FusedLAMB, FusedNovoGrad = optimizers.FusedSGD, optimizers.FusedLAMB, optimizers.FusedNovoGrad

ROWS = [
    _fused("lr=-1", VALUE, "lr=-1", "at least 0", lr=-1),
    _fused("lr=inf", VALUE, "lr=inf", "and finite", lr=math.inf),
    _fused("lr=nan", VALUE, "lr=nan", "at least 0", lr=math.nan),
    _fused("lr='a'", TYPE, "lr must be a number", "'a'", lr="a"),
    _fused("lr=None", TYPE, "lr must be a number", "None", lr=None),
    _fused("lr=tensor(nan)", VALUE, "lr=", "nan", "at least 0", lr=torch.tensor(math.nan)),
    _fused("lr=tensor(-1)", VALUE, "lr=", "-1", "at least 0", lr=torch.tensor(-1.0)),
    _fused("lr of two numbers", VALUE, "lr=", "one element", lr=torch.ones(2)),
    _fused("three betas", VALUE, "betas=(0.9, 0.99, 0.999)", "two numbers", betas=(0.9, 0.99, 0.999)),
    _fused("betas=.9", TYPE, "betas=0.9", "two numbers", betas=0.9),
    _fused("betas=(1, .9)", VALUE, "betas[0]=1", "below 1", betas=(1.0, 0.9)),
    _fused("betas=('a', .9)", TYPE, "betas[0]", "'a'", betas=("a", 0.9)),
    _fused("betas=None", TYPE, "betas=None", "two numbers", betas=None),
    _fused("eps=-1", VALUE, "eps=-1", "at least 0", eps=-1.0),
    _fused("weight_decay=nan", VALUE, "weight_decay=nan", "at least 0", weight_decay=math.nan),
    _fused("weight_decay='0.1'", TYPE, "weight_decay", "'0.1'", weight_decay="0.1"),
    _fused("max_grad_norm='1'", TYPE, "max_grad_norm must be a number", "'1'", max_grad_norm="1"),
    _fused("max_grad_norm=-1", VALUE, "max_grad_norm=-1", "at least 0", max_grad_norm=-1.0),
    _fused("max_grad_norm=nan", VALUE, "max_grad_norm=nan", "at least 0", max_grad_norm=math.nan),
    _fused("master_weights='fp32'", VALUE, "master_weights='fp32'", "'split', 'plain'", master_weights="fp32"),
    _fused("state_dtype=torch.float16", VALUE, "state_dtype=float16", "float32 or bfloat16", state_dtype=torch.float16),
    _fused("state_dtype=torch.int8", VALUE, "state_dtype=torch.int8", "use one of", state_dtype=torch.int8),
    _fused("rounding='up'", VALUE, "rounding='up'", "'nearest' or 'stochastic'", rounding="up"),
    _fused(
        "rounding with masters",
        VALUE,
        "rounding='stochastic'",
        "choose one",
        rounding="stochastic",
        master_weights=True,
    ),
    _fused("seed='a'", TYPE, "seed", "'a'", seed="a"),
    _group("lr=-1", VALUE, "lr=-1", "at least 0", lr=-1.0),
    _group("lr=inf", VALUE, "lr=inf", "and finite", lr=math.inf),
    _group("three betas", VALUE, "betas=", "two numbers", betas=(0.9, 0.99, 0.999)),
    _group("weight_decay='a'", TYPE, "weight_decay", "'a'", weight_decay="a"),
    _group("momentum=-1", VALUE, "momentum=-1", "at least 0", make=FusedSGD, momentum=-1.0),
    _group("nesterov without momentum", VALUE, "nesterov=True", "momentum above 0", make=FusedSGD, nesterov=True),
    _added("lr=-1", VALUE, "lr=-1", "at least 0", lr=-1.0),
    _added("eps='a'", TYPE, "eps", "'a'", eps="a"),
    _fused("momentum=-1", VALUE, "momentum=-1", "at least 0", make=FusedSGD, momentum=-1.0),
    _fused("momentum='a'", TYPE, "momentum", "'a'", make=FusedSGD, momentum="a"),
    _fused("dampening='a'", TYPE, "dampening", "'a'", make=FusedSGD, dampening="a"),
    _fused("nesterov without momentum", VALUE, "nesterov=True", "momentum above 0", make=FusedSGD, nesterov=True),
    _fused(
        "nesterov with dampening",
        VALUE,
        "nesterov=True",
        "no dampening",
        make=FusedSGD,
        nesterov=True,
        momentum=0.9,
        dampening=0.1,
    ),
    _fused("lr=-1", VALUE, "lr=-1", "at least 0", make=FusedLAMB, lr=-1.0),
    _fused("max_grad_norm='1'", TYPE, "max_grad_norm must be a number", "'1'", make=FusedLAMB, max_grad_norm="1"),
    _fused("amsgrad", VALUE, "amsgrad=True", "leave it False", make=FusedLAMB, amsgrad=True),
    _fused("norm_type=3", VALUE, "norm_type=3", make=FusedNovoGrad, norm_type=3),
    _fused("betas=.9", TYPE, "betas=0.9", "two numbers", make=FusedNovoGrad, betas=0.9),
    _fused("lr_decay=-1", VALUE, "lr_decay=-1", "at least 0", make=optimizers.FusedAdagrad, lr_decay=-1.0),
    Wrong("FusedAdam.step(grads=...)", fused, lambda w: w.optimizer.step(grads=[]), TYPE, ("takes closure=", "grads")),
    Wrong("FusedAdam.step(3)", fused, lambda w: w.optimizer.step(3), TYPE, ("closure", "int")),
    Wrong(
        "FusedAdam.load_state_dict(None)",
        fused,
        lambda w: w.optimizer.load_state_dict(None),
        TYPE,
        ("NoneType", "state_dict()"),
    ),
    Wrong(
        "FusedAdam.load_state_dict({})",
        fused,
        lambda w: w.optimizer.load_state_dict({}),
        VALUE,
        ("param_groups", "state_dict()"),
    ),
    Wrong(
        "FusedAdam.load_state_dict of a model",
        fused,
        lambda w: w.optimizer.load_state_dict(w.model.state_dict()),
        VALUE,
        ("param_groups", "state_dict()"),
    ),
    Wrong("FusedAdam.attach(3)", fused, lambda w: w.optimizer.attach(3), TYPE, ("torch.nn.Module", "int")),
    Wrong("FusedAdam.attach to another model", fused, lambda w: w.optimizer.attach(net()), VALUE, ("model",)),
    Wrong("LARC(3)", nothing, lambda w: optimizers.LARC(3), TYPE, ("torch.optim.Optimizer", "int")),
    Wrong(
        "LARC trust_coefficient=-1",
        plain,
        lambda w: optimizers.LARC(w.optimizer, trust_coefficient=-1),
        VALUE,
        ("trust_coefficient=-1", "at least 0"),
    ),
    Wrong("LARC eps='a'", plain, lambda w: optimizers.LARC(w.optimizer, eps="a"), TYPE, ("eps", "'a'")),
    Wrong(
        "LARC.attach",
        plain,
        lambda w: optimizers.LARC(w.optimizer).attach(w.model),
        UsageError,
        ("rescales gradients in step()", "FusedLAMB"),
    ),
    Wrong("fuse(3)", nothing, lambda w: optimizers.fuse(3), TYPE, ("torch.optim.Adam", "not int")),
    Wrong(
        "fuse of RMSprop",
        plain,
        lambda w: optimizers.fuse(torch.optim.RMSprop(w.model.parameters())),
        TYPE,
        ("torch.optim.Adam", "not RMSprop"),
    ),
    Wrong(
        "load_state_dict(None) at O2",
        at(),
        lambda w: w.optimizer.load_state_dict(None),
        TYPE,
        ("NoneType", "state_dict()"),
    ),
    Wrong(
        "load_state_dict({}) at O2",
        at(),
        lambda w: w.optimizer.load_state_dict({}),
        VALUE,
        ("param_groups", "state_dict()"),
    ),
    Wrong(
        "load_state_dict(None) at O1",
        at("O1"),
        lambda w: w.optimizer.load_state_dict(None),
        TYPE,
        ("NoneType", "state_dict()"),
    ),
]
