"""A dynamic loss scale stays between its bounds, which may be one and the same number."""

from __future__ import annotations

import pytest
import torch

from halfstep.core.errors import ArgumentValueError
from halfstep.core.loss_scale import DynamicLossScale
from halfstep.gradients.loss_scaler import DeviceLossScaler


def test_equal_bounds_hold_the_scale() -> None:
    rule = DynamicLossScale(min_scale=8.0, max_scale=8.0, growth_interval=1)
    assert (rule.floor, rule.init_scale, rule.ceiling) == (8.0, 8.0, 8.0)
    scaler = DeviceLossScaler(rule, verbose=False)
    for found_inf in (0.0, 1.0, 0.0):
        scaler.update(torch.tensor(found_inf))
        assert scaler.loss_scale() == 8.0


def test_a_floor_above_the_ceiling_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match=r"min_scale=8\.0 is above max_scale=7\.5"):
        DynamicLossScale(min_scale=8.0, max_scale=7.5)
