"""Try what a release would publish: ``make release-check``.

It builds the source archive and the wheel, checks their metadata, the README in them and the size of each file, and
installs each into an empty environment with the lowest and the newest torch. There it runs the code of the README,
``halfstep demo --epochs 1`` and, against the wheel, the tests of ``make quick``. Everything is below build/release.

``--archives`` stops before the environments, which take gigabytes and most of the time.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "release"
MOST_BYTES = 2**20
CONSTRAINTS = {"lowest": "constraints-lowest.txt", "newest": "constraints.txt"}


def build() -> tuple[Path, Path]:
    """The source archive and the wheel, which is built from it."""
    shutil.rmtree(BUILD, ignore_errors=True)
    run([sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(BUILD)], cwd=ROOT)
    (sdist,) = BUILD.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(BUILD / "source", filter="data")
    (source,) = (BUILD / "source").iterdir()
    run([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(BUILD)], cwd=source)
    (wheel,) = BUILD.glob("*.whl")
    return sdist, wheel


def faults_of(sdist: Path, wheel: Path) -> list[str]:
    """What is wrong with two archives, in a sentence each."""
    with tarfile.open(sdist) as archive:
        sizes = {member.name: member.size for member in archive.getmembers()}
    with zipfile.ZipFile(wheel) as packed:
        sizes |= {info.filename: info.file_size for info in packed.infolist()}
        name = next(each for each in packed.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_string(packed.read(name).decode("utf-8"))
    found = [f"{name} has {size:,} bytes, more than 1 MiB." for name, size in sizes.items() if size > MOST_BYTES]
    needed = ("Name", "Version", "Summary", "Requires-Python", "License-Expression", "Description-Content-Type")
    found += [f"The metadata lack {field}." for field in needed if not metadata[field]]
    readme = str(metadata.get_payload())
    text = re.sub(r"^```.*?^```", "", readme, flags=re.M | re.S)
    links = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.M)]
    found += [
        f"The README in the package has the relative link {each}."
        for each in links
        if not each.startswith(("https://", "#"))
    ]
    version = str(metadata["Version"])
    released = ".dev" not in version
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if released and not re.search(rf"^## {re.escape(version)} \(?\d{{4}}-\d\d-\d\d", changelog, re.M):
        found.append(f"CHANGELOG.md has no section {version} with a date.")
    return found


def try_installed(archive: Path, name: str, constraints: str, *, tests: bool) -> None:
    """Install an archive into an empty environment and use it there, away from the sources."""
    place = BUILD / name
    venv.create(place / "env", with_pip=True)
    python = str(place / "env" / "bin" / "python")
    flags = os.environ.get("PIP_FLAGS", "").split()
    run(
        [python, "-m", "pip", "install", "--quiet", *flags, "-c", str(ROOT / constraints), f"{archive}[test]"],
        cwd=place,
    )
    (example, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    run([python, "-W", "error::DeprecationWarning", "-c", example], cwd=place)
    run([str(place / "env" / "bin" / "halfstep"), "demo", "--epochs", "1", "--out", str(place / "demo")], cwd=place)
    if tests:
        # The tests come from the source archive, without its sources: `import halfstep` finds the wheel.
        (source,) = (BUILD / "source").iterdir()
        shutil.copytree(source, place / "tree", ignore=shutil.ignore_patterns("src"), dirs_exist_ok=True)
        line = ["-m", "pytest", "--timeout=300", "-m", "not exhaustive", "--combinations", "each"]
        leave = [f"--ignore=tests/{folder}" for folder in NEED_SOURCES]
        run([python, *line, *leave], cwd=place / "tree")


NEED_SOURCES = ("docs", "core/test_import_order.py", "core/test_torch_compat.py", "core/test_packaging.py")
"""Tests that read the sources."""


def run(command: list[str], cwd: Path) -> None:
    """Run a command, and end if it fails."""
    print("$", " ".join(command), flush=True)
    subprocess.run(command, cwd=cwd, check=True, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})


def main() -> int:
    parser = argparse.ArgumentParser(description="Try what a release would publish.")
    parser.add_argument("--archives", action="store_true", help="only build and check the two archives")
    args = parser.parse_args()
    sdist, wheel = build()
    found = faults_of(sdist, wheel)
    for fault in found:
        print(f"release-check: {fault}", file=sys.stderr)
    if found:
        return 1
    print(f"release-check: {sdist.name} and {wheel.name} are in order", flush=True)
    if not args.archives:
        for torch, constraints in CONSTRAINTS.items():
            try_installed(wheel, f"wheel-{torch}", constraints, tests=True)
            try_installed(sdist, f"sdist-{torch}", constraints, tests=False)
        print("release-check: all of it works where it is installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
