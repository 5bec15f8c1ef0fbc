"""An optimizer that comes in a wrapper has masters, whatever the wrapper does, and whoever calls its step."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import amp, optimizers
from halfstep.core.errors import UsageError
from tests.support.worlds import advance, scaled_step, start_amp, with_optimizer

RATE, STEPS = 1e-4, 20  # 16-bit weights of 1.0 would lose each of these updates


class Imitating:
    """Of a class made of its own and the optimizer's, with everything it does not have from the optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Imitating", (type(self), type(optimizer)), {})

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step()

    def state_dict(self) -> Any:
        return self._optimizer.state_dict()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class Copying(Imitating):
    """With the same ``__dict__`` as well."""

    def __init__(self, optimizer: Any) -> None:
        vars(self).update(vars(optimizer))
        super().__init__(optimizer)


class Forwarding(torch.optim.Optimizer):
    """With properties for what the optimizer has."""

    def __init__(self, optimizer: Any) -> None:
        self.inner = optimizer

    param_groups = property(lambda self: self.inner.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.inner.state)  # type: ignore[assignment]
    defaults = property(lambda self: self.inner.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:
        return self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad()

    def state_dict(self) -> Any:
        return self.inner.state_dict()


class Blending(Forwarding):
    """Its step writes to weights, too, from what it keeps in the optimizer's state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        super().step()
        before = [self.state[p].setdefault("first", p.clone()) for p in params]
        torch._foreach_lerp_(params, before, 0.25)


class Lookahead(torch.optim.Optimizer):
    """Shares the groups and has a state of its own, which its step writes into weights."""

    def __init__(self, optimizer: Any) -> None:
        self.base = optimizer
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults
        self.state = defaultdict(dict)
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1
        for p in [p for group in self.param_groups for p in group["params"] if self.count % 3 == 0]:
            slow = self.state[p].setdefault("slow", p.clone())
            p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


class _Distributed(torch.optim.Optimizer):
    """The methods of Horovod's and BytePS's optimizers, for a class that is made below the optimizer's own."""

    synchronized = False  # torch copies no attributes of an optimizer
    calls = 0

    def __init__(self, params: Any) -> None:
        super(self.__class__, self).__init__(params)

    def synchronize(self) -> None:
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            p.grad.mul_(1.0)
        self.synchronized = True

    def step(self, closure: Any = None) -> Any:
        if not self.synchronized:
            self.synchronize()
        self.synchronized = False
        self.calls += 1
        return super(self.__class__, self).step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super(self.__class__, self).zero_grad(*args, **kwargs)


def distributed(optimizer: Any) -> Any:
    """As ``horovod.torch.DistributedOptimizer`` does."""
    made = type(optimizer.__class__.__name__, (optimizer.__class__,), dict(_Distributed.__dict__))
    return made(optimizer.param_groups)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: optimizer,
    "imitating": Imitating,
    "copying": Copying,
    "forwarding": Forwarding,
    "twice": lambda optimizer: Forwarding(Imitating(optimizer)),
    "Horovod": distributed,
    "LARC": lambda optimizer: optimizers.LARC(optimizer, trust_coefficient=0.001),
    "blending": Blending,
    "lookahead": Lookahead,
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=RATE, momentum=0.5),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=RATE),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=RATE),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=RATE),
    "FusedSGD": lambda params: optimizers.FusedSGD(params, lr=RATE),
}


def start(wrapper: str, name: str, level: str, **options: Any) -> tuple[nn.Module, Any]:
    model = nn.Linear(8, 8, bias=False)
    nn.init.ones_(model.weight)
    return start_amp(model, lambda params: WRAPPERS[wrapper](OPTIMIZERS[name](params)), level, **options)


def train(model: Any, optimizer: Any, door: str, steps: int = STEPS) -> None:
    scaler = amp.GradScaler(init_loss_scaling=8.0) if door == "GradScaler" else None
    for _ in range(steps):
        advance(model(torch.ones(2, 8)).float().sum(), optimizer, scaler)


def truth(model: Any) -> torch.Tensor:
    return model.state_dict()["weight"].float().clone()  # type: ignore[no-any-return]


@pytest.mark.parametrize("door", ["scale_loss", "GradScaler"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_optimizer_trains_at_o2_as_in_fp32(wrapper: str, name: str, door: str) -> None:
    model, optimizer = start(wrapper, name, "O2", dtype=torch.bfloat16, loss_scale=1.0)
    plain, plain_optimizer = start(wrapper, name, "O0")
    train(model, optimizer, door)
    train(plain, plain_optimizer, door)
    assert truth(plain).max() < 1.0 - RATE / 2
    torch.testing.assert_close(truth(model), truth(plain), rtol=0.0, atol=RATE / 100)
    assert [p for group in optimizer.param_groups for p in group["params"]] == list(model.parameters())
    assert len(optimizer.state_dict()["state"]) == len(plain_optimizer.state_dict()["state"])


@pytest.mark.parametrize("wrapper", ["none", "imitating", "forwarding", "Horovod", "LARC", "blending", "lookahead"])
def test_a_skipped_step_changes_nothing_in_a_wrapper_either(wrapper: str) -> None:
    model, optimizer = start(wrapper, "AdamW", "O2", dtype=torch.float16, loss_scale="dynamic")
    train(model, optimizer, "scale_loss", 3)
    before = truth(model)
    scaled_step(model(torch.ones(2, 8)).float().sum() * float("inf"), optimizer)
    assert torch.equal(truth(model), before)


def test_a_wrapper_s_state_is_loaded_again() -> None:
    runs = [start("lookahead", "AdamW", "O2", dtype=torch.bfloat16, loss_scale=1.0) for _ in range(2)]
    for model, optimizer in runs:
        train(model, optimizer, "scale_loss", 3)
    model, optimizer = runs[0]
    optimizer.load_state_dict(optimizer.state_dict())
    for model, optimizer in runs:
        train(model, optimizer, "scale_loss", 2)
    assert torch.equal(truth(runs[0][0]), truth(runs[1][0]))


def test_an_optimizer_and_its_wrapper_are_one() -> None:
    model, inner = with_optimizer(nn.Linear(8, 8), torch.optim.SGD, lr=RATE)
    with pytest.raises(UsageError, match="twice"):
        amp.initialize(model, [inner, optimizers.LARC(inner)], opt_level="O2", verbosity=0)
    amp.initialize(model, optimizers.LARC(inner), opt_level="O2", verbosity=0)
    with pytest.raises(UsageError, match="can be prepared only once"):
        amp.initialize(nn.Linear(8, 8), inner, opt_level="O2", verbosity=0)


@pytest.mark.parametrize("name", ["AdamW", "FusedAdam"])
def test_an_optimizer_in_larc_keeps_its_moments_in_the_dtype_that_is_asked_for(name: str) -> None:
    model, optimizer = start("LARC", name, "O2", dtype=torch.bfloat16, loss_scale=1.0, state_dtype=torch.bfloat16)
    train(model, optimizer, "scale_loss", 1)
    assert optimizer.state[model.weight]["exp_avg"].dtype is torch.bfloat16


def test_an_optimizer_that_holds_itself_is_no_wrapper() -> None:
    model, optimizer = with_optimizer(nn.Linear(8, 8, bias=False), torch.optim.SGD, lr=RATE)
    optimizer.me = optimizer
    optimizer.wrapper = Forwarding(optimizer)
    amp.initialize(model, optimizer, opt_level="O2", dtype=torch.bfloat16, loss_scale=1.0, verbosity=0)
    train(model, optimizer, "scale_loss")
    assert amp.has_masters(optimizer)


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_horovod_s_kind_is_scheduled_copied_and_pickled(name: str, level: str) -> None:
    model, optimizer = start("Horovod", name, level, dtype=torch.bfloat16, loss_scale=1.0)
    own = optimizer.__class__
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, "scale_loss", 2)
    scheduler.step()
    twin, twin_optimizer, state = copy.deepcopy((model, optimizer, optimizer.state_dict()))
    assert twin_optimizer.__class__ is own
    assert isinstance(twin_optimizer, own)
    assert not issubclass(own, type(optimizer))
    twin_optimizer.load_state_dict(state)
    for each, its_optimizer in ((model, optimizer), (twin, twin_optimizer)):
        before = its_optimizer.calls
        train(each, its_optimizer, "scale_loss", 2)
        assert its_optimizer.calls == before + 2
    assert torch.equal(truth(twin), truth(model))


def test_a_class_of_horovod_s_kind_is_made_before_initialize() -> None:
    """Of the attached optimizer's class it would have the methods, and no masters to use."""
    _model, optimizer = start("none", "AdamW", "O2", dtype=torch.bfloat16, loss_scale=1.0)
    with pytest.raises(UsageError, match=r"of a AdamW.*before amp\.initialize"):
        distributed(optimizer)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_wrapper_that_was_attached_is_asked_and_not_the_optimizer_in_it(wrapper: str) -> None:
    model, optimizer = start(wrapper, "AdamW", "O2", dtype=torch.float16)
    assert "HS107" not in {finding.code for finding in halfstep.check(model, optimizer)}  # it has a loss scale
    with pytest.raises(UsageError, match="can be prepared only once"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.raises(UsageError, match=r"already prepared by amp\.initialize"):
        amp.initialize(nn.Linear(8, 8), optimizer, opt_level="O2", verbosity=0)


class Counting(torch.optim.SGD):
    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super(type(self), self).step(closure)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_step_that_calls_the_one_above_its_own_type_does_not_call_itself(level: str) -> None:
    model: Any = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    model, optimizer = start_amp(model, Counting, level, lr=0.5)
    scaled_step(model(torch.ones(1, 2)).sum(), optimizer)
    assert optimizer.calls == 1
    assert torch.equal(next(iter(amp.master_params(optimizer))), before - 0.5)
