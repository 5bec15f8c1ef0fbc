"""What emulated products keep for the backward pass: 16-bit operands, from which backward gets the same bits."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from halfstep import amp, static
from halfstep.casting import operands, rules
from tests.support.worlds import HALVES, Made, assert_equal


class Attention(nn.Module):
    """A transformer block that computes its attention by hand, from transposed heads."""

    def __init__(self, flash: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(64), nn.LayerNorm(64)])
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.flash = flash

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).split(64, 2))
        if self.flash:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = F.softmax(q @ k.transpose(-2, -1) / 4, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def looped(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Use one weight in several products, each of which reads what the one before it has computed."""
    for _ in range(4):
        x = torch.tanh(self.layer(x)) + x
    return x


def lstm() -> nn.Module:
    return Made(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(64, 64))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], float]] = {  # and the most that O2 keeps of fp32
    "MLP": (lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 2)),
            (512, 64), 0.55),
    "CNN": (lambda: nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
                                  nn.Conv2d(16, 8, 3, groups=4)), (8, 4, 24, 24), 0.55),
    "transformer block": (Attention, (4, 64, 64), 0.55),
    "flash attention": (partial(Attention, flash=True), (4, 64, 64), 0.60),  # its fp32 result is needed, too
    "LSTM": (lstm, (32, 16, 64), 1.0),  # nearly all is the memory of oneDNN
    "loop": (lambda: Made(looped, layer=nn.Linear(64, 64)), (128, 64), 0.55),
}  # fmt: skip


def kept_bytes(run: Callable[[], object]) -> int:
    """Of all memory that a forward pass allocates and does not free, whoever keeps it."""
    with profile(profile_memory=True) as prof:
        result = run()
    del result
    return sum(event.cpu_memory_usage for event in prof.function_events if event.cpu_parent is None)


def saved_bytes(run: Callable[[], object], model: nn.Module) -> int:
    """Of all memory that autograd hands to hooks of the user's, without parameters."""
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = run()
    for param in model.parameters():
        sizes.pop(param.untyped_storage().data_ptr(), None)
    del result
    return sum(sizes.values())


def brought_up(
    name: str, level: str, dtype: torch.dtype, *, emulate: bool = True
) -> tuple[Callable[[torch.Tensor], torch.Tensor], nn.Module]:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    if level == "O2":
        amp.initialize(model, opt_level="O2", dtype=dtype, verbosity=0, emulate=emulate)
        return model, model

    def run(x: torch.Tensor) -> torch.Tensor:
        with amp.auto_cast(dtype=dtype, emulate=emulate):
            return model(x)  # type: ignore[no-any-return]

    return run, model


@contextmanager
def keeping_fp32() -> Iterator[None]:
    """Products keep the operands that their kernels read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "saved_hooks_allowed", lambda: False)
        yield


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_activations_take_16_bits(name: str, dtype: torch.dtype) -> None:
    make, shape, most = MODELS[name]
    x, plain = torch.randn(shape), make()
    full = saved_bytes(lambda: plain(x), plain)
    run, model = brought_up(name, "O2", dtype)
    assert saved_bytes(lambda: run(x), model) <= most * full


@pytest.mark.filterwarnings("ignore::halfstep.core.errors.PrecisionWarning")
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "LSTM"])
def test_memory_is_that_of_a_device_with_units(name: str, level: str) -> None:
    x = torch.randn(MODELS[name][1])
    kept = []
    for emulate in (True, False):
        run, _ = brought_up(name, level, torch.bfloat16, emulate=emulate)
        kept.append(kept_bytes(lambda run=run: run(x)))  # type: ignore[misc]
    assert kept[0] <= 1.15 * kept[1]  # the fp32 result of flash attention is kept, too


def results(run: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    y.float().square().mean().backward()
    found = [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    return found  # type: ignore[return-value]


WAYS: dict[str, Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "plain": lambda run: run,
    "checkpoint": lambda run: partial(checkpoint, run, use_reentrant=False),
    "reentrant checkpoint": lambda run: partial(checkpoint, run, use_reentrant=True),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("way", [*WAYS, "hooks of the user's"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_have_the_bits_that_fp32_operands_give(
    name: str, way: str, level: str, dtype: torch.dtype
) -> None:
    run, model = brought_up(name, level, dtype)
    x = torch.randn(MODELS[name][1])
    taken = WAYS.get(way, WAYS["plain"])(run)  # a reentrant checkpoint runs an LSTM in the kernel of inference, too
    with keeping_fp32():
        expected = results(taken, model, x)
    if way in WAYS:
        found = results(taken, model, x)
    else:  # which lose the layout, as those that copy to pinned memory
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous().clone(), lambda t: t):
            found = results(run, model, x)
    assert_equal(found, expected)


@pytest.mark.exhaustive
def test_a_captured_program_keeps_16_bits_too() -> None:
    x, y = torch.randn(512, 64), torch.arange(512) % 2

    def train() -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        program = static.capture(MODELS["MLP"][0](), F.cross_entropy, (x, y))
        optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
        static.amp.decorate(optimizer, level="O2", dtype="bfloat16", emulate=True).minimize(program.loss)
        step = partial(static.Executor().run, program, dict(zip(program.feed_names, (x, y), strict=True)))
        kept = saved_bytes(step, nn.Module())
        step()
        return kept, [p.detach().clone() for p in program.parameters()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operands.torch_compat, "saved_hooks_allowed", lambda: False)
        wide, expected = train()
    kept, found = train()
    assert kept < 0.6 * wide
    assert_equal(found, expected)


def test_a_checkpoint_frees_what_is_inside() -> None:
    run, model = brought_up("MLP", "O2", torch.bfloat16)
    x = torch.randn(512, 64, requires_grad=True)
    assert saved_bytes(lambda: checkpoint(run, x, use_reentrant=False), model) <= x.nbytes


def test_second_derivatives_and_a_second_backward_pass() -> None:
    w, x = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)

    def penalty() -> list[torch.Tensor]:
        with amp.auto_cast(dtype="bfloat16", emulate=True):
            y = F.softplus(x @ w)
        (slope,) = torch.autograd.grad(y.sum(), w, create_graph=True)
        (again,) = torch.autograd.grad(y.sum(), w, retain_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), w)
        return [slope.detach(), again, second]

    with keeping_fp32():
        expected = penalty()
    assert_equal(penalty(), expected)


def test_torch_func_works_as_before() -> None:
    w, x = torch.randn(64, 64), torch.randn(8, 64, 64)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with amp.auto_cast(dtype="bfloat16", emulate=True):
            return (x @ w).float().square().mean()

    slopes = torch.vmap(torch.func.grad(loss), (None, 0))(w, x)
    with keeping_fp32():
        assert torch.equal(slopes, torch.vmap(torch.func.grad(loss), (None, 0))(w, x))
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert torch.equal(loss(w, x[0]), loss(w, x[0]))


@pytest.mark.parametrize("written", ["input", "weight"])
def test_a_write_to_what_is_kept_is_found_by_the_backward_pass(written: str) -> None:
    layer, x = nn.Linear(64, 64).bfloat16(), torch.randn(64, 64).bfloat16().requires_grad_()
    with amp.auto_cast(dtype="bfloat16", emulate=True):
        hidden = x * 1
        y = layer(hidden)
    with torch.no_grad():
        (hidden if written == "input" else layer.weight).add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.BFloat16Tensor \[64, 64\]\]"):
        y.sum().backward()


def test_a_product_that_is_written_to_is_no_operand() -> None:
    layer, x = nn.Linear(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    with amp.auto_cast(dtype="bfloat16", emulate=True):
        y = F.relu_(layer(x))
    y.sum().backward()
    assert layer.weight.grad is not None


def test_numbers_that_16_bits_do_not_have_stay_in_fp32() -> None:
    """einsum adds up an operand before it multiplies, and autograd keeps the sum."""
    a, b = torch.randn(64, 64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)

    def gradients() -> tuple[torch.Tensor, ...]:
        with amp.auto_cast(dtype="bfloat16", emulate=True):
            y = torch.einsum("ijk,jl->il", a, b)
        return torch.autograd.grad(y.float().square().sum(), (a, b))

    with keeping_fp32():
        expected = gradients()
    assert_equal(gradients(), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("grad", [True, False])
def test_widened_weights_are_gone_after_their_product(grad: bool) -> None:
    model = nn.Sequential(*(nn.Linear(67, 67) for _ in range(4)))
    model = amp.initialize(copy.deepcopy(model), opt_level="O2", dtype="bfloat16", verbosity=0, emulate=True)
    alive = []

    def count(*_: object) -> None:
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype is torch.float32]
        alive.append(sum(t.shape == (67, 67) for t in tensors))

    model[3].register_forward_pre_hook(count)
    with torch.set_grad_enabled(grad):
        y = model(torch.randn(8, 67))
    assert alive == [0]
    assert y.requires_grad is grad


def test_under_inference_mode() -> None:
    run, _ = brought_up("loop", "O2", torch.bfloat16)
    x = torch.randn(128, 64)
    with torch.inference_mode():
        y = run(x)
    assert torch.equal(y, run(x))
