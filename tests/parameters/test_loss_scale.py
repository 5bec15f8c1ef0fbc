"""The loss scale itself: the rules against a reference, the recorded scalers of Apex, messages, collapse, state."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from halfstep import amp
from halfstep.core.errors import ArgumentValueError, LossScaleCollapsed, UsageError
from halfstep.core.loss_scale import (
    DynamicLossScale,
    LossScale,
    LossScaleState,
    StaticLossScale,
    make_loss_scale,
)
from halfstep.core.policy import Policy
from halfstep.parameters import async_reader
from halfstep.parameters.async_reader import AsyncReader
from halfstep.parameters.loss_scaler import DeviceLossScaler
from tests.support.apex_recording import golden, grid
from tests.support.doors import open_door
from tests.support.fake_cuda import fake_cuda
from tests.support.scaling_reference import FLAGS, RULES, SMALLEST, reference
from tests.support.worlds import BF16, FP16, scaled_backward, start_amp

CPU = torch.device("cpu")
YES, NO = torch.ones(()), torch.zeros(())


def flag(found: bool) -> torch.Tensor:
    return torch.tensor(float(found))


def start(rule: LossScale) -> LossScaleState:
    count = torch.zeros((), dtype=torch.int32)
    return LossScaleState(torch.tensor(rule.init_scale), count, count.clone())


def numbers(state: LossScaleState) -> tuple[float, int, int]:
    return float(state.scale), int(state.good), int(state.bad)


# ---- against the reference


@pytest.mark.exhaustive
@settings(max_examples=300)
@given(rule=RULES, flags=FLAGS)
def test_loss_scaler(rule: dict[str, Any], flags: list[bool]) -> None:
    scaler, trace = DeviceLossScaler(DynamicLossScale(**rule, collapse_after=None), verbose=False), []
    for found in flags:
        scaler.update(flag(found))
        saved = scaler.state_dict()
        trace.append((saved["loss_scale"], saved["unskipped"], saved.get("bad", 0)))
    assert trace == reference(flags, rule)


class Numbers(nn.Module):
    """Two parameters, and no input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["O0", "handle", "GradScaler", "GradScaler, unscale_", "FP16_Optimizer"])
@settings(max_examples=20)
@given(rule=RULES, flags=FLAGS)
def test_every_door(name: str, optimizer: str, rule: dict[str, Any], flags: list[bool]) -> None:
    if name == "FP16_Optimizer":  # has no words for the others; more overflows in a row at its floor are a collapse
        rule |= {"backoff_factor": 1 / rule["growth_factor"], "backoff_interval": 1, "sticky_backoff": False}
        rule |= {"growth_interval": rule["growth_interval"] or 1000, "min_scale": 1.0, "max_scale": None}
        rule["init_scale"] = max(rule["init_scale"], 1.0)
        flags = flags[:19]
    if name.startswith("GradScaler"):
        rule["sticky_backoff"] = False  # Megatron's; Paddle counts anew
    door = open_door(name, OPTIMIZERS[optimizer], BF16, Numbers(), DynamicLossScale(**rule, collapse_after=None))
    weight, scales = door.model.weight, []
    for found in flags:
        before = weight.detach().clone()
        door.backward(weight.sum(), lambda found=found: found and weight.grad[1].fill_(math.inf))
        door.step()
        door.optimizer.zero_grad()
        assert torch.equal(before, weight) == door.skipped() == found
        scales.append(door.scale())
    assert scales == [scale for scale, _, _ in reference(flags, rule)]
    amp.deactivate()


@pytest.mark.parametrize("rule", [StaticLossScale(8.0), DynamicLossScale(growth_interval=1)])
@pytest.mark.parametrize("found", [True, torch.tensor(True), torch.tensor(1), torch.tensor(1.0), torch.tensor(2.0)])
def test_update_is_pure_and_takes_any_flag(rule: LossScale, found: Any) -> None:
    state = start(rule)
    before = numbers(state)
    after = rule.update(state, torch.as_tensor(found))
    assert numbers(state) == before
    assert all(a is not b for a, b in zip(state, after, strict=True))
    assert numbers(after) == ((2.0**15, 0, 0) if rule.dynamic else (8.0, 1, 0))


@pytest.mark.parametrize("factor", [2.0, 1.5, 1e30])
@pytest.mark.parametrize(("found", "init"), [(True, 2.0**-100), (False, 2.0**120)])
def test_scale_is_never_zero_or_infinite(factor: float, found: bool, init: float) -> None:
    rule = DynamicLossScale(init, factor, 1 / factor, growth_interval=1, max_scale=None, collapse_after=None)
    scaler = DeviceLossScaler(rule, verbose=False)
    for _ in range(200):
        scaler.update(flag(found))
        assert 0.0 < scaler.loss_scale() < math.inf
        assert math.isfinite(float(scaler.scale(CPU).reciprocal()))
    assert scaler.loss_scale() == SMALLEST if found else scaler.loss_scale() > 1e38 / factor


# ---- Apex's scalers, recorded

APEX = golden("apex_loss_scalers")
PATTERNS = {
    "all_inf": lambda i: True,
    "alternate": lambda i: i % 2 == 1,
    "burst": lambda i: i < 6 or i in (20, 21),
    "every5": lambda i: i % 5 == 4,
    "every7": lambda i: i % 7 == 3,
    "finite": lambda i: False,
    "sparse": lambda i: i in (0, 13, 14, 27, 39),
}
NOT_IMITATED = {
    "window=4,scale_factor=4": "Apex ignored scale_factor",
    "min=2**17(above init)": "Apex started below the floor and rose to it at the first overflow",
}


def settings_of(name: str) -> dict[str, float]:
    """ "window=4,min=2**14" as numbers."""
    pairs = [part.split("=") for part in name.split(",") if "=" in part]
    return {key: float(eval(value)) for key, value in pairs}


def moves(rule: LossScale, pattern: str) -> tuple[list[float], list[int]]:
    """The scale and the count of steps without an overflow after each step of a pattern."""
    scaler, scales, unskipped = DeviceLossScaler(rule, verbose=False), [], []
    for i in range(APEX["about"]["setup"]["length"]):
        scaler.update(flag(PATTERNS[pattern](i)))
        scales.append(scaler.loss_scale())
        unskipped.append(scaler.state_dict()["unskipped"])
    return scales, unskipped


@pytest.mark.parametrize("case", APEX["amp_LossScaler"])
def test_apex_amp_loss_scaler(case: str) -> None:
    name, pattern = case.split("/")
    if name in NOT_IMITATED:
        pytest.skip(NOT_IMITATED[name])
    recorded, given_ = APEX["amp_LossScaler"][case], settings_of(name)
    rule = make_loss_scale("dynamic", given_.get("min"), given_.get("max", 2.0**24))
    if name.startswith("static"):
        rule = make_loss_scale(float(name.split(",")[0].removeprefix("static")))
    else:
        rule = dataclasses.replace(
            rule,
            init_scale=given_.get("init", 2.0**16),
            growth_interval=int(given_.get("window", 2000)),
            collapse_after=None,  # Apex stayed at its floor without a word
        )
    assert rule.init_scale == recorded["start"]
    scales, unskipped = moves(rule, pattern)
    if name.startswith("static"):
        assert set(scales) == {recorded["start"]}
    else:
        assert scales == recorded["scale"]
    if pattern == "finite" or not name.startswith("static"):
        assert unskipped == recorded["unskipped"]


GRADIENTS = {  # case -> the gradient there was, the gradient that comes
    "a -inf": (0.0, [1.0, -math.inf]),
    "a nan": (0.0, [1.0, math.nan]),
    "four finite 2e38": (0.0, [2e38] * 4),
    "inf and -inf together": (0.0, [math.inf, -math.inf]),
    "inf in the new gradient": (1.0, [1.0, math.inf]),
    "inf in the stashed gradient only": (math.inf, [1.0, 2.0]),
}


@pytest.mark.filterwarnings("ignore:The amp.scale_loss block ended:UserWarning")  # gradients are set by hand
@pytest.mark.parametrize("case", GRADIENTS)
def test_apex_unscale(case: str) -> None:
    before, new = GRADIENTS[case]
    recorded = APEX["unscale"][f"dynamic: {case}"]
    if case == "four finite 2e38":  # a defect: it looked at their sum
        recorded = {"scale": 128.0, "skip": False}
    param = nn.Parameter(torch.zeros(len(new)))
    _, optim = start_amp(nn.ParameterList([param]), torch.optim.SGD, "O0", loss_scale="dynamic", lr=0.0)
    amp._amp_state.loss_scalers[0].set_scale(128.0)
    param.grad = torch.full_like(param, before)
    with amp.scale_loss(param.sum(), optim):
        param.grad = torch.tensor(new)
    optim.step()
    assert amp._amp_state.loss_scalers[0].loss_scale() == recorded["scale"]
    assert bool(amp.steps_skipped(optim)) == recorded["skip"]


@pytest.mark.filterwarnings("ignore:The amp.scale_loss block ended:UserWarning")  # gradients are set by hand
def test_apex_unscale_values() -> None:
    """New gradients are divided by the scale in fp32; what was there before is added as it is."""
    new, before = grid((6,), 41, 64.0), grid((6,), 42)
    for half, recorded in (
        (True, "static128: new fp16 grid((6,),41,64)/128 + stashed fp32 grid((6,),42)"),
        (False, "static128: fp32 in place"),
    ):
        assert recorded in APEX["unscale"]
        model, optim = start_amp(
            nn.Linear(6, 1, bias=False), torch.optim.SGD, "O2" if half else "O0", dtype=FP16, loss_scale=128.0, lr=0.0
        )
        (master,) = amp.master_params(optim)
        if half:
            master.grad = before.clone().reshape(1, 6)
        with amp.scale_loss(model.weight.float().sum(), optim):
            model.weight.grad = new.to(model.weight.dtype).reshape(1, 6)
        assert master.grad.flatten().tolist() == pytest.approx(APEX["unscale"][recorded], rel=1e-6)


# ---- the tensors


def test_scale_keeps_its_value_and_is_another_object_after_an_update() -> None:
    scaler = DeviceLossScaler(DynamicLossScale())
    first = scaler.scale(CPU)
    assert scaler.scale(CPU) is first
    scaler.update(YES)
    second = scaler.scale(CPU)
    assert second is not first
    assert (float(first), float(second)) == (2.0**16, 2.0**15)


def test_state_moves_in_place_for_cuda_graphs() -> None:
    scaler = DeviceLossScaler(DynamicLossScale())
    before = scaler.state(CPU)
    scaler.update(YES)
    assert scaler.state(CPU) is before
    assert float(before.scale) == 2.0**15


def test_nested_passes_of_one_scaler_keep_their_scale() -> None:
    a, b = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0) for _ in range(2))
    _, (a, b) = amp.initialize(nn.Module(), [a, b], opt_level="O0", loss_scale="dynamic", verbosity=0)
    (p,), (q,) = (o.param_groups[0]["params"] for o in (a, b))
    with amp.scale_loss(p.sum(), a) as outer:
        scaled_backward(q.sum() * math.inf, b)
        outer.backward()
    assert float(p.grad) == 1.0


# ---- messages, one update late


def test_the_first_skips_are_told_and_then_every_hundredth(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="halfstep")
    scaler = DeviceLossScaler(DynamicLossScale(collapse_after=None))
    for _ in range(201):
        scaler.update(flag(True), lambda: "layer.weight has nan")
    five = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert ["First gradient that is not finite: layer.weight has nan." in message for message in five] == [True]
    skips = [message for message in caplog.messages if message not in five]
    assert [message.partition("skipped step ")[2].partition(",")[0] for message in skips[4:]] == [*("5", "100", "200")]


def test_overflow_is_told_of_at_the_next_update(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="halfstep")
    scaler = DeviceLossScaler(DynamicLossScale(backoff_interval=2), name="loss scaler 3")
    for found, told in [(True, 0), (True, 1), (False, 2), (False, 2)]:
        scaler.update(flag(found))
        assert len(caplog.records) == told
    assert caplog.messages == [
        "Gradient overflow. Skipping step, loss scaler 3 keeping loss scale to 65536",
        "Gradient overflow. Skipping step, loss scaler 3 reducing loss scale to 32768",
    ]


@pytest.mark.parametrize(
    "ask",
    [DeviceLossScaler.loss_scale, DeviceLossScaler.state_dict, lambda s: s.set_scale(2.0)],
    ids=["loss_scale", "state_dict", "set_scale"],
)
def test_reading_the_scale_tells_at_once(ask: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="halfstep")
    scaler = DeviceLossScaler(DynamicLossScale())
    scaler.update(YES)
    ask(scaler)
    assert "32768" in caplog.text


def test_silent(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="halfstep")
    scaler = DeviceLossScaler(DynamicLossScale(), verbose=False)
    scaler.update(YES)
    scaler.update(NO)
    assert not caplog.records


def test_late_reader_hands_out_rows_in_order() -> None:
    reader = AsyncReader(2)
    source = torch.zeros(())
    for i in range(5):
        source.fill_(i)  # what was posted is a copy
        reader.post(source, -source)
    assert reader.poll() == [(float(i), -float(i)) for i in range(5)]
    assert reader.poll(wait=True) == []
    reader.post(YES, NO)
    assert copy.deepcopy(reader).poll() == []
    assert pickle.loads(pickle.dumps(reader)).poll() == []
    assert reader.poll() == [(1.0, 0.0)]


class Event:
    """An event of a device that the test lets pass."""

    def __init__(self, device: torch.device) -> None:
        self.recorded_on: list[str] = []
        self.passed = False
        self.waits = 0

    def record(self, stream: str) -> None:
        self.recorded_on.append(stream)
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waits += 1
        self.passed = True


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """The events of a reader on the CPU that reads as on an accelerator."""
    made: list[Event] = []

    class Slot(async_reader._Slot):
        __slots__ = ()

        def __init__(self, device: torch.device, width: int) -> None:
            super().__init__(device, width)
            made.append(Event(device))
            self.passed = made[-1]

    monkeypatch.setattr(async_reader, "_Slot", Slot)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device}")
    return made


def test_late_reader_hands_out_only_what_has_arrived(events: list[Event]) -> None:
    reader = AsyncReader(1)
    for i in range(3):
        reader.post(torch.tensor(float(i)))
    assert [event.recorded_on for event in events] == [["stream of cpu"]] * 3
    assert reader.poll() == []
    events[1].passed = True
    assert reader.poll() == [], "a row does not overtake another"
    events[0].passed = True
    assert reader.poll() == [(0.0,), (1.0,)]
    assert [event.waits for event in events] == [0, 0, 0]
    reader.post(torch.tensor(3.0))
    assert len(events) == 3, "memory is used again"
    assert reader.poll(wait=True) == [(2.0,), (3.0,)]
    assert sum(event.waits for event in events) == 2


def test_late_reader_posts_nothing_into_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = AsyncReader(1)
    with monkeypatch.context() as patch:
        patch.setattr(async_reader, "capturing", lambda device: True)
        reader.post(torch.tensor(1.0))
    reader.post(torch.tensor(2.0))
    assert reader.poll(wait=True) == [(2.0,)]
    assert not async_reader.capturing(torch.device("cpu"))


# ---- collapse


def overflow_until_collapse(scaler: DeviceLossScaler, limit: int = 500) -> int:
    for i in range(limit):
        try:
            scaler.update(YES, lambda: "layers.0.weight")
        except LossScaleCollapsed:
            return i + 1
    return 0


COLLAPSES = {  # rule -> after how many overflows in a row
    DynamicLossScale(): 30 + 20,  # 30 halvings to 2**-14, then 20 more
    DynamicLossScale(min_scale=1.0): 16 + 20,
    DynamicLossScale(min_scale=1.0, collapse_after=3): 16 + 3,
    DynamicLossScale(init_scale=1.0, min_scale=1.0, collapse_after=1): 1,
    DynamicLossScale(init_scale=2.0**10, min_scale=2.0**10, collapse_after=5): 5,
    DynamicLossScale(backoff_interval=2, min_scale=2.0**14, collapse_after=4): 4 + 4,
    DynamicLossScale(collapse_after=None): 0,
    DynamicLossScale(min_scale=1.0, collapse_after=None): 0,
    StaticLossScale(1.0): 0,
}


@pytest.mark.parametrize("rule", COLLAPSES)
def test_collapse(rule: LossScale) -> None:
    assert overflow_until_collapse(DeviceLossScaler(rule, verbose=False)) == COLLAPSES[rule]


def test_a_finite_step_saves_from_collapse() -> None:
    scaler = DeviceLossScaler(DynamicLossScale(init_scale=1.0, min_scale=1.0, collapse_after=3), verbose=False)
    for _ in range(10):
        for found in (True, True, False):
            scaler.update(flag(found))
        assert scaler.loss_scale() == 1.0
    assert overflow_until_collapse(scaler) == 3


def test_overflows_at_a_static_scale_do_not_count_towards_a_collapse() -> None:
    scaler = DeviceLossScaler(StaticLossScale(1.0), verbose=False)
    scaler.change(min_scale=1.0, collapse_after=3)
    for _ in range(5):
        scaler.update(YES)
    scaler.dynamic = True
    assert overflow_until_collapse(scaler) == 3


# ---- state

STATEFUL = [DynamicLossScale(backoff_interval=3), StaticLossScale(4.0)]


@pytest.mark.parametrize("rule", STATEFUL)
def test_every_field_survives_every_way_of_saving(rule: LossScale) -> None:
    saved = {"loss_scale": 12.0, "unskipped": 7, "bad": 2}
    scaler = DeviceLossScaler(rule)
    scaler.load_state_dict(saved)
    assert numbers(scaler.state(CPU)) == (12.0, 7, 2)  # each field of LossScaleState, and none at its default
    assert all(
        value != default for value, default in zip(numbers(scaler.state(CPU)), numbers(start(rule)), strict=True)
    )
    again = DeviceLossScaler(rule)
    again.load_state_dict(scaler.state_dict())
    for other in (again, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert other.state_dict() == saved
        assert numbers(other.state(CPU)) == (12.0, 7, 2)


@pytest.mark.parametrize(
    ("rule", "dynamic", "neutral"),
    [
        (StaticLossScale(), False, True),
        (StaticLossScale(2.0), False, False),
        (DynamicLossScale(init_scale=1.0), True, False),
    ],
)
def test_kinds(rule: LossScale, dynamic: bool, neutral: bool) -> None:
    scaler = DeviceLossScaler(rule)
    assert (scaler.dynamic, scaler.neutral) == (dynamic, neutral)


def test_start_is_brought_between_the_bounds() -> None:
    assert DynamicLossScale(init_scale=2.0**20, max_scale=2.0**10).init_scale == 2.0**10
    assert DynamicLossScale(init_scale=2.0, min_scale=8.0).init_scale == 8.0
    assert DynamicLossScale(init_scale=2.0**-140).init_scale == SMALLEST
    assert make_loss_scale("dynamic", 0).min_scale is None


SPECS = {
    "1.0": 1.0,
    "0.1": 0.1,
    "dynamic": "dynamic",
    "static(128.0)": StaticLossScale(128.0),
    "dynamic()": DynamicLossScale(),
    "dynamic(init_scale=8.0;growth_interval=None;max_scale=None;sticky_backoff=True)": DynamicLossScale(
        init_scale=8.0, growth_interval=None, max_scale=None, sticky_backoff=True
    ),
}


@pytest.mark.parametrize("text", SPECS)
def test_a_policy_prints_and_parses_its_loss_scale(text: str) -> None:
    policy = Policy.from_level("O2").replace(loss_scale=SPECS[text])
    assert str(policy).endswith(f",loss_scale={text},cast_ops=None,state_dtype=None")
    assert Policy.parse(str(policy)) == policy


@given(rule=RULES)
def test_a_policy_prints_and_parses_every_rule(rule: dict[str, Any]) -> None:
    policy = Policy(loss_scale=DynamicLossScale(**rule))
    assert Policy.parse(str(policy)) == policy


def test_a_rule_is_itself() -> None:
    for rule in (StaticLossScale(2.0), DynamicLossScale(init_scale=8.0, max_scale=16.0)):
        assert make_loss_scale(rule) is rule
        assert make_loss_scale(rule, 0) is rule
        with pytest.raises(UsageError, match=r"max_loss_scale=None was given beside loss_scale=.*bounds of its own"):
            make_loss_scale(rule, None, None)
    handle = amp.init(loss_scale=DynamicLossScale(init_scale=8.0))
    assert handle.new_scaler("one").loss_scale() == 8.0


@pytest.mark.parametrize("scale", [0.0, -2.0, math.inf, math.nan])
def test_wrong_scales(scale: float) -> None:
    scaler = DeviceLossScaler(DynamicLossScale())
    for call in (
        lambda: StaticLossScale(scale),
        lambda: scaler.set_scale(scale),
        lambda: scaler.load_state_dict({"loss_scale": scale, "unskipped": 0}),
    ):
        with pytest.raises(ArgumentValueError, match="loss_scale"):
            call()
    assert scaler.loss_scale() == 2.0**16


def test_the_state_moves_to_the_device_where_overflows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("async_reader", "loss_scaler"):  # nobody can ask for the number of a fake tensor
        monkeypatch.setattr(f"halfstep.parameters.{where}.capturing", lambda device: True)
    with fake_cuda() as name:
        scaler = DeviceLossScaler(DynamicLossScale(init_scale=8.0))
        assert scaler.scale(CPU).device == CPU
        found_inf = torch.zeros((), device=name)
        scaler.update(found_inf)
        assert {tensor.device for tensor in scaler.state(found_inf.device)} == {found_inf.device}
        assert scaler.scale(found_inf.device).device == found_inf.device


def test_losses_on_several_devices_are_scaled_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("async_reader", "loss_scaler"):
        monkeypatch.setattr(f"halfstep.parameters.{where}.capturing", lambda device: True)
    with fake_cuda() as name:
        scaler = amp.GradScaler(init_loss_scaling=8.0)
        losses = torch.ones((), device=name), torch.ones(2)
        first, second = scaler.scale(losses)
        assert (first.device, second.device) == (losses[0].device, CPU)
        assert scaler.scale(losses[0]).device == losses[0].device
