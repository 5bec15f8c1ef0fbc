"""Every Python example on the pages about trainers runs as it stands, where its packages are installed."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path

import pytest

from tests.integrations.torchvision_stub import import_timm

PAGES = sorted((Path(__file__).parents[2] / "docs" / "trainers").glob("*.md"))
FENCED = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def test_there_is_a_page_for_each_trainer() -> None:
    assert {page.stem for page in PAGES} == {"accelerate", "lightning", "logging", "timm", "transformers"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem != "logging" and importlib.util.find_spec(page.stem) is None:
        pytest.skip(f"{page.stem} is not installed; `make integrations` installs it")
    if page.stem == "timm":
        import_timm()
    if page.stem in ("accelerate", "transformers"):
        from tests.integrations.test_accelerate import forget

        forget()
    monkeypatch.chdir(tmp_path)
    text, namespace = page.read_text(), {}  # type: ignore[var-annotated]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainers', about small examples
        for block in FENCED.finditer(text):
            lines_before = text.count("\n", 0, block.start(1))
            exec(compile("\n" * lines_before + block[1], str(page), "exec"), namespace)
