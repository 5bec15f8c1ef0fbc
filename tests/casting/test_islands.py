"""Islands: a module that the user has chosen is in fp32 with all modules in it, at every level and by every way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep import amp
from halfstep.integrations.recipe import Recipe

BF16, FP32 = torch.bfloat16, torch.float32


class Attention(nn.Module):
    """Its scores overflow in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = (nn.Linear(8, 8) for _ in range(3))
        self.again, self.seen = False, []

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.attend, x, use_reentrant=False) if self.again else self.attend(x)

    def attend(self, x: torch.Tensor) -> Any:
        q, k = self.q(x * 100), self.k(x * 100)
        self.seen.append((x.dtype, q.dtype))
        return self.out((q @ k.mT).softmax(-1) @ x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.head = nn.Linear(8, 8), Attention(), nn.Linear(8, 8)
        self.reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        how = self.reentrant
        return self.head(x + (self.attention(x) if how is None else checkpoint(self.attention, x, use_reentrant=how)))


X = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))

SPELLINGS: dict[str, Callable[[Net], dict[str, Any]]] = {
    "name": lambda net: {"excluded_layers": "attention"},
    "type": lambda net: {"excluded_layers": Attention},
    "layer": lambda net: {"excluded_layers": (net.attention,)},
    "function": lambda net: {"excluded_layers": lambda module, name: name.startswith("att")},
    "filter": lambda net: {"module_filter": lambda module, name: "float32" if name == "attention" else None},
}


def made(cls: Callable[[], nn.Module] = Net, **options: Any) -> Any:
    torch.manual_seed(0)
    return amp.initialize(cls(), opt_level="O2", dtype="bfloat16", verbosity=0, **options)


@pytest.mark.parametrize("face", ["O1", "O2", "O3", "decorate", "recipe"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_an_attention_that_overflows_trains_as_an_island(face: str, spelling: str) -> None:
    net = Net()
    options, optimizer = SPELLINGS[spelling](net), torch.optim.SGD(net.parameters(), lr=0.1)
    if face == "recipe":
        amp.give_masters(optimizer, Recipe("O2", "float16", **options).cast(net) and None)
    elif face == "decorate":
        amp.decorate(net, optimizer, level="O2", dtype="float16", **options)
    else:
        amp.initialize(net, optimizer, opt_level=face, dtype="float16", loss_scale=1.0, verbosity=0, **options)
    losses = []
    for _ in range(5):
        losses.append(net(X.to(net.first.weight.dtype)).float().square().mean())
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert set(net.attention.seen) == {(FP32, FP32)}


WAYS: dict[str, Callable[[Any], Any]] = {
    "copy": copy.deepcopy,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),
    "reentrant checkpoint": lambda net: setattr(net, "reentrant", True) or net,
    "checkpoint": lambda net: setattr(net, "reentrant", False) or net,
    "checkpoint in it": lambda net: setattr(net.attention, "again", True) or net,
    "functional_call": lambda net: lambda x: torch.func.functional_call(net, dict(net.named_parameters()), (x,)),
    "compile": lambda net: torch.compile(net, backend="eager", fullgraph=True),
    "trace": lambda net: torch.jit.trace(net, (X,)),
    "export": lambda net: torch.export.export(net, (X,), strict=False).module(),
    "auto_cast": lambda net: amp.auto_cast(dtype="bfloat16", level="O2")(net.__call__),
}


@pytest.mark.filterwarnings("ignore:.*jit.trace:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_islands_are_the_same_by_every_way(way: str) -> None:
    expected = made(excluded_layers=["attention", "head"])(X)
    net = made(excluded_layers=["attention", "head"])
    result = WAYS[way](net)(X)
    assert torch.equal(result, expected)
    assert not torch.equal(result, result.to(BF16).float())  # logits of the fp32 head
    if way not in ("copy", "pickle", "trace", "export"):
        result.sum().backward()
        assert set(net.attention.seen) == {(FP32, FP32)}


class Head(nn.Module):
    """It has a layer that is called from outside, too, and a 16-bit weight of another module."""

    def __init__(self, shared: nn.Module, other: nn.Linear) -> None:
        super().__init__()
        self.shared, self.last, self.other = shared, nn.Linear(8, 8), [other.weight]

    def forward(self, x: torch.Tensor, written: torch.Tensor) -> Any:
        weight = self.other[0]
        self.dtypes = [each.dtype for each in (weight @ weight, weight + weight, weight.sum(), F.linear(x, weight))]
        self.in_place = weight.detach().clone().mul_(2).dtype
        written.add_(1)
        return self.last(self.shared(x))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two = Head(self.one, self.body)

    def forward(self, x: torch.Tensor) -> Any:
        x, written = self.body(x), torch.zeros(2, dtype=self.body.weight.dtype)
        with amp.auto_cast(enable=False):
            wide = self.one(x.float())
        self.around = wide.dtype, self.one(x).dtype, self.one.forward(x.float()).dtype
        return {"one": self.one(x), "two": self.two(x, written), "written": written}


def test_what_an_island_does_is_decided_when_it_is_called() -> None:
    net = made(Heads, excluded_layers=["one", "two"])
    result = net(X)
    assert all(not torch.equal(result[name], result[name].to(BF16).float()) for name in ("one", "two"))
    assert (result["written"].tolist(), net.around) == ([1, 1], (FP32, BF16, FP32))
    assert (set(net.two.dtypes), net.two.in_place) == ({FP32}, BF16)
    assert made(lambda: nn.Linear(8, 8), excluded_layers="")(X).dtype is FP32, "the model is an island"


def test_a_16_bit_module_in_an_island_is_a_border_in_it() -> None:
    net = made(module_filter=lambda module, name: {"attention": FP32, "attention.q": BF16}.get(name))
    net.attention.q.register_forward_pre_hook(lambda module, args: vars(net).update(given=args[0].dtype))
    net(X)
    assert (net.given, net.attention.q.weight.dtype, net.attention.k.weight.dtype) == (BF16, BF16, FP32)
    assert set(net.attention.seen) == {(FP32, FP32)}
