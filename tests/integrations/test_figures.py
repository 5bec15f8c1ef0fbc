"""What is logged about precision: the same figures through every trainer, to TensorBoard, wandb or a dict."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import halfstep
from halfstep import amp
from halfstep.integrations.figures import FiguresCallback, figures, sink
from tests.integrations import direct_loop as direct
from tests.support.python import python
from tests.support.worlds import unscaled_step, with_optimizer


class Measured:
    """A monitor."""

    def latest(self) -> dict[str, float]:
        return {"underflow": 0.25}


def data(batches: int = 4) -> TensorDataset:
    parts = direct.batches(batches, overflow_at=1)
    return TensorDataset(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))


def fitted(target: Any, **options: Any) -> halfstep.Model:
    model, optimizer = with_optimizer(halfstep.Model(direct.classifier()), torch.optim.AdamW, lr=1e-2)
    configs = {"level": "O2", "dtype": "float16", "init_loss_scaling": 1024.0, "decr_every_n_nan_or_inf": 1}
    model.prepare(optimizer, nn.CrossEntropyLoss(), amp_configs=configs)
    callback = FiguresCallback(target, **options)
    model.fit(data(), batch_size=8, shuffle=False, verbose=0, callbacks=callback)
    return model


def test_model_fit_logs_to_a_dict() -> None:
    logged: dict[str, Any] = {}
    fitted(logged, every=2, monitor=Measured())
    assert logged["halfstep/loss_scale"] == [(2, 512.0), (4, 512.0)]
    assert logged["halfstep/overflows"] == [(2, 1.0), (4, 1.0)]
    assert logged["underflow"] == [(2, 0.25), (4, 0.25)]
    assert [step for step, _ in logged["halfstep/findings"]] == [2, 4]


def test_a_monitor_of_numerics_is_logged_too() -> None:
    model = direct.classifier()
    optimizer = direct.optimizer_of("AdamW", model.parameters())
    amp.decorate(model, optimizer, level="O2", dtype="bfloat16")
    x, y = direct.batches(1)[0]
    with halfstep.numerics.Monitor(model, optimizer, every=1) as monitor:
        for _ in range(3):
            with amp.auto_cast(level="O2", dtype="bfloat16"):
                loss = nn.functional.cross_entropy(model(x), y)
            unscaled_step(loss, optimizer)
        found = figures(model, optimizer, None, monitor)
    measured = {name: value for name, value in found.items() if name.startswith("numerics/")}
    assert measured == monitor.latest()
    assert measured["numerics/0/output/amax"] > 0


def test_model_fit_logs_to_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed; `make integrations` installs it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        fitted(writer, every=1)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("halfstep/overflows")] == [(1, 0), (2, 1), (3, 1), (4, 1)]


WANDB = """
import sys, wandb
from tests.integrations.test_figures import fitted
with wandb.init(mode="offline", dir=sys.argv[1], project="halfstep") as run:
    fitted(run, every=1)
    print(run.summary["halfstep/overflows"] == 1.0)
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed; `make integrations` installs it")
def test_model_fit_logs_to_a_run_of_wandb(tmp_path: Path) -> None:
    """In a process of its own: importing wandb takes longer, the more modules are loaded."""
    run = python("-c", WANDB, str(tmp_path), quiet=True)
    assert run.stdout.splitlines()[-1:] == ["True"], run.stderr


def test_a_run_is_logged_to_by_its_log() -> None:
    class Run:
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def log(self, values: dict[str, float], step: int) -> None:
            self.rows.append((step, values))

    run = Run()
    sink(run)({"a": 1.0}, 3)
    assert run.rows == [(3, {"a": 1.0})]


def test_findings_are_counted_by_their_codes() -> None:
    model, optimizer = with_optimizer(direct.classifier().to(torch.bfloat16), torch.optim.AdamW, lr=1e-6)
    codes = [finding.code for finding in halfstep.check(model, optimizer)]
    found = figures(model, optimizer)
    assert found["halfstep/findings"] == len(codes) > 0
    assert {name for name in found if name.startswith("halfstep/HS")} == {f"halfstep/{code}" for code in codes}
    assert "halfstep/loss_scale" not in found
    assert "halfstep/loss_scale" not in figures(model, optimizer, amp.GradScaler(False))


def test_lightning_logs_them_through_its_loggers() -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed; `make integrations` installs it")
    from lightning.pytorch.loggers.logger import DummyLogger

    from halfstep.integrations.lightning import HalfstepCallback, HalfstepPrecision
    from tests.integrations.test_lightning import Classifier, fit

    class Kept(DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[Any] = []

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # type: ignore[override]
            self.rows.append((step, metrics))

    logger = Kept()
    callback = HalfstepCallback(every_n_steps=2, monitor=Measured())
    options = {"logger": logger, "callbacks": callback, "log_every_n_steps": 1}
    fit(Classifier(), HalfstepPrecision("O2", "float16"), direct.batches(overflow_at=2), **options)
    found = [(step, row) for step, row in logger.rows if "halfstep/overflows" in row]
    assert [(step, row["halfstep/overflows"], row["underflow"]) for step, row in found] == [
        (2, 0.0, 0.25),
        (4, 1.0, 0.25),
        (6, 1.0, 0.25),
    ]


@pytest.mark.exhaustive
def test_transformers_log_them_with_the_loss(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="Transformers is not installed; `make integrations` installs it")
    from tests.integrations.test_accelerate import forget
    from tests.integrations.test_transformers import Halfstep, arguments, llama, sentences

    forget()
    scaler = amp.GradScaler(init_loss_scaling=2.0**120, decr_ratio=2.0**-110, decr_every_n_nan_or_inf=1)
    trainer = Halfstep(
        llama(),
        arguments(tmp_path),
        train_dataset=sentences(),
        halfstep={"level": "O2", "dtype": "float16", "scaler": scaler},
        monitor=Measured(),
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["halfstep/overflows"] for row in rows] == [1.0] * 6
    assert [row["halfstep/loss_scale"] for row in rows] == [1024.0] * 6
    assert rows[0]["underflow"] == 0.25
    forget()
