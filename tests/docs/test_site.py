"""The site's own tools: the checker of its links, its picture of results, and what happens without a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

from halfstep import __version__
from tools import figures, report_pictures, screenshots
from tools.check_site import check
from tools.chromium import Chromium, find
from tools.search_site import SEARCHES, wrong

ROOT = Path(__file__).resolve().parents[2]
ADDRESS = "https://example.org/docs/"


def site(folder: Path, **pages: str) -> Path:
    """A site with these pages, and a page and a picture that they can lead to."""
    (folder / "there").mkdir()
    (folder / "there/index.html").write_text('<h1 id="place">There</h1><a name="old-place"></a>')
    (folder / "index.html").write_text("<h1>Home</h1>")
    (folder / "picture.svg").write_text("<svg/>")
    for name, text in pages.items():
        (folder / f"{name}.html").write_text(text)
    return folder


GOOD = [
    '<a href="there/">a</a> <a href="there/#place">b</a> <a href="there/index.html#old-place">c</a>',
    '<a id="here" href="#here">a</a> <a href="#__search">theme</a> <a href="">itself</a> <a href="./?q=x">query</a>',
    '<img src="picture.svg" alt="A picture"> <img src="data:image/png;base64,xx" alt="">',
    '<a href="https://pytorch.org/docs/stable/amp.html#x">b</a> <a href="mailto:me@example.org">c</a>',
    '<a href="/docs/there/#place">a</a> <a href="https://example.org/docs/there/">b</a> <a href="/docs">c</a>',
    '<link rel="canonical" href="https://example.org/docs/"><link rel="stylesheet" href="picture.svg">',
]
BAD = {
    '<a href="nowhere/">x</a>': "page.html: <a> nowhere/: there is no such file",
    '<a href="there/#nowhere">x</a>': "page.html: <a> there/#nowhere: there is no such place on the page",
    '<a href="#nowhere">x</a>': "page.html: <a> #nowhere: there is no such place on the page",
    "<table><thead><tr><th></th><th></th></tr></thead></table>": "page.html: a column of a table has no name:  | ",
    '<img src="nothing.png" alt="x">': "page.html: <img> nothing.png: there is no such file",
    '<img src="picture.svg">': "page.html: picture.svg has no text for those who cannot see it",
    '<img src="picture.svg" srcset="other.svg 2x" alt="">': "page.html: <img> other.svg: there is no such file",
    '<script src="https://cdn.org/x.js"></script>': "page.html: <script> loads https://cdn.org/x.js from elsewhere",
    '<link rel="preconnect" href="//fonts.org">': "page.html: <link> loads //fonts.org from elsewhere",
    '<a href="https://a b.org/">x</a>': "page.html: <a> https://a b.org/: this is no address",
    '<a href="https:/a.org/">x</a>': "page.html: <a> https:/a.org/: this is no address",
    '<a href="javascript:f()">x</a>': "page.html: <a> javascript:f(): no page should link to such an address",
    '<a href="/other/">x</a>': "page.html: <a> /other/: it leads out of /docs/",
    '<a href="https://example.org/docs/nowhere/">x</a>': (
        "page.html: <a> https://example.org/docs/nowhere/: there is no such file"
    ),
}


@pytest.mark.parametrize("text", GOOD)
def test_good_links_are_not_complained_about(text: str, tmp_path: Path) -> None:
    assert list(check(site(tmp_path, page=text), ADDRESS)) == []


@pytest.mark.parametrize(("text", "said"), BAD.items(), ids=list(BAD))
def test_bad_links_are_named_with_their_page(text: str, said: str, tmp_path: Path) -> None:
    assert list(check(site(tmp_path, page=text), ADDRESS)) == [said]


def test_the_pictures_and_the_tables_show_recent_records() -> None:
    for name, draw in {"demo": figures.draw, **report_pictures.DRAW}.items():
        picture = figures.IMAGES / f"{name}.svg"
        assert picture.read_text() == draw(json.loads(picture.with_suffix(".json").read_text()))
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    assert [table for table in figures.tables(figures.recorded()) if table not in pages] == []
    releases = re.findall(r"^## (\d[\d.]*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    for record in figures.recorded().values():
        assert record["machine"]["halfstep"].startswith((__version__, *releases[:1])), "run `make figures`"


PICTURES = [path for path in sorted((ROOT / "docs/images").glob("*.svg")) if "<text" in path.read_text()]


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_every_picture_can_be_listened_to_and_read_on_a_narrow_screen(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"<title\b[^>]*>[^<]+</title>\s*<desc\b[^>]*>[^<]+</desc>", text)
    assert "prefers-color-scheme: dark" in text
    drawn = re.search(r'viewBox="0 0 (\d+) ', text)
    assert drawn is not None
    sizes = [float(size) for size in re.findall(r'font(?:-size)?\s*[:=][^;{}"]*?"?(\d+)(?:px|")', text)]
    assert min(sizes) * min(1, 368 / int(drawn[1])) >= 10  # a page has 368 px of a screen of 400


def test_the_site_and_the_package_name_the_same_addresses() -> None:
    settings = (ROOT / "mkdocs.yml").read_text()
    urls = dict(url.split(", ") for url in metadata.metadata("halfstep").get_all("Project-URL") or [])
    assert f"\nrepo_url: {urls['Repository']}\n" in settings
    assert f"\nsite_url: {urls['Documentation']}\n" in settings


def test_without_a_browser_screenshots_are_skipped_visibly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(screenshots, "find", lambda: None)
    monkeypatch.setattr(sys, "argv", ["screenshots", "--out", str(tmp_path / "out")])
    assert screenshots.main() == 0
    assert capsys.readouterr().out.startswith("SKIPPED: no screenshots and none of their checks, because none of chrom")
    assert not (tmp_path / "out").exists()


WIDE = {
    "<pre><code>" + "x" * 300 + "</code></pre>": "code is cut off",
    '<table style="width: 60px; overflow-wrap: anywhere"><tr><th>everything else</th></tr></table>': (
        "a word of a header is broken: everything"
    ),
    "<pre style='white-space: pre-wrap; overflow-wrap: anywhere'><code>" + "x" * 300 + "</code></pre>": None,
    "<table><tr><th>everything else</th></tr></table>": None,
    "<p style='height: 12000px'>end</p>": "px long",
}


@pytest.mark.skipif(find() is None, reason="needs Chromium")
def test_what_is_cut_off_on_a_wide_screen_is_found(tmp_path: Path) -> None:
    wide = "1280 px, light"
    with screenshots.served(tmp_path) as server, Chromium(find() or "") as chromium:
        for number, (body, said) in enumerate(WIDE.items()):
            (tmp_path / f"{number}.html").write_text(f"<style>code {{ display: block; overflow: auto }}</style>{body}")
            found = [
                each for each in screenshots.look(chromium, "page", f"{server}{number}.html", None) if wide in each
            ]
            assert len(found) == (said is not None)
            assert said is None or said in found[0]


def test_every_page_of_the_site_is_looked_at(tmp_path: Path) -> None:
    for page in ("index.html", "api/amp/index.html", "404.html"):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).touch()
    assert screenshots.pages_of(tmp_path) == ["", "404.html", "api/amp/"]


@pytest.mark.exhaustive
@pytest.mark.skipif(not (shutil.which("node") and find_spec("mkdocs")), reason="needs Node.js and mkdocs")
def test_the_built_site_has_no_fault_and_its_search_finds_the_right_page_first(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert [*check(tmp_path, "https://halfstep.github.io/halfstep/"), *wrong(tmp_path)] == []
    assert len(SEARCHES) >= 20
    assert '<span class="option">--opt-level</span>' in (tmp_path / "command-line/index.html").read_text()
    assert 'class="wide language-text' in (tmp_path / "troubleshooting/index.html").read_text()
