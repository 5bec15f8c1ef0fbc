"""``CallWatch``: reports the calls of modules, torch functions and ops of a step as they run.

In a forward pass an op belongs to the running module, in a backward pass to the module whose forward made its node.
Autograd numbers the nodes of its graph in creation order, so the numbers at which modules begin and end identify the
module of any node. Nothing is stored per op.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...formats.measuring import measuring
from ...torch_internals.torch_compat import children_of, current_node, next_sequence_number, node_sequence_number
from .names import OPTIMIZER, OUTSIDE
from .ops import FunctionCall, FunctionMode, OpCall, OpMode

__all__ = ["CallWatch", "Hook", "ModuleCall", "ModuleListener"]

_LEAF = 2**63
"""The number above which the sequence numbers of leaf nodes lie."""


class _CompiledCodeEager:
    """Makes compiled code run eagerly in this process until every context that entered has exited, in any order.

    A stance that other code sets or ends in the meantime is left alone.
    """

    def __init__(self) -> None:
        self._inside = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        self._inside += 1
        if self._inside == 1:
            self._stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *_: object) -> None:
        self._inside -= 1
        if self._inside:
            return
        probe = torch.compiler.set_stance("default")  # the context remembers the previous stance
        probe.__exit__(None, None, None)
        if probe.prev.stance == "force_eager":
            self._stance.__exit__(None, None, None)


compiled_code_eager = _CompiledCodeEager()
"""The context that every watch enters, because compiled code hides modules and ops."""


class ModuleCall:
    """A call of a module, or the step of an optimizer, that has not returned yet.

    Attributes:
        of: the module or optimizer.
        name: the qualified name.
        recomputed: True if a checkpoint recomputes the call in a backward pass.
        note: a free slot for the listener's data about this call.
    """

    __slots__ = ("name", "note", "of", "recomputed")

    def __init__(self, of: Any, name: str, recomputed: bool) -> None:
        self.of, self.name, self.recomputed = of, name, recomputed
        self.note: Any = None


class ModuleListener(Protocol):
    """The interface of a listener to module calls."""

    def entered(self, call: ModuleCall, args: Any, kwargs: Any) -> object:
        """Receive the start of a call, before the module's other hooks run."""

    def returned(self, call: ModuleCall, args: Any, output: Any) -> object:
        """Receive the end of a call; ``output`` is None if an error ended it."""


class CallWatch:
    """A watch of this thread and its backward passes, from ``begin`` to ``end`` or in a ``with`` block.

    Several watches may be active at once and end in any order; use a watch with ``functions`` or ``casts`` in a
    ``with`` block. A watch does not change results, and removes everything that it added. While it is active, compiled
    code runs eagerly, so that modules and ops are visible.

    Args:
        names: the modules to watch, with their names, as from ``qualified_names``. None watches all modules that run;
            their names then begin with the class of the outermost module.
        modules: a listener to module calls.
        functions: a function to call after each torch function, which may run several ops.
        ops: a function to call after each op, below autograd, as it runs on the device. It may read tensors and must
            not change them. Its own ops are not reported. If it raises, reporting ends.
        casts: True if reports of ops include the function that runs them and the origin of casts.
        compute_in: a dtype in which every op and function computes, regardless of casts and factory arguments.

    Attributes:
        running: the unfinished calls of modules, the outermost first.
    """

    def __init__(
        self,
        names: Mapping[nn.Module, str] | None,
        *,
        modules: ModuleListener | None = None,
        functions: Callable[[FunctionCall], object] | None = None,
        ops: Callable[[OpCall], object] | None = None,
        casts: bool = False,
        compute_in: torch.dtype | None = None,
    ) -> None:
        self.running: list[ModuleCall] = []
        self._names = names
        self._modules, self._ops = modules, ops
        self._modes: list[Any] = []
        function_mode = None
        if functions is not None or casts:
            function_mode = FunctionMode(functions, compute_in)
            self._modes.append(function_mode)
        if ops is not None:
            self._modes.append(OpMode(ops, self.now, function_mode, compute_in))
        modules_of_leaves = (names or {}) if ops is not None else {}
        self._leaves = {id(p): name for m, name in modules_of_leaves.items() for p in m.parameters(recurse=False)}
        self._home = threading.get_ident()
        self._starts = [0]
        self._began = [OUTSIDE]
        self._open = ExitStack()

    def begin(self) -> CallWatch:
        """Start the reports."""
        # Compiled code runs no hooks. A process that has not imported the compiler has not compiled anything.
        if self._modes or "torch._dynamo" in sys.modules:
            self._open.enter_context(compiled_code_eager)
        # A listener to modules also measures the rounding of layers with formats.
        self._open.enter_context(nullcontext() if self._modules is None else measuring())
        self._hook_modules()
        if self._ops is not None:
            self._open.callback(register_optimizer_step_pre_hook(self._enter_optimizer).remove)
            self._open.callback(register_optimizer_step_post_hook(self._leave_optimizer).remove)
        self._mark()
        for mode in self._modes:
            self._open.enter_context(mode)
        return self

    def end(self) -> None:
        """Stop for good, and drop the modes, which refer to this watch, so that Python frees its modules at once."""
        self._open.close()
        self._modes.clear()

    def __enter__(self) -> CallWatch:
        return self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def now(self) -> tuple[str, bool]:
        """Return the name of the module of the current op, and True if the op is part of a backward pass.

        Ops that a checkpoint recomputes belong to a forward pass.
        """
        node = current_node()
        if node is None:
            return (self.running[-1].name if self.running else OUTSIDE), False
        if self.running and self.running[-1].recomputed:
            return self.running[-1].name, False
        number = node_sequence_number(node)
        if number >= _LEAF:
            return self._leaves.get(id(getattr(node, "variable", None)), OUTSIDE), True
        return self._began[bisect_right(self._starts, number) - 1], True

    def enter(self, of: Any, name: str) -> ModuleCall:
        """Record the start of a module or optimizer. Call this when a watch begins inside a module."""
        call = ModuleCall(of, name, current_node() is not None)
        if threading.get_ident() == self._home or call.recomputed:
            self.running.append(call)
            self._mark()
        return call

    # ---- inside

    def _hook_modules(self) -> None:
        # An op of another hook of the module, such as a cast of its inputs, is an op of the module.
        for each, name in (self._names or {}).items():
            if not isinstance(each, torch.jit.ScriptModule):
                enter, leave = partial(self._enter_module, name), partial(self._leave_module, name)
                self._open.callback(each.register_forward_pre_hook(Hook(enter), prepend=True, with_kwargs=True).remove)
                self._open.callback(each.register_forward_hook(Hook(leave), always_call=True).remove)
        if self._names is None:
            enter, leave = partial(self._enter_module, None), partial(self._leave_module, None)
            self._open.callback(register_module_forward_pre_hook(enter).remove)
            self._open.callback(register_module_forward_hook(leave, always_call=True).remove)

    def _enter_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.enter(optimizer, OPTIMIZER)

    def _leave_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._leave(optimizer)

    def _enter_module(self, name: str | None, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        call = self.enter(module, self._name(module) if name is None else name)
        if self._modules is not None:
            self._modules.entered(call, args, kwargs or {})

    def _leave_module(self, name: str | None, module: nn.Module, args: Any, output: Any) -> None:
        call = self._leave(module)
        if self._modules is not None:
            call = call or ModuleCall(module, name or type(module).__name__, current_node() is not None)
            self._modules.returned(call, args, output)

    def _leave(self, of: Any) -> ModuleCall | None:
        """Close the last call of a module or optimizer, and inner calls that an error left open."""
        place = next((i for i in reversed(range(len(self.running))) if self.running[i].of is of), None)
        if place is None:
            return None
        call = self.running[place]
        del self.running[place:]
        self._mark()
        return call

    def _mark(self) -> None:
        """Record that new nodes belong to another module from here on. Other threads number their nodes separately."""
        if self._ops is not None and threading.get_ident() == self._home:
            number, name = next_sequence_number(), self.running[-1].name if self.running else OUTSIDE
            if self._starts[-1] == number:
                self._began[-1] = name
            else:
                self._starts.append(number)
                self._began.append(name)

    def _name(self, module: nn.Module) -> str:
        """Name a module by its path from the outermost running module."""
        outer = self.running[-1] if self.running else None
        if outer is None or not isinstance(outer.of, nn.Module):
            return type(module).__name__
        own = next((key for key, child in children_of(outer.of).items() if child is module), type(module).__name__)
        return f"{outer.name}.{own}"


class Hook:
    """A function as a hook of a module or an optimizer. In a copy or pickle of a module the hook does nothing."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Call the function."""
        self._function(*args)

    def __reduce__(self) -> tuple[type[Hook], tuple[Callable[..., object]]]:
        return Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass
