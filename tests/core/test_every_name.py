"""Every public name of torch has a row in the table of ops, or a reason for none in ``no_rows.txt``."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.fft

from halfstep.core.errors import ArgumentValueError
from halfstep.core.oplists.names import resolve
from halfstep.core.oplists.tables import OPS

SPACES = {
    **{space.__name__: space for space in (torch, torch.nn.functional, torch.linalg, torch.special, torch.fft)},
    "torch.Tensor": torch.Tensor,
}
TEXT = Path(__file__).with_name("no_rows.txt").read_text(encoding="utf-8")
REASONS = re.sub(r"^(#|\S).*", "", TEXT, flags=re.MULTILINE).split()
TODO = """{} is new in torch. If it needs 16 bits or fp32, refuses tensors of two dtypes or has no 16-bit kernel, add
a row to src/halfstep/core/oplists/ops.txt; else add the name to tests/core/no_rows.txt, below the reason for no row."""


def is_known(space: str, name: str) -> bool:
    try:
        rows = resolve(f"{space}.{name}")
    except ArgumentValueError:
        rows = ()
    names = {name, name.removesuffix("_"), *rows}
    return not OPS.keys().isdisjoint(names) or any(fnmatchcase(each, reason) for each in names for reason in REASONS)


def unknown(space: str, names: Any) -> list[str]:
    public = [
        name
        for name in dir(names)
        if name[0] != "_" and callable(value := getattr(names, name)) and not isinstance(value, type)
    ]
    return [f"{space}.{name}" for name in public if not is_known(space, name)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("space", SPACES)
def test_every_name_of_torch_has_a_row_or_a_reason_for_none(space: str) -> None:
    found = unknown(space, SPACES[space])
    assert not found, "\n".join(map(TODO.format, found))


def test_a_name_that_a_later_torch_adds_is_found() -> None:
    names = SimpleNamespace(new_sort_of_product=torch.mm, relu_=torch.relu_, softmax=torch.softmax, Kind=type)
    assert unknown("torch", names) == ["torch.new_sort_of_product"]


def test_no_name_has_a_row_and_a_reason_for_none() -> None:
    assert [name for name in REASONS if OPS.get(name)] == []
