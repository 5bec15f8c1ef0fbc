"""``amp.GradScaler``: the recorded Paddle, a reference in plain Python, torch's scaler, every call in every order."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from halfstep import amp
from halfstep.core.errors import ArgumentValueError, LossScaleCollapsed, UsageError
from halfstep.core.loss_scale import DynamicLossScale, StaticLossScale
from tests.support.apex_recording import golden
from tests.support.worlds import advance, with_optimizer

PADDLE = golden("paddle_grad_scaler")
# What the recordings ran with where they name nothing: the defaults of Paddle 3.3, which its guide does not have.
REAL_DEFAULTS = {"incr_every_n_steps": 2000, "decr_every_n_nan_or_inf": 1}
FACTORS = {"F": 1.0, "I": math.inf, "N": math.nan}

Optimizer = torch.optim.Optimizer


def weight(value: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value], dtype=dtype))


def sgd(*params: nn.Parameter) -> Optimizer:
    return torch.optim.SGD(params, lr=0.125)


def backward(scaler: amp.GradScaler, param: nn.Parameter, letter: str = "F") -> None:
    scaler.scale((param * FACTORS[letter]).sum()).backward()


def result_of(entry: Any) -> Any:
    return entry["result"] if isinstance(entry, dict) and "result" in entry else entry


# ---- Paddle, recorded

NOT_IMITATED = {
    "no floor, to zero: init 2**-147": "the scale fell to 0 and stayed there; ours stays at the smallest normal number",
    "no ceiling: init 2**126, incr every 1": "the scale rose to inf and every later step was skipped",
}
TRACES = [name for name in PADDLE["traces step()+update()"] if name not in NOT_IMITATED]


def run(scaler: amp.GradScaler, param: nn.Parameter, optim: Optimizer, pattern: str, minimize: bool) -> list[Any]:
    rows = []
    for letter in pattern:
        used, before = scaler.get_scale(), param.detach().clone()
        loss = scaler.scale((param * FACTORS[letter]).sum())
        loss.backward()
        stepped = scaler.minimize(optim, loss) if minimize else scaler.step(optim)
        assert bool(stepped) == bool(stepped.stepped) == (letter == "F")
        if not minimize:
            scaler.update()
        optim.zero_grad()
        assert stepped or torch.equal(param, before)
        saved = scaler.state_dict()
        rows.append([letter, used, not stepped, saved["scale"], saved["incr_count"], saved["decr_count"], param.item()])
    return rows


@pytest.mark.parametrize("name", TRACES)
def test_trace_of_step_and_update(name: str) -> None:
    case = PADDLE["traces step()+update()"][name]
    parameters = {
        key: None if value == 0 and value is not False else value for key, value in case["parameters"].items()
    }  # never is 0 there
    scaler, param = amp.GradScaler(**REAL_DEFAULTS | parameters), weight()
    rows = run(scaler, param, sgd(param), case["pattern"], minimize=False)
    assert rows == result_of(case["rows"])


@pytest.mark.parametrize("name", PADDLE["traces minimize()"])
def test_trace_of_minimize(name: str) -> None:
    case = PADDLE["traces step()+update()"][name]
    scaler, param = amp.GradScaler(**REAL_DEFAULTS | case["parameters"]), weight()
    rows = run(scaler, param, sgd(param), case["pattern"], minimize=True)
    assert rows == result_of(PADDLE["traces minimize()"][name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("first", ["F", "I"])
def test_minimize_of_several_optimizers_divides_by_the_scale_of_the_loss(first: str, dtype: torch.dtype) -> None:
    """PaddleClas calls it in a loop over optimizers. The first call moves the scale, which the others divided by."""
    scaler = amp.GradScaler(init_loss_scaling=64.0, incr_every_n_steps=1, decr_every_n_nan_or_inf=1)
    params = [weight(dtype=dtype) for _ in range(3)]
    optims = [sgd(param) for param in params]
    for letters in ((first, "F", "F"), ("F", "F", "F")):
        losses = [(param * FACTORS[letter]).sum() for param, letter in zip(params, letters, strict=True)]
        scaler.scale(torch.stack(losses).sum()).backward()
        for optim in optims:
            scaler.minimize(optim)
            optim.zero_grad()
    assert [param.item() for param in params] == [1.0 - 0.125 * (1 + (first == "F")), 0.75, 0.75]


@pytest.mark.parametrize("name", NOT_IMITATED)
def test_scale_stays_usable_where_paddle_lost_it(name: str) -> None:
    case = PADDLE["traces step()+update()"][name]
    scaler, param = amp.GradScaler(**REAL_DEFAULTS | case["parameters"]), weight()
    rows = run(scaler, param, sgd(param), case["pattern"], minimize=False)
    assert all(0 < row[3] < math.inf for row in rows)
    assert [row[6] for row in rows if row[0] == "F"] == [
        1.0 - 0.125 * (i + 1) for i in range(case["pattern"].count("F"))
    ]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("Momentum", lambda p: torch.optim.SGD([p], lr=0.125, momentum=0.9)),
        ("Adam", lambda p: torch.optim.Adam([p], lr=0.125)),
        ("Adam", lambda p: torch.optim.Adam([p], lr=0.125, fused=True)),
        ("AdamW", lambda p: torch.optim.AdamW([p], lr=0.125, weight_decay=0.01)),
        ("AdamW", lambda p: torch.optim.AdamW([p], lr=0.125, weight_decay=0.01, fused=True)),
    ],
    ids=["Momentum", "Adam", "Adam fused", "AdamW", "AdamW fused"],
)
def test_skipping_with(name: str, make: Callable[[nn.Parameter], Optimizer]) -> None:
    recorded = result_of(PADDLE[f"skipping with {name}"])
    scaler, param = amp.GradScaler(init_loss_scaling=8.0, **REAL_DEFAULTS), weight()
    rows = run(scaler, param, make(param), "".join(row[0] for row in recorded), minimize=False)
    assert [row[:6] for row in rows] == [row[:6] for row in recorded]
    assert [row[6] for row in rows] == pytest.approx(
        [row[6] for row in recorded], rel=1e-5
    )  # it adds epsilon elsewhere


CALLS = [name.removeprefix("calls: ") for name in PADDLE if name.startswith("calls: ")]


@pytest.mark.parametrize("calls", CALLS)
def test_order_of_calls(calls: str) -> None:
    recorded = PADDLE[f"calls: {calls}"]
    scaler, param = amp.GradScaler(init_loss_scaling=8.0, incr_every_n_steps=2), weight()
    optim = sgd(param)
    backward(scaler, param)
    verbs: dict[str, Callable[[], Any]] = {
        "unscale_": lambda: scaler.unscale_(optim),
        "step": lambda: scaler.step(optim),
        "update": scaler.update,
        "clear": optim.zero_grad,
        "backward": lambda: backward(scaler, param),
    }

    def go() -> None:
        for verb in calls.split(", "):
            verbs[verb]()

    if "raises" in recorded:
        with pytest.raises(UsageError) as error:
            go()
        assert isinstance(error.value, RuntimeError)
        assert str(error.value) == recorded["message"]
        return
    if calls.startswith("update"):  # Paddle takes it for a finite step; torch refuses it, and so do we
        with pytest.raises(UsageError, match=r"Call scaler\.step"):
            go()
        return
    go()
    assert (scaler.get_scale(), scaler.state_dict()["incr_count"], param.item(), param.grad.item()) == tuple(
        recorded.values()
    )


TWO = [name for name in PADDLE if name.startswith("two optimizers")]
RIGHT = {  # what one found_inf for all optimizers, overwritten by the last, made of it in Paddle
    "I then F: step, step, update": {"scale after": 4.0},
    "I then F: unscale_, unscale_, step, step, update": {"w1": 1.0, "scale after": 4.0},
    "F then I: unscale_, unscale_, step, step, update": {"w1": 0.875},
}


@pytest.mark.parametrize("name", TWO)
def test_found_inf_is_per_optimizer(name: str) -> None:
    case = name.removeprefix("two optimizers, gradients ")
    letters, _, calls = case.partition(": ")
    recorded = result_of(PADDLE[name]) | RIGHT.get(case, {})
    scaler = amp.GradScaler(init_loss_scaling=8.0, **REAL_DEFAULTS)
    params = [weight(), weight()]
    optims = [sgd(p) for p in params]
    for param, letter in zip(params, letters.split(" then "), strict=True):
        backward(scaler, param, letter)
    if "unscale_" in calls:
        for optim in optims:
            scaler.unscale_(optim)
    for optim in optims:
        scaler.step(optim)
    scaler.update()
    assert {"w1": params[0].item(), "w2": params[1].item(), "scale after": scaler.get_scale()} == recorded


@pytest.mark.parametrize("where", ["none", "fp32", "fp16"])
def test_fp16_gradients(where: str) -> None:
    recorded = result_of(PADDLE[f"one optimizer, fp32 and fp16 gradients, inf in {where}"])
    scaler = amp.GradScaler(init_loss_scaling=8.0, **REAL_DEFAULTS)
    params = {"fp32": weight(), "fp16": weight(dtype=torch.float16)}
    optim = sgd(*params.values())
    for name, param in params.items():
        backward(scaler, param, "I" if name == where else "F")
    scaler.unscale_(optim)
    assert [math.isfinite(p.grad.item()) for p in params.values()] == [
        g != "nan" for g in recorded["grads after unscale_"]
    ]
    stepped = scaler.step(optim)
    scaler.update()
    assert (not stepped, scaler.get_scale()) == (recorded["found"], recorded["scale"])
    assert [p.item() for p in params.values()] == [recorded["w32"], recorded["w16"]]


def test_step_with_no_gradients_counts_as_finite() -> None:
    recorded = PADDLE["step with no gradients anywhere"]
    scaler, param = amp.GradScaler(init_loss_scaling=8.0, incr_every_n_steps=1), weight()
    optim = sgd(param)
    with pytest.raises(UsageError, match="No loss has been scaled"):  # Paddle takes that, too
        scaler.step(optim)
    scaler.scale(torch.ones(()))
    assert scaler.step(optim)
    scaler.update()
    assert {"scale": scaler.get_scale(), "w": param.item()} == recorded


@pytest.mark.parametrize(
    "scope", [{"enable": False, "dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"dtype": "float16"}, None]
)
@pytest.mark.parametrize("dynamic", [True, False])
def test_no_order_of_calls_disables_the_scaler(scope: dict[str, Any] | None, dynamic: bool) -> None:
    """Paddle's looked at the latest auto_cast, and turned itself off for good unless that was in float16."""
    scaler = amp.GradScaler(init_loss_scaling=8.0, use_dynamic_loss_scaling=dynamic)
    if scope is not None:
        with amp.auto_cast(**scope):
            pass
    assert scaler.scale(torch.tensor(3.0)).item() == 24.0
    assert scaler.is_enable()
    assert scaler.is_use_dynamic_loss_scaling() == dynamic


@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_16_bit_losses_are_scaled_in_fp32(shape: tuple[int, ...]) -> None:
    name = "scale of [2,2] float16 tensor" if shape else "scale of 0-d float16 loss"
    scaled = amp.GradScaler().scale(torch.full(shape, 4.0, dtype=torch.float16))
    assert str(scaled.dtype) == f"torch.{PADDLE[name][0]}"
    assert torch.equal(scaled, torch.full(shape, 4.0 * 2.0**15))  # Paddle made a 0-dim loss 1-dim


# ---- settings and state

SETTINGS = {  # Paddle's setter, value -> what its getter, torch's getter and the state dict say
    "init_loss_scaling": (16.0, "scale", None),
    "incr_ratio": (3.0, "incr_ratio", "growth_factor"),
    "decr_ratio": (0.25, "decr_ratio", "backoff_factor"),
    "incr_every_n_steps": (7, "incr_every_n_steps", "growth_interval"),
    "decr_every_n_nan_or_inf": (5, "decr_every_n_nan_or_inf", None),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setters_and_getters(name: str) -> None:
    value, key, torch_name = SETTINGS[name]
    scaler = amp.GradScaler()
    assert getattr(scaler, f"get_{name}")() != value
    getattr(scaler, f"set_{name}")(value)
    assert getattr(scaler, f"get_{name}")() == scaler.state_dict()[key] == value
    if torch_name is not None:
        assert getattr(scaler, f"get_{torch_name}")() == scaler.state_dict()[torch_name] == value
        other = amp.GradScaler(**{torch_name: value})
        assert getattr(other, f"get_{name}")() == value
        getattr(other, f"set_{torch_name}")(value + 0.5 if torch_name == "growth_factor" else value)
    else:
        assert getattr(amp.GradScaler(**{name: value}), f"get_{name}")() == value


def used_scaler(**arguments: Any) -> amp.GradScaler:
    """One with no field at its default: 2 finite steps after an overflow that has lowered nothing yet."""
    scaler = amp.GradScaler(True, 64.0, 3.0, 0.25, 7, 5, **arguments)
    param = weight()
    for letter in "FFI":
        backward(scaler, param, letter)
        optim = sgd(param)
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
    return scaler


@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle", "torch.save"])
def test_every_field_survives(way: str, tmp_path: Any) -> None:
    scaler = used_scaler()
    saved = scaler.state_dict()
    fresh = amp.GradScaler().state_dict()
    assert set(saved) == set(fresh)
    unmoved = {name for name in saved if saved[name] == fresh[name]}
    assert unmoved == {"incr_count", "_growth_tracker", "use_dynamic_loss_scaling"}  # next test
    if way == "torch.save":
        torch.save(saved, tmp_path / "scaler.pt")
        saved = torch.load(tmp_path / "scaler.pt", weights_only=True)
    other = {"deepcopy": copy.deepcopy, "pickle": lambda s: pickle.loads(pickle.dumps(s))}.get(
        way, lambda s: amp.GradScaler()
    )(scaler)
    other.load_state_dict(saved)
    assert other.state_dict() == saved == scaler.state_dict()
    for _ in range(4):  # and goes on alike: one more row of overflows lowers both at the same step
        for each in (scaler, other):
            param = weight()
            optim = sgd(param)
            backward(each, param, "I")
            each.step(optim)
            each.update()
        assert other.state_dict() == scaler.state_dict()
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize("field", ["incr_count", "use_dynamic_loss_scaling"])
def test_the_other_fields_survive(field: str) -> None:
    scaler, param = amp.GradScaler(use_dynamic_loss_scaling=field == "incr_count"), weight()
    backward(scaler, param)
    scaler.step(sgd(param))
    scaler.update()
    other = amp.GradScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    assert other.state_dict()[field] != amp.GradScaler().state_dict()[field]


def test_loading_what_paddle_saved() -> None:
    types = PADDLE["state_dict types"]
    saved = {
        name: np.array([64.0], np.float32) if kind == "ndarray" else eval(text)
        for name, (kind, text, _) in types.items()
    }
    scaler = amp.GradScaler()
    scaler.load_state_dict(saved)
    loaded = PADDLE["loaded"]
    assert (scaler.get_init_loss_scaling(), scaler.get_incr_every_n_steps()) == (loaded["init"], loaded["incr_every"])
    state = scaler.state_dict()
    assert {name: state[name] for name in saved if name != "scale"} == {n: v for n, v in saved.items() if n != "scale"}
    assert state["scale"] == 64.0


def test_copying_in_the_middle_of_a_step_is_refused() -> None:
    scaler, param = amp.GradScaler(), weight()
    backward(scaler, param)
    scaler.unscale_(sgd(param))
    with pytest.raises(UsageError, match=r"after update\(\)"):
        pickle.dumps(scaler)


# ---- a torch.amp.GradScaler


def test_it_is_a_torch_scaler() -> None:
    assert isinstance(amp.GradScaler(), torch.amp.GradScaler)
    public = {name for name in vars(torch.amp.GradScaler) if not name.startswith("_")}
    assert public <= set(dir(amp.GradScaler))


def test_device_of_the_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.amp.scaler_settings.accelerator", lambda: "cuda")
    for scaler in (amp.GradScaler(), amp.GradScaler(enabled=False)):
        assert scaler._device == "cuda"
    scaler = amp.GradScaler()
    scaler.scale(torch.ones(()))
    assert scaler._device == torch.amp.GradScaler("cpu")._device == "cpu"
    monkeypatch.setattr("halfstep.amp.scaler_settings.accelerator", lambda: None)
    assert amp.GradScaler()._device == amp.GradScaler(device="cpu")._device == "cpu"


@pytest.mark.parametrize("device", ["cuda", "cpu", torch.device("cpu")])
def test_torch_passes_a_device_first(device: Any) -> None:
    scaler = amp.GradScaler(device, init_scale=4.0, enabled=True)
    assert scaler.is_enabled()
    assert scaler.scale(torch.ones(())).item() == 4.0
    assert scaler._scale.item() == 4.0
    assert scaler._growth_tracker.item() == 0


# ---- the rest of the interface


def test_closure_that_does_not_scale_is_refused() -> None:
    scaler, param = amp.GradScaler(), weight()

    def closure() -> torch.Tensor:
        loss = param.sum()
        loss.backward()
        return loss

    with pytest.raises(UsageError, match="did not scale its loss"):
        scaler.step(sgd(param), closure)
    assert param.item() == 1.0


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("level", ["none", "O2"])
def test_an_overflow_that_ends_by_update_without_a_step_skips_no_later_one(level: str, clips: bool) -> None:
    model, optim = with_optimizer(nn.Linear(2, 2), torch.optim.SGD, lr=1.0)
    if level == "O2":
        model, optim = amp.decorate(model, optim, level="O2", dtype="bfloat16")
    scaler = amp.GradScaler(init_scale=4.0, decr_every_n_nan_or_inf=1)
    before = model.weight.detach().clone()
    for factor in (math.inf, 1.0):
        scaler.scale(model(torch.ones(1, 2, dtype=model.weight.dtype)).sum() * factor).backward()
        if clips:
            scaler.clip_grad_norm_(optim, 1.0)
        else:
            scaler.unscale_(optim)
        if factor == 1.0:
            scaler.step(optim)
        scaler.update()
        model.zero_grad()
    assert not torch.equal(before, model.weight)
    assert scaler.get_scale() == 2.0


def test_new_scale() -> None:
    scaler = amp.GradScaler()
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0
    scaler.update(torch.tensor(64.0))
    assert scaler.get_scale() == 64.0
    with pytest.raises(ArgumentValueError):
        scaler.update(0.0)
    assert scaler.get_scale() == 64.0


def test_collapse_names_the_gradient() -> None:
    param = weight()
    scaler = amp.GradScaler(init_loss_scaling=1.0, min_loss_scaling=1.0, collapse_after=3)
    optim = torch.optim.SGD([("head.bias", param)], lr=1.0)
    for overflow in range(3):
        backward(scaler, param, "N")
        scaler.step(optim)
        if overflow < 2:
            scaler.update()
    gradient = r"not finite: head\.bias \(1, float32: 0 inf, 1 NaN among 1 values\)"
    with pytest.raises(LossScaleCollapsed, match=gradient) as error:
        scaler.update()
    for part in ("3 times in a row", "lower the learning rate", "collapse_after=None"):
        assert part in str(error.value)


def test_a_parameter_in_two_optimizers_is_unscaled_once() -> None:
    scaler, param = amp.GradScaler(init_loss_scaling=8.0), weight()
    first, second = sgd(param), sgd(param)
    backward(scaler, param)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert (param.grad.item(), param.item()) == (1.0, 0.75)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("early", [False, True], ids=["step", "unscale_"])
def test_an_overflow_in_a_shared_parameter_skips_both_optimizers(early: bool, bad: float) -> None:
    scaler, shared = amp.GradScaler(init_loss_scaling=8.0), weight()
    own = [weight(), weight()]
    both = [torch.optim.SGD([shared, param], lr=0.25) for param in own]
    scaler.scale(shared.sum() * bad + own[0].sum() + own[1].sum()).backward()
    if early:
        for optimizer in both:
            scaler.unscale_(optimizer)
    before = [param.detach().clone() for param in (shared, *own)]
    assert [bool(scaler.step(optimizer)) for optimizer in both] == [False, False]
    assert all(map(torch.equal, (shared, *own), before))


# ---- from the rule of a policy


def test_a_scaler_moves_its_scale_by_the_rule_it_is_made_from() -> None:
    rule = DynamicLossScale(init_scale=64.0, backoff_interval=2, sticky_backoff=True, max_scale=None)
    scaler = amp.GradScaler.from_loss_scale(rule)
    assert scaler.loss_scaler.rule == rule
    assert scaler.get_scale() == 64.0
    assert amp.GradScaler.from_loss_scale("dynamic").loss_scaler.rule == DynamicLossScale()


def test_a_static_scale_stays_and_a_scale_of_one_is_none() -> None:
    scaler = amp.GradScaler.from_loss_scale(StaticLossScale(128.0))
    assert (scaler.get_scale(), scaler.is_use_dynamic_loss_scaling()) == (128.0, False)
    assert not amp.GradScaler.from_loss_scale(1.0).is_enabled()
    with pytest.raises(ArgumentValueError, match="loss_scale"):
        amp.GradScaler.from_loss_scale(-1.0)


def test_overflows_are_counted() -> None:
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = amp.GradScaler(init_loss_scaling=4.0)
    for factor in (1.0, math.inf, 1.0, math.inf, math.inf):
        advance(weight * factor, optimizer, scaler)
    assert scaler.overflows() == 3
    assert amp.GradScaler(False).overflows() == 0


@pytest.mark.parametrize("setter", ["set_growth_interval", "set_incr_every_n_steps"])
def test_an_interval_shorter_than_what_is_counted_lets_the_scale_grow_at_the_next_step(setter: str) -> None:
    scaler = amp.GradScaler(init_loss_scaling=4.0, incr_every_n_steps=100)
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1)

    def batch() -> float:
        advance(param.sum(), optimizer, scaler)
        return scaler.get_scale()

    assert [batch() for _ in range(5)] == [4.0] * 5
    getattr(scaler, setter)(3)
    assert [batch() for _ in range(4)] == [8.0, 8.0, 8.0, 16.0]


def test_an_infinite_norm_clips_nothing_and_is_returned_as_measured() -> None:
    param = nn.Parameter(torch.full((4,), 2.0))
    scaler, optimizer = amp.GradScaler(), torch.optim.SGD([param], lr=0.1)
    scaler.scale(param.square().sum() / 2).backward()
    assert scaler.clip_grad_norm_(optimizer, float("inf")) == 4.0
    assert torch.equal(param.grad, torch.full((4,), 2.0))  # type: ignore[arg-type]
