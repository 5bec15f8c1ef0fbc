"""A captured training program: a model and its loss as one graph, whose parameters are the model's own."""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.fx.traceback import preserve_node_meta

from ..casting.op_casting import NO_CASTING
from ..core.checks import check_kind
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.files import save_whole
from ..core.loading import load_whole
from ..core.torch_compat import export_errors
from ..gradients.master_registry import master_of
from .cast_pass import Casting

__all__ = ["Program", "Trainer", "Value", "capture", "load"]


@dataclass(frozen=True)
class Value:
    """A value that a program computes, to be fetched by an ``Executor``."""

    program: Program
    name: str


class Trainer(Protocol):
    """Trains a program."""

    def prepare(self) -> None:
        """Get the parameters ready for the graph, before each run."""

    def train(self, module: Callable[..., Any], feed: list[torch.Tensor]) -> tuple[Any, ...]:
        """Take one step, and return the outputs of the graph."""


class _ModelAndLoss(nn.Module):
    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.loss_fn is None:
            outputs = self.model(*args)
            return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
        outputs = self.model(*args[:-1])
        parts = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
        return (self.loss_fn(*parts, args[-1]), *parts)


def capture(model: nn.Module, loss_fn: Callable[..., Any] | None, example_inputs: Sequence[torch.Tensor]) -> Program:
    """Capture a model and its loss with ``torch.export``, in training IR and for any batch size it allows.

    Args:
        model: in training or evaluation mode, as it is to run; its parameters are those of the program.
        loss_fn: called as ``loss_fn(*outputs, label)``, gives a scalar; None captures the model alone.
        example_inputs: of the model's forward, followed by the label.

    Raises:
        ArgumentTypeError: something else than tensors as inputs, a loss that cannot be called.
        ArgumentValueError: more or fewer inputs than the model's forward takes, the label counted.
        UsageError: where torch.export cannot capture it; the message says why.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    if loss_fn is not None and not callable(loss_fn):
        raise ArgumentTypeError(f"loss_fn={loss_fn!r} must be called with the outputs and the label, or be None.")
    check_kind("example_inputs", example_inputs, (tuple, list), "a tuple or list of tensors")
    inputs = tuple(example_inputs)
    if not inputs or not all(isinstance(x, torch.Tensor) for x in inputs):
        raise ArgumentTypeError("example_inputs must be tensors: those of the model's forward, then the label.")
    _check_inputs(model, len(inputs) - (loss_fn is not None), len(inputs))
    dynamic = tuple({0: torch.export.Dim.AUTO} if x.dim() else None for x in inputs)
    wrapped = _ModelAndLoss(model, loss_fn)
    try:
        with preserve_node_meta(), NO_CASTING:  # what an O1 session casts outside of its models is not captured
            exported = torch.export.export(wrapped, inputs, dynamic_shapes=(dynamic,), strict=False)
    except export_errors() as error:
        raise UsageError(f"torch.export cannot capture {type(model).__name__}: {error}") from error
    return Program(exported, _feed_names(model, loss_fn, len(inputs)), loss_fn is not None)


def _check_inputs(model: nn.Module, count: int, given: int) -> None:
    """Check that the model's forward takes so many inputs; ``given`` counts the label, too."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*range(count))
    except TypeError as error:
        label = " and then one label for loss_fn" if given > count else ""
        raise ArgumentValueError(
            f"example_inputs has {given} tensors, and forward of {type(model).__name__} takes {signature}: {error}. "
            f"Give what forward takes{label}."
        ) from None


def _feed_names(model: nn.Module, loss_fn: Any, count: int) -> list[str]:
    names = list(inspect.signature(model.forward).parameters)[: count - (loss_fn is not None)]
    names += [f"input{i}" for i in range(len(names), count - (loss_fn is not None))]
    if loss_fn is not None:
        names.append("label" if "label" not in names else "label_")
    return names


class Program:
    """A model and its loss as one graph.

    Attributes:
        feed_names: of the inputs, in the order of the example inputs.
        outputs: the model's outputs, to be fetched.
        casting: the graph with casts for a decorated optimizer, or None.
        trainer: trains the program once an optimizer was told to ``minimize`` the loss, or None.
    """

    def __init__(self, exported: torch.export.ExportedProgram, feed_names: list[str], has_loss: bool) -> None:
        self._exported = exported
        self._has_loss = has_loss
        module: Any = exported.module(check_guards=False)
        self.graph_module: fx.GraphModule = _without_idle_broadcasts(module)
        self.feed_names = feed_names
        self.casting: Casting | None = None
        self.trainer: Trainer | None = None
        count = len(self._results()) - has_loss
        names = ["output"] if count == 1 else [f"output{i}" for i in range(count)]
        self.outputs = [Value(self, name) for name in names]
        self._modules: dict[tuple[Any, ...], Any] = {}

    @property
    def loss(self) -> Value:
        """The loss.

        Raises:
            UsageError: if the program was captured without one.
        """
        if not self._has_loss:
            raise UsageError("This program was captured without a loss; give capture a loss_fn.")
        return Value(self, "loss")

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the captured model."""
        return list(self.graph_module.parameters())

    def minimize(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with a torch optimizer, in fp32, from now on; ``static.amp.decorate`` is for 16 bits."""
        check_kind("minimize: optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        assert self.loss
        self.train_with(_Fp32Trainer(optimizer))

    def train_with(self, trainer: Trainer, casting: Casting | None = None) -> None:
        """Have a trainer take the steps from now on, in the graph with casts if there is one."""
        self.trainer, self.casting = trainer, casting
        self._modules.clear()

    def explain(self) -> str:
        """A line for each op: its name, the dtypes it reads and gives, and the rule that decided; then the casts."""
        if self.casting is None:
            return "No casts: nothing was decorated."
        rows = [("node", "op", "reads", "gives", "rule")]
        rows += [(row.name, row.op, row.reads, row.gives, row.rule) for row in self.casting.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"casts: {self.casting.casts_before} before, {self.casting.casts_after} after"])

    def module(self, fetched: Sequence[str] = (), compiled: bool = False) -> Any:
        """What runs: it returns the loss, the outputs, and the values of the nodes whose names are ``fetched``.

        Raises:
            ArgumentValueError: for a name that no node has.
        """
        key = (tuple(fetched), compiled)
        if key not in self._modules:
            module = self.graph_module if self.casting is None else self.casting.module
            if fetched:
                module = _with_outputs(module, fetched)
            self._modules[key] = torch.compile(module) if compiled else module
        return self._modules[key]

    def positions(self, fetch_list: Sequence[Value | str]) -> tuple[list[str], list[int]]:
        """The names to fetch beside loss and outputs, and the place of each item of the list in the results."""
        own = [*(["loss"] if self._has_loss else []), *(value.name for value in self.outputs)]
        if isinstance(fetch_list, str) or not all(isinstance(item, (Value, str)) for item in fetch_list):
            raise ArgumentTypeError(
                f"fetch_list={fetch_list!r} must be a list of program.loss, program.outputs, or names of these or of "
                "nodes."
            )
        names = [item.name if isinstance(item, Value) else item for item in fetch_list]
        extra = [name for name in dict.fromkeys(names) if name not in own]
        return extra, [(own + extra).index(name) for name in names]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the program with its present parameters, in fp32. ``static.load`` reads it."""
        graph = io.BytesIO()
        half = {p: p.data for p in self.parameters() if p.dtype in (torch.float16, torch.bfloat16)}
        for param, data in half.items():
            master = master_of(param)
            param.data = data.float() if master is None else master.data
        try:
            torch.export.save(self._exported, graph)
        finally:
            for param, data in half.items():
                param.data = data
        facts = {"feed_names": self.feed_names, "has_loss": self._has_loss}
        save_whole({"graph": graph.getvalue(), "facts": json.dumps(facts)}, path)

    def _results(self) -> list[Any]:
        (result,) = next(node for node in self.graph_module.graph.nodes if node.op == "output").args
        return list(result)


class _Fp32Trainer:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def prepare(self) -> None:
        """Nothing to do."""

    def train(self, module: Callable[..., Any], feed: list[torch.Tensor]) -> tuple[Any, ...]:
        results: tuple[Any, ...] = module(*feed)
        results[0].backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return results


def load(path: str | PathLike[str]) -> Program:
    """Read what ``Program.save`` wrote; its parameters are its own.

    Read only files that you trust: ``torch.export.load`` unpickles the graph, which can run code (torch 2.13).

    Raises:
        ArgumentValueError: for a file that it did not write.
    """
    saved = load_whole(path, ("graph", "facts"), "Program.save")
    facts = json.loads(saved["facts"])
    return Program(torch.export.load(io.BytesIO(saved["graph"])), facts["feed_names"], facts["has_loss"])


def _without_idle_broadcasts(module: fx.GraphModule) -> fx.GraphModule:
    """Drop broadcasts of tensors of one shape: a loss makes them, and export returns the broadcast output."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.broadcast_tensors.default:
            inputs = node.args[0]
            if len({str(tuple(source.meta["val"].shape)) for source in inputs}) == 1:
                for item in list(node.users):
                    item.replace_all_uses_with(inputs[item.args[1]])
                    module.graph.erase_node(item)
                module.graph.erase_node(node)
    module.recompile()
    return module


def _with_outputs(module: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result: Any = graph.graph_copy(module.graph, copies)
    found = {node.name: copy for node, copy in copies.items()}
    if missing := [name for name in names if name not in found]:
        raise ArgumentValueError(
            f"fetch_list names {', '.join(missing)}, which this program does not compute; fetch program.loss, one of "
            "program.outputs, or a node that program.explain() names."
        )
    graph.output((*result, *(found[name] for name in names)))
    graph._codegen = fx.graph.CodeGen()
    return fx.GraphModule(module, graph)
