"""What the adapters share, without any trainer: arguments, policies, and masters that are given later."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import Policy, amp
from halfstep.integrations.training_precision import TrainingPrecision
from tests.integrations import direct_loop as direct
from tests.support.python import python
from tools.code_lines import code_lines

ADAPTERS = Path(__file__).parents[2] / "src" / "halfstep" / "integrations"
TRAINERS = {"accelerate", "lightning", "lightning_utilities", "timm", "transformers"}


def train(precision: TrainingPrecision, data: Any) -> direct.Trained:
    model = precision.cast(direct.classifier())
    optimizer = direct.optimizer_of("AdamW", model.parameters())
    precision.give_masters(optimizer)
    losses = []
    for x, y in data:
        with precision.scope():
            loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        precision.scaler.scale(loss).backward()
        precision.step(optimizer)
        optimizer.zero_grad()
    weights = [p.detach().clone() for p in amp.master_params(optimizer)]
    return direct.Trained(losses, weights, precision.scaler.get_scale())


@pytest.mark.parametrize(("level", "dtype"), direct.RECIPES)
def test_a_precision_is_decorate_auto_cast_and_grad_scaler(level: str, dtype: str) -> None:
    data = direct.batches(overflow_at=2 if dtype == "float16" else None)
    direct.same(train(TrainingPrecision(level, dtype), data), direct.train(level, dtype, data=data))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loss_in_a_step_of_a_trainer_is_fp32(level: str) -> None:
    precision = TrainingPrecision(level, "bfloat16")
    model = precision.cast(direct.classifier())
    x, y = direct.batches(1)[0]
    with precision.scope():
        output = model(x)
        assert nn.functional.cross_entropy(output.bfloat16(), y).dtype is torch.float32
    if level == "O2":
        with TrainingPrecision(level, "bfloat16", custom_white_list={"cross_entropy"}).scope():
            assert nn.functional.cross_entropy(output.bfloat16(), y).dtype is torch.bfloat16


@pytest.mark.parametrize("policy", direct.POLICIES)
def test_a_policy_is_what_initialize_makes_of_it(policy: Policy) -> None:
    mine = train(TrainingPrecision(policy=policy), direct.batches())
    direct.same(mine, direct.train_by_policy(policy))


def test_models_are_cast_once_and_optimizers_get_masters_once() -> None:
    precision = TrainingPrecision("O2", "bfloat16")
    model = precision.cast(direct.classifier())
    hooks = len(model._forward_pre_hooks)
    assert precision.cast(model) is model
    assert len(model._forward_pre_hooks) == hooks
    optimizer = direct.optimizer_of("AdamW", model.parameters())
    precision.give_masters(optimizer)
    precision.give_masters(optimizer)
    assert amp.has_masters(optimizer)


def test_weights_that_came_in_16_bits_get_masters_at_o1_too() -> None:
    model = direct.classifier().to(torch.bfloat16)
    optimizer = direct.optimizer_of("AdamW", model.parameters())
    precision = TrainingPrecision("O1", "bfloat16")
    precision.cast(model)
    precision.give_masters(optimizer)
    assert {p.dtype for p in amp.master_params(optimizer)} == {torch.float32}


def test_op_lists_are_those_of_amp() -> None:
    for lists in ({"custom_black_list": ["linear"]}, {"custom_wide_list": ["linear"]}):
        with TrainingPrecision("O2", "bfloat16", **lists).scope():  # type: ignore[arg-type]
            assert direct.classifier()[0](torch.randn(2, 12)).dtype is torch.float32  # type: ignore[index]


def test_names_say_dtype_and_level() -> None:
    assert TrainingPrecision("O2", "float16").name == "16-halfstep-O2"
    assert TrainingPrecision(policy=Policy.from_level("O3", "bfloat16")).name == "bf16-halfstep-policy"


# ---- the adapters as files


@pytest.mark.parametrize("path", sorted(ADAPTERS.glob("*.py")), ids=lambda path: path.stem)
def test_an_adapter_is_thin_and_uses_public_names_of_the_engine(path: Path) -> None:
    text = path.read_text()
    assert path.stem == "training_precision" or code_lines(text) < 100
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.level == 2]
    engine = {f"{node.module or ''}.{alias.name}".lstrip(".") for node in imports for alias in node.names}
    public = {"amp", "optimizers", "diagnostics.findings.check", "core.policy.Policy", "paddle.model.Callback"}
    # Facts, checks, errors and types have no state; everything else is what users have too.
    stateless = ("core.checks.", "core.errors.", "core.dtypes.", "core.oplists.", "amp.arguments.RecipeChoice")
    assert {name for name in engine if not name.startswith(stateless)} <= public


@pytest.mark.exhaustive
def test_no_trainer_is_imported_unless_an_adapter_is_asked_for() -> None:
    code = "import sys, halfstep.amp, halfstep.integrations.training_precision; print(*sys.modules)"
    loaded = python("-c", code).stdout.split()
    assert "halfstep.integrations.training_precision" in loaded
    assert not TRAINERS & {name.partition(".")[0] for name in loaded}
