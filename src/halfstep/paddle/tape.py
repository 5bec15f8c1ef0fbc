"""A tape of torch calls on symbolic values. ``torch.export`` captures the tape's replay as a module.

The tape records a call that reads a ``Variable``, and every call in the forward of a module that was called with a
``Variable``: a slice of a position embedding does not read a variable, but must not become a constant.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

from ..amp.grad_scaler import GradScaler
from ..casting.current import thread
from ..casting.scope import active_casting
from ..core.errors import ArgumentValueError, UsageError
from ..torch_internals.callers import caller_in
from ..torch_internals.compiler_compat import (
    FakeMode,
    as_subclass_without_numbers,
    needs_values,
    size_expression,
    size_value,
)
from ..torch_internals.torch_compat import tree_flatten, tree_map_only, tree_unflatten

__all__ = ["VALUE", "ModuleRecording", "Tape", "Variable"]

VALUE = "halfstep_value"
"""The key under which a node's metadata has the name of the variable that the node computes."""

_READS = (torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_NO_NUMBERS = "{} asks for the numbers of a value that has none before Executor.run; a program cannot branch on them."
_SOME = 6  # the size that Python code sees for a dimension of unknown size; 0 and 1 are special to torch


class Variable(torch.Tensor):
    """A symbolic value of a program under construction: it has a name, a shape and a dtype, but no elements.

    Attributes:
        name: the name of the value in the feed or the fetch list.
        tape: the tape that records calls on the value.
    """

    name: str = ""
    tape: Tape
    fake: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = next(x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Variable))
        return found.tape.record(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise UsageError(f"{func} cannot be recorded: it reaches a value of a program without torch seeing a call.")

    @property
    def sizes(self) -> tuple[int | None, ...]:
        """The shape of the value; None means any size."""
        if self.name in self.tape.shapes:
            return self.tape.shapes[self.name]
        return tuple(size if isinstance(size, int) else None for size in self.fake.shape)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Variable({self.name!r}, shape={list(self.sizes)}, dtype={self.fake.dtype})"


@dataclass(frozen=True)
class _Result:
    """A placeholder in the arguments of a recorded call: the result of an earlier call, or an input."""

    index: int


@dataclass(frozen=True)
class _State:
    """A placeholder in the arguments of a recorded call: a parameter, a buffer or another ordinary tensor."""

    name: str


@dataclass(frozen=True)
class _Size:
    """A placeholder in the arguments of a recorded call: a number that depends on the sizes of inputs."""

    expression: Any


@dataclass(frozen=True)
class _Call:
    func: Callable[..., Any]
    arguments: list[Any]
    spec: Any
    results: list[tuple[int, int]]  # (index among the leaves of the result, index of the value)
    grad: bool
    custom: dict[str, Any]  # annotations of torch.fx.traceback.annotate, including fp16_guard


class Tape:
    """A tape of calls, which can be replayed as a module.

    Attributes:
        owner: the program under construction.
        inputs: the inputs of the program, by name.
        shapes: the shapes of the inputs, by name; None means any size.
        values: all variables, in the order of their creation.
        state: the ordinary tensors that calls read, by name.
        ended: True if no more calls may be recorded.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.inputs: dict[str, Variable] = {}
        self.shapes: dict[str, tuple[int | None, ...]] = {}
        self.values: list[Variable] = []
        self.state: dict[str, torch.Tensor] = {}
        self.ended = False
        self._calls: list[_Call] = []
        self._read: set[int] = set()
        self._index: dict[int, int] = {}  # id of a fake -> index of its variable
        self._state_fakes: dict[int, tuple[str, torch.Tensor]] = {}  # id of a tensor in state -> its name and fake
        self._mode = FakeMode()

    def __len__(self) -> int:
        return len(self._calls)

    def data(self, name: str, shape: Sequence[int | None], dtype: torch.dtype, device: Any) -> Variable:
        """Create an input. A dimension of None or -1 has any size."""
        if name in self.inputs:
            raise ArgumentValueError(f"This program has an input {name!r} already; inputs need names of their own.")
        sizes = [_SOME if size in (None, -1) else int(size or 0) for size in shape]
        free = [size in (None, -1) for size in shape]
        fake = self._mode.make(torch.empty(sizes, dtype=dtype, device=device), free)
        self.inputs[name] = self._variable(fake, name)
        self.shapes[name] = tuple(None if size == -1 else size for size in shape)
        return self.inputs[name]

    def example_inputs(self) -> tuple[torch.Tensor, ...]:
        """Return tensors of zeros that are like the inputs."""
        made = []
        for name, value in self.inputs.items():
            sizes = [_SOME if size is None else size for size in self.shapes[name]]
            made.append(torch.zeros(sizes, dtype=value.fake.dtype, device=value.fake.device))
        return tuple(made)

    def free_dims(self) -> tuple[dict[int, Any] | None, ...]:
        """Return the dimensions of each input that have any size, for ``torch.export(dynamic_shapes=)``."""
        auto = torch.export.Dim.AUTO
        return tuple(
            {i: auto for i, size in enumerate(shape) if size is None} or None for shape in self.shapes.values()
        )

    def leaves(self) -> list[Variable]:
        """Return the computed values that no call reads."""
        return [value for i, value in enumerate(self.values) if i not in self._read and value.name not in self.inputs]

    # ---- recording

    def record(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute the shapes and dtypes of a call's results, and record the call."""
        if (thread.explicit and active_casting() is not None) or caller_in(GradScaler.__module__) is not None:
            raise UsageError(
                "amp.auto_cast casts no value of a program, and amp.GradScaler scales none: both is done when its "
                "optimizer minimizes a loss. Take them away, with amp.decorate, and decorate the optimizer: "
                "static.amp.decorate(optimizer, level=..., dtype=...)."
            )
        leaves, spec = tree_flatten((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, Variable) and leaf.tape is not self:
                raise UsageError(f"{_name_of(func)} reads {leaf.name!r}, which belongs to another program.")
        given = [self._fake(leaf) for leaf in leaves]
        fake_args, fake_kwargs = tree_unflatten(given, spec)
        if func in _READS:
            raise UsageError(_NO_NUMBERS.format(_name_of(func)))
        try:
            result = self._mode.call(func, fake_args, fake_kwargs)
        except needs_values() as error:
            raise UsageError(_NO_NUMBERS.format(_name_of(func))) from error
        found, found_spec = tree_flatten(result)
        if result is not None and not any(isinstance(x, torch.Tensor) for x in found):
            return result  # for example a shape or a dtype
        if self.ended:
            raise UsageError(
                f"{_name_of(func)} comes after minimize, which ended this program. Compute all values before it."
            )
        known = {id(fake): leaf for fake, leaf in zip(given, leaves, strict=True) if isinstance(fake, torch.Tensor)}
        results = []
        for place, item in enumerate(found):
            if isinstance(item, torch.Tensor) and id(item) in known:
                found[place] = known[id(item)]  # an in-place op returns its argument
            elif isinstance(item, torch.Tensor):
                found[place] = self._variable(item, f"{_name_of(func)}_{len(self._calls)}")
                results.append((place, len(self.values) - 1))
        noted = [self._note(leaf) for leaf in leaves]
        custom = dict(fx.traceback.current_meta.get("custom", {}))
        self._calls.append(_Call(func, noted, spec, results, torch.is_grad_enabled(), custom))
        return tree_unflatten(found, found_spec)

    def _variable(self, fake: torch.Tensor, name: str) -> Variable:
        taken = {value.name for value in self.values}
        own = next(n for n in (name, *(f"{name}.{i}" for i in range(1, len(taken) + 2))) if n not in taken)
        made = as_subclass_without_numbers(fake, Variable)
        made.name, made.tape, made.fake = own, self, fake
        self._index[id(fake)] = len(self.values)
        self.values.append(made)
        return made

    def _fake(self, leaf: Any) -> Any:
        if isinstance(leaf, Variable):
            return leaf.fake
        if isinstance(leaf, slice):
            return _map_slice(self._fake, leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in self._state_fakes:
            if leaf.grad_fn is not None:
                raise UsageError(
                    "A value of a program meets a tensor that was computed from parameters before, which would be a "
                    "constant. Compute it inside the forward of a module that is given a Variable by position."
                )
            name = f"{'parameter' if isinstance(leaf, nn.Parameter) else 'buffer'}_{len(self.state)}"
            self.state[name] = leaf
            self._state_fakes[id(leaf)] = (name, self._mode.make(leaf))
        return self._state_fakes[id(leaf)][1]

    def _note(self, leaf: Any) -> Any:
        if isinstance(leaf, Variable):
            self._read.add(self._index[id(leaf.fake)])
            return _Result(self._index[id(leaf.fake)])
        if isinstance(leaf, torch.Tensor):
            return _State(self._state_fakes[id(leaf)][0])
        if isinstance(leaf, slice):
            return _map_slice(self._note, leaf)
        expression = size_expression(leaf)
        return leaf if expression is None else _Size(expression)

    # ---- replaying

    def module(self, outputs: Sequence[Variable]) -> nn.Module:
        """Build a module whose forward takes the inputs and returns the outputs."""
        return _Replay(self, [self._index[id(value.fake)] for value in outputs])

    def replay(self, module: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Run the recorded calls, and return every value by its index."""
        values: dict[int, torch.Tensor] = {}
        sizes: dict[Any, Any] = {}
        for variable, tensor in zip(self.inputs.values(), inputs, strict=True):
            values[self._index[id(variable.fake)]] = tensor
            for size, actual in zip(variable.fake.shape, tensor.shape, strict=True):
                expression = size_expression(size)
                if expression is not None:
                    sizes[expression] = actual

        def actual_of(noted: Any) -> Any:
            if isinstance(noted, _Result):
                return values[noted.index]
            if isinstance(noted, _State):
                return getattr(module, noted.name)
            if isinstance(noted, slice):
                return _map_slice(actual_of, noted)
            return size_value(noted.expression, sizes) if isinstance(noted, _Size) else noted

        for call in self._calls:
            args, kwargs = tree_unflatten([actual_of(noted) for noted in call.arguments], call.spec)
            name = self.values[call.results[0][1]].name if len(call.results) == 1 else None
            with annotate({**call.custom, **({VALUE: name} if name else {})}) if name or call.custom else nullcontext():
                result = call.func(*args, **kwargs)
            if not call.grad:
                result = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
            found = tree_flatten(result)[0]
            for place, index in call.results:
                values[index] = found[place]
        return values


class _Replay(nn.Module):
    def __init__(self, tape: Tape, outputs: list[int]) -> None:
        super().__init__()
        self._tape, self._outputs = [tape], outputs
        for name, tensor in tape.state.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = self._tape[0].replay(self, inputs)
        return tuple(values[index] for index in self._outputs)


class _RecordAll(TorchFunctionMode):
    """A mode that records every call, with a count of the modules that are running."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape, self.depth = tape, 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.tape.record(func, args, kwargs or {})


class ModuleRecording:
    """A switch that records all calls in the forward of each module that is called with a variable."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._thread = threading.local()

    def on(self) -> None:
        """Start to watch module calls."""
        if not self._hooks:
            hooks = nn.modules.module
            self._hooks = [
                hooks.register_module_forward_pre_hook(self._enter),
                hooks.register_module_forward_hook(self._leave, always_call=True),
            ]

    def off(self) -> None:
        """Stop watching module calls."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        mode: _RecordAll | None = getattr(self._thread, "mode", None)
        if mode is not None:
            mode.depth += 1
            return
        given = next((x for x in tree_flatten(args)[0] if isinstance(x, Variable)), None)
        if given is not None:
            self._thread.mode = _RecordAll(given.tape)
            self._thread.mode.__enter__()

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        mode: _RecordAll | None = getattr(self._thread, "mode", None)
        if mode is None:
            return
        mode.depth -= 1
        if mode.depth == 0:
            self._thread.mode = None
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def _map_slice(change: Callable[[Any], Any], part: slice) -> slice:
    return slice(change(part.start), change(part.stop), change(part.step))


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__"):  # of an attribute of a tensor
        name = getattr(func.__self__, "__name__", name)
    return str(name).strip("_")
