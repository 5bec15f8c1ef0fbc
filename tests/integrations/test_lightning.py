"""Lightning's Trainer with ``HalfstepPrecision`` trains as the plain loop does, bit for bit."""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="Lightning is not installed; `make integrations` installs it")

from lightning.pytorch import LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader

from halfstep import Policy, amp
from halfstep.core.errors import UsageError
from halfstep.integrations.lightning import HalfstepPrecision
from tests.integrations import direct_loop as direct


class Classifier(LightningModule):
    def __init__(self, optimizer: str = "AdamW", *, step_size: int | None = None) -> None:
        super().__init__()
        self.net = direct.classifier()
        self.optimizer, self.step_size = optimizer, step_size
        self.losses: list[float] = []
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = direct.optimizer_of(self.optimizer, self.parameters())
        if self.step_size is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, self.step_size, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].item() * self.trainer.accumulate_grad_batches)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def trainer(precision: Any, **options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "devices": 1, "max_epochs": 1}
    return Trainer(plugins=precision, **{**quiet, **options})


def loader(data: Any = None) -> DataLoader[Any]:
    return DataLoader(direct.batches() if data is None else data, batch_size=None)


def fit(module: Classifier, precision: HalfstepPrecision, data: Any = None, **options: Any) -> direct.Trained:
    runner = trainer(precision, **options)
    runner.fit(module, loader(data))
    weights = [p.detach().clone() for p in amp.master_params(runner.optimizers[0])]
    return direct.Trained(module.losses, weights, precision.scaler.get_scale())


@pytest.mark.parametrize(("accumulate", "clip", "clip_by"), direct.WINDOWS)
@pytest.mark.parametrize("optimizer", list(direct.OPTIMIZERS))
@pytest.mark.parametrize(("level", "dtype"), direct.RECIPES)
def test_trains_as_the_plain_loop_does(
    level: str, dtype: str, optimizer: str, accumulate: int, clip: float | None, clip_by: str
) -> None:
    options = {"gradient_clip_val": clip, "gradient_clip_algorithm": clip_by, "accumulate_grad_batches": accumulate}
    mine = fit(Classifier(optimizer), HalfstepPrecision(level, dtype), **options)
    direct.same(mine, direct.train(level, dtype, optimizer, accumulate=accumulate, clip=clip, clip_by=clip_by))


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamW(fused=True)"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_does_not_advance_a_schedule_of_steps(level: str, optimizer: str) -> None:
    module, precision = Classifier(optimizer, step_size=1), HalfstepPrecision(level, "float16")
    fit(module, precision, direct.batches(overflow_at=2))
    start = 1e-2
    assert module.rates == [start / 2, start / 4, start / 4, start / 8, start / 16, start / 32]
    assert precision.scaler.get_scale() == 2.0**14
    assert "lr_scheduler_step" not in vars(module)  # the module is left as it was


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", list(direct.OPTIMIZERS))
@pytest.mark.parametrize(("level", "dtype"), direct.RECIPES)
def test_resumes_bit_for_bit(level: str, dtype: str, optimizer: str, tmp_path: Path) -> None:
    data = direct.batches(6, overflow_at=1 if dtype == "float16" else None)
    whole = fit(Classifier(optimizer, step_size=2), HalfstepPrecision(level, dtype), data, max_epochs=2)

    first = trainer(HalfstepPrecision(level, dtype))
    module = Classifier(optimizer, step_size=2)
    first.fit(module, loader(data))
    first.save_checkpoint(tmp_path / "last.ckpt")

    again, precision = Classifier(optimizer, step_size=2), HalfstepPrecision(level, dtype)
    second = trainer(precision, max_epochs=2)
    second.fit(again, loader(data), ckpt_path=tmp_path / "last.ckpt")
    weights = [p.detach() for p in amp.master_params(second.optimizers[0])]
    direct.same(direct.Trained([*module.losses, *again.losses], weights, precision.scaler.get_scale()), whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("level", "dtype"), [("O1", "bfloat16"), ("O2", "float16")])
def test_a_compiled_module_trains_as_a_compiled_loop_does(level: str, dtype: str) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    precision = HalfstepPrecision(level, dtype)
    module = Classifier()
    runner = trainer(precision)
    runner.fit(torch.compile(module, backend=backend), loader())
    assert graphs
    weights = [p.detach() for p in amp.master_params(runner.optimizers[0])]
    mine = direct.Trained(module.losses, weights, precision.scaler.get_scale())
    direct.same(mine, direct.train(level, dtype, backend=backend))


class Adversaries(LightningModule):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = direct.classifier(), direct.classifier()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for net, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):  # type: ignore[arg-type]
            loss = F.cross_entropy(net(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [direct.optimizer_of("AdamW", net.parameters()) for net in (self.one, self.other)]


@pytest.mark.parametrize(("level", "dtype"), direct.RECIPES)
def test_manual_optimization_with_two_optimizers(level: str, dtype: str) -> None:
    runner = trainer(HalfstepPrecision(level, dtype))
    runner.fit(Adversaries(), loader())
    one, other = ([p.detach() for p in amp.master_params(optimizer)] for optimizer in runner.optimizers)
    expected = direct.train(level, dtype)
    for trained in (one, other):
        direct.same(direct.Trained(expected.losses, trained, expected.scale), expected)


def test_masters_hold_what_16_bit_weights_would_lose() -> None:
    module, precision = Classifier(), HalfstepPrecision("O2", "bfloat16")
    runner = trainer(precision)
    runner.fit(module, loader())
    assert module.net[0].weight.dtype is torch.bfloat16
    saved = module.state_dict()["net.0.weight"]
    assert saved.dtype is torch.float32
    assert not torch.equal(saved, saved.bfloat16().float())


def test_lbfgs_is_refused() -> None:
    class WithLbfgs(Classifier):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(UsageError, match="LBFGS"):
        fit(WithLbfgs(), HalfstepPrecision("O1"))


def fit_on_rank(rank: int, level: str, dtype: str) -> direct.Trained:
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE="2")
    strategy = DDPStrategy(cluster_environment=LightningEnvironment(), process_group_backend="gloo")
    data = direct.batches(seed=rank, overflow_at=3 if rank == 1 and dtype == "float16" else None)
    module, precision = Classifier("FusedAdam"), HalfstepPrecision(level, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lightning's, about data loaders
        return fit(module, precision, data, strategy=strategy, devices=2, use_distributed_sampler=False)


@pytest.mark.parametrize(("level", "dtype"), direct.RECIPES)
def test_ranks_train_one_model(ranks: Any, level: str, dtype: str) -> None:
    first, second = ranks.run(fit_on_rank, level, dtype)
    assert first.losses != second.losses  # each has data of its own
    direct.same(first._replace(losses=[]), second._replace(losses=[]))
    assert first.scale == (2.0**14 if dtype == "float16" else 1.0)  # one overflow, on one rank


@pytest.mark.parametrize("policy", direct.POLICIES)
def test_a_policy_is_what_initialize_makes_of_it(policy: Policy) -> None:
    direct.same(fit(Classifier(), HalfstepPrecision(policy=policy)), direct.train_by_policy(policy))


@pytest.mark.parametrize(("level", "refused"), [("O1", False), ("O2", True)])
def test_an_average_of_16_bit_weights_is_refused(level: str, refused: bool) -> None:
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("this Lightning averages no weights")
    average = callbacks.EMAWeightAveraging(decay=0.99)
    expected = (
        pytest.raises(UsageError, match=r"EMAWeightAveraging would average.*master_model") if refused else nullcontext()
    )
    with expected:
        fit(Classifier(), HalfstepPrecision(level, "bfloat16"), callbacks=[average])
