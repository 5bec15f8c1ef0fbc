"""``amp.initialize`` becomes a GradScaler, and code that refuses levels which torch has not."""

from __future__ import annotations

import ast

from .scopes import dotted_text
from .torch_names import level_of
from .torch_script import Script, Start

__all__ = ["read_starts", "write_start"]


def read_starts(script: Script) -> None:
    """Find the calls of ``amp.initialize``."""
    for use in script.names.uses:
        if use.name == "apex.amp.initialize":
            start = _read(script, use.node, use.function)
            if start is not None:
                script.starts.append(start)


def _read(script: Script, node: ast.AST, function: ast.AST | None) -> Start | None:
    call = script.around.owners[id(node)]
    statement = script.around.owners[id(call)]
    if not isinstance(call, ast.Call) or not isinstance(statement, ast.Assign) or len(statement.targets) > 1:
        script.say(node, "amp.initialize whose result is not assigned to names")
        return None
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in named or len(call.args) > 2 or any(isinstance(arg, ast.Starred) for arg in call.args):
        script.say(node, "amp.initialize with arguments that cannot be read here")
        return None
    arguments = [*call.args, *(named[name] for name in ("models", "optimizers") if name in named)]
    target = statement.targets[0]
    targets = [dotted_text(each) for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    several = any(isinstance(value, (ast.List, ast.Tuple)) for value in arguments)
    if several or None in targets or not 1 <= len(targets) <= 2 or len(arguments) != len(targets):
        script.say(node, "amp.initialize of several models or optimizers")
        return None
    level = level_of(call)
    script.problems += level.problems
    given = [script.text.source(each) for each in arguments]
    return Start(statement, function, [str(each) for each in targets], given, level)


def write_start(script: Script, start: Start) -> None:
    """Replace an ``amp.initialize`` of what is trained."""
    optimizer = str(start.optimizer)
    again = [other for other in script.starts if other.function is start.function and other.optimizer]
    if any(other.targets != start.targets for other in again):
        script.say(start.node, "a second amp.initialize: its loss scale would need a GradScaler of its own")
    scaler = script.scaler(optimizer)
    argument = "" if start.level.enabled == "True" else f"enabled={start.level.enabled}"
    lines = [f"{new} = {old}" for new, old in zip(start.targets, start.given, strict=True) if new != old]
    lines += [*start.level.checks, f"{scaler} = torch.amp.GradScaler({argument})"]
    script.text.lines(start.node, lines)
    outer = script.around.conditions(start.node)
    if outer and start is again[0]:
        others = [
            node
            for node in ast.walk(outer[-1])
            if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)
            if dotted_text(node) == optimizer and script.around.statement(node) is not start.node
        ]
        if others and script.package.shared:
            script.say(others[0], f"{optimizer} is made where amp may be off; make it before that")
        script.text.before(outer[-1], f"{scaler} = torch.amp.GradScaler(enabled=False)")
