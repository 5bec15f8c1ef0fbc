"""16-bit casts of the fp32 weights of fused optimizers at O1: their gradients stay in 16 bits, and with ``keep_casts``
no weight is cast in steady state. Writes are noticed by version and address; others call ``amp.clear_casts``."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep import Policy, amp, kernels, multi_tensor, optimizers
from halfstep.casting import weight_copies
from halfstep.casting.current import thread
from halfstep.core.errors import ArgumentTypeError, UsageError
from halfstep.core.torch_compat import StorageWeakRef
from halfstep.masters import keeper
from tests.support.backends import needs_compiler
from tests.support.processes import Ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
HALVES = [BF16, FP16]
X = torch.linspace(-1, 1, 24).view(4, 6)
Net = Any
NARROW = pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="needs Tensor.grad_dtype (torch 2.13)")

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: optimizers.FusedSGD(p, lr=0.05),
    "momentum": lambda p: optimizers.FusedSGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: optimizers.FusedAdam(p, lr=0.01, weight_decay=0.1),
    "Adam, clipped": lambda p: optimizers.FusedAdam(p, lr=0.01, max_grad_norm=0.01),
    "Adagrad": lambda p: optimizers.FusedAdagrad(p, lr=0.01),
    "LAMB": lambda p: optimizers.FusedLAMB(p, lr=0.01),
    "NovoGrad": lambda p: optimizers.FusedNovoGrad(p, lr=0.01),
}


@pytest.fixture(autouse=True)
def every_weight_is_worth_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_copies, "_MIN_ELEMENTS", 1)


@contextlib.contextmanager
def without_copies() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_copies, "_MIN_ELEMENTS", 2**60)
        yield


KEEPING = [True]


@contextlib.contextmanager
def keeping(keep: bool) -> Iterator[None]:
    """Within the block ``make`` passes ``keep_casts=keep``."""
    KEEPING.append(keep)
    yield
    KEEPING.pop()


def casts_weights() -> bool:
    """Whether the model of ``make`` casts its weights in each iteration."""
    return not KEEPING[-1] or weight_copies._MIN_ELEMENTS != 1


def make(dtype: torch.dtype = BF16, optimizer: str = "momentum", **arguments: Any) -> tuple[Net, Any]:
    torch.manual_seed(0)
    arguments.setdefault("keep_casts", KEEPING[-1])
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    optim = OPTIMIZERS[optimizer](model.parameters())
    return amp.initialize(model, optim, opt_level="O1", dtype=dtype, verbosity=0, **arguments)


def casts() -> int:
    return thread.cache.casts


def loss_of(model: Net, x: torch.Tensor = X) -> torch.Tensor:
    return (model(x).float() - 1).square().mean()


def backward(model: Net, optim: Any, factor: float = 1.0, **arguments: Any) -> None:
    with amp.scale_loss(loss_of(model) * factor, optim, **arguments) as scaled:
        scaled.backward()


def train(model: Net, optim: Any, steps: int = 3) -> None:
    for _ in range(steps):
        backward(model, optim)
        optim.step()
        optim.zero_grad()


def values(model: Net) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def both(run: Callable[[], list[torch.Tensor]]) -> None:
    """A run with 16-bit gradients, with casts kept or not, ends with the weights of one without, to the bit."""
    with without_copies():
        expected = run()
    for keep in (True, False):
        amp.deactivate()
        with keeping(keep):
            same(run(), expected)


# ---- steady state


@pytest.mark.exhaustive
@pytest.mark.parametrize("scale", [1.0, 128.0, "dynamic"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALVES)
def test_no_weight_is_cast_and_the_numbers_are_the_same(dtype: torch.dtype, optimizer: str, scale: Any) -> None:
    def run() -> list[torch.Tensor]:
        model, optim = make(dtype, optimizer, loss_scale=scale)
        train(model, optim, 2)
        before = casts()
        train(model, optim, 4)
        with torch.no_grad():
            model(X)
        assert casts() - before == (20 if casts_weights() else 0)  # four tensors in each of five passes
        return values(model)

    both(run)


INTERPRETED = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="Triton does not interpret here"
)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes what a skip drops
@pytest.mark.parametrize("backend", ["eager", "torch", "compiled", pytest.param("triton", marks=INTERPRETED)])
def test_on_each_backend(backend: str) -> None:
    def run() -> list[torch.Tensor]:
        with kernels.backend(backend):
            model, optim = make(FP16, "Adam", loss_scale="dynamic")
            train(model, optim, 4)
            backward(model, optim, factor=float("inf"))  # a step that writes nothing
            optim.step()
            train(model, optim, 1)
            return values(model)

    both(run)


@needs_compiler
def test_small_weights_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_copies, "_MIN_ELEMENTS", 48)
    model, optim = make()
    train(model, optim)
    before = casts()
    model(X)
    assert casts() - before == 3


@needs_compiler
@NARROW
@pytest.mark.parametrize("keep", [True, False])
def test_gradients_reach_the_step_in_16_bits_where_casts_are_kept(keep: bool) -> None:
    model, optim = make(keep_casts=keep)
    train(model, optim)
    backward(model, optim)
    large = BF16 if keep else FP32
    assert [p.grad.dtype for p in model.parameters()] == [large, large, FP32, FP32, large, large]
    optim.zero_grad()
    loss_of(model).backward()
    assert {p.grad.dtype for p in model.parameters()} == {FP32}


@NARROW
@pytest.mark.parametrize("way", ["passes", "delayed", "in one block", "a plain pass last"])
@pytest.mark.parametrize("scale", [1.0, 64.0])
def test_passes_add_up_in_fp32(scale: float, way: str) -> None:
    """A small gradient after a large one, which 16 bits would swallow."""
    model = nn.Linear(1, 1, bias=False)
    optim = optimizers.FusedSGD(model.parameters(), lr=0.0)
    amp.initialize(model, optim, opt_level="O1", dtype=BF16, loss_scale=scale, verbosity=0, keep_casts=True)
    x = [torch.full((1, 1), v) for v in (1.0, 2.0**-10, 2.0**-10)]
    for _ in range(3):  # the copy is there from the second on
        optim.zero_grad()
        if way == "in one block":
            losses = [model(v).sum() for v in x]
            with amp.scale_loss(losses[0], optim) as scaled:
                scaled.backward()
                for loss in losses[1:]:
                    (loss * scale).backward()
        else:
            for i, v in enumerate(x):
                if way == "a plain pass last" and i == 2:
                    model(v).sum().backward()
                    continue
                with amp.scale_loss(model(v).sum(), optim, delay_unscale=way == "delayed" and i < 2) as scaled:
                    scaled.backward()
        assert model.weight.grad.item() == 1.0 + 2.0**-9
        assert model.weight.grad.dtype is FP32
        optim.step()


# ---- doors: what happens to weights between two steps


def torch_step(cls: Any, **arguments: Any) -> Callable[[Net, Any], None]:
    def step(model: Net, optim: Any) -> None:
        other = cls(model.parameters(), lr=0.1, **arguments)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        other.step()
        other.zero_grad()

    return step


class WritesData(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with amp.disable_casts():
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.mul_(0.5)


def swap(model: Net, optim: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def swap_there_and_back(model: Net, optim: Any) -> None:
    """Evaluate with an average of the weights, then go on: the second memory may be where the first was."""
    backup = [p.data.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data * 0.5
    with torch.no_grad():
        model(X)
    for p, b in zip(model.parameters(), backup, strict=True):
        p.data = b + 1.0


def in_place(model: Net, optim: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def data_in_place(model: Net, optim: Any) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


def arrays(model: Net, optim: Any) -> None:
    for p in model.parameters():
        array = p.detach().numpy()
        array *= 0.5


def load(model: Net, optim: Any) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def vector(model: Net, optim: Any) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) * 0.5, model.parameters())


def there_and_back(model: Net, optim: Any) -> None:
    model.double().float()
    for p in model.parameters():
        p.data.mul_(0.5)


def kernel(model: Net, optim: Any) -> None:
    weights = [p.detach() for p in model.parameters()]
    flag = torch.zeros(1, dtype=torch.int32)
    multi_tensor.multi_tensor_applier(multi_tensor.multi_tensor_scale, flag, [weights, weights], 0.5)


def another_of_ours(model: Net, optim: Any) -> None:
    torch_step(optimizers.FusedSGD)(model, optim)


def deepcopies(model: Net, optim: Any) -> None:
    twin = copy.deepcopy(model)
    in_place(twin, optim)
    with torch.no_grad():
        model[0].weight.copy_(twin(X).sum())


def resume(model: Net, optim: Any) -> None:
    saved = copy.deepcopy(optim.state_dict())
    load(model, optim)
    optim.load_state_dict(saved)


def freeze(model: Net, optim: Any) -> None:
    for p in model[0].parameters():
        p.requires_grad_(not p.requires_grad)


DOORS: dict[str, Callable[[Net, Any], None]] = {
    "nothing": lambda model, optim: None,
    "load_state_dict": load,
    "data = x": swap,
    "no_grad": in_place,
    "vector_to_parameters": vector,
    "torch SGD": torch_step(torch.optim.SGD),
    "torch SGD fused": torch_step(torch.optim.SGD, fused=True),
    "torch Adam fused": torch_step(torch.optim.Adam, fused=True),
    "torch Adam foreach": torch_step(torch.optim.Adam, foreach=True),
    "an optimizer that writes data": lambda model, optim: WritesData(model.parameters(), {}).step(),
    "another of ours": another_of_ours,
    "a kernel of ours": kernel,
    "deepcopy": deepcopies,
    "reset_parameters": lambda model, optim: model[0].reset_parameters(),
    "init": lambda model, optim: nn.init.ones_(model[0].weight),
    "the optimizer's load_state_dict": resume,
    "frozen and thawed": freeze,
}

SECRET_DOORS: dict[str, Callable[[Net, Any], None]] = {
    "data.mul_": data_in_place,
    "data = x and back": swap_there_and_back,
    "to and back": there_and_back,
    "arrays": arrays,
    "set_": lambda model, optim: model[0].weight.data.set_(torch.full((8, 6), 0.1)),
}
"""After these ``amp.clear_casts`` must be called."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("often", ["every step", "once"])
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("door", DOORS | SECRET_DOORS)
def test_a_write_from_outside_is_noticed(door: str, dtype: torch.dtype, optimizer: str, often: str) -> None:
    def run() -> list[torch.Tensor]:
        model, optim = make(dtype, optimizer, loss_scale=1.0)
        outputs = []
        for step in range(12):
            if step > 2 if often == "every step" else step == 4:
                (DOORS | SECRET_DOORS)[door](model, optim)
                if door in SECRET_DOORS or casts_weights():
                    amp.clear_casts()
            train(model, optim, 1)
            outputs.append(model(X).detach())
        return [*values(model), *outputs]

    both(run)


@pytest.mark.parametrize("door", DOORS | SECRET_DOORS)
def test_a_cast_ends_with_the_step_unless_it_is_kept(door: str) -> None:
    """So any write between the step and the next forward pass counts, by whatever way it comes."""

    def run(clear: bool) -> list[torch.Tensor]:
        model, optim = make(optimizer="SGD", loss_scale=1.0, keep_casts=False)
        for _ in range(4):
            train(model, optim, 1)
            (DOORS | SECRET_DOORS)[door](model, optim)
            if clear:
                amp.clear_casts()
        return values(model)

    same(run(False), run(True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_cast_of_a_checkpoint_ends_with_the_backward_pass(reentrant: bool) -> None:
    model, _ = make(optimizer="SGD", loss_scale=1.0, keep_casts=False)
    inputs = X.clone().requires_grad_()
    checkpoint(model, inputs, use_reentrant=reentrant).sum().backward()  # type: ignore[no-untyped-call]
    for param in model.parameters():
        param.data.zero_()
    assert not model(X).any()


@pytest.mark.parametrize("keep", [True, False])
def test_clear_casts_in_every_thread(keep: bool) -> None:
    model, optim = make(keep_casts=keep)
    train(model, optim)
    before = model(X).detach()

    def write() -> None:
        data_in_place(model, optim)
        amp.clear_casts()

    worker = threading.Thread(target=write)
    worker.start()
    worker.join()
    after = model(X).detach()
    with amp.disable_casts():
        exact = model(X).detach()
    assert not torch.allclose(before.float(), after.float(), atol=0.05)
    torch.testing.assert_close(after.float(), exact, atol=0.05, rtol=0.05)


def test_a_step_that_fails() -> None:
    """The next one does not take what this one was to write for written."""

    def run() -> list[torch.Tensor]:
        model, optim = make(optimizer="SGD")
        train(model, optim)
        backward(model, optim)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optim, "_update", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optim.step()
        in_place(model, optim)
        optim.zero_grad()
        model[3].weight.grad = torch.ones_like(model[3].weight)  # the others take no part
        optim.step()
        train(model, optim)
        return values(model)

    both(run)


def test_inference_mode() -> None:
    def run() -> list[torch.Tensor]:
        model, optim = make()
        outputs = []
        for _ in range(4):
            with torch.inference_mode():
                outputs.append(model(X).clone())
            train(model, optim, 1)
        return [*values(model), *outputs]

    both(run)


@needs_compiler
@NARROW
def test_before_a_step_only_gradients_of_weights_that_another_optimizer_owns_are_widened() -> None:
    model, optim = make()
    other = torch.optim.SGD([next(model.parameters())], lr=0.1)
    train(model, optim)
    backward(model, optim)
    before = [p.grad.dtype for p in model.parameters()]
    assert before[0] is BF16
    weight_copies.widen_gradients(optim)
    assert [p.grad.dtype for p in model.parameters()] == before
    weight_copies.widen_gradients(other)
    assert [p.grad.dtype for p in model.parameters()] == [FP32, *before[1:]]


# ---- ways: how gradients come


def accumulate(model: Net, optim: Any) -> None:
    for factor in (1.0, 0.3, 0.1):
        backward(model, optim, factor)


def delayed(model: Net, optim: Any) -> None:
    backward(model, optim, delay_unscale=True)
    backward(model, optim, 0.3)


def plain(model: Net, optim: Any) -> None:
    loss_of(model).backward()
    (loss_of(model) * 0.3).backward()


def scaled_then_plain(model: Net, optim: Any) -> None:
    backward(model, optim)
    loss_of(model).backward()


def checkpointed(model: Net, optim: Any) -> None:
    for reentrant in (False, True):
        out = checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant)
        with amp.scale_loss((out.float() - 1).square().mean(), optim) as scaled:
            scaled.backward()


def clipped(model: Net, optim: Any) -> None:
    backward(model, optim)
    nn.utils.clip_grad_value_(model.parameters(), 0.5)  # a power of two, exact in 16 bits too


def clipped_by_us(model: Net, optim: Any) -> None:
    backward(model, optim, 0.3)
    backward(model, optim, 0.3)
    optim.clip_master_grads(1e-2)


def in_fp32_too(model: Net, optim: Any) -> None:
    before = sum(p.square().sum() for p in model.parameters())  # autograd comes to it last
    loss = loss_of(model)
    after = sum(p.square().sum() for p in model.parameters())
    for penalty in (before, after):
        with amp.scale_loss(loss + 0.1 * penalty, optim) as scaled:
            scaled.backward(retain_graph=True)


def second_order(model: Net, optim: Any) -> None:
    grads = torch.autograd.grad(loss_of(model), list(model.parameters()), create_graph=True)
    assert {g.dtype for g in grads} == {FP32}
    with amp.scale_loss(loss_of(model) + sum(g.square().sum() for g in grads), optim) as scaled:
        scaled.backward()


def casts_off(model: Net, optim: Any) -> None:
    with amp.disable_casts():
        loss = loss_of(model)
    with amp.scale_loss(loss, optim) as scaled:
        scaled.backward()


def overflow(model: Net, optim: Any) -> None:
    backward(model, optim, float("inf"))
    optim.step()
    optim.zero_grad()
    backward(model, optim)


def another_forward(model: Net, optim: Any) -> None:
    """Its casts are alive when the step comes."""
    backward(model, optim)
    model.kept = model(X)


def zeroed(model: Net, optim: Any) -> None:
    optim.zero_grad(set_to_none=False)
    backward(model, optim)
    model.zero_grad()
    backward(model, optim)


WAYS: dict[str, Callable[[Net, Any], None]] = {
    "accumulated": accumulate,
    "delayed": delayed,
    "plain": plain,
    "scaled, then plain": scaled_then_plain,
    "checkpointed": checkpointed,
    "clipped": clipped,
    "clipped by us": clipped_by_us,
    "weights used in fp32 too": in_fp32_too,
    "second order": second_order,
    "casts off": casts_off,
    "overflow": overflow,
    "another forward": another_forward,
    "zeroed": zeroed,
}


@pytest.mark.filterwarnings("ignore:.*came through no block of amp.scale_loss:UserWarning")  # "plain"
@pytest.mark.exhaustive
@pytest.mark.parametrize("scale", [1.0, "dynamic"])
@pytest.mark.parametrize("optimizer", ["momentum", "Adam"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_come_in_many_ways(way: str, dtype: torch.dtype, optimizer: str, scale: Any) -> None:
    def run() -> list[torch.Tensor]:
        model, optim = make(dtype, optimizer, loss_scale=scale)
        for step in range(6):
            if step % 3 == 2:
                train(model, optim, 1)
            WAYS[way](model, optim)
            optim.step()
            optim.zero_grad()
        return values(model)

    both(run)


@NARROW
def test_a_use_in_fp32_keeps_its_digits() -> None:
    """Autograd adds in place, in the dtype of what comes first: here that is the 16-bit gradient."""
    model: Net = nn.ParameterList([torch.ones(6, 3)])
    optim = optimizers.FusedSGD(model.parameters(), lr=0.0)
    amp.initialize(model, optim, opt_level="O1", dtype=BF16, loss_scale=1.0, verbosity=0)
    for _ in range(3):
        weight = model[0]
        small = weight.sum() * 2.0**-10
        with amp.scale_loss((torch.ones(1, 6) @ weight).sum() + small, optim) as scaled:
            scaled.backward()
        assert weight.grad[0, 0].item() == 1.0 + 2.0**-10
        optim.step()
        optim.zero_grad()


# ---- the optimizer's doors


@needs_compiler
def test_kept_casts_are_no_state() -> None:
    model, optim = make(optimizer="Adam")
    train(model, optim)
    plain, other = make(optimizer="Adam", keep_casts=False)
    train(plain, other)
    ours, theirs = optim.state_dict(), other.state_dict()
    assert [list(s) for s in ours["state"].values()] == [list(s) for s in theirs["state"].values()]
    assert ours["param_groups"] == theirs["param_groups"]
    assert abs(len(pickle.dumps(optim)) - len(pickle.dumps(other))) < 1000  # the casts have 32 kB or more
    for twin in (copy.deepcopy(optim), pickle.loads(pickle.dumps(optim))):
        assert twin.copies is None


def test_they_go_with_their_optimizer() -> None:
    model, optim = make()
    train(model, optim)
    before = casts()
    model(X)
    assert casts() == before
    del optim
    thread.cache.clear()
    model(X)
    assert casts() == before + 4


@needs_compiler
def test_a_group_that_comes_later() -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
        optim: Any = optimizers.FusedAdam(model[0].parameters(), lr=0.01)
        model, optim = amp.initialize(model, optim, opt_level="O1", dtype=BF16, verbosity=0, keep_casts=KEEPING[-1])
        train(model, optim)
        optim.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
        train(model, optim, 4)
        before = casts()
        model(X)
        assert casts() - before == (4 if casts_weights() else 0)
        return values(model)

    both(run)


@pytest.mark.parametrize("other", ["FusedSGD", "torch Adam", "torch Adam fused"])
@pytest.mark.parametrize("first", [True, False])
def test_parameters_in_two_optimizers(other: str, first: bool) -> None:
    makers: dict[str, Callable[[Any], Any]] = {
        "FusedSGD": lambda p: optimizers.FusedSGD(p, lr=0.1),
        "torch Adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "torch Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    }

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
        both_of = [optimizers.FusedAdam(model.parameters(), lr=0.01), makers[other](model[2].parameters())]
        model, both_of = amp.initialize(
            model,
            both_of if first else both_of[::-1],
            opt_level="O1",
            dtype=BF16,
            verbosity=0,
            keep_casts=KEEPING[-1],
        )
        for step in range(9):
            with amp.scale_loss(loss_of(model), both_of) as scaled:
                scaled.backward()
            for optim in both_of:
                if step % 3 == 2 or len(list(optim.param_groups[0]["params"])) == 4:
                    optim.step()
            for optim in both_of:
                optim.zero_grad()
        return values(model)

    both(run)


@pytest.mark.filterwarnings("ignore::halfstep.amp.PrecisionWarning")
@pytest.mark.parametrize("keep", [True, False])
def test_a_step_between_forward_and_backward(keep: bool) -> None:
    """As in a GAN. The backward pass uses the casts that forward used. Kept ones the step has written to, so autograd
    refuses it, as it does for the weights themselves in fp32."""

    def run() -> list[torch.Tensor]:
        model, optim = make(keep_casts=keep, emulate=False)  # emulated products keep small operands in fp32
        model[1] = nn.Identity()  # an fp32 weight that a step has changed is refused by autograd
        train(model, optim)
        x = X.clone().requires_grad_()
        loss = loss_of(model, x)
        backward(model, optim)
        optim.step()
        optim.zero_grad()
        loss.backward()
        assert x.grad is not None
        train(model, optim)
        return [x.grad, *values(model)]

    if keep:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run()
        return
    found = run()
    amp.deactivate()
    with without_copies():
        same(found, run())


@pytest.mark.parametrize("other", HALVES)
def test_a_scope_in_another_dtype(other: torch.dtype) -> None:
    def run() -> list[torch.Tensor]:
        model, optim = make(BF16, loss_scale=1.0)
        for _ in range(4):
            with amp.auto_cast(dtype=other):
                loss = loss_of(model)
            with amp.scale_loss(loss, optim) as scaled:
                scaled.backward()
            backward(model, optim)
            optim.step()
            optim.zero_grad()
        return values(model)

    both(run)


def test_larc() -> None:
    def run() -> list[torch.Tensor]:
        model, optim = make()
        larc = optimizers.LARC(optim)
        for _ in range(4):
            backward(model, optim)
            larc.step()
            optim.zero_grad()
        return values(model)

    both(run)


@pytest.mark.exhaustive
def test_compiled_models_cast_in_the_graph() -> None:
    def run() -> list[torch.Tensor]:
        torch._dynamo.reset()
        model, optim = make(optimizer="SGD")
        train(model, optim)
        compiled = torch.compile(model, backend="aot_eager")
        for _ in range(3):
            backward(compiled, optim)
            optim.step()
            optim.zero_grad()
        train(model, optim)
        return values(model)

    for a, b in zip(run(), run_without(run), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def run_without(run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    amp.deactivate()
    with without_copies():
        return run()


@needs_compiler
def test_a_torch_without_grad_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are used all the same; gradients come in fp32."""

    def run() -> list[torch.Tensor]:
        with monkeypatch.context() as patch:
            patch.setattr(keeper, "HAS_GRAD_DTYPE", False)
            model, optim = make(BF16, loss_scale=1.0)
        train(model, optim)
        before = casts()
        backward(model, optim)
        assert casts() - before == (4 if casts_weights() else 0)
        assert {p.grad.dtype for p in model.parameters()} == {FP32}
        return values(model)

    both(run)


def test_a_plain_scope_and_torchs_optimizers_keep_none() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 8)
    fused = optimizers.FusedSGD(model.parameters(), lr=0.1)
    for _ in range(3):
        before = casts()
        with amp.auto_cast(dtype=BF16):
            loss = model(X).float().sum()
        assert casts() == before + 2
        loss.backward()
        fused.step()
    other: Any = nn.Linear(6, 8)
    theirs: Any = torch.optim.SGD(other.parameters(), lr=0.1)
    other, theirs = amp.initialize(other, theirs, dtype=BF16, verbosity=0, keep_casts=True)
    train(other, theirs)
    before = casts()
    other(X)
    assert casts() == before + 2


# ---- whoever asks for it


@needs_compiler
@pytest.mark.parametrize("face", ["initialize", "policy", "decorate"])
def test_each_face_keeps_casts(face: str) -> None:
    def run(keep: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Net = nn.Linear(6, 8)
        optim: Any = optimizers.FusedAdam(model.parameters(), lr=0.01)
        if face == "initialize":
            amp.initialize(model, optim, dtype=BF16, verbosity=0, keep_casts=keep)
        elif face == "policy":
            policy = Policy.from_level("O1", BF16).replace(keep_casts=keep)
            assert Policy.parse(str(policy)) == policy
            amp.initialize(model, optim, policy=policy, verbosity=0)
        else:
            amp.decorate(model, optim, level="O1", dtype=BF16, keep_casts=keep)
        for _ in range(4):
            before = casts()
            with amp.auto_cast(dtype=BF16) if face == "decorate" else contextlib.nullcontext():
                loss = loss_of(model)
            if face == "decorate":
                loss.backward()
            else:
                with amp.scale_loss(loss, optim) as scaled:
                    scaled.backward()
            optim.step()
            optim.zero_grad()
        assert casts() - before == (0 if keep else 2)
        amp.deactivate()
        return values(model)

    same(run(True), run(False))


@pytest.mark.parametrize("keep", [True, False])
def test_without_a_session_gradients_add_up_in_fp32(keep: bool) -> None:
    """After ``amp.deactivate`` nobody knows of a backward pass that adds to a 16-bit gradient."""
    model: Any = nn.Linear(1, 1, bias=False)
    optim = optimizers.FusedSGD(model.parameters(), lr=0.0)
    amp.initialize(model, optim, opt_level="O1", dtype=BF16, loss_scale=1.0, verbosity=0, keep_casts=keep)
    amp.deactivate()
    for _ in range(2):
        optim.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 1)).sum(), optim) as scaled:
            scaled.backward()
        (model.weight.sum() * 2.0**-10).backward()
        assert model.weight.grad.item() == 1.0 + 2.0**-10
        optim.step()


def test_a_pass_that_fails_keeps_no_gradients() -> None:
    model, optim = make()
    brought: list[StorageWeakRef] = []
    model[3].weight.register_hook(lambda grad: brought.append(StorageWeakRef(grad.untyped_storage())))
    failing = model[0].weight.register_hook(lambda grad: 1 / 0)
    for fails in (True, False):
        try:
            backward(model, optim)
        except ZeroDivisionError:
            assert fails
        optim.zero_grad()
        failing.remove()
    assert [grad.expired() for grad in brought] == [True, True]


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "O2": (lambda m, o: amp.initialize(m, o, opt_level="O2", keep_casts=True), UsageError, "at O2 no weight is cast"),
    "O0": (lambda m, o: amp.initialize(m, o, opt_level="O0", keep_casts=True), UsageError, "at O0 no weight is cast"),
    "a number": (lambda m, o: amp.initialize(m, o, keep_casts=2), ArgumentTypeError, "must be True or False"),
    "beside a policy": (
        lambda m, o: amp.initialize(m, o, policy=Policy.from_level("O1"), keep_casts=True),
        UsageError,
        "put it into its keep_casts",
    ),
    "a policy without lists": (
        lambda m, o: amp.initialize(m, o, policy=Policy.from_level("O2").replace(keep_casts=True)),
        UsageError,
        "without op_lists no weight is cast",
    ),
    "a policy with a text": (
        lambda m, o: amp.initialize(m, o, policy=Policy.from_level("O1").replace(keep_casts="yes")),
        ArgumentTypeError,
        "keep_casts of the policy must be True or False",
    ),
    "decorate at O2": (
        lambda m, o: amp.decorate(m, o, level="O2", keep_casts=True),
        UsageError,
        "at O2 the weights themselves",
    ),
    "decorate, a text": (lambda m, o: amp.decorate(m, o, keep_casts="no"), ArgumentTypeError, "must be True or False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_no_weight_is_cast_there_is_nothing_to_keep(name: str) -> None:
    call, kind, message = REFUSED[name]
    model = nn.Linear(2, 2)
    with pytest.raises(kind, match=message):
        call(model, optimizers.FusedSGD(model.parameters(), lr=0.1))
    assert not model._forward_pre_hooks
    assert model.weight.dtype is FP32


# ---- several processes


def _ddp(rank: int, worth: int) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_copies, "_MIN_ELEMENTS", worth)
        model, optim = make(BF16, loss_scale=1.0)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(rank)
        train(model, optim)  # copies of this rank's own weights, which the wrapper overwrites
        wrapped = nn.parallel.DistributedDataParallel(model)
        for step in range(4):
            with wrapped.no_sync() if step == 2 else contextlib.nullcontext():
                with amp.scale_loss(loss_of(wrapped, X * (rank + 1)), optim) as scaled:
                    scaled.backward()
            if step == 2:
                continue
            optim.step()
            optim.zero_grad()
            for p in model.parameters():
                torch.distributed.all_reduce(p.data)
            amp.clear_casts()
        amp.deactivate()
        return values(model)


def test_distributed_data_parallel(ranks: Ranks) -> None:
    ours, theirs = ranks.run(_ddp, 1), ranks.run(_ddp, 2**60)
    for a, b in zip(ours, theirs, strict=True):
        same(a, b)
