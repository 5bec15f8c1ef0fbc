"""``python -m halfstep`` is the command ``halfstep``."""

from .cli import main

if __name__ == "__main__":
    main()
