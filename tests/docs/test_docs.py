"""Every Python example in README and docs runs as it stands, top to bottom in one namespace a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if FENCED.search(page.read_text())], ids=lambda page: page.stem
)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text()
    namespace: dict[str, object] = {}
    for block in FENCED.finditer(text):
        lines_before = text.count("\n", 0, block.start(1))
        code = compile("\n" * lines_before + block[1], str(page), "exec")  # so that a traceback names the page's line
        exec(code, namespace)
