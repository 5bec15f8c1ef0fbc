"""Pages that need no server: a page is a list of parts (tables, pictures, ...) in one HTML file.

``parts.py`` has the parts and writes pages, ``charts.py`` draws pictures, and ``html.py`` makes elements of text.
"""

from .charts import Band, Bar, Line, Strip, bars, between, lines, power, strips
from .html import Markup, element, join
from .parts import (
    Shown,
    facts,
    figure,
    header,
    key,
    made_by,
    note,
    numbers,
    paragraph,
    section,
    small,
    table,
    write_page,
    write_text,
)

__all__ = [
    "Band",
    "Bar",
    "Line",
    "Markup",
    "Shown",
    "Strip",
    "bars",
    "between",
    "element",
    "facts",
    "figure",
    "header",
    "join",
    "key",
    "lines",
    "made_by",
    "note",
    "numbers",
    "paragraph",
    "power",
    "section",
    "small",
    "strips",
    "table",
    "write_page",
    "write_text",
]
