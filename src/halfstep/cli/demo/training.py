"""The demo's training, written to be read from top to bottom: a convolutional classifier of handwritten digits.

The call of ``amp.initialize`` in ``start`` and the block around ``backward`` in ``train_step`` make it mixed precision.
All other lines would be the same in an fp32 script, or measure.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp
from halfstep.core.dtypes import dtype_name
from halfstep.core.loss_scale import DynamicLossScale

from ...diagnostics.findings.memory import memory
from .measure import now, peak_bytes

__all__ = [
    "BATCH_SIZE",
    "EPOCH_STEPS",
    "LOSS_SCALE",
    "WARM_UP",
    "DemoRun",
    "DemoSettings",
    "Digits",
    "load_digits",
    "make_model",
    "start",
    "train",
    "train_step",
]

BATCH_SIZE = 64
EPOCH_STEPS = 1437 // BATCH_SIZE
WARM_UP = 5
"""Steps at the start of a run that do not count in its median step time."""
LOSS_SCALE = DynamicLossScale(init_scale=2.0**24, growth_interval=20)
"""The dynamic loss scale for float16, so high and so fast that a short run shows overflows and growth."""


@dataclass(frozen=True)
class Digits:
    """1,797 handwritten digits, four fifths of them to train on: images [N, 1, 16, 16] in fp32, labels [N]."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load_digits(device: torch.device) -> Digits:
    """Load scikit-learn's digits in double width and height, standardized, with a fixed split."""
    from sklearn import datasets

    bundle = datasets.load_digits()
    images = torch.tensor(bundle.images, dtype=torch.float32, device="cpu")[:, None]
    images = F.interpolate(images, size=(16, 16), mode="bilinear", align_corners=False)
    images = ((images - images.mean()) / images.std()).to(device)
    labels = torch.tensor(bundle.target, dtype=torch.int64, device="cpu").to(device)
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0), device="cpu").to(device)
    train, test = shuffled.split([len(labels) * 4 // 5, len(labels) - len(labels) * 4 // 5])
    return Digits(images[train], labels[train], images[test], labels[test])


def make_model(width: int = 64) -> nn.Module:
    """Make five 3x3 convolutions with BatchNorm. Every inner width is a multiple of 8, which 16-bit units require."""

    def conv(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *conv(1, width),
        *conv(width, width),
        nn.MaxPool2d(2),
        *conv(width, 2 * width),
        *conv(2 * width, 2 * width),
        nn.MaxPool2d(2),
        *conv(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


@dataclass(frozen=True)
class DemoSettings:
    """The runs of the demo: their levels, their classifier and their device.

    Attributes:
        levels: the levels, one run each.
        device: the device of all runs.
        dtype: the dtype of the levels above O0.
        epochs: passes over the data.
        seed: the seed of the initial weights and the data order.
        width: the number of channels of the first layer.
        beside: the dtype of an additional run at O2; None for no such run.
    """

    levels: Sequence[str]
    device: torch.device
    dtype: torch.dtype
    epochs: int = 7
    seed: int = 0
    width: int = 64
    beside: torch.dtype | None = None

    def runs(self) -> list[tuple[str, torch.dtype]]:
        """Return the level and the dtype of each run."""
        planned = [(level, torch.float32 if level == "O0" else self.dtype) for level in self.levels]
        return planned if self.beside is None else [*planned, ("O2", self.beside)]


@dataclass
class DemoRun:
    """A model in training at one opt level, with its measurements.

    Attributes:
        losses: the loss of each step.
        loss_scales: the loss scale of each step.
        step_seconds: the duration of each step.
        held_bytes: the bytes of weights, buffers, masters, gradients and optimizer state.
        peak_bytes: the peak during a step, including activations.
    """

    level: str
    dtype: torch.dtype
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    loss_scales: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    steps_skipped: int = 0
    test_accuracy: float = 0.0
    held_bytes: int = 0
    peak_bytes: int = 0

    @property
    def name(self) -> str:
        """The level and dtype, such as "O2 bfloat16"."""
        return f"{self.level} {dtype_name(self.dtype)}"

    @property
    def median_step(self) -> float:
        """The median step time in seconds, without warm-up steps."""
        return statistics.median(self.step_seconds[WARM_UP:] or self.step_seconds)

    @property
    def step_spread(self) -> float:
        """Half the interquartile range of the step times, in seconds."""
        times = self.step_seconds[WARM_UP:] or self.step_seconds
        low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (0.0, 0.0, 0.0)
        return (high - low) / 2

    @property
    def final_loss(self) -> float:
        """The mean loss of the last epoch."""
        return statistics.fmean(self.losses[-EPOCH_STEPS:])


def start(level: str, dtype: torch.dtype, settings: DemoSettings) -> DemoRun:
    """Make a new model and optimizer, equal for all levels, and prepare them at a level."""
    torch.manual_seed(settings.seed)
    model = make_model(settings.width).to(settings.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scale = LOSS_SCALE if dtype is torch.float16 and level in ("O1", "O2") else None
    half = None if level == "O0" else dtype
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=half, loss_scale=scale, verbosity=0)
    return DemoRun(level, dtype, model, optimizer)


def train_step(run: DemoRun, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Run one step at any level."""
    run.optimizer.zero_grad()
    loss = F.cross_entropy(run.model(images), labels)
    with amp.scale_loss(loss, run.optimizer) as scaled_loss:
        scaled_loss.backward()
    run.optimizer.step()
    return loss.detach()


def train(
    settings: DemoSettings,
    on_step: Callable[[str], None] = lambda name: None,
    on_epoch: Callable[[int, Sequence[DemoRun]], None] = lambda epoch, runs: None,
) -> list[DemoRun]:
    """Train at each level with the same seed and data order, one epoch of each level in turn.

    A machine's speed drifts. Because levels take turns, slow minutes affect all of them, and step times are comparable.

    Args:
        settings: the runs to train.
        on_step: a function to call with the name of a run after each of its steps.
        on_epoch: a function to call after each epoch of all runs, with its number (from 1) and the runs.

    Returns:
        The runs, in the order of ``settings.runs()``.
    """
    digits = load_digits(settings.device)
    shuffle = torch.Generator().manual_seed(settings.seed)
    try:
        runs = [start(level, dtype, settings) for level, dtype in settings.runs()]
        for epoch in range(1, settings.epochs + 1):
            order = torch.randperm(len(digits.train_labels), generator=shuffle, device="cpu").to(settings.device)
            batches = order.split(BATCH_SIZE)[:EPOCH_STEPS]  # without the last, smaller batch
            for run in runs:
                _train_epoch(run, digits, batches, on_step)
            on_epoch(epoch, runs)
        for run in runs:
            run.test_accuracy = _accuracy(run.model, digits)
            run.steps_skipped = amp.steps_skipped(run.optimizer)
            _measure_peak(run, digits)
    finally:
        amp.deactivate()
    return runs


def _train_epoch(run: DemoRun, digits: Digits, batches: Sequence[torch.Tensor], on_step: Callable[[str], None]) -> None:
    run.model.train()
    device = digits.train_images.device
    for batch in batches:
        images, labels = digits.train_images[batch], digits.train_labels[batch]
        run.loss_scales.append(amp.state_dict(optimizer=run.optimizer)["loss_scaler0"]["loss_scale"])
        began = now(device)
        loss = train_step(run, images, labels)
        run.step_seconds.append(now(device) - began)
        run.losses.append(loss.item())
        on_step(run.name)
    run.held_bytes = memory(run.model, run.optimizer).total


def _measure_peak(run: DemoRun, digits: Digits) -> None:
    """Run an additional step whose time and loss do not count."""
    run.model.train()
    run.optimizer.zero_grad()
    images, labels = digits.train_images[:BATCH_SIZE], digits.train_labels[:BATCH_SIZE]
    held = memory(run.model, run.optimizer).total
    run.peak_bytes = peak_bytes(lambda: train_step(run, images, labels), images.device, held)


@torch.no_grad()
def _accuracy(model: nn.Module, digits: Digits) -> float:
    model.eval()
    return float((model(digits.test_images).argmax(1) == digits.test_labels).float().mean())
