"""The training loop of ``Model``. ``amp`` does the casts, the loss scaling and the master weights."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from os import PathLike, fspath
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import nn

from ...amp.auto_cast import auto_cast
from ...amp.decorate import decorate
from ...amp.grad_scaler import GradScaler
from ...core.checks import check_flag, check_kind
from ...core.dtypes import HALF_DTYPES, default_half, parse_dtype
from ...core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ...core.files import load_whole, save_whole
from .callbacks import Callback, Callbacks, call, calling, check_running
from .configs import LIST_KEYS, SCALER_KEYS, read_configs
from .data import as_list, as_loader, batch_size_of, inputs_and_labels, length_of, shapes_of, stacked
from .metrics import compute_metrics, name_metrics, reset_metrics
from .summary import summarize

__all__ = ["Model"]

_log = logging.getLogger("halfstep")


class Model:
    """A network with its loss, optimizer and precision.

    ::

        model = halfstep.Model(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs={"level": "O1", "dtype": "bfloat16"})
        model.fit(dataset, epochs=2, batch_size=32)

    Args:
        network: the module to train. It stays on its device, and batches are moved there.

    Attributes:
        network: the module.
        optimizer: the optimizer given to ``prepare``; None before that call.
        scaler: an ``amp.GradScaler``, disabled if the configuration needs no loss scaling.
        stop_training: set to True in a callback to end ``fit`` after the current batch or epoch.

    Source: Paddle's AMP guide, section 2.2.
    """

    def __init__(self, network: nn.Module) -> None:
        check_kind("network", network, nn.Module, "a torch.nn.Module")
        self.network = network
        self.stop_training = False
        self.optimizer: torch.optim.Optimizer | None = None
        self._loss: Callable[..., Any] | None = None
        self._metrics: dict[str, Any] = {}
        self._scope: AbstractContextManager[Any] = nullcontext()
        self.scaler = GradScaler(enable=False)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the network."""
        return list(self.network.parameters())

    def prepare(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Callable[..., Any] | None = None,
        metrics: Any = None,
        amp_configs: str | Mapping[str, Any] | None = None,
    ) -> None:
        """Set the optimizer, the loss and the precision of training, evaluation and prediction.

        Args:
            optimizer: an optimizer of the network's parameters; only training needs it.
            loss: a function ``loss(*outputs, *labels)``, called with floating outputs in fp32, that returns a scalar:
                the mean over the batch.
            metrics: a torchmetrics metric, a list of metrics, or a dict that names them. Any object works that has
                ``update(*outputs, *labels)``, ``compute()`` and ``reset()``. An unnamed metric gets the name of its
                class.
            amp_configs: "O0", "O1", "O2", or a dict with ``level`` ("O1" if absent), ``dtype``, ``emulate``,
                ``custom_white_list``, ``custom_black_list`` and ``custom_wide_list`` of ``amp.auto_cast``, and
                ``init_loss_scaling``, ``incr_ratio``, ``decr_ratio``, ``incr_every_n_steps``,
                ``decr_every_n_nan_or_inf`` and ``use_dynamic_loss_scaling`` of ``amp.GradScaler``. None is O0, plain
                training. Losses are scaled in float16, and in bfloat16 where a key of the scaler is given.

        Raises:
            ArgumentTypeError: for an argument of the wrong type.
            ArgumentValueError: for an unknown level, key, dtype or op. Nothing has changed in this case.
            UsageError: for O2 with a network or optimizer that is already decorated.
        """
        check_kind("optimizer", optimizer, (torch.optim.Optimizer, NoneType), "a torch.optim.Optimizer")
        if loss is not None and not callable(loss):
            raise ArgumentTypeError(f"loss must be callable, not {type(loss).__name__}.")
        named = name_metrics(metrics)
        level, configs = read_configs(amp_configs)
        scope: AbstractContextManager[Any] = nullcontext()
        scaler = GradScaler(enable=False)
        if level != "O0":
            half = default_half(self._device()) if configs.get("dtype") is None else parse_dtype(configs["dtype"])
            casts = {key: configs[key] for key in ("emulate", *LIST_KEYS) if key in configs}
            scope = auto_cast(level=level, dtype=half, **casts).casting
            scaling = {key: configs[key] for key in SCALER_KEYS if key in configs}
            scaler = GradScaler(enable=half == torch.float16 or bool(scaling), **scaling)
            if level == "O2":
                decorate(self.network, optimizer, level="O2", dtype=half, emulate=configs.get("emulate", "auto"))
        self.optimizer, self._loss, self._metrics = optimizer, loss, named
        self._scope, self.scaler = scope, scaler

    # ---- one batch

    def train_batch(self, inputs: Any, labels: Any = None, update: bool = True) -> torch.Tensor:
        """Run forward and backward on one batch and, if ``update``, a step. Without a step, gradients accumulate.

        Returns:
            The loss, a detached fp32 scalar on the device.
        """
        self._need_optimizer()
        return self._train_batch(as_list(inputs), as_list(labels), update, 1.0)

    @torch.no_grad()
    def eval_batch(self, inputs: Any, labels: Any = None) -> torch.Tensor:
        """Compute the loss of one batch in eval mode, and update the metrics.

        Returns:
            The loss, a detached fp32 scalar on the device.
        """
        self._need_loss()
        self.network.eval()
        return self._compute_loss(as_list(inputs), as_list(labels))

    @torch.no_grad()
    def predict_batch(self, inputs: Any) -> Any:
        """Compute the network's outputs for one batch, in eval mode."""
        self.network.eval()
        (moved,) = self._moved(as_list(inputs))
        with self._scope:
            return self.network(*moved)

    # ---- many batches

    def fit(
        self,
        train_data: Any,
        eval_data: Any = None,
        batch_size: int = 1,
        epochs: int = 1,
        eval_freq: int = 1,
        log_freq: int = 10,
        save_dir: str | PathLike[str] | None = None,
        save_freq: int = 1,
        verbose: int = 1,
        shuffle: bool = True,
        num_workers: int = 0,
        callbacks: Callbacks = None,
        accumulate_grad_batches: int = 1,
        *,
        drop_last: bool = False,
        num_iters: int | None = None,
    ) -> None:
        """Train the network.

        Args:
            train_data: a torch dataset, a list of samples whose labels are single numbers, or a loader: any other
                iterable of batches. The last part of a batch is the label.
            eval_data: a dataset or loader to evaluate after every ``eval_freq`` epochs.
            batch_size: samples in a batch, for datasets.
            epochs: passes over the data.
            eval_freq: see ``eval_data``.
            log_freq: batches between two reads of the loss for the progress bar and the log lines.
            save_dir: the folder for ``{epoch}.pt``, written every ``save_freq`` epochs, and ``final.pt``, written at
                the end.
            save_freq: see ``save_dir``.
            verbose: 0 for silence, 1 for a progress bar, 2 for lines at level INFO of the logger "halfstep", which
                    writes to stderr if the program has not set up logging.
            shuffle: True to shuffle a dataset for training.
            num_workers: worker processes of the loaders, for datasets.
            callbacks: one ``Callback`` or several.
            accumulate_grad_batches: batches per step, which equals one step on a batch of all their samples. The last
                step of an epoch uses the remaining batches.
            drop_last: True to leave out a dataset's last batch if it is smaller than ``batch_size``.
            num_iters: the total number of batches after which ``fit`` ends as with ``stop_training``; None for all
                epochs.

        Raises:
            UsageError: if ``prepare`` has not set an optimizer and a loss.
            ArgumentValueError: for a number that is not allowed, or a batch without a label.
            ArgumentTypeError: for data, callbacks or labels of the wrong type.
        """
        counts = {"batch_size": batch_size, "epochs": epochs, "eval_freq": eval_freq, "log_freq": log_freq}
        counts |= {"save_freq": save_freq, "accumulate_grad_batches": accumulate_grad_batches}
        check_running(num_workers, verbose, callbacks, num_iters, **counts)
        self._need_optimizer()
        loader = as_loader(train_data, batch_size, shuffle, num_workers, check_flag("drop_last", drop_last))
        evaluated = None if eval_data is None else as_loader(eval_data, batch_size, False, num_workers)
        self.stop_training = False
        logs: dict[str, Any] = {}
        with calling(self, callbacks, length_of(loader), verbose, log_freq, epochs) as (own, called):
            call(called, "on_train_begin", logs)
            for epoch in range(epochs):
                call(called, "on_epoch_begin", epoch, logs)
                logs, steps = self._train_epoch(islice(loader, num_iters), accumulate_grad_batches, called)
                if num_iters is not None:
                    num_iters -= steps
                    self.stop_training |= num_iters == 0
                if evaluated is not None and (epoch + 1) % eval_freq == 0:
                    logs |= {f"eval_{name}": value for name, value in self._evaluate(evaluated, own).items()}
                call(called, "on_epoch_end", epoch, logs)
                if save_dir is not None and (epoch + 1) % save_freq == 0:
                    self.save(Path(save_dir) / str(epoch))
                if self.stop_training:
                    break
            call(called, "on_train_end", logs)
        if save_dir is not None:
            self.save(Path(save_dir) / "final")

    def evaluate(
        self,
        eval_data: Any,
        batch_size: int = 1,
        log_freq: int = 10,
        verbose: int = 1,
        num_workers: int = 0,
        callbacks: Callbacks = None,
        num_iters: int | None = None,
    ) -> dict[str, Any]:
        """Compute the mean loss over all samples, in eval mode, and every metric.

        The arguments are as for ``fit``; ``verbose=1`` shows a progress bar whose last line has the results.
        ``log_freq`` is accepted for compatibility with Paddle. ``num_iters`` limits the number of batches.
        """
        check_running(num_workers, verbose, callbacks, num_iters, batch_size=batch_size, log_freq=log_freq)
        self._need_loss()
        loader = as_loader(eval_data, batch_size, False, num_workers)
        with calling(self, callbacks, length_of(loader, num_iters), verbose) as (_, called):
            return self._evaluate(islice(loader, num_iters), called)

    def predict(
        self,
        test_data: Any,
        batch_size: int = 1,
        num_workers: int = 0,
        stack_outputs: bool = False,
        verbose: int = 1,
        callbacks: Callbacks = None,
    ) -> list[Any]:
        """Compute the network's outputs, batch by batch. The network gets the parts that its forward takes.

        ``test_data`` may have labels. The arguments are as for ``fit``; ``verbose=1`` shows a progress bar.
        With ``stack_outputs=True`` the list has one tensor per output of the network, with one row per sample:
        ``model.predict(data, stack_outputs=True)[0]`` is the first output for all samples.

        Raises:
            ArgumentTypeError: for ``stack_outputs=True`` if the network returns anything but tensors.
        """
        check_running(num_workers, verbose, callbacks, batch_size=batch_size)
        stacks = check_flag("stack_outputs", stack_outputs)
        loader = as_loader(test_data, batch_size, False, num_workers)
        kinds = [p.kind for p in inspect.signature(self.network.forward).parameters.values()]
        count = None if inspect.Parameter.VAR_POSITIONAL in kinds else len(kinds)
        found = []
        with calling(self, callbacks, length_of(loader), verbose) as (_, called):
            call(called, "on_predict_begin", {})
            for step, batch in enumerate(loader):
                found.append(self.predict_batch(as_list(batch)[:count]))
                call(called, "on_predict_batch_end", step, {"outputs": found[-1]})
            call(called, "on_predict_end", {})
        return stacked(found) if stacks else found

    # ---- state

    def save(self, path: str | PathLike[str], training: bool = True) -> None:
        """Write ``{path}.pt``: the network's state and, if ``training``, the optimizer's and the loss scaler's.

        If saving is interrupted, an existing file is left intact.
        """
        state: dict[str, Any] = {"model": self.network.state_dict()}
        if training and self.optimizer is not None:
            state |= {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}
        save_whole(state, f"{fspath(path)}.pt")

    def load(self, path: str | PathLike[str], skip_mismatch: bool = False, reset_optimizer: bool = False) -> None:
        """Load a file that ``save`` wrote; call it after ``prepare``. Only plain data is unpickled.

        Args:
            path: the path given to ``save``.
            skip_mismatch: True keeps weights that the file lacks, or has in another shape, and names them in one line
                of the log. The states of the optimizer and the loss scaler are then not loaded.
            reset_optimizer: True keeps the current states of the optimizer and the loss scaler.

        Raises:
            ArgumentTypeError: if ``skip_mismatch`` is neither True nor False.
            ArgumentValueError: for a file that ``save`` did not write, and for weights that are missing or have other
                shapes. Nothing is loaded in this case.
        """
        skips = check_flag("skip_mismatch", skip_mismatch)
        file = f"{fspath(path)}.pt"
        state = load_whole(file, ("model",), "Model.save", self._device())
        own, saved = map(shapes_of, (self.network.state_dict(), state["model"]))
        here = {name: shape for name, shape in own.items() if saved.get(name) != shape}
        differ = {name: f"{name} has shape {saved.get(name, 'none')} in it and {here[name]} here" for name in here}
        if differ:
            text = f"{file} does not match this network: {', '.join(differ.values())}."
            if not skips:
                raise ArgumentValueError(
                    f"{text} Load it into the network that it was saved from, or leave these out by "
                    "skip_mismatch=True. Nothing was loaded."
                )
            _log.warning("%s These weights, the optimizer and the loss scaler stay as they are.", text)
        matching = {name: value for name, value in state["model"].items() if name not in differ}
        self.network.load_state_dict(matching, strict=not skips)
        if self.optimizer is not None and not (reset_optimizer or differ) and "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
            if state["scaler"]:
                self.scaler.load_state_dict(state["scaler"])

    def summary(self, input_size: Any = None, dtypes: Any = None, verbose: int = 1) -> dict[str, Any]:
        """Print a table of the network's layers, and return its contents.

        Args:
            input_size: the shape of an input with its batch dimension, or a list of shapes. The network runs once on
                zeros, in its precision and in eval mode, and the table shows the layers' outputs.
            dtypes: a dtype or a list of dtypes for the inputs; float32 by default.
            verbose: 0 for silence.

        Returns:
            ``total_params``, ``trainable_params``, and ``layers``, each with ``name``, ``type``, ``output_shape``,
            ``dtype`` and ``params``.
        """
        with self._scope:
            return summarize(self.network, self._device(), input_size, dtypes, verbose)

    # ---- inside

    def _train_epoch(
        self, batches: Iterator[Any], accumulate: int, called: list[Callback]
    ) -> tuple[dict[str, Any], int]:
        """Train on up to one epoch of batches; returns the logs and the number of batches."""
        reset_metrics(self._metrics, self._device())
        step = 0
        logs: dict[str, Any] = {}
        while not self.stop_training and (window := [inputs_and_labels(b) for b in islice(batches, accumulate)]):
            sizes = [batch_size_of(labels) for _, labels in window]
            for place, ((inputs, labels), size) in enumerate(zip(window, sizes, strict=True), 1):
                call(called, "on_train_batch_begin", step, {})
                logs = {"loss": self._train_batch(inputs, labels, place == len(window), sum(sizes) / size)}
                call(called, "on_train_batch_end", step, logs)
                step += 1
        read = {name: value.item() for name, value in logs.items()}
        return read | (compute_metrics(self._metrics) if step else {}), step

    def _evaluate(self, loader: Iterable[Any], called: list[Callback]) -> dict[str, Any]:
        reset_metrics(self._metrics, self._device())
        call(called, "on_eval_begin", {})
        total, samples = 0.0, 0
        for step, batch in enumerate(loader):
            inputs, labels = inputs_and_labels(batch)
            loss = self.eval_batch(inputs, labels)
            call(called, "on_eval_batch_end", step, {"loss": loss})
            size = batch_size_of(labels)
            total += loss.item() * size
            samples += size
        logs = {"loss": total / samples} | compute_metrics(self._metrics) if samples else {}
        call(called, "on_eval_end", logs)
        return logs

    def _train_batch(self, inputs: list[Any], labels: list[Any], update: bool, share: float) -> torch.Tensor:
        assert self.optimizer is not None
        self.network.train()
        loss = self._compute_loss(inputs, labels)
        self.scaler.scale(loss / share).backward()
        if update:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return loss.detach()

    def _compute_loss(self, inputs: list[Any], labels: list[Any]) -> torch.Tensor:
        assert self._loss is not None
        inputs, labels = self._moved(inputs, labels)
        with self._scope:
            found = as_list(self.network(*inputs))
            outputs = [x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF_DTYPES else x for x in found]
            loss: torch.Tensor = self._loss(*outputs, *labels)
        for metric in self._metrics.values():
            metric.update(*[output.detach() for output in outputs], *labels)
        return loss.float()

    def _need_optimizer(self) -> None:
        if self.optimizer is None or self._loss is None:
            raise UsageError("Training needs an optimizer and a loss; give both to Model.prepare(optimizer, loss).")

    def _need_loss(self) -> None:
        if self._loss is None:
            raise UsageError("There is no loss; give one to Model.prepare(optimizer, loss).")

    def _device(self) -> torch.device:
        return next((p.device for p in self.network.parameters()), torch.device("cpu"))

    def _moved(self, *lists: list[Any]) -> list[list[Any]]:
        """Move the tensors of inputs and labels to the device of the network."""
        device = self._device()
        return [[part.to(device) if isinstance(part, torch.Tensor) else part for part in parts] for parts in lists]
