"""An overflow wherever it can be: nothing moves, and the host is not made to wait to learn of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import StaticLossScale, amp, optimizers
from tests.support.backends import skip_without_compiler
from tests.support.doors import DYNAMIC, open_door
from tests.support.worlds import BF16, FP16, scaled_backward, step_and_clear

BAD = [math.inf, -math.inf, math.nan]


class Odd(nn.Module):
    """Parameters of every kind that has gradients, and some that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(3, 5))
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.beside_empty = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(2))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.scalar = nn.Parameter(torch.ones(()))
        self.strided = nn.Parameter(torch.ones(4, 6).t())
        self.image = nn.Parameter(torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.fp64 = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.complex64 = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.large = nn.Parameter(torch.ones(70_001))
        self.table = nn.Embedding(7, 2, sparse=True)
        self.last = nn.Parameter(torch.ones(2))

    def loss(self) -> torch.Tensor:
        names = "first empty beside_empty scalar strided image large last"
        total = sum((getattr(self, name).float().sum() for name in names.split()), torch.zeros(()))
        total = total + self.fp64.sum().float() + self.complex64.abs().sum()
        return total + self.table(torch.tensor([1, 4])).float().sum()


POSITIONS: dict[str, Callable[[Odd], torch.Tensor]] = {  # -> the element to spoil
    "first element of the first": lambda m: m.first.grad[0, 0],
    "last element of the first": lambda m: m.first.grad[-1, -1],
    "beside an empty tensor": lambda m: m.beside_empty.grad[0],
    "a 0-dim tensor": lambda m: m.scalar.grad,
    "a transposed tensor": lambda m: m.strided.grad[5, 3],
    "a channels_last tensor": lambda m: m.image.grad[1, 2, 3, 3],
    "float64": lambda m: m.fp64.grad[1],
    "a real part": lambda m: torch.view_as_real(m.complex64.grad)[1, 0],
    "an imaginary part": lambda m: torch.view_as_real(m.complex64.grad)[2, 1],
    "deep in a large tensor": lambda m: m.large.grad[65_537],
    "a sparse gradient": lambda m: m.table.weight.grad._values()[1, 1],
    "last element of the last": lambda m: m.last.grad[-1],
}


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


PASSES = ["O0", "handle", "wrap_optimizer", "FP16_Optimizer", "GradScaler", "GradScaler, unscale_"]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", PASSES)
def test_nothing_moves_wherever_a_gradient_is_not_finite(name: str, position: str, bad: float) -> None:
    door = open_door(name, momentum, model=Odd())

    def train(spoil: Any = lambda: None) -> None:
        door.backward(door.model.loss(), spoil)
        door.step()
        door.optimizer.zero_grad()

    train()
    before, scale, last = door.everything(), door.scale(), door.model.last.detach().clone()
    assert all(p.detach().ne(1).all() for p in (door.model.first, door.model.last))
    train(lambda: POSITIONS[position](door.model).fill_(bad))
    assert all(map(torch.equal, door.everything(), before))
    assert door.scale() == scale / 2
    train()
    assert not torch.equal(door.model.last, last)


OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], int]] = {  # how it is made, and how often its step reads the device
    "SGD": (lambda params: torch.optim.SGD(params, lr=0.1, foreach=False), 1),
    "SGD, fused": (lambda params: torch.optim.SGD(params, lr=0.1, fused=True), 0),
    "SGD, dampened": (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5, fused=True), 0),
    "Adam": (lambda params: torch.optim.Adam(params, lr=0.1, eps=1e-3, foreach=False), 1),  # eps that float16 has
    "AdamW, fused": (lambda params: torch.optim.AdamW(params, lr=0.1, fused=True), 0),
    "FusedAdam": (lambda params: optimizers.FusedAdam(params, lr=0.1), 0),
}
LEVELS = ["O0", "O1", "O2", "O2, fused=False", "O3"]
TRAINED = [*LEVELS, "handle", "wrap_optimizer", "FP16_Optimizer", "torch's GradScaler", "torch's GradScaler, attached"]
TRAINED += ["GradScaler", "GradScaler, attached", "GradScaler, unscale_", "GradScaler, attached, unscale_"]
TRAINED += ["TrainStep, O0", "TrainStep, O1", "TrainStep, O2", "TrainStep, GradScaler"]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("half", [BF16, FP16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", TRAINED)
def test_weights_masters_and_state_do_not_move(name: str, optimizer: str, half: torch.dtype, bad: float) -> None:
    door = open_door(name, OPTIMIZERS[optimizer][0], half)
    skipped = []
    for i, factor in enumerate([1.0, bad, bad, 1.0]):
        before, scale = door.everything(), door.scale()
        door.train(partial(door.loss, i, factor))
        skipped.append(door.skipped())
        assert all(map(torch.equal, door.everything(), before)) is (factor != 1.0)
        assert door.scale() == (scale if factor == 1.0 else scale / 2)
    assert skipped in ([False, True, True, False], [None] * 4)
    if name[0] == "O":
        assert int(amp.steps_skipped(door.optimizer)) == 2


FIRST = [name for name in TRAINED if not name.startswith(("FP16", "TrainStep")) and name != "torch's GradScaler"]


@pytest.mark.parametrize("rule", [DYNAMIC, StaticLossScale(128.0)], ids=["dynamic", "static"])
@pytest.mark.parametrize("dampening", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", FIRST)
def test_a_first_step_that_overflows_leaves_no_momentum(
    name: str, dampening: float, rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's fused SGD makes its momentum in the first step, and leaves it without values if the flag says to skip."""
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **how: torch.full_like(tensor, math.nan, **how))
    results = []
    for factors in ([1.0, 1.0], [math.inf, math.nan, 1.0, 1.0]):
        door = open_door(
            name, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=dampening, fused=True), BF16, rule=rule
        )
        start = door.model[0].weight.detach().float().clone()
        for factor in factors:
            door.train(partial(door.loss, 0, factor))
        amp.deactivate()
        results.append(door.model[0].weight.detach().float() - start)
    assert results[0].any()
    assert torch.equal(*results)


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_only_in_the_second_optimizer(level: str, together: bool, bad: float) -> None:
    """A loss of both skips both, since it is one step of training; losses of their own skip on their own."""
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    optims = [torch.optim.Adam(m.parameters(), lr=0.1) for m in models]
    models, optims = amp.initialize(
        models, optims, opt_level=level, dtype=torch.bfloat16, loss_scale="dynamic", num_losses=2, verbosity=0
    )

    def train(factor: float) -> None:
        losses = [m(torch.ones(1, 3)).float().square().sum() for m in models]
        losses[1] = losses[1] * factor
        if together:
            with amp.scale_loss(losses[0] + losses[1], optims) as scaled:
                scaled.backward()
                assert all(p.grad.isfinite().all() for p in models[0].parameters())
        else:
            for i, (loss, optim) in enumerate(zip(losses, optims, strict=True)):
                scaled_backward(loss, optim, loss_id=i)
        for optim in optims:
            step_and_clear(optim)

    def states() -> list[list[torch.Tensor]]:
        trees = [(list(m.parameters()), o.state_dict()["state"]) for m, o in zip(models, optims, strict=True)]
        return [[torch.as_tensor(t).clone() for t in torch.utils._pytree.tree_leaves(tree)] for tree in trees]

    train(1.0)
    before = states()
    train(bad)
    moved = [not all(map(torch.equal, a, b)) for a, b in zip(before, states(), strict=True)]
    assert moved == [not together, False]
    assert [amp.steps_skipped(optim) for optim in optims] == [int(together), 1]


# ---- how often the host waits for the device


class Reads(TorchDispatchMode):
    """Counts ``item()``, ``bool()`` and ``float()``."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.is_nonzero,
            torch.ops.aten.nonzero,
        ):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("half", [BF16, FP16])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "Adam"])  # torch's reads its step count
@pytest.mark.parametrize("name", [name for name in TRAINED if not name.startswith(("TrainStep", "torch", "O3"))])
def test_reads_of_a_step(name: str, optimizer: str, clips: bool, half: torch.dtype) -> None:
    skip_without_compiler(optimizer == "FusedAdam")  # torch's own steps read a flag
    make, expected = OPTIMIZERS[optimizer]
    expected = 0 if name == "O2" else expected  # where SGD is fused, too
    door = open_door(name, make, half)
    counts = []
    for step in range(6):
        with Reads() as counted:
            door.backward(door.loss(step, math.inf if step == 5 else 1.0))
            if clips:
                door.clip(1.0)
            door.step()
            door.optimizer.zero_grad()
        counts.append(counted.count)
    assert counts[4:] == [expected] * 2  # the first that is taken may plan, and some passes look at inputs


# ---- how often the gradients are read


class Touches(TorchDispatchMode):
    """Names the operations that have one of some tensors among their arguments."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.pointers = {t.data_ptr() for t in tensors}
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Tensor) and leaf.data_ptr() in self.pointers for leaf in leaves):
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_norm_and_finite_check_share_one_read() -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(4)]
    scaler, optim = amp.GradScaler(), torch.optim.SGD(params, lr=0.1)
    scaler.scale(sum(p.sum() for p in params)).backward()
    with Touches([p.grad for p in params]) as touched:
        scaler.clip_grad_norm_(optim, 1.0)
    assert touched.names == ["_foreach_norm", "_foreach_mul_"]


@pytest.mark.parametrize("bad", [None, *BAD])
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_a_step_that_clips_reads_gradients_once(half: torch.dtype, bad: float | None, monkeypatch: Any) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("gradients are read by an operation of their own")

    monkeypatch.setattr("halfstep.kernels.multi_tensor.foreach_unscale_", refuse)
    params = [nn.Parameter(torch.ones(4, dtype=half)), nn.Parameter(torch.ones(70_001, dtype=half))]
    optimizer = optimizers.FusedAdam(params, lr=0.5, master_weights=True, max_grad_norm=1.0)
    scaler = amp.GradScaler(init_scale=8.0, decr_every_n_nan_or_inf=1)
    scaler.scale(torch.ones(()))
    for p in params:
        p.grad = torch.full_like(p, 16.0)
    if bad is not None:
        params[1].grad[70_000] = bad  # type: ignore[index]
    stepped = scaler.step(optimizer)
    scaler.update()
    assert bool(stepped) is (bad is None)
    assert scaler.get_scale() == (8.0 if bad is None else 4.0)
    assert [bool((p != 1.0).all()) for p in params] == [bad is None] * 2
    if bad is None:
        torch.testing.assert_close(optimizer.grad_norm, torch.tensor(2.0 * math.sqrt(70_005)))
