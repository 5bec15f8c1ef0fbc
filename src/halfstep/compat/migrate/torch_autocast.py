"""The statements that compute under ``torch.autocast``: from the call of a model to the loss."""

from __future__ import annotations

import ast

from .torch_script import Script, Start
from .torch_tree import BLOCKS, Function

__all__ = ["Autocast"]


class Autocast:
    """The blocks of autocast in a file."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._blocks: list[tuple[ast.stmt, ast.stmt, str]] = []  # first and last statement, and what comes around

    def before(self, whole: ast.stmt, scaler: str) -> None:
        """Cover what computes a loss, from the call of the model to the backward pass, also in the blocks inside."""
        script = self._script
        enabled = "" if script.always_on() else f", enabled={scaler}.is_enabled()"
        if any(start.level.enabled == "False" for start in script.starts) and not script.package.shared:
            return
        header = f'with torch.autocast("cuda", dtype=torch.float16{enabled}):'
        found = []
        for block, i in script.around.path(whole):
            begin = max((j + 1 for j in range(i) if script.ends_a_step(block[j])), default=0)
            model = next((j for j in range(begin, i) if script.runs_a_model(block[j])), None)
            if model is not None or begin < i:
                found.append((block[begin if model is None else model], block[i - 1], header))
            if model is not None:
                self._blocks += found
                return
        script.say(whole, "no call of the model before it in the same loop; put autocast around that")

    def inference(self, start: Start) -> None:
        """Replace an ``amp.initialize`` of a model that is not trained, and cover its calls."""
        script = self._script
        enabled, (target,), (given,) = start.level.enabled, start.targets, start.given
        block, _ = script.around.places[id(start.node)]
        if enabled not in ("True", "False"):
            script.say(start.node, "the level of a model that is not trained cannot be read here")
        elif not isinstance(script.around.owners[id(start.node)], (*Function, ast.Module)):
            script.say(start.node, "amp.initialize of a model that is not trained, under a condition")
        elif enabled == "True" and not self._rest(block):
            script.say(start.node, "the model is not called in the same function; put autocast around where it is")
        script.text.lines(start.node, [f"{target} = {given}"] if target != given else [])

    def _rest(self, block: list[ast.stmt]) -> bool:
        """Put autocast from the first call of a model to the end of each block; whether there was one."""
        found = False
        for each in block:
            inner = [getattr(each, name, []) for name in BLOCKS]
            inner += [handler.body for handler in getattr(each, "handlers", [])]
            leave = set() if not any(inner) else {id(part) for b in inner for part in b}
            if self._script.runs_a_model(each, leave) and not isinstance(each, Function):
                self._blocks.append((each, block[-1], 'with torch.autocast("cuda", dtype=torch.float16):'))
                return True
            if not isinstance(each, (*Function, ast.ClassDef)):
                for part in inner:
                    found |= self._rest(part)
        return found

    def indent(self, inside_strings: set[int]) -> None:
        """Put the blocks into the text."""
        for first, last, header in self._blocks:
            self._script.text.around(first, last, header, inside_strings)
        for node in self._script.text.crowded:
            self._script.say(node, "several statements in a line")
