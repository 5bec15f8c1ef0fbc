"""Rewrites O0 and O1 of Apex to ``torch.autocast`` and ``torch.amp.GradScaler``, where these do the same.

A file is rewritten as a whole or not at all.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.helpers import get_full_name_for_node

from .names import Problem, is_apex
from .scopes import loose_names, names_of
from .torch_facts import PACKAGES, REPLACED, Facts, facts_of

__all__ = ["to_torch"]

_SCALER = "scaler"
_AUTOCAST = 'torch.autocast("cuda", dtype=torch.float16)'


def to_torch(source: str) -> tuple[str, list[Problem]]:
    """The new text and no problems, or the old text and all problems.

    Raises:
        SyntaxError: if the text is no Python.
    """
    facts = facts_of(ast.parse(source))
    if facts is None or facts.problems:
        return source, [] if facts is None else facts.problems
    after = cst.parse_module(source).visit(_Scopes(facts)).visit(_Calls(facts)).code
    tree = ast.parse(after)
    names = names_of(tree, PACKAGES)
    gone = {root for root, meant in facts.roots.items() if meant not in REPLACED}
    left = [*names.imports, *loose_names(tree, names, gone)]
    return (source, [(1, "amp is used here in a way that cannot be rewritten as a whole")]) if left else (after, [])


class _Scopes(cst.CSTTransformer):
    """Puts ``torch.autocast`` around forward passes and ``unscale_`` before clipping."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.facts = facts

    def leave_IndentedBlock(  # noqa: N802
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        return updated_node.with_changes(body=self._block(original_node.body, updated_node.body))

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:  # noqa: N802
        return updated_node.with_changes(body=self._block(original_node.body, updated_node.body))

    def _block(self, original: Sequence[cst.CSTNode], updated: Sequence[Any]) -> list[Any]:
        changed = [self._clipping(old, new) for old, new in zip(original, updated, strict=True)]
        if not self.facts.enabled:
            begin = end = 0
        elif self.facts.inference:
            begin = next((i for i, old in enumerate(original) if self._runs_a_model(_header(old))), len(original))
            end = len(original)
        else:
            end = next((i for i, old in enumerate(original) if _scales(self.facts, old)), 0)
            begin = next((i for i in range(end) if self._runs_a_model([original[i]])), end)
        result = [part for parts in changed[:begin] for part in parts]
        inside = [part for parts in changed[begin:end] for part in parts]
        if inside:
            first, *others = inside
            body = cst.IndentedBlock([first.with_changes(leading_lines=[]), *others])
            item = cst.WithItem(cst.parse_expression(_AUTOCAST))
            result.append(cst.With([item], body, leading_lines=first.leading_lines))
        return result + [part for parts in changed[end:] for part in parts]

    def _clipping(self, old: cst.CSTNode, new: Any) -> list[Any]:
        calls = [call for part in _header(old) for call in m.findall(part, m.Call())]
        found = [call for call in calls if _calls(self.facts, call, "master_params")]
        if not found:
            return [new]
        optimizer = get_full_name_for_node(found[0].args[0].value)  # type: ignore[attr-defined]
        unscale = _line(f"{_SCALER}.unscale_({optimizer})")
        return [unscale.with_changes(leading_lines=new.leading_lines), new.with_changes(leading_lines=[])]

    def _runs_a_model(self, parts: Sequence[cst.CSTNode]) -> bool:
        calls = [cst.ensure_type(call, cst.Call) for part in parts for call in m.findall(part, m.Call())]
        return any(str(get_full_name_for_node(call.func)) in self.facts.models for call in calls)


def _header(statement: cst.CSTNode) -> list[cst.CSTNode]:
    """A statement without the blocks in it."""
    if isinstance(getattr(statement, "body", None), cst.IndentedBlock):
        parts = (getattr(statement, name, None) for name in ("test", "iter"))
        return [*filter(None, parts), *getattr(statement, "items", ())]
    return [statement]


class _Calls(cst.CSTTransformer):
    """Rewrites calls and imports one by one."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self.facts = facts

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        statement = original_node.body[0]
        if isinstance(statement, cst.ImportFrom):
            return self._import_from(statement, updated_node)
        if isinstance(statement, cst.Import):
            return self._import(statement, updated_node)
        if isinstance(statement, cst.Assign) and _calls(self.facts, statement.value, "initialize"):
            if self.facts.inference:
                return self._without_training(statement, updated_node)
            enabled = "" if self.facts.enabled else "enabled=False"
            return updated_node.with_changes(body=_line(f"{_SCALER} = torch.amp.GradScaler({enabled})").body)
        if isinstance(statement, cst.Expr) and (owner := _optimizer_of_step(statement.value, self.facts)):
            step = updated_node.with_changes(body=_line(f"{_SCALER}.step({owner})").body)
            return cst.FlattenSentinel([step, _line(f"{_SCALER}.update()")])
        return updated_node

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> Any:  # noqa: N802
        if not _scales(self.facts, original_node):
            return updated_node
        call = cst.ensure_type(updated_node.items[0].item, cst.Call)
        body: Any = updated_node.body  # an indented block, or what stands behind the colon
        line: Any = body.body[0] if isinstance(body, cst.IndentedBlock) else cst.SimpleStatementLine(body.body)
        backward = cst.ensure_type(line.body[0].value, cst.Call)  # of an expression or an assignment
        loss = call.args[0].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        function = cst.ensure_type(backward.func, cst.Attribute).with_changes(value=cst.Call(_scaler("scale"), [loss]))
        statement = line.body[0].with_changes(value=backward.with_changes(func=function))
        return line.with_changes(body=[statement], leading_lines=updated_node.leading_lines)

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:  # noqa: N802
        for name in ("state_dict", "load_state_dict"):
            if _calls(self.facts, original_node, name):
                return updated_node.with_changes(func=_scaler(name))
        if _calls(self.facts, original_node, "master_params"):
            optimizer = get_full_name_for_node(original_node.args[0].value)
            return cst.parse_expression(f'[p for group in {optimizer}.param_groups for p in group["params"]]')
        if _meaning(self.facts, original_node.func) in REPLACED:
            renamed = cst.Name("find_unused_parameters")
            return updated_node.with_changes(
                args=[arg if arg.keyword is None else arg.with_changes(keyword=renamed) for arg in updated_node.args]
            )
        return updated_node

    def _import(self, node: cst.Import, line: cst.SimpleStatementLine) -> Any:
        kept = [alias for alias in node.names if not is_apex(str(alias.evaluated_name))]
        if len(kept) == len(node.names):
            return line
        kept = [alias.with_changes(comma=cst.MaybeSentinel.DEFAULT) for alias in kept]
        return line.with_changes(body=[node.with_changes(names=kept)]) if kept else cst.RemoveFromParent()

    def _without_training(self, node: cst.Assign, line: cst.SimpleStatementLine) -> Any:
        call = cst.ensure_type(node.value, cst.Call)
        model = next((arg.value for arg in call.args if arg.keyword is None or arg.keyword.value == "models"), None)
        assert model is not None
        if get_full_name_for_node(model) == get_full_name_for_node(node.targets[0].target):
            return cst.RemoveFromParent()
        return line.with_changes(body=[node.with_changes(value=model)])

    def _import_from(self, node: cst.ImportFrom, line: cst.SimpleStatementLine) -> Any:
        module = None if node.module is None or node.relative else get_full_name_for_node(node.module)
        if module is None or not is_apex(module) or isinstance(node.names, cst.ImportStar):
            return line
        kept = [alias for alias in node.names if f"{module}.{alias.evaluated_name}" in REPLACED]
        if not kept:
            return cst.RemoveFromParent()
        home = REPLACED[f"{module}.{kept[0].evaluated_name}"]
        kept = [alias.with_changes(comma=cst.MaybeSentinel.DEFAULT) for alias in kept]
        return line.with_changes(body=[cst.ImportFrom(dotted(home), kept)])


def dotted(name: str) -> cst.Name | cst.Attribute:
    """An expression for a dotted name."""
    return cst.ensure_type(cst.parse_expression(name), (cst.Name, cst.Attribute))  # type: ignore[arg-type]


def _line(code: str) -> cst.SimpleStatementLine:
    return cst.ensure_type(cst.parse_statement(code), cst.SimpleStatementLine)


def _scaler(name: str) -> cst.Attribute:
    return cst.Attribute(cst.Name(_SCALER), cst.Name(name))


def _scales(facts: Facts, node: cst.CSTNode) -> bool:
    return isinstance(node, cst.With) and len(node.items) == 1 and _calls(facts, node.items[0].item, "scale_loss")


def _calls(facts: Facts, node: cst.CSTNode, name: str) -> bool:
    return isinstance(node, cst.Call) and _meaning(facts, node.func) == f"apex.amp.{name}"


def _meaning(facts: Facts, node: cst.CSTNode) -> str | None:
    return facts.meaning(get_full_name_for_node(node))


def _optimizer_of_step(node: cst.CSTNode, facts: Facts) -> str | None:
    if not m.matches(node, m.Call(func=m.Attribute(attr=m.Name("step")))):
        return None
    owner = get_full_name_for_node(node.func.value)  # type: ignore[attr-defined]
    return owner if owner in facts.optimizers else None
