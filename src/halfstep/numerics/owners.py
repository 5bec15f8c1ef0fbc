"""Which module an op belongs to: in a forward pass the one that runs, in a backward pass the one that ran forward.

Autograd numbers the nodes of its graph in the order in which ops make them. So the numbers at which modules begin and
end tell, for any node of the backward pass, which module has made it. Nothing is kept for a single op.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..core.torch_compat import children_of, current_node, next_sequence_number, node_sequence_number

__all__ = ["OPTIMIZER", "OUTSIDE", "ROOT", "Owners", "owner_of", "qualified_names"]

OUTSIDE = "(step)"
"""Where ops are that no module runs: the loss, in most scripts."""

ROOT = "(root)"
"""The model itself."""

OPTIMIZER = "(optimizer)"
"""Where the ops of an optimizer's step are."""

_LEAF = 2**63
"""Nodes of leaves have numbers above this."""

_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def qualified_names(model: nn.Module) -> dict[nn.Module, str]:
    """The names of the modules of a model, as ``Monitor`` has them: "(root)" is the model.

    The wrappers of ``torch.compile`` and of DDP leave no trace in them.
    """
    names = {module: name for name, module in model.named_modules()}
    inside = "module" if isinstance(model, _PARALLEL) else ""
    return {module: _clean(name, inside) or ROOT for module, name in names.items()}


def owner_of(param: str) -> str:
    """The name of the module that has a parameter, by the name of the parameter."""
    return param.rpartition(".")[0] or ROOT


def _clean(name: str, inside: str) -> str:
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if inside and parts[:1] == [inside] else parts)


class Owners:
    """The module of each op.

    Args:
        model: whose modules are told apart, by their qualified names; "(root)" is the model. None tells all modules
            apart that run. Their names then begin with the class of the outermost one.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._names = {} if model is None else qualified_names(model)
        self._leaves = {id(p): name for m, name in self._names.items() for p in m.parameters(recurse=False)}
        self._open: list[tuple[Any, str, bool]] = []
        self._home = threading.get_ident()
        self._starts = [0]
        self._began = [OUTSIDE]

    def now(self) -> tuple[str, bool]:
        """The module of the op that runs, and whether it is an op of a backward pass.

        What a checkpoint computes again belongs to a forward pass.
        """
        node = current_node()
        if node is None:
            return (self._open[-1][1] if self._open else OUTSIDE), False
        if self._open and self._open[-1][2]:
            return self._open[-1][1], False
        number = node_sequence_number(node)
        if number >= _LEAF:
            return self._leaves.get(id(getattr(node, "variable", None)), OUTSIDE), True
        return self._began[bisect_right(self._starts, number) - 1], True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, modules and optimizers are seen when they begin and when they end."""
        hooks: list[RemovableHandle] = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._enter(optimizer, OPTIMIZER)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._leave(optimizer)),
        ]
        # An op that another hook of the module runs, such as a cast of its inputs, is an op of the module.
        for module in self._names:
            hooks.append(module.register_forward_pre_hook(self._enter_module, prepend=True))
            hooks.append(module.register_forward_hook(self._leave_module, always_call=True))
        if self._model is None:
            hooks.append(register_module_forward_pre_hook(self._enter_module))
            hooks.append(register_module_forward_hook(self._leave_module, always_call=True))
        self._mark()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        self._enter(module, self._name(module))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._leave(module)

    def _enter(self, who: Any, name: str) -> None:
        if threading.get_ident() == self._home or current_node() is not None:
            self._open.append((who, name, current_node() is not None))
            self._mark()

    def _leave(self, who: Any) -> None:
        """Close what was opened last, and what an error has left open inside of it."""
        if any(each[0] is who for each in self._open):
            while self._open.pop()[0] is not who:
                pass
            self._mark()

    def _mark(self) -> None:
        """From here on new nodes belong to another module. Other threads have numbers of their own."""
        if threading.get_ident() == self._home:
            number, name = next_sequence_number(), self._open[-1][1] if self._open else OUTSIDE
            if self._starts[-1] == number:
                self._began[-1] = name
            else:
                self._starts.append(number)
                self._began.append(name)

    def _name(self, module: nn.Module) -> str:
        name = self._names.get(module)
        if name is None:
            outer, outer_name = self._open[-1][:2] if self._open else (None, "")
            inside = children_of(outer).items() if isinstance(outer, nn.Module) else ()
            own = next((key for key, child in inside if child is module), type(module).__name__)
            name = f"{outer_name}.{own}" if isinstance(outer, nn.Module) else own
        return name
