"""The uses of Apex in a file, and those that torch has no form of: read before ``to_torch`` changes anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from .names import EXTENSIONS, Problem
from .scopes import Names, Use, dotted_text, loose_names, names_of

__all__ = ["PACKAGES", "REPLACED", "Facts", "facts_of"]

PACKAGES = ("apex", *EXTENSIONS)
REPLACED = {"apex.parallel.DistributedDataParallel": "torch.nn.parallel"}
"""The names that torch has too, each with its module."""
_KNOWN = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")
_NOT_IN_TORCH = ("min_loss_scale", "max_loss_scale", "keep_batchnorm_fp32", "master_weights", "enabled")
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Facts:
    """The uses of Apex in a file.

    Attributes:
        roots: the meaning of each name that was imported from it.
        models: how the models under amp are called.
        optimizers: and their optimizers.
        inference: whether nothing is trained.
        enabled: whether there is mixed precision at all.
        problems: the uses for which torch has nothing.
    """

    roots: dict[str, str] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    optimizers: set[str] = field(default_factory=set)
    inference: bool = False
    enabled: bool = True
    problems: list[Problem] = field(default_factory=list)

    def meaning(self, text: str | None) -> str | None:
        """The full name behind a dotted name in the file, "apex.amp.initialize"; None if it is not of Apex."""
        root, dot, rest = (text or "").partition(".")
        return self.roots[root] + dot + rest if root in self.roots else None


def facts_of(tree: ast.Module) -> Facts | None:
    """The facts of a file; None if it does not import Apex."""
    names = names_of(tree, PACKAGES)
    if not names.imports:
        return None
    reading = _Reading(tree, names)
    reading.read()
    return reading.facts


class _Reading:
    def __init__(self, tree: ast.Module, names: Names) -> None:
        self.facts = Facts()
        self._tree = tree
        self._names = names
        self._meant = {id(use.node): use.name for use in names.uses}

    def read(self) -> None:
        """Find the facts."""
        imported = self._imports()
        self._roots()
        starts = [use for use in self._names.uses if use.name == "apex.amp.initialize"]
        scaled = [use for use in self._names.uses if use.name == "apex.amp.scale_loss"]
        self._all_uses(imported, starts)
        if not self._names.uses and not self.facts.problems:
            self._say(
                self._names.imports[0][0],
                "Apex is imported and not used here; see who asks whether the import succeeds",
            )
        if not starts:
            return
        found = [
            node
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Assign) and self._calls(node.value, "initialize")
        ]
        for node in found:
            self._initialize(node)
        if len(found) < len(starts):
            self._say(starts[0].node, "amp.initialize whose result is not assigned to names")
        self.facts.inference = bool(self.facts.models) and not self.facts.optimizers and not scaled
        if self.facts.inference:
            self._inference(found[0])
        else:
            self._training(starts[0], scaled)
        for call in ast.walk(self._tree):
            if isinstance(call, ast.Call) and self._meant.get(id(call.func)) in REPLACED:
                self._wrapper(call)

    # ---- names

    def _imports(self) -> list[tuple[str, int, ast.AST | None]]:
        found = []
        for node, function in self._names.imports:
            for alias in node.names:
                name = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
                if alias.name == "*":
                    self._say(node, f"from {name.removesuffix('.*')} import *: say which names")
                elif name not in ("apex", "apex.amp") and name.partition(".")[0] in PACKAGES:
                    found.append((name, node.lineno, function))
        return found

    def _roots(self) -> None:
        for use in self._names.uses:
            root = use.text.partition(".")[0]
            meant = use.name[: len(use.name) - len(use.text) + len(root)]
            if self.facts.roots.setdefault(root, meant) != meant:
                self._say(use.node, f"{root} means two things in this file")
        for line, name in loose_names(self._tree, self._names, set(self.facts.roots)):
            self.facts.problems.append((line, f"{name} means something else here than what was imported"))
        for node in self._names.rebound:
            self._say(node, f"{node.id} is set to something else; there is no import of Apex to fail with torch.amp")

    def _all_uses(self, imported: list[tuple[str, int, ast.AST | None]], starts: list[Use]) -> None:
        say, uses = self.facts.problems, self._names.uses
        amp_uses = [use for use in uses if use.name.startswith("apex.amp.")]
        if len(starts) > 1:
            say.append(
                (starts[1].node.lineno, "a second amp.initialize: its loss scale would need a GradScaler of its own")
            )
        functions = {use.function for use in amp_uses}
        first = starts[0].function if starts else None
        if len(functions - {None}) > 1 or (starts and first is not None and functions != {first}):
            line = min(use.node.lineno for use in amp_uses if use.function is not first)
            say.append((line, "amp is used in several functions; hand a GradScaler from one to the other yourself"))
        for name, line, _ in [*imported, *((use.name, use.node.lineno, use.function) for use in uses)]:
            if name.startswith("apex.amp.") and name.removeprefix("apex.amp.") not in _KNOWN:
                say.append((line, f"{name} has no counterpart in torch.amp"))
            elif not name.startswith("apex.amp") and name not in (*REPLACED, "apex"):
                say.append((line, f"{name} has no counterpart in torch; halfstep has it (--to halfstep)"))
        if starts and not any(
            isinstance(node, ast.Import) and any(a.name == "torch" and not a.asname for a in node.names)
            for node in ast.walk(self._tree)
        ):
            say.append((starts[0].node.lineno, "torch is not imported by its name; add `import torch`"))
        if not starts and amp_uses:
            line = min(node.lineno for node, _ in self._names.imports)
            say.append((line, "there is no amp.initialize in this file, which says what is trained at which level"))

    # ---- initialize

    def _initialize(self, node: ast.Assign) -> None:
        call = node.value
        assert isinstance(call, ast.Call)
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if None in given or len(call.args) > 2 or any(isinstance(arg, ast.Starred) for arg in call.args):
            self._say(node, "amp.initialize with arguments that cannot be read here")
            return
        arguments = [*call.args, *(given[name] for name in ("models", "optimizers") if name in given)]
        target = node.targets[0]
        names = [dotted_text(e) for e in (target.elts if isinstance(target, ast.Tuple) else [target])]
        several = any(isinstance(value, (ast.List, ast.Tuple)) for value in arguments)
        if several or len(node.targets) > 1 or None in names or not 1 <= len(names) <= 2:
            self._say(node, "amp.initialize of several models or optimizers")
            return
        if len(names) == 2 and [dotted_text(argument) for argument in arguments] != names:
            self._say(node, "amp.initialize gives the model or the optimizer another name")
        self.facts.models.add(str(names[0]))
        self.facts.optimizers.update(str(name) for name in names[1:])
        self._options(node, given)

    def _options(self, node: ast.Assign, given: dict[str | None, ast.expr]) -> None:
        for name, option in given.items():
            value = option.value if isinstance(option, ast.Constant) else None
            if name == "opt_level":
                if value not in ("O0", "O1"):
                    said = "O2 and O3 keep 16-bit weights" if value in ("O2", "O3") else "the level cannot be read here"
                    self._say(node, f"{said}; torch.amp has nothing for that, halfstep has (--to halfstep)")
                self.facts.enabled = value != "O0"
            elif name == "num_losses" and value != 1:
                self._say(node, "num_losses: each loss would need a GradScaler of its own")
            elif name == "loss_scale" and value != "dynamic":
                self._say(node, "a static loss_scale: GradScaler has none")
            elif name in _NOT_IN_TORCH:
                self._say(node, f"{name} has no counterpart in torch.amp")

    # ---- training, or not

    def _inference(self, start: ast.Assign) -> None:
        whole = [self._tree, *(node for node in ast.walk(self._tree) if isinstance(node, _Function))]
        scope = next((node for node in whole if start in node.body), None)
        if scope is None:
            self._say(start, "amp.initialize of a model that is not trained, under a condition")
        elif self.facts.enabled and not any(self._runs_a_model(node) for node in scope.body):
            self._say(start, "the model is not called in the same function; put autocast around where it is")

    def _training(self, start: Use, scaled: list[Use]) -> None:
        if not scaled:
            self._say(start.node, "there is no scale_loss in this file, which says what is trained")
        seen = 0
        for block in self._blocks():
            for i, node in enumerate(block):
                if not (isinstance(node, ast.With) and self._calls(node.items[0].context_expr, "scale_loss")):
                    continue
                seen += len(node.items) == 1
                if not self._only_backward(node):
                    self._say(node, "a scale_loss block that does more than scaled_loss.backward()")
                if self.facts.enabled and not any(self._runs_a_model(before) for before in block[:i]):
                    self._say(node, "no call of the model before it in the same block; put autocast around that")
        if seen < len(scaled):
            self._say(scaled[0].node, "scale_loss other than as a with block of its own")
        self._steps(start)
        clipped = [use for use in self._names.uses if use.name == "apex.amp.master_params"]
        if len(clipped) > 1:
            self._say(clipped[1].node, "a second amp.master_params: GradScaler.unscale_ may be called once for a step")

    def _only_backward(self, node: ast.With) -> bool:
        call, name = node.items[0].context_expr, node.items[0].optional_vars
        statement = node.body[0]
        plain = isinstance(statement, ast.Expr) or (isinstance(statement, ast.Assign) and len(statement.targets) == 1)
        if len(node.body) > 1 or not plain or not isinstance(name, ast.Name):
            return False
        assert isinstance(call, ast.Call)
        assert isinstance(statement, (ast.Expr, ast.Assign))
        backward = isinstance(statement.value, ast.Call) and dotted_text(statement.value.func) == f"{name.id}.backward"
        return backward and len(call.args) == 2 and not call.keywords

    def _steps(self, start: Use) -> None:
        owners = {f"{name}.step" for name in self.facts.optimizers}
        plain = {id(node.value) for node in ast.walk(self._tree) if isinstance(node, ast.Expr)}
        steps = [n for n in ast.walk(self._tree) if isinstance(n, ast.Call) and dotted_text(n.func) in owners]
        for call in steps:
            if call.args or call.keywords:
                self._say(call, "optimizer.step with a closure")
            elif id(call) not in plain:
                self._say(call, "optimizer.step whose result is used")
        if not steps:
            self._say(start.node, "no step of the optimizer in this file, which would become one of a GradScaler")

    def _wrapper(self, call: ast.Call) -> None:
        for keyword in call.keywords:
            if keyword.arg != "delay_allreduce":
                name = keyword.arg or "**"
                self._say(call, f"{name} of apex.parallel.DistributedDataParallel")

    # ---- inside

    def _blocks(self) -> Iterator[list[ast.stmt]]:
        for node in ast.walk(self._tree):
            for name in ("body", "orelse", "finalbody"):
                block = getattr(node, name, None)
                if isinstance(block, list):
                    yield block

    def _runs_a_model(self, node: ast.AST) -> bool:
        return any(
            isinstance(call, ast.Call) and dotted_text(call.func) in self.facts.models for call in ast.walk(node)
        )

    def _calls(self, node: ast.expr, name: str) -> bool:
        return isinstance(node, ast.Call) and self._meant.get(id(node.func)) == f"apex.amp.{name}"

    def _say(self, node: ast.expr | ast.stmt, said: str) -> None:
        self.facts.problems.append((node.lineno, said))
