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
    """A backward pass of a scaled loss.

    Attributes:
        script: the file.
        whole: the statement to replace.
        optimizer: the optimizer.
        before, loss, after: the parts of the new text, around ``scaler.scale(loss).backward``.
        delay: the text of ``delay_unscale``, with which Apex moves its loss scale only once for all passes of a step.
        scaled: whether it is in ``scale_loss``.
        loss_id: the text of that argument.
    """

    script: Script
    whole: ast.stmt
    optimizer: str
    before: str
    loss: str
    after: str
    delay: str = ""
    scaled: bool = True
    loss_id: str = "0"

    def write(self) -> None:
        """Replace it."""
        scaler = self.script.scaler(self.optimizer, self.loss_id)
        if not self.script.package.options.each_pass:
            self._put(f"{scaler}.scale({self.loss}).backward{self.after}")
        elif self.scaled:
            delay = f"delay_unscale={self.delay}" if self.delay else ""
            arguments = (scaler, self.loss, self.optimizer, self.after.strip()[1:-1].strip().rstrip(","), delay)
            self._put(f"{self.script.helpers['scaled_backward']}({', '.join(filter(None, arguments))})")

    def _put(self, new: str) -> None:
        self.script.text.lines(self.whole, [f"{self.before}{new}"])


def read_passes(script: Script) -> list[Pass]:
    """The passes of a file: the blocks of ``scale_loss``, and what runs instead where amp may be off."""
    blocks = [node for node in ast.walk(script.tree) if isinstance(node, ast.With) and script.scales(node)]
    scaled = [use for use in script.names.uses if use.name == "apex.amp.scale_loss"]
    if len(blocks) < len(scaled):
        script.say(scaled[0].node, "scale_loss other than as a with block of its own")
    found = [each for block in blocks for each in _read(script, block)]
    return list({id(each.whole): each for each in found}.values())


def unscaled_passes(script: Script, nodes: Iterable[ast.AST] | None = None) -> list[Pass]:
    """The passes without ``scale_loss`` in functions that step an optimizer of amp. A GradScaler scales them, too."""
    found = []
    for node in ast.walk(script.tree) if nodes is None else nodes:
        if isinstance(node, ast.Expr) and _plain(node):
            steps = (script.stepped(each) for each in ast.walk(script.around.function(node)))
            known = [each for each in steps if each is not None and last_part(each) in script.package.optimizers]
            if known:
                found.append(_as_written(script, node, known[0], ""))
    return found


def _as_written(script: Script, node: ast.Expr, optimizer: str, delay: str) -> Pass:
    """A pass of a loss that is not scaled."""
    func = node.value.func  # type: ignore[attr-defined]
    after = script.text.bytes[script.text.end(func) : script.text.end(node)].decode()
    return Pass(script, node, optimizer, "", script.text.source(func.value), after, delay, scaled=False)


def _read(script: Script, block: ast.With) -> Iterator[Pass]:
    call = block.items[0].context_expr
    assert isinstance(call, ast.Call)
    statement, variable = block.body[0], block.items[0].optional_vars
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    optimizer = dict(enumerate(call.args)).get(1, named.get("optimizers"))
    if set(named) - {"optimizers", "loss_id", "delay_unscale"} or len(call.args) > 2 or optimizer is None:
        script.say(block, "scale_loss with arguments that a GradScaler has not")
        return
    if not isinstance(optimizer, (ast.Name, ast.Attribute, ast.Subscript)):
        script.say(block, "scale_loss of several optimizers, or of one without a name")
        return
    backward = getattr(statement, "value", None)
    alone = len(block.body) == 1 and isinstance(statement, (ast.Expr, ast.Assign)) and isinstance(variable, ast.Name)
    if not alone or not isinstance(backward, ast.Call) or dotted_text(backward.func) != f"{variable.id}.backward":  # type: ignore[union-attr]
        script.say(block, "a scale_loss block that does more than scaled_loss.backward(); put the rest after it")
        return
    text = script.text
    whole, others = _elsewhere(script, block, call.args[0], backward)
    name = text.source(optimizer)
    before = text.bytes[text.start(statement) : text.start(backward)].decode()
    after = text.bytes[text.end(backward.func) : text.end(backward)].decode()
    delay = text.source(named["delay_unscale"]) if "delay_unscale" in named else ""
    delay = "" if delay == "False" else delay
    loss_id = text.source(named["loss_id"]) if "loss_id" in named else "0"
    yield Pass(script, whole, name, before, text.source(call.args[0]), after, delay, loss_id=loss_id)
    for other in others:
        yield _as_written(script, other, name, delay)


def _elsewhere(script: Script, block: ast.With, loss: ast.expr, backward: ast.Call) -> tuple[ast.stmt, list[ast.Expr]]:
    """The statement to replace, also an ``if`` with the same pass in both branches, and passes in other branches."""
    others: list[ast.Expr] = []
    for owner in script.around.around(block):
        if not isinstance(owner, ast.If):
            continue
        branches = (owner.body, owner.orelse)
        other = branches[0] if any(block is part for each in owner.orelse for part in ast.walk(each)) else branches[1]
        plain = [each for node in other for each in ast.walk(node) if isinstance(each, ast.Expr) and _plain(each)]
        same = len(plain) == len(other) == 1 and plain[0] is other[0]
        same = same and ast.dump(plain[0].value.func.value) == ast.dump(loss)  # type: ignore[attr-defined]
        same = same and ast.unparse(plain[0]).endswith(ast.unparse(backward).partition(".backward")[2])
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
