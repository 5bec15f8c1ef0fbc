"""``optimizer.step`` becomes the step of a GradScaler, and gradients are unscaled before anybody reads them.

Where a GradScaler would do something else than Apex, that is a problem of a script. No user sees it, because the script
is rewritten with ``Options.each_pass`` then.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from .mentions import waits_for_import
from .torch_passes import Pass
from .torch_script import FAR, Package, Script, has_backward, last_part
from .torch_tree import Function

__all__ = ["Steps", "apart"]

_READS = re.compile(r"clip|^grad$|grad_norm|master_params")
"""A name in what reads gradients."""


@dataclass
class _Way:
    """The way from a backward pass to a step: the statements in between.

    Attributes:
        start: the pass.
        behind: statements after the pass that run once for each, such as those of its loop.
        place: the file, the block that both are in, and the places there of the pass and of the step.
        looped: whether a loop is around the pass, and not around the step.
    """

    start: Pass
    behind: list[ast.stmt]
    place: tuple[Script, list[ast.stmt], int, int]
    looped: bool

    @property
    def between(self) -> list[ast.stmt]:
        """The statements between them in the block of both."""
        _, block, i, j = self.place
        return block[i + 1 : j]


@dataclass
class _Step:
    """A step of an optimizer that amp has.

    Attributes:
        script: the file.
        node: the statement.
        optimizer: the optimizer.
        levels: the blocks around it, up to that of the pass, and its place there, from the inside.
        owners: the statements around it, up to the block of the pass.
        ways: the ways to it.
    """

    script: Script
    node: ast.stmt
    optimizer: str
    levels: list[tuple[list[ast.stmt], int]]
    owners: list[ast.stmt]
    ways: list[_Way] = field(default_factory=list)


class Steps:
    """The steps of files that belong together."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._steps: dict[int, _Step] = {}

    def find(self, start: Pass) -> None:
        """Find the steps after a pass: in the same block, after its loop, or in a function that calls this one."""
        if not self._find(start, start.script, start.whole, start.optimizer, [], looped=False, seen=set()):
            start.script.say(start.whole, "no step after it that can be found")

    def _find(
        self,
        start: Pass,
        script: Script,
        node: ast.stmt,
        optimizer: str | None,
        behind: list[ast.stmt],
        *,
        looped: bool,
        seen: set[int],
    ) -> bool:
        """Note the steps after a statement; whether each function that calls this one has one."""
        function = script.around.function(node)
        for block, i, in_loop in script.around.path(node):
            for j in range(i + 1, len(block)):
                found = self._steps_in(script, block[j], optimizer)
                for step in found:
                    way = _Way(start, behind, (script, block, i, j), looped or in_loop)
                    self._steps.setdefault(id(step.node), step).ways.append(way)
                    outside = step.script is not script or script.around.function(step.node) is not function
                    self._package.shared |= start.script is not script or outside or bool(seen)
                if found:
                    return True
            behind = [*behind, *block[i + 1 :]]
        far = id(function) in seen or len(seen) == FAR
        known = []
        for site in [] if far else self._package.calls.callers(function):
            name = site.outside(optimizer, script) if optimizer is not None else None
            statement = site.file.around.statement(site.call)
            around = {*seen, id(function)}
            known.append(self._find(start, site.file, statement, name, behind, looped=looped, seen=around))
        return bool(known) and all(known)

    def _steps_in(self, script: Script, later: ast.stmt, optimizer: str | None) -> list[_Step]:
        """The steps of an optimizer in a statement, or else in the functions that it calls."""
        known = {last_part(optimizer)} if optimizer is not None else self._package.optimizers
        found = self._direct(script, later, lambda text: text == optimizer)
        found = found or self._direct(script, later, lambda text: last_part(text) in known)
        if found:
            return found
        for other, site in self._package.calls.called(script, later):
            if id(site.function) not in self._package.training and isinstance(site.function, ast.FunctionDef):
                for part in site.function.body:
                    for step in self._direct(other, part, lambda text: last_part(text) in self._package.optimizers):
                        step.levels.append((site.function.body, site.function.body.index(part)))
                        call = script.around.statement(site.call)
                        levels, owners = _up_to(script, call, later)
                        step.levels += levels
                        step.owners += owners
                        found.append(step)
        return found

    def _direct(self, script: Script, later: ast.stmt, known: Callable[[str], bool]) -> list[_Step]:
        found = []
        for node in ast.walk(later):
            text = script.stepped(node)
            if isinstance(node, ast.stmt) and text is not None and known(text):
                found.append(_Step(script, node, text, *_up_to(script, node, later)))
        return found

    # ---- the changes

    def write(self) -> None:
        """Collect the changes."""
        for step in self._steps.values():
            several = self._several(step)
            delayed = all(way.start.delay for way in step.ways)
            kinds = (ast.If, ast.With, ast.Try)
            call = step.node.value  # type: ignore[attr-defined]
            if call.args or call.keywords:
                step.script.say(step.node, "optimizer.step with a closure")
            elif several and not (self._package.options.accumulation or delayed):
                step.script.say(step.node, "a step of several backward passes")
            elif not all(isinstance(each, kinds) for each in step.owners):
                step.script.say(step.node, "a step in a loop of its own")
            elif several:
                self._unscale_once(step)
            else:
                for way in step.ways:
                    self._unscale(way, [part for block, i in reversed(step.levels) for part in block[:i]])
            self._refuse_crossed(step)
            scaler = step.script.scaler(step.optimizer)
            step.script.text.put(step.node, f"{scaler}.step({step.optimizer})")
            step.script.text.after(step.node, f"{scaler}.update()")

    def _refuse_crossed(self, step: _Step) -> None:
        """Refuse a step after that of another optimizer with the same GradScaler: ``update`` ends both their passes."""
        starts = [start for script in self._package.calls.files for start in script.starts if start.level.losses == 1]
        groups = [{last_part(name) for name, _ in start.optimizers} for start in starts]
        own = last_part(step.optimizer)
        near = {name for group in groups if own in group for name in group} - {own}
        passed = [part for way in step.ways for each in (*way.behind, *way.between) for part in ast.walk(each)]
        crossed = [text for text in map(step.script.stepped, passed) if text and last_part(text) in near]
        if crossed:
            step.script.say(
                step.node, f"{crossed[0]}.step() is between this step and its pass, and has the same loss scale"
            )

    def _several(self, step: _Step) -> bool:
        """Whether a step may follow several passes."""
        ways = step.ways
        for way in ways:
            script, block, i, _ = way.place
            tests = {ast.dump(each.test) for each in script.around.conditions(block[i])}
            tests |= {ast.dump(each.test) for each in way.start.script.around.conditions(way.start.whole)}
            if way.looped or any(isinstance(each, ast.If) and ast.dump(each.test) not in tests for each in step.owners):
                return True
        starts = [way.start for way in ways]
        return any(
            one.script is not other.script or not one.script.around.exclusive(one.whole, other.whole)
            for i, one in enumerate(starts)
            for other in starts[:i]
            if one is not other
        )

    def _unscale_once(self, step: _Step) -> None:
        """Unscale after all passes of a step, and before gradients are read."""
        last = max(step.ways, key=lambda way: way.place[2])
        conditional = any(isinstance(each, ast.If) for each in step.owners)
        for way in step.ways:
            if _reads(way.behind) or (conditional and not way.looped and _reads(way.between)):
                way.start.script.say(way.start.whole, "gradients are read between several backward passes of a step")
                return
        script, block, i, _ = last.place
        before = [(each, place) for each, place in reversed(step.levels) if place]
        if _reads(last.between) or (last.between and not before and not conditional):
            name = step.optimizer if script is step.script else last.start.optimizer
            script.text.after(block[i], f"{script.scaler(name)}.unscale_({name})")
        elif before:
            each = next((each for each, place in before if _reads(each[:place])), before[-1][0])
            step.script.text.before(each[0], f"{step.script.scaler(step.optimizer)}.unscale_({step.optimizer})")

    def _unscale(self, way: _Way, before: list[ast.stmt]) -> None:
        """Unscale after the only pass of a step, if anything is in between, and where nothing leaves the step out."""
        passed = [*way.behind, *way.between]
        script, block, i, _ = way.place
        around = script.around.function(block[i])
        leaves = [
            j
            for j, each in enumerate(passed)
            if _leaves(each) and id(each) in script.around.owners and script.around.function(each) is around
        ]
        if not leaves:
            if passed or before:
                self._unscale_after(way)
            return
        last = passed[leaves[-1]]
        start, script = way.start, way.start.script
        if _reads(passed[: leaves[-1] + 1]):
            script.say(start.whole, f"line {last.lineno} leaves out the step after gradients are read; read them later")
        elif id(last) not in script.around.owners or script.around.function(start.whole) is not around:
            script.say(start.whole, f"line {last.lineno} of a function that calls this one leaves out the step")
        elif len(passed) > leaves[-1] + 1 or before:
            script.text.after(last, f"{script.scaler(start.optimizer)}.unscale_({start.optimizer})")

    def _unscale_after(self, way: _Way) -> None:
        """Unscale after a pass, once for all ways that begin with it."""
        start = way.start
        if (key := (id(start.whole), "unscale_")) not in start.script.written:
            start.script.written.add(key)
            line = f"{start.script.scaler(start.optimizer)}.unscale_({start.optimizer})"
            start.script.text.after(start.whole, line)

    def check(self, script: Script, passes: Iterable[Pass]) -> None:
        """Refuse steps of gradients that would be unscaled, and were never scaled."""
        optimizers = script.optimizers()
        for node in apart(script, passes):
            if isinstance(node, ast.Expr) and has_backward(node):
                script.say(node, "a backward pass without scale_loss; put one around it")
            if script.stepped(node) in optimizers and id(node) not in self._steps and not script.problems:
                script.say(node, "a step of the optimizer without scale_loss before it")
            value = node.value if isinstance(node, (ast.Return, ast.Assign)) else None
            if value is not None and script.stepped(ast.Expr(value)) in optimizers:
                script.say(node, "optimizer.step whose result is used")


def apart(script: Script, passes: Iterable[Pass]) -> Iterator[ast.stmt]:
    """The statements of functions with amp that run beside its passes, and not instead of one, or without Apex only."""
    wholes = [each.whole for each in passes if each.script is script]
    functions = {id(script.around.function(whole)) for whole in wholes}
    functions |= {id(start.function or script.tree) for start in script.starts if start.optimizers}
    inside = {id(part) for whole in wholes for part in ast.walk(whole)}
    for whole in wholes:
        for owner in script.around.conditions(whole):
            other = owner.orelse if script.around.branch(owner, whole) else owner.body
            inside |= {id(part) for each in other for part in ast.walk(each)}
    for node in ast.walk(script.tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None and waits_for_import(node):
            inside |= {id(part) for part in ast.walk(node)}
    for node in ast.walk(script.tree):
        if isinstance(node, ast.stmt) and id(node) not in inside and id(script.around.function(node)) in functions:
            yield node


def _up_to(script: Script, node: ast.stmt, last: ast.stmt) -> tuple[list[tuple[list[ast.stmt], int]], list[ast.stmt]]:
    """The blocks around a statement inside of another one, its places there, and the statements around it."""
    levels, owners = [], []
    each = node
    while each is not last:
        levels.append(script.around.places[id(each)])
        each = next(script.around.around(each))
        owners.append(each)
    return levels, owners


def _reads(statements: Iterable[ast.stmt]) -> bool:
    """Whether gradients may be read in statements."""
    parts = (part for each in statements for part in ast.walk(each))
    texts = (
        part.attr if isinstance(part, ast.Attribute) else part.id
        for part in parts
        if isinstance(part, (ast.Attribute, ast.Name))
    )
    return any(_READS.search(text) for text in texts)


def _leaves(node: ast.AST, *, in_loop: bool = False) -> bool:
    """Whether a statement may end what is around it; ``break`` and ``continue`` of a loop inside of it do not."""
    if isinstance(node, (ast.Continue, ast.Break)):
        return not in_loop
    if isinstance(node, ast.Return):
        return True
    looped = node.body if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) else []
    inner = [] if isinstance(node, Function) else ast.iter_child_nodes(node)
    return any(_leaves(each, in_loop=in_loop or each in looped) for each in inner)
