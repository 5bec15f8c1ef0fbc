"""Files that are whole or not there, and the folders of what is generated once and kept for later runs."""

from __future__ import annotations

import atexit
import functools
import hashlib
import logging
import os
import pickle
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch

from .errors import ArgumentValueError

__all__ = ["cache_directories", "generated", "load_whole", "replacing", "save_whole", "write_whole"]

logger = logging.getLogger("halfstep")

T = TypeVar("T")

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


# ---- files of the user


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write to. It takes the place of the previous one when the block ends without an error.

    It is forced to the disk and renamed. Renaming is one operation: a process killed at any moment leaves the file that
    was there before. The unfinished file is ``{name}.tmp``. What a killed process left there is removed, and a link
    there is not followed.

    Args:
        path: where; missing folders are made. A link stays a link, and its target is replaced. A new file gets the mode
            of the one it replaces. A device or a pipe is written to. One process at a time may write to it.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        with open(path, "wb") as file:
            yield file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.unlink(missing_ok=True)
    # The file is new (O_EXCL), so that nobody can have put a link there, and is never open to more people than later.
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode)
    try:
        with open(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            unfinished.chmod(mode)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def save_whole(state: Any, path: str | os.PathLike[str]) -> None:
    """``torch.save`` that leaves the previous file until the new one is whole; see ``replacing``."""
    with replacing(path) as file:
        torch.save(state, file)


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


# ---- what is generated


def cache_directories() -> list[Path]:
    """The folders that keep generated code, the best first: those of this user that nobody else can write to.

    ``HALFSTEP_CACHE_DIR``, or ``halfstep/`` in the user's cache; then a folder of this user among the temporary files.
    They may be read-only, or full.
    """
    folders, chosen = [], _chosen_directory()
    if chosen is not None and (refusal := _refusal(chosen)) is None:
        folders.append(chosen)
    elif chosen is not None:
        _say_once(f"Compiled kernels are kept among the temporary files and not in {chosen}: {refusal}")
    temporary = Path(tempfile.gettempdir()) / f"halfstep-{_user()}"
    if not temporary.is_symlink() and _refusal(temporary) is None:
        folders.append(temporary)
    return folders


def generated(stem: str, suffix: str, write: Callable[[Path], None], load: Callable[[Path], T]) -> T:
    """The result of ``load`` for a generated file, which is kept for later runs.

    The file is ``{stem}-{checksum}{suffix}``. One that is damaged is removed and written anew.

    Args:
        stem: the first part of its name, which depends on everything that the content depends on.
        suffix: the last part.
        write: writes it to a path.
        load: loads it from its path.

    Raises:
        OSError: if it cannot be written and loaded anywhere, also not in a folder of this process alone.
        Exception: what ``write`` and ``load`` raise otherwise.
    """
    folders = cache_directories()
    for folder in folders:
        with suppress(OSError):
            path = _whole_file(folder, stem, suffix)
            if path is not None:
                return load(path)
    for kept in [*folders, None]:
        try:
            path = _written(kept or _temporary_directory(), stem, suffix, write)
        except OSError as error:
            failed = error
            continue
        try:
            return load(path)
        except OSError as error:  # the compiler wrote nonsense, or nothing can be executed there
            failed = error
            path.unlink()
    raise failed


def write_whole(path: Path, text: str) -> None:
    """Write a text that several processes may write at once: the file is whole at any moment."""
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _whole_file(folder: Path, stem: str, suffix: str) -> Path | None:
    for path in sorted(folder.glob(f"{stem}-*{suffix}")):
        if _is_ours(path.lstat(), stat.S_IFREG) and path == _place(folder, stem, suffix, path):
            return path
        path.unlink()
    return None


def _written(folder: Path, stem: str, suffix: str, write: Callable[[Path], None]) -> Path:
    handle, name = tempfile.mkstemp(".tmp", f"{stem}-", folder)
    os.close(handle)
    unfinished = Path(name)
    try:
        write(unfinished)
        unfinished.chmod(0o700)  # whatever the compiler and the umask made of it
        path = _place(folder, stem, suffix, unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _place(folder: Path, stem: str, suffix: str, content: Path) -> Path:
    return folder / f"{stem}-{hashlib.sha256(content.read_bytes()).hexdigest()[:20]}{suffix}"


def _chosen_directory() -> Path | None:
    chosen = os.environ.get("HALFSTEP_CACHE_DIR")
    if chosen:
        return Path(os.path.realpath(chosen))
    try:
        return Path(os.path.realpath(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")) / "halfstep"
    except RuntimeError:  # a user without a home
        return None


def _refusal(folder: Path) -> str | None:
    """Why code is not loaded from a folder, which is made if need be; None if it is."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        above = [parent.stat().st_mode for parent in folder.parents]
        ours = _is_ours(folder.stat(), stat.S_IFDIR)
    except OSError as error:
        return f"it cannot be made ({error.strerror})"
    # What is in a folder where everybody may rename things can be put in the place of another at any time.
    if not ours or any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in above):
        return "another user owns it or can write to it, and could have this user run any code"
    return None


def _is_ours(found: os.stat_result, kind: int) -> bool:
    """Whether something is a file or folder of this user's, and nobody else may write to it."""
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == _user() and not found.st_mode & _OTHERS_WRITE


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0  # Windows, where st_uid is 0 too


@functools.cache
def _temporary_directory() -> Path:
    """A folder of this process alone, which is gone when it ends."""
    folder = tempfile.mkdtemp(prefix="halfstep-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)
