"""Tests against real packages, each skipped where its package is missing; `make integrations` installs all of them."""

from __future__ import annotations

import pytest

# Warnings of other people's code, about other people's code.
FOREIGN = [
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:.*(does not have many workers|GPU available|isinstance\\(treespec).*",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/integrations/"):
            for text in FOREIGN:
                item.add_marker(pytest.mark.filterwarnings(text))
