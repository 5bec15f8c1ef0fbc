"""Numbers that 16 bits do not have: an op computes and returns fp32 wherever one of its numbers would be lost.

Each case is an op with its numbers, called at O1, at O2, recorded, and in a captured graph: there is one answer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from halfstep import amp
from halfstep.casting import current
from halfstep.casting.graph.cast_pass import cast_graph
from halfstep.casting.scope import OpCasting
from halfstep.core.oplists import OpLists
from tests.support.worlds import Applies

HALVES, FP16 = (torch.float16, torch.bfloat16), (torch.float16,)
Call = Callable[[torch.Tensor], torch.Tensor]
X, PICKED = torch.tensor([[0.0, 1.0], [0.25, 1.0]]), torch.tensor([[True, False], [True, True]])
ZEROS = torch.zeros(70_000, dtype=torch.long)
DOTS = (torch.dot, torch.vdot, torch.matmul, torch.inner, torch.linalg.vecdot)

CASES: dict[str, tuple[tuple[torch.dtype, ...], Call]] = {  # the dtypes that do not have the numbers
    "+ 1e-8": (FP16, lambda x: x + 1e-8),
    "- 1e-41": (HALVES, lambda x: x - 1e-41),
    "1 - mask, times -1e9": (FP16, lambda x: F.pad(1 - x, (1, 0), value=1e9) * -1e9),
    "an integer": (FP16, lambda x: x / 10**8),
    "clamp to what rounds to 1": (HALVES, lambda x: x.clamp(1e-4, 1 - 1e-4) + torch.logit(x, eps=1e-4)),
    "clamp to a tie of 1 with its neighbor": ((torch.bfloat16,), lambda x: x.clamp(0.5, 1 + 2**-8)),
    "masked_fill": (HALVES, lambda x: x.masked_fill(PICKED, -3.4e38).softmax(-1)),
    "where": (HALVES, lambda x: torch.where(PICKED, -3.4e38, x)),
    "eps": (FP16, lambda x: F.normalize(x * 0, dim=-1).sum(1) + F.cosine_similarity(x * 0, x)),
    "norm(p=3)": (FP16, lambda x: (x * 100).norm(3, dim=-1)),
    "sum": (FP16, lambda x: (x * 60_000).sum() + x[0, 1].sum(-1)),
    "dot": (FP16, lambda x: sum(f(x[1] * 300, x[1] * 300) for f in DOTS)),
    "einsum to one number": (FP16, lambda x: torch.einsum("ij,ij", (y := x * 300), y) + torch.tensordot(y, y)),
    "einsum in place": (FP16, lambda x: torch.einsum("b...i, b...i -> b...", *[x.repeat(1, 35_000)] * 2)),
    "products": ((), lambda x: torch.einsum("ij,kj->ik", x[:1].repeat(1, 70_000), x.repeat(1, 70_000) * 0.1) @ x),
    "many": (FP16, lambda x: x.repeat(70_000, 1).sum(0)),
    "few": ((), lambda x: x.sum(-1) + x.mean(1)),
    "index_put": (HALVES, lambda x: x[:1].index_put((ZEROS,), x[1:].expand(70_000, 2), accumulate=True)),
    "1j": (HALVES, lambda x: torch.exp(1j * x).real),
    "made of 1j": (HALVES, lambda x: torch.complex(x, x).real + torch.view_as_complex(x).imag),
    "index_put_": (HALVES, lambda x: x.index_put_((ZEROS,), x[1:].expand(70_000, 2), accumulate=True)),
    "mul_": (FP16, lambda x: x.mul_(-1e9)),
    "out=_": (FP16, lambda x: torch.mul(x, -1e9, out=x.new_empty(0))),
    "x[mask] =_": (FP16, lambda x: operator.setitem(x, PICKED, -1e10) or operator.setitem(x, 1, 10**10) or x),
    "numbers that 16 bits have": ((), lambda x: ((x + 1) * 0.125 * -1).clamp(0, 1)),
}


def run(door: str, call: Call, x: torch.Tensor) -> torch.Tensor:
    if door == "graph":
        graph: Any = torch.export.export(Applies(call), (x,)).module()
        return cast_graph(graph, OpLists.parse("O2"), x.dtype, emulate=False).module(x)  # type: ignore[no-any-return]
    is_recorded = current.is_recorded if door != "recorded" else True.__bool__
    casting = OpCasting(x.dtype, enabled=door == "O1", retries=True, emulate=False)
    with mock.patch.object(current, "is_recorded", is_recorded), casting:
        return call(x)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("door", ["O1", "O2", "recorded", "graph"])
@pytest.mark.parametrize("name", CASES)
def test_a_number_that_would_be_lost_makes_fp32(name: str, door: str, half: torch.dtype) -> None:
    lacking, call = CASES[name]
    written, wide = name.endswith("_"), half in lacking
    if (name, door) in {("an integer", "recorded"), ("few", "O1")} or (name.endswith(("_", "1j")) and door == "graph"):
        return  # it may be a size; O1 sums in fp32; graphs keep ops in place as they are, and complex numbers
    found, wanted = run(door, call, X.to(half)), call((X if wide else X.to(half)).clone()).float()
    assert found.dtype is (torch.float32 if wide and not written else half)
    limits = torch.finfo(half if written else torch.float32)
    torch.testing.assert_close(found.float(), wanted.clamp(limits.min, limits.max), rtol=0.01, atol=1e-7)


@pytest.mark.parametrize(("op", "given"), [(torch.sum, ()), (torch.norm, (3,)), (torch.add, (1e-8,))])
def test_an_op_on_a_white_list_stays_in_16_bits(op: Any, given: tuple[Any, ...]) -> None:
    with amp.auto_cast(dtype="float16", device_type="cpu", custom_white_list={op}):
        assert op(X, *given).dtype is torch.float16


def test_such_a_number_keeps_the_mode_on_after_the_first_passes() -> None:
    model = amp.initialize(Applies(CASES["+ 1e-8"][1]), opt_level="O2", dtype="float16", verbosity=0)
    assert all(model(X).dtype is torch.float32 for _ in range(6))


@pytest.mark.exhaustive
def test_a_compiled_pad_has_such_a_number() -> None:
    def padded(x: torch.Tensor) -> torch.Tensor:
        with amp.auto_cast(dtype="float16"):
            return F.pad(x, (1, 0), value=-1e9)

    assert torch.equal(torch.compile(padded, backend="eager")(X.half()), padded(X))
