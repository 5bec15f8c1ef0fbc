"""Names of a lower room that a higher room implements: names of Apex, ``numerics.parity``, the rules of formats.

``halfstep/__init__.py`` is the highest module, and every import of halfstep runs it first. It fills the table, so that
no room imports a room above it. A module is imported only when a script needs such a name.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["NAMES_ABOVE"]

NAMES_ABOVE: dict[str, Callable[[], Any]] = {}
"""Functions that import and return a name, by name."""
