"""Checkpoints of a training on several ranks, written by rank 0."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from ...core.files import save_whole

__all__ = ["save_checkpoint"]


def save_checkpoint(state: Any, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint on rank 0. A collective operation: every rank returns when the file is complete.

    If a process is killed during the write, the previous file is still there and complete. For sharded state use
    ``torch.distributed.checkpoint``.

    Args:
        state: an object for ``torch.save``, used on rank 0 only. ``torch.load(weights_only=True)`` reads files with
            states of halfstep.
        path: the file, on a disk that rank 0 writes to and every rank reads from.
    """
    together = dist.is_available() and dist.is_initialized()
    if not together or dist.get_rank() == 0:
        save_whole(state, path)
    if together:
        dist.barrier()
