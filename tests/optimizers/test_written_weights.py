"""Weights that are written between the steps of a fused optimizer: the next step starts from what was written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import optimizers
from halfstep.kernels import backend
from halfstep.kernels.expr import ElementwiseKernel
from halfstep.kernels.launch import launch
from halfstep.kernels.storage import after_writes, dense, join, plain
from halfstep.kernels.tensor_table import TensorTable
from tests.support.backends import needs_interpreter
from tests.support.worlds import BF16, FP16, FP32, FP64, HALVES

BACKENDS = ["eager", "torch", "compiled", pytest.param("triton", marks=[needs_interpreter, pytest.mark.exhaustive])]

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adam": lambda p: optimizers.FusedAdam(p, lr=0.02, master_weights="plain"),
    "momentum": lambda p: optimizers.FusedSGD(p, lr=0.05, momentum=0.9, master_weights="plain"),
    "LAMB": lambda p: optimizers.FusedLAMB(p, lr=0.02, master_weights="plain"),
    "NovoGrad": lambda p: optimizers.FusedNovoGrad(p, lr=0.02, master_weights="plain"),
    "Adagrad": lambda p: optimizers.FusedAdagrad(p, lr=0.05, master_weights="plain"),
}


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        for name, shape in {"a": (6, 7), "b": (11,), "c": (2, 3, 4, 4), "d": ()}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        self.c.data = self.c.data.to(memory_format=torch.channels_last)


def in_place(net: Net, _: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.clamp_(-0.5, 0.5)


def through_data(net: Net, _: list[torch.Tensor]) -> None:
    for p in net.parameters():
        p.data.clamp_(-0.5, 0.5)


def loaded(net: Net, _: list[torch.Tensor]) -> None:
    net.load_state_dict({name: p.detach().clamp(-0.5, 0.5) for name, p in net.named_parameters()})


def new_memory(net: Net, _: list[torch.Tensor]) -> None:
    for p in net.parameters():
        p.data = p.data.clamp(-0.5, 0.5)


def swapped(net: Net, _: list[torch.Tensor]) -> None:
    average = Net(net.a.dtype)
    for p, q in zip(net.parameters(), average.parameters(), strict=True):
        p.data, q.data = q.data, p.data


def through_an_alias(net: Net, aliases: list[torch.Tensor]) -> None:
    for alias in aliases:
        alias.clamp_(-0.5, 0.5)


WAYS = [in_place, through_data, loaded, new_memory, swapped, through_an_alias]


def steps(net: Net, optim: Any, count: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optim.step()


def held(net: Net, optim: Any) -> list[torch.Tensor]:
    states = [optim.state[p] for p in net.parameters()]
    return [*net.parameters(), *(v for s in states for v in s.values() if isinstance(v, torch.Tensor))]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.costly
@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("on", BACKENDS)
def test_a_step_starts_from_what_was_written(on: str, dtype: torch.dtype, name: str, way: Callable[..., None]) -> None:
    net = Net(dtype)
    optim = OPTIMIZERS[name](net.parameters())
    aliases = [p.detach() for p in net.parameters()]
    with backend(on):
        steps(net, optim, 2)
        before = [p.detach().clone() for p in net.parameters()]
        way(net, aliases)
        written = [p.detach().clone() for p in net.parameters()]
        assert not same(before, written)
        other, twin = copy.deepcopy((net, optim))
        for p, was in zip(other.parameters(), before, strict=True):
            state = twin.state[p]
            state["master"] = torch.where(p.detach() == was, state["master"], p.detach().float())
        still, third = copy.deepcopy((net, optim))
        third.param_groups[0]["lr"] = 0.0
        steps(still, third, 1)
        assert same(written, list(still.parameters()))
        for m, o in ((net, optim), (other, twin)):
            steps(m, o, 2, seed=5)
    assert same(held(net, optim), held(other, twin))
    for p in net.parameters():
        assert torch.equal(p.detach(), optim.state[p]["master"].to(dtype))


@pytest.mark.costly
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("on", BACKENDS)
def test_unwritten_masters_are_fp32_weights_bit_for_bit(on: str, dtype: torch.dtype, name: str) -> None:
    half, full = Net(dtype), Net(dtype).float()
    a, b = OPTIMIZERS[name](half.parameters()), OPTIMIZERS[name](full.parameters())
    generator = torch.Generator().manual_seed(0)
    with backend(on):
        for _ in range(3 if on == "triton" else 50):
            for p, q in zip(half.parameters(), full.parameters(), strict=True):
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
                q.grad = p.grad.float()
            a.step()
            b.step()
    # LAMB clips by the norm of the gradients, and torch adds up squares of 16-bit and fp32 tensors in another order.
    exact = (on, name) != ("torch", "LAMB")
    for p, q in zip(half.parameters(), full.parameters(), strict=True):
        master = a.state[p]["master"]
        assert torch.equal(master, q) if exact else torch.allclose(master, q, rtol=1e-5, atol=1e-6)
        assert torch.equal(p, master.to(dtype))


# ---- element by element


def _same(param: Any) -> dict[str, Any]:
    return {"param": param}


def _scaled(param: Any, *, factor: Any) -> dict[str, Any]:
    return {"param": param * factor}


KEEP = ElementwiseKernel("keep", _same)
SCALED = ElementwiseKernel("scaled", _scaled)
CAST = ElementwiseKernel("cast", lambda source, target: {"target": source})


def bits(x: torch.Tensor) -> torch.Tensor:
    """Its bits, every NaN alike."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.where(x.isnan(), -1, x.view(whole))


def odd_pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of an odd master with an odd weight, and masters of any bits with their own weights and others."""
    info = torch.finfo(dtype)
    some = [0.0, 1.0, 1.0 + info.eps / 2, 1.0 + 3 * info.eps / 2, info.max, info.max * (1 + info.eps / 4), torch.inf]
    some += [info.tiny, info.tiny / 2, info.tiny * info.eps, info.tiny * info.eps / 2, torch.nan, 3e38, 1e-45]
    masters = torch.tensor([sign * x for x in some for sign in (1.0, -1.0)])
    pairs = torch.cartesian_prod(masters, masters)
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (4096,), generator=generator).to(torch.int32).view(FP32)
    near = (any_bits.view(torch.int32) & 0x0FFF_FFFF | 0x3000_0000).view(FP32)
    lists = [any_bits, near, any_bits, near]
    others = [any_bits, near, any_bits.roll(1), near * (1 + 2 * info.eps)]
    return torch.cat([pairs[:, 0], *lists]), torch.cat([pairs[:, 1], *others]).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("on", BACKENDS)
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast:RuntimeWarning")  # NumPy, interpreting
def test_what_counts_as_written(on: str, dtype: torch.dtype) -> None:
    first, second = odd_pairs(dtype)
    rounded = first.to(dtype)
    kept = (rounded == second) | (rounded.isnan() & second.isnan())
    expected = torch.where(kept, first, second.float())
    assert torch.equal(bits(after_writes(first, second)), bits(expected))
    master, weight = first.clone(), second.clone()
    with backend(on):
        launch(TensorTable({"param": (plain(dtype), ([master], [weight]))}), KEEP, {})
    assert torch.equal(bits(master), bits(expected))
    assert torch.equal(bits(weight), bits(expected.to(dtype)))
    assert (weight == second)[~second.isnan()].all(), "a written weight stays as it was written"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("on", BACKENDS)
def test_float64_arithmetic_rounds_weights_from_their_masters(on: str, dtype: torch.dtype) -> None:
    """Rounded from the float64 value, a weight next to a tie would be another than its master's: as if written."""
    master = torch.linspace(0.5, 4.0, 4096)
    weight = master.to(dtype)
    factor = 1.0 + 2.0**-30
    with backend(on):
        table = TensorTable({"param": (plain(dtype), ([master], [weight]))}, FP64)
        for _ in range(2):
            before = master.clone()
            launch(table, SCALED, {"factor": factor})
            assert torch.equal(master, (before.double() * factor).float())
            assert torch.equal(weight, master.to(dtype))


def test_float16_on_the_compiled_backend_is_torchs() -> None:
    """Every float16 there is, and what lies at and beside the middle of two of them."""
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(FP16)
    wide = torch.empty(len(halves))
    middle = halves.float().view(torch.int32)
    beside = [(middle + offset).view(FP32) for offset in (-1, 0, 1, 0xFFF, 0x1000, 0x1001)]
    values = torch.cat([*beside, halves.float() / 2, halves.float() * 3, torch.randn(1000) * 1e5])
    narrow = torch.empty(len(values), dtype=FP16)
    with backend("compiled"):
        for source, target in ((halves, wide), (values, narrow)):
            columns = {"source": (dense(source.dtype), ([source],)), "target": (dense(target.dtype), ([target],))}
            launch(TensorTable(columns), CAST, {})
    assert torch.equal(bits(wide), bits(halves.float()))
    assert torch.equal(bits(narrow), bits(values.to(FP16)))


# ---- from one form of masters to the other


def test_a_written_weight_outlives_the_change_to_split_masters() -> None:
    param = nn.Parameter(torch.full((3,), 5.0, dtype=BF16))
    optim = optimizers.FusedSGD([param], lr=0.0, master_weights="split")
    optim.state[param]["master"] = torch.tensor([5.0, 1.0, 5.001])
    param.grad = torch.ones_like(param)
    optim.step()
    assert param.tolist() == [5.0] * 3
    assert join(param.detach(), optim.state[param]["remainder"]).tolist() == pytest.approx([5.0, 5.0, 5.001])


# ---- at O2, and for autograd


@pytest.mark.parametrize("dtype", [FP32, *HALVES])
@pytest.mark.parametrize("on", ["eager", "torch", "compiled"])
def test_a_graph_from_before_a_step_does_not_see_its_weights(on: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    optim = optimizers.FusedAdam(model.parameters(), lr=0.1, master_weights=True)
    first, second = (model(torch.ones(2, 4, dtype=dtype)).square().sum() for _ in range(2))
    first.backward()
    with backend(on):
        versions = [p._version for p in model.parameters()]
        optim.step()
    assert all(p._version > version for p, version in zip(model.parameters(), versions, strict=True))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
