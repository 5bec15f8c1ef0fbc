"""Products on the wide list have 16-bit operands and an fp32 result, whoever casts and wherever they run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import OpLists, amp
from halfstep.casting import wide
from halfstep.casting.graph.cast_pass import cast_graph
from tests.support.fake_cuda import fake_cuda

NAMES = ["linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"]
X, W, B = torch.randn(2, 6, 8), torch.randn(4, 8), torch.randn(4)
CALLS = {
    "linear": lambda x, w, b: F.linear(x, w, bias=b),
    "matmul": lambda x, w, b: x @ w.T,
    "matmul of a vector": lambda x, w, b: x @ w[0],
    "mm": lambda x, w, b: torch.mm(x[0], w.T),
    "bmm": lambda x, w, b: torch.bmm(x, x.mT),
    "addmm": lambda x, w, b: torch.addmm(b, x[0], w.T, beta=2, alpha=0.5),
    "baddbmm": lambda x, w, b: torch.baddbmm(b[0], x, x.mT),
    "einsum": lambda x, w, b: torch.einsum("bij,kj->bik", x, w),
}


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("emulate", ["auto", True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "OD"])
@pytest.mark.parametrize("name", CALLS)
def test_the_result_is_the_fp32_product_of_the_rounded_operands(name, level, emulate, half) -> None:
    given = [t.clone().requires_grad_() for t in (X, W, B)]
    rounded = [t.to(half).float().requires_grad_() for t in (X, W, B)]
    want = CALLS[name](*rounded)
    with amp.auto_cast(level=level, dtype=half, custom_wide_list=NAMES, emulate=emulate):
        found = CALLS[name](*given)
    assert found.dtype is torch.float32
    assert torch.equal(found, want)
    (found.sum() + want.sum()).backward()
    for one, other in zip(given, rounded, strict=True):
        assert one.grad is other.grad is None or torch.equal(one.grad, other.grad.to(half).float())


@pytest.mark.parametrize("name", CALLS)
def test_cuda_has_kernels_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(wide, "product", lambda *args, real=wide.product, **kw: calls.append(name) or real(*args, **kw))
    with fake_cuda(), amp.auto_cast(dtype="bfloat16", device_type="cuda", custom_wide_list=NAMES, emulate=False):
        found = CALLS[name](*[t.to("cuda") for t in (X, W, B)])
    assert (found.dtype, found.shape) == (torch.float32, CALLS[name](X, W, B).shape)
    assert calls == [name] * (name not in ("einsum", "matmul of a vector"))


def test_the_kernels_have_a_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide.torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    x, w, b = (t.bfloat16().requires_grad_() for t in (X, W, B))
    wide.product("linear", x, w, b).sum().backward()
    want = torch.autograd.grad(F.linear(x.float(), w.float(), b.float()).sum(), [x, w, b])
    assert all(torch.equal(one.grad, other) for one, other in zip((x, w, b), want, strict=True))


@pytest.mark.exhaustive
def test_a_graph_and_compiled_code_give_the_same() -> None:
    model = nn.Sequential(nn.Linear(8, 80), nn.Linear(80, 4))
    with amp.auto_cast(dtype="bfloat16", custom_wide_list=["linear"]):
        want = model(X)
        assert torch.equal(torch.compile(model, backend="aot_eager")(X), want)
    graph = torch.export.export(model, (X,)).module()
    assert torch.equal(cast_graph(graph, OpLists.parse("O1^linear"), torch.bfloat16).module(X), want)
