"""Wrong uses of ``amp``: scale_loss, the handle of 2018, auto_cast, decorate, and what scripts register."""

from __future__ import annotations

from typing import Any

import torch

from halfstep import amp
from halfstep.core.errors import ArgumentIndexError, ArgumentTypeError, ArgumentValueError, UsageError

from .worlds import World, Wrong, at, handled, net, nothing, plain

__all__ = ["ROWS"]


VALUE, TYPE = ArgumentValueError, ArgumentTypeError

_SCALE_LOSS = [
    Wrong(
        "scale_loss optimizers=None",
        at(),
        lambda w: amp.scale_loss(w.loss, None),
        TYPE,
        ("NoneType", "pass those that amp.initialize returned"),
    ),
    Wrong(
        "scale_loss the model as optimizer",
        at(),
        lambda w: amp.scale_loss(w.loss, w.model),
        TYPE,
        ("Sequential", "pass those that amp.initialize returned"),
    ),
    Wrong(
        "scale_loss no optimizer",
        at(),
        lambda w: amp.scale_loss(w.loss, []),
        UsageError,
        ("no optimizer", "pass every optimizer"),
    ),
    Wrong(
        "scale_loss a number as optimizer",
        at(),
        lambda w: amp.scale_loss(w.loss, 3),
        TYPE,
        ("int", "pass those that amp.initialize returned"),
    ),
    Wrong(
        "scale_loss an optimizer twice",
        at(),
        lambda w: amp.scale_loss(w.loss, [w.optimizer] * 2),
        UsageError,
        ("twice", "pass each once"),
    ),
    Wrong(
        "scale_loss a stranger",
        at(),
        lambda w: amp.scale_loss(w.loss, torch.optim.SGD(net().parameters(), 0.1)),
        UsageError,
        ("did not come back from amp.initialize", "pass every optimizer through"),
    ),
    Wrong(
        "scale_loss a number as loss",
        at(),
        lambda w: amp.scale_loss(3.0, w.optimizer),
        TYPE,
        ("floating tensor", "float"),
    ),
    Wrong(
        "scale_loss an integer loss",
        at(),
        lambda w: amp.scale_loss(torch.ones((), dtype=torch.int64), w.optimizer),
        TYPE,
        ("floating tensor", "torch.int64"),
    ),
    Wrong(
        "scale_loss loss_id=1",
        at(),
        lambda w: amp.scale_loss(w.loss, w.optimizer, loss_id=1),
        ArgumentIndexError,
        ("loss_id=1", "num_losses=1", "pass num_losses="),
    ),
    Wrong(
        "scale_loss loss_id=-1",
        at(),
        lambda w: amp.scale_loss(w.loss, w.optimizer, loss_id=-1),
        ArgumentIndexError,
        ("loss_id=-1", "from 0"),
    ),
    Wrong(
        "scale_loss loss_id='a'",
        at(),
        lambda w: amp.scale_loss(w.loss, w.optimizer, loss_id="a"),
        TYPE,
        ("loss_id='a'", "whole number"),
    ),
    Wrong(
        "scale_loss loss_id=0.0",
        at(),
        lambda w: amp.scale_loss(w.loss, w.optimizer, loss_id=0.0),
        TYPE,
        ("loss_id=0.0", "whole number"),
    ),
    Wrong(
        "scale_loss without with",
        at(),
        lambda w: amp.scale_loss(w.loss, w.optimizer).backward(),
        UsageError,
        ("'backward'", "with amp.scale_loss(loss, optimizer) as scaled_loss"),
    ),
    Wrong(
        "scale_loss backward on the other loss",
        at(),
        lambda w: _other_loss(w),
        UsageError,
        ("on the loss given", "scaled_loss.backward()"),
    ),
    Wrong(
        "scale_loss a block in a block",
        at(),
        lambda w: _nested(w),
        UsageError,
        ("open already", "Close the first block"),
    ),
    Wrong(
        "model.load_state_dict that swaps",
        at(),
        lambda w: _load_swapping(w),
        UsageError,
        ("swap", "set_swap_module_params_on_conversion(True)", "Set it to False", "Nothing was loaded"),
    ),
    Wrong(
        "amp.load_state_dict None", at(), lambda w: amp.load_state_dict(None), TYPE, ("NoneType", "amp.state_dict()")
    ),
    Wrong(
        "amp.load_state_dict of a model",
        at(),
        lambda w: amp.load_state_dict(w.model.state_dict()),
        VALUE,
        ("unexpected keys", "0.weight", "amp.state_dict()"),
    ),
    Wrong(
        "amp.load_state_dict an entry that is a number",
        at(),
        lambda w: amp.load_state_dict({"loss_scaler0": 8.0}),
        VALUE,
        ("loss_scaler0", "amp.state_dict()"),
    ),
    Wrong(
        "amp.load_state_dict a second entry that is NaN",
        at(num_losses=2),
        lambda w: amp.load_state_dict(
            {
                "loss_scaler0": {"loss_scale": 4.0, "unskipped": 1},
                "loss_scaler1": {"loss_scale": float("nan"), "unskipped": 1},
            }
        ),
        VALUE,
        ("loss_scaler1", "nan", "Nothing was loaded"),
    ),
    Wrong(
        "amp.master_params of a model",
        at(),
        lambda w: list(amp.master_params(w.model)),
        TYPE,
        ("optimizer", "Sequential"),
    ),
    Wrong(
        "amp.steps_skipped of a stranger",
        at(),
        lambda w: amp.steps_skipped(torch.optim.SGD(net().parameters(), 0.1)),
        UsageError,
        ("did not come back from amp.initialize",),
    ),
    Wrong("amp.master_model of a number", at(), lambda w: amp.master_model(3), TYPE, ("torch.nn.Module", "int")),
]


def _other_loss(w: World) -> None:
    with amp.scale_loss(w.loss, w.optimizer):
        w.loss.backward()


def _load_swapping(world: World) -> None:
    saved = {name: torch.zeros_like(value) for name, value in world.model.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        world.model.load_state_dict(saved)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _nested(w: World) -> None:
    with amp.scale_loss(w.loss, w.optimizer), amp.scale_loss(w.loss, w.optimizer):
        pass


def _init(name: str, error: Any, *words: str, **options: Any) -> Wrong:
    return Wrong(f"amp.init {name}", nothing, lambda w: amp.init(**options), error, words)


def used() -> World:
    """The handle, after a step of its optimizer."""
    world = handled()
    with world.wrapped.scale_loss(world.loss) as scaled_loss:
        scaled_loss.backward()
    world.wrapped.step()
    return world


def used_up() -> World:
    """The handle, after all losses of a step."""
    world = handled()
    with world.wrapped.scale_loss(world.loss) as scaled_loss:
        scaled_loss.backward()
    return world


_HANDLE = [
    _init("loss_scale=0", VALUE, "loss_scale=0", "above zero", loss_scale=0),
    _init("loss_scale='big'", VALUE, "loss_scale='big'", '"dynamic"', loss_scale="big"),
    _init("dtype=torch.int8", VALUE, "torch.int8", "use one of", dtype=torch.int8),
    _init("emulate=2", VALUE, "emulate=2", "True (everywhere) or False (nowhere)", emulate=2),
    Wrong(
        "handle.scale_loss optimizer=None",
        handled,
        lambda w: w.handle.scale_loss(w.loss, None),
        TYPE,
        ("optimizer", "NoneType"),
    ),
    Wrong(
        "handle.scale_loss no optimizer",
        handled,
        lambda w: w.handle.scale_loss(w.loss, []),
        TYPE,
        ("optimizer", "empty list"),
    ),
    Wrong(
        "handle.scale_loss a string as loss",
        handled,
        lambda w: w.handle.scale_loss("x", w.optimizer),
        TYPE,
        ("floating tensor", "str"),
    ),
    Wrong(
        "handle.scale_loss without with",
        used,
        lambda w: w.wrapped.scale_loss(w.loss).backward(),
        UsageError,
        ("'backward'", "with "),
    ),
    Wrong(
        "handle.wrap_optimizer 3", handled, lambda w: w.handle.wrap_optimizer(3), TYPE, ("torch.optim.Optimizer", "int")
    ),
    Wrong(
        "handle.wrap_optimizer twice",
        handled,
        lambda w: w.handle.wrap_optimizer(w.wrapped),
        TYPE,
        ("torch.optim.Optimizer", "OptimWrapper"),
    ),
    Wrong(
        "handle.wrap_optimizer num_loss=0",
        handled,
        lambda w: w.handle.wrap_optimizer(w.optimizer, 0),
        VALUE,
        ("num_loss=0", "1 or more"),
    ),
    Wrong(
        "handle.wrap_optimizer num_loss='2'",
        handled,
        lambda w: w.handle.wrap_optimizer(w.optimizer, "2"),
        VALUE,
        ("num_loss='2'", "whole number"),
    ),
    Wrong(
        "a loss more than num_loss",
        used_up,
        lambda w: w.wrapped.scale_loss(w.loss),
        UsageError,
        ("loss number 2", "num_loss=1"),
    ),
]


def _auto_cast(name: str, error: Any, *words: str, **options: Any) -> Wrong:
    return Wrong(f"auto_cast {name}", nothing, lambda w: amp.auto_cast(**options), error, words)


def _decorate(name: str, error: Any, *words: str, **options: Any) -> Wrong:
    return Wrong(
        f"decorate {name}",
        plain,
        lambda w: amp.decorate(**{"models": w.model, "optimizers": w.optimizer, "level": "O2", **options}),
        error,
        words,
    )


def _bare(w: World) -> None:
    with amp.auto_cast:
        pass


def _generator() -> Any:
    yield 1


_PADDLE = [
    _auto_cast("level='O9'", VALUE, "level='O9'", "O0, OD, O1 or O2", level="O9"),
    _auto_cast("level=1", VALUE, "level=1", "O0, OD, O1 or O2", level=1),
    _auto_cast("dtype=torch.int8", VALUE, "torch.int8", "use one of", dtype=torch.int8),
    _auto_cast("dtype='float32'", VALUE, "dtype='float32'", "enable=False", dtype="float32"),
    _auto_cast("a bare string as list", TYPE, "'exp'", "list", custom_black_list="exp"),
    _auto_cast("a number as list", TYPE, "3", "list", custom_white_list=3),
    _auto_cast("a number in a list", TYPE, "3", "name or as a torch function", custom_white_list=[3]),
    _auto_cast("an unknown op", VALUE, "'eksp'", "no op", custom_black_list=["eksp"]),
    _auto_cast(
        "an op on both lists", VALUE, "exp", "leave each on one", custom_white_list=["exp"], custom_black_list=["exp"]
    ),
    _auto_cast("device_type='gpu'", VALUE, "device_type='gpu'", "'cuda'", device_type="gpu"),
    _auto_cast("device_type='cuda:0'", VALUE, "device_type='cuda:0'", "without an index", device_type="cuda:0"),
    _auto_cast("device_type=3", TYPE, "device_type=3", "'cuda'", device_type=3),
    _auto_cast("device_type=[]", VALUE, "device_type=[]", "enable=False", device_type=[]),
    _auto_cast("emulate='yes'", VALUE, "emulate='yes'", "True (everywhere) or False (nowhere)", emulate="yes"),
    Wrong("auto_cast without parentheses", nothing, _bare, TYPE, ("lacks its parentheses", "amp.auto_cast()")),
    Wrong(
        "@auto_cast without parentheses",
        nothing,
        lambda w: amp.auto_cast(_bare),
        TYPE,
        ("without parentheses", "@amp.auto_cast()"),
    ),
    Wrong(
        "auto_cast around a generator",
        nothing,
        lambda w: amp.auto_cast()(_generator),
        VALUE,
        ("_generator is a generator", "inside it"),
    ),
    _decorate("level='O3'", VALUE, "level='O3'", "O1 or O2", level="O3"),
    _decorate("dtype='float32'", VALUE, "dtype='float32'", "float16, bfloat16", dtype="float32"),
    _decorate("models=None", TYPE, "NoneType", "models must be", models=None),
    _decorate("optimizers='adam'", TYPE, "str", "optimizers must be", optimizers="adam"),
    _decorate("master_weight='yes'", TYPE, "'yes'", "True, False or None", master_weight="yes"),
    _decorate(
        "master_grad without masters",
        UsageError,
        "master_grad=True",
        "leave out",
        master_grad=True,
        master_weight=False,
    ),
    _decorate("save_dtype='int8'", VALUE, "save_dtype='int8'", "can only be", save_dtype="int8"),
    _decorate("excluded_layers=3", TYPE, "excluded_layers", "3 is neither", excluded_layers=3),
    _decorate("emulate='yes'", VALUE, "emulate='yes'", "True (everywhere) or False (nowhere)", emulate="yes"),
    _decorate("module_filter=3", TYPE, "module_filter=3", "(module, name)", module_filter=3),
]

_FUNCTIONS = [
    Wrong("half_function(3)", nothing, lambda w: amp.half_function(3), TYPE, ("decorates a function", "not 3")),
    Wrong(
        "register_half_function of nothing",
        nothing,
        lambda w: amp.register_half_function(torch, "sofmax"),
        VALUE,
        ("sofmax", "torch"),
    ),
    Wrong(
        "register_float_function of a number",
        nothing,
        lambda w: amp.register_float_function(torch, "pi"),
        TYPE,
        ("pi", "function"),
    ),
    Wrong("exempt(3)", nothing, lambda w: amp.exempt(3), TYPE, ("torch.nn.Module", "int")),
]

ROWS = [*_SCALE_LOSS, *_HANDLE, *_PADDLE, *_FUNCTIONS]
