"""An optimizer stays an ordinary one, and a parameter has one gradient: what the ecosystem around the engine relies on.

With SGD at a rate of 1 the update is the gradient that was stepped with. ``truth`` is what the masters hold.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from halfstep import amp, optimizers
from halfstep.core.errors import UsageError
from halfstep.stepping.attached import attached_to
from tests.support.backends import needs_compiler
from tests.support.worlds import (
    BF16,
    LEVELS,
    advance,
    in_both_halves,
    scaled_backward,
    step_and_clear,
    with_both_masters,
    with_optimizer,
)

TORCH = ["SGD", "Adam", "AdamW", "RMSprop", "NAdam", "RAdam", "Adagrad", "Adadelta", "Adamax", "Rprop", "ASGD"]
TORCH += ["Adafactor"]
FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]


def net(batchnorm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(16)] if batchnorm else []
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.ReLU(), nn.Linear(16, 4))


def data(t: int) -> torch.Tensor:
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(t))


def loss_of(model: Any, t: int = 0) -> torch.Tensor:
    return (model(data(t)).float() - 1).square().mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def torch_optimizer(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    options = {"momentum": 0.9} if name == "SGD" else {}
    return lambda params: getattr(torch.optim, name)(params, lr=0.01, **options)


def start(
    half: torch.dtype = BF16,
    fused: bool = True,
    make: Callable[[Any], Any] = sgd,
    model: Any = None,
    level: str = "O2",
    **options: Any,
) -> tuple[Any, Any]:
    model = net() if model is None else model
    options = {"loss_scale": 128.0, "verbosity": 0} | options
    return amp.initialize(model, make(model.parameters()), opt_level=level, dtype=half, fused=fused, **options)


def backward(model: Any, optimizer: Any, t: int = 0, factor: float = 1.0) -> None:
    scaled_backward(loss_of(model, t) * factor, optimizer)


def train(model: Any, optimizer: Any, steps: Iterable[int]) -> None:
    for t in steps:
        backward(model, optimizer, t)
        step_and_clear(optimizer)


def truth(model: Any) -> torch.Tensor:
    """The weights in fp32, as ``state_dict`` tells them: those of the masters."""
    saved = model.state_dict()
    return torch.cat([saved[name].detach().float().flatten() for name, _ in model.named_parameters()])


def gradient(half: torch.dtype, t: int = 0, batchnorm: bool = False, scale: float = 128.0) -> torch.Tensor:
    """By hand: what a 16-bit model without an optimizer gets."""
    model = amp.initialize(net(batchnorm), opt_level="O2", dtype=half, verbosity=0)
    (loss_of(model, t) * scale).backward()
    return torch.cat([p.grad.float().flatten() / scale for p in model.parameters()])


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.01) -> None:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance * float(expected.abs().max()))


# ---- rows 1 to 3: whatever is done to the gradient, through whichever door, is what the step takes


def by_scale_loss(model: Any, optimizer: Any) -> Callable[[], Any]:
    backward(model, optimizer)
    return optimizer.step


def by_plain_backward(model: Any, optimizer: Any) -> Callable[[], Any]:
    loss_of(model).backward()
    return optimizer.step


def by_scaler(scaler: Any) -> Callable[[Any, Any], Callable[[], Any]]:
    def go(model: Any, optimizer: Any) -> Callable[[], Any]:
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(optimizer)
        return lambda: scaler.step(optimizer)

    return go


def replace(params: list[Any]) -> None:
    for p in params:
        p.grad = p.grad * 0.5


PASSES: dict[str, Callable[[], Callable[[Any, Any], Callable[[], Any]]]] = {
    "scale_loss": lambda: by_scale_loss,
    "backward": lambda: by_plain_backward,
    "GradScaler": lambda: by_scaler(amp.GradScaler(init_loss_scaling=64.0)),
    "torch's GradScaler": lambda: by_scaler(torch.amp.GradScaler("cpu", init_scale=64.0)),
}
DOORS: dict[str, Callable[[Any, Any], Any]] = {
    "model": lambda model, optimizer: model.parameters(),
    "masters": lambda model, optimizer: amp.master_params(optimizer),
    "groups": lambda model, optimizer: [p for group in optimizer.param_groups for p in group["params"]],
}
EDITS: dict[str, tuple[Callable[[list[Any]], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "norm": (lambda params: clip_grad_norm_(params, 0.1), lambda g: g * (0.1 / g.norm())),
    "value": (lambda params: clip_grad_value_(params, 0.02), lambda g: g.clamp(-0.02, 0.02)),
    "in place": (lambda params: [p.grad.mul_(0.5) for p in params], lambda g: g * 0.5),
    "replaced": (replace, lambda g: g * 0.5),
}


@pytest.mark.exhaustive
@in_both_halves
@with_both_masters
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("door", [*DOORS, "masters listed before"])
@pytest.mark.parametrize("how", PASSES)
def test_the_step_takes_what_was_made_of_the_gradient(
    how: str, door: str, edit: str, fused: bool, half: torch.dtype
) -> None:
    model, optimizer = start(half, fused, loss_scale=1.0 if how == "backward" else 128.0)
    before, expected, (change, changed) = truth(model), gradient(half), EDITS[edit]
    params = list(amp.master_params(optimizer))
    step = PASSES[how]()(model, optimizer)
    if door in DOORS:
        params = list(DOORS[door](model, optimizer))
    answer = change(params)
    if edit == "norm":
        assert float(answer) == pytest.approx(float(expected.norm()), rel=0.01)
    step()
    near(before - truth(model), changed(expected))


@in_both_halves
@with_both_masters
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_the_step_takes_the_gradient_once_also_when_clipped_at_a_scale_of_one(
    scale: float, fused: bool, half: torch.dtype
) -> None:
    model, optimizer = start(half, fused, loss_scale=scale)
    for _ in range(2):  # the second batch finds nothing of the first
        before = truth(model)
        backward(model, optimizer)
        clip_grad_norm_(model.parameters(), 0.1)
        step_and_clear(optimizer)
        assert float((before - truth(model)).norm()) == pytest.approx(0.1, rel=0.01)


@in_both_halves
@with_both_masters
@pytest.mark.parametrize("enable", [True, False])
def test_grad_scaler_clips_a_decorated_optimizer(enable: bool, fused: bool, half: torch.dtype) -> None:
    model = net()
    model, optimizer = amp.decorate(model, sgd(model.parameters()), level="O2", dtype=half, fused=fused)
    before, scaler = truth(model), amp.GradScaler(enable=enable, init_loss_scaling=64.0)
    with amp.auto_cast(level="O2", dtype=half):
        loss = loss_of(model)
    scaler.scale(loss).backward()
    norm = scaler.clip_grad_norm_(optimizer, 0.1)
    assert float(norm) == pytest.approx(float(gradient(half).norm()), rel=0.02)
    scaler.step(optimizer)
    assert float((before - truth(model)).norm()) == pytest.approx(0.1, rel=0.01)


# ---- an ordinary optimizer


@pytest.mark.exhaustive
@in_both_halves
@with_both_masters
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", TORCH)
def test_the_optimizer_is_an_ordinary_one(name: str, level: str, fused: bool, half: torch.dtype) -> None:
    plain = torch_optimizer(name)(net().parameters())
    for p in plain.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    plain.step()
    model, given = with_optimizer(net(), torch_optimizer(name))
    model, optimizer = start(half, fused, lambda _: given, model, level)
    train(model, optimizer, range(2))
    assert optimizer is given
    assert isinstance(optimizer, getattr(torch.optim, name))
    assert not {"step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"} & set(vars(optimizer))
    params = list(model.parameters())
    assert all(p is q for p, q in zip(optimizer.param_groups[0]["params"], params, strict=True))
    assert {id(p) for p in optimizer.state} <= {id(p) for p in params}
    ours, theirs = optimizer.state_dict(), plain.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    kept = {"remainder", "master"}  # what a fused step adds: where the fp32 value of a weight is
    assert [set(s) - kept for s in ours["state"].values()] == [set(s) for s in theirs["state"].values()]
    assert ours["param_groups"][0].keys() == theirs["param_groups"][0].keys()
    assert hasattr(optimizer, "_amp_stash")


@needs_compiler
@pytest.mark.parametrize("name", FUSED)
def test_only_fused_false_runs_the_step_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = "adam" if name == "AdamW" else name.lower()
    module, calls = sys.modules[f"torch.optim.{function}"], []
    original = getattr(module, function)
    monkeypatch.setattr(module, function, lambda *args, **options: calls.append(name) or original(*args, **options))
    train(*start(fused=True, make=torch_optimizer(name)), range(2))
    assert calls == []
    train(*start(fused=False, make=torch_optimizer(name)), range(2))
    assert calls == [name] * 2


def by_hand(name: str, half: torch.dtype, steps: int, scale: float = 128.0) -> torch.Tensor:
    model = net()
    masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    optimizer = torch_optimizer(name)(masters)
    model = amp.initialize(model, opt_level="O2", dtype=half, verbosity=0)
    for t in range(steps):
        with torch.no_grad():
            for p, q in zip(model.parameters(), masters, strict=True):
                p.copy_(q)
        (loss_of(model, t) * scale).backward()
        for p, q in zip(model.parameters(), masters, strict=True):
            q.grad, p.grad = p.grad.float() / scale, None
        optimizer.step()
    return torch.cat([q.detach().flatten() for q in masters])


@in_both_halves
@pytest.mark.parametrize("name", TORCH)
def test_plain_masters_are_bit_for_bit_those_kept_by_hand(name: str, half: torch.dtype) -> None:
    model, optimizer = start(half, False, torch_optimizer(name))
    train(model, optimizer, range(8))
    assert torch.equal(truth(model), by_hand(name, half, 8))


@in_both_halves
@pytest.mark.parametrize("name", FUSED)
def test_fused_masters_are_those_kept_by_hand_but_for_the_last_bits(name: str, half: torch.dtype) -> None:
    model, optimizer = start(half, True, torch_optimizer(name))
    train(model, optimizer, range(8))
    near(truth(model), by_hand(name, half, 8), 1e-6)


# ---- row 8: calls by the class, and wrappers that make them


class FabricOptimizer:
    """As Lightning Fabric wraps: the same ``__dict__``, a class made of its own and the optimizer's."""

    def __init__(self, optimizer: Any) -> None:
        self.__dict__ = {k: v for k, v in vars(optimizer).items() if k not in ("state_dict", "step", "__del__")}
        self.__class__ = type("Fabric" + type(optimizer).__name__, (type(self), type(optimizer)), {})
        self.wrapped = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.wrapped.step()


CALLS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "Optimizer.zero_grad": (lambda m, o: torch.optim.Optimizer.zero_grad(o), lambda o: o.step()),
    "type(o).zero_grad": (lambda m, o: type(o).zero_grad(o), lambda o: o.step()),
    "type(o).step": (lambda m, o: o.zero_grad(), lambda o: type(o).step(o)),
    "to zeros": (lambda m, o: o.zero_grad(set_to_none=False), lambda o: o.step()),
    "model.zero_grad": (lambda m, o: m.zero_grad(), lambda o: o.step()),
    "p.grad = None": (lambda m, o: [setattr(p, "grad", None) for p in m.parameters()], lambda o: o.step()),
    "Fabric": (lambda m, o: FabricOptimizer(o).zero_grad(), lambda o: FabricOptimizer(o).step()),
}


@pytest.mark.filterwarnings("ignore:.*did not come through amp.scale_loss:UserWarning")
@in_both_halves
@with_both_masters
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("call", CALLS)
def test_calls_by_the_class_and_through_wrappers(call: str, scaled: bool, fused: bool, half: torch.dtype) -> None:
    results, (clear, step) = [], CALLS[call]
    for way in ((lambda m, o: o.zero_grad(), lambda o: o.step()), (clear, step)):
        model, optimizer = start(half, fused, torch_optimizer("SGD"), loss_scale=128.0 if scaled else 1.0)
        for t in range(3):
            backward(model, optimizer, t) if scaled else loss_of(model, t).backward()
            way[1](optimizer)
            way[0](model, optimizer)
        results.append(truth(model))
    assert not torch.equal(results[0], truth(net()))
    assert torch.equal(*results)


class WithoutArguments(torch.optim.SGD):
    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad(set_to_none=False)


CLEARED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{name: torch_optimizer(name) for name in FUSED},
    "WithoutArguments": lambda params: WithoutArguments(params, lr=0.01),
    **{
        f"{name}({none})": lambda params, name=name, none=none: getattr(optimizers, name)(params, set_grad_none=none)
        for name in ("FusedAdagrad", "FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedSGD")
        for none in (True, False)
    },
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", CLEARED.values(), ids=CLEARED)
def test_zero_grad_leaves_what_it_leaves_without_amp(make: Any, level: str) -> None:
    def grads(model: nn.Module, optimizer: Any, **how: bool) -> list[float | None]:
        loss_of(model).backward()
        optimizer.zero_grad(**how)
        return [None if p.grad is None else float(p.grad.abs().max()) for p in model.parameters()]

    model = net()
    plain = model, make(model.parameters())
    amped = start(make=make, level=level)
    assert grads(*amped) == grads(*plain)
    if not isinstance(plain[1], WithoutArguments):
        for none in (True, False):
            assert grads(*amped, set_to_none=none) == [None if none else 0.0] * 4


# ---- row 7: torch's own scaler


@in_both_halves
@with_both_masters
@pytest.mark.parametrize("batchnorm", [True, False])
@pytest.mark.parametrize("unscale", [True, False])
def test_torch_s_grad_scaler_drives_it(unscale: bool, batchnorm: bool, fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused, model=net(batchnorm))
    scaler, weights = torch.amp.GradScaler("cpu", init_scale=1024.0), [truth(model)]
    for factor in (float("inf"), 1.0, float("nan")):
        scaler.scale(loss_of(model) * factor).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights.append(truth(model))
    assert scaler.get_scale() == 256.0
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[3])
    near(weights[1] - weights[2], gradient(half, batchnorm=batchnorm))


# ---- rows 12 and 13: was the step skipped?


def skipped_says_accelerate(optimizer: Any, scaler: Any) -> bool:
    """Accelerate puts a step of its own on the optimizer and looks whether the scaler has called it."""
    called, original = [], optimizer.step
    optimizer.step = lambda *args, **options: called.append(True) or original(*args, **options)
    scaler.step(optimizer)
    scaler.update()
    optimizer.step = original
    return not called


@in_both_halves
@with_both_masters
@pytest.mark.parametrize("ours", [True, False])
def test_accelerate_learns_of_a_skip(ours: bool, fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused)
    scaler = amp.GradScaler(init_loss_scaling=64.0) if ours else torch.amp.GradScaler("cpu", init_scale=64.0)
    for factor, skipped in ((1.0, False), (float("inf"), True), (1.0, False)):
        before = truth(model)
        scaler.scale(loss_of(model) * factor).backward()
        assert skipped_says_accelerate(optimizer, scaler) is skipped
        assert torch.equal(before, truth(model)) is skipped
        optimizer.zero_grad()


@in_both_halves
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_step_on_the_instance_is_called_at_every_step_that_is_taken(when: str, half: torch.dtype) -> None:
    """As a profiler or a wrapper puts it there, before ``amp.initialize`` or after it."""
    called: list[str] = []

    def counted(optimizer: Any) -> Any:
        original = optimizer.step

        def step(*args: Any, **options: Any) -> Any:
            called.append("step")
            return original(*args, **options)

        optimizer.step = step
        return optimizer

    def make(params: Any) -> Any:
        return counted(sgd(params)) if when == "before" else sgd(params)

    model, optimizer = start(half, fused=False, make=make)
    if when == "after":
        optimizer = counted(optimizer)
    weights = truth(model)
    train(model, optimizer, [0])
    assert called == ["step"]
    near(weights - truth(model), gradient(half), 0.05)
    weights = truth(model)
    backward(model, optimizer, 1, float("inf"))
    optimizer.step()
    assert torch.equal(truth(model), weights)
    assert called == ["step"] * (1 if when == "before" else 2)


def test_an_optimizer_may_change_what_it_tells_scalers() -> None:
    model, optimizer = start(fused=False, make=sgd)
    assert not optimizer._step_supports_amp_scaling
    optimizer._step_supports_amp_scaling = True
    assert optimizer._step_supports_amp_scaling
    assert attached_to(optimizer).supports_found_inf  # type: ignore[union-attr]
    optimizer.step = lambda: None
    assert not optimizer._step_supports_amp_scaling, "who put a step there wants to see whether it is called"
    del optimizer.step
    assert optimizer._step_supports_amp_scaling
    optimizer._step_supports_amp_scaling = False
    before = truth(model)
    train(model, optimizer, [0])
    assert not torch.equal(truth(model), before)


# ---- parameters that come, go and are written to


class ClearsFirst(torch.optim.SGD):
    """Takes its gradient from a closure alone, as optimizers of two passes do."""

    def step(self, closure: Any = None) -> Any:
        self.zero_grad()
        return super().step(closure)


class ClearsAfter(torch.optim.SGD):
    """Leaves no gradients to the next pass."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None
        return loss


@pytest.mark.parametrize("level", LEVELS)
@in_both_halves
def test_an_optimizer_may_clear_gradients_in_its_step(half: torch.dtype, level: str) -> None:
    first = start(half, make=lambda params: ClearsFirst(params, lr=0.1), level=level)
    after = start(half, make=lambda params: ClearsAfter(params, lr=0.1), level=level)
    plain = start(half, make=lambda params: torch.optim.SGD(params, lr=0.1), level=level, fused=False)
    for t in range(3):
        backward(*first, 9)  # is cleared
        first[1].step(lambda t=t: backward(*first, t))
        backward(*after, t)
        after[1].step()
        assert all(p.grad is None for p in after[0].parameters())
    train(*plain, range(3))
    assert torch.equal(truth(first[0]), truth(plain[0]))
    assert torch.equal(truth(after[0]), truth(plain[0]))


class OwnDict(torch.optim.SGD):
    """Keeps something for each parameter in a dict of its own."""

    def step(self, closure: Any = None) -> Any:
        if not hasattr(self, "own"):
            self.own = dict.fromkeys(self.seen, 1.0)
        for group in self.param_groups:
            group["lr"] = sum(self.own[p] for p in group["params"])
        return super().step(closure)


@in_both_halves
def test_a_weight_that_a_step_looks_up_in_a_dict_of_its_own_is_an_error_that_says_so(half: torch.dtype) -> None:
    model, optimizer = start(half, make=lambda params: OwnDict(params, lr=0.1))
    optimizer.seen = list(model.parameters())
    backward(model, optimizer)
    before = truth(model)
    with pytest.raises(UsageError, match=r"OwnDict\.step looked up a weight .* Keep .* in self\.state\[p\]"):
        optimizer.step()
    assert torch.equal(truth(model), before)
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())


@in_both_halves
@with_both_masters
def test_a_16_bit_parameter_added_later_gets_a_master(fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused)
    extra = nn.Parameter(torch.ones(3, dtype=half))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    assert optimizer.param_groups[1]["params"][0] is extra
    for t in range(4):
        advance(loss_of(model, t) + extra.float().sum() * 2.0**-11, optimizer)
    *_, master = amp.master_params(optimizer)
    assert torch.equal(master.detach(), torch.full((3,), 1 - 4 * 2.0**-12)), "each step is below half a bfloat16 ulp"


@in_both_halves
@with_both_masters
def test_an_unfrozen_parameter_trains_from_its_fp32_weight(fused: bool, half: torch.dtype) -> None:
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = start(half, fused, model=model)
    train(model, optimizer, [0])
    assert torch.equal(model.state_dict()["0.weight"].float(), model[0].weight.float())
    model[0].requires_grad_(True)
    before = truth(model)
    backward(model, optimizer, 1)
    clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    assert float((before - truth(model)).norm()) == pytest.approx(1e-3, rel=0.02)
    assert not torch.equal(before[:128], truth(model)[:128])


@in_both_halves
@with_both_masters
def test_a_weight_that_was_frozen_later_keeps_its_master_in_a_copy(fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused)
    train(model, optimizer, [0])
    model[0].requires_grad_(False)
    before = truth(model)
    assert not torch.equal(before, torch.cat([p.detach().float().flatten() for p in model.parameters()]))
    again, other = copy.deepcopy((model, optimizer))
    assert torch.equal(truth(again), before)
    train(again, other, [1])
    assert torch.equal(truth(again)[:128], before[:128])


@in_both_halves
@with_both_masters
def test_parameters_taken_out_of_a_group_rest(fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused)
    train(model, optimizer, [0])
    optimizer.param_groups[0]["params"] = list(model[2].parameters())
    before, first = truth(model), 8 * 16 + 16
    backward(model, optimizer, 1)
    clip_grad_norm_(model[2].parameters(), 1e-3)
    optimizer.step()
    assert torch.equal(before[:first], truth(model)[:first])
    assert float((before - truth(model)).norm()) == pytest.approx(1e-3, rel=0.02)


@torch.no_grad()
def clamp(model: Any) -> None:
    for p in model.parameters():
        p.clamp_(-0.0625, 0.0625)


WRITES: dict[str, Callable[[Any], Any]] = {
    "p.clamp_": clamp,
    "p.data.clamp_": lambda model: [p.data.clamp_(-0.0625, 0.0625) for p in model.parameters()],
    "p.data =": lambda model: [setattr(p, "data", p.data.clamp(-0.0625, 0.0625)) for p in model.parameters()],
    "load_state_dict": lambda model: model.load_state_dict(
        {name: value.clamp(-0.0625, 0.0625) for name, value in model.state_dict().items()}
    ),
}


@in_both_halves
@with_both_masters
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_the_weights_reaches_their_masters(write: str, fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    train(model, optimizer, range(2))
    expected = truth(model).clamp(-0.0625, 0.0625)
    WRITES[write](model)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, range(2))
    if fused and half is torch.bfloat16:  # the lower half of a split master stays beside what is written to the upper
        torch.testing.assert_close(truth(model), expected, rtol=2.0**-8, atol=0.0)
    else:
        assert torch.equal(truth(model), expected), "what was not clamped has kept all its bits"
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), expected.to(half))


# ---- rows 4, 5, 6 and 19: what cannot be right is an error that says what to do


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@in_both_halves
@pytest.mark.parametrize("masters", [None, False])
def test_fused_sgd_of_torch_moves_all_weights(masters: bool | None, half: torch.dtype, level: str) -> None:
    """Its fused step on 16-bit weights of a CPU moves few of them (torch 2.13). It is told to do without."""
    weights = []
    for fused in (True, False):
        torch.manual_seed(0)
        model, optimizer = with_optimizer(nn.Linear(12, 160), torch.optim.SGD, lr=0.1, momentum=0.9, fused=fused)
        options: dict[str, Any] = {} if level == "O0" else {"dtype": half}
        if level == "O2":
            options["master_weights"] = masters
        amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0, **options)
        broken = level == "O3" or (level == "O2" and masters is False)
        saved = optimizer.state_dict()
        optimizer.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "fused": fused}]})
        assert optimizer.param_groups[0]["fused"] is optimizer.defaults["fused"] is (fused and not broken)
        for factor in (1.0, 1.0, float("inf"), 1.0):
            advance(model(torch.ones(4, 12)).float().square().mean() * factor, optimizer)
        assert amp.steps_skipped(optimizer) == 1
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert weights[0].isfinite().all()
    torch.testing.assert_close(*weights, rtol=2e-2, atol=1e-3)
