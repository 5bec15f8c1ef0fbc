"""``amp._amp_state.loss_scalers``: the names by which scripts written for Apex read and change a loss scale."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp
from halfstep.amp.loss_scaler import LossScaler
from halfstep.core.errors import ArgumentValueError, UsageError
from halfstep.core.loss_scale import DynamicLossScale, StaticLossScale
from tests.support.worlds import advance, with_optimizer


def brought_up(**options: Any) -> tuple[LossScaler, Any]:
    """The scaler of a model at O1, and a pass with it: True for one that overflows."""
    model, optimizer = with_optimizer(nn.Linear(2, 1), torch.optim.SGD, 1e-3)
    options = {"opt_level": "O1", "dtype": torch.float16, "verbosity": 0, "loss_scale": "dynamic", **options}
    model, optimizer = amp.initialize(model, optimizer, **options)

    def backward(overflows: bool = False) -> None:
        loss = model(torch.ones(1, 2)).float().sum() * 1e-6
        advance(loss * float("inf") if overflows else loss, optimizer)

    (scaler,) = amp._amp_state.loss_scalers
    return scaler, backward


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({}, (2.0**16, 2000, 2.0**24, None, True)),
        ({"min_loss_scale": 4.0, "max_loss_scale": 64.0}, (64.0, 2000, 64.0, 4.0, True)),
        ({"loss_scale": 8.0}, (8.0, 2000, 2.0**24, None, False)),
        ({"loss_scale": DynamicLossScale(2.0, growth_interval=7)}, (2.0, 7, 2.0**24, None, True)),
    ],
    ids=str,
)
def test_what_can_be_read(options: dict[str, Any], values: tuple[Any, ...]) -> None:
    scaler, _ = brought_up(**options)
    assert isinstance(scaler, LossScaler)
    found = scaler._loss_scale, scaler._scale_seq_len, scaler._max_loss_scale, scaler._min_loss_scale, scaler._dynamic
    assert found == values
    assert (scaler._unskipped, scaler._has_overflow, scaler.dynamic) == (0, False, values[-1])


def test_the_window() -> None:
    scaler, backward = brought_up()
    scaler._loss_scale = 2**4
    scaler._scale_seq_len = 2
    seen = []
    for _ in range(5):
        backward()
        seen.append((scaler.loss_scale(), scaler._unskipped))
    assert seen == [(16.0, 1), (32.0, 0), (32.0, 1), (64.0, 0), (64.0, 1)]
    assert scaler._scale_seq_len == 2


def test_the_bounds() -> None:
    scaler, backward = brought_up()
    scaler._loss_scale, scaler._scale_seq_len, scaler._max_loss_scale = 8.0, 1, 16.0
    for _ in range(3):
        backward()
    assert scaler._loss_scale == 16.0
    scaler._min_loss_scale = 8.0
    for _ in range(3):
        backward(overflows=True)
    assert scaler._loss_scale == 8.0
    amp._amp_state.min_loss_scale = 4.0
    amp._amp_state.max_loss_scale = 32.0
    assert (scaler._min_loss_scale, scaler._max_loss_scale) == (4.0, 32.0)
    assert (amp._amp_state.min_loss_scale, amp._amp_state.max_loss_scale) == (4.0, 32.0)
    with pytest.raises(ArgumentValueError, match="max_scale"):
        scaler._max_loss_scale = -1.0


def test_the_count_and_the_overflow() -> None:
    scaler, backward = brought_up()
    backward()
    scaler._loss_scale = 16.0  # the count goes on
    backward()
    assert (scaler._unskipped, scaler._has_overflow) == (2, False)
    scaler._unskipped = 1999
    backward()
    assert scaler._loss_scale == 32.0
    backward(overflows=True)
    assert (scaler._unskipped, scaler._has_overflow, scaler._loss_scale) == (0, True, 16.0)
    backward()
    assert not scaler._has_overflow
    scaler._has_overflow = True
    assert scaler._has_overflow
    backward()
    assert not scaler._has_overflow


def test_dynamic_and_static() -> None:
    scaler, backward = brought_up()
    scaler._loss_scale, scaler._scale_seq_len = 16.0, 1
    scaler.dynamic = False
    backward()
    assert (scaler._loss_scale, scaler.rule) == (16.0, StaticLossScale(16.0))
    scaler._dynamic = True
    backward()
    assert (scaler._loss_scale, scaler._scale_seq_len) == (32.0, 1)


def test_settings_do_not_move_a_static_scale() -> None:
    scaler, backward = brought_up(loss_scale=4.0)
    scaler._scale_seq_len = 1
    backward()
    scaler._scale_seq_len = 3
    assert scaler._loss_scale == 4.0
    assert scaler._scale_seq_len == 3


def test_before_initialize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amp._amp_state, "session", None)
    for name in ("loss_scalers", "opt_properties", "min_loss_scale"):
        assert not hasattr(amp._amp_state, name)
    with pytest.raises(UsageError, match=r"loss_scalers needs amp\.initialize to be called before it"):
        _ = amp._amp_state.loss_scalers


def test_other_scalers_and_verbosity() -> None:
    _, backward = brought_up()
    other = LossScaler("dynamic", init_scale=4.0, scale_factor=4.0, scale_window=1)
    amp._amp_state.loss_scalers = [other]
    backward()
    assert other.loss_scale() == 16.0
    amp._amp_state.verbosity = 2
    assert (amp._amp_state.verbosity, other.verbose) == (2, True)
    twin = copy.deepcopy(other)
    backward()
    assert (other.loss_scale(), twin.loss_scale()) == (64.0, 16.0)


# ---- loops that drive one by hand


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_unscale(dtype: torch.dtype) -> None:
    scaler = LossScaler("dynamic", init_scale=8.0)
    model = [torch.tensor([8.0, -16.0], dtype=dtype), torch.tensor(2.0, dtype=dtype)]
    masters = [torch.zeros(2), torch.zeros(())]
    scaler.clear_overflow_state()
    scaler.unscale(model, masters)
    assert [master.tolist() for master in masters] == [[1.0, -2.0], 0.25]
    scaler.unscale(model, masters, scale_override=4.0)
    assert [master.tolist() for master in masters] == [[2.0, -4.0], 0.5]
    stashed = [torch.tensor([1.0, 1.0]), torch.tensor(1.0)]
    scaler.unscale_with_stashed(model, stashed, masters)
    assert [master.tolist() for master in masters] == [[2.0, -1.0], 1.25]
    scaler.unscale_with_stashed(model, stashed, masters, scale_override=(4.0, 2.0, 1.0))
    assert [master.tolist() for master in masters] == [[2.5, -3.5], 1.0]
    assert not scaler.update_scale()
    assert (scaler.loss_scale(), scaler._unskipped) == (8.0, 1)


def test_unscale_finds_inf_in_new_gradients_only() -> None:
    scaler = LossScaler("dynamic", init_scale=8.0)
    bad, good, out = [torch.tensor([1.0, float("nan")])], [torch.ones(2)], [torch.zeros(2)]
    scaler.unscale_with_stashed(good, bad, out)
    assert not scaler._has_overflow
    scaler.unscale(bad, out)
    assert scaler._has_overflow
    assert scaler.update_scale()
    assert scaler.loss_scale() == 4.0
    scaler.unscale([], [])
    scaler.unscale(good, out)
    assert not scaler.update_scale()
    static = LossScaler(8.0)
    static.unscale(bad, out)
    assert not static.update_scale(), "a static scale never skips"
    static.unscale(bad, out)
    static.clear_overflow_state()
    assert not static._has_overflow


def test_an_iteration_in_which_nothing_was_unscaled_has_no_overflow() -> None:
    scaler = LossScaler("dynamic")
    scale = scaler.loss_scale()
    assert not scaler.update_scale()
    assert scaler.loss_scale() == scale
