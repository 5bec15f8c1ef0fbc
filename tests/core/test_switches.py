"""What a switch takes, and what the message says of a value that was meant for another argument."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from halfstep import amp
from halfstep.core.checks import check_flag
from halfstep.core.errors import ArgumentTypeError


@pytest.mark.parametrize("value", [True, False, 0, 1, np.True_, np.False_, np.int64(1), np.array(False)])
def test_a_switch_takes_what_command_lines_and_numpy_have(value: Any) -> None:
    found = check_flag("enabled", value)
    assert type(found) is bool
    assert found == bool(value)


@pytest.mark.parametrize(
    "value", ["", "no", "True", None, 2, -1, 1.0, [], torch.tensor(1), np.int64(2), np.array([True]), torch.float16]
)
def test_a_switch_takes_nothing_else(value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"enabled=.* must be True or False"):
        check_flag("enabled", value)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("fp16", "write dtype='fp16'"),
        ("Float16", "write dtype='Float16'"),
        (torch.bfloat16, "write dtype=torch.bfloat16"),
        ("no", "compare it before"),
    ],
)
def test_the_message_says_where_the_value_belongs(value: Any, hint: str) -> None:
    with pytest.raises(ArgumentTypeError) as raised:
        check_flag("enable", value)
    assert hint in str(raised.value)


@pytest.mark.parametrize(
    ("device", "by_name", "dtype"),
    [("cpu", None, torch.bfloat16), ("cuda", None, torch.float32), ("cuda", "cpu", torch.bfloat16)],
)
def test_torchs_device_is_the_one_that_casts_and_counts_as_on(device: str, by_name: Any, dtype: Any) -> None:
    assert amp.GradScaler(device).is_enabled()
    with amp.auto_cast(device, dtype="bfloat16", device_type=by_name):  # what is said by name counts
        assert torch.nn.Linear(2, 2)(torch.ones(1, 2)).dtype is dtype


def test_a_scope_for_devices_that_are_not_there_warns_once() -> None:
    with pytest.warns(amp.PrecisionWarning, match="has none of device_type=.'xpu',., so nothing is cast") as said:
        [amp.auto_cast(b, device_type=d) for d, b in [("xpu", True)] * 2 + [("mps", False), (["xpu", "cpu"], True)]]
    assert [warning.filename for warning in said] == [__file__]
