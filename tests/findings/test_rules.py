"""Every code: what makes it appear, and what does not."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import halfstep
from halfstep import Finding, amp, optimizers
from halfstep.diagnostics.findings import rules_of_model
from halfstep.diagnostics.findings.checking import RULES
from tests.support.worlds import HALVES, Applies, start_amp, step_and_clear, with_optimizer


def codes(findings: list[Finding]) -> list[str]:
    return sorted({each.code for each in findings})


def only(findings: list[Finding], code: str) -> Finding:
    (found,) = [each for each in findings if each.code == code]
    return found


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).to(dtype)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    dtype = next(model.parameters()).dtype
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 32).to(dtype)).float().square().mean().backward()
        optimizer.step()


def test_there_is_one_rule_for_each_code() -> None:
    assert sorted(RULES) == [f"HS{number}" for number in (*range(101, 116), 118, 119, 121, 122, *range(128, 132))]
    for code, (look, _) in RULES.items():
        assert (look.__doc__ or "").startswith(f"{code}: ")


# ---- 101, 102, 103, 106, 113: what an optimizer without masters does to 16-bit weights


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("steps", [0, 3])
def test_lost_updates_are_an_error_without_masters(dtype: torch.dtype, steps: int) -> None:
    model, optimizer = with_optimizer(net(dtype), torch.optim.AdamW, lr=1e-6, eps=1e-4)
    trained(model, optimizer, steps)
    found = only(halfstep.check(model, optimizer), "HS101")
    assert found.severity == "error"
    assert 0.8 < found.evidence["lost"] <= 1.0
    assert found.evidence["lr_for_half"] > 2e-6
    assert found.where.startswith("*")
    assert "4 tensors, 2632 weights" in found.where
    assert re.search("of the updates round to nothing.*AdamW keeps no masters, lr 1e-06", found.message)
    assert "master_weights=True" in found.fix


def test_some_lost_updates_are_a_warning_and_few_are_nothing() -> None:
    severities = {}
    for lr in (1e-1, 1e-3):
        model = net(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
        trained(model, optimizer)
        severities[lr] = [each.severity for each in halfstep.check(model, optimizer) if each.code == "HS101"]
    assert severities == {1e-1: [], 1e-3: ["warning"]}


def test_a_learning_rate_on_the_device_is_read_with_the_rest() -> None:
    model, optimizer = with_optimizer(net(torch.bfloat16), optimizers.FusedAdam, lr=torch.tensor(1e-6))
    assert only(halfstep.check(model, optimizer), "HS101").evidence["lr"] == pytest.approx(1e-6)


@pytest.mark.parametrize("options", [{"master_weights": True}, {"rounding": "stochastic"}])
def test_masters_and_stochastic_rounding_lose_nothing(options: dict[str, Any]) -> None:
    model, optimizer = with_optimizer(net(torch.bfloat16), optimizers.FusedAdam, lr=1e-6, **options)
    assert codes(halfstep.check(model, optimizer)) == []


@pytest.mark.parametrize(
    ("dtype", "beta2", "severity"),
    [
        (torch.bfloat16, 0.999, ["error"]),
        (torch.bfloat16, 0.997, ["warning"]),
        (torch.bfloat16, 0.95, []),
        (torch.float16, 0.9999, ["error"]),
        (torch.float16, 0.999, []),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_second_moment_that_cannot_decay(dtype: torch.dtype, beta2: float, severity: list[str], steps: int) -> None:
    model, optimizer = with_optimizer(net(dtype), torch.optim.Adam, betas=(0.9, beta2), eps=1e-3)
    trained(model, optimizer, steps)
    assert [each.severity for each in halfstep.check(model, optimizer) if each.code == "HS102"] == severity


def test_the_second_moment_of_fp32_weights_may_be_in_16_bits_too() -> None:
    model, optimizer = with_optimizer(net(), torch.optim.Adam)
    trained(model, optimizer)
    for state in optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
    assert codes(halfstep.check(model, optimizer)) == ["HS102"]


@pytest.mark.parametrize(("weight_decay", "found"), [(0.01, True), (0.0, False), (10.0, False)])
def test_weight_decay_below_the_grid(weight_decay: float, found: bool) -> None:
    model, optimizer = with_optimizer(net(torch.bfloat16), torch.optim.AdamW, lr=1e-3, weight_decay=weight_decay)
    assert ("HS103" in codes(halfstep.check(model, optimizer))) is found
    before = model[0].weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(before, model[0].weight) is (found or not weight_decay)


def test_weight_decay_in_the_gradient_is_not_lost_by_itself() -> None:
    model = net(torch.bfloat16)
    assert "HS103" not in codes(halfstep.check(model, torch.optim.Adam(model.parameters(), weight_decay=0.01)))


@pytest.mark.parametrize(
    ("dtype", "eps", "found"),
    [(torch.float16, 1e-8, True), (torch.float16, 5e-8, False), (torch.bfloat16, 1e-8, False)],
)
def test_eps_that_is_zero_in_the_state(dtype: torch.dtype, eps: float, found: bool) -> None:
    model, optimizer = with_optimizer(net(dtype), torch.optim.Adam, eps=eps)
    assert ("HS106" in codes(halfstep.check(model, optimizer))) is found
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert bool(model[0].weight.isnan().any()) is found


def test_halfstep_keeps_state_in_fp32() -> None:
    model = net(torch.bfloat16)
    assert codes(halfstep.check(model, optimizers.FusedAdam(model.parameters(), lr=1.0))) == []


# ---- 104, 109, 112, 114: modules


class RMSNorm(nn.Module):
    def __init__(self, wide: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.wide = wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.float() if self.wide else x
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Experts(nn.Module):
    def __init__(self, name: str = "gate") -> None:
        super().__init__()
        self.add_module(name, nn.Linear(32, 4))
        self.experts = nn.ModuleList([nn.Linear(32, 32)])
        self.gate_proj = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](x) * self.get_submodule("gate")(x).softmax(-1)[..., :1]


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 64, 2) / 64))
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: nn.Sequential(nn.LayerNorm(32)), "0 (2 tensors, 64 weights)"),
        (lambda: nn.Sequential(RMSNorm()), "0.weight (1 tensor, 32 weights)"),
        (Experts, "gate (2 tensors, 132 weights)"),
        (lambda: Experts("router"), "router (2 tensors, 132 weights)"),
    ],
    ids=["LayerNorm", "RMSNorm", "gate", "router"],
)
def test_norms_and_routers_without_masters(make: Any, where: str, dtype: torch.dtype) -> None:
    model, optimizer = with_optimizer(make().to(dtype), torch.optim.SGD, lr=1.0)
    found = only(halfstep.check(model, optimizer), "HS104")
    assert found.severity == "warning"
    assert found.where.replace("*", "0") == where
    masters = optimizers.FusedSGD(model.parameters(), lr=1.0, master_weights=True)
    assert "HS104" not in codes(halfstep.check(model, masters))
    wide = make()
    assert halfstep.check(wide, torch.optim.SGD(wide.parameters(), lr=1.0)) == []


@pytest.mark.parametrize("dtype", HALVES)
def test_rotary_frequencies_in_16_bits_are_an_error_whoever_keeps_masters(dtype: torch.dtype) -> None:
    model = Rotary()
    assert halfstep.check(model) == []
    found = only(halfstep.check(model.to(dtype)), "HS104")
    assert (found.severity, found.where) == ("error", "inv_freq (1 tensor, 32 weights)")
    exact, rounded = Rotary().inv_freq, model.inv_freq.float()
    assert ((exact - rounded) * 4096).abs().max() > (1.0 if dtype is torch.bfloat16 else 0.1)


def test_statistics_of_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert halfstep.check(model) == []
    assert "running_mean" in only(halfstep.check(model.bfloat16()), "HS104").evidence["tensors"][0]


@pytest.mark.parametrize(("wide", "found"), [(True, []), (False, ["HS104"])])
def test_a_norm_that_computes_in_16_bits(wide: bool, found: list[str]) -> None:
    model = nn.Sequential(RMSNorm(wide)).bfloat16()
    batch = torch.randn(4, 32).bfloat16()
    assert codes(halfstep.check(model, batch=batch)) == found


def variance(x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x * x).mean(-1, keepdim=True) - mean * mean


def in_place(x: torch.Tensor) -> torch.Tensor:
    squares = x.clone()
    squares.mul_(squares)
    return x / squares.sum(-1, keepdim=True).add_(1e-5).sqrt_()


NORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pow(2), mean, rsqrt": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "x * x": lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6),
    "square, sum, sqrt": lambda x: x / x.square().sum(-1, keepdim=True).clamp(min=1e-6).sqrt(),
    "** 2, ** -0.5": lambda x: x * (torch.mean(x**2, -1, True) + 1e-6) ** -0.5,
    "difference of means": lambda x: x * (variance(x).clamp(min=0) + 1e-5).rsqrt(),
    "var": lambda x: (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True) + 1e-5).rsqrt(),
    "std": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5),
    "in place": in_place,
}
NO_NORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp32": lambda x: (x.float() * (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype),
    "layer_norm": lambda x: nn.functional.layer_norm(x, (32,)),
    "rms_norm": lambda x: nn.functional.rms_norm(x, (32,)),
    "normalize": lambda x: nn.functional.normalize(x, dim=-1),
    "attention": lambda x: x / 32**0.5,
    "a scale": lambda x: x * torch.tensor(2.0, dtype=x.dtype).sqrt(),
    "a loss": lambda x: x + (x - 1.0).pow(2).mean().sqrt(),
    "squares": lambda x: x.relu().pow(2),
    "a root": lambda x: x.abs().mean(-1, keepdim=True).sqrt() * x,
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [*NORMS, *NO_NORMS])
def test_a_norm_by_hand_is_found_by_what_it_computes(name: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(32, 32), Applies((NORMS | NO_NORMS)[name])).to(dtype)
    found = [each for each in halfstep.check(model, batch=torch.randn(4, 32).to(dtype)) if each.code == "HS104"]
    assert [each.severity for each in found] == (["warning"] if name in NORMS else [])
    assert all(each.where.startswith("1: ") for each in found)


@pytest.mark.parametrize("name", ["pow(2), mean, rsqrt", "x * x", "square, sum, sqrt", "** 2, ** -0.5", "in place"])
@pytest.mark.parametrize("level", ["plain", "O1", "O2", "autocast"])
def test_a_norm_that_returns_zeros_is_an_error(name: str, level: str) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(32, 32), Applies(NORMS[name]))
    nn.init.eye_(model[0].weight)
    x = torch.randn(4, 32)
    x[-1] += 300.0  # the statistic of one row overflows
    if level == "plain":
        model, x = model.half(), x.half()
    elif level != "autocast":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _ = amp.initialize(model, optimizer, opt_level=level, dtype="float16", verbosity=0)
    with torch.autocast("cpu", torch.float16, enabled=level == "autocast"):
        output = model(x)
        findings = [each for each in halfstep.check(model, batch=x) if each.code == "HS104"]
    returns_zeros = bool((output == 0).all(-1).any())
    assert [each.severity for each in findings if each.severity == "error"] == ["error"] * returns_zeros
    assert returns_zeros or level in ("O1", "autocast"), "which square in fp32 by pow"


def test_a_router_that_computes_in_16_bits_is_a_note() -> None:
    batch = torch.randn(8, 32)
    assert halfstep.check(Experts(), batch=batch) == []
    found = halfstep.check(Experts().bfloat16(), batch=batch.bfloat16())
    assert [(each.code, each.severity, each.where) for each in found] == [("HS104", "note", "gate")]


class TimmEma(nn.Module):
    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = model
        self.decay = decay


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("decay", [0.9, 0.998, 0.9999])
def test_an_average_in_16_bits(dtype: torch.dtype, decay: float) -> None:
    wrong = ["HS109"] if dtype in HALVES and decay >= 0.998 else []
    averaged = AveragedModel(net(dtype), multi_avg_fn=get_ema_multi_avg_fn(decay))
    assert codes(halfstep.check(averaged)) == wrong
    assert codes(halfstep.check(TimmEma(net(dtype), decay))) == wrong


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_copy_of_a_16_bit_model_that_has_other_weights(wrapped: bool) -> None:
    model, optimizer = start_amp(net(), torch.optim.SGD, "O2", dtype="bfloat16", lr=0.1)
    average = AveragedModel(model) if wrapped else copy.deepcopy(nn.Sequential(model))
    others = [copy.deepcopy(amp.master_model(model)), copy.deepcopy(model), copy.deepcopy(model).float()]
    assert "HS109" not in codes(halfstep.check(model, optimizer)), "they are equal"
    for each in (*others, average):
        next(each.parameters()).data.add_(1)
    next(others[1].parameters()).grad = torch.zeros(64, 32, dtype=torch.bfloat16)  # it is trained
    found = only(halfstep.check(model, optimizer), "HS109")
    assert (found.severity, found.where) == ("warning", "0.weight (1 tensor, 2048 weights)")
    del average, each
    gc.collect()
    assert "HS109" not in codes(halfstep.check(model, optimizer)), "it is gone"


def test_an_average_of_equal_weights_has_no_decay() -> None:
    assert halfstep.check(AveragedModel(net(torch.bfloat16))) == []


@pytest.mark.parametrize("dtype", HALVES)
def test_fp32_weights_that_something_rounds(dtype: torch.dtype) -> None:
    model, optimizer = with_optimizer(net(), torch.optim.AdamW)
    model.load_state_dict({name: value.to(dtype).float() for name, value in model.state_dict().items()})
    assert halfstep.check(model, optimizer) == []  # as from a checkpoint
    trained(model, optimizer)
    assert halfstep.check(model, optimizer) == []
    model.load_state_dict({name: value.to(dtype).float() for name, value in model.state_dict().items()})
    found = only(halfstep.check(model, optimizer), "HS112")
    assert found.where.startswith("*")
    assert "4 tensors" not in found.where


def test_an_output_that_is_fp32_in_name_only() -> None:
    good = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Dropout(0.5))
    bad = nn.Sequential(nn.Linear(32, 32), Applies(lambda x: x.bfloat16().mul(2).float()), nn.ReLU())
    x = torch.randn(16, 32)
    assert halfstep.check(good, batch=x) == []
    assert only(halfstep.check(bad, batch=x), "HS112").evidence["outputs"] == ["1"]


class RoundsWhatItsLayerReturns(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).bfloat16().float()


class CastsBack(nn.Sequential):
    """As in the models of many: the layers run in 16 bits, and the output is cast."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def test_a_module_that_rounds_what_its_fp32_layer_returns() -> None:
    bad = nn.Sequential(nn.Linear(32, 32), RoundsWhatItsLayerReturns(nn.Linear(32, 32)), nn.Linear(32, 4))
    good = nn.Sequential(nn.Linear(32, 32), CastsBack(nn.Linear(32, 32)), nn.Linear(32, 4))
    x = torch.randn(16, 32)
    assert only(halfstep.check(bad, batch=x), "HS112").evidence["outputs"] == ["1"]
    assert "HS112" not in codes(halfstep.check(good, batch=x))


def test_a_nan_is_not_rounded_whatever_its_bits() -> None:
    nan = torch.tensor([0x7FFFE000], dtype=torch.int32).view(torch.float32)[0]
    assert nan.isnan()
    assert "HS112" not in codes(halfstep.check(net(), batch=lambda: nan))
    assert "HS112" in codes(halfstep.check(net(), batch=lambda: torch.tensor(1.2345).half().float()))


def test_whole_numbers_and_masks_are_no_rounded_values() -> None:
    mask = Applies(lambda x: (x > 0).float() * 3)
    assert halfstep.check(nn.Sequential(nn.Linear(32, 32), mask), batch=torch.randn(16, 32)) == []


# ---- 105: the loss


def loss_of(model: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
    x, y = torch.randn(16, 32), torch.randint(8, (16,))
    return lambda: nn.functional.cross_entropy(convert(model(x.to(next(model.parameters()).dtype))), y)


@pytest.mark.parametrize("dtype", HALVES)
def test_a_loss_in_16_bits(dtype: torch.dtype) -> None:
    model = net(dtype)
    wrong = only(halfstep.check(model, batch=loss_of(model, lambda logits: logits)), "HS105")
    assert wrong.where == "cross_entropy"
    assert str(dtype).removeprefix("torch.") in wrong.message
    assert halfstep.check(model, batch=loss_of(model, torch.Tensor.float)) == []


@pytest.mark.parametrize("loss", [nn.TripletMarginLoss(), nn.GaussianNLLLoss()], ids=repr)
def test_all_losses_of_the_op_lists_are_known(loss: nn.Module) -> None:
    model, x = net(torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    found = halfstep.check(model, batch=lambda: loss(y := model(x), y * 2, torch.ones_like(y)))
    assert "HS105" in codes(found)


def test_a_loss_that_became_fp32_too_late() -> None:
    model = net(torch.bfloat16)
    inner = loss_of(model, lambda logits: logits)
    found = halfstep.check(model, batch=lambda: inner().float() * 1.0)
    assert codes(found) == ["HS105", "HS112"]
    assert only(found, "HS112").where == "the loss"


@pytest.mark.parametrize("scope", [torch.autocast("cpu", torch.bfloat16), amp.auto_cast(dtype="bfloat16")])
def test_autocast_computes_the_loss_in_fp32(scope: Any) -> None:
    model = net()
    inner = loss_of(model, lambda logits: logits)

    def batch() -> torch.Tensor:
        with scope:
            return inner()

    assert halfstep.check(model, batch=batch) == []


# ---- 107, 108: scalers


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, amp.GradScaler])
def test_float16_needs_a_loss_scale(kind: Any) -> None:
    model, optimizer = with_optimizer(net(torch.float16), optimizers.FusedAdam, master_weights=True)
    assert codes(halfstep.check(model, optimizer)) == ["HS107"]
    assert codes(halfstep.check(model, optimizer, scaler=kind(device="cpu"))) == []
    off = halfstep.check(model, optimizer, scaler=kind(device="cpu", enabled=False))
    assert codes(off) == ["HS107"]
    assert "is off" in off[0].message


def test_float16_in_autocast_is_seen_with_a_batch() -> None:
    model, optimizer = with_optimizer(net(), torch.optim.SGD)
    inner = loss_of(model, torch.Tensor.float)

    def batch() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return inner()

    assert halfstep.check(model, optimizer) == []
    assert "HS107" in codes(halfstep.check(model, optimizer, batch=batch))
    assert "HS107" not in codes(halfstep.check(model, optimizer, batch=batch, scaler=torch.amp.GradScaler("cpu")))


def test_a_policy_says_what_the_model_does_not_show() -> None:
    model, optimizer = with_optimizer(net(), torch.optim.SGD)
    policy = halfstep.Policy.from_level("O1", "float16")
    assert "HS107" in codes(halfstep.check(model, optimizer, policy=policy))


@pytest.mark.parametrize(("kind", "severity"), [(torch.amp.GradScaler, "warning"), (amp.GradScaler, "note")])
def test_a_scaler_is_of_no_use_for_bfloat16(kind: Any, severity: str) -> None:
    model, optimizer = with_optimizer(net(torch.bfloat16), optimizers.FusedAdam, master_weights=True)
    found = only(halfstep.check(model, optimizer, scaler=kind(device="cpu")), "HS108")
    assert (found.severity, "On CUDA it raises" in found.message) == (severity, severity == "warning")
    assert halfstep.check(model, optimizer, scaler=kind(device="cpu", enabled=False)) == []


def test_a_scaler_that_stays_at_one_scales_nothing() -> None:
    model, optimizer = with_optimizer(net(torch.float16), optimizers.FusedAdam, master_weights=True)
    scaler = amp.GradScaler(init_loss_scaling=1.0, use_dynamic_loss_scaling=False)
    assert codes(halfstep.check(model, optimizer, scaler=scaler)) == ["HS107", "HS108"]
    static = torch.amp.GradScaler("cpu", init_scale=2.0)
    static.set_growth_factor(1.0)
    assert codes(halfstep.check(model, optimizer, scaler=static)) == []


# ---- 110, 111, 114, 115


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("accumulate", "found"), [(1, False), (15, False), (16, True)])
def test_accumulation_in_16_bits(dtype: torch.dtype, accumulate: int, found: bool) -> None:
    model, optimizer = with_optimizer(net(dtype), torch.optim.SGD, lr=1.0)
    assert ("HS110" in codes(halfstep.check(model, optimizer, accumulate=accumulate))) is found
    model, optimizer = with_optimizer(net(dtype), optimizers.FusedAdam, master_weights=True)
    assert "HS110" not in codes(halfstep.check(model, optimizer, accumulate=accumulate))


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_device_without_units(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, there: bool) -> None:
    monkeypatch.setattr(rules_of_model, "has_units", lambda *_: there)

    def severities(model: nn.Module, optimizer: Any) -> list[str]:
        return [each.severity for each in halfstep.check(model, optimizer) if each.code == "HS111"]

    plain = net(dtype)
    assert severities(plain, torch.optim.SGD(plain.parameters())) == ([] if there else ["warning"])
    model, optimizer = amp.initialize(*with_optimizer(net(), torch.optim.SGD), opt_level="O2", dtype=dtype, verbosity=0)
    assert severities(model, optimizer) == ([] if there else ["note"])


@pytest.mark.parametrize(
    ("has", "fix"),
    [
        ({torch.bfloat16}, "Train in bfloat16 (dtype= of amp.initialize), for which cpu has units."),
        (set(), 'For speed train in fp32 (opt_level="O0"): on this device 16 bits only save memory.'),
    ],
)
def test_a_device_without_units_is_told_what_to_train_in(
    monkeypatch: pytest.MonkeyPatch, has: set[torch.dtype], fix: str
) -> None:
    monkeypatch.setattr(rules_of_model, "has_units", lambda device, dtype, kind: dtype in has)
    model = net(torch.float16)
    assert only(halfstep.check(model, torch.optim.SGD(model.parameters())), "HS111").fix == fix


def test_an_optimizer_of_another_model() -> None:
    model, other = net(), net()
    found = only(halfstep.check(model, torch.optim.SGD(other.parameters())), "HS115")
    assert found.severity == "error"
    assert found.evidence == {"foreign": 4, "untrained": 4}


def test_a_part_that_was_replaced_after_the_optimizer_was_made() -> None:
    model, optimizer = with_optimizer(net(), torch.optim.SGD)
    model[2] = nn.Linear(64, 8)
    assert only(halfstep.check(model, optimizer), "HS115").severity == "warning"


class Adapted(nn.Module):
    """A layer that stays as it is, and what is trained instead, as LoRA does."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.change = nn.Linear(layer.in_features, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.layer(x) + self.change(x))


@pytest.mark.parametrize(("froze", "severity"), [("a layer", "warning"), ("the model", "error")])
def test_adapters_that_came_after_the_optimizer(froze: str, severity: str) -> None:
    model, optimizer = with_optimizer(net(), torch.optim.SGD)
    if froze == "the model":
        model.requires_grad_(False)
    assert "HS115" not in {each.code for each in halfstep.check(model, optimizer)}, "what is frozen is no finding"
    model[2] = Adapted(model[2])
    assert only(halfstep.check(model, optimizer), "HS115").severity == severity
    optimizer.add_param_group({"params": list(model[2].change.parameters())})
    assert "HS115" not in {each.code for each in halfstep.check(model, optimizer)}


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_part_that_was_replaced_after_initialize_is_an_error(level: str) -> None:
    model, optimizer = start_amp(net(), torch.optim.SGD, level, dtype=torch.bfloat16)
    for new in (nn.Linear(64, 8), nn.Linear(64, 8, dtype=model[2].weight.dtype)):  # the masters have as many weights
        model[2] = new
        found = [each for each in halfstep.check(model, optimizer) if each.code == "HS115"]
        assert [each.severity for each in found] == ["error"]
        assert found[0].evidence == {"foreign": 2, "untrained": 2}
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert "HS115" not in {each.code for each in halfstep.check(model, optimizer)}


def test_a_part_of_a_model_and_more_than_one_model_are_no_finding() -> None:
    model = net()
    assert halfstep.check(model, torch.optim.SGD(model[0].parameters())) == []
    assert halfstep.check(model[0], torch.optim.SGD(model.parameters())) == []
    assert halfstep.check(model, [torch.optim.SGD(model[0].parameters()), torch.optim.SGD(model[2].parameters())]) == []


def test_masters_made_by_hand_are_no_finding() -> None:
    model = net(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    assert halfstep.check(model, torch.optim.AdamW(masters)) == []


# ---- 121: gradients that are zero from the start

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-3),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=1e-3),
}


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:.*rounds away")
def test_gradients_that_are_zero_from_the_start(kind: str, dtype: torch.dtype) -> None:
    found = {}
    for factor in (0.0, 1.0):
        model = net(dtype)
        optimizer = OPTIMIZERS[kind](model.parameters())
        assert "HS121" not in codes(halfstep.check(model, optimizer)), "there are no gradients"
        for after in ("backward", "second backward"):
            (model(torch.randn(16, 32).to(dtype)).float().square().mean() * factor).backward()
            found[factor, after] = "HS121" in codes(halfstep.check(model, optimizer))
            step_and_clear(optimizer)
        (model(torch.randn(16, 32).to(dtype)).float().square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if factor:
            assert "HS121" not in codes(halfstep.check(model, optimizer)), "zero_grad has set them to 0"
    assert [found[factor, "backward"] for factor in (0.0, 1.0)] == [True, False]
    assert [found[factor, "second backward"] for factor in (0.0, 1.0)] == [True, False]


def test_one_gradient_that_a_sample_misses_is_seen() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(1000)) for _ in range(40)])
    for i, param in enumerate(model):
        param.grad = torch.zeros(1000)
        param.grad[777] = float(i == 39)
    assert halfstep.check(model, torch.optim.AdamW(model.parameters())) == []
    model[39].grad = torch.zeros(1000)
    found = only(halfstep.check(model, torch.optim.AdamW(model.parameters())), "HS121")
    assert (found.severity, found.evidence["tensors"]) == ("error", 40)


def test_a_sparse_gradient_may_be_the_only_one() -> None:
    model = nn.ModuleList([nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)])
    model[0](torch.tensor([1, 2])).sum().backward()
    for param in model[1].parameters():
        param.grad = torch.zeros_like(param)
    assert halfstep.check(model, torch.optim.SGD(model.parameters(), lr=0.1)) == []


def test_a_frozen_part_and_a_zero_layer_are_no_finding() -> None:
    model = net()
    nn.init.zeros_(model[2].weight)  # so that nothing reaches the layer before
    model(torch.randn(16, 32)).sum().backward()
    assert model[0].weight.grad is not None
    assert not model[0].weight.grad.any()
    assert halfstep.check(model, torch.optim.AdamW(model.parameters())) == []


@pytest.mark.parametrize(
    ("fused", "dtype", "found"), [(True, "bfloat16", True), (True, "float16", True), (False, "bfloat16", False)]
)
def test_a_fused_sgd_that_leaves_16_bit_weights_as_they_are_is_an_error(fused: bool, dtype: str, found: bool) -> None:
    model, optimizer = with_optimizer(nn.Linear(16, 4).to(getattr(torch, dtype)), torch.optim.SGD, lr=0.1, fused=fused)
    severities = [each.severity for each in halfstep.check(model, optimizer) if each.code == "HS113"]
    assert severities == ["error"] * found
    model, optimizer = amp.initialize(model, optimizer, opt_level="O3", dtype=dtype, verbosity=0)
    assert "HS113" not in codes(halfstep.check(model, optimizer))


X = torch.ones(4, 32)
NOT_FINITE: dict[str, tuple[Any, Any, str, str]] = {
    "a module": (torch.log, lambda m: m(-X).mean(), "1", "loss of this batch is NaN: inf or NaN begins in 1"),
    "between modules": (lambda x: nn.Flatten()(x / 0), lambda m: m(X).mean(), "1", "begins in 1, whose"),
    "the batch": (torch.sin, X.masked_fill(X == 1, torch.nan), "the batch", "output of this batch is NaN: the batch"),
    "the loss": (torch.sin, lambda m: -m(X).mean() / 0, "the loss", "is -?inf: the loss function computes it"),
    "a mask, nothing": (torch.nan_to_num, X.masked_fill(X == 1, -torch.inf), "", ""),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_loss_that_is_not_finite_is_said_with_the_module_where_it_begins(name: str) -> None:
    function, batch, where, text = NOT_FINITE[name]
    model = nn.Sequential(Applies(lambda x: x), Applies(function), nn.Linear(32, 2))
    found = halfstep.check(model, batch=(lambda: batch(model)) if callable(batch) else batch)
    assert [each.where for each in found] == [where] * bool(where)
    assert all(each.code == "HS122" and each.severity == "error" for each in found)
    assert re.search(text, " ".join(each.message for each in found))
