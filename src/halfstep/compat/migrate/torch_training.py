"""``initialize``, ``scale_loss`` and ``step`` become calls of a GradScaler, and what computes a loss gets autocast."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from .scopes import dotted_text
from .torch_autocast import Autocast
from .torch_passes import Pass, read_passes, unscaled_passes
from .torch_scales import replace_scales
from .torch_script import Package, Script, bare, last_part
from .torch_starts import read_starts, write_start
from .torch_steps import Steps, apart

__all__ = ["Training"]

_RUNS = (
    "apex.amp.scale_loss",
    "apex.amp.master_params",
    "apex.amp.state_dict",
    "apex.amp.load_state_dict",
    "apex.amp._amp_state.loss_scalers",
)


class Training:
    """The training in files that belong together.

    ``torch_starts``, ``torch_passes``, ``torch_steps`` and ``torch_autocast`` have its parts.

    Args:
        package: the files.
        scripts: those that use Apex.
    """

    def __init__(self, package: Package, scripts: Sequence[Script]) -> None:
        self._package, self._scripts = package, scripts
        self._autocast, self._steps = Autocast(package), Steps(package)
        self._passes: list[Pass] = []

    def read(self) -> None:
        """Find the training steps, and what the files know of each other."""
        package = self._package
        for script in self._scripts:
            read_starts(script)
            self._tell(script)
        for script in self._scripts:
            self._name_models(script)
        started = any(use.name == "apex.amp.initialize" for script in self._scripts for use in script.names.uses)
        for script in self._scripts:
            used = {use.name for use in script.names.uses}
            if not started and "apex.amp.scale_loss" in used:
                said = "there is no amp.initialize here, which says what is trained at which level"
                script.say(script.tree.body[0], said)
            self._passes += read_passes(script)
        if not self._passes and package.optimizers:
            for script in self._scripts:
                self._passes += unscaled_passes(script)
            starts = {id(start.function or script.tree) for script in self._scripts for start in script.starts}
            package.shared |= any(id(each.script.around.function(each.whole)) not in starts for each in self._passes)
        for each in self._passes:
            self._lead_to(each.script.around.function(each.whole))
        self._refuse_mixed()
        if package.options.each_pass:
            self._passes += [
                each for script in self._scripts for each in unscaled_passes(script, apart(script, self._passes))
            ]
        for each in self._passes:
            if not package.options.each_pass:
                self._steps.find(each)
            off = any(start.level.enabled == "False" for start in each.script.starts) and not package.shared
            if not off and not self._autocast.cover(each):
                said = "no call of the model before it that can be found; put autocast around that"
                each.script.say(each.whole, said)

    def _refuse_mixed(self) -> None:
        """Refuse several loss scales that are not one for each optimizer, where each optimizer has its own."""
        package = self._package
        if package.losses == 1 or package.listed or package.options.accumulation:
            return
        scaled = [each for each in self._passes if each.scaled is not None]
        pairs = {(each.optimizer.rpartition(".")[2], each.loss_id) for each in scaled}
        if any(len({pair[i] for pair in pairs}) < len(pairs) for i in (0, 1)):
            for each in scaled:
                each.script.say(each.whole, "loss scales (loss_id) that are not one for each optimizer")

    def _tell(self, script: Script) -> None:
        package = self._package
        for start in script.starts:
            package.models |= {last_part(name) for pair in start.models for name in pair}
            package.optimizers |= {last_part(name) for name, _ in start.optimizers}
            package.conditions |= {bare(each.test) for each in script.around.conditions(start.node)}
            names = {name for name, _ in start.optimizers}
            package.losses = max(package.losses, start.level.losses)
            package.shared |= start.level.losses > 1 and len(names) > 1 and not package.options.each_pass
            package.shared |= any(
                {name for name, _ in other.optimizers} != names
                for other in script.starts
                if other.function is start.function and other.optimizers and names
            )
        training = {start.function for start in script.starts if start.optimizers}
        package.shared |= any(use.name in _RUNS and use.function not in training for use in script.names.uses)

    def _name_models(self, script: Script) -> None:
        """Other names of models: ``net`` in ``net = DDP(model)`` and ``for net in models``, and parameters."""
        models, before = self._package.models, -1
        pairs: list[tuple[ast.expr, ast.expr]] = []
        for node in ast.walk(script.tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                value = node.value
                made = isinstance(value, ast.Call) and last_part(dotted_text(value.func) or "")[:1].isupper()
                values = value.args if made and isinstance(value, ast.Call) else [value]
                pairs += [(node.targets[0], each) for each in values]
            elif isinstance(node, (ast.For, ast.AsyncFor)):
                pairs.append((node.target, node.iter))
        for _, site in self._package.calls.called(script, script.tree):
            pairs += [(ast.Name(name), given) for name, given in site.arguments.items()]
        plain = (ast.Name, ast.Attribute, ast.Subscript)
        named = [each for each in pairs if isinstance(each[0], plain) and isinstance(each[1], plain)]
        while before < len(models):
            before = len(models)
            models |= {last_part(ast.unparse(new)) for new, old in named if last_part(ast.unparse(old)) in models}

    def _lead_to(self, function: ast.AST) -> None:
        """Note the functions through which a backward pass comes."""
        training = self._package.training
        if id(function) not in training and isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            training.add(id(function))
            self._package.names.add(function.name)
            for site in self._package.calls.callers(function, read=False):
                self._lead_to(site.file.around.function(site.call))

    def write(self) -> None:
        """Collect the changes."""
        for script in self._scripts:
            replace_scales(script)
            for start in script.starts:
                if start.optimizers:
                    write_start(script, start)
                else:
                    self._autocast.inference(script, start)
        for each in self._passes:
            each.write()
        if self._package.options.each_pass:
            return
        self._steps.write()
        for script in self._scripts:
            self._steps.check(script, self._passes)

    def write_names(self, script: Script, gone: set[int]) -> None:
        """Replace the other functions of amp; the statements with ids in ``gone`` are not in the new text."""
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

    def indent(self, script: Script, inside_strings: set[int]) -> None:
        """Put the blocks of autocast into the text."""
        self._autocast.write(script, inside_strings)
