"""One thread, as the golden facts were recorded, and no op casting or random state handed from one test to the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from halfstep import amp

torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    # The suite trains in both formats on any CPU; the speed warning is the business of test_hardware.py alone.
    config.addinivalue_line("filterwarnings", "ignore::halfstep.amp.PrecisionWarning")


@pytest.fixture(autouse=True)
def fresh_process_state() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    amp.deactivate()
