"""Islands: a module that the user has chosen is in fp32 with all modules in it, at every level and by every way.

The body of the model computes with numbers that 16 bits have all. So what islands compute, and their gradients, must be
the numbers of the model in fp32.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfstep import amp
from tests.support.worlds import BF16, FP32

X = torch.arange(12.0).reshape(3, 4) % 5
ISLANDS = ["head", "inner", "wide"]


class Twice(torch.autograd.Function):
    """Its backward pass uses what an island has returned beside a weight of the body."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 3 + torch.mm(*ctx.saved_tensors) * 0, None


class Inner(nn.Module):
    """Uses a weight of another module, and a buffer of its own."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own, self.other = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), [other]
        self.register_buffer("buffer", torch.full((4,), 1 / 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.own(F.linear(x, self.other[0].weight) @ self.own[0].weight) + self.buffer


class Net(nn.Module):
    def __init__(self, situation: str = "at the end") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.wide = nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Embedding(4, 4)
        self.inner = Inner(self.body)
        self.body.weight.data = torch.eye(4) + torch.eye(4).roll(1, 0)
        self.situation = situation

    def forward(self, x: torch.Tensor) -> Any:
        return SITUATIONS[self.situation](self, self.body(x))


def written(net: Net, x: torch.Tensor) -> torch.Tensor:
    result = net.head(x)
    view, again = result[:, 1], result
    result[0] = 7.3
    view.add_(0.1)
    return again.mul_(1.1)


def hooked(net: Net, x: torch.Tensor) -> torch.Tensor:
    with net.head.register_forward_hook(lambda module, args, result: result * 1.1):
        result = net.head(x)
    if result.requires_grad:
        result.register_hook(lambda grad: grad * 1.1)
    return result


def to_out(net: Net, x: torch.Tensor) -> torch.Tensor:
    wide, outs = net.head(x), [torch.empty(3, 4, dtype=dtype) for dtype in (net.body.weight.dtype, FP32, FP32)]
    products = [torch.mm(wide.detach(), net.body.weight.detach(), out=out) for out in outs]
    return wide + products[-1]


SITUATIONS: dict[str, Callable[[Net, torch.Tensor], Any]] = {
    "at the end": lambda net, x: net.head(x),
    "nested, shared weight, closure and buffer": lambda net, x: net.inner(x),
    "written in place": written,
    "detach_": lambda net, x: net.head(x).detach_().add_(0.1) + net.inner(x),
    "hooks": hooked,
    "autograd.Function": lambda net, x: Twice.apply(net.head(x), net.body.weight),
    "reentrant checkpoint": lambda net, x: checkpoint(net.head, x, use_reentrant=True),
    "checkpoint": lambda net, x: checkpoint(net.inner, x, use_reentrant=False),
    "checkpoint that writes": lambda net, x: checkpoint(written, net, x, use_reentrant=True),
    "checkpoint of what follows": lambda net, x: checkpoint(
        Twice.apply, net.head(x), net.body.weight, use_reentrant=True
    ),
    "functional_call": lambda net, x: torch.func.functional_call(net.head, dict(net.head.named_parameters()), (x,)),
    "residual": lambda net, x: (x + net.head(x)) / 3,
    "out=": to_out,
    "embedding": lambda net, x: net.wide(x.argmax(-1)) + net.inner(x),
}


def initialized(level: str, **options: Any) -> Callable[[Net], Any]:
    return lambda net: amp.initialize(net, opt_level=level, dtype="bfloat16", verbosity=0, **options)


def decorated(level: str) -> Callable[[Net], Any]:
    decorate = lambda net: amp.decorate(net, level=level, dtype="bfloat16", excluded_layers=ISLANDS)  # noqa: E731
    return lambda net: amp.auto_cast(level=level, dtype="bfloat16")(decorate(net).__call__)


def adapted(name: str, level: str) -> Callable[[Net], Any]:
    def bring_up(net: Net) -> Any:
        library = pytest.importorskip(name)
        adapter = pytest.importorskip(f"halfstep.integrations.{name}")
        if name == "accelerate":
            accelerator = library.Accelerator(cpu=True)
            return adapter.attach(accelerator, level, "bfloat16", excluded_layers=ISLANDS).prepare(net)
        precision = adapter.HalfstepPrecision(level, "bfloat16", excluded_layers=ISLANDS)
        return precision.forward_context()(precision.convert_module(net).__call__)

    return bring_up


DOORS: dict[str, Callable[[Net], Any]] = {
    **{level: initialized(level, excluded_layers=ISLANDS) for level in ("O0", "O1", "O2", "O3")},
    "types": initialized("O2", excluded_layers={nn.Embedding, Inner, "head"}),
    "a function": initialized("O2", excluded_layers=lambda module, name: name in ISLANDS),
    "modules": lambda net: initialized("O2", excluded_layers=(net.head, net.inner, net.wide))(net),
    "module_filter": initialized("O2", module_filter=lambda module, name: "float32" if name in ISLANDS else None),
    **{f"decorate {level}": decorated(level) for level in ("O1", "O2")},
    **{f"{name} {level}": adapted(name, level) for name in ("lightning", "accelerate") for level in ("O1", "O2")},
}
WAYS: dict[str, Callable[[Any], Any]] = {
    "copy and pickle": lambda net: pickle.loads(pickle.dumps(copy.deepcopy(net))),
    "functional_call": lambda net: lambda x: torch.func.functional_call(net, dict(net.named_parameters()), (x,)),
    "compile": lambda net: torch.compile(net, backend="eager", fullgraph=True),
    "trace": lambda net: amp.disable_casts()(torch.jit.trace(net, (X,), check_trace=False).forward),
    "export": lambda net: amp.disable_casts()(torch.export.export(net, (X,), strict=False).module().forward),
    "a thread, as DataParallel": lambda net: lambda x: ThreadPoolExecutor(1).submit(net, x).result(),
}


def outcome(net: Net, call: Callable[..., Any]) -> list[torch.Tensor]:
    """The result, and the gradients of the islands."""
    result = call(X)
    (result * torch.linspace(0.3, 1.7, 12).reshape(3, 4)).sum().backward()
    return [result, *(p.grad for name, p in net.named_parameters() if p.grad is not None and "body" not in name)]


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("door", DOORS)
def test_islands_compute_as_a_model_in_fp32(door: str, situation: str) -> None:
    reference, net = Net(situation), Net(situation)
    expected, found = outcome(reference, reference), outcome(net, DOORS[door](net))
    assert {each.dtype for each in found} == {FP32}
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*jit.trace:DeprecationWarning")
@pytest.mark.parametrize("situation", ["at the end", "nested, shared weight, closure and buffer", "residual"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("way", WAYS)
def test_islands_are_the_same_by_every_way(way: str, level: str, situation: str) -> None:
    reference, net = Net(situation), Net(situation)
    result = WAYS[way](initialized(level, excluded_layers=ISLANDS)(net))(X)
    with amp.disable_casts():
        torch.testing.assert_close(result, reference(X), rtol=1e-6, atol=1e-6)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.again = nn.Sequential(self.one)

    def forward(self, x: torch.Tensor) -> Any:
        x, one = self.body(x), self.one
        with amp.auto_cast(enable=False):
            wide = one(x.float())
        return [each.dtype for each in (wide, one(x), one.forward(x.float()), F.linear(x, one.weight), self.two(x))]


def test_what_an_island_does_is_decided_when_it_is_called() -> None:
    net = initialized("O2", excluded_layers=["one", "again"])(Heads())
    assert net(X) == [FP32, FP32, FP32, BF16, BF16]
    assert net.one(X.to(BF16)).dtype is BF16, "where no ops meet, a 16-bit layer that follows would refuse fp32"
    assert initialized("O2", excluded_layers="")(nn.Linear(4, 4))(X).dtype is FP32, "the model is an island"
    layers = nn.Linear(4, 4), nn.Linear(4, 4)
    assert initialized("O2", excluded_layers="0", cast_ops=False)(nn.Sequential(*layers))(X).dtype is FP32


def test_an_island_writes_to_its_arguments_and_has_inner_borders() -> None:
    class Outer(nn.Sequential):
        def forward(self, x: torch.Tensor) -> Any:
            self.given = x.dtype
            return super().forward(x.add_(1))

    net = nn.Sequential(Outer(nn.Linear(4, 4)), nn.Identity())
    given: list[torch.dtype] = []
    net = initialized("O2", module_filter=lambda module, name: {"0": FP32, "0.0": BF16}.get(name))(net)
    net[0][0].register_forward_pre_hook(lambda module, args: given.append(args[0].dtype))
    x = X.clone()
    net(x)
    assert (net[0].given, given, net[0][0].weight.dtype) == (FP32, [BF16], BF16)
    assert torch.equal(x, X + 1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_keeps_its_fast_path_at_o0() -> None:
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1).eval()
    x, mask = X[None], torch.tensor([[False, False, True]])
    expected = net(x, src_key_padding_mask=mask)
    net = initialized("O0", excluded_layers=nn.MultiheadAttention)(net)
    with torch.no_grad():
        torch.testing.assert_close(net(x, src_key_padding_mask=mask)[:, :2], expected[:, :2])
