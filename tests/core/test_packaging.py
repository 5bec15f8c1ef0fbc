"""What importing halfstep drags in, what it exports, and what the wheel holds."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import halfstep

ROOT = Path(__file__).resolve().parents[2]

UNWANTED = ("click", "rich", "sklearn", "torch._dynamo", "torch._inductor", "transformers", "triton")

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
    known = {"halfstep", "torch", *sys.stdlib_module_names}
    assert not [name for name in sorted(added) if name.partition(".")[0] not in known]


def test_import_alone_needs_no_torch() -> None:
    assert "torch" not in modules_after("import halfstep; halfstep.__version__; dir(halfstep)")


@pytest.mark.exhaustive
def test_every_public_name_is_found_when_it_is_asked_for_and_no_other_is() -> None:
    code = "import halfstep; found = [getattr(halfstep, name) for name in dir(halfstep)]; halfstep.optimizers.FusedAdam"
    fresh_interpreter(code)
    assert {*halfstep.__all__, "optimizers", "static", "kernels"} <= set(dir(halfstep))
    with pytest.raises(AttributeError, match="module 'halfstep' has no attribute 'Modell'"):
        _ = halfstep.Modell  # type: ignore[attr-defined]


@pytest.mark.exhaustive
def test_import_adds_little_work_to_torch() -> None:
    # Calls, because times depend on what else the machine does. The import took 52 to 66 ms, and torch's 1,900 ms
    # (compiled files, one thread of an AMD EPYC). Built-in functions are left out, because each version of Python calls
    # others of them, and importlib, which makes more calls the more folders sys.path has. The garbage collection that
    # torch's import leaves due is not counted: it takes 80 ms more.
    code = """
import cProfile, pstats, torch
with cProfile.Profile() as profile:
    from halfstep import amp
rows = pstats.Stats(profile).stats.items()
print(sum(row[1] for (file, *_), row in rows if file != "~" and "importlib" not in file))
"""
    assert int(fresh_interpreter(code)) < 10_500


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
    assert not [attribute for attribute in exported if not hasattr(module, attribute)]


@pytest.mark.parametrize("name", sorted({f"halfstep.{name}" for name in dir(halfstep)} & set(PUBLIC_MODULES)))
def test_dir_shows_public_names_only(name: str) -> None:
    module = importlib.import_module(name)
    below = {"halfstep.amp": ["debugging"]}.get(name, [])
    if name in ("halfstep.apex", "halfstep.integrations"):
        below = [each.name for each in pkgutil.iter_modules(module.__path__)]
    shown = {each for each in dir(module) if not each.startswith("__")}
    assert shown <= {*getattr(module, "__all__", []), *below}


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


def build(target: str, source: Path, into: Path) -> Path:
    """The wheel or the source archive of a folder."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (made,) = into.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.mark.exhaustive
def test_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    assert f"-{halfstep.__version__}-py3-none-any" in wheel.name
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"halfstep"}
    assert "](https://halfstep.github.io/halfstep/images/demo.svg)" in info
    assert set(re.findall(r"^Requires-Dist: ([\w.-]+)[^;\n]*$", info, re.M)) == {"torch", "click", "rich"}
    tracked = subprocess.run(
        ["git", "ls-files", "halfstep"], cwd=ROOT / "src", check=True, capture_output=True, text=True
    )
    sources = set(tracked.stdout.splitlines())
    assert "halfstep/py.typed" in sources
    assert sources - set(names) == set()


@pytest.mark.exhaustive
def test_the_example_of_the_readme_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    (example, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    script = tmp_path / "train.py"
    script.write_text(f"{example}\nimport halfstep\nprint(halfstep.__file__, loss.item())\n")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    run = [sys.executable, "-W", "error::DeprecationWarning", str(script)]
    done = subprocess.run(run, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    place, loss = done.stdout.split()
    assert Path(place).is_relative_to(tmp_path)
    assert 0 < float(loss) < 5


@pytest.mark.exhaustive
def test_the_source_archive_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "tests"} <= {path.name for path in source.iterdir()}
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(build("wheel", source, tmp_path / "again")) as again:
        assert {info.filename: info.CRC for info in again.infolist()} == {i.filename: i.CRC for i in ours.infolist()}


REPOSITORY = "https://github.com/halfstep/halfstep/blob/main/"
PAGES = "https://halfstep.github.io/halfstep/"


def target(address: str) -> Path:
    """The file here that an address of the repository or of the documentation shows."""
    if address.startswith(REPOSITORY):
        return ROOT / address.removeprefix(REPOSITORY)
    page = address.removeprefix(PAGES).partition("#")[0].rstrip("/")
    if page.startswith("images/"):
        return ROOT / "docs" / page
    return ROOT / "docs" / f"{page or 'index'}.md"


def links(text: str) -> list[str]:
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.M)]


def test_links_of_the_readme_are_relative_in_the_repository() -> None:
    own = [link for link in links((ROOT / "README.md").read_text()) if not link.startswith(("https://", "#"))]
    assert len(own) > 10
    assert [link for link in own if not (ROOT / link.partition("#")[0]).exists()] == []


def test_every_link_of_the_readme_leads_somewhere_on_a_package_index_too() -> None:
    pytest.importorskip("hatchling")
    from hatch_build import with_addresses

    readme = with_addresses((ROOT / "README.md").read_text())
    text = re.sub(r"^```.*?^```", "", readme, flags=re.M | re.S)
    addresses = [*links(readme), *re.findall(r"(?:src|href)=\"([^\"]+)\"", text)]
    assert len(addresses) > 10
    assert [address for address in addresses if not address.startswith(("https://", "#"))] == []
    ours = [address for address in addresses if address.startswith((REPOSITORY, PAGES))]
    assert [address for address in ours if not target(address).exists()] == []
    anchors = [(address, address.partition("#")[2]) for address in ours if "#" in address]
    assert [address for address, name in anchors if f"{{ #{name} }}" not in target(address).read_text()] == []
    defined = {name.lower() for name in re.findall(r"^\[([^\]]+)\]: ", text, re.M)}
    used = {name.lower() for name in re.findall(r"\]\[([^\]]+)\]", text)}
    assert used <= defined


def test_the_citation_names_what_the_package_names() -> None:
    citation = dict(re.findall(r'^([\w-]+): "?(.*?)"?$', (ROOT / "CITATION.cff").read_text(), re.M))
    urls = dict(url.split(", ") for url in metadata.metadata("halfstep").get_all("Project-URL") or [])
    assert citation["cff-version"] == "1.2.0"
    assert citation["title"].startswith("halfstep")
    assert citation["repository-code"] == urls["Repository"]
    assert citation["url"] == urls["Documentation"]
    assert citation["license"] == "Apache-2.0"


def pinned_torch(constraints: str) -> list[int]:
    (version,) = re.findall(r"^torch==([\d.]+)$", (ROOT / constraints).read_text(), re.M)
    return [int(n) for n in version.split(".")]


def test_constraints_pin_the_lowest_torch_that_the_package_accepts_and_a_newer_one() -> None:
    required = next(r for r in metadata.requires("halfstep") or [] if r.startswith("torch>="))
    lowest = [int(n) for n in required.removeprefix("torch>=").split(".")]
    assert pinned_torch("constraints-lowest.txt")[: len(lowest)] == lowest
    assert pinned_torch("constraints.txt") > lowest


def test_the_line_that_installs_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a release nothing is on the index, and a clone is what there is."""
    from halfstep.core import text

    assert ("halfstep[demo]" in text.install_line("demo")) is (".dev" not in halfstep.__version__)
    monkeypatch.setattr(text, "RELEASED", True)
    assert text.install_line("demo") == "pip install 'halfstep[demo]'"
    monkeypatch.setattr(text, "RELEASED", False)
    assert text.install_line("demo") == "pip install '.[demo]' in a clone of the repository"


def test_pages_say_the_line_that_installs_an_extra() -> None:
    """The line that error messages say, too: which one works is decided in one place."""
    from halfstep.core import text

    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    said = {page.name: re.findall(r"pip install '[^']*\[\w+\]'", page.read_text()) for page in pages}
    works = re.compile(re.escape(text.install_line("demo").split("]")[0]).replace("demo", r"\w+") + r"\]'")
    assert sum(map(len, said.values())) > 5
    assert [(name, line) for name, lines in said.items() for line in lines if not works.fullmatch(line)] == []


@pytest.mark.exhaustive
def test_the_archives_of_a_release_are_checked(wheel: Path, tmp_path: Path) -> None:
    from tools.release_check import faults_of

    sdist = build("sdist", ROOT, tmp_path)
    assert faults_of(sdist, wheel) == []
    changed = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as packed, zipfile.ZipFile(changed, "w") as other:
        for info in packed.infolist():
            text = packed.read(info)
            if info.filename.endswith("/METADATA"):
                text = text.replace(b"\nSummary:", b"\nOther:") + b"\n[a](docs/index.md)\n"
            other.writestr(info, text)
        other.writestr("halfstep/big.bin", bytes(2**20 + 1))
    assert faults_of(sdist, changed) == [
        "halfstep/big.bin has 1,048,577 bytes, more than 1 MiB.",
        "The metadata lack Summary.",
        "The README in the package has the relative link docs/index.md.",
    ]
