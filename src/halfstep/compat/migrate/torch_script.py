"""One of the files that belong together: its tree, its text, and what is known of its models and optimizers."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from .names import Problem
from .scopes import Names, dotted_text
from .torch_names import Level, may_run
from .torch_tree import Statements, Tree

__all__ = ["Package", "Script", "Start", "bare", "has_backward", "last_part"]


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
class Start:
    """A call of ``amp.initialize`` whose result is assigned to names."""

    node: ast.Assign
    function: ast.AST | None
    targets: list[str]
    given: list[str]
    level: Level

    @property
    def optimizer(self) -> str | None:
        """What is trained with; None if nothing is."""
        return self.targets[1] if len(self.targets) > 1 else None


class Script:
    """A file.

    Args:
        tree: its syntax tree.
        text: its text, with the changes to it.
        names: its uses of Apex.
        problems: what cannot be rewritten in it.
    """

    def __init__(self, tree: ast.Module, text: Statements, names: Names, problems: list[Problem]) -> None:
        self.tree, self.text, self.names, self.problems = tree, text, names, problems
        self.around = Tree(tree)
        self.package = Package()
        self.starts: list[Start] = []
        self.meant = {id(use.node): use.name for use in names.uses}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        self._scaler_name = "scaler" if "scaler" not in used else "amp_scaler"

    def scaler(self, optimizer: str) -> str:
        """The GradScaler of an optimizer."""
        return f"{optimizer}.scaler" if self.package.shared else self._scaler_name

    def optimizers(self) -> set[str]:
        """The optimizers that amp has here."""
        texts = {start.optimizer for start in self.starts if start.optimizer}
        calls = (use.node for use in self.names.uses if use.name in ("apex.amp.scale_loss", "apex.amp.master_params"))
        owners = (self.around.owners[id(node)] for node in calls)
        given = (dotted_text(call.args[-1]) for call in owners if isinstance(call, ast.Call) and call.args)
        return texts | {text for text in given if text}

    def optimizer_near(self, node: ast.AST) -> str | None:
        """An optimizer that the function around has."""
        if not self.package.shared:
            return self._scaler_name
        parts = [part for part in ast.walk(self.around.function(node)) if isinstance(part, (ast.Name, ast.Attribute))]
        texts = (dotted_text(part) for part in parts)
        arguments = [part.arg for part in ast.walk(self.around.function(node)) if isinstance(part, ast.arg)]
        known = [text for text in (*texts, *arguments) if text and last_part(text) in self.package.optimizers]
        return next(iter(known), None)

    def always_on(self) -> bool:
        """Whether it is known here that there is mixed precision."""
        starts = (start for start in self.starts if start.optimizer and not self.package.shared)
        known = [start.level.enabled == "True" and not self.around.conditions(start.node) for start in starts]
        return bool(known) and all(known)

    def scales(self, node: ast.With) -> bool:
        """Whether a block is one of ``scale_loss``."""
        call = node.items[0].context_expr
        called = self.meant.get(id(call.func)) if isinstance(call, ast.Call) else None
        return called == "apex.amp.scale_loss" and len(node.items) == 1

    def runs_a_model(self, node: ast.AST, leave: set[int] | None = None) -> bool:
        """Whether a statement may run a model, outside of the statements with ids in ``leave``."""
        if isinstance(node, ast.Call) and may_run(node, self.package.models):
            return True
        inner = (each for each in ast.iter_child_nodes(node) if leave is None or id(each) not in leave)
        return any(self.runs_a_model(each, leave) for each in inner)

    def is_step(self, node: ast.AST, *optimizers: str) -> bool:
        """Whether a statement is a step of one of these optimizers."""
        call = node.value if isinstance(node, ast.Expr) else None
        known = isinstance(call, ast.Call) and dotted_text(call.func) in [f"{each}.step" for each in optimizers]
        if isinstance(call, ast.Call) and known and (call.args or call.keywords):
            self.say(node, "optimizer.step with a closure")
        return known

    def ends_a_step(self, node: ast.stmt) -> bool:
        """Whether a statement has a backward pass, or a step of any optimizer."""
        steps = (call.func for call in ast.walk(node) if isinstance(call, ast.Call))
        owners = ((dotted_text(func) or "").split(".") for func in steps)
        return has_backward(node) or any(
            parts[-1] == "step" and parts[-2:-1] and parts[-2] in self.package.optimizers for parts in owners
        )

    def say(self, node: ast.AST, said: str) -> None:
        """Note what cannot be rewritten."""
        self.problems.append((getattr(node, "lineno", 1), said))


def last_part(text: str) -> str:
    """``model`` of ``self.model``."""
    return text.rpartition(".")[2]


def bare(test: ast.expr) -> str:
    """A condition without what owns its names: ``fp16`` of ``self.args.fp16``."""
    return re.sub(r"\b[A-Za-z_]\w*\.", "", ast.unparse(test))


def has_backward(node: ast.AST) -> bool:
    """Whether a backward pass is in a statement."""
    return any(
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
        for call in ast.walk(node)
    )
