"""8-bit moments against the published scheme in float64; and state of every form is saved, loaded, copied and kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from benchmarks import eight_bit
from benchmarks.__main__ import main
from halfstep import HalfstepError, Policy, amp, optimizers
from halfstep.kernels import backend
from halfstep.kernels.blockwise import BLOCK, SIGNED, UNSIGNED, dynamic_map, quantize
from tests.support.backends import needs_interpreter
from tests.support.optimizer_references import CASES, Case
from tests.support.worlds import BF16, FP16, FP32, FP64, advance, assert_equal, read_back, with_optimizer

SMALL = [(10,), (1, 4095), (5000,)]
LARGE = [(64, 64), (16, 257), (100, 100), (16, 16, 4, 5), (80, 70)]
NAMES = {"m": ("exp_avg", SIGNED), "v": ("exp_avg_sq", UNSIGNED), "top": ("max_exp_avg_sq", UNSIGNED)}
NAMES["b"] = ("momentum_buffer", SIGNED)
COVERED = [
    case for case in CASES if case.name in ("adamw", "adam", "amsgrad", "momentum", "nesterov", "lamb", "lamb-l2")
]
FORMS = [(BF16, "split"), (BF16, "plain"), (FP16, "plain"), (BF16, None), (FP16, None), (FP32, None)]
pytestmark = pytest.mark.filterwarnings("ignore:.*updates .* weights in place:UserWarning")


def make_params(dtype: torch.dtype = BF16) -> list[Any]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SMALL + LARGE]
    params[-2].data = params[-2].data.to(memory_format=torch.channels_last)
    params[-1].data = torch.stack([params[-1].data, params[-1].data], -1)[..., 0]  # with holes
    return params


def set_grads(params: list[Any], step: int) -> None:
    torch.manual_seed(step + 1)
    for p in params:
        g = torch.randn(p.shape) * 10 ** (-3 * torch.rand(p.shape)) * (torch.rand(p.shape) > 0.05)
        p.grad = g.to(p.dtype)


def exact(codes: torch.Tensor, absmax: torch.Tensor, storage: Any) -> torch.Tensor:
    """The float64 values of codes, by a plain look into the map."""
    flat = codes.as_strided((codes.numel(),), (1,))
    each = absmax.double().repeat_interleave(BLOCK)[: len(flat)]
    return (dynamic_map(storage).double()[flat.int()] * each).as_strided(codes.shape, codes.stride())


def moments_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The moments of a parameter, in float64, under the names of the references."""
    found = {}
    for key, (name, storage) in NAMES.items():
        if f"{name}_codes" in state:
            found[key] = exact(state[f"{name}_codes"], state[f"{name}_absmax"], storage)
        elif name in state:
            found[key] = state[name].double()
    return found


def assert_rounded(state: dict[str, Any], key: str, value: torch.Tensor) -> None:
    """That a moment is the nearest number of the map, up to roundings of fp32."""
    name, storage = NAMES[key]
    codes, absmax = state[f"{name}_codes"], state[f"{name}_absmax"]
    laid = torch.empty_like(codes, dtype=FP64).copy_(value).as_strided((codes.numel(),), (1,))
    largest = torch.stack([block.abs().max() for block in laid.split(BLOCK)])
    torch.testing.assert_close(absmax.double(), largest, rtol=1e-6, atol=1e-30)
    scaled = laid / absmax.double().clamp(min=1e-30).repeat_interleave(BLOCK)[: len(laid)]
    numbers = dynamic_map(storage).double()
    lost = (numbers[codes.as_strided((codes.numel(),), (1,)).int()] - scaled).abs()
    least = (numbers - scaled[:, None]).abs().min(1).values
    assert (lost <= least + 2e-6 * scaled.abs() + (0 if storage.signed else 4e-7) + 1e-12).all()


def run(case: Case, dtype: torch.dtype, masters: Any, steps: int = 3, places: slice = slice(None)) -> None:
    """Each step from what the optimizer has, so that no rounding that falls the other way adds up."""
    params = make_params(dtype)[places]
    clips = {"max_grad_norm": None} if case.clips else {}
    made: Any = {"lr": 0.03, "weight_decay": 0.05, "state_dtype": "8bit", "master_weights": masters}
    optimizer: Any = case.cls(params, **made, **clips, **case.arguments)
    for t in range(1, steps + 1):
        set_grads(params, t)
        before = [optimizer.master_value(p).double() for p in params]
        kept = [moments_of(optimizer.state[p]) if t > 1 else {} for p in params]
        optimizer.step()
        for p, old, s in zip(params, before, kept, strict=True):
            grad, hyper = p.grad.double(), {"lr": 0.03, "weight_decay": 0.05, **case.arguments}
            new = case.update(old, grad, s, t, **hyper)
            state = optimizer.state[p]
            large = p.dim() >= 2 and p.numel() >= 4096
            assert any(key.endswith("_codes") for key in state) == large
            if large:
                for key in moments_of(state):
                    assert_rounded(state, key, s[key])
                if "lamb" in case.name:  # its second pass reads the rounded moments
                    new = lamb_of(case, old, s, moments_of(state), t)
            unit = 2 * torch.finfo(dtype).eps if masters is None and dtype is not FP32 else 2e-5
            away = (optimizer.master_value(p).double() - new).abs()
            assert away.max() < 0.07
            # A step is divided by the size of the gradient: one that is a difference of equal numbers has few digits.
            assert (away > unit * (1 + new.abs())).double().mean() < 1e-3


def lamb_of(case: Case, p: torch.Tensor, exact_ones: Any, rounded: Any, t: int) -> torch.Tensor:
    decay = 0.05 if case.arguments.get("adam_w_mode", True) else 0.0

    def direction(s: Any) -> torch.Tensor:
        return (s["m"] / (1 - 0.9**t)) / ((s["v"] / (1 - 0.999**t)).sqrt() + 1e-6) + decay * p

    return p - 0.03 * p.norm() / direction(exact_ones).norm() * direction(rounded)


@pytest.mark.costly
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["eager", "torch", "compiled"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("case", COVERED, ids=str)
def test_each_step_is_the_published_one(name: str, case: Case, form: Any) -> None:
    with backend(name):
        run(case, *form)


@pytest.mark.costly
@pytest.mark.exhaustive
@needs_interpreter
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
@pytest.mark.parametrize("form", [(BF16, "split"), (FP32, None)], ids=str)
@pytest.mark.parametrize("case", [case for case in COVERED if case.name in ("adamw", "nesterov", "lamb")], ids=str)
def test_triton_takes_the_same_steps(case: Case, form: Any) -> None:
    with backend("triton"):
        run(case, *form, steps=2, places=slice(0, None, 3))  # a small one, a large one, and one in channels_last


def is_matrix(_: str, param: Any) -> bool:
    return param.dim() > 1


SETTINGS: list[tuple[Any, dict[str, Any]]] = [
    (optimizers.FusedAdam, {}),
    (optimizers.FusedMuon, {"use_muon": is_matrix}),
    (optimizers.FusedLAMB, {}),
    (optimizers.FusedSGD, {"momentum": 0.9}),
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
]
each_class = pytest.mark.parametrize(("cls", "settings"), SETTINGS, ids=lambda x: getattr(x, "__name__", ""))


with_any_state = pytest.mark.parametrize(
    ("state_dtype", "masters"), [("8bit", "split"), (None, "split"), (None, "plain"), (None, None)]
)


def make(
    cls: Any, params: list[Any], settings: dict[str, Any], state_dtype: Any = "8bit", masters: Any = "split"
) -> Any:
    if cls.__module__.startswith("torch"):
        return optimizers.fuse(cls(params, lr=0.01, **settings), master_weights=masters, state_dtype=state_dtype)
    return cls(params, lr=0.01, master_weights=masters, state_dtype=state_dtype, **settings)


def train(optimizer: Any, params: list[Any], steps: range) -> None:
    for step in steps:
        set_grads(params, step)
        optimizer.step()


def everything(optimizer: Any, params: list[Any]) -> list[torch.Tensor]:
    kept = [value for p in params for _, value in sorted(optimizer.state[p].items())]
    return [p.detach().clone() for p in params] + [value.clone() for value in kept if isinstance(value, torch.Tensor)]


@each_class
def test_six_bytes_a_parameter(cls: Any, settings: dict[str, Any]) -> None:
    """bfloat16 weights with split masters: 12 with fp32 moments."""
    param = torch.nn.Parameter(torch.randn(256, 256, dtype=BF16))
    optimizer = make(cls, [param], settings)
    train(optimizer, [param], range(2))
    held = param.nbytes + sum(value.nbytes for value in optimizer.state[param].values())
    moments = sum(key.endswith("_codes") for key in optimizer.state[param])
    assert held <= param.numel() * (4 + moments * (1 + 4 / 256)) + 8


@each_class
@with_any_state
def test_resumed_bit_for_bit(cls: Any, settings: dict[str, Any], state_dtype: Any, masters: Any) -> None:
    params = make_params()
    optimizer = make(cls, params, settings, state_dtype, masters)
    train(optimizer, params, range(3))
    weights, state = read_back([[p.detach() for p in params], optimizer.state_dict()])
    others = make_params()
    for p, weight in zip(others, weights, strict=True):
        p.data.copy_(weight)
    other = make(cls, others, settings, state_dtype, masters)
    other.load_state_dict(state)
    train(optimizer, params, range(3, 6))
    train(other, others, range(3, 6))
    assert_equal(everything(optimizer, params), everything(other, others))


@each_class
def test_state_goes_to_fp32_and_back(cls: Any, settings: dict[str, Any]) -> None:
    params = make_params()
    optimizer = make(cls, params, settings)
    train(optimizer, params, range(3))
    wide = make(cls, params, settings, None)
    wide.load_state_dict(optimizer.state_dict())
    set_grads(params, 3)
    wide.step()
    codes = [key for p in params for key in wide.state[p] if "codes" in key or "absmax" in key]
    assert not codes
    assert all(wide.state[p][key].dtype is FP32 for p in params for key in wide.state[p] if key in dict(NAMES.values()))
    back = make(cls, params, settings)
    kept = {name: wide.state[params[4]][name].clone() for name, _ in NAMES.values() if name in wide.state[params[4]]}
    back.load_state_dict(wide.state_dict())
    for group in back.param_groups:
        group["lr"] = 0.0
    back.found_inf = torch.ones(())  # a step that is skipped only brings the state into its form
    set_grads(params, 4)
    back.step()
    for name, value in kept.items():
        storage = dict(NAMES.values())[name]
        assert_equal([back.state[params[4]][f"{name}_{key}"] for key in ("codes", "absmax")], quantize(value, storage))


@each_class
def test_unfused_it_has_torchs_state(cls: Any, settings: dict[str, Any]) -> None:
    if not cls.__module__.startswith("torch"):
        pytest.skip("nothing to unfuse")
    params = make_params(FP32)
    optimizer = optimizers.fuse(cls(params, lr=0.01, **settings), state_dtype="8bit")
    train(optimizer, params, range(2))
    optimizers.unfuse(optimizer)
    reference = cls(make_params(FP32), lr=0.01, **settings)
    train(reference, reference.param_groups[0]["params"], range(2))
    for p, q in zip(params, reference.param_groups[0]["params"], strict=True):
        assert optimizer.state[p].keys() == reference.state[q].keys()
        assert all(optimizer.state[p][key].shape == value.shape for key, value in reference.state[q].items())
    train(optimizer, params, range(2, 3))


@each_class
@with_any_state
@pytest.mark.parametrize("name", ["eager", "torch", "compiled"])
def test_a_skipped_step_changes_no_bit(
    cls: Any, settings: dict[str, Any], state_dtype: Any, masters: Any, name: str
) -> None:
    params = make_params()
    optimizer = make(cls, params, settings, state_dtype, masters)
    with backend(name):
        train(optimizer, params, range(2))
        before = everything(optimizer, params)
        optimizer.found_inf = torch.ones(())
        set_grads(params, 2)
        params[4].grad[0] = torch.inf
        optimizer.step()
    assert_equal(before, everything(optimizer, params))


def test_clipping_and_the_loss_scale_are_in_the_same_pass() -> None:
    found = []
    for scale in (1.0, 1024.0):
        params = make_params()
        optimizer: Any = optimizers.FusedAdam(params, max_grad_norm=0.5, master_weights="split", state_dtype="8bit")
        for step in range(3):
            set_grads(params, step)
            torch._foreach_mul_([p.grad for p in params], scale)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())
            optimizer.step()
        found.append(everything(optimizer, params))
    assert_equal(*found)


def test_zero_gradients_do_not_blow_up_what_has_moved_once() -> None:
    """A second moment far below that of its neighbours must not be rounded to 0, by whose root the step is divided."""
    param = torch.nn.Parameter(torch.zeros(64, 64))
    optimizer = optimizers.FusedAdam([param], lr=1e-3, state_dtype="8bit")
    grad = torch.ones(64, 64)
    grad[:, 1::2] = 1e-5
    for step in range(50):
        param.grad = grad.clone() if step == 0 else grad * (torch.arange(64) % 2 == 0)
        optimizer.step()
    assert param.abs().max() < 0.06


def test_codes_of_another_cut_are_refused_in_words() -> None:
    params = make_params()
    optimizer = make(optimizers.FusedAdam, params, {})
    train(optimizer, params, range(1))
    saved = optimizer.state_dict()
    saved["state"][4]["exp_avg_absmax"] = saved["state"][4]["exp_avg_absmax"][:-1]
    other = make(optimizers.FusedAdam, make_params(), {})
    other.load_state_dict(saved)
    with pytest.raises(HalfstepError, match="cannot be cut anew"):
        train(other, other.param_groups[0]["params"], range(1))


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.Linear(128, 64))


@pytest.mark.costly
@each_class
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("through", ["argument", "policy"])
def test_amp_initialize_at_o2(cls: Any, settings: dict[str, Any], dtype: torch.dtype, through: str) -> None:
    model, optimizer = with_optimizer(small_model(), cls, lr=0.01, **settings)
    policy = Policy.from_level("O2", dtype).replace(state_dtype="8bit")
    assert Policy.parse(str(policy)) == policy
    options: Any = {"opt_level": "O2", "dtype": dtype, "state_dtype": "8bit"}
    model, optimizer = amp.initialize(
        model, optimizer, verbosity=0, **(options if through == "argument" else {"policy": policy})
    )
    for _ in range(2):
        advance(model(torch.randn(4, 64)).square().mean(), optimizer)
    coded = [any(key.endswith("_codes") for key in optimizer.state[p]) for p in model.parameters()]
    assert coded == [True, False, False, False, True, False]
    saved = copy.deepcopy((optimizer.state_dict(), amp.state_dict()))
    optimizer.load_state_dict(saved[0])
    amp.load_state_dict(saved[1])


@pytest.mark.exhaustive
def test_a_language_model_ends_at_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark has 2,000 steps over five seeds; this is a short one."""
    monkeypatch.setattr(eight_bit, "BATCH", 16)
    wide, narrow = (eight_bit.losses_of(form, 0, 150, torch.device("cpu")) for form in (None, "8bit"))
    assert narrow != wide
    assert abs(narrow / wide - 1) < 0.01


@pytest.mark.exhaustive
def test_the_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eight_bit", "--training-steps", "2", "--seeds", "1", "--elements", "4096", "--steps", "1"]) == 0
    printed = capsys.readouterr().out
    assert "8-bit state: 6.03 bytes a parameter" in printed
    assert "seed 0: loss" in printed
