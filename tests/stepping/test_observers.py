"""What observers see of the steps of attached optimizers, and what is known about the losses before each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from halfstep import amp
from halfstep.cli.run_report import Recording, recording
from halfstep.core.errors import UsageError
from halfstep.fp16_utils import FP16_Optimizer
from halfstep.numerics import Monitor
from halfstep.stepping.attached import AttachedOptimizer, attached_to, creation_callbacks
from tests.support.worlds import advance, scaled_step, start_amp, with_optimizer


@contextmanager
def noting(optimizer: Any = None) -> Iterator[Recording]:
    with recording() as noted:
        if found := attached_to(optimizer):
            noted.see_created(found)
        yield noted


def model_and_optimizer(kind: type[torch.optim.Optimizer]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return with_optimizer(torch.nn.Linear(4, 1), kind, lr=1e-3)


def attached(level: str, **options: Any) -> tuple[Any, Any]:
    return start_amp(torch.nn.Linear(4, 1), torch.optim.SGD, level, lr=1e-3, **options)


FACTORS = (1.0, float("inf"), 1.0)
"""What the loss of each step is multiplied by: the second one overflows."""


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Rprop])  # Rprop takes no flags: the host skips
def test_the_scale_of_each_loss_and_each_skipped_step_are_seen_with_a_grad_scaler(
    kind: type[torch.optim.Optimizer],
) -> None:
    model, optimizer = model_and_optimizer(kind)
    scaler = amp.GradScaler(init_loss_scaling=64.0, decr_every_n_nan_or_inf=1)
    with noting() as noted:
        for factor in FACTORS:
            advance(model(torch.ones(2, 4)).mean() * factor, optimizer, scaler)
    assert list(next(iter(noted.of.values())).scales.values()) == [[64.0, 64.0, 32.0]]
    assert next(iter(noted.of.values())).skipped == [False, True, False]


def test_a_monitor_knows_the_scale_after_it_has_moved() -> None:
    model, optimizer = model_and_optimizer(torch.optim.SGD)
    scaler = amp.GradScaler(init_loss_scaling=64.0, decr_every_n_nan_or_inf=1)
    with Monitor(model, optimizer, every=1) as monitor:
        for factor in FACTORS:
            advance(model(torch.ones(2, 4)).mean() * factor, optimizer, scaler)
    rows = [row for row in monitor.rows() if row.tensor == "output_grad"]
    assert [(row.scale, row.amax) for row in rows] == [(64.0, 0.5), (64.0, float("inf")), (32.0, 0.5)]


def test_the_scale_is_the_one_before_the_update_in_a_scale_loss_block() -> None:
    model, optimizer = attached("O1", loss_scale="dynamic")
    (amp._amp_state.loss_scalers[0])._loss_scale = 64.0
    with noting(optimizer) as noted:
        for factor in FACTORS:
            scaled_step(model(torch.ones(2, 4)).mean() * factor, optimizer)
    assert list(next(iter(noted.of.values())).scales.values()) == [[64.0, 64.0, 32.0]]
    assert next(iter(noted.of.values())).skipped == [False, True, False]
    assert optimizer._amp_stash.counts["calls"] == 3


def test_the_scale_of_delayed_passes_is_seen() -> None:
    model, inner = model_and_optimizer(torch.optim.SGD)
    optimizer = FP16_Optimizer(inner, static_loss_scale=8.0, verbose=False)
    with noting(optimizer) as noted:
        optimizer.backward(model(torch.ones(2, 4)).mean(), update_master_grads=False)
        optimizer.backward(model(torch.ones(2, 4)).mean(), update_master_grads=False)
        optimizer.update_master_grads()
        optimizer.step()
    assert list(next(iter(noted.of.values())).scales.values()) == [[8.0]]


def test_a_loss_without_a_scale_has_none() -> None:
    model, optimizer = attached("O2", loss_scale=1.0)
    with noting(optimizer) as noted:
        scaled_step(model(torch.ones(2, 4)).float().mean(), optimizer)
    assert next(iter(noted.of.values())).scales == {}


def test_every_attached_optimizer_is_announced() -> None:
    made: list[AttachedOptimizer] = []
    creation_callbacks.append(made.append)
    try:
        _model, optimizer = attached("O1")
        other, plain = model_and_optimizer(torch.optim.SGD)
        scaler = amp.GradScaler()
        scaler.scale(other(torch.ones(2, 4)).mean()).backward()
        scaler.step(plain)
    finally:
        creation_callbacks.remove(made.append)
    assert [one.optimizer for one in made] == [optimizer, plain]


def test_a_step_that_is_refused_inside_of_a_block_is_none_for_observers() -> None:
    model, optimizer = attached("O2")
    with noting(optimizer) as noted, amp.scale_loss(model(torch.ones(2, 4)).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
        with pytest.raises(UsageError, match=r"inside a scale_loss block.*\. Call it after the block"):
            optimizer.step()
    assert noted.of == {}


def test_a_step_in_a_hook_of_the_backward_pass_names_gradient_release() -> None:
    model, optimizer = attached("O2")
    next(model.parameters()).register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with (
        pytest.raises(UsageError, match=r"inside a scale_loss block.*release=True.*leave out the block"),
        amp.scale_loss(model(torch.ones(2, 4)).mean(), optimizer) as scaled_loss,
    ):
        scaled_loss.backward()
