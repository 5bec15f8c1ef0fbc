"""``FusedOptimizer.attach``: parameters step inside the backward pass. The reference is always the ordinary step."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.gradient_release import peak_bytes
from halfstep import amp, optimizers
from halfstep.core.errors import UsageError
from halfstep.core.hardware import has_units
from halfstep.kernels import backend
from halfstep.kernels.backends import compiler
from halfstep.optimizers import release as release_file
from tests.support.backends import needs_compiler
from tests.support.worlds import (
    BF16,
    FP16,
    assert_equal,
    read_back,
    scaled_backward,
    scaled_step,
    step_and_clear,
    with_optimizer,
)

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "Adam": lambda params: optimizers.FusedAdam(params, lr=0.02, weight_decay=0.1),
    "Adam, L2, amsgrad": lambda params: optimizers.FusedAdam(
        params, lr=0.02, weight_decay=0.1, adam_w_mode=False, amsgrad=True
    ),
    "Adam, bf16 moment": lambda params: optimizers.FusedAdam(params, lr=0.02, state_dtype=BF16),
    "Muon": lambda params: optimizers.FusedMuon(params, lr=0.02, use_muon=lambda _, p: p.dim() == 2),
    "SGD": lambda params: optimizers.FusedSGD(params, lr=0.1),
    "SGD, dampening": lambda params: optimizers.FusedSGD(params, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "Adagrad": lambda params: optimizers.FusedAdagrad(params, lr=0.1),
    "LAMB": lambda params: optimizers.FusedLAMB(params, lr=0.02, max_grad_norm=None),
    "NovoGrad": lambda params: optimizers.FusedNovoGrad(params, lr=0.02, weight_decay=0.1),
    "torch.AdamW": lambda params: optimizers.fuse(torch.optim.AdamW(params, lr=0.02)),
    "torch.SGD": lambda params: optimizers.fuse(torch.optim.SGD(params, lr=0.1, momentum=0.9)),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 5, 6, generator=torch.Generator().manual_seed(1)))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def make(
    kind: str, *, level: str | None = None, released: bool = False, scaler: Any = None, **options: Any
) -> tuple[nn.Module, Any]:
    model = network()
    optim = OPTIMIZERS[kind](model.parameters())
    if level is not None:
        model, optim = amp.initialize(model, optim, opt_level=level, verbosity=0, **options)
    if released:
        optim.attach(model, release=True, scaler=scaler)
    return model, optim


def twins(kind: str = "Adam", **options: Any) -> list[tuple[nn.Module, Any]]:
    """Without release and with it."""
    return [make(kind, released=released, **options) for released in (False, True)]


def attached(model: nn.Module, released: bool, scaler: Any = None) -> tuple[nn.Module, Any]:
    optim = optimizers.FusedAdam(model.parameters(), lr=0.1)
    optim.attach(model, release=released, scaler=scaler)
    return model, optim


def scaled(optim: Any, loss: torch.Tensor) -> Any:
    return amp.scale_loss(loss, optim) if hasattr(optim, "_amp_stash") else nullcontext(loss)


def train(model: nn.Module, optim: Any, xs: list[torch.Tensor]) -> None:
    for x in xs:
        optim.zero_grad()
        with scaled(optim, loss_of(model, x)) as loss:
            loss.backward()
        assert optim.release is None or all(p.grad is None for p in model.parameters())
        optim.step()


def assert_same(one: tuple[nn.Module, Any], other: tuple[nn.Module, Any]) -> None:
    (model, optim), (model2, optim2) = one, other
    assert_equal(
        [*model.parameters(), optim.state_dict()["state"]], [*model2.parameters(), optim2.state_dict()["state"]]
    )


@pytest.fixture
def tiny_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a large model: no parameter waits for another."""
    monkeypatch.setattr(release_file, "_BUCKET", 1)


# ---- the same numbers


@pytest.mark.parametrize("bucket", [1, 400, 2**23])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_as_the_ordinary_step(kind: str, bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_file, "_BUCKET", bucket)
    runs = twins(kind)
    for model, optim in runs:
        train(model, optim, batches(4))
    assert_same(*runs)


@pytest.mark.costly
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("loss_scale", [1.0, 128.0, "dynamic"])
@pytest.mark.parametrize(("level", "dtype"), [("O1", BF16), ("O1", FP16), ("O2", BF16), ("O2", FP16), ("O3", BF16)])
@pytest.mark.filterwarnings("ignore:.*updates bfloat16 weights in place")
def test_steps_as_the_ordinary_step_under_amp(
    level: str, dtype: torch.dtype, loss_scale: Any, kind: str, tiny_buckets: None
) -> None:
    runs = twins(kind, level=level, dtype=dtype, loss_scale=loss_scale)
    for model, optim in runs:
        train(model, optim, batches(3))
    assert_same(*runs)
    assert not runs[1][1].step_was_skipped


@pytest.mark.exhaustive
@settings(max_examples=40)
@given(data=st.data())
def test_any_training_is_the_same(data: st.DataObject) -> None:
    """Frozen parameters, learning rates that change, gradients that are cleared or not: in any order."""
    # Norms by torch's lists are added up in another order where parameters come one by one.
    kind = data.draw(st.sampled_from(["Adam", "SGD, dampening", *(["LAMB"] if compiler.available() else [])]))
    level = data.draw(st.sampled_from([None, "O2"]))
    loss_scale = data.draw(st.sampled_from([1.0, 64.0, "dynamic"]))
    steps = data.draw(st.lists(st.sampled_from([None, 0, 3, 5]), min_size=1, max_size=4))
    clear = data.draw(st.booleans())
    runs = twins(kind) if level is None else twins(kind, level=level, dtype=BF16, loss_scale=loss_scale)
    for model, optim in runs:
        for frozen, x in zip(steps, batches(len(steps)), strict=True):
            for i, layer in enumerate(model):  # type: ignore[arg-type]
                layer.requires_grad_(i != frozen)
            with scaled(optim, loss_of(model, x)) as loss:
                loss.backward()
            optim.step()
            if clear or optim.release is None:
                optim.zero_grad(set_to_none=True)
            optim.param_groups[0]["lr"] *= 0.9
    assert_same(*runs)


@pytest.mark.parametrize("name", ["eager", "compiled"])
def test_on_every_backend(name: str, tiny_buckets: None) -> None:
    with backend(name):
        runs = twins(level="O2", dtype=BF16)
        for model, optim in runs:
            train(model, optim, batches(3))
    assert_same(*runs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_on_a_gpu(dtype: torch.dtype, tiny_buckets: None) -> None:
    """There hooks run in a thread of their own."""
    runs = []
    for released in (False, True):
        model = network().cuda()
        optim = OPTIMIZERS["Adam"](model.parameters())
        model, optim = amp.initialize(model, optim, opt_level="O2", dtype=dtype, loss_scale="dynamic", verbosity=0)
        if released:
            optim.attach(model)
        train(model, optim, [x.cuda() for x in batches(4)])
        runs.append((model, optim))
    assert_same(*runs)


def test_stochastic_rounding_draws_the_same_numbers(tiny_buckets: None) -> None:
    runs = []
    for released in (False, True):
        model, optim = with_optimizer(network().to(BF16), optimizers.FusedAdam, lr=1e-3, rounding="stochastic", seed=3)
        if released:
            optim.attach(model)
        train(model, optim, [x.to(BF16) for x in batches(4)])
        runs.append((model, optim))
    assert_same(*runs)


def test_groups_that_come_and_go(tiny_buckets: None) -> None:
    runs = []
    for released in (False, True):
        model: Any = network()
        optim = optimizers.FusedAdam(model[0].parameters(), lr=0.02)
        if released:
            optim.attach(model)
        optim.add_param_group({"params": list(model[5].parameters()), "lr": 0.05})
        train(model, optim, [])
        for x in batches(3):
            loss_of(model, x).backward()
            optim.step()
            model.zero_grad()
        optim.load_state_dict(optim.state_dict())
        optim.param_groups.reverse()
        loss_of(model, batches(1)[0]).backward()
        optim.step()
        model.zero_grad()
        runs.append((model, optim))
    assert_same(*runs)


@needs_compiler
def test_a_parameter_that_left_keeps_its_gradient() -> None:
    model, optim = with_optimizer(network(), optimizers.FusedAdam)
    optim.attach(model)
    train(model, optim, batches(1))
    left = optim.param_groups[0]["params"].pop()
    loss_of(model, batches(1)[0]).backward()
    assert [p for p in model.parameters() if p.grad is not None] == [left]
    other = optimizers.FusedAdam([left])
    other.attach(model)
    optim.step()
    other.zero_grad()
    loss_of(model, batches(1)[0]).backward()
    assert all(p.grad is None for p in model.parameters())
    assert [optim.state[left]["step"], other.state[left]["step"]] == [1, 1]


# ---- memory


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize(
    ("loss_scale", "ordinary", "emulated"),
    [(1.0, 12.0, 12.5), (64.0, 16.0, 16.0)],
)
def test_ten_bytes_a_parameter(loss_scale: float, ordinary: float, emulated: float, tiny_buckets: None) -> None:
    """Weight 2, remainder 2, first moment 2, second moment 4, and the gradient of one layer of 8."""
    arguments: Any = {"layers": 8, "width": 512, "loss_scale": loss_scale, "device": torch.device("cpu")}
    found = [peak_bytes(released=released, **arguments) for released in (True, False)]
    wanted = [10 + 2 / 8, ordinary]
    if not has_units(arguments["device"], BF16, "matmul"):  # backward computes in fp32, from an fp32 weight
        wanted = [10 + 8 / 8, emulated]
    assert found == pytest.approx(wanted, abs=0.02)


def test_gradients_are_freed_one_by_one(tiny_buckets: None) -> None:
    model, optim = with_optimizer(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5))), optimizers.FusedAdam)
    optim.attach(model)
    freed: list[bool] = []
    brought: list[weakref.ref[torch.Tensor]] = []

    def note(grad: torch.Tensor) -> None:
        freed.extend(ref() is None for ref in brought[-1:])
        brought.append(weakref.ref(grad))

    for param in model.parameters():
        param.register_hook(note)
    loss_of(model, torch.randn(4, 8)).backward()
    assert freed == [True] * 4
    assert all(p.grad is None for p in model.parameters())


# ---- loss scales


def grow_first_gradient(model: Any, value: float) -> Any:
    """From now on the gradients of the first layer are multiplied by this."""
    return model[0].weight.register_hook(lambda grad: grad * value)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_an_overflow_stops_the_step_where_it_is(bad: float, dtype: torch.dtype, tiny_buckets: None) -> None:
    model, optim = make("Adam", level="O2", dtype=dtype, released=True, loss_scale="dynamic")
    train(model, optim, batches(1))
    hook = grow_first_gradient(model, bad)
    names = [name for name, _ in model.named_parameters()]
    before = copy.deepcopy([[*model.parameters()], optim.state_dict()["state"]])
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    train(model, optim, batches(1))
    assert optim.step_was_skipped
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == scale / 2
    stepped = []
    for i, (name, param) in enumerate(model.named_parameters()):
        state, old = optim.state_dict()["state"][i], before[1][i]
        moved = not torch.equal(param, before[0][i])
        assert moved == (state["step"] == 2)
        assert moved or all(torch.equal(state[key], old[key]) for key in old)
        if moved:
            stepped.append(name)
    # Those nearer to the loss came first; the bias of the first layer may come before or after its weight.
    assert set(names) - set(stepped) - {"0.bias"} == {"0.weight"}
    hook.remove()
    train(model, optim, batches(1))
    assert not optim.step_was_skipped
    assert all(p.isfinite().all() for p in model.parameters())


def test_an_overflow_at_the_loss_changes_nothing() -> None:
    model, optim = make("Adam", level="O2", dtype=FP16, released=True, loss_scale="dynamic")
    train(model, optim, batches(1))
    before = copy.deepcopy([[*model.parameters()], optim.state_dict()["state"]])
    scaled_step(loss_of(model, batches(1)[0]) * math.inf, optim)
    assert optim.step_was_skipped
    assert_equal(model.parameters(), before[0])
    assert all(state["step"] == 1 for state in optim.state_dict()["state"].values())


def test_two_blocks_of_a_step_have_an_overflow_each() -> None:
    model, optim = make("Adam", level="O2", dtype=FP16, released=True, loss_scale="dynamic")
    first, last = model[0], model[5]  # type: ignore[index]
    scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
    for layer, x, factor in ((first, torch.ones(2, 6), math.inf), (last, torch.ones(2, 16), 1.0)):
        scaled_backward(layer(x.half()).float().mean() * factor, optim)
    optim.step()
    assert optim.step_was_skipped
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": scale / 2, "unskipped": 1}
    assert [optim.state[layer.weight]["step"] for layer in (first, last)] == [0, 1]


def test_a_block_without_gradients_does_not_count() -> None:
    model, optim = make("Adam", level="O2", dtype=FP16, released=True, loss_scale="dynamic")
    for loss in (loss_of(model, batches(1)[0]), torch.ones((), requires_grad=True)):
        scaled_backward(loss, optim)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == 1


SCALERS = {
    "halfstep": lambda: amp.GradScaler(init_loss_scaling=64.0, incr_every_n_steps=2, decr_every_n_nan_or_inf=1),
    "torch": lambda: torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2),
    "disabled": lambda: amp.GradScaler(enable=False),
}


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("kind", ["Adam", "torch.AdamW"])
@pytest.mark.parametrize("name", SCALERS)
def test_with_a_grad_scaler(name: str, kind: str, attached: bool, tiny_buckets: None) -> None:
    runs, scales = [], []
    for released in (False, True):
        model, optim, scaler = network(), None, SCALERS[name]()
        optim = OPTIMIZERS[kind](model.parameters())
        if attached:
            model, optim = amp.decorate(model, optim, level="O2", dtype="bfloat16")
        if released:
            optim.attach(model, scaler=scaler)
        for x in batches(5):
            casts = amp.auto_cast(enable=attached, level="O2", dtype="bfloat16")
            with casts:
                loss = loss_of(model, x)
            scaler.scale(loss).backward()
            assert not released or all(p.grad is None for p in model.parameters())
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
        runs.append((model, optim))
        scales.append(scaler.get_scale())
    assert_same(*runs)
    assert scales[0] == scales[1]


@pytest.mark.parametrize("name", ["halfstep", "torch"])
def test_a_grad_scaler_hears_of_overflows(name: str, tiny_buckets: None) -> None:
    scaler = SCALERS[name]()
    model, optim = attached(network(), True, scaler)
    grow_first_gradient(model, math.inf)
    scaler.scale(loss_of(model, batches(1)[0])).backward()
    result = scaler.step(optim)
    scaler.update()
    assert scaler.get_scale() == 32.0
    assert name == "torch" or not result
    assert optim.state[model[5].weight]["step"] == 1  # type: ignore[index]
    assert optim.state[model[0].weight]["step"] == 0  # type: ignore[index]


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_of_another_optimizer_leaves_the_overflow_to_the_scaler(fails: bool) -> None:
    models = [network(), nn.Linear(6, 3)]
    optims = [optimizers.FusedAdam(model.parameters(), lr=0.1) for model in models]
    (model, other), (optim, beside) = amp.initialize(models, optims, opt_level="O2", dtype=FP16, verbosity=0)
    scaler = SCALERS["halfstep"]()
    optim.attach(model, scaler=scaler)
    grow_first_gradient(model, math.inf)
    scaler.scale(loss_of(model, batches(1)[0])).backward()
    with (
        pytest.raises(KeyError) if fails else nullcontext(),
        amp.scale_loss(loss_of(other, batches(1)[0]), beside) as loss,
    ):
        loss.backward()
        if fails:
            raise KeyError
    assert not scaler.step(optim)
    scaler.update()
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize("name", ["halfstep", "torch"])
def test_a_scaler_that_attach_does_not_know_is_refused(name: str) -> None:
    scaler = SCALERS[name]()
    model, optim = attached(network(), True)
    scaler.scale(loss_of(model, batches(1)[0])).backward()
    with pytest.raises(UsageError, match=r"attach\(model, scaler=scaler\)"):
        scaler.step(optim)


def test_a_scaler_that_has_scaled_nothing() -> None:
    model, optim = attached(network(), True, amp.GradScaler())
    with pytest.raises(UsageError, match="No loss has been scaled"):
        loss_of(model, batches(1)[0]).backward()
    assert not optim.state


def test_the_unscaled_loss_in_a_block_steps_nothing() -> None:
    model, optim = make("Adam", level="O2", dtype=FP16, released=True, loss_scale=64.0)
    before = copy.deepcopy(model.state_dict())
    loss = loss_of(model, batches(1)[0])
    with pytest.raises(UsageError, match="instead of the scaled loss"), amp.scale_loss(loss, optim):
        loss.backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(model, optim, batches(1))
    assert optim.state[model[0].weight]["step"] == 1  # type: ignore[index]


# ---- what a backward pass can be


@pytest.mark.parametrize("options", [{}, *({"level": "O2", "dtype": BF16, "loss_scale": x} for x in (1.0, 64.0))])
def test_a_weight_that_is_used_twice_is_summed_alike(options: dict[str, Any], tiny_buckets: None) -> None:
    runs = []
    for released in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(6, 6)
        model: Any = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)
        optim: Any = optimizers.FusedSGD(model.parameters(), lr=0.1)
        if options:
            level, other = options["level"], {name: options[name] for name in ("dtype", "loss_scale")}
            model, optim = amp.initialize(model, optim, opt_level=level, verbosity=0, **other)
        optim.attach(model, release=released)
        train(model, optim, batches(3))
        runs.append((model, optim))
    assert_same(*runs)


class Checkpointed(nn.Module):
    """Two layers behind a checkpoint each; ``tied`` makes them one."""

    def __init__(self, *, reentrant: bool, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = self.first if tied else nn.Linear(6, 6)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for layer in (self.first, self.second):
            x = checkpoint(lambda value, layer=layer: layer(value).tanh(), x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("bucket", [1, 2**23])
@pytest.mark.parametrize(("reentrant", "tied"), [(True, False), (False, False), (False, True)])
def test_checkpoints(reentrant: bool, tied: bool, bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_file, "_BUCKET", bucket)
    runs = []
    for released in (False, True):
        runs.append(attached(Checkpointed(reentrant=reentrant, tied=tied), released))
        train(*runs[-1], batches(3))
    assert_same(*runs)


def test_a_weight_in_two_reentrant_checkpoints_is_refused(tiny_buckets: None) -> None:
    model, _ = attached(Checkpointed(reentrant=True, tied=True), True)
    with pytest.raises(UsageError, match="use_reentrant"):
        loss_of(model, batches(1)[0]).backward()


def test_a_second_pass_before_step_is_refused() -> None:
    model, optim = make("Adam", released=True)
    loss = loss_of(model, batches(1)[0])
    loss_of(model, batches(1)[0]).backward()
    with pytest.raises(UsageError, match=r"each step has one backward pass.*to accumulate, end .* remove\(\)"):
        loss_of(model, batches(1)[0]).backward()
    assert all(state["step"] == 1 for state in optim.state.values())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # its graph is of weights that are gone
    optim.zero_grad()
    train(model, optim, batches(1))
    assert all(state["step"] == 2 for state in optim.state.values())


def test_a_block_over_gradients_of_an_earlier_pass_is_refused() -> None:
    model, optim = make("Adam", level="O2", dtype=FP16)
    train(model, optim, batches(1))
    optim.attach(model)  # which may come while there are gradients: a loop clears them next
    before = [param.grad for param in model.parameters()]
    with pytest.raises(UsageError, match=r"call optimizer.zero_grad\(\)"):
        scaled_backward(loss_of(model, batches(1)[0]), optim)
    assert all(param.grad is grad for param, grad in zip(model.parameters(), before, strict=True))
    optim.zero_grad(set_to_none=False)
    scaled_backward(loss_of(model, batches(1)[0]), optim)
    assert all(state["step"] == 2 for state in optim.state.values())


@pytest.mark.parametrize("cleared", [False, True])
def test_a_plain_pass_over_gradients_from_before_is_refused(cleared: bool) -> None:
    model, optim = make("Adam")
    loss_of(model, batches(1)[0]).backward()
    optim.attach(model)
    if cleared:
        model.zero_grad()
    with (
        nullcontext()
        if cleared
        else pytest.raises(UsageError, match=r"before attach\(\), call optimizer.zero_grad\(\)")
    ):
        loss_of(model, batches(1)[0]).backward()
    assert bool(optim.state) == cleared


def test_a_parameter_without_a_hook_steps_in_step_once() -> None:
    runs = []
    for released in (False, True):
        model, optim = make("Adam", level="O2", dtype=BF16, released=released)
        optim.add_param_group({"params": [extra := nn.Parameter(torch.ones(3, dtype=BF16))]})
        for x in batches(2):
            scaled_step((model(x).float() * extra.float()).square().mean(), optim)
            if not released:
                optim.zero_grad()
            assert extra.grad is None
        runs.append((model, optim))
    assert_same(*runs)


def test_passes_for_different_parameters_are_one_step() -> None:
    runs = []
    for released in (False, True):
        model, optim = attached(network(), released)
        for x in batches(2):
            model[0](x).square().mean().backward()  # type: ignore[index]
            model[5](torch.ones(2, 16)).square().mean().backward()  # type: ignore[index]
            optim.step()
            model.zero_grad()
        runs.append((model, optim))
    assert_same(*runs)


def test_a_graph_of_gradients_is_refused() -> None:
    model, optim = make("Adam", released=True)
    with pytest.raises(UsageError, match="create_graph"), pytest.warns(UserWarning, match="create_graph"):
        loss_of(model, batches(1)[0]).backward(create_graph=True)
    assert not optim.state


def test_autograd_grad_steps_nothing() -> None:
    model, optim = make("Adam", released=True)
    x = batches(1)[0].requires_grad_()
    torch.autograd.grad(loss_of(model, x), [x, *model.parameters()])
    assert not optim.state


@pytest.mark.parametrize("kind", ["Adam", "torch.AdamW"])
def test_after_a_failed_pass_zero_grad_begins_anew(kind: str, tiny_buckets: None) -> None:
    model, optim = make(kind, level="O2", dtype=BF16, released=True)

    def fail(_: torch.Tensor) -> None:
        raise MemoryError

    hook = model[0].weight.register_hook(fail)  # type: ignore[index]
    with pytest.raises(MemoryError):
        train(model, optim, batches(1))
    hook.remove()
    assert all(p.grad is None for p in model.parameters())
    train(model, optim, batches(1))
    assert [optim.state[model[i].weight]["step"] for i in (0, 5)] == [1, 2]  # type: ignore[index]


# ---- around it


def test_remove_brings_the_ordinary_step_back() -> None:
    runs = []
    for released in (False, True):
        model, optim = make("Adam", level="O2", dtype=BF16)
        for turn, x in enumerate(batches(6)):
            if released and turn % 3 == 1:
                handle = optim.attach(model)
            train(model, optim, [x])
            if released and turn % 3 == 1:
                handle.remove()
                assert optim.release is None
        scaled_backward(loss_of(model, batches(1)[0]), optim)
        assert all(p.grad is not None for p in model.parameters())
        runs.append((model, optim))
    assert_same(*runs)


def test_release_false_changes_nothing() -> None:
    model, optim = with_optimizer(network(), optimizers.FusedLAMB)
    handle = optim.attach(model, release=False)
    loss_of(model, batches(1)[0]).backward()
    assert optim.release is None
    assert all(p.grad is not None for p in model.parameters())
    handle.remove()


def test_state_dicts_are_the_ordinary_ones() -> None:
    released, ordinary = (make("Adam", level="O2", dtype=BF16, released=one) for one in (True, False))
    train(*released, batches(2))
    weights, state = read_back([each.state_dict() for each in released])
    for model, optim in (ordinary, released):
        model.load_state_dict(weights)
        optim.load_state_dict(state)
        train(model, optim, batches(2))
    assert_same(released, ordinary)


def test_copies_are_not_attached() -> None:
    model, optim = make("Adam", released=True)
    train(model, optim, batches(1))
    model2, optim2 = copy.deepcopy((model, optim))
    assert optim2.release is None
    loss_of(model2, batches(1)[0]).backward()
    assert all(p.grad is not None for p in model2.parameters())
    assert all(state["step"] == 1 for state in [*optim.state.values(), *optim2.state.values()])
    read_back(model, weights_only=False)


def test_nothing_is_kept_alive() -> None:
    model, optim = make("Adam", released=True)
    train(model, optim, batches(1))
    gone = weakref.ref(optim)
    del optim
    gc.collect()
    assert gone() is None
    loss_of(model, batches(1)[0]).backward()  # ordinary again
    assert all(p.grad is not None for p in model.parameters())
    optimizers.FusedAdam(model.parameters()).attach(model).remove()


def test_unfuse_ends_it() -> None:
    model, optim = make("torch.AdamW", released=True)
    train(model, optim, batches(1))
    optimizers.unfuse(optim)
    loss_of(model, batches(1)[0]).backward()
    assert all(p.grad is not None for p in model.parameters())
    step_and_clear(optim)
    assert all(state["step"] == 2 for state in optim.state.values())


def test_a_step_that_the_scaler_leaves_out_ends_the_step() -> None:
    """Accelerate puts a ``step`` on the instance to see whether it is called."""
    model, optim = make("Adam", level="O2", dtype=FP16, released=True, loss_scale="dynamic")
    train(model, optim, batches(1))
    own = optim.step
    optim.step = lambda *args, **kwargs: own(*args, **kwargs)
    scaled_step(loss_of(model, batches(1)[0]) * math.inf, optim)
    assert optim.step_was_skipped
    train(model, optim, batches(1))
    assert all(state["step"] == 2 for state in optim.state.values())


# ---- what is refused


def test_sparse_gradients_are_refused() -> None:
    weight = nn.Parameter(torch.ones(5, 4))
    optim = optimizers.FusedSGD([weight])
    optim.attach(nn.ParameterList([weight]))
    loss = nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum()
    with pytest.raises(UsageError, match="sparse"):
        loss.backward()
    assert torch.equal(weight, torch.ones(5, 4))


def test_masters_outside_of_the_optimizer_are_refused() -> None:
    model = network()
    optims: Any = [optimizers.FusedSGD(model.parameters()) for _ in range(2)]
    model, optims = amp.initialize(model, optims, opt_level="O2", verbosity=0)
    with pytest.raises(UsageError, match="kept outside"):
        optims[0].attach(model)


def test_a_wrapper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optim = make("Adam")
    monkeypatch.setattr("halfstep.optimizers.release_checks.reduced_params", list)
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        optim.attach(model)
    monkeypatch.undo()
    optim.attach(model)
    monkeypatch.setattr("halfstep.optimizers.release_checks.reduced_params", list)
    monkeypatch.setattr("halfstep.optimizers.release.REDUCTIONS", [None])
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        loss_of(model, batches(1)[0]).backward()
    assert not optim.state
