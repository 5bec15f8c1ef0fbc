"""Wrong uses of GradScaler, loss scales and FP16_Optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch

from halfstep import DynamicLossScale, StaticLossScale, amp, fp16_utils
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, UsageError

from .worlds import World, Wrong, at, nothing, old, plain, scaled

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

ROWS = [*_GRAD_SCALER, *_LOSS_SCALES, *_FP16_OPTIMIZER]
