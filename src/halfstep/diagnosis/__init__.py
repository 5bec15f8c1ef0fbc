"""One question instead of many tools: ``diagnose`` runs ``check``, a ``Monitor`` and ``compare_step`` on a training.

It is a room of its own because it stands on ``findings`` and on ``numerics``, which lies above ``findings``.
"""

from .answer import Diagnosis
from .diagnose import diagnose, of_run

__all__ = ["Diagnosis", "diagnose", "of_run"]
