"""Files that are complete or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

__all__ = ["save_whole"]


def save_whole(state: Any, path: str | os.PathLike[str]) -> None:
    """``torch.save``, so that a process killed at any moment leaves the file that was there before.

    It is written beside its place as ``{name}.tmp``, forced to the disk, and then renamed, which is one operation.

    Args:
        state: what to save.
        path: where; missing folders are made. One process at a time may write to it.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.tmp")
    with open(unfinished, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, target)
