"""What a loss scale is where nothing is said, what values are just allowed, and what the errors advise."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp
from halfstep.core.errors import ArgumentValueError, LossScaleCollapsed
from halfstep.core.loss_scale import (
    DynamicLossScale,
    StaticLossScale,
    check_between,
    check_loss_scale,
    loss_scale_text,
    make_loss_scale,
    parse_loss_scale,
)
from halfstep.parameters.async_reader import AsyncReader
from halfstep.parameters.loss_scaler import DeviceLossScaler

YES, NO = torch.ones(()), torch.zeros(())


def test_the_defaults_of_a_dynamic_loss_scale_are_apex_s() -> None:
    given = " ".join(f"{each.name}={each.default}" for each in dataclasses.fields(DynamicLossScale) if each.init)
    assert given == (
        "init_scale=65536.0 growth_factor=2.0 backoff_factor=0.5 growth_interval=2000 backoff_interval=1 "
        "min_scale=None max_scale=16777216.0 sticky_backoff=False collapse_after=20"
    )
    assert StaticLossScale() == StaticLossScale(1.0)
    assert make_loss_scale("dynamic") == DynamicLossScale()


def test_the_defaults_of_a_grad_scaler_are_paddle_s() -> None:
    parameters = inspect.signature(amp.GradScaler).parameters
    given = " ".join(f"{name}={each.default}" for name, each in parameters.items() if each.default is not None)
    assert given == (
        "enable=True init_loss_scaling=32768.0 incr_ratio=2.0 decr_ratio=0.5 incr_every_n_steps=1000 "
        "decr_every_n_nan_or_inf=2 use_dynamic_loss_scaling=True collapse_after=20"
    )


def test_a_rule_prints_and_compares_by_what_was_given() -> None:
    rule = DynamicLossScale(init_scale=8.0)
    assert "floor" not in repr(rule)
    assert "ceiling" not in repr(rule)
    assert rule == DynamicLossScale(init_scale=8.0)
    assert rule != DynamicLossScale(init_scale=4.0)
    assert len({rule, DynamicLossScale(init_scale=8.0), StaticLossScale(8.0)}) == 2


@pytest.mark.parametrize("value", [1.0 + 2.0**-20, 2**24, 1e30])
def test_any_growth_above_1_is_allowed(value: float) -> None:
    assert DynamicLossScale(growth_factor=value).growth_factor == value


@pytest.mark.parametrize("name", ["growth_interval", "backoff_interval", "collapse_after"])
def test_counts_are_whole_numbers_above_0_or_none(name: str) -> None:
    for value in (1, 2, None):
        assert getattr(DynamicLossScale(**{name: value}), name) == value
    for value in (0, -1, 1.0, True, "1"):
        with pytest.raises(ArgumentValueError, match=rf"{name}={value!r} must be a whole number above 0, or None"):
            DynamicLossScale(**{name: value})


@pytest.mark.parametrize(
    ("above", "below", "limits"),
    [(0.0, math.inf, r"above 0\."), (1.0, math.inf, r"above 1\."), (0.0, 1.0, r"above 0 and below 1\.")],
)
def test_limits_themselves_are_outside(above: float, below: float, limits: str) -> None:
    for wrong in (above, below, math.nan, True, "2", None):
        with pytest.raises(ArgumentValueError, match=rf"x={wrong!r} must be a finite number {limits}"):
            check_between("x", wrong, above=above, below=below)  # type: ignore[arg-type]
    check_between("x", math.nextafter(above, math.inf), above=above, below=below)
    check_between("x", math.nextafter(below, 0.0), above=above, below=below)


@pytest.mark.parametrize(("given", "expected"), [(128, 128.0), ("128", 128.0), (1e-30, 1e-30), ("dynamic", "dynamic")])
def test_a_loss_scale_may_be_a_number_or_its_text(given: Any, expected: Any) -> None:
    assert check_loss_scale(given) == expected
    assert loss_scale_text(parse_loss_scale(str(given))) == str(expected)


def test_bounds_beside_dynamic_are_its_bounds() -> None:
    assert make_loss_scale("dynamic", 2.0, 64.0) == DynamicLossScale(min_scale=2.0, max_scale=64.0)
    assert make_loss_scale(2.0, 4.0) == StaticLossScale(2.0)


def test_equal_bounds_hold_the_scale() -> None:
    rule = DynamicLossScale(min_scale=8.0, max_scale=8.0, growth_interval=1)
    assert (rule.floor, rule.init_scale, rule.ceiling) == (8.0, 8.0, 8.0)
    scaler = DeviceLossScaler(rule, verbose=False)
    for found_inf in (NO, YES, NO):
        scaler.update(found_inf)
        assert scaler.loss_scale() == 8.0


# ---- the scaler


def test_only_who_reads_the_scale_waits_for_the_device() -> None:
    waits: list[bool] = []

    class Recorder(AsyncReader):
        def poll(self, *, wait: bool = False) -> list[tuple[float, ...]]:
            waits.append(wait)
            return super().poll(wait=wait)

    scaler = DeviceLossScaler(DynamicLossScale(), verbose=False)
    scaler._late = Recorder(2)
    scaler.update(NO)
    scaler.update(YES)
    scaler.scale(torch.device("cpu"))
    assert True not in waits
    for read in (scaler.loss_scale, scaler.state_dict, lambda: scaler.set_scale(2.0)):
        waits.clear()
        read()
        assert True in waits


@pytest.mark.parametrize("how", ["loaded", "set"])
def test_overflows_before_a_new_scale_do_not_count_towards_a_collapse(how: str) -> None:
    scaler = DeviceLossScaler(DynamicLossScale(init_scale=1.0, min_scale=1.0, collapse_after=2), verbose=False)
    for _ in range(4):
        scaler.update(YES)
        if how == "loaded":
            scaler.load_state_dict({"loss_scale": 1.0, "unskipped": 0})
        else:
            scaler.set_scale(1.0)
    scaler.update(YES)
    with pytest.raises(LossScaleCollapsed, match=r"2 times in a row at a loss scale of 1 or less .*now at 1\)"):
        scaler.update(YES)


def test_the_message_of_a_collapse_without_a_look_at_gradients() -> None:
    scaler = DeviceLossScaler(
        DynamicLossScale(init_scale=1.0, min_scale=1.0, collapse_after=1), name="mine", verbose=False
    )
    with pytest.raises(LossScaleCollapsed, match=r"\(mine, now at 1\).*not finite: unknown\."):
        scaler.update(YES)


def test_a_disabled_scaler_clips_and_hands_on_a_closure() -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer, scaler = torch.optim.SGD([param], lr=1.0), amp.GradScaler(enable=False)
    param.grad = torch.tensor([3.0, 4.0])
    assert scaler.clip_grad_norm_(optimizer, 1.0) == 5.0
    assert scaler.step(optimizer, lambda: 7.0).returned == 7.0
    assert param.tolist() == pytest.approx([-0.6, -0.8])
