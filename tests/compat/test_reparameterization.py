"""apex.reparameterization: the weight is always the one that its parameters make."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from halfstep.apex.reparameterization import (
    Reparameterization,
    apply_reparameterization,
    apply_weight_norm,
    remove_reparameterization,
    remove_weight_norm,
)
from torch import nn

from halfstep import amp
from halfstep.core.errors import ArgumentValueError
from tests.support.worlds import advance

MODULES = {
    "linear": (lambda: nn.Linear(4, 3), "weight", (2, 4)),
    "conv": (lambda: nn.Conv2d(2, 3, 3), "weight", (2, 2, 5, 5)),
    "lstm": (lambda: nn.LSTM(4, 3), "weight_hh_l0", (5, 2, 4)),
    "nested": (lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 3)), "1.weight", (2, 4)),
}


def out(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = module(x)
    return y[0] if isinstance(y, tuple) else y


def owner(module: nn.Module, name: str) -> tuple[Any, str]:
    return Reparameterization.get_module_and_name(module, name)


@pytest.mark.parametrize("dim", [0, 1, -1, None])
@pytest.mark.parametrize("kind", MODULES)
def test_same_function_then_gradients_of_g_and_v(kind: str, dim: int | None) -> None:
    make, name, shape = MODULES[kind]
    module, x = make(), torch.randn(shape)
    plain = copy.deepcopy(module)
    assert apply_weight_norm(module, name, dim=dim) is module
    torch.testing.assert_close(out(module, x), out(plain, x))
    inner, own = owner(module, name)
    assert {n.rpartition(".")[2] for n in module.state_dict()} >= {f"{own}_g", f"{own}_v"}
    out(module, x).square().sum().backward()
    g, v = getattr(inner, f"{own}_g"), getattr(inner, f"{own}_v")
    reference_g, reference_v = g.detach().clone().requires_grad_(), v.detach().clone().requires_grad_()
    others = None if dim is None else tuple(i for i in range(v.dim()) if i != dim % v.dim())
    norm = torch.linalg.vector_norm(reference_v, dim=others, keepdim=dim is not None)
    weight = reference_g * reference_v / norm
    parent, own = owner(plain, name)
    out(plain, x).square().sum().backward()
    weight.backward(getattr(parent, own).grad)
    torch.testing.assert_close(g.grad, reference_g.grad)
    torch.testing.assert_close(v.grad, reference_v.grad)


@pytest.mark.parametrize("kind", MODULES)
def test_never_a_stale_weight(kind: str) -> None:
    """Two forwards without a backward, in training, in evaluation and without gradients."""
    make, name, shape = MODULES[kind]
    module, x = apply_weight_norm(make(), name), torch.randn(shape)
    inner, own = owner(module, name)
    for train in (True, False):
        module.train(train)
        for grads in (True, False):
            with torch.set_grad_enabled(grads):
                before = out(module, x)
                with torch.no_grad():
                    getattr(inner, f"{own}_g").mul_(3.0)
                assert not torch.equal(out(module, x), before)
                torch.testing.assert_close(
                    getattr(inner, own).norm(), getattr(inner, f"{own}_g").norm(), rtol=1e-4, atol=1e-4
                )


@pytest.mark.parametrize("kind", MODULES)
def test_states_and_copies(kind: str) -> None:
    make, name, shape = MODULES[kind]
    module, x = apply_weight_norm(make(), name), torch.randn(shape)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(0.1)
    fresh = apply_weight_norm(make(), name)
    fresh.load_state_dict(module.state_dict())
    copied = copy.deepcopy(module)
    for other in (fresh, copied):
        assert torch.equal(out(other, x), out(module, x))
    with torch.no_grad():
        next(iter(copied.parameters())).add_(1.0)
    assert torch.equal(out(fresh, x), out(module, x)), "a copy has parameters of its own"
    assert not any("parametrizations" in key for key in module.state_dict())


@pytest.mark.parametrize("kind", MODULES)
def test_removing_leaves_the_value(kind: str) -> None:
    make, name, shape = MODULES[kind]
    plain = make()
    module, x = apply_weight_norm(copy.deepcopy(plain), name), torch.randn(shape)
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(1.5)
    expected = out(module, x)
    assert remove_weight_norm(module, name) is module
    torch.testing.assert_close(out(module, x), expected)
    assert module.state_dict().keys() == plain.state_dict().keys()
    inner, own = owner(module, name)
    assert isinstance(getattr(inner, own), nn.Parameter)
    with torch.no_grad():
        getattr(inner, own).mul_(2.0)
    assert not torch.equal(out(module, x), expected)
    plain.load_state_dict(module.state_dict())
    with pytest.raises(ArgumentValueError, match="is reparameterized"):
        remove_weight_norm(module, name)


def test_everything_at_once() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2)))
    apply_weight_norm(model)
    keys = set(model.state_dict())
    assert keys == {"0.weight", "1.weight_g", "1.weight_v", "1.bias", "2.0.weight_g", "2.0.weight_v", "2.0.bias"}
    model(torch.arange(5)).sum().backward()
    remove_weight_norm(model, remove_all=True)
    assert set(model.state_dict()) == {"0.weight", "1.weight", "1.bias", "2.0.weight", "2.0.bias"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_norms_of_16_bit_weights_are_computed_in_fp32(dtype: torch.dtype) -> None:
    layer: Any = nn.Linear(512, 2, bias=False)
    with torch.no_grad():
        layer.weight.fill_(60.0)
    layer = apply_weight_norm(layer.to(dtype))
    # The sum of squares, 1.8e6, is beyond float16.
    assert layer.weight.dtype is dtype
    torch.testing.assert_close(
        layer.weight_g.double(), torch.full((2, 1), 60.0 * 512**0.5).double(), rtol=1e-2, atol=0.0
    )
    torch.testing.assert_close(layer.weight.double(), torch.full((2, 512), 60.0).double(), rtol=1e-2, atol=0.0)
    layer.float()
    assert layer.weight.dtype is torch.float32
    layer.half()
    assert layer.weight.dtype is layer.weight_v.dtype is torch.float16


class Scaled(Reparameterization):
    """w = 2 * half."""

    def compute_weight(self, module: Any = None, name: str | None = None) -> torch.Tensor:
        return 2 * getattr(module, f"{name}_half")

    def reparameterize(self, name: str, weight: torch.Tensor, dim: Any) -> tuple[list[str], list[torch.Tensor]]:
        return [f"{name}_half"], [weight / 2]


def test_one_of_ones_own() -> None:
    layer: Any = nn.Linear(2, 2)
    before = layer.weight.detach().clone()
    apply_reparameterization(layer, Scaled, "weight")
    assert torch.equal(layer.weight_half, before / 2)
    assert torch.equal(layer.weight, before)
    with pytest.raises(ArgumentValueError, match="WeightNorm"):
        remove_weight_norm(layer)
    remove_reparameterization(layer)
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_levels(level: str, dtype: torch.dtype) -> None:
    model: Any = apply_weight_norm(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = {} if level == "O0" else {"dtype": dtype}
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0, **kind)
    x = torch.randn(8, 4)
    losses = []
    for _ in range(40):
        loss = (model(x).float() - 1).square().mean()
        advance(loss, optimizer)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 5
