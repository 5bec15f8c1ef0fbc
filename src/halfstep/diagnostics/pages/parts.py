"""The parts of a page, from its header to its tables, and the page itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...core.files import replacing
from .html import Markup, element, join

__all__ = [
    "Shown",
    "facts",
    "figure",
    "header",
    "key",
    "made_by",
    "note",
    "numbers",
    "paragraph",
    "section",
    "small",
    "table",
    "write_page",
    "write_text",
]


class Shown:
    """Base class of results: a notebook shows one as its text."""

    def _repr_html_(self) -> str:
        return element("pre", str(self))


def write_page(path: str | Path, title: str, parts: Iterable[Markup]) -> None:
    """Write a page that loads no other resources. It is light or dark, as the reader's system is.

    Args:
        path: the file; missing folders are created, and an existing file is replaced as a whole.
        title: the title in the browser's tab.
        parts: the parts from top to bottom.
    """
    sheet = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(sheet)),
    )
    body = element("body", element("main", *parts))
    write_text(path, f"<!doctype html>\n{element('html', head, body, lang='en')}\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text file. Missing folders are created, and an existing file is replaced as a whole."""
    with replacing(path) as file:
        file.write(text.encode())


# ---- text


def header(kind: str, title: str, *lines: str | None) -> Markup:
    """Make the top of a page.

    Args:
        kind: the tool that made the page, in small letters above the title.
        title: the heading.
        *lines: one paragraph each; None is left out.
    """
    below = (paragraph(line) for line in lines if line is not None)
    return element("header", paragraph(kind), element("h1", title), *below)


def made_by(command: str | None) -> Markup | None:
    """The header line with the command that made the page; None without a command."""
    return None if command is None else join(["Made by ", element("code", command)])


def section(title: str, *parts: str) -> Markup:
    """A heading with the parts below it."""
    return element("section", element("h2", title), *parts)


def paragraph(*content: str) -> Markup:
    """A paragraph."""
    return element("p", *content)


def note(text: str) -> Markup:
    """A paragraph that stands out."""
    return element("p", text, class_="note")


def small(text: str) -> Markup:
    """A paragraph that explains something, in small letters."""
    return element("p", text, class_="small")


def facts(named: Mapping[str, str]) -> Markup:
    """A list of names with their descriptions."""
    return element("dl", *(part for name, text in named.items() for part in (element("dt", name), element("dd", text))))


# ---- tables


def table(names: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None) -> Markup:
    """A table that scrolls on a narrow screen. The first cell of each row is its heading."""
    head = element("tr", *(element("th", name, scope="col") for name in names))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    title = () if caption is None else (element("caption", caption),)
    inner = element("table", *title, element("thead", head), element("tbody", *body))
    return element("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption or "table")


# ---- around pictures


def figure(*content: str, caption: str) -> Markup:
    """A picture with its controls and its caption."""
    return element("figure", *content, element("figcaption", caption))


def numbers(summary: str, names: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None) -> Markup:
    """The table of a picture's numbers, folded behind its summary."""
    return element("details", element("summary", summary), table(names, rows, caption))


def key(*entries: tuple[str, str]) -> Markup:
    """The legend of a picture: pairs (class of the color, meaning)."""
    boxes = (element("rect", width=12, height=12, class_=name) for name, _ in entries)
    pictures = (element("svg", box, width=12, height=12, aria_hidden="true") for box in boxes)
    items = (element("li", box, text) for box, (_, text) in zip(pictures, entries, strict=True))
    return element("ul", *items, class_="key")
