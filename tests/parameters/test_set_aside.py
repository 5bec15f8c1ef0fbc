"""``Gradients``: what is set aside for a pass comes back, added or restored, and each gradient is unscaled once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from halfstep.parameters import ledger, table
from halfstep.parameters.ledger import Gradients, set_grads
from halfstep.parameters.table import OptimizerTable, Slot, record_of, reduced_params
from tests.support.worlds import BF16, FP16, FP32, in_both_halves

SCALE = torch.tensor(128.0)
TINY = 2.0**-12  # 1 + TINY needs more bits than 16-bit formats have


def param(grad: float | None = None, dtype: torch.dtype = FP32, size: int = 2) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(size, dtype=dtype))
    if grad is not None:
        made.grad = torch.full((size,), grad, dtype=dtype)
    return made


def arrive(p: nn.Parameter, value: float) -> None:
    """What a pass brings: in the dtype of the parameter, added to what is there."""
    grad = torch.full_like(p, value)
    set_grads([p], [grad if p.grad is None else p.grad + grad])


class Holder:
    """Stands for an optimizer with one group."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self.param_groups = [{"params": list(params)}]


ALIVE: list[Holder] = []  # a table does not keep its optimizer alive


def gradients_of(*params: torch.Tensor, fp32: bool, reduced: bool = False) -> Gradients:
    ALIVE.append(Holder(params))
    gradients = Gradients(OptimizerTable.of(ALIVE[-1], has_masters=fp32))
    for slot in gradients.table.slots:
        slot.reduced = reduced
    return gradients


def wide(*params: torch.Tensor, reduced: bool = False) -> Gradients:
    """Of an optimizer with masters."""
    return gradients_of(*params, fp32=True, reduced=reduced)


def plain(*params: torch.Tensor) -> Gradients:
    """Of an optimizer without masters."""
    return gradients_of(*params, fp32=False)


@pytest.fixture(autouse=True)
def _forget_optimizers() -> Any:
    yield
    ALIVE.clear()


BLOCK = Holder(())  # stands for a block


def values(*params: nn.Parameter) -> list[list[float]]:
    return [[] if p.grad is None else p.grad.tolist() for p in params]


# ---- a pass


@in_both_halves
@pytest.mark.parametrize("scale", [None, SCALE], ids=["unscaled", "scaled"])
def test_a_sum_of_16_bit_gradients_keeps_all_bits(scale: torch.Tensor | None, half: torch.dtype) -> None:
    p, found_inf = param(dtype=half), torch.zeros(())
    gradients = wide(p)
    for value in (1.0, TINY, TINY):
        gradients.begin(scale, BLOCK)
        assert p.grad is None
        arrive(p, value if scale is None else value * float(scale))
        gradients.finish(scale, found_inf)
    assert p.grad.dtype is FP32
    assert values(p) == [[1 + 2 * TINY] * 2]
    assert found_inf == 0


@in_both_halves
def test_an_fp32_gradient_stays_fp32_when_16_bits_are_added(half: torch.dtype) -> None:
    p = param(dtype=half)
    gradients = plain(p)
    set_grads([p], [torch.ones(2)])
    gradients.begin(SCALE, BLOCK)
    arrive(p, TINY * float(SCALE))
    gradients.finish(SCALE, torch.zeros(()))
    assert p.grad.dtype is FP32
    assert values(p) == [[1 + TINY] * 2]


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_pass_without_scale_and_masters_adds_up_in_place(dtype: torch.dtype) -> None:
    p = param(1.0, dtype)
    gradients = plain(p)
    before = p.grad
    gradients.begin(None, BLOCK)
    assert p.grad is before
    assert record_of(p).saved is None
    gradients.finish(None, torch.zeros(()))
    assert p.grad is before


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_what_was_set_aside_comes_back_where_a_pass_brings_nothing(dtype: torch.dtype) -> None:
    for make in (plain, wide):
        p, q = param(1.0, dtype), param(2.0, dtype)
        gradients = make(p, q)
        gradients.begin(SCALE, BLOCK)
        assert values(p, q) == [[], []]
        arrive(q, 128.0)
        gradients.finish(SCALE, torch.zeros(()))
        assert values(p, q) == [[1.0] * 2, [3.0] * 2]
        assert not gradients.has_saved


def test_a_failed_pass_leaves_what_there_was() -> None:
    p, q, r = param(1.0), param(2.0), param()
    gradients = plain(p, q, r)
    gradients.begin(SCALE, BLOCK)
    arrive(q, 5.0)
    arrive(r, 5.0)
    gradients.restore()
    assert values(p, q, r) == [[1.0] * 2, [2.0] * 2, []]
    assert not gradients.has_saved
    assert not gradients.arrived()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("size", [2, 2**17], ids=["small", "large"])  # large ones are added by a kernel of ours
def test_an_overflow_is_found_in_what_comes_and_not_in_what_was_there(size: int, bad: float) -> None:
    for before, new, expected in ((1.0, bad, 1), (bad, 1.0, 0)):
        for make, dtype in ((plain, FP32), (wide, BF16)):
            p, found_inf = param(before, dtype, size), torch.zeros(())
            gradients = make(p)
            gradients.begin(SCALE, BLOCK)
            arrive(p, new)
            gradients.finish(SCALE, found_inf)
            assert found_inf == expected


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan"), None])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, torch.complex64])
def test_all_gradients_are_cleared_if_one_is_not_finite(dtype: torch.dtype, bad: float | None) -> None:
    p, q, none, table = (nn.Parameter(torch.zeros(3, dtype=dtype)) for _ in range(4))
    p.grad, q.grad = torch.ones_like(p), torch.arange(3).to(dtype)
    table.grad = torch.ones_like(table).to_sparse()
    if bad is not None:
        p.grad[1] = bad
    kept = [p.grad, q.grad, table.grad]
    expected = [g.to_dense() * 0 if bad is not None else g.to_dense().clone() for g in kept]
    if bad is not None:
        expected[0] = torch.zeros_like(p)
    found_inf = wide(p, q, none, table).clear_overflow()
    assert float(found_inf) == (bad is not None)
    assert [p.grad, q.grad, none.grad] == [kept[0], kept[1], None], "in place"
    assert all(map(torch.equal, [p.grad, q.grad, table.grad.to_dense()], expected))
    assert wide(none).clear_overflow() is None, "there is nothing to clear"


def test_a_gradient_in_a_bucket_is_copied_before_the_pass_overwrites_it() -> None:
    bucket, p = torch.ones(4), param()
    p.grad = bucket[:2]
    gradients = plain(p)
    gradients.begin(SCALE, BLOCK)
    bucket.fill_(9.0)
    gradients.finish(SCALE, torch.zeros(()))
    assert values(p) == [[1.0] * 2]


# ---- two optimizers


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_shared_parameter_is_served_once(dtype: torch.dtype) -> None:
    shared, own = param(1.0, dtype), param(2.0, dtype)
    make = wide if dtype is BF16 else plain
    first, second = make(shared), make(shared, own)
    first.begin(SCALE, BLOCK)
    second.begin(SCALE, BLOCK)
    assert first.has_saved
    assert second.has_saved
    arrive(shared, 128.0)
    arrive(own, 128.0)
    first.finish(SCALE, torch.zeros(()))
    second.finish(SCALE, torch.zeros(()))
    assert values(shared, own) == [[2.0] * 2, [3.0] * 2]


# ---- gradients that ranks average where they are


def test_carried_gradients_stay_and_are_scaled_like_those_that_come() -> None:
    stays, goes, empty, half = param(1.0), param(2.0), param(), param(4.0, BF16)
    gradients = wide(stays, goes, empty, half)
    asked: list[torch.Tensor] = []

    def carried(slots: Sequence[Slot]) -> list[Slot]:
        asked.extend(slot.param for slot in slots)
        return [slot for slot in slots if slot.param is not goes]

    gradients.begin(SCALE, BLOCK, in_place=carried)
    assert [id(p) for p in asked] == [id(stays), id(goes), id(half)]
    assert values(stays, goes, half) == [[128.0] * 2, [], [512.0] * 2]
    assert not gradients.arrived(), "what stayed has not come"
    arrive(stays, 128.0)
    assert not gradients.arrived()
    arrive(goes, 128.0)
    assert gradients.arrived()
    gradients.finish(SCALE, torch.zeros(()))
    assert not gradients.arrived()
    assert values(stays, goes, empty, half) == [[2.0] * 2, [3.0] * 2, [], [4.0] * 2]
    assert half.grad.dtype is FP32


def test_carried_gradients_of_a_pass_without_scale_stay_as_they_are() -> None:
    p, half = param(1.0), param(1.0, BF16)
    gradients = wide(p, half)
    gradients.begin(None, BLOCK, in_place=list)
    assert values(p, half) == [[1.0] * 2, [1.0] * 2]


# ---- sparse


@in_both_halves
@pytest.mark.parametrize(
    ("first", "second"), [("dense", "dense"), ("dense", "sparse"), ("sparse", "sparse"), ("sparse", "dense")]
)
def test_sparse_and_dense_gradients_add_up(first: str, second: str, half: torch.dtype) -> None:
    kinds = {
        "dense": torch.tensor([[TINY, 0.0], [0.0, 0.0]], dtype=half),
        "sparse": torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=half).to_sparse(1),
    }
    for make, dtype in ((wide, FP32), (plain, half)):
        p = nn.Parameter(torch.zeros(2, 2, dtype=half))
        gradients = make(p)
        p.grad = kinds[first].clone()
        gradients.begin(SCALE, BLOCK)
        p.grad = kinds[second].clone() * 128.0
        gradients.finish(SCALE, torch.zeros(()))
        assert p.grad.dtype is dtype
        assert p.grad.is_sparse == (first == second == "sparse")
        total = kinds[first].to_dense().float() + kinds[second].to_dense().float()
        assert torch.equal(p.grad.to_dense(), total.to(dtype))


# ---- the dtype in which gradients come


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no Tensor.grad_dtype")
def test_gradients_come_in_the_dtype_that_was_chosen() -> None:
    half, single, full = param(dtype=BF16), param(), param(1.0, BF16)
    gradients = wide(half, single, full)
    gradients.expect()
    assert (half.grad_dtype, single.grad_dtype, full.grad_dtype) == (FP32, FP32, BF16)
    wide(half, single, full).expect(scaled=True)
    assert (half.grad_dtype, single.grad_dtype, full.grad_dtype) == (None, FP32, BF16)
    plain(half).expect()
    assert half.grad_dtype is None, "who has no masters leaves it alone"
    wide(half, reduced=True).expect()
    assert half.grad_dtype is BF16, "wrappers take nothing else"
    single.grad_dtype = None
    wide(half, single).expect()
    assert (half.grad_dtype, single.grad_dtype) == (FP32, FP32)


def test_before_grad_dtype_the_fp32_gradient_and_not_its_image_stays_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "HAS_GRAD_DTYPE", False)
    p = param(dtype=FP16)
    set_grads([p], [torch.full((2,), 2.0**-30)])  # the image is 0
    wide(p).begin(torch.tensor(2.0**20), BLOCK, in_place=list)
    assert values(p) == [[2.0**-10] * 2]


def test_gradients_cleared_to_zeros_under_a_wrapper_are_of_the_parameter_s_dtype() -> None:
    p, q, single = param(dtype=BF16), param(dtype=BF16), param(1.0)
    set_grads([p], [torch.zeros(2)])
    gradients = wide(p, q, single, reduced=True)
    gradients.clear()
    assert p.grad.dtype is BF16
    assert getattr(p, "grad_dtype", BF16) is BF16, "what comes next is added to it"
    assert values(p, q, single) == [[0.0] * 2, [], [1.0] * 2]
    plain(single).clear()
    assert values(single) == [[1.0] * 2]


def test_without_grad_dtype_a_gradient_of_another_dtype_is_kept_beside_its_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger, "HAS_GRAD_DTYPE", False)
    p, same = param(dtype=BF16), torch.full((2,), 3.0, dtype=BF16)
    set_grads([p], [same])
    assert p.grad is same is ledger.get_grads([p])[0]
    fine = torch.full((2,), 1 + TINY)
    set_grads([p], [fine])
    assert (p.grad.dtype, p.grad.tolist()) == (BF16, [1.0, 1.0])
    assert ledger.get_grads([p])[0] is fine
    p.grad.mul_(0.5)
    assert ledger.get_grads([p])[0] is p.grad, "the image was changed, so it is the gradient"
    set_grads([p], [fine])
    p.grad = same
    assert ledger.get_grads([p]) == [same]
    p.grad = None
    assert ledger.get_grads([p]) == [None]


def test_without_grad_dtype_cleared_gradients_under_a_wrapper_are_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "HAS_GRAD_DTYPE", False)
    single = param(1.0)
    single.data = single.data.bfloat16()  # its gradient has another dtype now
    wide(single, reduced=True).clear()
    assert (single.grad.dtype, single.grad.tolist()) == (BF16, [0.0, 0.0])


# ---- between passes and step


def test_16_bit_gradients_are_only_checked_for_a_step_that_unscales_itself() -> None:
    """They are not even checked for one that checks, too."""
    for dtype, left, after in ((BF16, True, 128.0), (FP16, True, 128.0), (FP32, False, 1.0)):
        for bad, step_checks in itertools.product((False, True), repeat=2):
            p, q, found_inf = param(128.0), param(128.0, dtype), torch.zeros(())
            if bad:
                q.grad[1] = float("nan")
            assert plain(p, q).unscale_or_check(SCALE, found_inf, step_checks=step_checks) is left
            assert found_inf == (bad and not (left and step_checks))
            assert (values(p), q.grad[0]) == ([[after] * 2], after)


def test_gradients_in_a_wrapper_have_the_dtype_of_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = param(), param()
    assert reduced_params([p, q]) == []
    monkeypatch.setattr(table, "REDUCTIONS", [SimpleNamespace(params=frozenset({id(q)}))])
    assert [id(one) for one in reduced_params([p, q])] == [id(q)]
