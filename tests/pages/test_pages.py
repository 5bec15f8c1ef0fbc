"""The parts of pages: what they are made of, and that text cannot break out of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.diagnostics.pages import (
    Line,
    element,
    figure,
    header,
    lines,
    made_by,
    numbers,
    section,
    table,
    write_page,
)

NASTY = "<script>alert('&')</script>"


@pytest.mark.parametrize(
    "part",
    [
        header(NASTY, NASTY, made_by(NASTY), NASTY),
        section(NASTY, element("p", NASTY)),
        table([NASTY], [[NASTY, NASTY]], NASTY),
        figure(numbers(NASTY, [NASTY], [[NASTY]], NASTY), caption=NASTY),
    ],
    ids=["header", "section", "table", "figure"],
)
def test_text_stays_text_in_every_part(part: str, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", NASTY, [part])  # type: ignore[list-item]
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert part in page


def test_a_header_leaves_out_what_is_not_known() -> None:
    assert header("kind", "Title", made_by(None), "text") == ("<header><p>kind</p><h1>Title</h1><p>text</p></header>")
    assert header("kind", "Title", made_by("run a<b")) == (
        "<header><p>kind</p><h1>Title</h1><p>Made by <code>run a&lt;b</code></p></header>"
    )


def test_a_table_can_be_scrolled_and_its_rows_have_headings() -> None:
    made = table(["a", "b"], [["x", "1"]])
    assert made.startswith('<div class="scroll" tabindex="0" role="region" aria-label="table">')
    assert '<tr><th scope="row">x</th><td>1</td></tr>' in made


def test_what_lies_outside_of_a_plot_is_marked_at_its_edge() -> None:
    picture = lines("t", "d", [Line("a", [(0, 1.0), (1, 99.0), (2, -5.0)])], low=0.0, high=10.0, label=str, ticks=[0.0])
    assert picture.count("▲") == 1
    assert picture.count("▼") == 1


def test_text_is_escaped_once() -> None:
    inner = element("b", "<&>")
    assert element("p", inner, "<", title='"<"') == '<p title="&quot;&lt;&quot;"><b>&lt;&amp;&gt;</b>&lt;</p>'
