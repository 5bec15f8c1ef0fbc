"""Draw docs/images/search.svg: the report of the search in docs/how-to/find-precision.md, whose code it runs.

::

    python -m tools.search_picture

writes docs/images/search.json, the saved result, and the picture of it: the answer, the score of each unit and the
guarded runs, as on the page that ``result.report`` writes. It is light or dark as the reader's system is, and text can
still be read on a screen of 400 px.
"""

from __future__ import annotations

import contextlib
import html
import io
import math
import re

from halfstep import SearchResult
from tools.figures import IMAGES, WIDTH, bar, label

PAGE = IMAGES.parent / "how-to/find-precision.md"
ROW, LEFT, ROOM = 27, 110, 300  # the height of a row; where bars begin, and the length of the longest
COLUMNS = (0, 60, 230, 350)  # of the guarded runs

STYLE = """
text { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #1c2126; }
.title { font-weight: 600; } .head { fill: #56616b; }
.blue { fill: #3d85c6; } .orange { fill: #c86f10; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e8ec; } .head { fill: #aab4bd; }
  .blue { fill: #5fa3df; } .orange { fill: #e8953d; }
}
""".strip()


def example() -> SearchResult:
    """The result of the page's first block."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    names: dict[str, SearchResult] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(found[1], names)
    return names["result"]


def draw(result: SearchResult) -> str:
    """The picture of a result."""
    rows = [(row["unit"], row["fp32"], row["forward"] + row["backward"]) for row in result.table()]
    logs = [math.log10(score) for _, _, score in rows if 0.0 < score < math.inf]
    low, across = min(logs) - 1.0, max(logs) - min(logs) + 1.0
    parts = [label("title", 0, 20, "What must stay in fp32"), label("", 0, 46, _answer(result))]
    parts += [label("head", 0, 80, "unit"), label("head", LEFT, 80, "score (logarithmic)")]
    parts.append(label("head", WIDTH, 80, "stays in", end=True))
    at = 92
    for name, wide, score in rows:
        long = 0.9 * ROOM * (math.log10(score) - low) / across if 0.0 < score < math.inf else ROOM if score else 0.0
        parts += [label("", 0, at + 13, name), bar("orange" if wide else "blue", LEFT, at, long)]
        parts.append(label("", LEFT + long + 6, at + 13, f"{score:.0e}" if score < math.inf else "overflow"))
        parts.append(label("", WIDTH, at + 13, "fp32" if wide else result.dtype, end=True))
        at += ROW
    heads = ("run", "in fp32", "loss", "loss of fp32")
    parts += [label("head", x, at + 30, text) for x, text in zip(COLUMNS, heads, strict=True)]
    parts.append(label("head", WIDTH, at + 30, "passes", end=True))
    at += 42
    for number, (wide, one) in enumerate(result.runs, 1):
        cells = (str(number), ", ".join(wide) or "none", f"{one.loss:.5f}", f"{one.reference:.5f}")
        parts += [label("", x, at + 13, text) for x, text in zip(COLUMNS, cells, strict=True)]
        parts.append(label("", WIDTH, at + 13, "yes" if one.passed else "no", end=True))
        at += ROW
    said = ", ".join(f"{name} {score:.0e}" for name, _, score in rows)
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {at}" width="{WIDTH}" height="{at}" '
        f'role="img">\n<title>halfstep search</title>\n<desc>{html.escape(_answer(result))}. The scores: '
        f"{html.escape(said)}.</desc>\n<style>\n{STYLE}\n</style>\n{inner}\n</svg>\n"
    )


def _answer(result: SearchResult) -> str:
    kept = ", ".join(result.keep) or "nothing"
    return f"{kept}, after {len(result.runs)} guarded runs, {result.level} in {result.dtype}"


if __name__ == "__main__":
    result = example()
    result.save(IMAGES / "search.json")
    (IMAGES / "search.svg").write_text(draw(result), encoding="utf-8")
