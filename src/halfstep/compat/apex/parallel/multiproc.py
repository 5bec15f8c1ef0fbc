"""``python -m halfstep.parallel.multiproc SCRIPT ARGS...``: start one process per GPU by ``torchrun``."""

from __future__ import annotations

import logging
import sys

import torch

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run a script under ``torch.distributed.run``, with a process per GPU, or two processes without a GPU.

    The script reads its rank from the environment variables of ``torchrun`` (``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``)
    instead of ``--rank`` and ``--world-size``.
    """
    from torch.distributed.run import main as torchrun

    count = torch.cuda.device_count() or 2
    logging.getLogger("halfstep").warning(
        "halfstep.parallel.multiproc runs torchrun --standalone --nproc-per-node %d; call that yourself.", count
    )
    script = sys.argv[1:] if arguments is None else arguments
    torchrun(["--standalone", "--nproc-per-node", str(count), *script])


if __name__ == "__main__":
    main()
