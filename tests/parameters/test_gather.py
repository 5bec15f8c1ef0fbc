"""``Unscaler``: which gradients it takes, in whatever order they come and go, and what it does to each."""

from __future__ import annotations

import torch

from halfstep.parameters.unscale import Unscaler, reciprocal, widened

HALF = torch.tensor(0.5)


def param(dtype: torch.dtype = torch.float32, grad: float | None = 2.0) -> torch.Tensor:
    made = torch.zeros(2, dtype=dtype, requires_grad=True)
    made.grad = None if grad is None else torch.full((2,), grad, dtype=dtype)
    return made


def sparse_param() -> torch.Tensor:
    made = torch.zeros(3, 2, requires_grad=True)
    made.grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 2), (3, 2), check_invariants=True)
    return made


def unscaled(unscaler: Unscaler, *params: torch.Tensor) -> list[float | None]:
    """The largest number of each gradient after it was halved."""
    found_inf = torch.zeros(())
    unscaler.unscale(unscaler.gather(params), HALF, found_inf)
    assert found_inf == 0
    return [None if p.grad is None else p.grad.to_dense().abs().max().item() for p in params]


def test_gradients_of_all_kinds_are_unscaled_together() -> None:
    kinds = [torch.bfloat16, torch.float32, torch.complex64, torch.float16, torch.float64]
    params = [param(grad=None), sparse_param(), *map(param, kinds), param(grad=None)]
    assert unscaled(Unscaler(), *params) == [None, *[1.0] * 6, None]


def test_gradients_come_and_go_between_steps() -> None:
    unscaler, p, q, r = Unscaler(), param(), param(grad=None), param(torch.bfloat16)
    assert unscaled(unscaler, p, q, r) == [1.0, None, 1.0]
    p.grad, q.grad = None, torch.full((2,), 8.0)
    assert unscaled(unscaler, p, q, r) == [None, 4.0, 0.5]
    p.grad, r.grad = torch.full((2,), 8.0), None
    assert unscaled(unscaler, p, q, r) == [4.0, 2.0, None]


def test_a_gradient_that_becomes_complex_or_narrow_is_noticed() -> None:
    unscaler, p = Unscaler(), param()
    unscaled(unscaler, p)
    q = param(torch.complex64)
    assert unscaled(unscaler, p, q) == [0.5, 1.0]
    assert unscaled(unscaler, p, param(torch.float16)) == [0.25, 1.0]


def test_the_reciprocal_is_rounded_once() -> None:
    for scale in (3.0, 65536.0, 1e-30):
        assert reciprocal(torch.tensor(scale)) == torch.tensor(1 / torch.tensor(scale, dtype=torch.float64).item())


def test_widened_is_at_least_fp32() -> None:
    dtypes = {
        torch.bfloat16: torch.float32,
        torch.float32: torch.float32,
        torch.float64: torch.float64,
        torch.complex64: torch.complex64,
    }
    assert {dtype: widened(torch.ones(1, dtype=dtype)).dtype for dtype in dtypes} == dtypes
