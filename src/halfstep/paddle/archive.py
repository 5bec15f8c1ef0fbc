"""The ``torch.export`` archive of a program, written and read without pickle."""

from __future__ import annotations

import io
import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export.pt2_archive import PT2ArchiveReader

from ..core.dtypes import HALF_DTYPES
from ..core.errors import ArgumentValueError, UsageError
from ..parameters.held_masters import master_of

__all__ = ["in_fp32", "read_archive", "write_archive"]

_FACTS = "halfstep.json"
_PLAIN = re.compile(
    r"data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt|models/model\.json|extra/halfstep\.json"
    r"|archive_format|archive_version|byteorder|\.data/(version|serialization_id)"
)
"""The files that torch 2.13 writes for a program of plain tensors."""


@contextmanager
def in_fp32(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Open a block in which 16-bit parameters hold their masters, or their own values in fp32."""
    half = {p: p.data for p in params if p.dtype in HALF_DTYPES}
    for param, data in half.items():
        master = master_of(param)
        param.data = data.float() if master is None else master.data
    try:
        yield
    finally:
        for param, data in half.items():
            param.data = data


def write_archive(exported: torch.export.ExportedProgram, facts: Mapping[str, Any]) -> bytes:
    """Write an archive with a program and a few facts, which are plain values.

    Raises:
        UsageError: if the program has a tensor that torch.export can only pickle.
    """
    archive = io.BytesIO()
    torch.export.save(exported, archive, extra_files={_FACTS: json.dumps(facts)})
    if found := _pickled(archive.getvalue()):
        raise UsageError(
            f"This program cannot be saved: torch.export would pickle {found}. Its parameters must be ordinary tensors."
        )
    return archive.getvalue()


def read_archive(archive: bytes, name: str, writer: str) -> tuple[torch.export.ExportedProgram, dict[str, Any]]:
    """Read the program and the facts from an archive.

    Args:
        archive: the bytes that ``write_archive`` returned.
        name: the name of the file, for the message.
        writer: the name of the function that wrote the file, for the message.

    Raises:
        ArgumentValueError: for other bytes, and for an archive that would have to be unpickled.
    """
    try:
        found = _pickled(archive)
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ArgumentValueError(f"{name} is no file that {writer} wrote, or is damaged.") from error
    if found:
        raise ArgumentValueError(
            f"{name} was not loaded: torch.export would unpickle {found}, and so could run code. No file that "
            f"{writer} wrote needs that."
        )
    facts = {_FACTS: ""}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch 2.11, of its own copy
        exported = torch.export.load(io.BytesIO(archive), extra_files=facts)
    return exported, json.loads(facts[_FACTS] or "{}")


def _pickled(archive: bytes) -> str | None:
    """Return the first entry of an archive that ``torch.export.load`` would unpickle, or None.

    ``torch.export.load`` unpickles tensors that are marked as pickled, objects in files with other names, and files
    from before torch 2.8. It reads example inputs with ``weights_only=True``, and with False if this fails.
    """
    reader = PT2ArchiveReader(io.BytesIO(archive))
    names = reader.get_file_names()
    for name in names:
        if not _PLAIN.fullmatch(name):
            return name
    # Torch reads files from before torch 2.8 by zipfile, which must not see other entries than this reader.
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        if sorted(name.partition("/")[2] for name in file.namelist()) != sorted(names):
            return "files that are hidden in it"
    for folder in ("weights", "constants"):
        config = json.loads(reader.read_string(f"data/{folder}/model_{folder}_config.json"))["config"]
        for tensor, meta in config.items():
            if meta["use_pickle"] is not False:
                return str(tensor)
    try:
        torch.load(io.BytesIO(reader.read_bytes("data/sample_inputs/model.pt")), weights_only=True)
    except pickle.UnpicklingError:
        return "its example inputs"
    return None
