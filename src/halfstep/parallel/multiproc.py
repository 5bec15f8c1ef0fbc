"""``python -m halfstep.parallel.multiproc SCRIPT ARGS...``: one process for each GPU, by ``torchrun``."""

from ..compat.apex.parallel.multiproc import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
