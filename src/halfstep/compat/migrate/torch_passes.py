"""``scale_loss`` becomes the backward pass of a GradScaler."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .scopes import dotted_text
from .torch_script import Script, bare, has_backward, last_part

__all__ = ["Pass", "read_passes", "unscaled_passes"]


@dataclass
class Pass:
    """A backward pass.

    Attributes:
        script: the file.
        whole: the statement to replace.
        optimizer: the optimizer, or the first of several.
        before, loss, after: the parts of the new text, around ``scaler.scale(loss).backward``.
        scaled: the call of ``scale_loss`` that it is in; None if it is in none.
        delay: the text of ``delay_unscale``, with which Apex moves its loss scale only once for all passes of a step.
        loss_id: the text of that argument.
    """

    script: Script
    whole: ast.stmt
    optimizer: str
    before: str
    loss: str
    after: str
    scaled: ast.Call | None = None
    delay: str = ""
    loss_id: str = "0"

    def write(self) -> None:
        """Replace it."""
        scaler, text = self.script.scaler(self.optimizer, self.loss_id), self.script.text
        if not self.script.package.options.each_pass:
            text.lines(self.whole, [f"{self.before}{scaler}.scale({self.loss}).backward{self.after}"])
        elif self.scaled is not None:
            optimizers = text.source(_optimizers(self.scaled) or self.scaled)
            delay = f", delay_unscale={self.delay}" if self.delay else ""
            new = f"{self.script.helpers['scaled_pass']}({scaler}, {self.loss}, {optimizers}{delay})"
            if isinstance(self.whole, ast.If):
                indent = "\t" if text.margin(self.whole).endswith("\t") else "    "
                text.lines(
                    self.whole,
                    [f"with {new} as loss_of_pass:", f"{indent}{self.before}loss_of_pass.backward{self.after}"],
                )
            else:
                text.put(self.scaled, new)


def read_passes(script: Script) -> list[Pass]:
    """The passes of a file: those in ``scale_loss``, and what runs instead where amp may be off."""
    owners = script.around.owners
    scaled = [owners[id(use.node)] for use in script.names.uses if use.name == "apex.amp.scale_loss"]
    found: list[Pass] = []
    for call in scaled:
        block = script.around.statement(call)
        if not isinstance(call, ast.Call) or not (script.package.options.each_pass or script.scales(block)):
            script.say(call, "scale_loss other than as a with block of its own")
        else:
            found += _read(script, block, call)
    return list({id(each.whole): each for each in found}.values())


def unscaled_passes(script: Script, nodes: Iterable[ast.AST] | None = None) -> list[Pass]:
    """The passes without ``scale_loss`` in functions that step an optimizer of amp. A GradScaler scales them, too."""
    found = []
    for node in ast.walk(script.tree) if nodes is None else nodes:
        if isinstance(node, ast.Expr) and _plain(node):
            steps = (script.stepped(each) for each in ast.walk(script.around.function(node)))
            known = [each for each in steps if each is not None and last_part(each) in script.package.optimizers]
            if known:
                found.append(_as_written(script, node, known[0]))
    return found


def _as_written(script: Script, node: ast.Expr, optimizer: str, delay: str = "") -> Pass:
    """A pass of a loss that is not scaled."""
    func = node.value.func  # type: ignore[attr-defined]
    after = script.text.bytes[script.text.end(func) : script.text.end(node)].decode()
    return Pass(script, node, optimizer, "", script.text.source(func.value), after, delay=delay)


def _optimizers(call: ast.Call) -> ast.expr | None:
    """What ``scale_loss`` gets as optimizers."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    return dict(enumerate(call.args)).get(1, named.get("optimizers"))


def _read(script: Script, block: ast.stmt, call: ast.Call) -> Iterator[Pass]:
    text, each_pass = script.text, script.package.options.each_pass
    named = {str(keyword.arg): text.source(keyword.value) for keyword in call.keywords}
    optimizer = _optimizers(call)
    if set(named) - {"optimizers", "loss_id", "delay_unscale"} or len(call.args) > 2 or not call.args or not optimizer:
        script.say(block, "scale_loss with arguments that a GradScaler has not")
        return
    first = optimizer.elts[0] if each_pass and isinstance(optimizer, (ast.List, ast.Tuple)) else optimizer
    if not isinstance(first, (ast.Name, ast.Attribute, ast.Subscript)):
        script.say(block, "scale_loss of several optimizers, or of one without a name")
        return
    backward = _only_backward(block)
    if backward is None and not each_pass:
        script.say(block, "a scale_loss block that does more than scaled_loss.backward(); put the rest after it")
        return
    whole, others = _elsewhere(script, block, call.args[0], backward)
    before = after = ""
    if backward is not None:
        before = text.bytes[text.start(script.around.statement(backward)) : text.start(backward)].decode()
        after = text.bytes[text.end(backward.func) : text.end(backward)].decode()
    delay = named.get("delay_unscale", "False").removeprefix("False")
    name, loss = text.source(first), text.source(call.args[0])
    yield Pass(script, whole, name, before, loss, after, call, delay, named.get("loss_id", "0"))
    for other in others:
        yield _as_written(script, other, name, delay)


def _only_backward(block: ast.stmt) -> ast.Call | None:
    """The call of ``backward`` that is all that a block of ``scale_loss`` has; None if it has more."""
    if not isinstance(block, ast.With) or len(block.body) > 1 or len(block.items) > 1:
        return None
    statement, variable = block.body[0], block.items[0].optional_vars
    call = statement.value if isinstance(statement, (ast.Expr, ast.Assign)) else None
    known = isinstance(call, ast.Call) and isinstance(variable, ast.Name)
    return call if known and dotted_text(call.func) == f"{variable.id}.backward" else None  # type: ignore[union-attr,return-value]


def _elsewhere(
    script: Script, block: ast.stmt, loss: ast.expr, backward: ast.Call | None
) -> tuple[ast.stmt, list[ast.Expr]]:
    """The statement to replace, also an ``if`` with the same pass in both branches, and passes in other branches."""
    others: list[ast.Expr] = []
    for owner in script.around.around(block):
        if not isinstance(owner, ast.If):
            continue
        branches = (owner.body, owner.orelse)
        other = branches[0] if any(block is part for each in owner.orelse for part in ast.walk(each)) else branches[1]
        plain = [each for node in other for each in ast.walk(node) if isinstance(each, ast.Expr) and _plain(each)]
        same = backward is not None and len(plain) == len(other) == 1 and plain[0] is other[0]
        same = same and ast.dump(plain[0].value.func.value) == ast.dump(loss)  # type: ignore[attr-defined]
        same = same and ast.unparse(plain[0]).endswith(ast.unparse(backward).partition(".backward")[2])  # type: ignore[arg-type]
        if same and [block] in branches and not script.text.source(owner).startswith("elif"):
            return owner, others
        if any(has_backward(each) for each in other) and bare(owner.test) not in script.package.conditions:
            others += plain
    return block, others


def _plain(node: ast.Expr) -> bool:
    """Whether a statement is a backward pass of a loss that nobody scales."""
    func = node.value.func if isinstance(node.value, ast.Call) else None
    if not isinstance(func, ast.Attribute) or func.attr != "backward":
        return False
    own = isinstance(func.value, ast.Call) and last_part(dotted_text(func.value.func) or "") == "scale"
    return not own  # of a GradScaler that the script has
