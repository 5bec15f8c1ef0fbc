"""``halfstep.Model``: prepare, fit, evaluate and predict. The loop is here; every precision in it is amp's."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import nullcontext
from itertools import islice
from os import PathLike, fspath
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from .amp.auto_cast import auto_cast
from .amp.decorate import decorate
from .amp.grad_scaler import GradScaler
from .core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from .core.formats import default_half, parse_dtype

__all__ = ["Callback", "Model"]

_log = logging.getLogger("halfstep")

_LEVELS = ("O0", "O1", "O2")
_SCALER_KEYS = (
    "init_loss_scaling",
    "incr_ratio",
    "decr_ratio",
    "incr_every_n_steps",
    "decr_every_n_nan_or_inf",
    "use_dynamic_loss_scaling",
)
_LIST_KEYS = ("custom_white_list", "custom_black_list")


class Callback:
    """What ``fit`` calls on its way; override what you need. ``self.model`` is the ``Model``."""

    model: Model

    def on_epoch_begin(self, epoch: int) -> None:
        """Before the first batch of an epoch, counted from 0."""

    def on_batch_end(self, step: int, logs: Mapping[str, Any]) -> None:
        """After batch ``step`` of an epoch, counted from 0; ``logs`` has its loss, a tensor."""

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """After an epoch and its evaluation, whose entries are named ``eval_...`` in ``logs``."""


class Model:
    """A network with its loss, optimizer and precision.

    ::

        model = halfstep.Model(network)
        model.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs={"level": "O1", "dtype": "bfloat16"})
        model.fit(dataset, epochs=2, batch_size=32)

    Args:
        network: the module to train; it stays where it is, and batches are moved to its device.

    Source: Paddle's AMP guide, section 2.2.
    """

    def __init__(self, network: nn.Module) -> None:
        if not isinstance(network, nn.Module):
            raise ArgumentTypeError(f"network must be a torch.nn.Module, not {type(network).__name__}.")
        self.network = network
        self._optimizer: torch.optim.Optimizer | None = None
        self._loss: Callable[..., Any] | None = None
        self._metrics: list[Any] = []
        self._casts: dict[str, Any] | None = None
        self._scaler = GradScaler(enable=False)

    def prepare(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        loss: Callable[..., Any] | None = None,
        metrics: Any = None,
        amp_configs: str | Mapping[str, Any] | None = None,
    ) -> None:
        """Say what to train with, and in which precision; training, evaluation and prediction share it.

        Args:
            optimizer: over parameters of the network; needed to train only.
            loss: called as ``loss(*outputs, *labels)`` with floating outputs in fp32; gives a scalar.
            metrics: an object, or a list of them, with ``update(outputs, label)``, ``compute()`` and ``reset()``,
                as those of torchmetrics.
            amp_configs: "O0", "O1", "O2", or a dict with ``level`` ("O1" if absent), ``dtype``,
                ``custom_white_list`` and ``custom_black_list`` of ``amp.auto_cast``, and ``init_loss_scaling``,
                ``incr_ratio``, ``decr_ratio``, ``incr_every_n_steps``, ``decr_every_n_nan_or_inf`` and
                ``use_dynamic_loss_scaling`` of ``amp.GradScaler``. None is O0, plain training. Losses are scaled
                in float16, and in bfloat16 where a key of the scaler is given.

        Raises:
            ArgumentTypeError: an argument of the wrong kind.
            ArgumentValueError: an unknown level, key, dtype or op. Nothing has been changed then.
            UsageError: O2 for a network or optimizer that is decorated already.
        """
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}.")
        if loss is not None and not callable(loss):
            raise ArgumentTypeError(f"loss must be callable, not {type(loss).__name__}.")
        found = [] if metrics is None else list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
        for metric in found:
            if not all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset")):
                raise ArgumentTypeError(
                    f"metrics need update, compute and reset, as torchmetrics' have; {type(metric).__name__} does not."
                )
        level, configs = _checked(amp_configs)
        casts: dict[str, Any] | None = None
        scaler = GradScaler(enable=False)
        if level != "O0":
            device = self._device()
            half = default_half(device.type) if configs.get("dtype") is None else parse_dtype(configs["dtype"])
            casts = {"level": level, "dtype": half}
            casts |= {key: configs[key] for key in _LIST_KEYS if key in configs}
            auto_cast(**casts)
            scaling = {key: configs[key] for key in _SCALER_KEYS if key in configs}
            scaler = GradScaler(enable=half == torch.float16 or bool(scaling), **scaling)
            if level == "O2":
                decorate(self.network, optimizer, level="O2", dtype=half)
        self._optimizer, self._loss, self._metrics = optimizer, loss, found
        self._casts, self._scaler = casts, scaler

    # ---- one batch

    def train_batch(self, inputs: Any, labels: Any = None, update: bool = True) -> torch.Tensor:
        """Forward and backward on one batch and, if ``update``, a step; gradients add up until then.

        Returns:
            The loss: a detached fp32 scalar on the device.
        """
        return self._train_batch(_listed(inputs), _listed(labels), update, 1)

    @torch.no_grad()
    def eval_batch(self, inputs: Any, labels: Any = None) -> torch.Tensor:
        """The loss of one batch in eval mode, as ``train_batch`` returns it. Metrics are updated."""
        self.network.eval()
        return self._losses(_listed(inputs), _listed(labels))

    @torch.no_grad()
    def predict_batch(self, inputs: Any) -> Any:
        """What the network gives for one batch in eval mode."""
        self.network.eval()
        with self._scope():
            return self.network(*self._moved(_listed(inputs)))

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
        callbacks: Callback | Sequence[Callback] | None = None,
        accumulate_grad_batches: int = 1,
    ) -> None:
        """Train.

        Args:
            train_data: a torch dataset, or a loader: any other iterable of batches, whose last part is the label.
            eval_data: the same, evaluated after every ``eval_freq`` epochs.
            batch_size: samples in a batch, for datasets.
            epochs: how often to go through the data.
            eval_freq: see ``eval_data``.
            log_freq: batches between two log lines.
            save_dir: where ``{epoch}.pt`` is written every ``save_freq`` epochs and ``final.pt`` at the end.
            save_freq: see ``save_dir``.
            verbose: 0 for silence, 1 for a progress bar, 2 for lines at level INFO of the logger "halfstep".
            shuffle: whether a dataset is shuffled for training.
            num_workers: worker processes of the loaders, for datasets.
            callbacks: one ``Callback`` or several.
            accumulate_grad_batches: batches to a step, whose gradients are averaged; the last step of an epoch
                averages over those that are left.

        Raises:
            UsageError: before ``prepare`` with an optimizer and a loss.
            ArgumentValueError: a count below 1.
        """
        counts = {
            "epochs": epochs,
            "eval_freq": eval_freq,
            "log_freq": log_freq,
            "save_freq": save_freq,
            "accumulate_grad_batches": accumulate_grad_batches,
        }
        for name, count in counts.items():
            if count < 1:
                raise ArgumentValueError(f"{name}={count}, but it counts from 1.")
        self._need_optimizer()
        loader = _loader(train_data, batch_size, shuffle, num_workers)
        called = [] if callbacks is None else [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
        for callback in called:
            callback.model = self
        for epoch in range(epochs):
            for callback in called:
                callback.on_epoch_begin(epoch)
            _reset(self._metrics)
            loss = torch.tensor(float("nan"))
            batches = iter(_bar(loader, f"epoch {epoch + 1}/{epochs}") if verbose == 1 else loader)
            step = 0
            while window := list(islice(batches, accumulate_grad_batches)):
                for place, batch in enumerate(window, 1):
                    inputs, labels = _split(batch)
                    loss = self._train_batch(inputs, labels, place == len(window), len(window))
                    for callback in called:
                        callback.on_batch_end(step, {"loss": loss})
                    if verbose == 2 and step % log_freq == 0:
                        _log.info("epoch %d step %d loss %.4g", epoch + 1, step, loss.item())
                    step += 1
            logs = {"loss": loss.item()} | self._computed()
            if eval_data is not None and (epoch + 1) % eval_freq == 0:
                found = self.evaluate(eval_data, batch_size, verbose=0, num_workers=num_workers)
                logs |= {f"eval_{name}": value for name, value in found.items()}
            if verbose == 2:
                _log.info("epoch %d %s", epoch + 1, logs)
            for callback in called:
                callback.on_epoch_end(epoch, logs)
            if save_dir is not None and (epoch + 1) % save_freq == 0:
                self.save(f"{fspath(save_dir)}/{epoch}")
        if save_dir is not None:
            self.save(f"{fspath(save_dir)}/final")

    def evaluate(self, eval_data: Any, batch_size: int = 1, verbose: int = 1, num_workers: int = 0) -> dict[str, Any]:
        """The mean loss over all samples, in eval mode, and every metric by its class's name.

        Args:
            eval_data: as ``fit`` takes it.
            batch_size: for datasets.
            verbose: 1 for a progress bar.
            num_workers: for datasets.
        """
        _reset(self._metrics)
        loader = _loader(eval_data, batch_size, False, num_workers)
        total, samples = 0.0, 0
        for batch in _bar(loader, "evaluate") if verbose == 1 else loader:
            inputs, labels = _split(batch)
            size = len(labels[0])
            total += self.eval_batch(inputs, labels).item() * size
            samples += size
        return {"loss": total / max(samples, 1)} | self._computed()

    def predict(self, test_data: Any, batch_size: int = 1, verbose: int = 1, num_workers: int = 0) -> list[Any]:
        """What the network gives, batch by batch. Of a batch it takes as many parts as its forward has parameters."""
        loader = _loader(test_data, batch_size, False, num_workers)
        kinds = [p.kind for p in inspect.signature(self.network.forward).parameters.values()]
        count = None if inspect.Parameter.VAR_POSITIONAL in kinds else len(kinds)
        batches = _bar(loader, "predict") if verbose == 1 else loader
        return [self.predict_batch(_listed(batch)[:count]) for batch in batches]

    # ---- state

    def save(self, path: str | PathLike[str], training: bool = True) -> None:
        """Write ``{path}.pt``: the network's state and, if ``training``, the optimizer's and the loss scaler's."""
        state: dict[str, Any] = {"model": self.network.state_dict()}
        if training and self._optimizer is not None:
            state |= {"optimizer": self._optimizer.state_dict(), "scaler": self._scaler.state_dict()}
        torch.save(state, f"{fspath(path)}.pt")

    def load(self, path: str | PathLike[str], reset_optimizer: bool = False) -> None:
        """Read what ``save`` wrote; call it after ``prepare``. Only plain data is unpickled.

        Args:
            path: as given to ``save``.
            reset_optimizer: True leaves the optimizer and the loss scaler as they are.
        """
        state = torch.load(f"{fspath(path)}.pt", weights_only=True, map_location=self._device())
        self.network.load_state_dict(state["model"])
        if self._optimizer is not None and not reset_optimizer and "optimizer" in state:
            self._optimizer.load_state_dict(state["optimizer"])
            if state["scaler"]:
                self._scaler.load_state_dict(state["scaler"])

    def summary(self) -> dict[str, int]:
        """The number of parameters: ``total_params`` and ``trainable_params``."""
        params = list(self.network.parameters())
        return {
            "total_params": sum(p.numel() for p in params),
            "trainable_params": sum(p.numel() for p in params if p.requires_grad),
        }

    # ---- inside

    def _train_batch(self, inputs: list[Any], labels: list[Any], update: bool, window: int) -> torch.Tensor:
        optimizer = self._need_optimizer()
        self.network.train()
        loss = self._losses(inputs, labels)
        self._scaler.scale(loss / window).backward()
        if update:
            self._scaler.step(optimizer)
            self._scaler.update()
            optimizer.zero_grad()
        return loss.detach()

    def _losses(self, inputs: list[Any], labels: list[Any]) -> torch.Tensor:
        if self._loss is None:
            raise UsageError("There is no loss; give one to Model.prepare(optimizer, loss).")
        labels = self._moved(labels)
        with self._scope():
            outputs = [_wide(part) for part in _listed(self.network(*self._moved(inputs)))]
            loss: torch.Tensor = self._loss(*outputs, *labels)
        for metric in self._metrics:
            metric.update(*(part.detach() for part in outputs), *labels)
        return loss.float()

    def _scope(self) -> Any:
        return nullcontext() if self._casts is None else auto_cast(**self._casts)

    def _need_optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None or self._loss is None:
            raise UsageError("Training needs an optimizer and a loss; give both to Model.prepare(optimizer, loss).")
        return self._optimizer

    def _device(self) -> torch.device:
        return next((p.device for p in self.network.parameters()), torch.device("cpu"))

    def _moved(self, parts: list[Any]) -> list[Any]:
        device = self._device()
        return [part.to(device) if isinstance(part, torch.Tensor) else part for part in parts]

    def _computed(self) -> dict[str, Any]:
        return {type(metric).__name__: metric.compute() for metric in self._metrics}


def _checked(amp_configs: Any) -> tuple[str, dict[str, Any]]:
    """The level, and the other keys."""
    if amp_configs is None:
        return "O0", {}
    if isinstance(amp_configs, str):
        if amp_configs not in _LEVELS:
            raise ArgumentValueError(f"The level of amp_configs should be 'O0', 'O1' or 'O2', not {amp_configs!r}.")
        return amp_configs, {}
    if not isinstance(amp_configs, Mapping):
        raise ArgumentTypeError(f"amp_configs should be a level or a dict, not {type(amp_configs).__name__}.")
    configs = dict(amp_configs)
    level = configs.pop("level", "O1" if configs or "level" in amp_configs else "O0")
    if level not in _LEVELS:
        raise ArgumentValueError(f"amp_configs['level'] should be 'O0', 'O1' or 'O2', not {level!r}.")
    if "use_pure_fp16" in configs:
        raise ArgumentValueError("'use_pure_fp16' is no key of amp_configs; write 'level': 'O2' instead.")
    for key in ("use_fp16_guard", "custom_black_varnames"):
        if key in configs:
            raise ArgumentValueError(f"{key!r} is supported in static graph mode only; leave it out of amp_configs.")
    allowed = ("dtype", *_LIST_KEYS, *_SCALER_KEYS)
    if unknown := [key for key in configs if key not in allowed]:
        raise ArgumentValueError(f"amp_configs has unknown keys {unknown}; it takes 'level', {str(allowed)[1:-1]}.")
    return level, configs


def _listed(parts: Any) -> list[Any]:
    return [] if parts is None else list(parts) if isinstance(parts, (list, tuple)) else [parts]


def _split(batch: Any) -> tuple[list[Any], list[Any]]:
    parts = _listed(batch)
    if len(parts) < 2:
        raise ArgumentValueError(f"A batch needs inputs and a label after them; this one has {len(parts)} part.")
    return parts[:-1], parts[-1:]


def _wide(part: Any) -> Any:
    return part.float() if part.dtype in (torch.float16, torch.bfloat16) else part


def _reset(metrics: Iterable[Any]) -> None:
    for metric in metrics:
        metric.reset()


def _loader(data: Any, batch_size: int, shuffle: bool, num_workers: int) -> Iterable[Any]:
    if hasattr(data, "__getitem__") and not isinstance(data, (DataLoader, list, tuple)):
        return DataLoader(data, batch_size=batch_size, shuffle=shuffle, num_workers=num_workers)
    loader: Iterable[Any] = data
    return loader


def _bar(loader: Iterable[Any], text: str) -> Iterator[Any]:
    from rich.progress import track

    total = len(loader) if isinstance(loader, Sized) else None
    yield from track(loader, text, total=total)
