"""Count phrases that read as if translated in README.md and docs/, one pattern for each habit (P1 to P9).

    python tools/phrases.py [--list] [FILE ...]     --list prints each hit with its file and line

Code blocks, inline code, links' addresses and the generated pages of docs/api are not searched.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PATTERNS = {
    "P1 ratio as a part of a time": r"of its time|of the time (?:of|in)\b|its time in fp32",
    "P2 'a' as a rate": r"(?:bytes?|bits?|times?|calls?|messages?|numbers?|ms|seconds?) "
    r"an? (?:parameter|step|weight|pass|batch|call|tensor)\b",
    "P3 says so": r"\b(?:says? (?:so|it)|does so|do so|is so|are so)\b",
    "P4 that of, those of": r"\b(?:that|those) of\b|\b(?:is|are) of (?:a|the|its)\b|"
    r"\bof (?:ours|yours|theirs|halfstep's)\b",
    "P5 Where as a condition": r"(?:^|[.:] )Where\b",
    "P6 a page as the subject": r"\]\([^)]*\) (?:has|have|says|tells|shows|lists|explains)\b",
    "P7 idioms": r"\b(?:go(?:es)? on|by hand|(?:in|out)side of)\b",
    "P8 trailing too": r", (?:too|also)\b(?=[.,;:)])",
    "P9 is no": r"(?<![Tt]here )\b(?:is|are|was|were) no\b(?! longer| more)",
}


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of each line that is prose, with inline code replaced by x."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith(("```", "~~~")):
            code = not code
        elif not code:
            yield number, re.sub(r"``?[^`]*``?", "x", line)


def hits(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield the pattern, line number and line of each hit."""
    for number, line in prose(text):
        for name, pattern in PATTERNS.items():
            for _ in re.finditer(pattern, line):
                yield name, number, line.strip()


def pages() -> list[Path]:
    """Return README.md and the written pages of docs/."""
    written = [path for path in sorted((ROOT / "docs").rglob("*.md")) if "api" not in path.relative_to(ROOT).parts]
    return [ROOT / "README.md", *written]


def main(arguments: list[str]) -> None:
    """Print how often each pattern occurs."""
    paths = [Path(each).resolve() for each in arguments if not each.startswith("--")] or pages()
    found: Counter[str] = Counter()
    for path in paths:
        for name, number, line in hits(path.read_text()):
            found[name] += 1
            if "--list" in arguments:
                print(f"{path.relative_to(ROOT)}:{number}: {name}: {line}")
    for name in PATTERNS:
        print(f"{found[name]:5d}  {name}")
    print(f"{found.total():5d}  in {len(paths)} pages")


if __name__ == "__main__":
    main(sys.argv[1:])
