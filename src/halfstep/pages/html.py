"""Elements of HTML and SVG without a template engine. Their text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable

__all__ = ["Markup", "element", "join"]


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


_EMPTY = frozenset(("meta", "line", "rect", "circle", "path", "polyline"))


def _escaped(part: str) -> str:
    return part if isinstance(part, Markup) else html.escape(part, quote=False)


def _plain(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
