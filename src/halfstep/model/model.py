"""The training loop of ``Model``. Casts, loss scaling and master weights are those of ``amp``."""

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

from ..amp.auto_cast import auto_cast
from ..amp.decorate import decorate
from ..amp.grad_scaler import GradScaler
from ..core.checks import check_flag, check_kind
from ..core.dtypes import HALF_DTYPES, default_half, parse_dtype
from ..core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ..core.files import load_whole, save_whole
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
        network: the module to train; it stays where it is, and batches are moved to its device.

    Attributes:
        network: the module.
        optimizer: the one that ``prepare`` was given; None before.
        scaler: the loss scale, an ``amp.GradScaler``, which is disabled where the recipe needs none.
        stop_training: set it in a callback, and ``fit`` ends after the batch or epoch.

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
        """Set what to train with, and the precision of training, evaluation and prediction.

        Args:
            optimizer: over parameters of the network; only training needs it.
            loss: called as ``loss(*outputs, *labels)`` with floating outputs in fp32; gives a scalar, the mean over
                the batch.
            metrics: a metric of torchmetrics, a list of them, or a dict that names them. Any object will do that has
                ``update(*outputs, *labels)``, ``compute()`` and ``reset()``. Without a name it has that of its class.
            amp_configs: "O0", "O1", "O2", or a dict with ``level`` ("O1" if absent), ``dtype``, ``emulate``,
                ``custom_white_list`` and ``custom_black_list`` of ``amp.auto_cast``, and ``init_loss_scaling``,
                ``incr_ratio``, ``decr_ratio``, ``incr_every_n_steps``, ``decr_every_n_nan_or_inf`` and
                ``use_dynamic_loss_scaling`` of ``amp.GradScaler``. None is O0, plain training. Losses are scaled
                in float16, and in bfloat16 where a key of the scaler is given.

        Raises:
            ArgumentTypeError: an argument of the wrong kind.
            ArgumentValueError: an unknown level, key, dtype or op. Nothing has been changed then.
            UsageError: O2 for a network or optimizer that is decorated already.
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
        """Forward and backward on one batch and, if ``update``, a step; gradients add up until then.

        Returns:
            The loss: a detached fp32 scalar on the device.
        """
        self._need_optimizer()
        return self._train_batch(as_list(inputs), as_list(labels), update, 1.0)

    @torch.no_grad()
    def eval_batch(self, inputs: Any, labels: Any = None) -> torch.Tensor:
        """The loss of one batch in eval mode, as ``train_batch`` returns it. Metrics are updated."""
        self._need_loss()
        self.network.eval()
        return self._compute_loss(as_list(inputs), as_list(labels))

    @torch.no_grad()
    def predict_batch(self, inputs: Any) -> Any:
        """The network's outputs for one batch, in eval mode."""
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
        """Train.

        Args:
            train_data: a torch dataset, a list of samples whose labels are single numbers, or a loader: any other
                iterable of batches, whose last part is the label.
            eval_data: a dataset or loader to evaluate after every ``eval_freq`` epochs.
            batch_size: samples in a batch, for datasets.
            epochs: how often to go through the data.
            eval_freq: see ``eval_data``.
            log_freq: batches between two readings of the loss, for the bar and the lines.
            save_dir: where ``{epoch}.pt`` is written every ``save_freq`` epochs and ``final.pt`` at the end.
            save_freq: see ``save_dir``.
            verbose: 0 for silence, 1 for a progress bar, 2 for lines at level INFO of the logger "halfstep", which
                writes to stderr where a program has not set up logging.
            shuffle: whether a dataset is shuffled for training.
            num_workers: worker processes of the loaders, for datasets.
            callbacks: one ``Callback`` or several.
            accumulate_grad_batches: batches in a step, which is the step of one batch of all their samples. The last
                step of an epoch takes the batches that are left.
            drop_last: whether a dataset's last batch is left out if it is smaller than ``batch_size``.
            num_iters: after so many batches in all, ``fit`` ends as with ``stop_training``; None for all epochs.

        Raises:
            UsageError: before ``prepare`` with an optimizer and a loss.
            ArgumentValueError: a number that is not allowed, or a batch without a label.
            ArgumentTypeError: data, callbacks or labels of the wrong kind.
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
        """The mean loss over all samples, in eval mode, and every metric.

        The arguments are as for ``fit``; ``verbose=1`` shows a progress bar, whose last line has the results.
        ``log_freq`` is accepted for Paddle's sake. With ``num_iters`` only so many batches are evaluated.
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
        """The network's outputs, batch by batch. It is given as many parts of a batch as its forward has parameters.

        ``test_data`` may have labels or not. The arguments are as for ``fit``; ``verbose=1`` shows a progress bar.
        With ``stack_outputs=True`` the list has one tensor for each output of the network, with a row for each sample:
        ``model.predict(data, stack_outputs=True)[0]`` is the first output for all samples.

        Raises:
            ArgumentTypeError: for ``stack_outputs=True`` where the network returns something else than tensors.
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

        If saving is interrupted, the file that was there before stays.
        """
        state: dict[str, Any] = {"model": self.network.state_dict()}
        if training and self.optimizer is not None:
            state |= {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict()}
        save_whole(state, f"{fspath(path)}.pt")

    def load(self, path: str | PathLike[str], skip_mismatch: bool = False, reset_optimizer: bool = False) -> None:
        """Read what ``save`` wrote; call it after ``prepare``. Only plain data is unpickled.

        Args:
            path: as given to ``save``.
            skip_mismatch: True leaves those weights as they are that the file does not have, or has in another shape,
                and names them in one line of the log. Of the optimizer and the loss scaler nothing is loaded then.
            reset_optimizer: True leaves the optimizer and the loss scaler as they are.

        Raises:
            ArgumentTypeError: for a ``skip_mismatch`` that is neither True nor False.
            ArgumentValueError: for a file that ``save`` did not write, or weights that are missing or of other shapes.
                Nothing is loaded then.
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
        """Print a table of the network's layers, and return what is in it.

        Args:
            input_size: shape of an input with its batch dimension, or a list of shapes; the network runs on zeros
                once, in its precision and in eval mode, and the table shows the layers' outputs.
            dtypes: of the inputs, float32 where not given; a dtype or a list of them.
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
        """Train on some batches. Returns the logs, and how many batches it were."""
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
        """Inputs and labels, with their tensors on the device of the network."""
        device = self._device()
        return [[part.to(device) if isinstance(part, torch.Tensor) else part for part in parts] for parts in lists]
