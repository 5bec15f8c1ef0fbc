"""What was removed is refused with one error that says what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from halfstep import Policy, amp, optimizers
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, RemovedNameError

REMOVED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "initialize(keep_casts=)": (
        lambda: amp.initialize(nn.Linear(2, 2), keep_casts=True),  # type: ignore[call-overload]
        ArgumentTypeError,
        'initialize no longer takes keep_casts=.*opt_level="O2"',
    ),
    "decorate(keep_casts=)": (
        lambda: amp.decorate(nn.Linear(2, 2), keep_casts=True),  # type: ignore[call-overload]
        ArgumentTypeError,
        'decorate no longer takes keep_casts=.*opt_level="O2"',
    ),
    "Policy(keep_casts=)": (
        lambda: Policy.from_level("O1").replace(keep_casts=True),
        ArgumentTypeError,
        'no longer takes keep_casts=.*opt_level="O2"',
    ),
    "the text of such a policy": (
        lambda: Policy.parse(f"{Policy.from_level('O1')},keep_casts=False"),
        ArgumentValueError,
        "'keep_casts=False' is no field of a policy. Leave it out",
    ),
    "amp.clear_casts": (
        lambda: amp.clear_casts,
        RemovedNameError,
        "halfstep.amp.clear_casts was removed. Leave the call out",
    ),
    "attach(offload=)": (
        lambda: optimizers.FusedAdam((model := nn.Linear(2, 2)).parameters()).attach(model, offload="cpu"),
        ArgumentTypeError,
        "attach no longer takes offload=.*torchao's CPUOffloadOptimizer",
    ),
    "accumulate() of what attach returns": (
        lambda: optimizers.FusedAdam((model := nn.Linear(2, 2)).parameters()).attach(model).accumulate(),
        RemovedNameError,
        "GradientRelease.accumulate was removed. A step has one backward pass. To accumulate, do not attach.",
    ),
}


@pytest.mark.parametrize("name", REMOVED)
def test_what_was_removed_says_what_to_use(name: str) -> None:
    use, kind, message = REMOVED[name]
    with pytest.raises(kind, match=message):
        use()
