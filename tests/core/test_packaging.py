"""What importing halfstep drags in, what it exports, and what the wheel holds."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import halfstep

ROOT = Path(__file__).resolve().parents[2]

UNWANTED = (
    "click",
    "jinja2",
    "matplotlib",
    "rich",
    "sklearn",
    "torch._dynamo",
    "torch._inductor",
    "transformers",
    "triton",
)

PUBLIC_MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(halfstep.__path__, "halfstep.")
    if not any(part.startswith("_") for part in module.name.split("."))
    # Each adapter needs the trainer it is for; tests/integrations has these tests for them.
    and (not module.name.startswith("halfstep.integrations.") or module.name.endswith((".recipe", ".figures")))
)


def fresh_interpreter(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def modules_after(statement: str) -> set[str]:
    found: list[str] = json.loads(
        fresh_interpreter(f"import json, sys; {statement}; print(json.dumps(list(sys.modules)))")
    )
    return set(found)


@pytest.mark.exhaustive
def test_import_drags_in_nothing_but_torch() -> None:
    added = modules_after("from halfstep import *") - modules_after("import torch, torch.utils.data")
    dragged = sorted(name for name in added if any(name == u or name.startswith(u + ".") for u in UNWANTED))
    assert not dragged
    assert "halfstep.cli" not in added
    foreign = sorted(
        name for name in added if name.partition(".")[0] not in ("halfstep", "torch", *sys.stdlib_module_names)
    )
    assert not foreign


def test_import_alone_needs_no_torch() -> None:
    assert "torch" not in modules_after("import halfstep; halfstep.__version__; dir(halfstep)")


def test_every_public_name_is_found_when_it_is_asked_for_and_no_other_is() -> None:
    code = "import halfstep; found = [getattr(halfstep, name) for name in dir(halfstep)]; halfstep.optimizers.FusedAdam"
    fresh_interpreter(code)
    assert {*halfstep.__all__, "optimizers", "static", "kernels"} <= set(dir(halfstep))
    with pytest.raises(AttributeError, match="module 'halfstep' has no attribute 'Modell'"):
        _ = halfstep.Modell  # type: ignore[attr-defined]


@pytest.mark.exhaustive
def test_import_adds_little_time_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiled files as in an installed package; time of this process alone, whatever else the machine does.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    code = (
        "import time, torch; began = time.process_time(); from halfstep import amp; print(time.process_time() - began)"
    )
    assert min(float(fresh_interpreter(code)) for _ in range(4)) < 0.12


@pytest.mark.exhaustive
def test_import_changes_nothing_in_torch() -> None:
    code = """
import torch
before = {name: getattr(torch, name) for name in ("matmul", "softmax", "get_default_dtype")}
patched = torch.optim.Optimizer.__dict__.copy(), torch.nn.Module.__dict__.copy()
from halfstep import amp
assert before == {name: getattr(torch, name) for name in before}
assert patched == (dict(torch.optim.Optimizer.__dict__), dict(torch.nn.Module.__dict__))
assert torch.get_default_dtype() is torch.float32 and not torch.is_autocast_enabled("cpu")
"""
    fresh_interpreter(code)


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_every_name_in_all_exists(name: str) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert len(set(exported)) == len(exported)
    missing = [attribute for attribute in exported if not hasattr(module, attribute)]
    assert not missing


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_every_public_name_is_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__
    exported = [getattr(module, attribute) for attribute in getattr(module, "__all__", [])]
    ours = [value for value in exported if str(getattr(value, "__module__", "")).startswith("halfstep")]
    assert not [value.__qualname__ for value in ours if not value.__doc__ and hasattr(value, "__qualname__")]


def test_version_agrees() -> None:
    assert halfstep.__version__ == metadata.version("halfstep")
    assert re.match(r"\d+\.\d+\.\d+", halfstep.__version__)


@pytest.mark.exhaustive
def test_wheel(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    assert f"-{halfstep.__version__}-py3-none-any" in wheel.name
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"halfstep"}
    required = re.findall(r"^Requires-Dist: ([\w.-]+)[^;\n]*$", info, re.M)
    assert set(required) == {"torch", "click", "rich"}
    tracked = subprocess.run(
        ["git", "ls-files", "halfstep"], cwd=ROOT / "src", check=True, capture_output=True, text=True
    )
    sources = set(tracked.stdout.splitlines())
    assert "halfstep/py.typed" in sources
    assert sources - set(names) == set()


def pinned_torch(constraints: str) -> list[int]:
    (version,) = re.findall(r"^torch==([\d.]+)$", (ROOT / constraints).read_text(), re.M)
    return [int(n) for n in version.split(".")]


def test_constraints_pin_the_lowest_torch_that_the_package_accepts_and_a_newer_one() -> None:
    required = next(r for r in metadata.requires("halfstep") or [] if r.startswith("torch>="))
    lowest = [int(n) for n in required.removeprefix("torch>=").split(".")]
    assert pinned_torch("constraints-lowest.txt")[: len(lowest)] == lowest
    assert pinned_torch("constraints.txt") > lowest
