"""Names that classes and modules offer for Apex's sake, and that a higher room makes.

``halfstep/__init__.py`` is at the top, and every import of halfstep runs it first. It fills the table, so no room
imports a room above it. Nothing is imported before a script asks for a name.
"""

from collections.abc import Callable
from typing import Any

__all__ = ["NAMES_ABOVE"]

NAMES_ABOVE: dict[str, Callable[[], Any]] = {}
"""Functions that import a name and return it, by the name."""
