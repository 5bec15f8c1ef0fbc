"""One thread, as the golden facts were recorded, and no op casting left on from one test to the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from halfstep import amp

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def casting_off() -> Iterator[None]:
    yield
    amp.deactivate()
