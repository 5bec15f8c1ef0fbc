"""How the extras of this package are installed, for error messages."""

from __future__ import annotations

from .._version import __version__

__all__ = ["install_line"]

RELEASED = ".dev" not in __version__
"""Whether this version is on the package index. Before, a clone of the repository is what there is."""


def install_line(extra: str) -> str:
    """The command that installs an extra: ``pip install 'halfstep[demo]'``, before a release from a clone."""
    return f"pip install 'halfstep[{extra}]'" if RELEASED else f"pip install '.[{extra}]' in a clone of the repository"
