"""``p.grad`` after any sequence of passes, also on a torch where a 16-bit weight cannot have an fp32 gradient."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halfstep import amp
from halfstep.parameters import ledger as gradients
from halfstep.parameters import masters, table
from halfstep.stepping import prepare
from halfstep.stepping.ranks import ddp_hook as reduction
from tests.support.backends import skip_without_compiler
from tests.support.worlds import advance, in_both_halves, scaled_backward, start_amp, with_both_masters


@pytest.fixture
def without_grad_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradients, table, prepare, reduction, masters):
        monkeypatch.setattr(module, "HAS_GRAD_DTYPE", False)


def start(
    half: torch.dtype, fused: bool, make: Callable[..., Any] = torch.optim.SGD, **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return start_amp(model, make, "O2", dtype=half, fused=fused, lr=1.0, **options)


def loss_of(model: nn.Module, t: int) -> torch.Tensor:
    return model(torch.full((2, 4), 0.25 * (t + 1))).square().mean()


def alone(half: torch.dtype, t: int) -> torch.Tensor:
    """The gradient of one pass by itself, in fp32."""
    model, _ = start(half, fused=False)
    loss_of(model, t).backward()
    return flat(model)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


STEPS = st.lists(
    st.tuples(st.sampled_from(["block", "delayed", "plain", "failed", "clear"]), st.integers(0, 3)),
    min_size=1,
    max_size=8,
)


@pytest.mark.filterwarnings("ignore:.*did not come through amp.scale_loss:UserWarning")  # of plain passes
@pytest.mark.exhaustive
@pytest.mark.parametrize("scale", [None, 256.0])
@in_both_halves
@with_both_masters
@settings(max_examples=25)
@given(steps=STEPS)
def test_gradients_are_the_sum_of_the_passes(
    fused: bool, half: torch.dtype, scale: float | None, steps: list[tuple[str, int]]
) -> None:
    model, optimizer = start(half, fused, loss_scale=scale or 1.0)
    expected, delayed = torch.zeros(58), False
    for how, t in steps:
        if how == "clear":
            optimizer.zero_grad()
            expected, delayed = torch.zeros(58), False
        elif how == "plain":
            loss_of(model, t).backward()
            expected = expected + alone(half, t)
        elif how == "failed" and not delayed:
            with pytest.raises(LookupError), amp.scale_loss(loss_of(model, t), optimizer) as scaled_loss:  # noqa: PT012
                scaled_loss.backward()
                raise LookupError
        elif how in ("block", "delayed"):
            delayed = how == "delayed"
            scaled_backward(loss_of(model, t), optimizer, delay_unscale=delayed)
            expected = expected + alone(half, t)
    before = torch.cat([m.detach().flatten() for m in amp.master_params(optimizer)])
    optimizer.step()
    after = torch.cat([m.detach().flatten() for m in amp.master_params(optimizer)])
    # One pass rounds its gradient to 16 bits, at the scale or without it; the sum rounds nothing.
    torch.testing.assert_close(
        before - after, expected, rtol=2.0**-7, atol=2.0**-9 * float(expected.abs().max()) + 1e-6
    )
    amp.deactivate()


@in_both_halves
@pytest.mark.parametrize("door", ["model", "masters", "listed before"])
def test_a_torch_without_grad_dtype(without_grad_dtype: None, door: str, half: torch.dtype) -> None:
    model, optimizer = start(half, fused=True)
    listed = list(amp.master_params(optimizer))
    for t in range(2):
        scaled_backward(loss_of(model, t), optimizer)
    assert {p.grad.dtype for p in model.parameters()} == {half}
    assert {m.grad.dtype for m in amp.master_params(optimizer)} == {torch.float32}
    whole = alone(half, 0) + alone(half, 1)
    torch.testing.assert_close(torch.cat([m.grad.flatten() for m in listed]), whole, rtol=2.0**-7, atol=1e-4)
    params = {"model": list(model.parameters()), "masters": list(amp.master_params(optimizer)), "listed before": listed}
    torch.nn.utils.clip_grad_norm_(params[door], 0.125)
    before = torch.cat([m.detach().flatten() for m in listed])
    optimizer.step()
    after = torch.cat([m.detach().flatten() for m in listed])
    assert float((before - after).norm()) == pytest.approx(0.125, rel=0.01)
    amp.deactivate()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("make", "fused"), [(torch.optim.SGD, True), (torch.optim.SGD, False), (torch.optim.AdamW, True)]
)
@in_both_halves
def test_a_batch_makes_few_python_calls(half: torch.dtype, make: Any, fused: bool) -> None:
    """At most two a parameter."""
    skip_without_compiler(fused)
    layers = 100
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    model, optimizer = start_amp(model, make, "O2", dtype=half, fused=fused, lr=1e-3)
    for t in range(3):
        advance(loss_of(model, t), optimizer)
    loss, calls = loss_of(model, 3), 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    gc.collect()  # what other tests left would call Python when it goes
    sys.setprofile(count)
    advance(loss, optimizer)
    sys.setprofile(None)
    assert calls < 2 * 2 * layers + 300, "300 are those of a batch of one parameter"
