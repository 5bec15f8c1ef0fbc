"""Files that are written as a whole or not at all, and the cache folders of generated files."""

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
    """Open a file for writing that replaces the previous file when the block ends without an error.

    The file is flushed to disk and renamed. Renaming is atomic: a process that is killed at any moment leaves the
    previous file. The unfinished file is ``{name}.tmp``. A file that a killed process left there is removed, and a link
    there is not followed.

    Args:
        path: the file; missing folders are created. A link stays a link, and its target is replaced. A new file gets
            the mode of the previous one. A device or a pipe is written directly. Only one process at a time may write
            to it.
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
    # The file is new (O_EXCL), so it cannot be another user's link, and its mode is never wider than in the end.
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
    """Save like ``torch.save``, but keep the previous file until the new one is complete; see ``replacing``."""
    with replacing(path) as file:
        torch.save(state, file)


def load_whole(path: str | os.PathLike[str], names: tuple[str, ...], writer: str, device: Any = None) -> dict[str, Any]:
    """Load a dict that ``save_whole`` wrote. Only plain data is unpickled.

    Args:
        path: the file.
        names: the required keys of the dict.
        writer: the name of the function that wrote it, for the message.
        device: the device for its tensors; None keeps their devices.

    Raises:
        ArgumentValueError: for a file of another kind.
        FileNotFoundError: if the file does not exist.
    """
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True, map_location=device)
    except (pickle.UnpicklingError, EOFError, RuntimeError, UnicodeDecodeError) as error:
        raise ArgumentValueError(f"{os.fspath(path)} is no file that {writer} wrote, or is damaged.") from error
    missing = [name for name in names if not isinstance(found, dict) or name not in found]
    if missing:
        raise ArgumentValueError(f"{os.fspath(path)} has no {' and no '.join(missing)}, so {writer} did not write it.")
    return found


# ---- generated files


def cache_directories() -> list[Path]:
    """List the cache folders for generated code, the best first: folders of this user that no other user can write to.

    ``HALFSTEP_CACHE_DIR``, or ``halfstep/`` in the user's cache; then a folder of this user among the temporary files.
    The folders may be read-only, or full.
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
    """Return the result of ``load`` for a generated file, which is cached for later runs.

    The file is ``{stem}-{checksum}{suffix}``. A damaged file is removed and generated again.

    Args:
        stem: the first part of its name, which depends on everything that the content depends on.
        suffix: the last part.
        write: a function that writes the file to a path.
        load: a function that loads the file from its path.

    Raises:
        OSError: if the file cannot be written and loaded in any folder, even in a private one of this process.
        Exception: any other error of ``write`` and ``load``.
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
    """Write a text file that several processes may write at once: the file is complete at any moment."""
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
        unfinished.chmod(0o700)  # independent of the compiler and the umask
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
    """Return the reason not to load code from a folder, which is created if needed; None if it is safe."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        above = [parent.stat().st_mode for parent in folder.parents]
        ours = _is_ours(folder.stat(), stat.S_IFDIR)
    except OSError as error:
        return f"it cannot be made ({error.strerror})"
    # In a folder in which all users may rename files, a file can be replaced at any time.
    if not ours or any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in above):
        return "another user owns it or can write to it, and could have this user run any code"
    return None


def _is_ours(found: os.stat_result, kind: int) -> bool:
    """True for a file or folder of this user that no other user may write to."""
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == _user() and not found.st_mode & _OTHERS_WRITE


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0  # Windows, where st_uid is 0 too


@functools.cache
def _temporary_directory() -> Path:
    """Make a private folder of this process, which is removed at exit."""
    folder = tempfile.mkdtemp(prefix="halfstep-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)
