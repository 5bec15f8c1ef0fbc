"""``Gradients`` where no training shows the rule: dtypes and kinds that mix, and a torch without ``grad_dtype``."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from halfstep.parameters import ledger
from halfstep.parameters.ledger import Gradients, set_grads
from halfstep.parameters.table import OptimizerTable, record_of
from tests.support.worlds import BF16, FP16, FP32, in_both_halves

SCALE = torch.tensor(128.0)
TINY = 2.0**-12  # 1 + TINY needs more bits than 16-bit formats have


def param(grad: float | None = None, dtype: torch.dtype = FP32, size: int = 2) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(size, dtype=dtype))
    if grad is not None:
        made.grad = torch.full((size,), grad, dtype=dtype)
    return made


def gradients_of(*params: torch.Tensor, fp32: bool) -> tuple[torch.optim.Optimizer, Gradients]:
    """An optimizer, which stands for a block, too, and its gradients. ``fp32``: it has masters."""
    optimizer = torch.optim.SGD(params)
    return optimizer, Gradients(OptimizerTable.of(optimizer, has_masters=fp32))


@in_both_halves
def test_an_fp32_gradient_stays_fp32_when_16_bits_are_added(half: torch.dtype) -> None:
    p = param(dtype=half)
    optimizer, gradients = gradients_of(p, fp32=False)
    set_grads([p], [torch.ones(2)])
    gradients.begin(SCALE, optimizer)
    set_grads([p], [torch.full_like(p, TINY * float(SCALE))])
    gradients.finish(SCALE, torch.zeros(()))
    assert p.grad.dtype is FP32
    assert p.grad.tolist() == [1 + TINY] * 2


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_pass_without_scale_and_masters_adds_up_in_place(dtype: torch.dtype) -> None:
    p = param(1.0, dtype)
    optimizer, gradients = gradients_of(p, fp32=False)
    before = p.grad
    gradients.begin(None, optimizer)
    assert p.grad is before
    assert record_of(p).saved is None
    gradients.finish(None, torch.zeros(()))
    assert p.grad is before


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
    _alive, gradients = gradients_of(p, q, none, table, fp32=True)
    found_inf = gradients.clear_overflow()
    assert float(found_inf) == (bad is not None)
    assert [p.grad, q.grad, none.grad] == [kept[0], kept[1], None], "in place"
    assert all(map(torch.equal, [p.grad, q.grad, table.grad.to_dense()], expected))
    _alive, gradients = gradients_of(none, fp32=True)
    assert gradients.clear_overflow() is None, "there is nothing to clear"


@in_both_halves
@pytest.mark.parametrize(
    ("first", "second"), [("dense", "dense"), ("dense", "sparse"), ("sparse", "sparse"), ("sparse", "dense")]
)
def test_sparse_and_dense_gradients_add_up(first: str, second: str, half: torch.dtype) -> None:
    kinds = {
        "dense": torch.tensor([[TINY, 0.0], [0.0, 0.0]], dtype=half),
        "sparse": torch.tensor([[1.0, 0.0], [0.0, 0.0]], dtype=half).to_sparse(1),
    }
    for masters, dtype in ((True, FP32), (False, half)):
        p = nn.Parameter(torch.zeros(2, 2, dtype=half))
        optimizer, gradients = gradients_of(p, fp32=masters)
        p.grad = kinds[first].clone()
        gradients.begin(SCALE, optimizer)
        p.grad = kinds[second].clone() * 128.0
        gradients.finish(SCALE, torch.zeros(()))
        assert p.grad.dtype is dtype
        assert p.grad.is_sparse == (first == second == "sparse")
        total = kinds[first].to_dense().float() + kinds[second].to_dense().float()
        assert torch.equal(p.grad.to_dense(), total.to(dtype))


# ---- the dtype in which gradients come


def test_before_grad_dtype_the_fp32_gradient_and_not_its_image_stays_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "HAS_GRAD_DTYPE", False)
    p = param(dtype=FP16)
    set_grads([p], [torch.full((2,), 2.0**-30)])  # the image is 0
    optimizer, gradients = gradients_of(p, fp32=True)
    gradients.begin(torch.tensor(2.0**20), optimizer, in_place=list)
    assert p.grad.tolist() == [2.0**-10] * 2


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


# ---- between passes and step


def test_16_bit_gradients_are_only_checked_for_a_step_that_unscales_itself() -> None:
    """They are not even checked for one that checks, too."""
    for dtype, left, after in ((BF16, True, 128.0), (FP16, True, 128.0), (FP32, False, 1.0)):
        for bad, step_checks in itertools.product((False, True), repeat=2):
            p, q, found_inf = param(128.0), param(128.0, dtype), torch.zeros(())
            if bad:
                q.grad[1] = float("nan")
            _alive, gradients = gradients_of(p, q, fp32=False)
            assert gradients.unscale_or_check(SCALE, found_inf, step_checks=step_checks) is left
            assert found_inf == (bad and not (left and step_checks))
            assert (p.grad.tolist(), q.grad[0]) == ([after] * 2, after)
