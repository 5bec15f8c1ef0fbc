"""Wrong uses of what steps: GradScaler, loss scales, FP16_Optimizer, fused optimizers, LARC."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from halfstep import DynamicLossScale, StaticLossScale, amp, fp16_utils, optimizers
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, UsageError

from .worlds import World, Wrong, at, fused, net, nothing, old, plain, scaled

__all__ = ["ROWS"]

VALUE, TYPE = ArgumentValueError, ArgumentTypeError


def _scaler(name: str, error: Any, *words: str, **options: Any) -> Wrong:
    return Wrong(f"GradScaler {name}", nothing, lambda w: amp.GradScaler(**options), error, words)


def stepped() -> World:
    """A scaler whose iteration is over."""
    world = scaled()
    world.scaler.scale(world.loss).backward()
    world.scaler.step(world.optimizer)
    world.scaler.update()
    world.optimizer.zero_grad()
    return world


def pending() -> World:
    """Gradients that are scaled."""
    world = scaled()
    world.scaler.scale(world.loss).backward()
    return world


def unscaled() -> World:
    """A scaler that has unscaled."""
    world = scaled()
    world.scaler.scale(world.loss).backward()
    world.scaler.unscale_(world.optimizer)
    return world


def taken() -> World:
    """A scaler that has stepped and is not updated."""
    world = unscaled()
    world.scaler.step(world.optimizer)
    return world


GOOD = {"scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 10, "_growth_tracker": 1}

_GRAD_SCALER = [
    _scaler("init_loss_scaling=0", VALUE, "init_scale=0", "above 0", init_loss_scaling=0),
    _scaler("init_loss_scaling=inf", VALUE, "init_scale=inf", "finite", init_loss_scaling=math.inf),
    _scaler("init_loss_scaling='2'", VALUE, "init_scale='2'", "number", init_loss_scaling="2"),
    _scaler("incr_ratio=1", VALUE, "growth_factor=1", "above 1", incr_ratio=1.0),
    _scaler("decr_ratio=1", VALUE, "backoff_factor=1", "below 1", decr_ratio=1.0),
    _scaler("decr_ratio=0", VALUE, "backoff_factor=0", "above 0", decr_ratio=0.0),
    _scaler("incr_every_n_steps=0", VALUE, "incr_every_n_steps=0", "above 0", "None for never", incr_every_n_steps=0),
    _scaler("incr_every_n_steps=-1", VALUE, "incr_every_n_steps=-1", "above 0", incr_every_n_steps=-1),
    _scaler("incr_every_n_steps=2.5", VALUE, "incr_every_n_steps=2.5", "whole number", incr_every_n_steps=2.5),
    _scaler("growth_interval=0", VALUE, "growth_interval=0", "None for never", growth_interval=0),
    _scaler(
        "decr_every_n_nan_or_inf=0", VALUE, "decr_every_n_nan_or_inf=0", "None for never", decr_every_n_nan_or_inf=0
    ),
    _scaler("collapse_after=0", VALUE, "collapse_after=0", "None for never", collapse_after=0),
    _scaler("min_loss_scaling=-1", VALUE, "min_scale=-1", "above 0", min_loss_scaling=-1.0),
    _scaler(
        "bounds the wrong way round",
        VALUE,
        "min_scale=4",
        "max_scale=2",
        "swap",
        min_loss_scaling=4.0,
        max_loss_scaling=2.0,
    ),
    Wrong("set_incr_ratio(1)", scaled, lambda w: w.scaler.set_incr_ratio(1.0), VALUE, ("growth_factor=1", "above 1")),
    Wrong(
        "set_decr_ratio('a')", scaled, lambda w: w.scaler.set_decr_ratio("a"), VALUE, ("backoff_factor='a'", "number")
    ),
    Wrong("set_growth_interval(0)", scaled, lambda w: w.scaler.set_growth_interval(0), VALUE, ("=0", "None for never")),
    Wrong("scaler.scale(3)", scaled, lambda w: w.scaler.scale(3), TYPE, ("tensor", "int")),
    Wrong(
        "scaler.scale of integers",
        scaled,
        lambda w: w.scaler.scale(torch.tensor(3)),
        TYPE,
        ("floating tensor", "torch.int64"),
    ),
    Wrong("scaler.scale of a string", scaled, lambda w: w.scaler.scale("loss"), TYPE, ("tensor", "str")),
    Wrong("scaler.step of nothing", scaled, lambda w: w.scaler.step(None), TYPE, ("torch.optim.Optimizer", "NoneType")),
    Wrong(
        "scaler.unscale_ of a model",
        scaled,
        lambda w: w.scaler.unscale_(w.model),
        TYPE,
        ("torch.optim.Optimizer", "Sequential"),
    ),
    Wrong(
        "scaler.step without a loss",
        scaled,
        lambda w: w.scaler.step(w.optimizer),
        UsageError,
        ("No loss has been scaled", "scaler.scale(loss).backward()"),
    ),
    Wrong(
        "scaler.step before the second backward pass",
        stepped,
        lambda w: w.scaler.step(w.optimizer),
        UsageError,
        ("have no gradient", "scaler.scale(loss).backward()"),
    ),
    Wrong(
        "scaler.unscale_ before the backward pass",
        stepped,
        lambda w: w.scaler.unscale_(w.optimizer),
        UsageError,
        ("have no gradient", "scaler.scale(loss).backward()"),
    ),
    Wrong(
        "scaler.unscale_ twice",
        unscaled,
        lambda w: w.scaler.unscale_(w.optimizer),
        UsageError,
        ("already been called", "since the last update()"),
    ),
    Wrong("scaler.unscale_ after step", taken, lambda w: w.scaler.unscale_(w.optimizer), UsageError, ("after step()",)),
    Wrong(
        "scaler.step twice",
        taken,
        lambda w: w.scaler.step(w.optimizer),
        UsageError,
        ("already been called", "since the last update()"),
    ),
    Wrong(
        "scaler.update first",
        scaled,
        lambda w: w.scaler.update(),
        UsageError,
        ("nothing was stepped", "Call scaler.step"),
    ),
    Wrong("scaler.update(0)", taken, lambda w: w.scaler.update(0.0), VALUE, ("loss_scale=0", "above 0")),
    Wrong("scaler.update('a')", taken, lambda w: w.scaler.update("a"), VALUE, ("new_scale='a'", "number")),
    Wrong(
        "scaler.update of two numbers",
        taken,
        lambda w: w.scaler.update(torch.ones(2)),
        VALUE,
        ("new_scale", "one element"),
    ),
    Wrong(
        "scaler.clip_grad_norm_ to '1'",
        pending,
        lambda w: w.scaler.clip_grad_norm_(w.optimizer, "1"),
        TYPE,
        ("max_norm must be a number", "'1'"),
    ),
    Wrong(
        "scaler.clip_grad_norm_ to NaN",
        pending,
        lambda w: w.scaler.clip_grad_norm_(w.optimizer, math.nan),
        VALUE,
        ("max_norm=nan", "at least 0"),
    ),
    Wrong(
        "scaler.load_state_dict(None)",
        scaled,
        lambda w: w.scaler.load_state_dict(None),
        TYPE,
        ("NoneType", "state_dict() of a GradScaler"),
    ),
    Wrong("scaler.load_state_dict({})", scaled, lambda w: w.scaler.load_state_dict({}), VALUE, ("empty", "disabled")),
    Wrong(
        "scaler.load_state_dict of a model",
        scaled,
        lambda w: w.scaler.load_state_dict(w.model.state_dict()),
        VALUE,
        ("no 'scale'", "Nothing was loaded"),
    ),
    Wrong(
        "scaler.load_state_dict scale='a'",
        scaled,
        lambda w: w.scaler.load_state_dict({**GOOD, "scale": "a"}),
        VALUE,
        ("scale='a'", "number"),
    ),
    Wrong(
        "scaler.load_state_dict scale=nan",
        scaled,
        lambda w: w.scaler.load_state_dict({**GOOD, "scale": math.nan}),
        VALUE,
        ("scale=nan", "finite"),
    ),
    Wrong(
        "scaler.load_state_dict tracker='a'",
        scaled,
        lambda w: w.scaler.load_state_dict({**GOOD, "_growth_tracker": "a"}),
        VALUE,
        ("_growth_tracker='a'", "number"),
    ),
    Wrong(
        "scaler.load_state_dict tracker=None",
        scaled,
        lambda w: w.scaler.load_state_dict({**GOOD, "_growth_tracker": None}),
        VALUE,
        ("_growth_tracker=None", "number"),
    ),
    Wrong(
        "scaler.load_state_dict growth_interval=-1",
        scaled,
        lambda w: w.scaler.load_state_dict({**GOOD, "growth_interval": -1}),
        VALUE,
        ("growth_interval=-1", "above 0"),
    ),
]


def _dynamic(name: str, error: Any, *words: str, **options: Any) -> Wrong:
    return Wrong(f"DynamicLossScale {name}", nothing, lambda w: DynamicLossScale(**options), error, words)


_LOSS_SCALES = [
    _dynamic("init_scale=0", VALUE, "init_scale=0", "above 0", init_scale=0.0),
    _dynamic("init_scale='dynamic'", VALUE, "init_scale='dynamic'", "number", init_scale="dynamic"),
    _dynamic("growth_factor=0.5", VALUE, "growth_factor=0.5", "above 1", growth_factor=0.5),
    _dynamic("growth_factor=nan", VALUE, "growth_factor=nan", "above 1", growth_factor=math.nan),
    _dynamic("backoff_factor=2", VALUE, "backoff_factor=2", "below 1", backoff_factor=2),
    _dynamic("growth_interval=0", VALUE, "growth_interval=0", "None for never", growth_interval=0),
    _dynamic("growth_interval=True", VALUE, "growth_interval=True", "whole number", growth_interval=True),
    _dynamic("backoff_interval=1.5", VALUE, "backoff_interval=1.5", "whole number", backoff_interval=1.5),
    _dynamic("max_scale=inf", VALUE, "max_scale=inf", "finite", max_scale=math.inf),
    _dynamic("min_scale above max_scale", VALUE, "min_scale=4", "swap", min_scale=4.0, max_scale=2.0),
    _dynamic("sticky_backoff='no'", TYPE, "sticky_backoff must be True or False", "'no'", sticky_backoff="no"),
    Wrong("StaticLossScale(0)", nothing, lambda w: StaticLossScale(0), VALUE, ("loss_scale=0", "above 0")),
    Wrong("StaticLossScale('8')", nothing, lambda w: StaticLossScale("8"), VALUE, ("loss_scale='8'", "number")),
]


def _fp16(name: str, error: Any, *words: str, **options: Any) -> Wrong:
    return Wrong(
        f"FP16_Optimizer {name}", plain, lambda w: fp16_utils.FP16_Optimizer(w.optimizer, **options), error, words
    )


def _saved(w: World, **changes: Any) -> dict[str, Any]:
    return {**w.optimizer.state_dict(), **changes}


_FP16_OPTIMIZER = [
    Wrong(
        "FP16_Optimizer(3)", nothing, lambda w: fp16_utils.FP16_Optimizer(3), TYPE, ("torch.optim.Optimizer", "not 3")
    ),
    Wrong(
        "FP16_Optimizer twice",
        old,
        lambda w: fp16_utils.FP16_Optimizer(w.optimizer),
        UsageError,
        ("already", "wrap a plain one once"),
    ),
    Wrong(
        "FP16_Optimizer of an initialized one",
        at(),
        lambda w: fp16_utils.FP16_Optimizer(w.optimizer),
        UsageError,
        ("can go only once", "make a new optimizer"),
    ),
    _fp16("static_loss_scale=0", VALUE, "loss_scale=0", "above 0", static_loss_scale=0),
    _fp16("static_loss_scale='a'", VALUE, "static_loss_scale='a'", "number", static_loss_scale="a"),
    _fp16(
        "dynamic_loss_args=3",
        TYPE,
        "dynamic_loss_args must be a dict",
        "3",
        dynamic_loss_scale=True,
        dynamic_loss_args=3,
    ),
    _fp16(
        "an unknown dynamic_loss_arg",
        TYPE,
        "'window'",
        "scale_window",
        dynamic_loss_scale=True,
        dynamic_loss_args={"window": 3},
    ),
    _fp16(
        "scale_factor=1",
        VALUE,
        "scale_factor=1",
        "above 1",
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_factor": 1},
    ),
    _fp16(
        "scale_window=0",
        VALUE,
        "scale_window=0",
        "1 or more",
        dynamic_loss_scale=True,
        dynamic_loss_args={"scale_window": 0},
    ),
    _fp16(
        "init_scale=-1",
        VALUE,
        "init_scale=-1",
        "above 0",
        dynamic_loss_scale=True,
        dynamic_loss_args={"init_scale": -1},
    ),
    Wrong("FP16_Optimizer.backward(3)", old, lambda w: w.optimizer.backward(3), TYPE, ("floating tensor", "int")),
    Wrong(
        "FP16_Optimizer.backward of integers",
        old,
        lambda w: w.optimizer.backward(torch.tensor(3)),
        TYPE,
        ("floating tensor", "torch.int64"),
    ),
    Wrong(
        "FP16_Optimizer.loss_scale = 0",
        old,
        lambda w: setattr(w.optimizer, "loss_scale", 0),
        VALUE,
        ("loss_scale=0", "above 0"),
    ),
    Wrong(
        "FP16_Optimizer.loss_scale = 'a'",
        old,
        lambda w: setattr(w.optimizer, "loss_scale", "a"),
        VALUE,
        ("loss_scale='a'", "number"),
    ),
    Wrong(
        "clip_master_grads('1')",
        old,
        lambda w: w.optimizer.clip_master_grads("1"),
        TYPE,
        ("max_norm must be a number", "'1'"),
    ),
    Wrong(
        "clip_master_grads(-1)",
        old,
        lambda w: w.optimizer.clip_master_grads(-1.0),
        VALUE,
        ("max_norm=-1", "at least 0"),
    ),
    Wrong(
        "clip_master_grads norm_type='a'",
        old,
        lambda w: w.optimizer.clip_master_grads(1.0, "a"),
        TYPE,
        ("norm_type must be a number", "'a'"),
    ),
    Wrong(
        "FP16_Optimizer.load_state_dict(None)",
        old,
        lambda w: w.optimizer.load_state_dict(None),
        TYPE,
        ("NoneType", "FP16_Optimizer"),
    ),
    Wrong(
        "FP16_Optimizer.load_state_dict({})",
        old,
        lambda w: w.optimizer.load_state_dict({}),
        VALUE,
        ("no loss_scaler", "FP16_Optimizer"),
    ),
    Wrong(
        "FP16_Optimizer.load_state_dict of Adam's",
        old,
        lambda w: w.optimizer.load_state_dict(w.inner.state_dict()),
        VALUE,
        ("no loss_scaler", "FP16_Optimizer"),
    ),
    Wrong(
        "FP16_Optimizer.load_state_dict of other shapes",
        old,
        lambda w: w.optimizer.load_state_dict(_saved(w, fp32_from_fp16=[[torch.ones(1)]])),
        VALUE,
        ("shapes", "(1,)"),
    ),
    Wrong(
        "FP16_Optimizer.load_state_dict masters=3",
        old,
        lambda w: w.optimizer.load_state_dict(_saved(w, fp32_from_fp16=3)),
        VALUE,
        ("fp32_from_fp16", "3"),
    ),
    Wrong(
        "FP16_Optimizer.load_state_dict a scale of 0",
        old,
        lambda w: w.optimizer.load_state_dict(_saved(w, loss_scaler={"loss_scale": 0.0, "unskipped": 0})),
        VALUE,
        ("loss_scale", "above zero"),
    ),
    Wrong(
        "FP16_Optimizer.load_state_dict of another optimizer",
        old,
        lambda w: w.optimizer.load_state_dict(_saved(w, optimizer_state_dict={"state": {}, "param_groups": []})),
        VALUE,
        ("optimizer_state_dict", "Adam"),
    ),
    Wrong("LossScaler('a')", nothing, lambda w: fp16_utils.LossScaler("a"), VALUE, ("loss_scale='a'", "number")),
    Wrong(
        "LossScaler.load_state_dict(3)",
        nothing,
        lambda w: fp16_utils.LossScaler().load_state_dict(3),
        VALUE,
        ("no saved loss scaler", "loss_scale"),
    ),
    Wrong("prep_param_lists(3)", nothing, lambda w: fp16_utils.prep_param_lists(3), TYPE, ("torch.nn.Module", "int")),
    Wrong("network_to_half(3)", nothing, lambda w: fp16_utils.network_to_half(3), TYPE, ("torch.nn.Module", "int")),
]


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

_FUSED = [
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

ROWS = [*_GRAD_SCALER, *_LOSS_SCALES, *_FP16_OPTIMIZER, *_FUSED]
