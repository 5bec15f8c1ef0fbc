"""One of the files that belong together: its tree, its text, and what is known of its models and optimizers."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field

from .names import EXTENSIONS, Problem
from .scopes import dotted_text, names_of
from .torch_calls import Calls, File
from .torch_helpers import HELPERS
from .torch_names import Level, may_run
from .torch_tree import Statements

__all__ = ["FAR", "Options", "Package", "Script", "Start", "bare", "has_backward", "last_part"]

FAR = 3
"""The most functions that a model, a backward pass and a step may be apart."""


@dataclass(frozen=True)
class Options:
    """How scripts are rewritten.

    Attributes:
        accumulation: whether a GradScaler may move its scale once for several backward passes of a step.
        o2_as_o1: whether O2 becomes what O1 becomes.
        each_pass: whether gradients are unscaled after each backward pass, so that steps stay as they are.
    """

    accumulation: bool = False
    o2_as_o1: bool = False
    each_pass: bool = False


@dataclass
class Package:
    """The facts that files which belong together know of each other.

    Attributes:
        options: how they are rewritten.
        models: the last parts of the names of models, "model" of ``self.model``.
        optimizers: the last parts of the names of optimizers.
        conditions: the conditions under which amp is on, without what owns their names.
        shared: whether a GradScaler has to go from one function to another.
        losses: the most loss scales that an ``amp.initialize`` has.
        training: the ids of the functions through which a backward pass comes.
        names: the names of these functions.
        calls: which functions call which.
    """

    options: Options
    models: set[str] = field(default_factory=set)
    optimizers: set[str] = field(default_factory=set)
    conditions: set[str] = field(default_factory=set)
    shared: bool = False
    losses: int = 1
    training: set[int] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    calls: Calls[Script] = field(default_factory=Calls)

    @property
    def listed(self) -> bool:
        """Whether the GradScalers are a list, with one for each loss and not for each optimizer."""
        return self.options.each_pass and not self.shared and self.losses > 1


@dataclass
class Start:
    """A call of ``amp.initialize`` whose result is assigned to names.

    Attributes:
        node: the assignment.
        function: the function around it.
        models: the names of the models afterwards, and what was given.
        optimizers: the same for the optimizers.
        level: the options.
        init_scale: the text of the loss scale with which it begins, if that is not Apex's default.
    """

    node: ast.Assign
    function: ast.AST | None
    models: list[tuple[str, str]]
    optimizers: list[tuple[str, str]]
    level: Level
    init_scale: str = ""


class Script(File):
    """A file.

    Args:
        source: its text.
        package: the files that it belongs to.

    Attributes:
        text: the text, with the changes to it.
        names: its uses of Apex.
        problems: what cannot be rewritten in it.
        starts: its calls of ``amp.initialize``.
        helpers: what each function of ``HELPERS`` is called here.
        written: what was added to the text, so that it is added once.
    """

    def __init__(self, source: str, package: Package) -> None:
        super().__init__(ast.parse(source))
        self.source, self.package = source, package
        self.text = Statements(source)
        self.names = names_of(self.tree, ("apex", *EXTENSIONS))
        self.problems: list[Problem] = []
        self.starts: list[Start] = []
        self.written: set[tuple[int, str]] = set()
        self.meant = {id(use.node): use.name for use in self.names.uses}
        used = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        self.helpers = {name: name if name not in source else f"amp_{name}" for name in HELPERS}
        self._scaler_name = "scaler" if "scaler" not in used else "amp_scaler"

    def take_names(self) -> None:
        """Find the uses of names that ``import *`` takes from other files, which import them from Apex."""
        stars = [node for node in self.tree.body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
        if any((node.module or "").partition(".")[0] not in ("torch", "apex") for node in stars):
            others = [script.names.bound for script in self.package.calls.files if script is not self]
            taken = {name: meant for bound in others for name, meant in bound.items()}
            self.names = names_of(self.tree, ("apex", *EXTENSIONS), taken)
            self.meant = {id(use.node): use.name for use in self.names.uses}

    def scaler(self, optimizer: str, loss: str = "0") -> str:
        """The GradScaler of an optimizer, which may have none, or of a loss."""
        if self.package.listed:
            return f"{self._scaler_name}s[{loss}]"
        return f"{self.helpers['scaler_of']}({optimizer})" if self.package.shared else self._scaler_name

    def new_scalers(self, start: Start, argument: str) -> list[str]:
        """Statements that make the GradScalers of an ``amp.initialize``."""
        new = f"torch.amp.GradScaler({argument})"
        if self.package.listed:
            return [f"{self._scaler_name}s = [{new} for _ in range({self.package.losses})]"]
        if not self.package.shared:
            return [f"{self._scaler_name} = {new}"]
        single = [name for name, given in start.optimizers if not given.startswith(("[", "("))]
        targets = list(dict.fromkeys(f"{optimizer}.scaler" for optimizer in single))
        if start.level.losses == 1:  # one loss scale for all
            targets = [" = ".join(targets)]
        return [f"{target} = {new}" for target in targets]

    def optimizers(self) -> set[str]:
        """The optimizers that amp has here."""
        texts = {name for start in self.starts for name, _ in start.optimizers}
        calls = (use.node for use in self.names.uses if use.name in ("apex.amp.scale_loss", "apex.amp.master_params"))
        owners = (self.around.owners[id(node)] for node in calls)
        given = (dotted_text(call.args[-1]) for call in owners if isinstance(call, ast.Call) and call.args)
        return texts | {text for text in given if text}

    def optimizer_near(self, node: ast.AST) -> str | None:
        """An optimizer that the function around has, or the only one of the object whose method it is."""
        if not self.package.shared:
            return self._scaler_name
        function = self.around.function(node)
        parts = [part for part in ast.walk(function) if isinstance(part, (ast.Name, ast.Attribute))]
        texts = (dotted_text(part) for part in parts)
        arguments = [part.arg for part in ast.walk(function) if isinstance(part, ast.arg)]
        known = [text for text in (*texts, *arguments) if text and last_part(text) in self.package.optimizers]
        if known:
            return known[0]
        owner, args = self.around.owners.get(id(function)), getattr(function, "args", None)
        if not isinstance(owner, ast.ClassDef) or args is None or not args.args:
            return None
        of = f"{args.args[0].arg}."
        attributes = (dotted_text(part) or "" for part in ast.walk(owner) if isinstance(part, ast.Attribute))
        own = {text for text in attributes if text.startswith(of) and text.removeprefix(of) in self.package.optimizers}
        return own.pop() if len(own) == 1 else None

    def always_on(self) -> bool:
        """Whether it is known here that there is mixed precision."""
        starts = (start for start in self.starts if start.optimizers and not self.package.shared)
        known = [start.level.enabled == "True" and not self.around.conditions(start.node) for start in starts]
        return bool(known) and all(known)

    def scales(self, node: ast.stmt) -> bool:
        """Whether a statement is a block of ``scale_loss``."""
        call = node.items[0].context_expr if isinstance(node, ast.With) and len(node.items) == 1 else None
        return isinstance(call, ast.Call) and self.meant.get(id(call.func)) == "apex.amp.scale_loss"

    def runs_a_model(self, node: ast.AST, leave: set[int] | None = None) -> bool:
        """Whether a statement may run a model, outside of the statements with ids in ``leave``."""
        if isinstance(node, ast.Call) and may_run(node, self.package.models):
            return True
        inner = (each for each in ast.iter_child_nodes(node) if leave is None or id(each) not in leave)
        return any(self.runs_a_model(each, leave) for each in inner)

    def stepped(self, node: ast.AST) -> str | None:
        """The optimizer whose ``step`` a statement calls; None if it calls none."""
        call = node.value if isinstance(node, ast.Expr) else None
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
            return None
        return ast.unparse(call.func.value)

    def ends_a_step(self, node: ast.stmt) -> bool:
        """Whether a statement has a backward pass, or a step of any optimizer, or calls a function that has one."""
        steps = [call.func for call in ast.walk(node) if isinstance(call, ast.Call)]
        owners = [(dotted_text(func) or "").split(".") for func in steps]
        if any(parts[-1] in self.package.names for parts in owners):
            return True
        return has_backward(node) or any(
            parts[-1] == "step" and parts[-2:-1] and parts[-2] in self.package.optimizers for parts in owners
        )

    def say(self, node: ast.AST, said: str) -> None:
        """Note what cannot be rewritten."""
        self.problems.append((getattr(node, "lineno", 1), said))


def last_part(text: str) -> str:
    """``models`` of ``self.models[0]``."""
    return text.partition("[")[0].rpartition(".")[2]


def bare(test: ast.expr) -> str:
    """A condition without what owns its names: ``fp16`` of ``self.args.fp16``."""
    return re.sub(r"\b[A-Za-z_]\w*\.", "", ast.unparse(test))


def has_backward(node: ast.AST) -> bool:
    """Whether a backward pass is in a statement."""
    return any(
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "backward"
        for call in ast.walk(node)
    )
