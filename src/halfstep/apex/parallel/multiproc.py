"""``python -m apex.parallel.multiproc``."""

from ...parallel.multiproc import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
