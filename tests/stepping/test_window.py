"""The window of an optimizer: whatever happens in whatever order, its states follow each other as the picture says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from halfstep import amp
from halfstep.core.errors import HalfstepError
from halfstep.stepping.backward import Window, WindowState
from halfstep.stepping.ranks.ddp_sync import RankSync, share_overflow
from tests.support.worlds import scaled_backward

X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)
IDLE, OPEN, REACHED, FINISHING, READY, SCALED, DIRTY = WindowState

PICTURE = {
    IDLE: {OPEN, REACHED, FINISHING},
    OPEN: {FINISHING, READY},
    REACHED: {FINISHING, READY, SCALED},
    FINISHING: {READY},
    READY: {OPEN, REACHED, FINISHING, SCALED, DIRTY, IDLE},
    SCALED: {OPEN, REACHED, FINISHING, DIRTY, IDLE},
    DIRTY: {IDLE, FINISHING},
}
ACTIONS = ["enter", "enter, delayed", "leave", "interrupt", "enter other", "leave other", "zero_grad", "step"]
ACTIONS += ["plain pass", "unscale_", "scaler.step", "update"]


class Loop:
    """A training loop whose lines come in any order."""

    def __init__(self, level: str, overflows: bool) -> None:
        torch.manual_seed(0)
        models: Any = [nn.Linear(4, 1), nn.Linear(4, 1)]
        both: Any = [torch.optim.SGD(model.parameters(), lr=2.0**-6) for model in models]
        options: Any = {"opt_level": level, "dtype": "float16", "loss_scale": 256.0, "verbosity": 0}
        (self.model, self.second), (self.optimizer, self.other) = amp.initialize(models, both, **options)
        self.scaler = amp.GradScaler(init_loss_scaling=256.0)
        self.factor = float("inf") if overflows else 1.0
        self.blocks: dict[Any, Any] = {}

    @property
    def state(self) -> WindowState:
        found: WindowState = self.optimizer._amp_stash.window.state
        return found

    def enter(self, optimizer: Any, **options: Any) -> None:
        loss = (self.model(X).float().sum() + self.second(X).float().sum()) * self.factor
        block = amp.scale_loss(loss, optimizer, **options)
        block.__enter__().backward()
        self.blocks[optimizer] = block

    def leave(self, optimizer: Any) -> None:
        if (block := self.blocks.pop(optimizer, None)) is not None:
            block.__exit__(None, None, None)

    def actions(self) -> dict[str, Callable[[], Any]]:
        return {
            "enter": lambda: self.enter(self.optimizer),
            "enter, delayed": lambda: self.enter(self.optimizer, delay_unscale=True),
            "leave": lambda: self.leave(self.optimizer),
            "interrupt": self.blocks.clear,  # blocks are gone without an exit, as after Ctrl-C in its first line
            "enter other": lambda: self.enter(self.other),
            "leave other": lambda: self.leave(self.other),
            "zero_grad": self.optimizer.zero_grad,
            "step": self.optimizer.step,
            "plain pass": lambda: self.scaler.scale(self.model(X).float().sum() * self.factor).backward(),
            "unscale_": lambda: self.scaler.unscale_(self.optimizer),
            "scaler.step": lambda: self.scaler.step(self.optimizer),
            "update": self.scaler.update,
        }


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.exhaustive
@settings(max_examples=60, deadline=None)
@example("O1", False, ["plain pass", "unscale_", "enter", "scaler.step"])
@given(st.sampled_from(["O1", "O2"]), st.booleans(), st.lists(st.sampled_from(ACTIONS), max_size=12))
def test_the_states_of_a_window_follow_the_picture(level: str, overflows: bool, names: list[str]) -> None:
    loop = Loop(level, overflows)
    window, moves = loop.optimizer._amp_stash.window, []

    def note(changed: Window, name: str, value: Any) -> None:
        if changed is window and name == "state" and value is not loop.state:
            moves.append((loop.state, value))
        object.__setattr__(changed, name, value)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Window, "__setattr__", note)
        for name in names:
            weight, is_open = loop.model.weight.detach().clone(), loop.optimizer in loop.blocks
            try:
                loop.actions()[name]()
            except HalfstepError:
                assert torch.equal(loop.model.weight.nan_to_num(), weight.nan_to_num())
            else:
                assert name != "step" or not is_open, "a step in an open block is an error"
            assert loop.state is not FINISHING, "nothing is left half done"
            assert is_open <= (loop.state is OPEN) or name in ("leave", "interrupt"), "only its exit ends a block"
    assert [move for move in moves if move[1] not in PICTURE[move[0]]] == []


def test_passes_that_no_step_follows_leave_few_records_and_each_scale_has_heard_of_them() -> None:
    loop = Loop("O1", overflows=False)
    for _ in range(70):
        scaled_backward(loop.model(X).float().sum(), loop.optimizer)
    records = loop.optimizer._amp_stash.window.records
    assert len(records) < 64
    assert share_overflow(records, [RankSync()]) == {}
