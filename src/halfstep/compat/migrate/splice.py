"""Changes to a text at the positions of syntax nodes, which leave all other text unchanged."""

from __future__ import annotations

import ast
import re

__all__ = ["Text"]


class Text:
    """A source text with changes that are applied together.

    Args:
        source: the text.
    """

    def __init__(self, source: str) -> None:
        self.bytes = source.encode()
        self._lines = [0, *(match.end() for match in re.finditer(rb"\r\n|\r|\n", self.bytes))]
        self._changes: list[tuple[int, int, bytes]] = []

    def start(self, node: ast.expr | ast.stmt | ast.alias | ast.keyword) -> int:
        """Return the position at which a node begins."""
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.alias | ast.keyword) -> int:
        """Return the position at which a node ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def line_start(self, at: int) -> int:
        """Return the start of the line that contains a position."""
        return self.bytes.rfind(b"\n", 0, at) + 1

    def line_end(self, at: int) -> int:
        """Return the end of the line that contains a position, before the line break."""
        end = self.bytes.find(b"\n", at)
        end = len(self.bytes) if end < 0 else end
        return end - 1 if self.bytes[end - 1 : end] == b"\r" and end > at else end

    def change(self, start: int, end: int, new: str) -> None:
        """Replace the text between two positions."""
        self._changes.append((start, end, new.encode()))

    def add_argument(self, call: ast.Call, new: str) -> None:
        """Add an argument to a call, with the layout of the previous argument."""
        close = self.end(call) - 1
        arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        if not arguments:
            self.change(close, close, new)
            return
        last = max(arguments, key=self.end)
        end = self.end(last)
        while (match := re.compile(rb"\s*\)").match(self.bytes, end)) and match.end() <= close:
            end = match.end()  # include the argument's parentheses
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
        """Discard the changes between two positions."""
        self._changes = [change for change in self._changes if not start <= change[0] < end]

    def result(self) -> str:
        """Apply all changes except changes in replaced parts, and return the text."""
        parts, at = [], 0
        for start, end, new in sorted(self._changes, key=lambda change: change[:2]):
            if start < at:
                continue
            parts += [self.bytes[at:start], new]
            at = end
        return b"".join([*parts, self.bytes[at:]]).decode()
