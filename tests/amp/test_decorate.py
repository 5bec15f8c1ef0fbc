"""``amp.decorate``: what Paddle was recorded to do, each difference with its reason, and training in a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp
from halfstep.core.dtypes import dtype_name
from halfstep.stepping.attached import attached_to
from tests.support.apex_recording import golden
from tests.support.worlds import FP32, HALVES, assert_equal, read_back, unscaled_step, with_optimizer

DTYPES = golden("paddle_decorate")["decorate"]


class Layers(nn.Module):
    """The model behind the recorded tables, under torch's names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.gn = nn.GroupNorm(2, 4)
        self.inorm = nn.InstanceNorm2d(4, affine=True)
        self.ln = nn.LayerNorm(2)
        self.fc = nn.Linear(2, 2)
        self.emb = nn.Embedding(3, 2)
        self.prelu = nn.PReLU()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        self.register_buffer("fbuf", torch.ones(2))
        self.register_buffer("ibuf", torch.ones(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = self.inorm(self.gn(self.bn(self.conv(x))))
        words = self.emb(torch.arange(3)).mean(0)
        return self.block(self.prelu(self.fc(self.ln(images.flatten(2).mean(1)[:, :2])))) + words * self.fbuf


PADDLE_NAMES = {
    "bn.running_mean": "bn._mean",
    "bn.running_var": "bn._variance",
    "inorm.weight": "inorm.scale",
    "prelu.weight": "prelu._weight",
}


def dtypes(model: nn.Module) -> dict[str, str]:
    """What the parameters and buffers are, under Paddle's names; torch's count of batches is not in Paddle."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        PADDLE_NAMES.get(name, name): dtype_name(tensor.dtype)
        for name, tensor in tensors
        if name != "bn.num_batches_tracked"
    }


def pair(model: nn.Module | None = None, lr: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) if model is None else model
    return model, torch.optim.SGD(model.parameters(), lr=lr)


# ---- the recorded tables

NORMS = ("inorm.", "ln.", "block.1.")

# Where ours differs: which entries of which row, and why.
KEPT_NORMS = (
    "Paddle casts LayerNorm and InstanceNorm for bfloat16 only; their 8-bit fractions are no safer than float16"
)
LATEST_WINS = "Paddle leaves layers alone that hold float16, and so a mixed model; ours has the dtype asked for last"


@pytest.mark.parametrize(
    ("row", "arguments"),
    [
        ("fp32", []),
        ("O1 float16", [{"level": "O1", "dtype": "float16"}]),
        ("O1 bfloat16", [{"level": "O1", "dtype": "bfloat16"}]),
        ("O2 float16", [{"dtype": "float16"}]),
        ("O2 bfloat16", [{"dtype": "bfloat16"}]),
        ("O2 float16 excluded_layers=nn.Linear (type)", [{"dtype": "float16", "excluded_layers": nn.Linear}]),
        ("decorating float16 then bfloat16", [{"dtype": "float16"}, {"dtype": "bfloat16"}]),
        ("decorating bfloat16 then float16", [{"dtype": "bfloat16"}, {"dtype": "float16"}]),
    ],
)
def test_dtypes_as_recorded(row: str, arguments: list[dict[str, Any]]) -> None:
    model = Layers()
    for options in arguments:
        assert amp.decorate(model, **{"level": "O2", **options}) is model
    expected = dict(DTYPES[row])
    reasons = {}
    for name, recorded in DTYPES[row].items():
        if recorded == "bfloat16" and name.startswith(NORMS):
            expected[name], reasons[name] = "float32", KEPT_NORMS
        elif row == "decorating float16 then bfloat16" and recorded == "float16":
            expected[name], reasons[name] = "bfloat16", LATEST_WINS
    assert dtypes(model) == expected
    differing = {"O2 bfloat16": 6, "decorating float16 then bfloat16": 17, "decorating bfloat16 then float16": 6}
    assert len(reasons) == differing.get(row, 0)


def test_saved_dtypes_as_recorded() -> None:
    model = amp.decorate(Layers(), level="O2", dtype="float16", save_dtype="float64")
    saved = {PADDLE_NAMES.get(name, name): dtype_name(value.dtype) for name, value in model.state_dict().items()}
    del saved["bn.num_batches_tracked"]
    assert saved == DTYPES["state_dict dtypes, O2 float16, save_dtype=float64"]
    assert dtypes(model) == DTYPES["parameter dtypes after that state_dict()"]


def test_returns_what_was_given() -> None:
    def shape(returned: Any) -> Any:
        return [type(r).__name__ for r in returned] if isinstance(returned, tuple) else type(returned).__name__

    recorded = DTYPES["return shapes"]
    for name, level in (("layer, opt", "O2"), ("O1 layer, opt", "O1")):
        layer, opt = pair(nn.Linear(2, 2))
        returned = amp.decorate(layer, opt, level=level)
        assert shape(returned) == recorded[name]
        assert returned[0] is layer
        assert returned[1] is opt
    assert shape(amp.decorate(nn.Linear(2, 2), level="O2")) == recorded["layer"]
    assert shape(amp.decorate([nn.Linear(2, 2)], level="O2")) == recorded["[layer]"]
    for name, wrap in (("[layers], [opts]", True), ("layer, [opts]", False)):
        layer, opt = pair(nn.Linear(2, 2))
        models = [layer] if wrap else layer
        optimizers = [opt]
        returned = amp.decorate(models, optimizers, level="O2")
        assert shape(returned) == recorded[name]
        assert returned[0] is models
        assert returned[1] is optimizers


def test_o1_touches_nothing() -> None:
    model, optimizer = pair(Layers())
    hooks = [dict(module._state_dict_hooks) for module in model.modules()]
    amp.decorate(model, optimizer, level="O1", dtype="float16", save_dtype="float64", master_grad=True)
    assert set(dtypes(model).values()) == {"float32", "int64"}
    assert [dict(module._state_dict_hooks) for module in model.modules()] == hooks
    assert attached_to(optimizer) is None
    assert all(p.grad_dtype is FP32 for p in model.parameters())


# ---- excluded layers


def test_a_parameter_shared_with_an_excluded_layer_stays_fp32() -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(3, 2), "other": nn.Linear(2, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["emb"].weight
    amp.decorate(model, level="O2", excluded_layers=model["head"])
    assert model["emb"].weight is model["head"].weight
    assert (model["emb"].weight.dtype, model["other"].weight.dtype) == (FP32, torch.bfloat16)


# ---- masters


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("master_weight", [None, True, False])
def test_masters_move_where_weights_alone_do_not(half: torch.dtype, master_weight: bool | None) -> None:
    row = f"SGD lr 1e-4 grad 1, {dtype_name(half)}, master_weight={None if master_weight else master_weight}"
    recorded = DTYPES[f"{row}: [weight, master] per step"]
    model = nn.Linear(1, 1)
    nn.init.ones_(model.weight)
    _, optimizer = amp.decorate(*pair(model, lr=1e-4), level="O2", dtype=half, master_weight=master_weight)
    assert [p.dtype for p in amp.master_params(optimizer)] == [half if master_weight is False else FP32] * 2
    for t, (weight, *master) in enumerate(recorded):
        unscaled_step(model(torch.ones(1, 1, dtype=half)).sum(), optimizer)
        ours = next(amp.master_params(optimizer)).item()
        assert model.weight.item() == weight
        if master_weight is False:
            assert ours == 1.0
        else:
            assert ours == pytest.approx(1 - 1e-4 * (t + 1), abs=1e-6)
            # Paddle's SGD rounds the learning rate to the weight's dtype: 1.00136e-4 in bfloat16.
            assert ours == pytest.approx(master[0], abs=3e-7 if half is torch.float16 else 2e-6)


def test_optimizer_state_follows_the_parameters() -> None:
    for master_weight, expected in ((None, FP32), (False, torch.bfloat16)):
        model, optimizer = with_optimizer(nn.Linear(2, 2), torch.optim.Adam)
        unscaled_step(model(torch.ones(1, 2)).sum(), optimizer)
        amp.decorate(model, optimizer, level="O2", dtype="bfloat16", master_weight=master_weight)
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        state = optimizer.state[model.weight]
        assert state["exp_avg"].dtype is expected
        assert state["step"] == 2


def test_several_models_and_optimizers() -> None:
    (a, opt_a), (b, opt_b) = pair(), pair()
    amp.decorate([a, b], [opt_a, opt_b], level="O2", dtype="bfloat16")
    before = [p.clone() for o in (opt_a, opt_b) for p in amp.master_params(o)]
    b(a(torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16))).float()[:, 0].sum().backward()
    opt_a.step()
    opt_b.step()
    after = [p for o in (opt_a, opt_b) for p in amp.master_params(o)]
    gradients = [p.grad for model in (a, b) for p in model.parameters()]
    assert all(torch.equal(q, p - 0.1 * g.float()) for p, q, g in zip(before, after, gradients, strict=True))
    assert any(not torch.equal(p, q) for p, q in zip(before, after, strict=True))


# ---- what is saved


@pytest.mark.parametrize("half", HALVES)
def test_saves_the_masters_by_default_and_loads_them_back(half: torch.dtype) -> None:
    model, optimizer = amp.decorate(*pair(lr=1e-4), level="O2", dtype=half)
    for _ in range(3):
        unscaled_step(model(torch.tensor([[1.0, 3.0]], dtype=half)).float().square().sum(), optimizer)
    saved = model.state_dict()
    assert {value.dtype for value in saved.values()} == {FP32}
    masters = list(amp.master_params(optimizer))
    for master, (name, value) in zip(masters, saved.items(), strict=True):
        assert torch.equal(master, value), name
    assert not torch.equal(saved["0.weight"], model[0].weight.float())  # the masters hold more than the weights

    other, other_optimizer = amp.decorate(*pair(), level="O2", dtype=half)
    other.load_state_dict(read_back(saved))
    assert_equal(masters, amp.master_params(other_optimizer))
    assert torch.equal(other[0].weight, model[0].weight)
    fp32_model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    fp32_model.load_state_dict(saved)  # what is saved needs none of this to be read


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, FP32),
        ({"master_weight": False}, None),
        ({"save_dtype": "float16"}, torch.float16),
        ({"save_dtype": torch.float64}, torch.float64),
        ({"save_dtype": "bfloat16"}, torch.bfloat16),
        ({"save_dtype": "float32", "master_weight": False}, FP32),
    ],
)
def test_save_dtype(options: dict[str, Any], expected: torch.dtype | None) -> None:
    model, _ = amp.decorate(*pair(Layers()), level="O2", dtype="bfloat16", **options)
    own = {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    for name, value in model.state_dict().items():
        floating = own[name].is_floating_point
        assert value.dtype is (own[name] if expected is None or not floating else expected), name
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        assert tensor.dtype is own[name]


def test_without_masters_the_rounded_values_are_saved() -> None:
    assert DTYPES["save_dtype=float32 values are the rounded float16 ones"] is True  # there even with masters
    model = nn.Linear(2, 2)
    rounded = model.weight.detach().half().float()
    amp.decorate(model, level="O2", dtype="float16", save_dtype="float32")
    assert torch.equal(model.state_dict()["weight"], rounded)


# ---- master_grad


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("master_grad", [False, True])
def test_gradient_dtypes_as_recorded(half: torch.dtype, master_grad: bool) -> None:
    recorded = DTYPES[f"  .. second backward without clear_grad, {dtype_name(half)}, master_grad={master_grad}"]
    model, optimizer = amp.decorate(*pair(), level="O2", dtype=half, master_grad=master_grad)
    assert optimizer is not None  # the masters are its own
    for _ in range(2):
        model(torch.ones(1, 2, dtype=half)).float().square().sum().backward()
        for name, param in model.named_parameters():
            # Where there is a master its gradient is fp32 with or without master_grad.
            assert dtype_name(param.grad.dtype) == "float32"
            assert not master_grad or recorded[name] == "float32"


def test_master_grad_keeps_gradients_that_are_there() -> None:
    model, optimizer = pair(nn.Linear(2, 2))
    model(torch.tensor([[0.1, 0.3]])).sum().backward()
    before = model.weight.grad.clone()
    amp.decorate(model, optimizer, level="O2", dtype="bfloat16", master_grad=True)
    assert torch.equal(model.weight.grad, before)
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert torch.equal(model.weight.grad, before + 1)


def test_a_later_decorate_is_on_its_own() -> None:
    # In Paddle master_grad is a switch of the process that nothing turns off.
    amp.decorate(*pair(), level="O2", dtype="bfloat16", master_grad=True)
    later = amp.decorate(pair()[0], level="O2", dtype="bfloat16")
    later(torch.ones(1, 2, dtype=torch.bfloat16)).float().square().sum().backward()
    assert later[0].weight.grad.dtype is torch.bfloat16


# ---- training

DATA = torch.Generator().manual_seed(1)
X = torch.randn(64, 8, generator=DATA)
Y = (X @ torch.randn(8, 3, generator=DATA)).argmax(1)


def train(half: torch.dtype | None, steps: int = 40, lr: float = 0.02, **options: Any) -> tuple[nn.Module, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    if half is not None:
        amp.decorate(model, optimizer, level="O2", dtype=half, **options)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(X.to(half or FP32)).float(), Y)
        unscaled_step(loss, optimizer)
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("master_grad", [False, True])
def test_learns_as_fp32_does_in_a_plain_loop(half: torch.dtype, master_grad: bool) -> None:
    _, fp32 = train(None)
    model, losses = train(half, master_grad=master_grad)
    assert fp32[-1] < 0.2 * fp32[0]
    assert losses == pytest.approx(fp32, abs=5e-4 if half is torch.float16 else 5e-3)
    assert model[0].weight.dtype is half


@pytest.mark.parametrize("half", HALVES)
def test_every_kind_of_layer_runs_without_casts(half: torch.dtype) -> None:
    model, optimizer = amp.decorate(*pair(Layers(), lr=0.01), level="O2", dtype=half)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    x = torch.arange(72.0).reshape(2, 1, 6, 6).sin().to(half)
    loss = model(x).float().pow(2).sum()
    loss.backward()
    optimizer.step()
    after = list(amp.master_params(optimizer))
    assert loss.isfinite()
    assert all(p.isfinite().all() for p in after)
    assert sum(not torch.equal(p, q) for p, q in zip(before, after, strict=True)) >= len(before) // 2
