"""Names of Apex become names of halfstep; whatever else stands in a file stays to the letter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import PositionProvider, QualifiedNameProvider, QualifiedNameSource

from .names import MODULES, exists, is_apex, moved, moved_import

__all__ = ["Problem", "ToHalfstep", "dotted"]

Problem = tuple[int, str]
"""A line number and what could not be done there."""

_IN_FLOAT16 = ("apex.amp.initialize", "apex.amp.init")
_IN_BFLOAT16 = ("O4", "O5")


def dotted(name: str) -> cst.Name | cst.Attribute:
    """An expression for a dotted name."""
    first, *rest = name.split(".")
    node: cst.Name | cst.Attribute = cst.Name(first)
    for part in rest:
        node = cst.Attribute(node, cst.Name(part))
    return node


class ToHalfstep(cst.CSTTransformer):
    """Rewrites imports and dotted names, and asks for float16 where Apex had nothing else.

    Attributes:
        problems: what stays as it was, and why.
    """

    METADATA_DEPENDENCIES = (PositionProvider, QualifiedNameProvider)

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[Problem] = []
        self._used: list[str] = []  # modules that a bare ``import apex`` must bring

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:  # noqa: N802
        """Put the imports in that ``import apex`` stood for."""
        marker = _Placeholder(sorted(set(self._used)) or ["halfstep"])
        return cst.ensure_type(updated_node.visit(marker), cst.Module)

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """The imports of a line; one from several modules becomes several lines."""
        body: list[cst.BaseSmallStatement] = []
        for original, statement in zip(original_node.body, updated_node.body, strict=True):
            new: Sequence[cst.BaseSmallStatement] = []
            if isinstance(statement, cst.ImportFrom):
                new = self._import_from(original, statement)
            elif isinstance(statement, cst.Import):
                new = self._import(original, statement)
            body.extend(new or [statement])
        if len(body) == len(original_node.body) or len(original_node.body) > 1:
            return updated_node.with_changes(body=body)
        first = updated_node.with_changes(body=body[:1])
        return cst.FlattenSentinel([first, *(cst.SimpleStatementLine([other]) for other in body[1:])])

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> Any:  # noqa: N802
        """``apex.amp.initialize``, written out."""
        name = get_full_name_for_node(original_node)
        if name is None or not is_apex(name) or self._qualified(original_node) != name:
            return updated_node
        new = moved(name)
        parent, _, last = new.rpartition(".")
        if exists(parent, last):
            self._used.append(new if new in MODULES.values() else parent)
            return dotted(new)
        if exists(parent):  # else the name is unknown further in, and has been told of
            self._problem(original_node, f"{name}: halfstep has no {new.removeprefix('halfstep.')}")
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        """``amp.initialize(...)`` meant float16, on every device."""
        if self._qualified(original_node.func) not in _IN_FLOAT16:
            return updated_node
        given = {arg.keyword.value: arg.value for arg in updated_node.args if arg.keyword is not None}
        level = given.get("opt_level")
        if "dtype" in given or (isinstance(level, cst.SimpleString) and level.evaluated_value in _IN_BFLOAT16):
            return updated_node
        return _with_argument(updated_node, "dtype", '"float16"')

    # ---- inside

    def _import_from(self, original: cst.CSTNode, node: cst.ImportFrom) -> list[cst.ImportFrom]:
        module = None if node.module is None or node.relative else get_full_name_for_node(node.module)
        if module is None or not is_apex(module):
            return []
        if isinstance(node.names, cst.ImportStar):
            new = moved(module)
            if not exists(new):
                self._problem(original, f"from {module} import *: halfstep has no {new.removeprefix('halfstep.')}")
                return []
            return [node.with_changes(module=dotted(new))]
        groups: dict[str, list[cst.ImportAlias]] = {}
        for alias in node.names:
            name = str(alias.evaluated_name)
            parent, own = moved_import(module, name)
            if not exists(parent, own):
                self._problem(original, f"from {module} import {name}: halfstep has no such name")
                groups.setdefault(module, []).append(alias)
                continue
            kept = (
                alias
                if own == name
                else alias.with_changes(name=cst.Name(own), asname=alias.asname or cst.AsName(cst.Name(name)))
            )
            groups.setdefault(parent, []).append(kept)
        if len(groups) == 1:
            (parent,) = groups
            return [node.with_changes(module=dotted(parent), names=_as_before(node.names, groups[parent]))]
        return [
            cst.ImportFrom(dotted(parent), [alias.with_changes(comma=cst.MaybeSentinel.DEFAULT) for alias in aliases])
            for parent, aliases in groups.items()
        ]

    def _import(self, original: cst.CSTNode, node: cst.Import) -> list[cst.Import]:
        if not any(is_apex(str(alias.evaluated_name)) for alias in node.names):
            return []
        names = []
        for alias in node.names:
            name = str(alias.evaluated_name)
            new = moved(name) if is_apex(name) else name
            if not exists(new) and is_apex(name):
                self._problem(original, f"import {name}: halfstep has no {new.removeprefix('halfstep.')}")
                new = name
            changed = alias.with_changes(name=_PLACEHOLDER if name == "apex" and not alias.asname else dotted(new))
            if name in ("amp_C", "apex_C", "syncbn") and alias.asname is None:
                changed = changed.with_changes(asname=cst.AsName(cst.Name(name)))
            names.append(changed)
        return [node.with_changes(names=names)]

    def _qualified(self, node: cst.CSTNode) -> str | None:
        names = self.get_metadata(QualifiedNameProvider, node, set())
        found = {n.name for n in names if n.source is QualifiedNameSource.IMPORT}
        return found.pop() if len(found) == 1 else None

    def _problem(self, node: cst.CSTNode, text: str) -> None:
        line = self.get_metadata(PositionProvider, node).start.line
        self.problems.append((line, text))


_PLACEHOLDER = cst.Name("__halfstep_migrate__")


class _Placeholder(cst.CSTTransformer):
    """``import apex`` becomes imports of the modules that were used through it."""

    def __init__(self, modules: list[str]) -> None:
        super().__init__()
        self._modules = modules

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:  # noqa: N802
        if not any(isinstance(a.name, cst.Name) and a.name.value == _PLACEHOLDER.value for a in updated_node.names):
            return updated_node
        names: list[cst.ImportAlias] = []
        for alias in updated_node.names:
            if isinstance(alias.name, cst.Name) and alias.name.value == _PLACEHOLDER.value:
                names += [cst.ImportAlias(dotted(module)) for module in self._modules]
            else:
                names.append(alias.with_changes(comma=cst.MaybeSentinel.DEFAULT))
        return updated_node.with_changes(names=names)


def _as_before(before: Sequence[cst.ImportAlias], after: list[cst.ImportAlias]) -> list[cst.ImportAlias]:
    """The commas and line breaks as they were."""
    return [new.with_changes(comma=old.comma) for old, new in zip(before, after, strict=True)]


def _with_argument(call: cst.Call, name: str, value: str) -> cst.Call:
    """One keyword argument more, laid out as those before it."""
    new = cst.Arg(
        cst.parse_expression(value),
        keyword=cst.Name(name),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
    if not call.args:
        return call.with_changes(args=[new])
    *before, last = call.args
    between: Any = cst.SimpleWhitespace(" ")
    if before and isinstance(before[-1].comma, cst.Comma):
        between = before[-1].comma.whitespace_after
    elif isinstance(call.whitespace_before_args, cst.ParenthesizedWhitespace):
        between = call.whitespace_before_args
    after = last.comma.whitespace_after if isinstance(last.comma, cst.Comma) else None
    if isinstance(after, cst.ParenthesizedWhitespace) and isinstance(between, cst.ParenthesizedWhitespace):
        # What is remarked on the last argument's line stays there.
        between = between.with_changes(first_line=after.first_line)
        end = after.with_changes(first_line=cst.TrailingWhitespace())
        new = new.with_changes(comma=cst.Comma(whitespace_after=end))
    else:
        new = new.with_changes(comma=last.comma)
    return call.with_changes(args=[*before, last.with_changes(comma=cst.Comma(whitespace_after=between)), new])
