"""Self-contained HTML pages without a template engine: elements whose text is escaped, and the frame of a page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..core.files import replacing

__all__ = ["Markup", "element", "join", "note", "page", "section", "style", "table", "write_text"]


class Markup(str):
    """Text that is HTML already. Any other string is escaped where it is put into an element."""

    __slots__ = ()


def join(parts: Iterable[str]) -> Markup:
    """Several parts, one after the other."""
    return Markup("".join(map(_escaped, parts)))


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """An element of HTML or SVG.

    Args:
        tag: its name.
        *children: what is in it. Strings are escaped, ``Markup`` is not.
        **attributes: ``class_`` is written "class", and ``stroke_width`` "stroke-width". None leaves one out.
    """
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    opening = "".join(f' {name}="{html.escape(_plain(value))}"' for name, value in given.items())
    if not children and tag in _EMPTY:
        return Markup(f"<{tag}{opening}/>")
    return Markup(f"<{tag}{opening}>{join(children)}</{tag}>")


def section(title: str, *children: str) -> Markup:
    """A heading and what is below it."""
    return element("section", element("h2", title), *children)


def note(text: str) -> Markup:
    """A paragraph that stands out."""
    return element("p", text, class_="note")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str | None = None) -> Markup:
    """A table that scrolls on a narrow screen. The first cell of each row is its heading."""
    head = element("tr", *(element("th", name, scope="col") for name in header))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    title = () if caption is None else (element("caption", caption),)
    inner = element("table", *title, element("thead", head), element("tbody", *body))
    return element("div", inner, class_="scroll", tabindex=0, role="region", aria_label=caption or "table")


def page(title: str, *content: str, wide: bool = False) -> str:
    """A whole page that loads nothing from elsewhere. It is light or dark, as the reader's system is."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Markup(style())),
    )
    body = element("body", element("main", *content, class_="wide" if wide else None))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def style() -> str:
    """The style sheet of the pages."""
    return Path(__file__).with_name("page.css").read_text(encoding="utf-8")


def write_text(path: str | Path, text: str) -> None:
    """Write a text. Missing folders are made, and an existing file is replaced whole."""
    with replacing(path) as file:
        file.write(text.encode())


_EMPTY = frozenset(("meta", "line", "rect", "circle", "path", "polyline"))


def _escaped(part: str) -> str:
    return part if isinstance(part, Markup) else html.escape(part, quote=False)


def _plain(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
