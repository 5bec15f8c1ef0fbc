"""Lightning Fabric with ``HalfstepFabricPrecision`` trains as the plain loop does, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is not installed; `make integrations` installs it")

from lightning.fabric import Fabric
from torch.nn import functional as F

from halfstep import amp, optimizers
from halfstep.core.errors import UsageError
from halfstep.integrations.lightning import HalfstepFabricPrecision
from tests.integrations import direct_loop as direct
from tests.support.worlds import step_and_clear, with_optimizer


class Run:
    """A model, its optimizer and its precision, brought up by Fabric."""

    def __init__(self, level: str, dtype: str, optimizer: str) -> None:
        self.precision = HalfstepFabricPrecision(level, dtype)
        self.fabric = Fabric(accelerator="cpu", devices=1, plugins=self.precision)
        model = direct.classifier()
        stepper = direct.optimizer_of(optimizer, model.parameters())
        self.model, self.optimizer = self.fabric.setup(*self.precision.prepare(model, stepper))
        self.losses: list[float] = []

    def train(self, data: Any, *, accumulate: int = 1, clip: float | None = None, clip_by: str = "norm") -> Run:
        for i, (x, y) in enumerate(data):
            loss = F.cross_entropy(self.model(x), y)
            self.losses.append(loss.item())
            self.fabric.backward(loss / accumulate)
            if (i + 1) % accumulate == 0:
                if clip is not None:
                    limit = {"max_norm" if clip_by == "norm" else "clip_val": clip}
                    self.fabric.clip_gradients(self.model, self.optimizer, **limit)
                step_and_clear(self.optimizer)
        return self

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.precision.scaler}

    def trained(self) -> direct.Trained:
        weights = [p.detach().clone() for p in amp.master_params(self.optimizer)]
        return direct.Trained(self.losses, weights, self.precision.scaler.get_scale())


@pytest.mark.parametrize(("accumulate", "clip", "clip_by"), direct.WINDOWS)
@pytest.mark.parametrize("optimizer", list(direct.OPTIMIZERS))
@pytest.mark.parametrize(("level", "dtype"), direct.RECIPES)
def test_trains_as_the_plain_loop_does(
    level: str, dtype: str, optimizer: str, accumulate: int, clip: float | None, clip_by: str
) -> None:
    options = {"accumulate": accumulate, "clip": clip, "clip_by": clip_by}
    mine = Run(level, dtype, optimizer).train(direct.batches(), **options).trained()
    direct.same(mine, direct.train(level, dtype, optimizer, loss_in_scope=False, **options))


@pytest.mark.parametrize(("level", "dtype"), direct.RECIPES)
def test_resumes_bit_for_bit(level: str, dtype: str, tmp_path: Path) -> None:
    data = direct.batches(8, overflow_at=1 if dtype == "float16" else None)
    whole = Run(level, dtype, "AdamW").train(data).trained()
    first = Run(level, dtype, "AdamW").train(data[:4])
    first.fabric.save(tmp_path / "last.ckpt", first.state())
    second = Run(level, dtype, "AdamW")
    second.fabric.load(tmp_path / "last.ckpt", second.state())
    second.train(data[4:])
    direct.same(second.trained()._replace(losses=[*first.losses, *second.losses]), whole)


def test_a_step_says_whether_it_was_taken() -> None:
    run = Run("O2", "float16", "AdamW(fused=True)")
    taken = []
    for x, y in direct.batches(3, overflow_at=1):
        run.fabric.backward(F.cross_entropy(run.model(x), y))
        taken.append(bool(run.optimizer.step()))
        run.optimizer.zero_grad()
    assert taken == [True, False, True]


def test_16_bit_weights_without_masters_are_refused() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=HalfstepFabricPrecision("O2", "bfloat16"))
    model = direct.classifier()
    model, optimizer = fabric.setup(model, direct.optimizer_of("AdamW", model.parameters()))
    x, y = direct.batches(1)[0]
    fabric.backward(F.cross_entropy(model(x), y))
    with pytest.raises(UsageError, match=r"precision\.prepare"):
        optimizer.step()


def test_outputs_are_fp32() -> None:
    run = Run("O1", "bfloat16", "AdamW")
    assert run.model(torch.randn(2, 12)).dtype is torch.float32


@pytest.mark.parametrize("optimizer", ["AdamW", "FusedAdam"])
def test_initialize_takes_what_setup_has_wrapped(optimizer: str) -> None:
    make = {"AdamW": torch.optim.AdamW, "FusedAdam": optimizers.FusedAdam}[optimizer]
    plain, wrapped = (with_optimizer(direct.classifier(), make, lr=1e-5) for _ in range(2))
    found = direct.masters_at_o2(*Fabric(accelerator="cpu", devices=1).setup(*wrapped))
    assert torch.equal(found, direct.masters_at_o2(*plain))
