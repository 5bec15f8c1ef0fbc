"""Statements that share a line get one each, so that they can be changed."""

from __future__ import annotations

import ast
from collections.abc import Collection

from .splice import Text
from .torch_tree import Tree

__all__ = ["split_lines"]


def split_lines(source: str, lines: Collection[int]) -> str:
    """A text whose statements in some lines have lines of their own: after a ``;``, and after ``if x:``.

    Args:
        source: the text.
        lines: the numbers of the lines.
    """
    tree, text = ast.parse(source), Text(source)
    around = Tree(tree)
    newline = "\r\n" if "\r\n" in source else "\n"
    for node in (node for node in ast.walk(tree) if id(node) in around.places and node.lineno in lines):  # type: ignore[attr-defined]
        assert isinstance(node, ast.stmt)
        block, i = around.places[id(node)]
        end = text.end(node)
        if i == len(block) - 1:
            rest = text.bytes[end : text.line_end(end)].lstrip()
            if rest.startswith(b";"):
                text.change(end, text.line_end(end) - len(rest) + 1, "")
        start = text.start(node)
        first = text.start(block[0])
        line = text.bytes[text.line_start(first) : text.line_end(first)].decode()
        margin = line[: len(line) - len(line.lstrip())]
        if text.line_start(first) + len(margin.encode()) < first:  # behind the colon of what is around
            margin += "\t" if margin.endswith("\t") else "    "
        before = text.bytes[text.line_start(start) : start]
        if before.strip():
            begin = start - len(before) + len(before.rstrip().rstrip(b";").rstrip())
            text.change(begin, start, f"{newline}{margin}")
    return text.result()
