"""Machines that try what nobody has thought of: each takes random steps and holds every one to a reference."""

from __future__ import annotations

from typing import Any

from .fused import Fused
from .trainer import Trainer

__all__ = ["MACHINES"]

MACHINES: dict[str, Any] = {"trainer": Trainer, "fused": Fused}
"""State machines by name; ``cases`` of one says how many cases it has begun."""
