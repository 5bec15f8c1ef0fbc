"""Machines that try what nobody has thought of: each takes random steps and holds every one to a reference."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings

from .casts import Casts
from .fused import Fused
from .trainer import Trainer
from .windows import Windows

__all__ = ["MACHINES", "options"]

MACHINES: dict[str, Any] = {"trainer": Trainer, "fused": Fused, "casts": Casts, "windows": Windows}
"""State machines by name; ``cases`` of one says how many cases it has begun."""


def options(machine: Any, count: int, *, shrink: bool = True, steps: int | None = None) -> settings:
    """So many cases of a machine, however long they take; each has ``steps`` steps, or the machine's own number.

    With ``shrink=False`` a case that fails is printed as it was found: to make it smaller may take an hour.
    """
    left_out = () if shrink else (Phase.shrink, Phase.explain)
    return settings(
        max_examples=count,
        stateful_step_count=steps or machine.steps,
        phases=[phase for phase in machine.phases if phase not in left_out],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
