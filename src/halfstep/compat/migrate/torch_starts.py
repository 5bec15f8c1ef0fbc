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
    if len(call.args) > 2 or any(isinstance(arg, ast.Starred) for arg in call.args):
        script.say(node, "amp.initialize with arguments that cannot be read here")
        return None
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    given = [*call.args, *(named[name] for name in ("models", "optimizers") if name in named)]
    target = statement.targets[0]
    if len(given) < 2 or (isinstance(given[1], ast.Constant) and given[1].value is None):
        pairs = [_pairs(script, target, given[0]), []]
    elif isinstance(target, ast.Tuple) and len(target.elts) == 2:
        pairs = [_pairs(script, target.elts[i], given[i]) for i in (0, 1)]
    else:
        pairs = [None]
    level = level_of(call, trained=bool(pairs[-1]), o2_as_o1=script.package.options.o2_as_o1)
    script.problems += level.problems
    if None in pairs:
        script.say(node, "amp.initialize of several models or optimizers; assign its result to a name for each")
        return None
    models, optimizers = (each or [] for each in pairs)
    return Start(statement, function, models, optimizers, level)


def _pairs(script: Script, target: ast.expr, given: ast.expr) -> list[tuple[str, str]] | None:
    """The names to which models or optimizers are assigned, and what was given; None if they cannot be told.

    Where a list is assigned to one name, its parts keep theirs, and the name of the list is the last one.
    """
    parts = (ast.List, ast.Tuple)
    if isinstance(given, parts) and not given.elts:
        return []
    targets = target.elts if isinstance(target, parts) else [target]
    values = given.elts if isinstance(given, parts) else [given]
    texts = [script.text.source(each) for each in values]
    if isinstance(target, ast.Name) and isinstance(given, parts):
        return [*zip(texts, texts, strict=True), (target.id, script.text.source(given))]
    if isinstance(target, parts) != isinstance(given, parts) or len(targets) != len(values):
        return None
    new = [script.text.source(each) if isinstance(each, ast.Subscript) else dotted_text(each) for each in targets]
    names = [text if name == "_" else name for name, text in zip(new, texts, strict=True)]
    plural = any(name is None or name.endswith(("optimizers", "opts")) for name in names)
    return None if plural else [(str(name), text) for name, text in zip(names, texts, strict=True)]


def write_start(script: Script, start: Start) -> None:
    """Replace an ``amp.initialize`` of what is trained."""
    begin = f"init_scale={start.init_scale}" if start.init_scale else ""
    enabled = "" if start.level.enabled == "True" else f"enabled={start.level.enabled}"
    argument = ", ".join(filter(None, (begin, enabled)))
    lines = [f"{new} = {old}" for new, old in (*start.models, *start.optimizers) if new != old]
    script.text.lines(start.node, [*lines, *start.level.checks, *script.new_scalers(start, argument)])
    if not script.package.shared:
        for optimizer, _ in start.optimizers:
            _write_off(script, start, optimizer)


def _write_off(script: Script, start: Start, optimizer: str) -> None:
    """Have a GradScaler that is off before the conditions under which ``amp.initialize`` is called."""
    outer = [each for each in script.around.conditions(start.node) if not _made(script, each, start.node, optimizer)]
    if outer and (key := (id(outer[-1]), "off")) not in script.written:
        script.written.add(key)
        script.text.before(outer[-1], script.new_scalers(start, "enabled=False")[0])


def _made(script: Script, condition: ast.If, node: ast.stmt, optimizer: str) -> list[ast.expr]:
    """The places in an ``if`` statement where an optimizer gets its name, other than an ``amp.initialize``."""
    return [
        each
        for each in ast.walk(condition)
        if isinstance(each, (ast.Name, ast.Attribute)) and isinstance(each.ctx, ast.Store)
        if dotted_text(each) == optimizer and script.around.statement(each) is not node
        if not any(script.around.statement(each) is other.node for other in script.starts)
    ]
