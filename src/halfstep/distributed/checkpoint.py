"""A checkpoint that several processes train with and one of them writes."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from ..core.files import save_whole

__all__ = ["save_checkpoint"]


def save_checkpoint(state: Any, path: str | os.PathLike[str]) -> None:
    """Write a checkpoint on rank 0; every rank calls it and returns when the file is there. A collective operation.

    The file is complete or not there: whichever process is killed while it is written, the previous one can be loaded.
    For sharded state use ``torch.distributed.checkpoint``.

    Args:
        state: what ``torch.save`` takes, used on rank 0 only; with states of halfstep ``torch.load(weights_only=True)``
            reads it.
        path: the file, on a disk that rank 0 writes to and every rank reads from.
    """
    together = dist.is_available() and dist.is_initialized()
    if not together or dist.get_rank() == 0:
        save_whole(state, path)
    if together:
        dist.barrier()
