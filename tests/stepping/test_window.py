"""The window of an optimizer: whatever happens in whatever order, its states follow each other as the picture says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halfstep import amp
from halfstep.core.errors import HalfstepError
from halfstep.stepping.backward import WindowState

X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)
IDLE, OPEN, FINISHING, READY, SCALED, DIRTY = WindowState

FOLLOWS = {  # the states that may come after each, for every action that succeeds
    "enter": {IDLE: {OPEN}, READY: {OPEN}, SCALED: {OPEN}, DIRTY: {OPEN}},
    "enter, delayed": {IDLE: {OPEN}, READY: {OPEN}, SCALED: {OPEN}, DIRTY: {OPEN}},
    "leave": {OPEN: {READY, SCALED}},
    "interrupt": {OPEN: {OPEN}},  # found at the next action
    "zero_grad": {state: {IDLE, OPEN} for state in WindowState},
    "step": {state: {IDLE, READY, SCALED, DIRTY} for state in WindowState},
}


class Loop:
    """A training loop whose lines come in any order."""

    def __init__(self, level: str, overflows: bool) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=2.0**-6)
        self.model, self.optimizer = amp.initialize(
            self.model, optimizer, opt_level=level, dtype="float16", loss_scale=256.0, verbosity=0
        )
        self.factor = float("inf") if overflows else 1.0
        self.block: Any = None

    @property
    def state(self) -> WindowState:
        found: WindowState = self.optimizer._amp_stash.window.state
        return found

    def enter(self, **options: Any) -> None:
        block = amp.scale_loss(self.model(X).float().sum() * self.factor, self.optimizer, **options)
        block.__enter__().backward()
        self.block = block

    def leave(self) -> None:
        if self.block is None:
            raise HalfstepError("there is no block")
        self.block.__exit__(None, None, None)
        self.block = None

    def interrupt(self) -> None:
        """The block is gone without an exit, as after Ctrl-C in its first line."""
        if self.block is None:
            raise HalfstepError("there is no block")
        self.block = None

    def actions(self) -> dict[str, Callable[[], Any]]:
        return {
            "enter": self.enter,
            "enter, delayed": lambda: self.enter(delay_unscale=True),
            "leave": self.leave,
            "interrupt": self.interrupt,
            "zero_grad": self.optimizer.zero_grad,
            "step": self.optimizer.step,
        }


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["O1", "O2"]), st.booleans(), st.lists(st.sampled_from(list(FOLLOWS)), max_size=12))
def test_the_states_of_a_window_follow_the_picture(level: str, overflows: bool, names: list[str]) -> None:
    loop = Loop(level, overflows)
    for name in names:
        before, open_before = loop.state, loop.block is not None
        weight = loop.model.weight.detach().clone()
        try:
            loop.actions()[name]()
        except HalfstepError:
            assert loop.state is before, "an error changes nothing"
            assert torch.equal(loop.model.weight, weight)
            continue
        assert FINISHING is not loop.state
        assert loop.state in FOLLOWS[name].get(before, {OPEN} if name.startswith("enter") else set()), (name, before)
        assert (loop.state is OPEN) == (loop.block is not None or name == "interrupt")
        if name == "step":
            assert not open_before, "a step in an open block is an error"
            assert bool(torch.isfinite(loop.model.weight).all())
