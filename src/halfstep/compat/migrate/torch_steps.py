"""``scale_loss`` becomes the backward pass of a GradScaler, and ``optimizer.step`` its step."""

from __future__ import annotations

import ast

from .scopes import dotted_text
from .torch_autocast import Autocast
from .torch_script import Script, bare, has_backward

__all__ = ["Steps"]


class Steps:
    """The backward passes and the steps of one file."""

    def __init__(self, script: Script, autocast: Autocast) -> None:
        self._script, self._autocast = script, autocast
        self._steps: dict[int, ast.stmt] = {}  # the steps that were rewritten

    def rewrite(self) -> None:
        """Collect the changes."""
        script = self._script
        blocks = [node for node in ast.walk(script.tree) if isinstance(node, ast.With) and script.scales(node)]
        scaled = [use for use in script.names.uses if use.name == "apex.amp.scale_loss"]
        if len(blocks) < len(scaled):
            script.say(scaled[0].node, "scale_loss other than as a with block of its own")
        for block in blocks:
            self._block(block)
        self._unscaled(blocks)

    def _block(self, block: ast.With) -> None:
        """A ``scale_loss``: autocast before it, a GradScaler's backward pass, and the step."""
        call = block.items[0].context_expr
        assert isinstance(call, ast.Call)
        statement = block.body[0]
        variable = block.items[0].optional_vars
        backward = getattr(statement, "value", None)
        of_loss = (
            isinstance(backward, ast.Call)
            and isinstance(variable, ast.Name)
            and dotted_text(backward.func) == f"{variable.id}.backward"
        )
        optimizer = dotted_text(call.args[1]) if len(call.args) == 2 and not call.keywords else None
        if not of_loss or optimizer is None or len(block.body) > 1 or not isinstance(statement, (ast.Expr, ast.Assign)):
            self._script.say(block, "a scale_loss block that does more than scaled_loss.backward()")
            return
        assert isinstance(backward, ast.Call)
        scaler = self._script.scaler(optimizer)
        before = self._script.text.bytes[self._script.text.start(statement) : self._script.text.start(backward)]
        after = self._script.text.bytes[self._script.text.end(backward.func) : self._script.text.end(backward)]
        loss = self._script.text.source(call.args[0])
        whole = self._with_else(block, call.args[0], backward)
        self._script.text.lines(whole, [f"{before.decode()}{scaler}.scale({loss}).backward{after.decode()}"])
        self._autocast.before(whole, scaler)
        self._step(whole, optimizer)

    def _with_else(self, block: ast.With, loss: ast.expr, backward: ast.Call) -> ast.stmt:
        """The statement to rewrite: also ``if amp: ... else: loss.backward()`` around the block."""
        for owner in self._script.around.around(block):
            if not isinstance(owner, ast.If) or not owner.orelse:
                continue
            other = owner.orelse[0]
            same = (
                isinstance(other, ast.Expr)
                and isinstance(other.value, ast.Call)
                and isinstance(other.value.func, ast.Attribute)
                and other.value.func.attr == "backward"
                and ast.dump(other.value.func.value) == ast.dump(loss)
                and ast.unparse(other.value).endswith(ast.unparse(backward).partition(".backward")[2])
            )
            alone = owner.body == [block] and len(owner.orelse) == 1
            if same and alone and not self._script.text.source(owner).startswith("elif"):
                return owner
            if (
                any(has_backward(each) for each in owner.orelse)
                and bare(owner.test) not in self._script.package.conditions
            ):
                self._script.say(owner, "scale_loss is under another condition than amp.initialize")
        return block

    def _step(self, whole: ast.stmt, optimizer: str) -> None:
        scaler = self._script.scaler(optimizer)
        tests = [ast.dump(each.test) for each in self._script.around.conditions(whole)]
        first = True
        for block, i in self._script.around.path(whole):
            for later in block[i + 1 :]:
                steps = [each for each in ast.walk(later) if self._script.is_step(each, optimizer)]
                if not steps:
                    first = False
                    continue
                if len(steps) > 1 or id(steps[0]) in self._steps:
                    self._script.say(steps[0], "several backward passes or several places of one step")
                    return
                step = steps[0]
                assert isinstance(step, ast.Expr)
                conditions = []
                owner = self._script.around.owners[id(step)]
                while step is not later and owner is not self._script.around.owners[id(later)]:
                    conditions.append(owner)
                    owner = self._script.around.owners[id(owner)]
                several = [
                    each
                    for each in conditions
                    if not isinstance(each, ast.With)
                    if not isinstance(each, ast.If) or ast.dump(each.test) not in tests
                ]
                if several and not (
                    self._script.package.accumulation and all(isinstance(each, ast.If) for each in several)
                ):
                    said = "a step of several backward passes: Apex moves its loss scale after each, a GradScaler once"
                    self._script.say(step, f"{said} (--accumulation rewrites it all the same)")
                    return
                unscale = f"{scaler}.unscale_({optimizer})"
                if several and self._script.around.places[id(step)][1] > 0:
                    self._script.text.before(self._script.around.places[id(step)][0][0], unscale)
                elif not several and not (first and step is later):
                    self._script.text.after(whole, unscale)
                self._steps[id(step)] = step
                self._script.text.put(step, f"{scaler}.step({optimizer})")
                self._script.text.after(step, f"{scaler}.update()")
                return
        self._script.say(
            whole, f"no {optimizer}.step() after it in the same loop, which would become one of a GradScaler"
        )

    def _unscaled(self, blocks: list[ast.With]) -> None:
        """Refuse steps of gradients that would be unscaled, and were never scaled."""
        functions = {id(self._script.around.function(block)) for block in blocks}
        functions |= {id(start.function or self._script.tree) for start in self._script.starts if start.optimizer}
        inside = {id(part) for block in blocks for part in ast.walk(block)}
        for block in blocks:
            for owner in self._script.around.around(block):
                if isinstance(owner, ast.If):
                    inside |= {id(part) for each in owner.orelse for part in ast.walk(each)}
        for node in ast.walk(self._script.tree):
            if (
                id(node) in inside
                or not isinstance(node, ast.stmt)
                or id(self._script.around.function(node)) not in functions
            ):
                continue
            if isinstance(node, ast.Expr) and has_backward(node):
                self._script.say(node, "a backward pass without scale_loss; put one around it")
            step = isinstance(node, ast.Expr) and self._script.is_step(node, *self._script.optimizers())
            if step and id(node) not in self._steps and not self._script.problems:
                self._script.say(node, "a step of the optimizer without scale_loss before it")
            value = node.value if isinstance(node, (ast.Return, ast.Assign)) else None
            if value is not None and self._script.is_step(ast.Expr(value), *self._script.optimizers()):
                self._script.say(node, "optimizer.step whose result is used")
