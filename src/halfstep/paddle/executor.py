"""``Executor``, which runs programs on a feed, and trains them after ``minimize``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..casting.current import thread
from ..casting.scope import NO_CASTING
from ..core.checks import check_flag
from ..core.errors import ArgumentTypeError, ArgumentValueError
from ..core.oplists.tables import NATIVE
from .building import default_main_program
from .capture import Program, Value
from .tape import Variable

__all__ = ["Executor"]


class Executor:
    """The runner of programs.

    Args:
        device: the device of feeds; None means the device of the program's parameters.
        compiled: run programs through ``torch.compile``.
    """

    def __init__(self, device: torch.device | str | None = None, *, compiled: bool = False) -> None:
        self.device = None if device is None else _device(device)
        self.compiled = check_flag("compiled", compiled)

    def run(
        self,
        program: Program | None = None,
        feed: Mapping[str, Any] | None = None,
        fetch_list: Sequence[Value | Variable | str] | None = None,
        *,
        train: bool = True,
        scope: Any = None,
        return_numpy: bool = False,
        use_program_cache: bool = True,
    ) -> list[Any]:
        """Run the forward pass of a program; after ``minimize``, also the backward pass and a step.

        Args:
            program: a program; None means ``default_main_program()``. An empty program, such as
                ``default_startup_program()``, does nothing.
            feed: a tensor, or an object that converts to a tensor, for each of ``program.feed_names``.
            fetch_list: the values to return: ``program.loss``, ``program.outputs``, values computed from
                ``static.data``, or names of variables or nodes.
            train: False runs the forward pass only, in the precision of training. Dropout and BatchNorm stay in the
                captured mode.
            scope: accepted without effect; the model holds its parameters.
            return_numpy: return arrays. NumPy has no bfloat16, so bfloat16 values are returned as float32.
            use_program_cache: accepted without effect; prepared programs are always cached.

        Returns:
            The fetched values, detached: tensors, or arrays with ``return_numpy``.

        Raises:
            ArgumentTypeError: if ``program`` is not a program.
            ArgumentValueError: for a missing or unknown feed, or a name that the program does not compute.
        """
        program = default_main_program() if program is None else program
        if not isinstance(program, Program):
            raise ArgumentTypeError(f"Executor.run takes a Program from static.capture, not {type(program).__name__}.")
        program.prepare()
        feed = {} if feed is None else feed
        if not isinstance(feed, Mapping):
            raise ArgumentTypeError(
                f"feed must be a dict with {', '.join(program.feed_names)} as its keys, not {type(feed).__name__}."
            )
        if set(feed) != set(program.feed_names):
            raise ArgumentValueError(
                f"feed has {', '.join(map(str, feed)) or 'nothing'}, and this program takes "
                f"{', '.join(program.feed_names) or 'nothing'}."
            )
        device = self.device or next((p.device for p in program.parameters()), torch.device("cpu"))
        inputs = [_tensor(name, feed[name]).to(device) for name in program.feed_names]
        for name, tensor in zip(program.feed_names, inputs, strict=True):
            _check_shape(name, tensor, program.feed_shapes.get(name))
        extra, positions = program.positions(() if fetch_list is None else fetch_list)
        if program.is_empty:
            return []
        with _without_casts():
            module = program.module(extra, self.compiled)
            if program.trainer is not None and train:
                results = program.trainer.train(module, inputs)
            else:
                if program.trainer is not None:
                    program.trainer.prepare()
                with torch.no_grad():
                    results = module(*inputs)
        fetched = [results[i].detach() for i in positions]
        if return_numpy is not False and check_flag("return_numpy", return_numpy):
            return [(x.float() if x.dtype is torch.bfloat16 else x).cpu().numpy() for x in fetched]
        return fetched


def _without_casts() -> AbstractContextManager[object]:
    """Return a scope that turns off this thread's casts for a program, whose casts are in its graph."""
    casts = bool(thread.key) or any(map(torch.is_autocast_enabled, NATIVE))
    return NO_CASTING if casts else nullcontext()


def _device(given: torch.device | str) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError):
        raise ArgumentValueError(f"device={given!r} is no device; write 'cpu', 'cuda', 'cuda:1' or the like.") from None


def _check_shape(name: str, tensor: torch.Tensor, sizes: tuple[int | None, ...] | None) -> None:
    if sizes is not None and (
        len(sizes) != tensor.dim() or any(a not in (None, b) for a, b in zip(sizes, tensor.shape, strict=True))
    ):
        raise ArgumentValueError(
            f"feed[{name!r}] has the shape {list(tensor.shape)}, and static.data gave it {list(sizes)}; "
            "None is any size."
        )


def _tensor(name: str, given: Any) -> torch.Tensor:
    try:
        return given if isinstance(given, torch.Tensor) else torch.as_tensor(given, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        raise ArgumentTypeError(
            f"feed[{name!r}] must be a tensor, an array or numbers, not {type(given).__name__}."
        ) from None
