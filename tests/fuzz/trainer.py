"""A random trainer: anything a loop may do, in any order, against the same by hand, to the bit."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from halfstep import DynamicLossScale, amp, optimizers
from halfstep.kernels import backend_for
from tests.support.worlds import scaled_backward

from .by_hand import ByHand, Net

__all__ = ["Trainer"]

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "SGD nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD dampening": (torch.optim.SGD, {"momentum": 0.5, "dampening": 0.5}),
    "Adam": (torch.optim.Adam, {"eps": 1e-4, "weight_decay": 0.01}),
    "Adam amsgrad": (torch.optim.Adam, {"eps": 1e-4, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"eps": 1e-4}),
    "AdamW maximize": (torch.optim.AdamW, {"eps": 1e-4, "maximize": True}),
    "Adagrad": (torch.optim.Adagrad, {"eps": 1e-4, "lr_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"eps": 1e-4, "momentum": 0.5, "centered": True}),
    "NAdam": (torch.optim.NAdam, {"eps": 1e-4}),
    "RAdam": (torch.optim.RAdam, {"eps": 1e-4}),
    "Adamax": (torch.optim.Adamax, {"eps": 1e-4}),
    "Adadelta": (torch.optim.Adadelta, {"eps": 1e-4}),
    "Rprop": (torch.optim.Rprop, {}),
    "ASGD": (torch.optim.ASGD, {}),
    "FusedAdam": (optimizers.FusedAdam, {"eps": 1e-4, "weight_decay": 0.01}),
    "FusedSGD": (optimizers.FusedSGD, {"momentum": 0.9}),
    "FusedAdagrad": (optimizers.FusedAdagrad, {"eps": 1e-4}),
}


@dataclass(frozen=True)
class Setup:
    """How a training is set up."""

    level: str
    half: torch.dtype
    optimizer: str
    fused: bool
    groups: int
    norm: str | None
    shared: bool
    scale: float
    interval: int | None
    losses: int
    seed: int
    face: str = "Apex"

    @property
    def scaler(self) -> bool:
        """Whether ``amp.decorate``, ``amp.auto_cast`` and an ``amp.GradScaler`` do it, in the way of Paddle."""
        return self.face == "Paddle" and (self.level == "O1" or (self.level == "O2" and self.norm is None))

    @property
    def neutral(self) -> bool:
        """Whether nothing is scaled or looked at."""
        return self.interval is None and self.scale == 1.0


SETUPS = st.builds(
    Setup,
    level=st.sampled_from(["O0", "O1", "O2", "O2", "O3"]),
    half=st.sampled_from([torch.float16, torch.bfloat16]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    fused=st.booleans(),
    groups=st.integers(1, 3),
    norm=st.sampled_from([None, "batch", "layer"]),
    shared=st.booleans(),
    scale=st.sampled_from([1.0, 8.0, 1024.0]),
    interval=st.sampled_from([None, 1, 3]),
    losses=st.integers(1, 2),
    seed=st.integers(0, 3),
    face=st.sampled_from(["Apex", "Paddle"]),
)


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 5, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def grouped(params: list[Any], count: int) -> list[dict[str, Any]]:
    """Parameters in groups, each with a learning rate of its own."""
    return [{"params": params[i::count], "lr": 0.01 * (i + 1)} for i in range(count)]


def late_group(params: Iterable[Any]) -> dict[str, Any]:
    """The group that is added to the training later."""
    return {"params": list(params), "lr": 0.02}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, where NaN is equal to NaN."""
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


class Trainer(RuleBasedStateMachine):
    """One training, by ``amp.initialize`` and by hand."""

    cases = 0
    steps = 20
    phases = tuple(Phase)

    @initialize(setup=SETUPS)
    def begin(self, setup: Setup) -> None:
        """Bring the model up."""
        Trainer.cases += 1
        self.setup = setup
        torch.manual_seed(setup.seed)
        net = Net(setup.norm, setup.shared)
        cls, options = OPTIMIZERS[setup.optimizer]
        can_fuse = setup.level == "O2" and setup.fused and cls.__module__.startswith("torch")

        def make(twin: Net, place: Any) -> torch.optim.Optimizer:
            made = cls(grouped([place(p) for p in twin.first_parameters()], setup.groups), **options)
            return optimizers.fuse(made) if can_fuse and optimizers.can_fuse(made) else made

        ours = cls.__module__.startswith("halfstep")
        probe = cls(list(net.parameters()), **options)
        self.fused_masters = setup.level == "O2" and (ours or (can_fuse and optimizers.can_fuse(probe)))
        split = self.fused_masters and setup.half is torch.bfloat16 and backend_for("cpu") not in ("eager", "torch")
        scales = [setup.scale] * setup.losses
        self.hand = ByHand(net, setup.level, setup.half, make, scales, setup.interval, split)
        self.model, self.optimizer = self.fresh(net)
        self.schedules = self.schedulers()
        self.frozen: set[str] = set()
        self.bare: set[str] = set()  # without a master
        self.kept: Any = None

    def fresh(self, net: Net) -> tuple[Any, Any]:
        """A model and an optimizer, brought to the level."""
        setup = self.setup
        cls, options = OPTIMIZERS[setup.optimizer]
        optimizer = cls(grouped(net.first_parameters(), setup.groups), **options)
        if net.uses_late:
            optimizer.add_param_group(late_group(net.late.parameters()))
        dynamic = DynamicLossScale(init_scale=setup.scale, growth_interval=setup.interval)
        loss_scale = setup.scale if setup.interval is None else dynamic
        self.scaled = self.unscaled = False
        if setup.scaler:
            self.scaler = amp.GradScaler.from_loss_scale(loss_scale)
            return amp.decorate(net, optimizer, setup.level, setup.half, emulate=False, fused=setup.fused)
        return amp.initialize(
            net,
            optimizer,
            opt_level=setup.level,
            dtype=setup.half,
            loss_scale=loss_scale,
            emulate=False,
            fused=setup.fused,
            num_losses=setup.losses,
            verbosity=0,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs."""
        if not self.setup.scaler:
            return self.model(x)
        with amp.auto_cast(level=self.setup.level, dtype=self.setup.half, emulate=False):
            return self.model(x).float()

    def schedulers(self) -> list[Any]:
        """A scheduler for each of the two."""
        return [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (self.optimizer, self.hand.optimizer)]

    # ---- what a loop may do

    @precondition(lambda self: not self.unscaled)
    @rule(
        seed=st.integers(0, 9),
        which=st.integers(0, 1),
        overflow=st.sampled_from([False, False, False, True]),
        delay=st.sampled_from([False, False, True]),
    )
    def backward(self, seed: int, which: int, overflow: bool, delay: bool) -> None:
        """One backward pass of one batch, whose gradients may overflow."""
        which %= 1 if self.setup.scaler else self.setup.losses
        overflow = overflow and not self.setup.neutral  # nobody would look
        delay = delay and not (self.setup.neutral and self.setup.level != "O2")  # autograd may add up in another order
        x, y = batch(seed)
        factor = float("inf") if overflow else 1.0
        loss = F.cross_entropy(self.forward(x), y)
        expected = F.cross_entropy(self.hand.forward(x).float(), y)
        assert same(loss, expected)
        if self.setup.scaler:
            self.scaler.scale(loss * factor).backward()
            self.scaled = True
            # After a clip at a scale of 1.0 passes go on, and autograd adds each of them to what was clipped.
            self.hand.backward(expected * factor, which, delay=not self.setup.neutral, block=False)
            return
        scaled_backward(loss * factor, self.optimizer, loss_id=which, delay_unscale=delay)
        self.hand.backward(expected * factor, which, stay=delay)
        self.compare_gradients()

    @precondition(lambda self: self.scaled or not self.setup.scaler)
    @rule(limit=st.sampled_from([0.01, 1.0]), door=st.sampled_from(["masters", "groups"]))
    def clip(self, limit: float, door: str) -> None:
        """Clip what there is."""
        if self.setup.scaler:
            if not self.unscaled:
                self.scaler.unscale_(self.optimizer)
                self.hand.finish_delayed()
            self.unscaled, door = not self.setup.neutral, "groups"
        groups = [p for group in self.optimizer.param_groups for p in group["params"]]
        clip_grad_norm_(amp.master_params(self.optimizer) if door == "masters" else groups, limit)
        self.hand.clip(limit, door)
        self.compare_gradients()

    @precondition(lambda self: self.scaled or not self.setup.scaler)
    @rule(set_to_none=st.booleans())
    def step(self, set_to_none: bool) -> None:
        """A step, or none after an overflow."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*updates .* weights in place")  # that is what O3 is
            if self.setup.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.hand.finish_delayed()
                self.hand.move_scale(0, finite=not self.hand.overflowed)
            else:
                self.optimizer.step()
            self.hand.step()
        self.unscaled = False
        self.compare()
        self.zero_grad(set_to_none)

    @precondition(lambda self: not self.unscaled)
    @rule(set_to_none=st.booleans())
    def zero_grad(self, set_to_none: bool) -> None:
        """Clear gradients."""
        self.scaled = False
        self.optimizer.zero_grad(set_to_none)
        self.hand.zero_grad(set_to_none)

    @rule(name=st.sampled_from(["a.weight", "a.bias", "b.weight", "c.bias"]))
    def freeze(self, name: str) -> None:
        """Freeze a parameter, or train it again."""
        self.frozen ^= {name}
        for net in (self.model, self.hand.net):
            self.set_frozen(net)

    @precondition(lambda self: not self.hand.net.uses_late)
    @precondition(lambda self: self.setup.optimizer != "Adagrad" or torch.__version__ >= "2.13")  # fails in 2.11
    @rule()
    def add_group(self) -> None:
        """Train one more layer."""
        for net in (self.model, self.hand.net):
            net.uses_late = True
        self.optimizer.add_param_group(late_group(self.model.late.parameters()))
        self.hand.optimizer.add_param_group(
            late_group(self.hand.masters.get(p, p) for p in self.hand.net.late.parameters())
        )

    @precondition(lambda self: not self.unscaled)
    @rule()
    def copy(self) -> None:
        """Go on with copies of the model and the optimizer. They have no gradients."""
        self.model, self.optimizer = copy.deepcopy((self.model, self.optimizer))
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        schedule.load_state_dict(self.schedules[0].state_dict())
        self.schedules[0] = schedule
        self.scaled = False
        self.hand.zero_grad(True)
        self.compare()

    def set_frozen(self, net: nn.Module) -> None:
        """Freeze what is frozen."""
        for name, param in net.named_parameters():
            param.requires_grad_(name not in self.frozen)

    @rule()
    def schedule(self) -> None:
        """A step of the scheduler."""
        for scheduler in self.schedules:
            scheduler.optimizer._opt_called = True  # the order is the user's choice; torch warns of it
            scheduler.step()

    @rule(group=st.integers(0, 2), lr=st.sampled_from([0.0, 0.003, 0.1]))
    def set_rate(self, group: int, lr: float) -> None:
        """Write a learning rate by hand."""
        for optimizer in (self.optimizer, self.hand.optimizer):
            optimizer.param_groups[group % self.setup.groups]["lr"] = lr

    @rule(order=st.permutations(["model", "optimizer", "amp", "schedule"]), early=st.booleans())
    def resume(self, order: list[str], early: bool) -> None:
        """Save everything, start over and load it in any order. Gradients are not saved."""
        file = io.BytesIO()
        saved = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": self.scaler.state_dict() if self.setup.scaler else amp.state_dict(optimizer=self.optimizer),
            "schedule": self.schedules[0].state_dict(),
        }
        torch.save(saved, file)
        amp.deactivate()
        torch.manual_seed(99)
        net = Net(self.setup.norm, self.setup.shared)
        if early:
            self.set_frozen(net)
        # What is frozen when it is cast has no master beside the optimizer until it is thawed.
        self.bare = set(self.frozen) if early and not self.fused_masters else set()
        self.hand.start_from_rounded(self.bare)
        net.train(self.model.training)
        net.uses_late = self.hand.net.uses_late
        self.model, self.optimizer = self.fresh(net)
        self.set_frozen(self.model)
        self.schedules[0] = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        for name in order:
            if name == "amp" and self.setup.scaler:
                self.scaler.load_state_dict(saved["amp"])
            elif name == "amp":
                amp.load_state_dict(saved["amp"], optimizer=self.optimizer)
            else:
                target = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedules[0]}[name]
                target.load_state_dict(saved[name])
        self.hand.reload()
        self.compare()

    @rule(name=st.sampled_from(["a.weight", "b.bias", "d.weight"]), factor=st.sampled_from([0.5, 1.25]))
    def write(self, name: str, factor: float) -> None:
        """Write a weight in place."""
        param = self.model.get_parameter(name)
        with torch.no_grad():
            param.mul_(factor)
        self.hand.write(name, factor, keeps_low="remainder" in self.optimizer.state.get(param, {}))
        self.compare()

    @rule()
    def remember(self) -> None:
        """Keep the weights."""
        self.kept = (
            copy.deepcopy(self.model.state_dict()),
            self.hand.weights(),
            copy.deepcopy(self.hand.net.state_dict()),
        )

    @precondition(lambda self: self.kept is not None)
    @rule()
    def roll_back(self) -> None:
        """Load the weights alone."""
        saved, truth, buffers = self.kept
        list(amp.master_params(self.optimizer))  # now those that are thawed have one
        self.bare &= self.frozen
        self.model.load_state_dict(saved)
        self.hand.roll_back(truth, buffers)
        self.hand.start_from_rounded(self.bare)
        self.compare()

    @precondition(lambda self: self.setup.norm == "batch")
    @rule(training=st.booleans())
    def mode(self, training: bool) -> None:
        """To evaluation, or back to training."""
        self.model.train(training)
        self.hand.net.train(training)

    @rule(seed=st.integers(0, 9))
    def evaluate(self, seed: int) -> None:
        """A forward pass without gradients."""
        with torch.no_grad():
            assert same(self.forward(batch(seed)[0]).float(), self.hand.forward(batch(seed)[0]).float())

    # ---- what must be equal

    def compare_gradients(self) -> None:
        """Every gradient that the next step takes."""
        for param, expected in zip(self.model.parameters(), self.hand.grads(), strict=True):
            assert (param.grad is None) == (expected is None)
            if expected is not None:
                assert same(param.grad.float(), expected.float())

    def compare(self) -> None:
        """Weights, the numbers behind them, buffers and the scale."""
        own = self.model.state_dict()
        names = [name for name, _ in self.model.named_parameters()]
        for name, param, expected, truth in zip(
            names, self.model.parameters(), self.hand.net.parameters(), self.hand.weights(), strict=True
        ):
            assert param.dtype is expected.dtype
            assert same(param, expected), name
            assert same(own[name].float(), truth), name
        for ours, theirs in zip(self.model.buffers(), self.hand.net.buffers(), strict=True):
            assert same(ours, theirs)
        if self.setup.scaler:
            assert self.scaler.get_scale() == self.hand.scales[0]
            return
        saved = amp.state_dict(optimizer=self.optimizer)
        assert [entry["loss_scale"] for entry in saved.values()] == self.hand.scales

    def teardown(self) -> None:
        """Put the process back."""
        amp.deactivate()
