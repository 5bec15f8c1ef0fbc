"""Rewrites O0 and O1 of Apex to ``torch.autocast`` and ``torch.amp.GradScaler``, where these do the same.

A file is rewritten as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameProvider

from .names import is_apex
from .to_halfstep import Problem, dotted

__all__ = ["to_torch"]

_IMPORTED = {"apex.parallel.DistributedDataParallel": "torch.nn.parallel"}
"""What torch has too, and in which module."""

_SCALER = "scaler"
_AUTOCAST = 'torch.autocast("cuda", dtype=torch.float16)'


@dataclass
class _Use:
    """A place where a name of Apex stands."""

    name: str
    node: cst.CSTNode
    line: int
    function: cst.CSTNode | None


@dataclass
class _Facts:
    """What a file does with Apex."""

    uses: list[_Use] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    optimizers: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    enabled: bool = True
    torch: bool = False


def to_torch(tree: MetadataWrapper) -> tuple[str, list[Problem]]:
    """The new text and no problems, or the old text and all problems."""
    reader = _Reader()
    tree.visit(reader)
    facts = reader.facts
    if not facts.uses and not facts.problems:
        return tree.module.code, []
    _check(facts)
    scoped = tree.visit(_Scopes(facts))
    after = MetadataWrapper(scoped).visit(_Calls(facts))
    return (tree.module.code, facts.problems) if facts.problems else (after.code, [])


def _check(facts: _Facts) -> None:
    say = facts.problems
    starts = [use for use in facts.uses if use.name == "apex.amp.initialize"]
    imports = (cst.ImportAlias, cst.ImportFrom)
    calls = [use for use in facts.uses if use.name.startswith("apex.amp.") and not isinstance(use.node, imports)]
    functions = {use.function for use in calls}
    if len(starts) > 1:
        say.append((starts[1].line, "a second amp.initialize: its loss scale would need a GradScaler of its own"))
    if len(functions - {None}) > 1 or (starts and starts[0].function is not None and functions != {starts[0].function}):
        lines = sorted(use.line for use in facts.uses if use.function is not (starts[0].function if starts else None))
        say.append((lines[0], "amp is used in several functions; hand a GradScaler from one to the other yourself"))
    for use in facts.uses:
        if use.name.startswith("apex.amp.") and use.name.removeprefix("apex.amp.") not in _KNOWN:
            say.append((use.line, f"{use.name} has no counterpart in torch.amp"))
        elif not use.name.startswith("apex.amp") and use.name not in (*_IMPORTED, "apex"):
            say.append((use.line, f"{use.name} has no counterpart in torch; halfstep has it (--to halfstep)"))
    if starts and not facts.torch:
        say.append((starts[0].line, "torch is not imported by its name; add `import torch`"))
    if not starts and any(use.name.startswith("apex.amp.") for use in facts.uses):
        line = min(use.line for use in facts.uses)
        say.append((line, "there is no amp.initialize in this file, which says what is trained at which level"))


_KNOWN = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")


class _Reader(cst.CSTVisitor):
    """Collects what a file does with Apex."""

    METADATA_DEPENDENCIES = (PositionProvider, QualifiedNameProvider)

    def __init__(self) -> None:
        super().__init__()
        self.facts = _Facts()
        self._functions: list[cst.CSTNode] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:  # noqa: N802
        self._functions.append(node)

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:  # noqa: N802
        self._functions.pop()

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: N802
        module = None if node.module is None or node.relative else get_full_name_for_node(node.module)
        if module is not None and is_apex(module):
            if isinstance(node.names, cst.ImportStar):
                self.facts.problems.append((self._line(node), f"from {module} import *: say which names"))
            else:
                for alias in node.names:
                    name = f"{module}.{alias.evaluated_name}"
                    if name != "apex.amp":
                        self._use(name, node)
        return False

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: N802
        for alias in node.names:
            name = str(alias.evaluated_name)
            self.facts.torch = self.facts.torch or (name == "torch" and alias.asname is None)
            if is_apex(name) and name not in ("apex", "apex.amp"):
                self._use(name, node)
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:  # noqa: N802
        return not self._note(node)

    def visit_Name(self, node: cst.Name) -> None:  # noqa: N802
        self._note(node)

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802
        call = node.value
        if not isinstance(call, cst.Call) or _qualified(self, call.func) != "apex.amp.initialize":
            return
        self._initialize(call)
        target = node.targets[0].target
        names = (
            [get_full_name_for_node(e.value) for e in target.elements]
            if isinstance(target, cst.Tuple)
            else [get_full_name_for_node(target)]
        )
        if len(node.targets) > 1 or None in names or not 1 <= len(names) <= 2:
            self.facts.problems.append((self._line(node), "amp.initialize of several models or optimizers"))
            return
        self.facts.models.add(str(names[0]))
        self.facts.optimizers.update(str(name) for name in names[1:])

    def _initialize(self, call: cst.Call) -> None:
        problems, line = self.facts.problems, self._line(call)
        positional = [arg for arg in call.args if arg.keyword is None]
        if any(arg.star for arg in call.args) or len(positional) > 2:
            problems.append((line, "amp.initialize with arguments that cannot be read here"))
            return
        for arg in call.args:
            if isinstance(arg.value, (cst.List, cst.Tuple)):
                problems.append((line, "amp.initialize of several models or optimizers"))
            name = None if arg.keyword is None else arg.keyword.value
            value = (
                arg.value.evaluated_value if isinstance(arg.value, (cst.SimpleString, cst.Integer, cst.Float)) else None
            )
            if name == "opt_level":
                if value not in ("O0", "O1"):
                    said = "O2 and O3 keep 16-bit weights" if value in ("O2", "O3") else "the level cannot be read here"
                    problems.append((line, f"{said}; torch.amp has nothing for that, halfstep has (--to halfstep)"))
                self.facts.enabled = value != "O0"
            elif name == "num_losses" and value != 1:
                problems.append((line, "num_losses: each loss would need a GradScaler of its own"))
            elif name == "loss_scale" and value != "dynamic":
                problems.append((line, "a static loss_scale: GradScaler has none"))
            elif name in ("min_loss_scale", "max_loss_scale", "keep_batchnorm_fp32", "master_weights", "enabled"):
                problems.append((line, f"{name} has no counterpart in torch.amp"))

    def _note(self, node: cst.Name | cst.Attribute) -> bool:
        name = _qualified(self, node)
        if name is None or not is_apex(name) or name in ("apex", "apex.amp"):
            return False
        self._use(name, node)
        return True

    def _use(self, name: str, node: cst.CSTNode) -> None:
        self.facts.uses.append(_Use(name, node, self._line(node), self._functions[-1] if self._functions else None))

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)


class _Scopes(cst.CSTTransformer):
    """Puts ``torch.autocast`` around forward passes and ``unscale_`` before clipping."""

    METADATA_DEPENDENCIES = (PositionProvider, QualifiedNameProvider)

    def __init__(self, facts: _Facts) -> None:
        super().__init__()
        self.facts = facts

    def leave_IndentedBlock(  # noqa: N802
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        return updated_node.with_changes(body=self._block(original_node.body, updated_node.body))

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:  # noqa: N802
        return updated_node.with_changes(body=self._block(original_node.body, updated_node.body))

    def visit_With(self, node: cst.With) -> None:  # noqa: N802
        if not _scales(self, node):
            return
        item = node.items[0]
        call, name = cst.ensure_type(item.item, cst.Call), item.asname and get_full_name_for_node(item.asname.name)
        backward = m.Expr(m.Call(func=m.Attribute(value=m.Name(name or ""), attr=m.Name("backward"))))
        if len(call.args) != 2 or not m.matches(node.body, m.IndentedBlock([m.SimpleStatementLine([backward])])):
            self._problem(node, "a scale_loss block that does more than scaled_loss.backward()")

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802
        if _optimizer_of_step(node, self.facts) and node.args:
            self._problem(node, "step with a closure: GradScaler.step takes none")
        if _qualified(self, node.func) == "apex.parallel.DistributedDataParallel":
            for arg in node.args:
                if arg.star or (arg.keyword is not None and arg.keyword.value != "delay_allreduce"):
                    name = arg.star if arg.keyword is None else arg.keyword.value
                    self._problem(node, f"{name} of apex.parallel.DistributedDataParallel")

    def _block(self, original: Sequence[cst.CSTNode], updated: Sequence[Any]) -> list[Any]:
        result = [part for old, new in zip(original, updated, strict=True) for part in self._clipping(old, new)]
        end = next((i for i, old in enumerate(original) if _scales(self, old)), None)
        if end is None or not self.facts.enabled:
            return result
        begin = next((i for i in range(end) if self._runs_a_model(original[i])), None)
        if begin is None:
            self._problem(original[end], "no call of the model before it in the same block; put autocast around that")
            return result
        first, *others = result[begin:end]
        inner = cst.IndentedBlock([first.with_changes(leading_lines=[]), *others])
        scope = cst.With([cst.WithItem(cst.parse_expression(_AUTOCAST))], inner, leading_lines=first.leading_lines)
        return [*result[:begin], scope, *result[end:]]

    def _clipping(self, old: cst.CSTNode, new: Any) -> list[Any]:
        if not isinstance(old, cst.SimpleStatementLine):
            return [new]
        calls = m.findall(old, m.Call(func=m.Attribute(attr=m.Name("master_params")) | m.Name("master_params")))
        found = [c for c in calls if _qualified(self, c.func) == "apex.amp.master_params"]  # type: ignore[attr-defined]
        if not found:
            return [new]
        optimizer = get_full_name_for_node(found[0].args[0].value)  # type: ignore[attr-defined]
        unscale = cst.ensure_type(cst.parse_statement(f"{_SCALER}.unscale_({optimizer})"), cst.SimpleStatementLine)
        return [unscale.with_changes(leading_lines=new.leading_lines), new.with_changes(leading_lines=[])]

    def _runs_a_model(self, statement: cst.CSTNode) -> bool:
        calls = [cst.ensure_type(call, cst.Call) for call in m.findall(statement, m.Call())]
        return any(str(get_full_name_for_node(call.func)) in self.facts.models for call in calls)

    def _problem(self, node: cst.CSTNode, text: str) -> None:
        self.facts.problems.append((int(self.get_metadata(PositionProvider, node).start.line), text))


class _Calls(cst.CSTTransformer):
    """Rewrites calls and imports one by one."""

    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self, facts: _Facts) -> None:
        super().__init__()
        self.facts = facts

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        statement = original_node.body[0]
        if isinstance(statement, cst.ImportFrom):
            return self._import_from(statement, updated_node)
        if isinstance(statement, cst.Import) and all(is_apex(str(a.evaluated_name)) for a in statement.names):
            return cst.RemoveFromParent()
        if isinstance(statement, cst.Assign) and _calls(self, statement.value, "initialize"):
            enabled = "" if self.facts.enabled else "enabled=False"
            return updated_node.with_changes(body=_line(f"{_SCALER} = torch.amp.GradScaler({enabled})").body)
        if isinstance(statement, cst.Expr) and (owner := _optimizer_of_step(statement.value, self.facts)):
            step = updated_node.with_changes(body=_line(f"{_SCALER}.step({owner})").body)
            return cst.FlattenSentinel([step, _line(f"{_SCALER}.update()")])
        return updated_node

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> Any:  # noqa: N802
        if not _scales(self, original_node):
            return updated_node
        call = cst.ensure_type(updated_node.items[0].item, cst.Call)
        line = cst.ensure_type(updated_node.body.body[0], cst.SimpleStatementLine)
        backward = cst.ensure_type(cst.ensure_type(line.body[0], cst.Expr).value, cst.Call)
        scaled = cst.Call(_scaler("scale"), [cst.Arg(call.args[0].value)])
        function = cst.ensure_type(backward.func, cst.Attribute).with_changes(value=scaled)
        return line.with_changes(
            body=[cst.Expr(backward.with_changes(func=function))], leading_lines=updated_node.leading_lines
        )

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:  # noqa: N802
        for name in ("state_dict", "load_state_dict"):
            if _calls(self, original_node, name):
                return updated_node.with_changes(func=_scaler(name))
        if _calls(self, original_node, "master_params"):
            optimizer = get_full_name_for_node(original_node.args[0].value)
            return cst.parse_expression(f'[p for group in {optimizer}.param_groups for p in group["params"]]')
        if _qualified(self, original_node.func) == "apex.parallel.DistributedDataParallel":
            renamed = cst.Name("find_unused_parameters")
            return updated_node.with_changes(
                args=[arg if arg.keyword is None else arg.with_changes(keyword=renamed) for arg in updated_node.args]
            )
        return updated_node

    def _import_from(self, node: cst.ImportFrom, line: cst.SimpleStatementLine) -> Any:
        module = None if node.module is None or node.relative else get_full_name_for_node(node.module)
        if module is None or not is_apex(module) or isinstance(node.names, cst.ImportStar):
            return line
        kept = [alias for alias in node.names if f"{module}.{alias.evaluated_name}" in _IMPORTED]
        if not kept:
            return cst.RemoveFromParent()
        home = _IMPORTED[f"{module}.{kept[0].evaluated_name}"]
        kept = [alias.with_changes(comma=cst.MaybeSentinel.DEFAULT) for alias in kept]
        return line.with_changes(body=[cst.ImportFrom(dotted(home), kept)])


def _line(code: str) -> cst.SimpleStatementLine:
    return cst.ensure_type(cst.parse_statement(code), cst.SimpleStatementLine)


def _scaler(name: str) -> cst.Attribute:
    return cst.Attribute(cst.Name(_SCALER), cst.Name(name))


def _scales(visitor: cst.MetadataDependent, node: cst.CSTNode) -> bool:
    return isinstance(node, cst.With) and len(node.items) == 1 and _calls(visitor, node.items[0].item, "scale_loss")


def _calls(visitor: cst.MetadataDependent, node: cst.CSTNode, name: str) -> bool:
    return isinstance(node, cst.Call) and _qualified(visitor, node.func) == f"apex.amp.{name}"


def _optimizer_of_step(node: cst.CSTNode, facts: _Facts) -> str | None:
    if not m.matches(node, m.Call(func=m.Attribute(attr=m.Name("step")))):
        return None
    owner = get_full_name_for_node(node.func.value)  # type: ignore[attr-defined]
    return owner if owner in facts.optimizers else None


def _qualified(visitor: cst.MetadataDependent, node: cst.CSTNode) -> str | None:
    names = visitor.get_metadata(QualifiedNameProvider, node, set())
    found = {n.name for n in names}
    return found.pop() if len(found) == 1 else None
