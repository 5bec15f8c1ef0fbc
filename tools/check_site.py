"""Check every link of the built site: that pages, places on them and pictures are there.

It also checks that a page loads nothing from elsewhere. ``make docs`` runs it. Links to other sites are not followed:
only their spelling is checked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    "img": ("src", "srcset"),
    "script": ("src",),
    "source": ("src", "srcset"),
    "video": ("src",),
    "iframe": ("src",),
}
LOADED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "manifest"}
"""What ``<link rel=...>`` makes a browser load; others, such as "canonical", are links."""


class Page(HTMLParser):
    """The links and the anchors of a page.

    Attributes:
        links: (what has it, address).
        loaded: the same for what a browser loads with the page.
        anchors: the names that a fragment can have.
        without_text: pictures without a text for those who cannot see them.
        headers: the text of each cell in the head of a table, row by row.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.loaded: list[tuple[str, str]] = []
        self.anchors: set[str] = set()
        self.without_text: list[str] = []
        self.headers: list[list[str]] = []
        self._in_header = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what an element links to."""
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag in ("a", "area") and "href" in given:
            self.links.append((tag, given["href"]))
        if tag == "link" and "href" in given:
            found = self.loaded if LOADED_LINKS & set(given.get("rel", "").split()) else self.links
            found.append((tag, given["href"]))
        for name in LOADED.get(tag, ()):
            several = given.get(name, "").split(",") if name == "srcset" else [given.get(name, "")]
            self.loaded += [(tag, each.split()[0]) for each in several if each.strip()]
        if tag == "img" and "alt" not in given:
            self.without_text.append(given.get("src", ""))
        if tag == "thead":
            self.headers.append([])
        if tag in ("th", "td", "tbody"):
            self._in_header = tag == "th" and bool(self.headers)
        if self._in_header and tag == "th":
            self.headers[-1].append("")

    def handle_data(self, data: str) -> None:
        """Add text to the cell of a table's head."""
        if self._in_header:
            self.headers[-1][-1] += data.strip()


def check(site: Path, address: str = "/") -> Iterator[str]:
    """Everything that is wrong, in sentences.

    Args:
        site: the folder of the built site.
        address: where it will be published; links that begin with it or with its path lead into the site.
    """
    site = site.resolve()
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    root = urlsplit(address).path.rstrip("/") + "/"
    for path, page in pages.items():
        name = path.relative_to(site)
        for tag, link in page.loaded:
            if urlsplit(link).scheme not in ("", "data") or link.startswith("//"):
                yield f"{name}: <{tag}> loads {link} from elsewhere"
        for source in page.without_text:
            yield f"{name}: {source} has no text for those who cannot see it"
        for header in page.headers:
            if "" in (header[1:] or header):  # the first column may have the names of the rows
                yield f"{name}: a column of a table has no name: {' | '.join(header)}"
        for tag, link in page.links + page.loaded:
            wrong = _wrong(link.replace(address, root, 1) if address != "/" else link, path, site, root, pages)
            if wrong:
                yield f"{name}: <{tag}> {link}: {wrong}"


def _wrong(link: str, path: Path, site: Path, root: str, pages: dict[Path, Page]) -> str | None:
    """What is wrong with a link of the page at a path; None if nothing is."""
    parts = urlsplit(link)
    if parts.scheme in ("http", "https") or (link.startswith("//")):
        good = re.fullmatch(r"[\w.-]+\.\w+(:\d+)?", parts.netloc) and not re.search(r"\s", link)
        return None if good else "this is no address"
    if parts.scheme in ("mailto", "data"):
        return None
    if parts.scheme:
        return "no page should link to such an address"
    target = path
    if parts.path.startswith("/"):
        if not (parts.path + "/").startswith(root):
            return f"it leads out of {root}"
        target = site / unquote(parts.path[len(root) :])
    elif parts.path:
        target = path.parent / unquote(parts.path)
    target = target.resolve()
    if target.is_dir():
        target = target / "index.html"
    if not target.exists():
        return "there is no such file"
    anchor = unquote(parts.fragment)
    # The theme's scripts answer to names that begin with two underscores.
    if anchor and target in pages and not anchor.startswith("__") and anchor not in pages[target].anchors:
        return "there is no such place on the page"
    return None


if __name__ == "__main__":
    found = list(check(Path(sys.argv[1]), *sys.argv[2:]))
    for each in found:
        print(each)
    sys.exit(1 if found else 0)
