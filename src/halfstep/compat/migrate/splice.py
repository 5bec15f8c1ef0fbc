"""Changes to a text at places that a syntax tree names; the rest of the text does not change by a letter."""

from __future__ import annotations

import ast
import re

__all__ = ["Text"]


class Text:
    """A source text with changes that are made all at once.

    Args:
        source: the text.
    """

    def __init__(self, source: str) -> None:
        self.bytes = source.encode()
        self._lines = [0, *(match.end() for match in re.finditer(rb"\r\n|\r|\n", self.bytes))]
        self._changes: list[tuple[int, int, bytes]] = []

    def start(self, node: ast.expr | ast.stmt | ast.alias | ast.keyword) -> int:
        """The position at which a node begins."""
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.alias | ast.keyword) -> int:
        """The position at which a node ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def line_start(self, at: int) -> int:
        """The position at which the line of a position begins."""
        return self.bytes.rfind(b"\n", 0, at) + 1

    def line_end(self, at: int) -> int:
        """The position at which the line of a position ends, before its line break."""
        end = self.bytes.find(b"\n", at)
        end = len(self.bytes) if end < 0 else end
        return end - 1 if self.bytes[end - 1 : end] == b"\r" and end > at else end

    def change(self, start: int, end: int, new: str) -> None:
        """Have other text between two places."""
        self._changes.append((start, end, new.encode()))

    def add_argument(self, call: ast.Call, new: str) -> None:
        """Add an argument to a call, laid out as the one before it."""
        close = self.end(call) - 1
        arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        if not arguments:
            self.change(close, close, new)
            return
        last = max(arguments, key=self.end)
        end = self.end(last)
        while (match := re.compile(rb"\s*\)").match(self.bytes, end)) and match.end() <= close:
            end = match.end()  # parentheses of its own
        comma = re.compile(rb"\s*,").match(self.bytes, end)
        start = self.start(last)
        indent = self.bytes[self.line_start(start) : start].decode()
        if indent.strip() or self.line_start(start) == 0:
            at = comma.end() if comma else end
            self.change(at, at, f" {new}," if comma else f", {new}")
            return
        if not comma:
            self.change(end, end, ",")
        at = min(self.line_end(comma.end() if comma else end), close) if b"\n" in self.bytes[end:close] else end
        self.change(at, at, f"\n{indent}{new}{',' if comma else ''}")

    def drop(self, start: int, end: int) -> None:
        """Forget the changes between two places."""
        self._changes = [change for change in self._changes if not start <= change[0] < end]

    def result(self) -> str:
        """The text with all changes made; those inside of a part that is replaced are not."""
        parts, at = [], 0
        for start, end, new in sorted(self._changes, key=lambda change: change[:2]):
            if start < at:
                continue
            parts += [self.bytes[at:start], new]
            at = end
        return b"".join([*parts, self.bytes[at:]]).decode()
