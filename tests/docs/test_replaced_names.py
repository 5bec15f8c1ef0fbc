"""Names of torch that halfstep replaces are in a table of docs/side-effects.md, and torch has its own in the end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from halfstep.torch_internals.torch_compat import HAS_GRAD_DTYPE
from tests.support import torch_scan
from tests.support.design_tables import differences, rows_of

TABLE = "Replaced names of torch"


@pytest.fixture(scope="module")
def report() -> dict[str, list[str]]:
    """What differs from torch after halfstep was imported, whenever it was looked at, and in the end."""
    if not HAS_GRAD_DTYPE:
        pytest.skip("the table is that of torch 2.13: in an older one fewer names are replaced")
    run = subprocess.run([sys.executable, torch_scan.__file__], capture_output=True, text=True, check=True, timeout=280)
    found: dict[str, list[str]] = json.loads(run.stdout)
    return found


@pytest.mark.exhaustive
def test_every_replaced_name_is_in_the_table(report: dict[str, list[str]]) -> None:
    how_long = dict(rows_of(TABLE).keys())
    problems = differences(TABLE, [(name, how_long.get(name, "")) for name in report["seen"]])
    assert not problems, "\n".join(problems)


@pytest.mark.exhaustive
def test_torch_has_its_own_back_after_the_last_session(report: dict[str, list[str]]) -> None:
    assert report["after"] == sorted(name for name, how_long in rows_of(TABLE) if how_long == "forever")


@pytest.mark.exhaustive
def test_an_import_replaces_no_function(report: dict[str, list[str]]) -> None:
    assert [name for name in report["at_import"] if ": " not in name] == []


def test_a_replaced_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch_scan.scan()
    assert torch_scan.changed(before, torch_scan.scan()) == []
    monkeypatch.setattr(torch.autograd, "backward", print)
    monkeypatch.setattr(torch.nn.Module, "fused", print, raising=False)
    hook = torch.nn.modules.module.register_module_forward_hook(print)
    try:
        found = torch_scan.changed(before, torch_scan.scan())
    finally:
        hook.remove()
    assert "torch.autograd.backward" in found
    assert "torch.nn.modules.module.Module.fused" in found
    assert "torch.nn.modules.module._global_forward_hooks: print" in found
    assert torch_scan.changed({}, {"torch.new.name": print}) == []  # a module that was imported since
