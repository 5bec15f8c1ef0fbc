"""Elements of HTML and SVG without a template engine; all text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable

__all__ = ["Markup", "element", "join"]


class Markup(str):
    """Text that already is HTML. Any other string is escaped when it becomes part of an element."""

    __slots__ = ()


def join(parts: Iterable[str]) -> Markup:
    """Concatenate parts."""
    return Markup("".join(map(_escaped, parts)))


def element(tag: str, *children: str, **attributes: object) -> Markup:
    """Make an element of HTML or SVG.

    Args:
        tag: the name of the element.
        *children: the content. Strings are escaped, ``Markup`` is not.
        **attributes: ``class_`` is written "class", and ``stroke_width`` "stroke-width". None leaves one out.
    """
    given = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    opening = "".join(f' {name}="{html.escape(_plain(value))}"' for name, value in given.items())
    if not children and tag in _EMPTY:
        return Markup(f"<{tag}{opening}/>")
    return Markup(f"<{tag}{opening}>{join(children)}</{tag}>")


_EMPTY = frozenset(("meta", "line", "rect", "circle", "path", "polyline"))


def _escaped(part: str) -> str:
    return part if isinstance(part, Markup) else html.escape(part, quote=False)


def _plain(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
