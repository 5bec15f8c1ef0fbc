"""Look at the built site and at the reports in Chromium, wide and narrow, light and dark, and check them.

``make screenshots`` writes pictures of some pages to build/screenshots, for people to look at. It fails if on any page
of the site or in any report

- something is wider than the screen, a table scrolls, or a line of code is cut off,
- a wide screen has to scroll through more than LONGEST px, but for the changelog,
- a word of a table's header is broken, but for code on a narrow screen,
- on a narrow screen, text in a picture is shown smaller than 10 px,
- text has too little contrast with what is behind it (WCAG AA: 4.5 to 1, and 3 to 1 for large text),
- something is fetched from elsewhere,

and if the site's search does not find what people type. Without Chromium it says so and does nothing else.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.chromium import NAMES, Chromium, find

ROOT = Path(__file__).resolve().parents[1]
WIDTHS = {1280: 900, 400: 800}  # and the heights
TALLEST = 3000  # what is below is not in the picture
SMALLEST_TEXT = 10
LONGEST = 9_000  # px of a page that is 1280 px wide: what is longer is better divided
PAGES = ("", "tutorial/", "how-to/ddp/", "loss-scaling/", "performance/", "command-line/", "api/amp/", "404.html")
SEARCHES = {"loss is nan": "troubleshooting/", "out of memory": "troubleshooting/", "gradscaler": "api/grad_scaler/"}
"""What people type into the site's search, and the page that has to come first."""

CHECKS = Path(__file__).with_name("page_checks.js").read_text(encoding="utf-8")
FOUND = r"[...document.querySelectorAll('a.md-search-result__link')].slice(0, 5).map(link => link.getAttribute('href'))"


def main() -> int:
    """Take all pictures; the exit status is 1 where a check has failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--site", type=Path, default=ROOT / "site")
    parser.add_argument("--out", type=Path, default=ROOT / "build/screenshots")
    parser.add_argument("--pictures", nargs="*", default=PAGES, help="pages to take pictures of, one of each kind")
    given = parser.parse_args()
    program = find()
    if program is None:
        print(f"SKIPPED: no screenshots and none of their checks, because none of {', '.join(NAMES)} is on PATH.")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        make = [sys.executable, "-m", "tools.example_reports", folder]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        reports = sorted(path.name for path in Path(folder).glob("*.html"))
        (Path(folder) / "halfstep").symlink_to(given.site.resolve())  # where the site will be published, too
        with served(Path(folder)) as server, Chromium(program) as chromium:
            site = server + "halfstep/"
            addresses = {
                f"site-{page.strip('/').replace('/', '-') or 'home'}": site + page for page in pages_of(given.site)
            }
            taken = {site + page for page in given.pictures}
            addresses |= (made := {f"report-{name.removesuffix('.html')}": server + name for name in reports})
            taken |= set(made.values())
            wrong = [
                each
                for name, address in addresses.items()
                for each in look(chromium, name, address, given.out if address in taken else None)
            ]
            wrong += [each for text, wanted in SEARCHES.items() for each in search(chromium, site, text, wanted)]
    for each in wrong:
        print(each)
    said = f"{len(wrong)} things are wrong" if wrong else "all is well"
    print(f"{len(addresses)} pages, narrow and wide, light and dark: {said}. See {given.out}")
    print(f"That took {time.monotonic() - began:.0f} s.")
    return 1 if wrong else 0


def pages_of(site: Path) -> list[str]:
    """The addresses of all pages of a built site, below its own."""
    return sorted(str(path.relative_to(site)).removesuffix("index.html") for path in site.rglob("*.html"))


def look(chromium: Chromium, name: str, address: str, out: Path | None) -> Iterator[str]:
    """Say what is wrong with one page, and take its pictures where there is a folder for them."""
    chromium.open(address)
    for width, height in WIDTHS.items():
        # Colors are checked on a wide screen only, so dark pages that nobody takes a picture of need no narrow look.
        for scheme in ("light", "dark") if out is not None or width == max(WIDTHS) else ("light",):
            chromium.look(width=width, height=height, scheme=scheme)
            check = CHECKS.replace("WIDTH", str(width)).replace("SMALLEST", str(SMALLEST_TEXT))
            found: dict[str, Any] = chromium.evaluate(check)
            tall = max(min(found["height"], TALLEST), height)
            if out is not None:
                chromium.screenshot(out / f"{name}-{width}-{scheme}.png", width=width, height=tall)
            if found["height"] > LONGEST and width == max(WIDTHS) and name != "site-changelog":
                found["wrong"].append(f"it is {found['height']} px long")
            for each in found["wrong"]:
                yield f"{name}, {width} px, {scheme}: {each}"
    for each in chromium.requested:
        if not each.startswith(("http://127.0.0.1:", "data:", "blob:")):
            yield f"{name}: it fetches {each}"


def search(chromium: Chromium, site: str, text: str, wanted: str) -> Iterator[str]:
    """Type a text into the site's search, and say so where another page than the wanted one comes first."""
    chromium.open(f"{site}?q={text.replace(' ', '+')}")
    found: list[str] = []
    for _ in range(100):
        found = chromium.evaluate(FOUND)
        if found:
            break
        time.sleep(0.1)
    if not found or not found[0].startswith(site + wanted):
        yield f'the search for "{text}" finds {found}'


class Quiet(http.server.SimpleHTTPRequestHandler):
    """A server that prints nothing."""

    def log_message(self, format: str, *args: Any) -> None:
        """Not a word."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of a folder."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    sys.exit(main())
