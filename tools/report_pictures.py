"""Draw docs/images/profile.svg and parity.svg: what why-not-faster.md and two-runs-differ.md print, whose code it runs.

::

    python -m tools.report_pictures    # the machine must do nothing else, because it times steps

writes docs/images/profile.json and parity.json, the figures of the results, and their pictures. They are light or dark
as the reader's system is, and text can still be read on a screen of 400 px.
"""

from __future__ import annotations

import contextlib
import html
import io
import json
import re
from typing import Any

from tools.figures import IMAGES, WIDTH, bar, label
from tools.search_picture import STYLE

HOW_TO = IMAGES.parent / "how-to"
ROW, LEFT, ROOM = 27, 160, 280  # the height of a row; where bars begin, and the length of the longest


def examples(page: str, blocks: int) -> dict[str, Any]:
    """Run the first Python blocks of a page, and return its names."""
    names: dict[str, Any] = {}
    code = re.findall(r"```python\n(.*?)```", (HOW_TO / page).read_text(encoding="utf-8"), re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()):
        for block in code[:blocks]:
            exec(block, names)
    return names


def record() -> dict[str, Any]:
    """Return the figures that the pictures show."""
    names = examples("why-not-faster.md", 2)
    steps = [
        {"about": about, "ms": names[name].total_ms, "kinds": names[name].kinds, "codes": _codes(names[name])}
        for name, about in (("before", "before"), ("after", "after the first fix"))
    ]
    found = examples("two-runs-differ.md", 1)["found"]
    ops = [{"op": f"{each.module}: {each.op}", "dtypes": each.dtypes, "ulps": each.ulps} for each in found.ops]
    first = found.first
    return {"profile": steps, "parity": {"ops": ops, "first": f"{first.module}: {first.op}", "kind": first.kind}}


def _codes(profile: Any) -> list[str]:
    return list(dict.fromkeys(finding.code for finding in profile.findings))


def draw_profile(steps: list[dict[str, Any]]) -> str:
    """Draw the time of a step by kind, before and after a fix."""
    parts, said, at = [], [], 0
    longest = max(max(step["kinds"].values()) for step in steps)
    for step in steps:
        text = f"{step['about']}: a step takes {step['ms']:.1f} ms; {', '.join(step['codes']) or 'no findings'}"
        parts.append(label("title", 0, at + 20, text))
        said.append(text)
        at += 34
        for kind, ms in sorted(step["kinds"].items(), key=lambda item: -item[1]):
            if ms >= 0.005 * longest:
                long = ROOM * ms / longest
                color = "orange" if "data" in kind else "blue"
                parts += [label("", 0, at + 13, kind), bar(color, LEFT, at, long)]
                parts.append(label("", LEFT + long + 6, at + 13, f"{ms:.1f} ms"))
                at += ROW
        at += 14
    return _picture("halfstep profile", ". ".join(said), parts, at)


def draw_parity(found: dict[str, Any]) -> str:
    """Draw the difference of each op, and mark the first one."""
    largest = max(op["ulps"] for op in found["ops"])
    title = f"First difference: {found['first']}, {found['kind']}"
    parts, at = [label("title", 0, 20, title), label("head", 0, 50, "op")], 62
    parts += [label("head", LEFT, 50, "ulps (square root)"), label("head", WIDTH, 50, "dtypes", end=True)]
    for op in found["ops"]:
        long = 0.7 * ROOM * (op["ulps"] / largest) ** 0.5
        color = "orange" if op["op"] == found["first"] else "blue"
        parts += [label("", 0, at + 13, op["op"]), bar(color, LEFT, at, long)]
        parts.append(label("", LEFT + long + 6, at + 13, f"{op['ulps']:.3g}"))
        parts.append(label("", WIDTH, at + 13, ", ".join(dict.fromkeys(op["dtypes"])), end=True))
        at += ROW
    each = [f"{op['op']} {op['ulps']:.3g} ({', '.join(dict.fromkeys(op['dtypes']))})" for op in found["ops"]]
    return _picture("halfstep parity", f"{title}. In ulps: {'; '.join(each)}", parts, at)


def _picture(title: str, said: str, parts: list[str], height: int) -> str:
    inner = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img">\n<title>{title}</title>\n<desc>{html.escape(said)}.</desc>\n<style>\n{STYLE}\n</style>\n{inner}\n'
        "</svg>\n"
    )


DRAW = {"profile": draw_profile, "parity": draw_parity}

if __name__ == "__main__":
    for name, figures in record().items():
        (IMAGES / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        (IMAGES / f"{name}.svg").write_text(DRAW[name](figures), encoding="utf-8")
