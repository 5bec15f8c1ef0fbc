"""One thread, as the golden facts were recorded, and no op casting or random state handed from one test to the next."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from halfstep import amp
from halfstep.casting import emulation, spec

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # must be there before anything, such as torch.compile, imports triton


def pytest_configure(config: pytest.Config) -> None:
    # The suite trains in both formats on any CPU; the speed warning is the business of core/test_hardware.py alone.
    config.addinivalue_line("filterwarnings", "ignore::halfstep.amp.PrecisionWarning")


@pytest.fixture(autouse=True)
def fresh_process_state() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    amp.deactivate()
    assert torch._C._len_torch_function_stack() == 0, "a test left a function mode behind"
    assert not torch.is_autocast_enabled("cpu"), "a test left autocast on"
    emulation._lacking.cache_clear()  # a test may have pretended another machine
    spec.facts_of.cache_clear()
