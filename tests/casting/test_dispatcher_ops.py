"""Ops called by their names in torch's dispatcher, ``torch.ops.aten.mm``: the lists decide there too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp
from tests.support.fake_cuda import DEVICES, on
from tests.support.worlds import FP32, HALVES

aten = torch.ops.aten

# The op, what it is called with ("x" is fp32, "h" 16 bits), and what comes out ("x" or "h").
CALLS: dict[str, tuple[Any, str, tuple[Any, ...], str]] = {
    "half": (aten.mm, "xx", (), "h"),
    "half, an overload": (aten.mm.default, "xh", (), "h"),
    "float": (aten.exp.default, "h", (), "x"),
    "float, with an argument": (aten.softmax.int, "h", (0,), "x"),
    "promote": (aten.add.Tensor, "hx", (), "x"),
    "promote of one dtype": (aten.add.Tensor, "hh", (), "h"),
    "match the first": (aten.add_.Tensor, "hx", (), "h"),
    "on no list": (aten.relu.default, "h", (), "h"),
}


def tensors(letters: str, half: torch.dtype, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 3).to(half if letter == "h" else FP32).to(device) for letter in letters]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_the_lists_decide(name: str, device: str, half: torch.dtype) -> None:
    op, letters, rest, wanted = CALLS[name]
    with on(device) as where, amp.auto_cast(dtype=half, device_type=where):
        assert op(*tensors(letters, half, where), *rest).dtype is (half if wanted == "h" else FP32)


@pytest.mark.parametrize("op", [aten.slice, aten.slice.Tensor, "aten::slice"], ids=str)
def test_an_op_that_has_no_other_name(op: Any) -> None:
    x = torch.randn(4)
    with amp.auto_cast(dtype=torch.bfloat16, custom_white_list=[op]):
        assert aten.slice(x, 0, 0, 2).dtype is aten.slice.Tensor(x, 0, 0, 2).dtype is torch.bfloat16
    with amp.auto_cast(dtype=torch.bfloat16, custom_black_list=[op]):
        assert aten.slice.Tensor(x.bfloat16(), 0, 0, 2).dtype is FP32


def test_a_banned_op() -> None:
    x = torch.rand(3, dtype=torch.float16)
    with amp.auto_cast(dtype=torch.float16), pytest.raises(amp.UnsafeOpError, match="with_logits"):
        aten.binary_cross_entropy.default(x, x)


def test_emulated() -> None:
    big = torch.full((2, 2), 300.0)
    with amp.auto_cast(dtype=torch.float16, emulate=True):
        assert torch.equal(aten.mm(big, big), big @ big)
        assert aten.mm.default(big, big).isinf().all()


@pytest.mark.exhaustive
def test_compiled() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        with amp.auto_cast(dtype=torch.bfloat16):
            return aten.exp.default(aten.mm.default(x, x))

    x = torch.randn(3, 3)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))


class Block(nn.Module):
    """Ops of every list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(2, 4, 1), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        y = torch.cat([y, y.softmax(-1)]) + x.exp().mean()
        return F.log_softmax(self.out(self.norm(y.relu())), -1)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_exported_module_computes_as_the_module_does(level: str, half: torch.dtype) -> None:
    model, x = Block(), torch.randn(2, 2, 6)
    exported = torch.export.export(model, (x,)).module()
    with amp.auto_cast(level=level, dtype=half):
        found, wanted = exported(x), model(x)
    assert found.dtype is wanted.dtype
    assert torch.equal(found, wanted)
