"""``initialize``, ``scale_loss`` and ``step`` become calls of a GradScaler, and what computes a loss gets autocast."""

from __future__ import annotations

import ast

from .names import Problem
from .scopes import Names, dotted_text
from .torch_autocast import Autocast
from .torch_script import Package, Script, bare, last_part
from .torch_starts import read_starts, write_start
from .torch_steps import Steps
from .torch_tree import Statements

__all__ = ["Training"]


class Training:
    """The training of one file: ``torch_starts``, ``torch_steps`` and ``torch_autocast`` have its parts."""

    def __init__(self, tree: ast.Module, text: Statements, names: Names, problems: list[Problem]) -> None:
        self._script = Script(tree, text, names, problems)
        self._autocast = Autocast(self._script)

    def tell(self, package: Package) -> None:
        """Add to what the files know of each other."""
        script = self._script
        read_starts(script)
        for start in script.starts:
            package.models |= {last_part(start.targets[0]), last_part(start.given[0])}
            package.optimizers |= {last_part(name) for name in start.targets[1:]}
            package.conditions |= {bare(each.test) for each in script.around.conditions(start.node)}
        for node in ast.walk(script.tree):  # model = DDP(model)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and node.value.args:
                wrapper = dotted_text(node.value.func) or ""
                inner = dotted_text(node.value.args[0]) or ""
                if wrapper.endswith(("Parallel", "DDP")) and last_part(inner) in package.models:
                    package.models.add(last_part(dotted_text(node.targets[0]) or inner))
        training = {start.function for start in script.starts if start.optimizer}
        runs = ("apex.amp.scale_loss", "apex.amp.master_params", "apex.amp.state_dict", "apex.amp.load_state_dict")
        package.shared |= any(use.name in runs and use.function not in training for use in script.names.uses)

    def rewrite(self, package: Package, gone: set[int]) -> None:
        """Collect the changes; the statements with ids in ``gone`` are not in the new text."""
        script = self._script
        script.package = package
        if not package.models and any(use.name == "apex.amp.scale_loss" for use in script.names.uses):
            script.say(
                script.tree.body[0], "there is no amp.initialize here, which says what is trained at which level"
            )
        for start in script.starts:
            if start.optimizer is None:
                self._autocast.inference(start)
            else:
                write_start(script, start)
        Steps(script, self._autocast).rewrite()
        for node in ast.walk(script.tree):
            if not isinstance(node, ast.Call) or id(node) in gone:
                continue
            name = script.meant.get(id(node.func), "").removeprefix("apex.amp.")
            if name == "master_params" and node.args:
                optimizer = script.text.source(node.args[0])
                script.text.put(node, f'[p for group in {optimizer}.param_groups for p in group["params"]]')
            elif name in ("state_dict", "load_state_dict"):
                owner = script.optimizer_near(node)
                if owner is None:
                    script.say(node, f"amp.{name} where no optimizer is, which would have the GradScaler")
                else:
                    script.text.put(node.func, f"{script.scaler(owner)}.{name}")

    def indent(self, inside_strings: set[int]) -> None:
        """Put the blocks of autocast into the text."""
        self._autocast.indent(inside_strings)
