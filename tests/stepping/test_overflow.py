"""An overflow wherever it can be: nothing moves, and the host is not made to wait to learn of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep import amp, optimizers
from halfstep.fp16_utils import FP16_Optimizer
from tests.support.backends import skip_without_compiler
from tests.support.worlds import advance, scaled_backward, scaled_step, step_and_clear

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
        dense = [
            self.first,
            self.empty,
            self.beside_empty,
            self.scalar,
            self.strided,
            self.image,
            self.large,
            self.last,
        ]
        total = sum((p.float().sum() for p in dense), torch.zeros(()))
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


def make(model: Odd) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Face:
    """One way to train: ``backward`` leaves scaled gradients, calls ``spoil`` and unscales, ``step`` steps."""

    def __init__(self, model: Odd) -> None:
        self.model = model
        self.optimizer = make(model)

    def backward(self, spoil: Callable[[], None]) -> None:
        raise NotImplementedError

    def step(self) -> None:
        self.optimizer.step()

    def scale(self) -> float:
        raise NotImplementedError


class ScaleLoss(Face):
    def __init__(self, model: Odd) -> None:
        super().__init__(model)
        amp.initialize(model, self.optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0)

    def backward(self, spoil: Callable[[], None]) -> None:
        with amp.scale_loss(self.model.loss(), self.optimizer) as scaled:
            scaled.backward()
            spoil()

    def scale(self) -> float:
        return amp.state_dict()["loss_scaler0"]["loss_scale"]


class Scaler(Face):
    early = False

    def __init__(self, model: Odd) -> None:
        super().__init__(model)
        self.scaler = amp.GradScaler(init_loss_scaling=2.0**16, decr_every_n_nan_or_inf=1)

    def backward(self, spoil: Callable[[], None]) -> None:
        self.scaler.scale(self.model.loss()).backward()
        spoil()
        if self.early:
            self.scaler.unscale_(self.optimizer)

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def scale(self) -> float:
        return self.scaler.get_scale()


class EarlyScaler(Scaler):
    early = True


class Explicit(Face):
    def __init__(self, model: Odd) -> None:
        self.model = model
        self.optimizer = FP16_Optimizer(
            make(model), dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**16}, verbose=False
        )

    def backward(self, spoil: Callable[[], None]) -> None:
        self.optimizer.backward(self.model.loss(), update_master_grads=False)
        spoil()
        self.optimizer.update_master_grads()

    def scale(self) -> float:
        return self.optimizer.loss_scale


def everything(face: Face) -> list[torch.Tensor]:
    """Parameters and optimizer state, by value."""
    state = [v for entry in face.optimizer.state.values() for v in entry.values() if isinstance(v, torch.Tensor)]
    return [t.detach().to_dense().clone() for t in (*face.model.parameters(), *state)]


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("face", [ScaleLoss, Scaler, EarlyScaler, Explicit])
def test_nothing_moves(face: type[Face], position: str, bad: float) -> None:
    training = face(Odd())
    training.backward(lambda: None)
    training.step()
    training.optimizer.zero_grad()
    before, scale, last = everything(training), training.scale(), training.model.last.detach().clone()
    assert all(p.detach().ne(1).all() for p in (training.model.first, training.model.last))

    training.backward(lambda: POSITIONS[position](training.model).fill_(bad))
    training.step()
    training.optimizer.zero_grad()
    after = everything(training)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert training.scale() == scale / 2

    training.backward(lambda: None)
    training.step()
    assert not torch.equal(training.model.last, last)


@pytest.mark.parametrize("bad", BAD, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW, fused"])
def test_masters_do_not_move(optimizer: str, dtype: torch.dtype, bad: float) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    x = torch.randn(3, 4)
    name, _, fused = optimizer.partition(", ")
    optim = getattr(torch.optim, name)(model.parameters(), lr=0.1, fused=bool(fused))
    model, optim = amp.initialize(model, optim, opt_level="O2", dtype=dtype, loss_scale=128.0, verbosity=0)

    def train(factor: float) -> None:
        advance(model(x).square().sum() * factor, optim)

    train(1.0)
    before = copy.deepcopy([list(model.parameters()), list(amp.master_params(optim)), optim.state_dict()["state"]])
    train(bad)
    after = [list(model.parameters()), list(amp.master_params(optim)), optim.state_dict()["state"]]
    for left, right in zip(
        torch.utils._pytree.tree_leaves(before), torch.utils._pytree.tree_leaves(after), strict=True
    ):
        assert torch.equal(torch.as_tensor(left), torch.as_tensor(right))
    train(1.0)
    assert not torch.equal(model[0].weight, before[0][0])


def by_scale_loss(level: str, scale: Any) -> Callable[[nn.Module, Any], Callable[[torch.Tensor], None]]:
    def face(model: nn.Module, optim: Any) -> Callable[[torch.Tensor], None]:
        amp.initialize(model, optim, opt_level=level, dtype=torch.bfloat16, fused=False, loss_scale=scale, verbosity=0)

        def train(x: torch.Tensor) -> None:
            scaled_step(model(x).float().square().mean(), optim)

        return train

    return face


def by_scaler(
    make: Callable[[], Any], attach: bool, early: bool
) -> Callable[[nn.Module, Any], Callable[[torch.Tensor], None]]:
    def face(model: nn.Module, optim: Any) -> Callable[[torch.Tensor], None]:
        scaler = make()
        if attach:
            amp.initialize(model, optim, opt_level="O0", verbosity=0)

        def train(x: torch.Tensor) -> None:
            scaler.scale(model(x).float().square().mean()).backward()
            if early:
                scaler.unscale_(optim)
            scaler.step(optim)
            scaler.update()

        return train

    return face


FIRST_STEPS = {
    **{
        f"{level}, {scale}": by_scale_loss(level, scale)
        for level in ("O0", "O1", "O2", "O3")
        for scale in ("dynamic", 128.0)
    },
    **{
        f"GradScaler{', attached' if attach else ''}{', unscale_' if early else ''}": by_scaler(
            lambda: amp.GradScaler(init_loss_scaling=128.0), attach, early
        )
        for attach in (False, True)
        for early in (False, True)
    },
    "torch's GradScaler": by_scaler(lambda: torch.amp.GradScaler("cpu", init_scale=128.0), True, False),
}


@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.parametrize("face", FIRST_STEPS)
def test_a_first_step_that_overflows_leaves_no_momentum(
    face: str, dampening: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's fused SGD makes its momentum in the first step, and leaves it without values if the flag says to skip."""
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **how: torch.full_like(tensor, math.nan, **how))
    results = []
    for factors in ([1.0, 1.0], [math.inf, math.nan, 1.0, 1.0]):
        torch.manual_seed(0)
        model, x = nn.Linear(4, 2), torch.randn(3, 4)
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=dampening, fused=True)
        train = FIRST_STEPS[face](model, optim)
        start = model.weight.detach().float().clone()
        for factor in factors:
            train(x * factor)
            optim.zero_grad()
        amp.deactivate()
        results.append(model.weight.detach().float() - start)
    assert results[0].any()
    assert torch.equal(results[0], results[1])


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


@contextmanager
def reads() -> Iterator[Reads]:
    with Reads() as mode:
        yield mode


def test_reads_are_counted() -> None:
    with reads() as counted:
        torch.ones(()).item()
        assert torch.ones(())
        float(torch.ones(()))
    assert counted.count == 3


OPTIMIZERS = {"SGD": 1, "SGD, fused": 0, "SGD, dampened": 0, "AdamW, fused": 0, "FusedAdam, ours": 0}


def optimizer_of(name: str, params: Any) -> torch.optim.Optimizer:
    kind, _, fused = name.partition(", ")
    if fused == "ours":
        skip_without_compiler()  # torch's own steps read a flag
        return getattr(optimizers, kind)(params, lr=0.1)
    if fused == "dampened":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5, fused=True)
    return getattr(torch.optim, kind)(params, lr=0.1, **({"fused": True} if fused else {"foreach": False}))


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reads_of_a_step_of_grad_scaler(name: str, unscale: bool) -> None:
    param = nn.Parameter(torch.ones(3))
    scaler, optim = amp.GradScaler(), optimizer_of(name, [param])
    counts = []
    for step in range(4):
        with reads() as counted:
            scaler.scale((param * (math.inf if step == 3 else 1.0)).sum()).backward()
            if unscale:
                scaler.clip_grad_norm_(optim, 1.0)
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
        counts.append(counted.count)
    assert counts[2:] == [OPTIMIZERS[name]] * 2  # the first step that is taken may plan


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reads_of_a_step_of_scale_loss(name: str, level: str) -> None:
    model = nn.Linear(3, 1)
    optim = optimizer_of(name, model.parameters())
    model, optim = amp.initialize(
        model, optim, opt_level=level, dtype=torch.float16, loss_scale="dynamic", verbosity=0, fused=False
    )
    counts = []
    for step in range(6):
        with reads() as counted:
            loss = model(torch.full((1, 3), 0.5)).sum() * (math.inf if step == 5 else 1.0)
            scaled_backward(loss, optim)
            nn.utils.clip_grad_norm_(amp.master_params(optim), 1.0)
            step_and_clear(optim)
        counts.append(counted.count)
    assert counts[4:] == [OPTIMIZERS[name]] * 2  # the first that is taken may plan, and some passes look at inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reads_of_a_step_of_fp16_optimizer(name: str, dtype: torch.dtype) -> None:
    model = nn.Linear(3, 1).to(dtype)
    scale = {"init_scale": 128.0}  # the first step is taken
    optim = FP16_Optimizer(
        optimizer_of(name, model.parameters()), dynamic_loss_scale=True, dynamic_loss_args=scale, verbose=False
    )
    counts = []
    for step in range(4):
        with reads() as counted:
            optim.backward(model(torch.ones(1, 3, dtype=dtype)).float().sum() * (math.inf if step == 3 else 1.0))
            optim.clip_master_grads(1.0)
            step_and_clear(optim)
        counts.append(counted.count)
    assert counts[2:] == [OPTIMIZERS[name]] * 2  # the first step that is taken may plan, and it is the second at most


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_reads_of_a_step_of_the_handle(name: str) -> None:
    model, handle = nn.Linear(3, 1), amp.init(dtype=torch.bfloat16)
    try:
        optim = handle.wrap_optimizer(optimizer_of(name, model.parameters()))
        counts = []
        for step in range(4):
            with reads() as counted:
                with optim.scale_loss(
                    model(torch.ones(1, 3)).float().sum() * (math.inf if step == 3 else 1.0)
                ) as scaled:
                    scaled.backward()
                step_and_clear(optim)
            counts.append(counted.count)
    finally:
        handle._deactivate()
    assert counts[2:] == [OPTIMIZERS[name]] * 2  # the first step that is taken may plan, and it is the second at most


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
