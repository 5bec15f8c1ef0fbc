"""On which halfstep the examples of the pages run: `make test` runs this file together with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import halfstep


@pytest.mark.skipif("HALFSTEP_WHEEL" not in os.environ, reason="only `make test` runs the pages on an installed wheel")
def test_pages_run_on_the_installed_wheel() -> None:
    assert Path(halfstep.__file__).is_relative_to(os.environ["HALFSTEP_WHEEL"])
