"""The statements that compute under ``torch.autocast``: from the call of a model to the loss."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

from .torch_passes import Pass
from .torch_script import FAR, Package, Script, Start, last_part
from .torch_tree import BLOCKS, CROWDED, Function

__all__ = ["Autocast"]


@dataclass
class _Region:
    """Statements of one block, from ``first`` to ``last``."""

    script: Script
    block: list[ast.stmt]
    first: int
    last: int
    optimizer: str | None  # whose GradScaler knows whether amp is on; None if it is

    @property
    def statements(self) -> list[ast.stmt]:
        return self.block[self.first : self.last + 1]


class Autocast:
    """The blocks of autocast in files that belong together."""

    def __init__(self, package: Package) -> None:
        self._package = package
        self._regions: list[_Region] = []

    def cover(self, start: Pass) -> bool:
        """Cover what computes a loss, from the call of the model to the backward pass, also in the blocks inside.

        The model may be called in another function than the backward pass, which the first one calls then.

        Returns:
            Whether there is a call of a model.
        """
        _refuse_computed(start.script, start.whole, ast.parse(start.loss.strip(), mode="eval").body)
        regions = self._before(start.script, start.whole, start.optimizer, set(), _words(start.loss))
        for each in regions or []:
            self._add(each)
        return regions is not None

    def _before(
        self, script: Script, whole: ast.stmt, optimizer: str, seen: set[int], loss: set[str]
    ) -> list[_Region] | None:
        """The regions before a statement that has a loss, made of these names; None without a call of a model."""
        found: list[_Region] = []
        for block, i, _ in script.around.path(whole):
            ends = [j + 1 for j in range(i) if script.ends_a_step(block[j])]
            made = [j + 1 for j in range(i) if block[i] is whole and _stores(block[j], loss)]
            if made and made[-1] < max(ends, default=0):  # other passes are between the loss and its own
                i = made[-1]
            begin = max((j for j in ends if j <= i), default=0)
            model = next((j for j in range(begin, i) if self._runs_a_model(script, block[j], set())), None)
            while begin < i and isinstance(block[begin], (ast.Import, ast.ImportFrom, *Function)):
                begin += 1
            last = i - 1
            while not found and (block[i] is whole or made) and last > (begin if model is None else model):
                if loss & _words(ast.unparse(block[last])):
                    break
                last -= 1  # such as optimizer.zero_grad()
            if model is not None or any(_stores(each, loss) for each in block[begin:i]):
                first = begin if model is None else model
                inside = [] if block[i] is whole else [block[i]]
                if any(_stores(each, {re.split(r"\W", optimizer)[0]}) for each in (*block[first:i], *inside)):
                    return None  # whether amp is on is not known before it
                found.append(_Region(script, block, first, last, optimizer))
            if model is not None:
                return found
        function = script.around.function(whole)
        far = id(function) in seen or len(seen) == FAR
        sites = [] if far else self._package.calls.callers(function)
        for site in sites:
            statement = site.file.around.statement(site.call)
            name = site.outside(optimizer, script) or site.file.optimizer_near(statement)
            given = [site.arguments[each] for each in loss if each in site.arguments]
            for each in given:
                _refuse_computed(site.file, statement, each)
            words = {word for each in given for word in _words(ast.unparse(each))}
            regions = name and self._before(site.file, statement, name, {*seen, id(function)}, words)
            if not regions:
                return None
            found += regions
        return found if sites else None

    def _runs_a_model(self, script: Script, node: ast.AST, seen: set[int]) -> bool:
        """Whether a statement may run a model, also in a function of the files that it calls."""
        if script.runs_a_model(node):
            return True
        found = [(other, site.function) for other, site in self._package.calls.called(script, node)]
        new = [(other, each) for other, each in found if id(each) not in seen and len(seen) < FAR]
        return any(self._runs_a_model(other, each, {*seen, id(each)}) for other, each in new)

    def inference(self, script: Script, start: Start) -> None:
        """Replace an ``amp.initialize`` of a model that is not trained, and cover its calls."""
        enabled = start.level.enabled
        if start.level.half:
            self._halve(script, start)
            return
        block, _ = script.around.places[id(start.node)]
        if enabled not in ("True", "False"):
            script.say(start.node, "the level of a model that is not trained cannot be read here")
        elif not isinstance(script.around.owners[id(start.node)], (*Function, ast.Module)):
            script.say(start.node, "amp.initialize of a model that is not trained, under a condition")
        elif enabled == "True" and not self._rest(script, block):
            script.say(start.node, "the model is not called in the same function; put autocast around where it is")
        script.text.lines(start.node, [f"{new} = {old}" for new, old in start.models if new != old])

    def _halve(self, script: Script, start: Start) -> None:
        """Replace an ``amp.initialize`` at O3, after which a model also takes fp32 inputs."""
        names = {name for name, _ in start.models}
        for node in ast.walk(start.function or script.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                script.say(node, "a model at O3 casts its inputs, and torch does not; call .half() of them")
        script.text.lines(start.node, [f"{new} = {old}.half()" for new, old in start.models])

    def _rest(self, script: Script, block: list[ast.stmt]) -> bool:
        """Put autocast from the first call of a model to the end of each block; whether there was one."""
        found = False
        for i, each in enumerate(block):
            inner = [getattr(each, name, []) for name in BLOCKS]
            inner += [handler.body for handler in getattr(each, "handlers", [])]
            leave = set() if not any(inner) else {id(part) for b in inner for part in b}
            if script.runs_a_model(each, leave) and not isinstance(each, Function):
                self._add(_Region(script, block, i, len(block) - 1, None))
                return True
            if not isinstance(each, (*Function, ast.ClassDef)):
                for part in inner:
                    found |= self._rest(script, part)
        return found

    def _add(self, new: _Region) -> None:
        for old in self._regions:
            if old.block is new.block and old.first <= new.last and new.first <= old.last:
                old.first, old.last = min(old.first, new.first), max(old.last, new.last)
                return
        self._regions.append(new)

    def write(self, script: Script, inside_strings: set[int]) -> None:
        """Put the blocks of a file into its text."""
        own = [each for each in self._regions if each.script is script]
        for each in own:
            others = [part for other in own if other is not each for part in other.statements]
            if not any(part is each.statements[0] for other in others for part in ast.walk(other)):
                enabled = ""
                if each.optimizer is not None and not script.always_on():
                    enabled = f", enabled={script.scaler(each.optimizer)}.is_enabled()"
                header = f'with torch.autocast("cuda", dtype=torch.float16{enabled}):'
                script.text.around(each.block[each.first], each.block[each.last], header, inside_strings)
        for node in script.text.crowded:
            script.say(node, CROWDED)


def _stores(statement: ast.stmt, names: set[str]) -> bool:
    """Whether a statement sets one of these names."""
    return any(
        (part.id if isinstance(part, ast.Name) else part.attr) in names
        for part in ast.walk(statement)
        if isinstance(part, (ast.Name, ast.Attribute)) and isinstance(part.ctx, ast.Store)
    )


def _words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", text))


def _refuse_computed(script: Script, statement: ast.stmt, loss: ast.expr) -> None:
    """Refuse a loss that is computed where no autocast can be around it, but for its mean or sum."""
    calls = [each for each in ast.walk(loss) if isinstance(each, ast.Call)]
    if any(not last_part(ast.unparse(each.func)).endswith(("mean", "sum")) for each in calls):
        said = f"{ast.unparse(loss)} is computed where autocast cannot be around it; give it a name in a line before"
        script.say(statement, said)
