"""The inference part of a program, saved as an archive that ``torch.export.load`` can also read."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ..casting.scope import NO_CASTING
from ..core.checks import check_kind
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.files import replacing
from ..torch_internals.compiler_compat import export_errors
from .archive import in_fp32, read_archive, write_archive
from .capture import Program, Value
from .graph_edits import evaluate, with_outputs
from .tape import Variable

__all__ = ["load_inference_model", "save_inference_model"]


def save_inference_model(
    path_prefix: str | PathLike[str],
    feed_vars: Variable | str | Sequence[Variable | str],
    fetch_vars: Value | Variable | Sequence[Value | Variable],
    executor: Any = None,
    *,
    program: Program | None = None,
) -> None:
    """Write ``{path_prefix}.pt2``: the part of a program that computes some values from some inputs.

    The file has the loss and the labels only if ``fetch_vars`` needs them. In the file, dropout has no effect,
    BatchNorm uses its running statistics, and parameters are fp32. Branches of a model on ``self.training`` stay as
    captured.

    Args:
        path_prefix: the path of the file without its suffix. If saving is interrupted, a previous file is kept.
        feed_vars: the inputs from ``static.data``, or their names as in ``program.feed_names``.
        fetch_vars: the values computed from ``static.data``, or values of ``program.outputs``.
        executor: accepted without effect; the program holds its parameters.
        program: the program of the values; by default the program of the first of ``fetch_vars``.

    Raises:
        ArgumentTypeError: for arguments that are not inputs and values.
        ArgumentValueError: without values, for an input that the program does not have, or if an input is missing.
        UsageError: if torch.export cannot save the program.
    """
    check_kind("feed_vars", feed_vars, (str, Variable, list, tuple), "inputs from static.data, or their names")
    check_kind("fetch_vars", fetch_vars, (Value, Variable, list, tuple), "values of a program, or a list of them")
    fetched: list[Value | Variable] = [fetch_vars] if isinstance(fetch_vars, (Value, Variable)) else list(fetch_vars)
    if not fetched:
        raise ArgumentValueError("fetch_vars is empty; name what the model is to compute, as program.outputs.")
    if not all(isinstance(value, (Value, Variable)) for value in fetched):
        raise ArgumentTypeError("fetch_vars must be values from static.data, or of program.outputs.")
    if program is None:
        first = fetched[0]
        program = first.program if isinstance(first, Value) else first.tape.owner
    check_kind("program", program, Program, "a static.Program")
    feeds = [feed_vars] if isinstance(feed_vars, (str, Variable)) else list(feed_vars)
    names = [feed if isinstance(feed, str) else feed.name for feed in feeds]
    program.prepare()
    if unknown := [name for name in names if name not in program.feed_names]:
        raise ArgumentValueError(
            f"feed_vars has {', '.join(map(repr, unknown))}, and this program takes {', '.join(program.feed_names)}."
        )
    with in_fp32(program.parameters()):
        archive = write_archive(_for_inference(program, names, fetched), {"feed_names": names})
    with replacing(_file(path_prefix)) as file:
        file.write(archive)


def load_inference_model(
    path_prefix: str | PathLike[str], executor: Any = None
) -> tuple[Program, list[str], list[Value]]:
    """Read a file of ``save_inference_model``, to run it by an ``Executor``.

    Nothing is unpickled. Still, a program can call functions, so load only files that you trust: see ``static.load``.

    Args:
        path_prefix: the path of the file without its suffix.
        executor: accepted without effect; the program holds its parameters.

    Returns:
        The program, the names of its inputs, and its values.

    Raises:
        ArgumentValueError: if ``save_inference_model`` did not write the file.
        FileNotFoundError: if the file does not exist.
    """
    path = _file(path_prefix)
    exported, facts = read_archive(path.read_bytes(), fspath(path), "static.save_inference_model")
    program = Program(exported, facts["feed_names"])
    return program, program.feed_names, program.outputs


def _file(path_prefix: str | PathLike[str]) -> Path:
    return Path(f"{fspath(path_prefix)}.pt2")


def _for_inference(
    program: Program, feed_names: Sequence[str], fetched: Sequence[Value | Variable]
) -> torch.export.ExportedProgram:
    """Build a program that computes only the fetched values, in evaluation mode."""
    extra, positions = program.positions(fetched)
    module = with_outputs(program.graph_module, extra)
    graph = module.graph
    output = next(node for node in graph.nodes if node.op == "output")
    results: Any = output.args[0]
    output.args = (tuple(results[position] for position in positions),)
    evaluate(graph)
    inputs = dict(zip(program.feed_names, [node for node in graph.nodes if node.op == "placeholder"], strict=True))
    # The archive contains the example inputs, which must not be the user's data.
    examples = dict(zip(program.feed_names, map(torch.zeros_like, program.example_inputs()), strict=True))
    for name, node in inputs.items():
        if name not in feed_names:
            if node.users:
                raise ArgumentValueError(f"fetch_vars are computed from {name!r}, too; name it in feed_vars.")
            graph.erase_node(node)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for name in feed_names:  # in their order
        first.prepend(inputs[name])
    module.recompile()
    sizes = tuple(_open_sizes(inputs[name]) for name in feed_names)
    try:
        with NO_CASTING:
            return torch.export.export(
                module, tuple(examples[name] for name in feed_names), dynamic_shapes=sizes, strict=False
            )
    except export_errors() as error:
        raise UsageError(f"torch.export cannot capture what fetch_vars need: {error}") from error


def _open_sizes(node: fx.Node) -> dict[int, Any] | None:
    """Return the dimensions of an input that may have any size."""
    return {
        i: torch.export.Dim.AUTO for i, size in enumerate(node.meta["val"].shape) if not isinstance(size, int)
    } or None
