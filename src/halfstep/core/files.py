"""Files that are whole or not there, and the folder of those that are generated once and kept."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["cache_directory", "replacing", "save_whole"]


@contextmanager
def replacing(path: Path, *, shared: bool) -> Iterator[Path]:
    """Give a path to write to, and rename that file to ``path`` when the block ends without an error.

    Renaming is one operation: a process killed at any moment leaves the file that was there before.

    Args:
        path: the file's place; missing folders are made.
        shared: whether several processes may write it at once. Each has an unfinished file of its own then. Otherwise
            that file is ``{name}.tmp``, and what a killed process left there is overwritten.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp" if shared else f"{path.name}.tmp")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def save_whole(state: Any, path: str | os.PathLike[str]) -> None:
    """``torch.save`` that leaves the previous file until the new one is whole, forced to the disk and renamed.

    Args:
        state: what to save.
        path: where; missing folders are made. One process at a time may write to it.
    """
    with replacing(Path(path), shared=False) as unfinished, open(unfinished, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def cache_directory() -> Path:
    """Where generated sources and libraries are kept: ``HALFSTEP_CACHE_DIR``, or halfstep/ in the user's cache."""
    chosen = os.environ.get("HALFSTEP_CACHE_DIR")
    directory = (
        Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "halfstep"
    )
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    return directory
