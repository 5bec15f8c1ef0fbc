"""What was removed is refused with one error that says what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from halfstep import Policy, amp, optimizers
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, RemovedNameError

NET = nn.Linear(2, 2)
KEEP_CASTS = 'no longer takes keep_casts=.*opt_level="O2"'
CLEAR_CASTS = "halfstep.amp.clear_casts was removed. Leave the call out"
RELEASED = "GradientRelease.accumulate was removed. A step has one backward pass. To accumulate, do not attach."


def released(**arguments: Any) -> Any:
    return optimizers.FusedAdam((model := nn.Linear(2, 2)).parameters()).attach(model, **arguments)


REMOVED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "initialize": (lambda: amp.initialize(NET, keep_casts=True), ArgumentTypeError, KEEP_CASTS),  # type: ignore[call-overload]
    "decorate": (lambda: amp.decorate(NET, keep_casts=True), ArgumentTypeError, KEEP_CASTS),  # type: ignore[call-overload]
    "auto_cast": (lambda: amp.auto_cast(keep_casts=True), ArgumentTypeError, KEEP_CASTS),  # type: ignore[call-arg]
    "from_level": (lambda: Policy.from_level("O1", keep_casts=True), ArgumentTypeError, KEEP_CASTS),  # type: ignore[call-arg]
    "Policy": (lambda: Policy.from_level("O1").replace(keep_casts=True), ArgumentTypeError, KEEP_CASTS),
    "the text of such a policy": (
        lambda: Policy.parse(f"{Policy.from_level('O1')},keep_casts=False"),
        ArgumentValueError,
        "'keep_casts=False' is no field of a policy. Leave it out",
    ),
    "amp.clear_casts": (lambda: amp.clear_casts, RemovedNameError, CLEAR_CASTS),
    "import clear_casts": (lambda: exec("from halfstep.amp import clear_casts"), ImportError, CLEAR_CASTS),
    "offload": (lambda: released(offload="cpu"), ArgumentTypeError, "attach no longer .*torchao's CPUOffloadOptimizer"),
    "accumulate": (lambda: released().accumulate(), RemovedNameError, RELEASED),
}


@pytest.mark.parametrize("name", REMOVED)
def test_what_was_removed_says_what_to_use(name: str) -> None:
    use, kind, message = REMOVED[name]
    with pytest.raises(kind, match=message):
        use()
