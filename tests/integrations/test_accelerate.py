"""Accelerate with ``attach`` trains as the plain loop does, bit for bit."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="Accelerate is not installed; `make integrations` installs it")

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.nn import functional as F

from halfstep import Policy, amp
from halfstep.core.errors import UsageError
from halfstep.integrations.accelerate import attach
from tests.integrations import direct_loop as direct
from tests.support.worlds import with_optimizer


def forget() -> None:
    """Accelerate's state belongs to the process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    forget()
    yield
    forget()


class Run:
    """A model, its optimizer and a schedule, prepared by Accelerate."""

    def __init__(
        self,
        level: str = "O1",
        dtype: str | None = None,
        optimizer: str = "AdamW",
        *,
        shards: Any = None,
        policy: Policy | None = None,
        **options: Any,
    ) -> None:
        accelerator = Accelerator(cpu=True, **options)
        if shards is not None:  # on a CPU Accelerate never turns FSDP on by itself
            PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
            accelerator.state.fsdp_plugin = shards
        self.accelerator = attach(accelerator, level, dtype, policy=policy)
        model = direct.classifier()
        stepper = direct.optimizer_of(optimizer, model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(stepper, lambda step: 1.0)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, stepper, scheduler)
        self.losses: list[float] = []
        self.skipped: list[bool] = []

    def train(self, data: Any, *, clip: float | None = None, clip_by: str = "norm") -> Run:
        for x, y in data:
            with self.accelerator.accumulate(self.model):
                loss = F.cross_entropy(self.model(x), y)
                self.losses.append(loss.item())
                self.accelerator.backward(loss)
                if clip is not None and self.accelerator.sync_gradients:
                    name = "clip_grad_norm_" if clip_by == "norm" else "clip_grad_value_"
                    getattr(self.accelerator, name)(self.model.parameters(), clip)
                self.optimizer.step()
                self.skipped.append(self.optimizer.step_was_skipped)
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self

    def trained(self) -> direct.Trained:
        weights = [p.detach().clone() for p in amp.master_params(self.optimizer.optimizer)]
        return direct.Trained(self.losses, weights, self.accelerator.scaler.get_scale())


@pytest.mark.parametrize(("accumulate", "clip", "clip_by"), direct.WINDOWS)
@pytest.mark.parametrize("optimizer", list(direct.OPTIMIZERS))
@pytest.mark.parametrize(("level", "dtype"), direct.RECIPES)
def test_trains_as_the_plain_loop_does(
    level: str, dtype: str, optimizer: str, accumulate: int, clip: float | None, clip_by: str
) -> None:
    options = {"clip": clip, "clip_by": clip_by}
    mine = Run(level, dtype, optimizer, gradient_accumulation_steps=accumulate).train(direct.batches(), **options)
    expected = direct.train(level, dtype, optimizer, accumulate=accumulate, loss_in_scope=False, **options)
    direct.same(mine.trained(), expected)


@pytest.mark.parametrize("optimizer", list(direct.OPTIMIZERS))
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_is_said_to_be_skipped_and_advances_no_schedule(level: str, optimizer: str) -> None:
    run = Run(level, "float16", optimizer).train(direct.batches(overflow_at=2))
    assert run.skipped == [False, False, True, False, False, False]
    assert run.scheduler.scheduler.last_epoch == direct.BATCHES - 1


@pytest.mark.parametrize(("level", "dtype"), direct.RECIPES)
def test_resumes_bit_for_bit(level: str, dtype: str, tmp_path: Path) -> None:
    data = direct.batches(8, overflow_at=1 if dtype == "float16" else None)
    whole = Run(level, dtype).train(data).trained()
    first = Run(level, dtype).train(data[:4])
    first.accelerator.save_state(str(tmp_path))
    second = Run(level, dtype)
    second.accelerator.load_state(str(tmp_path))
    second.train(data[4:])
    direct.same(second.trained()._replace(losses=[*first.losses, *second.losses]), whole)


def test_the_order_of_prepare_does_not_matter() -> None:
    accelerator = attach(Accelerator(cpu=True), "O2", "bfloat16")
    model = direct.classifier()
    optimizer = accelerator.prepare(direct.optimizer_of("AdamW", model.parameters()))
    assert not amp.has_masters(optimizer.optimizer)
    accelerator.prepare(model)
    assert amp.has_masters(optimizer.optimizer)


def test_unwrapping_and_copying_leave_a_model_of_its_own() -> None:
    run = Run("O1", "bfloat16")
    x = torch.randn(3, 12)
    twin = copy.deepcopy(run.model)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert not torch.equal(twin(x), run.model(x))
    bare = run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
    assert torch.equal(bare(x), direct.classifier()(x))  # in fp32


class Own(Accelerator):
    pass


@pytest.mark.parametrize("made_of", [Accelerator, Own])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_accelerate_pickles_is_pickled_as_without(level: str, made_of: type[Accelerator]) -> None:
    accelerator = attach(made_of(cpu=True), level, "bfloat16")
    model = direct.classifier()
    optimizer = direct.optimizer_of("AdamW", model.parameters())
    prepared = accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))
    for each in (accelerator, *prepared):
        twin = pickle.loads(pickle.dumps(each))
        assert [cls.__name__ for cls in type(twin).__mro__] == [cls.__name__ for cls in type(each).__mro__]
    twin = pickle.loads(pickle.dumps(accelerator))
    again = twin.prepare_model(direct.classifier())
    assert again(torch.randn(2, 12)).dtype is torch.float32
    assert twin.halfstep.name == accelerator.halfstep.name


def test_outputs_are_fp32_and_autocast_is_the_level() -> None:
    run = Run("O2", "bfloat16")
    assert run.model(torch.randn(2, 12)).dtype is torch.float32
    with run.accelerator.autocast():
        assert (torch.randn(2, 2).bfloat16() @ torch.randn(2, 2)).dtype is torch.bfloat16


def test_what_would_cast_twice_or_comes_too_late_is_refused() -> None:
    with pytest.raises(UsageError, match="mixed_precision='bf16'"):
        attach(Accelerator(cpu=True, mixed_precision="bf16"), "O1")
    forget()
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(direct.classifier())
    with pytest.raises(UsageError, match=r"before accelerator\.prepare"):
        attach(accelerator, "O1")


# ---- several processes


def environment(rank: int) -> None:
    forget()
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"
    )
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")


def run_on_rank(rank: int, level: str, dtype: str) -> tuple[direct.Trained, list[bool]]:
    environment(rank)
    run = Run(level, dtype, "FusedAdam", gradient_accumulation_steps=2)
    run.train(direct.batches(seed=rank, overflow_at=3 if rank == 1 and dtype == "float16" else None), clip=0.1)
    return run.trained(), run.skipped


@pytest.mark.parametrize(("level", "dtype"), direct.RECIPES)
def test_ranks_train_one_model(ranks: Any, level: str, dtype: str) -> None:
    (first, skipped), (second, also_skipped) = ranks.run(run_on_rank, level, dtype)
    assert first.losses != second.losses
    direct.same(first._replace(losses=[]), second._replace(losses=[]))
    overflowed = dtype == "float16"
    assert skipped == also_skipped == [False, False, False, overflowed, overflowed, False]
    assert first.scale == (2.0**14 if overflowed else 1.0)


def sharded_run(rank: int, level: str, dtype: str, folder: str) -> tuple[direct.Trained, direct.Trained]:
    environment(rank)
    data = direct.batches(8, seed=rank, overflow_at=1 if rank == 1 and dtype == "float16" else None)

    def begin() -> Run:
        forget()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1, state_dict_type="SHARDED_STATE_DICT"
        )
        return Run(level, dtype, "FusedAdam", shards=plugin)

    def trained(*runs: Run) -> direct.Trained:
        params = [p.detach().full_tensor().clone() for p in runs[-1].model.parameters()]  # type: ignore[attr-defined]
        losses = [loss for run in runs for loss in run.losses]
        return direct.Trained(losses, params, runs[-1].accelerator.scaler.get_scale())

    whole = trained(begin().train(data, clip=0.1))
    first = begin().train(data[:4], clip=0.1)
    first.accelerator.save_state(folder)
    second = begin()
    second.accelerator.load_state(folder)
    return whole, trained(first, second.train(data[4:], clip=0.1))


@pytest.mark.parametrize(("level", "dtype"), direct.RECIPES)
def test_shards_resume_bit_for_bit(ranks: Any, level: str, dtype: str, tmp_path: Path) -> None:
    (whole, resumed), (other, _) = ranks.run(sharded_run, level, dtype, str(tmp_path))
    direct.same(resumed, whole)
    direct.same(whole._replace(losses=[]), other._replace(losses=[]))
    assert whole.scale == (2.0**14 if dtype == "float16" else 1.0)


@pytest.mark.parametrize("policy", direct.POLICIES)
def test_a_policy_is_what_initialize_makes_of_it(policy: Policy) -> None:
    run = Run(policy=policy).train(direct.batches())
    direct.same(run.trained(), direct.train_by_policy(policy))


@pytest.mark.parametrize("scaled", [False, True], ids=["scale_loss", "GradScaler"])
def test_initialize_takes_what_prepare_has_wrapped(scaled: bool) -> None:
    (model, optimizer), (other, stepper) = (
        with_optimizer(direct.classifier(), torch.optim.AdamW, lr=1e-5) for _ in range(2)
    )
    scalers = [amp.GradScaler() if scaled else None for _ in range(2)]
    expected = direct.masters_at_o2(model, optimizer, scalers[0])
    assert torch.equal(direct.masters_at_o2(other, Accelerator(cpu=True).prepare(stepper), scalers[1]), expected)
