"""Clipping scales gradients down to a norm and never up, whatever they are made of, and finds what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from halfstep.parameters.unscale import Unscaler
from tests.support.worlds import BF16, FP16, FP32

SCALE = 128.0


def drawn(*shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.complex64 if dtype.is_complex else FP32).to(dtype)


def sparse() -> torch.Tensor:
    """Rows 1 and 3, the first of them in two parts."""
    return torch.sparse_coo_tensor([[1, 3, 1]], drawn(3, 2), (4, 2), check_invariants=True)


MADE_OF: dict[str, Callable[[], list[torch.Tensor]]] = {
    "bf16": lambda: [drawn(3, 5, dtype=BF16), drawn(7, dtype=BF16)],
    "fp16": lambda: [drawn(3, 5, dtype=FP16), drawn(7, dtype=FP16)],
    "fp32": lambda: [drawn(3, 5), drawn(())],
    "double": lambda: [drawn(3, 5, dtype=torch.float64)],
    "complex": lambda: [drawn(4, dtype=torch.complex64)],
    "sparse": lambda: [sparse()],
    "mixed": lambda: [drawn(3), sparse(), drawn(4, dtype=torch.complex64), drawn(2, dtype=FP16), drawn(0)],
}


def params_with(grads: list[torch.Tensor], factor: float = 1.0) -> list[torch.Tensor]:
    params = [torch.zeros(grad.shape, dtype=grad.dtype, requires_grad=True) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad * factor
    return [*params, torch.zeros(2, requires_grad=True)]  # the last one has no gradient


def vector(params: list[torch.Tensor]) -> torch.Tensor:
    """All gradients as one vector of complex doubles."""
    grads = [p.grad for p in params if p.grad is not None]
    return torch.cat([grad.to_dense().to(torch.complex128).flatten() for grad in grads])


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("kind", MADE_OF)
def test_gradients_above_the_norm_are_scaled_down_to_it(kind: str, norm_type: float) -> None:
    params = params_with(MADE_OF[kind]())
    before = vector(params)
    norm = torch.linalg.vector_norm(torch.view_as_real(before), norm_type)
    returned = Unscaler().clip(params, 0.25, norm_type)
    assert float(norm) > 0.25
    assert float(returned) == pytest.approx(float(norm), rel=1e-3)
    close(vector(params), before * (0.25 / norm))


@pytest.mark.parametrize("kind", MADE_OF)
def test_gradients_below_the_norm_stay_as_they_are(kind: str) -> None:
    params = params_with(MADE_OF[kind]())
    before = vector(params)
    Unscaler().clip(params, 1e3, 2.0)
    assert torch.equal(vector(params), before)


@pytest.mark.parametrize("max_norm", [0.25, 1e3], ids=["clipped", "below the norm"])
@pytest.mark.parametrize("kind", MADE_OF)
def test_unscaled_and_clipped_in_one_read(kind: str, max_norm: float) -> None:
    params, unscaler, found_inf = params_with(MADE_OF[kind](), SCALE), Unscaler(), torch.zeros(())
    before = vector(params) / SCALE
    norm = before.abs().square().sum().sqrt()
    returned = unscaler.unscale_and_clip(unscaler.gather(params), torch.tensor(1 / SCALE), found_inf, max_norm)
    assert float(returned) == pytest.approx(float(norm), rel=1e-3)
    assert found_inf == 0
    close(vector(params), before * min(1.0, max_norm / float(norm)))


@pytest.mark.parametrize("size", [0.0, 4e-7, 1e-3])
def test_the_smallest_gradients_stay_too(size: float) -> None:
    params, unscaler = params_with([torch.tensor([size])]), Unscaler()
    assert float(unscaler.clip(params, 1.0, 2.0)) == pytest.approx(size)
    unscaler.unscale_and_clip(unscaler.gather(params), torch.ones(()), torch.zeros(()), 1.0)
    assert float(params[0].grad) == pytest.approx(size)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_found_and_spoils_all(bad: float) -> None:
    grads = [torch.tensor([1.0, bad]), torch.ones(3)]
    params, unscaler, found_inf = params_with(grads), Unscaler(), torch.zeros(())
    norm = unscaler.unscale_and_clip(unscaler.gather(params), torch.tensor(1 / SCALE), found_inf, 1.0)
    assert found_inf == 1
    assert not norm.isfinite()
    params = params_with(grads)
    assert not unscaler.clip(params, 1.0, 2.0).isfinite()
    assert params[0].grad.isnan().any()


def test_an_overflow_that_was_found_before_is_not_forgotten() -> None:
    params, unscaler, found_inf = params_with([torch.ones(3)]), Unscaler(), torch.ones(())
    unscaler.unscale_and_clip(unscaler.gather(params), torch.ones(()), found_inf, 1.0)
    assert found_inf == 1


def test_without_gradients_the_norm_is_zero() -> None:
    params, unscaler, found_inf = [torch.zeros(2, requires_grad=True)], Unscaler(), torch.zeros(())
    assert unscaler.clip(params, 1.0, 2.0) == 0
    assert unscaler.unscale_and_clip(unscaler.gather(params), torch.ones(()), found_inf, 1.0) == 0
    assert found_inf == 0
