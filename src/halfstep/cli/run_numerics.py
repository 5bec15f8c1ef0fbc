"""``halfstep run --numerics``: monitors every model that a script trains, and saves the rows."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..core.inner_optimizers import params_of
from ..core.text import numbered
from ..diagnostics.numerics import Monitor, Row, save_rows, write_report
from ..diagnostics.numerics.monitor import TENSORS
from ..diagnostics.observe.names import OUTSIDE
from ..profiling.run import model_of
from ..stepping.attached import AttachedOptimizer, creation_callbacks, observers
from ..torch_internals.compiler_compat import compiled_from

__all__ = ["monitored"]


@contextmanager
def monitored(path: Path, every: int | None, script: str, command_line: str) -> Iterator[None]:
    """Monitor the models that the block trains, and save the rows even if it ends with an error.

    Args:
        path: the file: rows as JSON lines, or a page of pictures for the suffix ".html". Ranks other than 0 append
            ".rank1" and so on.
        every: the distance of two sampled steps; None for the first 20, then every 100th.
        script: the name of the script.
        command_line: the command that made the file.
    """
    rank = int(os.environ.get("RANK", 0))
    path = path.resolve()  # the script may change the working directory
    path = path if rank == 0 else path.with_name(f"{path.name}.rank{rank}")
    monitors = Monitors(every)
    creation_callbacks.append(monitors.see_created)
    observers.append(monitors)
    hook = register_optimizer_step_pre_hook(monitors.see_step)
    try:
        yield
    finally:
        hook.remove()
        observers.remove(monitors)
        creation_callbacks.remove(monitors.see_created)
        rows = monitors.rows()
        if path.suffix != ".html":
            save_rows(path, rows, command=command_line, every=every or 100)
        elif rows:
            write_report(rows, path, title=script, command=command_line)
        none = f"halfstep: no optimizer stepped, so {path.name} has no rows."
        click.echo(f"halfstep: wrote {path}" if rows else none, err=True)


class Monitors:
    """One monitor per model and optimizer that a script trains.

    A monitor starts when ``amp`` prepares the two. For an optimizer that ``amp`` never saw together with a model, it
    starts at the optimizer's first step, with the outermost module that has its parameters.

    Args:
        every: the distance of two sampled steps; None for the first 20, then every 100th.
    """

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._monitors: list[tuple[nn.Module, Monitor]] = []

    def see_created(self, attached: AttachedOptimizer) -> None:
        """Receive an optimizer that ``amp`` attaches to."""
        if not attached.window.delegates_to_outer:
            self._begin(attached.optimizer, [m for ref in attached.replaced.models if (m := ref()) is not None])

    def before_step(self, attached: AttachedOptimizer) -> None:
        """Receive the start of a step, which may be the first."""
        self.see_step(attached.optimizer, (), {})

    def after_step(self, attached: AttachedOptimizer) -> None:
        """Receive the end of a step; the monitors observe it themselves."""

    def see_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Receive a step of any torch optimizer, which may be the first."""
        if optimizer not in self._seen:
            model = model_of([optimizer])
            while isinstance(inner := getattr(model, "module", compiled_from(model)), nn.Module):
                model = inner
            self._begin(optimizer, [model] if model is not None else [])

    def rows(self) -> list[Row]:
        """Return the rows of all models. With several models, names begin with the class of the model."""
        models = {id(model): model for model, _ in self._monitors}
        names = dict(zip(models, numbered([type(model).__name__ for model in models.values()], "{}{}"), strict=True))
        found = []
        for model, monitor in self._monitors:
            monitor.detach()
            rows = monitor.rows()
            found += rows if len(models) == 1 else [_of_model(row, names[id(model)]) for row in rows]
        return sorted(found, key=lambda row: row.step)

    def _begin(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> None:
        params = {*map(id, params_of(optimizer))}
        for model in models:
            if params.isdisjoint(map(id, model.parameters())):
                continue
            again = any(model is known for known, _ in self._monitors)
            kinds = tuple(kind for kind in TENSORS if not (again and kind.startswith("output")))
            self._seen.add(optimizer)
            self._monitors.append((model, Monitor(model, optimizer, every=self._every, tensors=kinds).attach()))


def _of_model(row: Row, name: str) -> Row:
    """A row whose modules are named with their model."""
    began_in = row.began_in if row.began_in in ("", OUTSIDE) else f"{name}.{row.began_in}"
    return replace(row, module=f"{name}.{row.module}", began_in=began_in)
