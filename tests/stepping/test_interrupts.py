"""Ctrl-C at any line of ours: the next batch trains as if the interrupted one had not been, or had been completed."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from opcode import opmap
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import DynamicLossScale, amp, optimizers
from halfstep.amp.session import master_params
from halfstep.casting.scope import active_casting
from halfstep.compat.fp16_utils import FP16_Optimizer
from halfstep.core.errors import UsageError
from halfstep.stepping.attached import skipped_steps
from tests.support.worlds import start_amp, step_and_clear

_ROOT = str(Path(halfstep.__file__).parent)
_ROOMS = tuple(f"{_ROOT}/{room}/" for room in ("amp", "stepping", "parameters", "optimizers"))


class Interrupter:
    """Interrupts one line of halfstep within ``with``.

    Args:
        at: the line, counted from 0 in the order in which lines run; -1 for none.
        files: the prefixes of the files whose lines count.
        act: what runs before the line: Ctrl-C, or code that the garbage collector runs.

    Attributes:
        lines: the number of lines that have run.
        where: the line that was interrupted, or None.
    """

    def __init__(self, at: int, files: tuple[str, ...] = _ROOMS, act: Callable[[], None] | None = None) -> None:
        self.at, self.files, self.act = at, files, act or interrupt
        self.lines = 0
        self.where: str | None = None

    def __enter__(self) -> Interrupter:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.files):
            return None
        code, at = frame.f_code.co_code, frame.f_lasti
        leaves_with = code[at] == opmap["LOAD_CONST"] and code[at : at + 4] == code[at + 2 : at + 6]
        if event == "line" and not leaves_with:  # Python holds Ctrl-C back until `__exit__` has run
            self.lines += 1
            if self.lines == self.at + 1:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {event} {frame.f_code.co_name}"
                self.act()
        return self._trace


class World:
    """A model in training that has had a step.

    Args:
        level: "O1" or "O2".
        dtype: the 16-bit dtype.
        make: makes the optimizer from parameters.
    """

    def __init__(self, level: str, dtype: torch.dtype, make: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.model, self.optimizer = start_amp(
            nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)),
            make,
            level,
            dtype=dtype,
            loss_scale=DynamicLossScale(init_scale=1024.0),
        )
        self.block(1)
        step_and_clear(self.optimizer)

    def loss(self, seed: int) -> torch.Tensor:
        """That of a batch; an odd seed above 10 makes it overflow."""
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        loss: torch.Tensor = self.model(x).float().square().mean()
        return loss * float("inf") if seed > 10 and seed % 2 else loss

    def block(self, seed: int, interrupter: Interrupter | None = None) -> None:
        """A backward pass, with an interrupt anywhere in it."""
        loss = self.loss(seed)
        with interrupter or contextlib.nullcontext(), amp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()

    def step(self, interrupter: Interrupter | None = None) -> None:
        """A step, with an interrupt anywhere in it."""
        with interrupter or contextlib.nullcontext():
            self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        """Those that the optimizer moves, and the model's."""
        return [p.detach().clone().float() for p in (*master_params(self.optimizer), *self.model.parameters())]


_MAKERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.1),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=0.1),
}

_WORLDS = [
    ("O2", torch.float16, "FusedAdam"),
    ("O2", torch.bfloat16, "SGD"),
    ("O2", torch.float16, "RMSprop"),
    ("O1", torch.float16, "AdamW"),
    ("O1", torch.float16, "RMSprop"),
]


def interrupted(
    world: tuple[str, torch.dtype, str],
    act: Callable[[World, Interrupter | None], None],
    at: int,
    files: tuple[str, ...] = _ROOMS,
) -> Any:
    """A world in which an action was interrupted at a line of these files, and the interrupter."""
    amp.deactivate()
    level, dtype, name = world
    made = World(level, dtype, _MAKERS[name])
    interrupter = Interrupter(at, files)
    try:
        act(made, interrupter)
    except KeyboardInterrupt:
        assert interrupter.where is not None
    return made, interrupter


def outcome(world: World, after: Callable[[World], None]) -> list[torch.Tensor]:
    """The weights after what comes next."""
    after(world)
    return world.weights()


def alike(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def next_batch(world: World, seed: int = 4) -> None:
    """Gradients are cleared first."""
    world.optimizer.zero_grad()
    world.block(seed)
    world.step()


def next_batch_added(world: World) -> None:
    """Gradients are cleared after the step, as at the end of a loop."""
    world.block(4)
    world.step()
    next_batch(world, 6)


def step_at_once(world: World) -> None:
    """Whoever interrupts goes on with a step."""
    world.step()
    next_batch(world)


_AFTER = {"zero_grad": next_batch, "no zero_grad": next_batch_added, "step": step_at_once}


def first_line(world: tuple[str, torch.dtype, str], after: str, every: int) -> int:
    """The first line to interrupt at: another one in each world, so that together they have them all."""
    return (_WORLDS.index(world) + 2 * list(_AFTER).index(after)) % every


def check(world: tuple[str, torch.dtype, str], act: Callable[..., None], after: str, every: int) -> None:
    """Interrupt an action at some of its lines, and compare what follows with that after none and all of it."""
    go_on = _AFTER[after]
    whole, counter = interrupted(world, act, -1)
    completed = outcome(whole, go_on)
    not_been = outcome(interrupted(world, lambda *_: None, -1)[0], go_on)
    assert counter.lines > 50
    wrong = []
    for at in range(first_line(world, after, every), counter.lines, every):
        found, interrupter = interrupted(world, act, at)
        assert interrupter.where is not None
        weights = outcome(found, go_on)
        if not alike(weights, not_been) and not alike(weights, completed):
            wrong.append(interrupter.where)
    assert wrong == []


def one_step(world: World, interrupter: Interrupter | None) -> None:
    world.block(3)
    world.step(interrupter)


@pytest.mark.parametrize("world", _WORLDS[:2], ids=str)
def test_a_block_that_is_interrupted_counts_or_does_not(world: Any) -> None:
    check(world, lambda world, interrupter: world.block(3, interrupter), "no zero_grad", every=53)


@pytest.mark.costly
@pytest.mark.exhaustive
@pytest.mark.parametrize("world", _WORLDS, ids=str)
@pytest.mark.parametrize("after", _AFTER)
@pytest.mark.parametrize("seed", [3, 13])
def test_a_block_that_is_interrupted_anywhere_counts_or_does_not(world: Any, after: str, seed: int) -> None:
    check(world, lambda world, interrupter: world.block(seed, interrupter), after, every=11)


def test_unscaling_that_is_interrupted_anywhere_counts_or_does_not() -> None:
    ends = set()
    for at in range(140, 340, 3):  # the lines before prepare the optimizer
        weight, scaler = nn.Parameter(torch.zeros(2)), amp.GradScaler(init_loss_scaling=1024.0)
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale(weight.sum()).backward()
        with contextlib.suppress(KeyboardInterrupt), Interrupter(at):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        ends.add(tuple(weight.tolist()))
    assert ends == {(-1.0, -1.0), (0.0, 0.0)}


def check_step(world: tuple[str, torch.dtype, str], after: str, every: int, files: tuple[str, ...] = _ROOMS) -> None:
    """Interrupt a step at some of its lines. Torch's own move some weights before others, so none is a reference."""
    whole, counter = interrupted(world, one_step, -1, files)
    assert amp.steps_skipped(whole.optimizer) == 0
    wrong = []
    assert counter.lines > 20
    for at in range(first_line(world, after, every), counter.lines, every):
        found, interrupter = interrupted(world, one_step, at, files)
        before = found.weights()
        _AFTER[after](found)
        optimizer, params = found.optimizer, list(found.model.parameters())
        given = [p for group in optimizer.param_groups for p in group["params"]]
        places = all(p is q for p, q in zip(given, params, strict=True)) and set(optimizer.state) <= set(params)
        rounded = all(torch.equal(m.to(p.dtype), p) for m, p in zip(master_params(optimizer), params, strict=True))
        after_it = found.weights()
        moved = [not torch.equal(b, w) and bool(w.isfinite().all()) for b, w in zip(before, after_it, strict=True)]
        if not (places and rounded and all(moved)):
            wrong.append(interrupter.where)
    assert wrong == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", ["zero_grad", "step"])
def test_masters_leave_the_optimizer_after_an_interrupted_step(after: str) -> None:
    check_step(("O2", torch.float16, "RMSprop"), after, every=3, files=(f"{_ROOT}/parameters/",))


@pytest.mark.costly
@pytest.mark.exhaustive
@pytest.mark.parametrize("after", _AFTER)
@pytest.mark.parametrize("world", _WORLDS, ids=str)
def test_after_an_interrupted_step_the_next_batch_trains(world: Any, after: str) -> None:
    check_step(world, after, every=11)


@pytest.mark.parametrize("after", _AFTER)
@pytest.mark.parametrize("held", [False, True])
def test_an_interrupt_between_the_opening_of_a_block_and_its_first_line(after: str, held: bool, caplog: Any) -> None:
    """Nobody leaves this block. With gradients from before, they are there again."""
    caplog.set_level("INFO", "halfstep")
    worlds = [World("O2", torch.float16, _MAKERS["AdamW"]) for _ in range(2)]
    for world in worlds if held else []:
        world.block(5)
    block = amp.scale_loss(worlds[0].loss(3), worlds[0].optimizer)
    block.__enter__().backward()
    del block
    assert "interrupted" not in caplog.text
    assert alike(*(outcome(world, _AFTER[after]) for world in worlds))
    assert "interrupted; its backward pass is discarded" in caplog.text


def interrupt(*_: Any, **__: Any) -> None:
    """Stand in for a function in which the user presses Ctrl-C."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("way", ["with", "ExitStack", "generator"])
def test_a_block_that_somebody_will_leave_is_open(way: str) -> None:
    world = World("O1", torch.float16, _MAKERS["SGD"])

    def block() -> Iterator[None]:
        with amp.scale_loss(world.loss(3), world.optimizer) as scaled_loss:
            yield scaled_loss.backward()

    with contextlib.ExitStack() as stack:
        if way == "with":
            stack.enter_context(contextlib.contextmanager(block)())
        elif way == "ExitStack":
            stack.enter_context(amp.scale_loss(world.loss(3), world.optimizer)).backward()
        else:
            running = block()
            next(running)
            stack.callback(lambda: list(running))
        gc.collect()
        with pytest.raises(UsageError, match="inside a scale_loss block"):
            world.step()
        with pytest.raises(UsageError, match="is already open"):
            world.block(4)
    before = world.weights()
    world.step()
    assert not alike(before, world.weights())


def test_a_block_in_which_gradients_are_cleared_stays_open() -> None:
    world = World("O1", torch.float16, _MAKERS["SGD"])
    with amp.scale_loss(world.loss(3), world.optimizer) as scaled_loss:
        world.optimizer.zero_grad()
        with pytest.raises(UsageError, match="is already open"):
            world.block(4)
        scaled_loss.backward()


def test_gradients_of_which_some_are_scaled_again_go_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = FP16_Optimizer(torch.optim.SGD([weight := nn.Parameter(torch.ones(2))], lr=1.0), verbose=False)
    with monkeypatch.context() as patched:
        patched.setattr("halfstep.parameters.ledger.Gradients.multiply", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.backward(weight.sum(), update_master_grads=False)
    optimizer.step()
    assert (weight.tolist(), weight.grad, skipped_steps(optimizer._attached.counts)) == ([1.0, 1.0], None, 1)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("seed", [3, 13])
def test_an_interrupt_before_the_overflow_is_noted(held: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients are unscaled already, and may be inf. They go; with older ones the next step goes, too."""
    worlds = [World("O2", torch.float16, _MAKERS["RMSprop"]) for _ in range(2)]
    for world in worlds if held else []:
        world.block(5)

    with monkeypatch.context() as patched:
        patched.setattr("halfstep.stepping.scaled_backward.record_pass", interrupt)
        with pytest.raises(KeyboardInterrupt):
            worlds[0].block(seed)
    assert all(param.grad is None for param in worlds[0].model.parameters())
    before = worlds[0].weights()
    worlds[0].step()
    assert alike(before, worlds[0].weights())
    assert amp.steps_skipped(worlds[0].optimizer) == held
    for world in worlds:
        next_batch(world)
    assert alike(*(world.weights() for world in worlds))


def finalizer() -> None:
    """Run ops and open a scope, as the finalizer of a model may while halfstep opens or closes a scope."""
    with amp.disable_casts():
        torch.ones(2, 2) @ torch.ones(2, 2)
    torch.ones(2) + 1


@pytest.mark.parametrize("act", [None, pytest.param(finalizer, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("level", ["O1", "O2", "O1 in the whole process"])
def test_interruptions_at_any_line_leave_the_casts_as_they_were(level: str, act: Callable[[], None] | None) -> None:
    """Each line that opens or closes a scope is interrupted. The next op may come before the next scope."""
    world = World(level[:2], torch.float16, _MAKERS["SGD"])
    if len(level) == 2:
        amp.deactivate()  # so that the model opens a scope because its casting is not current
    x, files = torch.ones(2, 6), (f"{_ROOT}/casting/current.py", f"{_ROOT}/casting/scope.py")

    def now() -> list[Any]:
        with amp.auto_cast(dtype="bfloat16"):
            inside = torch.mm(x, x.mT).dtype, torch.autograd._engine_run_backward
        outside = torch.mm(x, x.mT).dtype, torch.autograd._engine_run_backward, torch.is_autocast_enabled("cpu")
        return [*inside, *outside, active_casting() is None, world.model(x).tolist()]

    def run(at: int, found: list[Any]) -> Interrupter:
        with contextlib.suppress(KeyboardInterrupt), Interrupter(at, files, act) as interrupter:
            if act:  # Python does not leave a `with` block whose last line of `__enter__` is interrupted by Ctrl-C
                with amp.auto_cast(dtype="bfloat16", custom_white_list=["softmax"]):
                    found += [torch.mm(x, x.mT).dtype, x.softmax(-1).dtype]
            result = world.model(x)
            result.sum().backward()
            found += result.tolist()
        return interrupter

    expected, whole, wrong = now(), [], []
    for at in range(lines := run(-1, whole).lines):
        where = run(at, found := []).where
        wrong += [where] if now() != expected or (act and found != whole) else []
    assert lines > 20
    assert wrong == []


@pytest.mark.parametrize("name", ["current.restore", "current.set_native", "current.clear_cache", "scope.set_current"])
def test_a_block_whose_first_or_last_line_is_interrupted_leaves_the_casts_as_they_were(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(f"halfstep.casting.{name}", interrupt)
        with pytest.raises(KeyboardInterrupt), amp.auto_cast(dtype="bfloat16"):
            pass
    with amp.disable_casts():
        pass
    assert not torch.is_autocast_enabled("cpu")
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
