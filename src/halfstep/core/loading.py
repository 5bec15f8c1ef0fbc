"""Reading the files that ``files.save_whole`` wrote."""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch

from .errors import ArgumentValueError

__all__ = ["load_whole"]


def load_whole(path: str | os.PathLike[str], names: tuple[str, ...], writer: str, device: Any = None) -> dict[str, Any]:
    """A dict that ``save_whole`` wrote. Only plain data is unpickled.

    Args:
        path: the file.
        names: what must be in the dict.
        writer: what wrote it, for the message.
        device: where its tensors go; None is where they were.

    Raises:
        ArgumentValueError: for a file of another kind.
        FileNotFoundError: if there is none.
    """
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True, map_location=device)
    except (pickle.UnpicklingError, EOFError, RuntimeError, UnicodeDecodeError) as error:
        raise ArgumentValueError(f"{os.fspath(path)} is no file that {writer} wrote, or is damaged.") from error
    missing = [name for name in names if not isinstance(found, dict) or name not in found]
    if missing:
        raise ArgumentValueError(f"{os.fspath(path)} has no {' and no '.join(missing)}, so {writer} did not write it.")
    return found
