"""Accumulation windows on two and three ranks: after each step all have the same weights, those of one process.

Batches are uneven, parameters go unused on some ranks, ranks have no backward pass in some micro-steps before a synced
one, and gradients of one rank overflow. A rank that hangs is killed, and the case fails.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import DynamicLossScale, amp
from tests.support.processes import ranks_of
from tests.support.worlds import scaled_backward, start_amp, step_and_clear

from .by_hand import ByHand

__all__ = ["Windows"]

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2),
}


@dataclass(frozen=True)
class Micro:
    """One micro-step: what each rank does in it.

    Attributes:
        synced: whether DDP averages in it.
        sizes: samples of each rank.
        extra: which ranks use the second branch.
        idle: which ranks have no backward pass; only before a synced one.
    """

    synced: bool
    sizes: tuple[int, ...]
    extra: tuple[bool, ...]
    idle: tuple[bool, ...]


@dataclass(frozen=True)
class Plan:
    """A training of a few windows."""

    world: int
    level: str
    half: torch.dtype
    optimizer: str
    windows: tuple[tuple[Micro, ...], ...]
    overflow: tuple[int, int, int] | None  # window, micro-step, rank
    finds_unused: bool = True  # whether DDP looks for unused parameters; if not, every pass uses all


class Branching(nn.Module):
    """A model with a branch that not every call uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.extra, self.b = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.uses_extra = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        return self.b(torch.tanh(self.extra(x)) if self.uses_extra else x)


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return (outputs.float() - 1.0).square().mean()


def inputs(window: int, micro: int, rank: int, size: int) -> torch.Tensor:
    """The samples of a rank."""
    generator = torch.Generator().manual_seed(1 + 100 * window + 10 * micro + rank)
    return torch.randn(size, 5, generator=generator)


def is_idle(window: tuple[Micro, ...], m: int, rank: int) -> bool:
    """Whether a rank has no backward pass in a micro-step."""
    return window[m].idle[rank] and not window[m].synced and any(micro.synced for micro in window[m:])


def factor(plan: Plan, *place: int) -> float:
    """What the loss is multiplied by."""
    return float("inf") if plan.overflow == place else 1.0


def train(rank: int, plan: Plan, dies: tuple[int, int, int] | None = None) -> tuple[list[torch.Tensor], list[float]]:
    """One rank: its weights in fp32 after each window, and its loss scales; ``dies`` is where which rank dies."""
    net = Branching()
    rule_ = DynamicLossScale(init_scale=64.0, growth_interval=1000)
    net, optimizer = start_amp(net, OPTIMIZERS[plan.optimizer], plan.level, dtype=plan.half, loss_scale=rule_)
    model = DistributedDataParallel(net, find_unused_parameters=plan.finds_unused)
    weights, scales = [], []
    for w, window in enumerate(plan.windows):
        for m, micro in enumerate(window):
            if dies == (w, m, rank):
                os._exit(9)
            if is_idle(window, m, rank):
                continue
            net.uses_extra = micro.extra[rank] or not plan.finds_unused
            with nullcontext() if micro.synced else model.no_sync():
                loss = loss_of(model(inputs(w, m, rank, micro.sizes[rank]))) * factor(plan, w, m, rank)
                scaled_backward(loss, optimizer)
        step_and_clear(optimizer)
        saved = net.state_dict()
        weights.append(torch.cat([saved[name].float().flatten() for name, _ in net.named_parameters()]))
        scales.append(amp.state_dict(optimizer=optimizer)["loss_scaler0"]["loss_scale"])
    amp.deactivate()
    return weights, scales


def by_one(plan: Plan) -> tuple[list[torch.Tensor], list[float]]:
    """The same by one process, by hand: the mean over ranks of the sum over micro-steps."""

    def make(net: Any, place: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = OPTIMIZERS[plan.optimizer]([place(p) for p in net.parameters()])
        return made

    net: Any = Branching()
    hand = ByHand(net, plan.level, plan.half, make, [64.0], None, False)
    weights, scales = [], []
    for w, window in enumerate(plan.windows):
        overflowed = False
        for m, micro in enumerate(window):
            for rank in range(plan.world):
                if is_idle(window, m, rank):
                    continue
                hand.net.uses_extra = micro.extra[rank] or not plan.finds_unused
                overflowed = overflowed or plan.overflow == (w, m, rank)
                hand.backward(loss_of(hand.forward(inputs(w, m, rank, micro.sizes[rank]))), 0)
        for p in hand.stepped():
            if p.grad is not None:
                p.grad /= plan.world
        if overflowed:
            hand.scales[0] /= 2
        else:
            hand.step()
        hand.zero_grad(True)
        weights.append(torch.cat([weight.flatten() for weight in hand.weights()]))
        scales.append(hand.scales[0])
    return weights, scales


@st.composite
def plans(draw: Any) -> Plan:
    """Any plan."""
    world = draw(st.sampled_from([2, 2, 3]))
    each = {
        name: st.tuples(*[values] * world)
        for name, values in {"size": st.integers(1, 6), "flag": st.booleans()}.items()
    }
    micro = st.builds(Micro, synced=st.booleans(), sizes=each["size"], extra=each["flag"], idle=each["flag"])
    windows = draw(st.lists(st.lists(micro, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple))
    place = st.tuples(st.integers(0, len(windows) - 1), st.integers(0, 2), st.integers(0, world - 1))
    return Plan(
        world,
        draw(st.sampled_from(["O0", "O2"])),
        draw(st.sampled_from([torch.float16, torch.bfloat16])),
        draw(st.sampled_from(sorted(OPTIMIZERS))),
        windows,
        draw(st.none() | place),
        draw(st.booleans()),
    )


class Windows(RuleBasedStateMachine):
    """Random plans, each on real processes."""

    cases = 0
    steps = 1
    phases = (Phase.generate,)  # a case that hangs takes long, and a shorter one as long again

    @rule(plan=plans())
    def run(self, plan: Plan) -> None:
        """One plan."""
        Windows.cases += 1
        answers = ranks_of(plan.world).run(train, plan)
        expected, scales = by_one(plan)
        tolerance = 1e-5 if plan.level == "O0" else 2e-2
        for weights, own_scales in answers:
            for w, (ours, first) in enumerate(zip(weights, answers[0][0], strict=True)):
                assert torch.equal(ours, first), f"ranks differ after window {w}"
            assert own_scales == scales
        for ours, theirs in zip(answers[0][0], expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.0, atol=tolerance)
