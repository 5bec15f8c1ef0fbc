"""The tests of findings are the same on every machine: each dtype has units here, unless a test says otherwise."""

from __future__ import annotations

import pytest

from halfstep.diagnostics.findings import rules_of_model


@pytest.fixture(autouse=True)
def units_for_every_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_of_model, "has_units", lambda *_: True)
