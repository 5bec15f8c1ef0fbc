"""``initialize``, ``scale_loss`` and ``step`` become calls of a GradScaler, and what computes a loss gets autocast."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from .names import Problem
from .scopes import Names, dotted_text
from .torch_names import Level, level_of, may_run
from .torch_tree import BLOCKS, Function, Statements, Tree

__all__ = ["Package", "Training"]


@dataclass
class Package:
    """The facts that files which belong together know of each other.

    Attributes:
        models: the last parts of the names of models, "model" of ``self.model``.
        optimizers: the last parts of the names of optimizers.
        conditions: the conditions under which amp is on, without what owns their names.
        shared: whether a GradScaler has to go from one function to another.
        accumulation: whether a step of several backward passes is rewritten.
    """

    models: set[str] = field(default_factory=set)
    optimizers: set[str] = field(default_factory=set)
    conditions: set[str] = field(default_factory=set)
    shared: bool = False
    accumulation: bool = False


@dataclass
class _Start:
    """A call of ``amp.initialize`` whose result is assigned to names."""

    node: ast.Assign
    function: ast.AST | None
    targets: list[str]
    given: list[str]
    level: Level

    @property
    def optimizer(self) -> str | None:
        return self.targets[1] if len(self.targets) > 1 else None


class Training:
    """The training steps of one file."""

    def __init__(self, tree: ast.Module, text: Statements, names: Names, problems: list[Problem]) -> None:
        self._tree = tree
        self._text, self._names, self._problems = text, names, problems
        self._meant = {id(use.node): use.name for use in names.uses}
        self._around = Tree(tree)
        self._package = Package()
        self._starts: list[_Start] = []
        self._scaler_name = "scaler"
        self._autocast: list[tuple[ast.stmt, ast.stmt, str]] = []  # first and last statement, and what comes around
        self._steps: dict[int, ast.stmt] = {}  # the steps that were rewritten

    # ---- what the other files have to know

    def tell(self, package: Package) -> None:
        """Add to what the files know of each other."""
        used = {node.id for node in ast.walk(self._tree) if isinstance(node, ast.Name)}
        self._scaler_name = "scaler" if "scaler" not in used else "amp_scaler"
        for use in self._names.uses:
            if use.name == "apex.amp.initialize":
                start = self._read(use.node, use.function)
                if start is not None:
                    self._starts.append(start)
        for start in self._starts:
            package.models |= {_last(start.targets[0]), _last(start.given[0])}
            package.optimizers |= {_last(name) for name in start.targets[1:]}
            package.conditions |= {_bare(each.test) for each in self._around.conditions(start.node)}
        for node in ast.walk(self._tree):  # model = DDP(model)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
                wrapper = dotted_text(node.value.func) or ""
                inner = dotted_text(node.value.args[0]) or ""
                if wrapper.endswith(("Parallel", "DDP")) and _last(inner) in package.models:
                    package.models.add(_last(dotted_text(node.targets[0]) or inner))
        training = {start.function for start in self._starts if start.optimizer}
        runs = ("apex.amp.scale_loss", "apex.amp.master_params", "apex.amp.state_dict", "apex.amp.load_state_dict")
        package.shared |= any(use.name in runs and use.function not in training for use in self._names.uses)

    def _read(self, node: ast.AST, function: ast.AST | None) -> _Start | None:
        call = self._around.owners[id(node)]
        statement = self._around.owners[id(call)]
        if not isinstance(call, ast.Call) or not isinstance(statement, ast.Assign) or len(statement.targets) > 1:
            self._say(node, "amp.initialize whose result is not assigned to names")
            return None
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        if None in named or len(call.args) > 2 or any(isinstance(arg, ast.Starred) for arg in call.args):
            self._say(node, "amp.initialize with arguments that cannot be read here")
            return None
        arguments = [*call.args, *(named[name] for name in ("models", "optimizers") if name in named)]
        target = statement.targets[0]
        targets = [dotted_text(each) for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
        several = any(isinstance(value, (ast.List, ast.Tuple)) for value in arguments)
        if several or None in targets or not 1 <= len(targets) <= 2 or len(arguments) != len(targets):
            self._say(node, "amp.initialize of several models or optimizers")
            return None
        level = level_of(call)
        self._problems += level.problems
        given = [self._text.source(each) for each in arguments]
        return _Start(statement, function, [str(each) for each in targets], given, level)

    # ---- the changes

    def rewrite(self, package: Package, gone: set[int]) -> None:
        """Collect the changes; the statements with ids in ``gone`` are not in the new text."""
        self._package = package
        if not package.models and any(use.name == "apex.amp.scale_loss" for use in self._names.uses):
            self._say(self._tree.body[0], "there is no amp.initialize here, which says what is trained at which level")
        for start in self._starts:
            if start.optimizer is None:
                self._inference(start)
            else:
                self._start(start)
        blocks = [node for node in ast.walk(self._tree) if isinstance(node, ast.With) and self._scales(node)]
        scaled = [use for use in self._names.uses if use.name == "apex.amp.scale_loss"]
        if len(blocks) < len(scaled):
            self._say(scaled[0].node, "scale_loss other than as a with block of its own")
        for block in blocks:
            self._block(block)
        self._unscaled(blocks)
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.Call) or id(node) in gone:
                continue
            name = self._meant.get(id(node.func), "").removeprefix("apex.amp.")
            if name == "master_params" and node.args:
                optimizer = self._text.source(node.args[0])
                self._text.put(node, f'[p for group in {optimizer}.param_groups for p in group["params"]]')
            elif name in ("state_dict", "load_state_dict"):
                owner = self._optimizer_near(node)
                if owner is None:
                    self._say(node, f"amp.{name} where no optimizer is, which would have the GradScaler")
                else:
                    self._text.put(node.func, f"{self._scaler(owner)}.{name}")

    def _start(self, start: _Start) -> None:
        optimizer = str(start.optimizer)
        again = [other for other in self._starts if other.function is start.function and other.optimizer]
        if any(other.targets != start.targets for other in again):
            self._say(start.node, "a second amp.initialize: its loss scale would need a GradScaler of its own")
        scaler = self._scaler(optimizer)
        argument = "" if start.level.enabled == "True" else f"enabled={start.level.enabled}"
        lines = [f"{new} = {old}" for new, old in zip(start.targets, start.given, strict=True) if new != old]
        lines += [*start.level.checks, f"{scaler} = torch.amp.GradScaler({argument})"]
        self._text.lines(start.node, lines)
        outer = self._around.conditions(start.node)
        if outer and start is again[0]:
            others = [
                node
                for node in ast.walk(outer[-1])
                if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)
                if dotted_text(node) == optimizer and self._around.statement(node) is not start.node
            ]
            if others and self._package.shared:
                self._say(others[0], f"{optimizer} is made where amp may be off; make it before that")
            self._text.before(outer[-1], f"{scaler} = torch.amp.GradScaler(enabled=False)")

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
            self._say(block, "a scale_loss block that does more than scaled_loss.backward()")
            return
        assert isinstance(backward, ast.Call)
        scaler = self._scaler(optimizer)
        before = self._text.bytes[self._text.start(statement) : self._text.start(backward)]
        after = self._text.bytes[self._text.end(backward.func) : self._text.end(backward)]
        loss = self._text.source(call.args[0])
        whole = self._with_else(block, call.args[0], backward)
        self._text.lines(whole, [f"{before.decode()}{scaler}.scale({loss}).backward{after.decode()}"])
        self._cast(whole, scaler)
        self._step(whole, optimizer)

    def _with_else(self, block: ast.With, loss: ast.expr, backward: ast.Call) -> ast.stmt:
        """The statement to rewrite: also ``if amp: ... else: loss.backward()`` around the block."""
        for owner in self._around.around(block):
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
            if same and alone and not self._text.source(owner).startswith("elif"):
                return owner
            if any(_backward(each) for each in owner.orelse) and _bare(owner.test) not in self._package.conditions:
                self._say(owner, "scale_loss is under another condition than amp.initialize")
        return block

    def _cast(self, whole: ast.stmt, scaler: str) -> None:
        """Put autocast around what computes a loss, from the call of the model on, also in the blocks inside."""
        enabled = "" if self._always_on() else f", enabled={scaler}.is_enabled()"
        if any(start.level.enabled == "False" for start in self._starts) and not self._package.shared:
            return
        header = f'with torch.autocast("cuda", dtype=torch.float16{enabled}):'
        found = []
        for block, i in self._around.path(whole):
            begin = max((j + 1 for j in range(i) if self._ends_a_step(block[j])), default=0)
            model = next((j for j in range(begin, i) if self._runs_a_model(block[j])), None)
            if model is not None or begin < i:
                found.append((block[begin if model is None else model], block[i - 1], header))
            if model is not None:
                self._autocast += found
                return
        self._say(whole, "no call of the model before it in the same loop; put autocast around that")

    def _step(self, whole: ast.stmt, optimizer: str) -> None:
        scaler = self._scaler(optimizer)
        tests = [ast.dump(each.test) for each in self._around.conditions(whole)]
        first = True
        for block, i in self._around.path(whole):
            for later in block[i + 1 :]:
                steps = [each for each in ast.walk(later) if self._is_step(each, optimizer)]
                if not steps:
                    first = False
                    continue
                if len(steps) > 1 or id(steps[0]) in self._steps:
                    self._say(steps[0], "several backward passes or several places of one step")
                    return
                step = steps[0]
                assert isinstance(step, ast.Expr)
                conditions = []
                owner = self._around.owners[id(step)]
                while step is not later and owner is not self._around.owners[id(later)]:
                    conditions.append(owner)
                    owner = self._around.owners[id(owner)]
                several = [
                    each
                    for each in conditions
                    if not isinstance(each, ast.With)
                    if not isinstance(each, ast.If) or ast.dump(each.test) not in tests
                ]
                if several and not (self._package.accumulation and all(isinstance(each, ast.If) for each in several)):
                    said = "a step of several backward passes: Apex moves its loss scale after each, a GradScaler once"
                    self._say(step, f"{said} (--accumulation rewrites it all the same)")
                    return
                unscale = f"{scaler}.unscale_({optimizer})"
                if several and self._around.places[id(step)][1] > 0:
                    self._text.before(self._around.places[id(step)][0][0], unscale)
                elif not several and not (first and step is later):
                    self._text.after(whole, unscale)
                self._steps[id(step)] = step
                self._text.put(step, f"{scaler}.step({optimizer})")
                self._text.after(step, f"{scaler}.update()")
                return
        self._say(whole, f"no {optimizer}.step() after it in the same loop, which would become one of a GradScaler")

    def _unscaled(self, blocks: list[ast.With]) -> None:
        """Refuse steps of gradients that would be unscaled, and were never scaled."""
        functions = {id(self._around.function(block)) for block in blocks}
        functions |= {id(start.function or self._tree) for start in self._starts if start.optimizer}
        inside = {id(part) for block in blocks for part in ast.walk(block)}
        for block in blocks:
            for owner in self._around.around(block):
                if isinstance(owner, ast.If):
                    inside |= {id(part) for each in owner.orelse for part in ast.walk(each)}
        for node in ast.walk(self._tree):
            if id(node) in inside or not isinstance(node, ast.stmt) or id(self._around.function(node)) not in functions:
                continue
            if isinstance(node, ast.Expr) and _backward(node):
                self._say(node, "a backward pass without scale_loss; put one around it")
            step = isinstance(node, ast.Expr) and self._is_step(node, *self._optimizers())
            if step and id(node) not in self._steps and not self._problems:
                self._say(node, "a step of the optimizer without scale_loss before it")
            value = node.value if isinstance(node, (ast.Return, ast.Assign)) else None
            if value is not None and self._is_step(ast.Expr(value), *self._optimizers()):
                self._say(node, "optimizer.step whose result is used")

    def _inference(self, start: _Start) -> None:
        enabled, (target,), (given,) = start.level.enabled, start.targets, start.given
        block, _ = self._around.places[id(start.node)]
        if enabled not in ("True", "False"):
            self._say(start.node, "the level of a model that is not trained cannot be read here")
        elif not isinstance(self._around.owners[id(start.node)], (*Function, ast.Module)):
            self._say(start.node, "amp.initialize of a model that is not trained, under a condition")
        elif enabled == "True" and not self._cast_rest(block):
            self._say(start.node, "the model is not called in the same function; put autocast around where it is")
        self._text.lines(start.node, [f"{target} = {given}"] if target != given else [])

    def _cast_rest(self, block: list[ast.stmt]) -> bool:
        """Put autocast from the first call of a model to the end of each block; whether there was one."""
        found = False
        for each in block:
            inner = [getattr(each, name, []) for name in BLOCKS]
            inner += [handler.body for handler in getattr(each, "handlers", [])]
            calls = self._runs_a_model(each, set() if not any(inner) else {id(part) for b in inner for part in b})
            if calls and not isinstance(each, Function):
                header = 'with torch.autocast("cuda", dtype=torch.float16):'
                self._autocast.append((each, block[-1], header))
                return True
            if not isinstance(each, (*Function, ast.ClassDef)):
                for part in inner:
                    found |= self._cast_rest(part)
        return found

    def indent(self, inside_strings: set[int]) -> None:
        """Put the blocks of autocast into the text."""
        for first, last, header in self._autocast:
            self._text.around(first, last, header, inside_strings)
        for node in self._text.crowded:
            self._say(node, "several statements in a line")

    # ---- the tree

    def _scales(self, node: ast.With) -> bool:
        call = node.items[0].context_expr
        called = self._meant.get(id(call.func)) if isinstance(call, ast.Call) else None
        return called == "apex.amp.scale_loss" and len(node.items) == 1

    def _runs_a_model(self, node: ast.AST, leave: set[int] | None = None) -> bool:
        """Whether a statement may run a model, outside of the statements with ids in ``leave``."""
        if isinstance(node, ast.Call) and may_run(node, self._package.models):
            return True
        inner = (each for each in ast.iter_child_nodes(node) if leave is None or id(each) not in leave)
        return any(self._runs_a_model(each, leave) for each in inner)

    def _is_step(self, node: ast.AST, *optimizers: str) -> bool:
        call = node.value if isinstance(node, ast.Expr) else None
        known = isinstance(call, ast.Call) and dotted_text(call.func) in [f"{each}.step" for each in optimizers]
        if isinstance(call, ast.Call) and known and (call.args or call.keywords):
            self._say(node, "optimizer.step with a closure")
        return known

    def _ends_a_step(self, node: ast.stmt) -> bool:
        steps = (call.func for call in ast.walk(node) if isinstance(call, ast.Call))
        owners = ((dotted_text(func) or "").split(".") for func in steps)
        return _backward(node) or any(
            parts[-1] == "step" and parts[-2:-1] and parts[-2] in self._package.optimizers for parts in owners
        )

    def _optimizers(self) -> set[str]:
        texts = {start.optimizer for start in self._starts if start.optimizer}
        calls = (use.node for use in self._names.uses if use.name in ("apex.amp.scale_loss", "apex.amp.master_params"))
        owners = (self._around.owners[id(node)] for node in calls)
        given = (dotted_text(call.args[-1]) for call in owners if isinstance(call, ast.Call) and call.args)
        return texts | {text for text in given if text}

    def _optimizer_near(self, node: ast.AST) -> str | None:
        """An optimizer that the function around has."""
        if not self._package.shared:
            return self._scaler_name
        parts = [part for part in ast.walk(self._around.function(node)) if isinstance(part, (ast.Name, ast.Attribute))]
        texts = (dotted_text(part) for part in parts)
        arguments = [part.arg for part in ast.walk(self._around.function(node)) if isinstance(part, ast.arg)]
        known = [text for text in (*texts, *arguments) if text and _last(text) in self._package.optimizers]
        return next(iter(known), None)

    def _scaler(self, optimizer: str) -> str:
        return f"{optimizer}.scaler" if self._package.shared else self._scaler_name

    def _always_on(self) -> bool:
        """Whether it is known here that there is mixed precision."""
        starts = (start for start in self._starts if start.optimizer and not self._package.shared)
        known = [start.level.enabled == "True" and not self._around.conditions(start.node) for start in starts]
        return bool(known) and all(known)

    def _say(self, node: ast.AST, said: str) -> None:
        self._problems.append((getattr(node, "lineno", 1), said))


def _last(text: str) -> str:
    return text.rpartition(".")[2]


def _bare(test: ast.expr) -> str:
    """A condition without what owns its names: ``fp16`` of ``self.args.fp16``."""
    return re.sub(r"\b[A-Za-z_]\w*\.", "", ast.unparse(test))


def _backward(node: ast.AST) -> bool:
    """Whether a backward pass is in a statement."""
    return any(
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
        for call in ast.walk(node)
    )
