"""One comparison of one step finds the module that a fault was put into, and says what kind it is."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from halfstep import numerics
from halfstep.numerics import Comparison
from tests.numerics.faults import KINDS, Fault, draw
from tests.numerics.models import MODELS
from tests.support.worlds import HALVES


def compared(fault: Fault) -> Comparison:
    return numerics.compare_step(fault.trial.step, fault.trial.model, candidate="O1", dtype=fault.dtype)


@pytest.mark.parametrize("why", KINDS)
def test_a_fault_is_found_with_one_step(why: str) -> None:
    dice = random.Random(7)
    fault = draw(dice, why)
    found = compared(fault)
    first, top = found.first(), found.modules()[0]
    assert first is not None
    assert (first.module, first.why) == (fault.module, why)
    assert (top.module, top.why) == (fault.module, why)


@pytest.mark.exhaustive
def test_100_faults(request: pytest.FixtureRequest) -> None:
    """20 of each kind at random places of five models: at least 95 modules come out on top.

    ``make combinations`` tries them all, and ``make test`` 3 of each kind.
    """
    dice, count = random.Random(0), 20 if request.config.getoption("combinations") == "all" else 3
    found: Counter[str] = Counter()
    for why in KINDS:
        for _ in range(count):
            fault = draw(dice, why)
            comparison = compared(fault)
            top, first = comparison.modules()[0], comparison.first()
            found["module"] += top.module == fault.module
            found["first"] += first is not None and first.module == fault.module
            found["why"] += top.module == fault.module and top.why == why
    least = 0.95 * count * len(KINDS)
    assert found["module"] >= least
    assert found["first"] >= least
    assert found["why"] >= least


# The norms of "residual" return fp32 to 16-bit weights, which only O1 casts.
HEALTHY = [(name, level) for name in MODELS for level in ("O1", "O2", "O3") if name != "residual" or level == "O1"]


@pytest.mark.parametrize(("name", "level"), HEALTHY)
@pytest.mark.parametrize("dtype", HALVES)
def test_without_a_fault_nothing_diverges(name: str, level: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    trial = MODELS[name]()
    found = numerics.compare_step(trial.step, trial.model, candidate=level, dtype=dtype)
    assert found.first() is None, str(found)
    assert 0.0 < found.modules()[0].excess < 32.0


@pytest.mark.parametrize("name", MODELS)
def test_fp32_against_itself_has_no_error(name: str) -> None:
    torch.manual_seed(0)
    trial = MODELS[name]()
    found = numerics.compare_step(trial.step, trial.model, candidate="O0")
    assert {entry.error for entry in found.entries} == {0.0}
    wide = numerics.compare_step(trial.step, trial.model, candidate="O0", reference=torch.float64)
    assert wide.first() is None
    # The gradient of the bias of the keys, a sum, is zero but for rounding.
    errors = [entry.error for entry in wide.entries if (entry.op, entry.module[-3:]) != ("sum", "qkv")]
    assert 0.0 < max(errors) < 1e-5


def test_a_negative_zero_is_no_underflow() -> None:
    class Negated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return torch.where(grad == 0.0, -0.0, grad) if grad.dtype is torch.bfloat16 else grad.clone()

    model = torch.nn.Linear(32, 32)
    x = torch.randn(16, 32)
    found = numerics.compare_step(
        lambda: Negated.apply(model(x)).relu()[:, :8].float().square().mean(), model, candidate="O1"
    )
    assert found.first() is None, str(found)
