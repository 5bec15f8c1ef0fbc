"""Transformers' Trainer with a precision of ours trains as the plain loop does, bit for bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="Transformers is not installed; `make integrations` installs it")
pytest.importorskip("accelerate", reason="Accelerate is not installed; `make integrations` installs it")

from safetensors.torch import load_file
from torch.utils.data import SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from halfstep import amp
from halfstep.core.errors import UsageError
from halfstep.integrations.transformers import HalfstepMixin, HalfstepTrainer
from tests.integrations.direct_loop import RECIPES, scope
from tests.integrations.test_accelerate import fresh_accelerate

__all__ = ["fresh_accelerate"]

STEPS, BATCH, WORDS = 6, 4, 64


def llama(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config).to(dtype)


def sentences(count: int = STEPS * BATCH) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    words = [torch.randint(WORDS, (8,), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in words]


class InOrder:
    """A trainer that takes its samples in order."""

    def _get_train_sampler(self, dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class Halfstep(InOrder, HalfstepTrainer):
    pass


class Plain(InOrder, Trainer):
    pass


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    usual = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "learning_rate": 1e-3, "save_strategy": "no"}
    usual |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1, "warmup_steps": 2}
    return TrainingArguments(output_dir=str(folder), **{**usual, **options})


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def masters(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in amp.master_params(trainer.optimizer.optimizer)]


def direct_loop(
    model: Any, level: str, dtype: str, *, fused: bool, accumulate: int = 1
) -> tuple[list[float], list[torch.Tensor]]:
    """What a Trainer does with its defaults: AdamW, a linear schedule with warmup, clipping to 1."""
    norms = [p for name, p in model.named_parameters() if "norm" in name]  # the Trainer decays all others
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    optimizer: Any = torch.optim.AdamW([{"params": others}, {"params": norms}], lr=1e-3, weight_decay=0.0, fused=fused)
    if level == "O2":
        amp.decorate(model, optimizer, level="O2", dtype=dtype, excluded_layers=model.model.rotary_emb)
    rate = lambda step: step / 2 if step < 2 else (STEPS - step) / (STEPS - 2)  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    scaler = amp.GradScaler(dtype == "float16", decr_every_n_nan_or_inf=1)
    data, found = sentences(STEPS * BATCH * accumulate), []
    for step in range(STEPS):
        loss_of_step = 0.0
        parts = [data[(step * accumulate + i) * BATCH :][:BATCH] for i in range(accumulate)]
        count = torch.tensor(len(parts) * BATCH * 7)  # the first word of a sentence is not predicted
        for part in parts:
            batch = {name: torch.stack([each[name] for each in part]) for name in part[0]}
            with scope(level, dtype):
                loss = model(**batch, num_items_in_batch=count).loss
            loss_of_step += loss.item()
            scaler.scale(loss.float()).backward()
        scaler.unscale_(optimizer)
        if amp.has_masters(optimizer):
            optimizer.clip_master_grads(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        found.append(loss_of_step)
    return found, [p.detach().clone() for p in amp.master_params(optimizer)]


@pytest.mark.costly
@pytest.mark.exhaustive
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("level", "dtype"), RECIPES)
def test_trains_as_the_plain_loop_does(level: str, dtype: str, accumulate: int, fused: bool, tmp_path: Path) -> None:
    optim = "adamw_torch_fused" if fused else "adamw_torch"
    trainer = Halfstep(
        llama(),
        arguments(tmp_path, optim=optim, gradient_accumulation_steps=accumulate),
        train_dataset=sentences(STEPS * BATCH * accumulate),
        halfstep={"level": level, "dtype": dtype},
    )
    trainer.train()
    expected, weights = direct_loop(llama(), level, dtype, fused=fused, accumulate=accumulate)
    torch.testing.assert_close(losses(trainer), expected, rtol=1e-6, atol=1e-6)  # it logs rounded sums
    torch.testing.assert_close([*masters(trainer)], [*weights], rtol=0, atol=0)


@pytest.mark.exhaustive
def test_every_weight_of_a_model_loaded_in_bf16_moves(tmp_path: Path) -> None:
    slow = arguments(tmp_path, learning_rate=1e-5, max_steps=20, warmup_steps=0, lr_scheduler_type="constant")
    data, start = sentences(20 * BATCH), llama(torch.bfloat16).state_dict()

    def moved(trainer: Trainer) -> float:
        trainer.train()
        end = amp.master_model(trainer.model).state_dict()  # in fp32; without masters the weights themselves
        changed = [end[name].float() != value.float() for name, value in start.items()]
        return torch.cat([each.flatten() for each in changed]).float().mean().item()

    assert moved(Plain(llama(torch.bfloat16), slow, train_dataset=data)) < 0.5
    for level in ("O1", "O2"):
        precision = {"level": level, "dtype": "bfloat16"}
        assert moved(Halfstep(llama(torch.bfloat16), slow, train_dataset=data, halfstep=precision)) > 0.999


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("level", "dtype", "loaded"),
    [
        *((*precision, torch.float32) for precision in RECIPES),
        *((level, dtype, torch.bfloat16) for level, dtype in RECIPES if dtype == "bfloat16"),
    ],
)
def test_resumes_bit_for_bit(level: str, dtype: str, loaded: torch.dtype, tmp_path: Path) -> None:
    def trainer() -> Halfstep:
        options = arguments(tmp_path, save_strategy="steps", save_steps=3)
        precision = {"level": level, "dtype": dtype}
        return Halfstep(llama(loaded), options, train_dataset=sentences(), halfstep=precision)

    whole = trainer()
    whole.train()
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    torch.testing.assert_close([*masters(resumed)], [*masters(whole)], rtol=0, atol=0)
    assert resumed.accelerator.scaler.get_scale() == whole.accelerator.scaler.get_scale()
    assert losses(resumed) == losses(whole)


def tied() -> Any:
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=1, n_head=2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("build", [llama, tied])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_what_is_saved_agrees_with_its_config_and_holds_the_masters(level: str, build: Any, tmp_path: Path) -> None:
    precision = {"level": level, "dtype": "bfloat16"}
    trainer = Halfstep(build(), arguments(tmp_path), train_dataset=sentences(), halfstep=precision)
    trainer.train()
    trainer.save_model(str(tmp_path / "by the trainer"))
    trainer.model.save_pretrained(tmp_path / "by the model")
    wide = amp.master_model(trainer.model).state_dict()
    for folder in ("by the trainer", "by the model"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["dtype"] == "float32"
        saved = load_file(tmp_path / folder / "model.safetensors")
        assert {value.dtype for value in saved.values()} == {torch.float32}
        loaded = type(trainer.model).from_pretrained(tmp_path / folder).state_dict()
        for name, value in wide.items():
            torch.testing.assert_close(loaded[name], value, rtol=0, atol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_adapters_train_in_fp32_on_a_frozen_bf16_base(level: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed; `make integrations` installs it")

    def trainer() -> Halfstep:
        torch.manual_seed(3)
        model = peft.get_peft_model(llama(torch.bfloat16), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        options = arguments(tmp_path, learning_rate=1e-5, save_strategy="steps", save_steps=3)
        precision = {"level": level, "dtype": "bfloat16"}
        return Halfstep(model, options, train_dataset=sentences(), halfstep=precision)

    whole = trainer()
    frozen = {name: p.clone() for name, p in whole.model.named_parameters() if not p.requires_grad}
    whole.train()
    assert {p.dtype for p in masters(whole)} == {torch.float32}
    assert len(masters(whole)) == 4
    for name, p in whole.model.named_parameters():
        if not p.requires_grad:
            assert torch.equal(p, frozen[name])
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for mine, other in zip(masters(resumed), masters(whole), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
        assert mine.any()


def test_a_skipped_step_advances_no_schedule(tmp_path: Path) -> None:
    scaler = amp.GradScaler(init_loss_scaling=2.0**120, decr_ratio=2.0**-60, decr_every_n_nan_or_inf=1)
    precision = {"level": "O2", "dtype": "float16", "scaler": scaler}
    trainer = Halfstep(llama(), arguments(tmp_path), train_dataset=sentences(), halfstep=precision)
    trainer.train()
    skipped = round(math.log2(2.0**120 / scaler.get_scale()) / 60)
    assert skipped == 2
    assert trainer.lr_scheduler.last_epoch == STEPS - skipped


@pytest.mark.exhaustive
def test_a_mixin_goes_before_any_trainer(tmp_path: Path) -> None:
    class Mine(HalfstepMixin, Plain):
        pass

    trainer = Mine(llama(), arguments(tmp_path), train_dataset=sentences(), halfstep={"level": "O2"})
    trainer.train()
    assert all(math.isfinite(loss) for loss in losses(trainer))
    assert trainer.model.dtype is trainer.accelerator.halfstep.half


def test_a_trainer_that_casts_by_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mixed_precision='bf16'"):
        HalfstepTrainer(llama(), arguments(tmp_path, bf16=True), halfstep={"level": "O1"})
