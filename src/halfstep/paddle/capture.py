"""A captured training program: a model and its loss as one graph, which shares the model's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.traceback import preserve_node_meta

from ..amp.grad_scaler import GradScaler
from ..casting.graph.cast_pass import CastGraph
from ..casting.scope import NO_CASTING
from ..core.checks import check_flag, check_kind
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.files import replacing
from ..torch_internals.compiler_compat import export_errors, size_expression
from .archive import in_fp32, read_archive, write_archive
from .graph_edits import evaluate, with_outputs, without_idle_broadcasts
from .tape import VALUE, Tape, Variable

__all__ = ["Program", "Trainer", "Value", "capture", "load", "loss_of"]


@dataclass(frozen=True)
class Value:
    """A value of a program, which an ``Executor`` can fetch."""

    program: Program
    name: str


class Trainer:
    """The training step of a program: an optimizer and a loss scaler.

    Attributes:
        optimizer: an optimizer over parameters of the program.
        scaler: the loss scaler; disabled for training in fp32.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> None:
        self.optimizer, self.scaler = optimizer, scaler

    def prepare(self) -> None:
        """Prepare the parameters for the graph before each run. A graph without casts needs no preparation."""

    def train(self, module: Callable[..., Any], feed: list[torch.Tensor]) -> tuple[Any, ...]:
        """Run a step: forward, scaled backward, and an update without overflow; return the graph's outputs."""
        self.prepare()
        results: tuple[Any, ...] = module(*feed)
        self.scaler.scale(results[0]).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return results


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
    """Capture a model and its loss with ``torch.export``, in training IR and for any batch size that it allows.

    Args:
        model: the model, in the training or evaluation mode of the program, which shares the model's parameters.
        loss_fn: the loss function, which computes a scalar by ``loss_fn(*outputs, label)``; None captures the model
            alone.
        example_inputs: the inputs of the model's forward, followed by the label.

    Raises:
        ArgumentTypeError: if an input is not a tensor, or the loss function is not callable.
        ArgumentValueError: if the count of inputs, including the label, does not fit the model's forward.
        UsageError: if torch.export cannot capture the model; the message gives the reason.
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
        with preserve_node_meta(), NO_CASTING:  # do not capture casts of an O1 session outside its models
            exported = torch.export.export(wrapped, inputs, dynamic_shapes=(dynamic,), strict=False)
    except export_errors() as error:
        raise UsageError(f"torch.export cannot capture {type(model).__name__}: {error}") from error
    return Program(exported, _feed_names(model, loss_fn, len(inputs)), loss_fn is not None)


def _check_inputs(model: nn.Module, count: int, given: int) -> None:
    """Check that the model's forward takes ``count`` inputs; ``given`` also counts the label."""
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

    ``Program()`` is empty: ``static.data`` in a ``program_guard`` adds inputs, the program records ops on them, and
    ``minimize`` of a loss ends the recording.

    Attributes:
        feed_names: the names of the inputs, in the order of the example inputs.
        feed_shapes: the shapes given to ``static.data``, by name; None means any size.
        outputs: the model's outputs, which can be fetched.
        casting: the graph with casts for a decorated optimizer, or None.
        trainer: the training step after ``minimize``, or None.
    """

    def __init__(
        self,
        exported: torch.export.ExportedProgram | None = None,
        feed_names: Sequence[str] = (),
        has_loss: bool = False,
    ) -> None:
        self.casting: CastGraph | None = None
        self.trainer: Trainer | None = None
        self.tape = Tape(self) if exported is None else None
        self._recorded = 0  # count of the tape's calls that are in the graph
        self._tapes = 1  # count of tapes so far, including the current tape
        self._tests: tuple[Program, int] | None = None  # for a test program, the tested program and its count of tapes
        self._read_graph(exported, feed_names, has_loss)

    def _read_graph(
        self, exported: torch.export.ExportedProgram | None, feed_names: Sequence[str], has_loss: bool
    ) -> None:
        self._exported, self._has_loss, self.feed_names = exported, has_loss, list(feed_names)
        self._modules: dict[tuple[Any, ...], Any] = {}
        self._names: dict[str, str] = {}  # names of variables -> names of results and nodes
        self.feed_shapes: dict[str, tuple[int | None, ...]] = {}
        if exported is None:
            self.graph_module, self.outputs = fx.GraphModule(nn.Module(), fx.Graph()), []
            return
        module: Any = exported.module(check_guards=False)
        self.graph_module = without_idle_broadcasts(module)
        count = len(self._results()) - has_loss
        names = ["output"] if count == 1 else [f"output{i}" for i in range(count)]
        self.outputs = [Value(self, name) for name in names]

    def new_tape(self) -> Tape:
        """Return the recording tape. If ``minimize`` has ended the tape, start the program again with a new tape.

        Raises:
            UsageError: if the program was captured or loaded as a whole.
        """
        if self._exported is not None and self._recorded == 0:
            raise UsageError("This program was captured as a whole. Build another in program_guard(static.Program()).")
        if self.tape is None:
            self.trainer = self.casting = None
            self.tape, self._recorded, self._tapes = Tape(self), 0, self._tapes + 1
            self._read_graph(None, (), False)
        return self.tape

    def capture_tape(self, loss: Variable | None = None) -> None:
        """Capture the recorded calls as a graph; with a loss, end the tape.

        Raises:
            UsageError: if torch.export cannot capture the calls.
        """
        assert self.tape is not None
        tape, has_loss = self.tape, loss is not None
        outputs = [*([] if loss is None else [loss]), *(value for value in tape.leaves() if value is not loss)]
        try:
            with preserve_node_meta(), NO_CASTING:
                exported = torch.export.export(
                    tape.module(outputs), tape.example_inputs(), dynamic_shapes=(tape.free_dims(),), strict=False
                )
        except export_errors() as error:
            raise UsageError(f"torch.export cannot capture this program: {error}") from error
        _check_open_sizes(exported, tape)
        self._read_graph(exported, list(tape.inputs), has_loss)
        self.feed_shapes = dict(tape.shapes)
        self._recorded = len(tape)
        for node in self.graph_module.graph.nodes:
            name = (node.meta.get("custom") or {}).get(VALUE)
            if name is not None and node.meta.get("val") is not None:  # or else an assertion of torch.export about it
                self._names[name] = node.name
        own = [*(["loss"] if has_loss else []), *(value.name for value in self.outputs)]
        self._names.update({value.name: name for value, name in zip(outputs, own, strict=True)})
        if has_loss:
            tape.ended, self.tape = True, None

    def prepare(self) -> None:
        """Update the graph after new calls were recorded. A test program takes the graph of the tested program."""
        if self._tests is not None:
            self._follow(*self._tests)
        if self.tape is not None and len(self.tape) > self._recorded:
            self.capture_tape()

    def clone(self, for_test: bool = False) -> Program:
        """Create a test program of this program, as ``paddle.static.Program.clone(for_test=True)`` does.

        In the test program dropout has no effect, BatchNorm uses its running statistics, and nothing is trained. It
        shares parameters and casts with this program, including the casts of a later ``minimize``.

        Args:
            for_test: True.

        Raises:
            UsageError: with ``for_test=False``: a program has one optimizer, and is built once.
        """
        if not check_flag("for_test", for_test):
            raise UsageError(
                "Program.clone makes a test: pass for_test=True. For a second program to train, build or capture it "
                "once more around the same model."
            )
        test = Program()
        test.tape, test._tests = None, (self, self._tapes)
        test.prepare()
        return test

    def _follow(self, tested: Program, tapes: int) -> None:
        """Take the graph and the casts of the tested program, unless user code has started this program again."""
        if tested._tapes == tapes:
            tested.prepare()
            if tested.trainer is not None:
                tested.trainer.prepare()
            if self.graph_module is not tested.graph_module or self.casting is not tested.casting:
                own = {name: vars(self)[name] for name in ("tape", "trainer", "_recorded", "_tapes", "_tests")}
                vars(self).update({**vars(tested), **own, "_modules": {}})

    @property
    def loss(self) -> Value:
        """The loss.

        Raises:
            UsageError: if the program was captured without a loss.
        """
        if not self._has_loss:
            raise UsageError("This program was captured without a loss; give capture a loss_fn.")
        return Value(self, "loss")

    @property
    def is_empty(self) -> bool:
        """True if the program computes nothing."""
        return self._exported is None

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the captured model."""
        return list(self.graph_module.parameters())

    def minimize(self, optimizer: torch.optim.Optimizer) -> None:
        """Train the program with a torch optimizer in fp32; see ``static.amp.decorate`` for 16 bits."""
        check_kind("minimize: optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        assert self.loss
        self.train_with(Trainer(optimizer, GradScaler(enable=False)))

    def train_with(self, trainer: Trainer, casting: CastGraph | None = None) -> None:
        """Train the program with a trainer, in the graph with casts if there is one."""
        if self._tests is not None:
            raise UsageError("This program is a test, by clone(for_test=True); minimize the loss of what it tests.")
        self.trainer, self.casting = trainer, casting
        self._modules.clear()

    def explain(self) -> str:
        """Return a line per op, with its name, the dtypes it reads and gives, and the deciding rule; then the casts."""
        if self.casting is None:
            return "No casts: nothing was decorated."
        rows = [("node", "op", "reads", "gives", "rule")]
        rows += [(row.name, row.op, row.reads, row.gives, row.rule) for row in self.casting.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"casts: {self.casting.casts_before} before, {self.casting.casts_after} after"])

    def module(self, fetched: Sequence[str] = (), compiled: bool = False) -> Any:
        """Return the function that runs the program and returns the loss, the outputs and the ``fetched`` nodes.

        Raises:
            ArgumentValueError: if no node has a fetched name.
        """
        key = (tuple(fetched), compiled)
        if key not in self._modules:
            module = self.graph_module if self.casting is None else self.casting.module
            if fetched or self._tests is not None:
                module = with_outputs(module, fetched)
            if self._tests is not None:
                evaluate(module.graph)
                module.recompile()
            # Compile the forward: torch.compile warns of a module while static mode has hooks on all modules.
            self._modules[key] = torch.compile(module.forward) if compiled else module
        return self._modules[key]

    def positions(self, fetch_list: Sequence[Value | Variable | str]) -> tuple[list[str], list[int]]:
        """Return the names to fetch beside loss and outputs, and the index of each item of the list in the results."""
        own = [*(["loss"] if self._has_loss else []), *(value.name for value in self.outputs)]
        if isinstance(fetch_list, str) or not all(isinstance(item, (Value, Variable, str)) for item in fetch_list):
            raise ArgumentTypeError(
                f"fetch_list={fetch_list!r} must be a list of program.loss, program.outputs, or names of these or of "
                "nodes."
            )
        given = [item if isinstance(item, str) else item.name for item in fetch_list]
        names = [self._names.get(name, name) for name in given]
        extra = [name for name in dict.fromkeys(names) if name not in own]
        return extra, [(own + extra).index(name) for name in names]

    def nodes_of(self, names: Iterable[str], argument: str) -> frozenset[str]:
        """Return the names of the nodes that compute some values.

        Args:
            names: names of variables or nodes.
            argument: the name of the argument in an error message.

        Raises:
            ArgumentValueError: if the program does not have a name.
        """
        own = [*(["loss"] if self._has_loss else []), *(value.name for value in self.outputs)]
        found = {name: {node.name} for name, node in zip(own, self._results(), strict=True)}
        nodes = [node for node in self.graph_module.graph.nodes if node.op == "call_function"]
        found |= {node.name: {node.name} for node in nodes}
        by_value: dict[str, set[str]] = {}
        for node in nodes:
            by_value.setdefault((node.meta.get("custom") or {}).get(VALUE, node.name), set()).add(node.name)
        found |= by_value
        if missing := [name for name in names if name not in found]:
            raise ArgumentValueError(
                f"{argument} names {', '.join(map(repr, missing))}, which this program does not compute; it computes "
                f"{', '.join(sorted(by_value))}."
            )
        return frozenset().union(*(found[name] for name in names))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the program with its current parameters in fp32, for ``static.load``.

        Raises:
            UsageError: if the program is empty, or has a tensor that torch.export can only pickle.
        """
        if self._exported is None:
            raise UsageError("This program is empty; minimize a loss or run it before it is saved.")
        facts = {"feed_names": self.feed_names, "has_loss": self._has_loss}
        with in_fp32(self.parameters()):
            archive = write_archive(self._exported, facts)
        with replacing(path) as file:
            file.write(archive)

    def example_inputs(self) -> tuple[torch.Tensor, ...]:
        """The example batch of the capture."""
        return () if self._exported is None else self._exported.example_inputs[0]

    def _results(self) -> list[Any]:
        (result,) = next(node for node in self.graph_module.graph.nodes if node.op == "output").args
        return list(result)


def _check_open_sizes(exported: torch.export.ExportedProgram, tape: Tape) -> None:
    nodes = {node.name: node for node in exported.graph.nodes}
    for (name, shape), node_name in zip(tape.shapes.items(), exported.graph_signature.user_inputs, strict=True):
        for i, size in enumerate(nodes[str(node_name)].meta["val"].shape):
            expression = size_expression(size)
            if shape[i] is None and (expression is None or expression.is_number):
                raise UsageError(
                    f"static.data({name!r}) leaves the size of dimension {i} open, and this program works for one size "
                    "only. Give its number."
                )


def loss_of(given: Value | Variable) -> Value:
    """Return the loss given to ``minimize`` as a value of a program, and end the recording of the program.

    Raises:
        ArgumentTypeError: for any other object.
        UsageError: if ``minimize`` has already ended the program.
        ArgumentValueError: for a loss with more than one element.
    """
    if isinstance(given, Variable):
        if given.fake.numel() != 1 or not given.fake.is_floating_point():
            raise ArgumentValueError(f"minimize takes a loss with one floating number, not {given!r}.")
        program: Program = given.tape.owner
        if given.tape is not program.tape:
            raise UsageError(f"minimize has ended the program of {given.name!r} already; a program has one optimizer.")
        program.capture_tape(given)
        return program.loss
    if not isinstance(given, Value) or given.name != "loss":
        raise ArgumentTypeError(
            "minimize takes program.loss, of a program from static.capture, or what was computed from static.data."
        )
    return given


def load(path: str | PathLike[str]) -> Program:
    """Read a file of ``Program.save`` as a program with its own parameters.

    Nothing is unpickled: a file that requires unpickling is refused. Still, load only files that you trust. A program
    names torch functions, which run when the program is loaded or run, and sizes that SymPy evaluates as Python
    (torch 2.13).

    Raises:
        ArgumentValueError: if ``Program.save`` did not write the file.
        FileNotFoundError: if the file does not exist.
    """
    exported, facts = read_archive(Path(path).read_bytes(), fspath(path), "Program.save")
    return Program(exported, facts["feed_names"], facts["has_loss"])
