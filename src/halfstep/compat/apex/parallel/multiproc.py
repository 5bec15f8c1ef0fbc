"""``python -m halfstep.parallel.multiproc SCRIPT ARGS...``: one process for each GPU, by ``torchrun``."""

from __future__ import annotations

import logging
import sys

import torch

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run a script under ``torch.distributed.run``, on every GPU of this machine or in two processes without one.

    The script finds its rank in the environment, as ``torchrun`` leaves it there (``RANK``, ``LOCAL_RANK``,
    ``WORLD_SIZE``), and no longer in ``--rank`` and ``--world-size``.
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
