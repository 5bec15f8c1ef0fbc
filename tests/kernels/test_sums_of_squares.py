"""Sums of squares, from which norms come: of numbers of any size, on every backend, with the finite check beside."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from halfstep import kernels
from halfstep.kernels.launch import launch
from halfstep.kernels.multi_tensor import l2norm, read_gradients
from halfstep.kernels.tensor_table import TensorTable
from tests.support.backends import needs_compiler, needs_interpreter

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # NumPy's, in Triton


@pytest.fixture(
    autouse=True,
    params=[
        "eager",
        "torch",
        pytest.param("compiled", marks=needs_compiler),
        pytest.param("triton", marks=needs_interpreter),
    ],
)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.backend(request.param):
        yield request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("value", [2e-38, 1e-30, 1e-25, 1e-19, 1e-10, 1.0, 1e15, 1e19, 1e25, 3e38, 0.0])
@pytest.mark.parametrize("length", [1, 255, 1000])
def test_squares_of_any_size_are_summed(value: float, length: int, dtype: torch.dtype) -> None:
    found = torch.zeros(())
    values = torch.full((length,), value, dtype=dtype)
    exact = float(values.double().square().sum())
    sums = launch(TensorTable.of(grad=[values, -values, torch.ones(5, dtype=dtype)]), read_gradients, {}, found=found)
    assert sums[0].tolist() == pytest.approx([exact, exact, 5.0], rel=1e-6, abs=0.0)
    assert found == 0


def test_small_squares_beside_large_ones_are_lost_in_them_only() -> None:
    values = torch.full((1000,), 1e-25)
    values[[100, 600]] = torch.tensor([1e25, 1.0])
    (sums,) = launch(TensorTable.of(grad=[values, values[500:]]), read_gradients, {})
    assert sums.tolist() == pytest.approx([1e50, 1.0], rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("beside", [0.0, 1e-25, 1.0, 1e30])
def test_what_is_not_finite_shows_in_the_sum_and_the_flag(bad: float, beside: float) -> None:
    found = torch.zeros(())
    values = torch.full((1000,), beside)
    values[700] = bad
    (sums,) = launch(TensorTable.of(grad=[values, torch.ones(5)]), read_gradients, {}, found=found)
    assert found == 1
    assert not math.isfinite(sums[0])
    assert sums[1].item() == pytest.approx(5.0)


def test_the_norm_of_tiny_gradients_is_not_zero() -> None:
    tensors = [torch.full((10,), 1e-25), torch.full((6,), 1e-25)]
    norm, each = l2norm(tensors, per_tensor=True)
    assert norm.item() == pytest.approx(4e-25, rel=1e-6, abs=0.0)
    assert each is not None
    assert each.tolist() == pytest.approx([10**0.5 * 1e-25, 6**0.5 * 1e-25], rel=1e-6, abs=0.0)
