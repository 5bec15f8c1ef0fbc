"""A loss that is not scaled as its gradients need it is warned of once, at a line of the user's; what is meant is not.

Warnings are errors in this suite, so each case without a warning here would fail if there were one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp, fp16_utils, optimizers
from tests.support.worlds import (
    BF16,
    FP16,
    advance,
    scaled_backward,
    scaled_step,
    start_amp,
    step_and_clear,
    with_optimizer,
)

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Loop:
    """A model with its optimizer, and the lines of a training loop."""

    def __init__(self, level: str = "O2", dtype: torch.dtype = FP16, make: Any = torch.optim.SGD, **options: Any):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        self.model, self.optimizer = start_amp(model, make, level, dtype=dtype, lr=0.01, **options)
        self.torchs_scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        self.our_scaler = amp.GradScaler(init_scale=8.0)

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(X).float().square().mean()
        return loss

    def block(self, **options: Any) -> None:
        scaled_backward(self.loss(), self.optimizer, **options)


def plain(loop: Loop) -> None:
    loop.loss().backward()
    loop.optimizer.step()  # not by a helper: the warning names the file that steps
    loop.optimizer.zero_grad()


def plain_cleared_by_the_model(loop: Loop) -> None:
    loop.loss().backward()
    loop.optimizer.step()
    loop.model.zero_grad()


def plain_with_a_closure(loop: Loop) -> None:
    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        return loss

    loop.optimizer.step(closure)


def plain_with_release(loop: Loop) -> None:
    if loop.optimizer.release is None:
        loop.optimizer.attach(loop.model, release=True)
    loop.loss().backward()
    loop.optimizer.step()


def block_inside(scaler: Any, loop: Loop) -> None:
    scaled_backward(scaler.scale(loop.loss()), loop.optimizer)
    scaler.step(loop.optimizer)
    scaler.update()
    loop.optimizer.zero_grad()


def block_inside_torchs_scaler(loop: Loop) -> None:
    block_inside(loop.torchs_scaler, loop)


def block_inside_our_scaler(loop: Loop) -> None:
    block_inside(loop.our_scaler, loop)


def backward_after_the_block(loop: Loop) -> None:
    with amp.scale_loss(loop.loss(), loop.optimizer) as scaled_loss:
        pass
    scaled_loss.backward()
    step_and_clear(loop.optimizer)


def backward_of_another_loss(loop: Loop) -> None:
    with amp.scale_loss(loop.loss(), loop.optimizer):
        loop.loss().backward()
    step_and_clear(loop.optimizer)


def clip_in_the_block(loop: Loop, clip: Callable[..., Any] = nn.utils.clip_grad_norm_, limit: float = 1.0) -> None:
    with amp.scale_loss(loop.loss(), loop.optimizer) as scaled_loss:
        scaled_loss.backward()
        clip(loop.model.parameters(), limit)
    step_and_clear(loop.optimizer)


def clip_values_in_the_block(loop: Loop) -> None:
    clip_in_the_block(loop, nn.utils.clip_grad_value_, 0.1)


def clip_two_values_in_the_block(loop: Loop) -> None:
    """The two largest are as large afterwards as the limit."""

    def clip(params: Any, limit: float) -> None:
        grads = [p.grad for p in params]
        _, second = torch.cat([g.float().abs().flatten() for g in grads]).topk(2).values
        for grad in grads:
            grad.mul_(1.001 * limit / second)
        nn.utils.clip_grad_value_(loop.model.parameters(), limit)

    clip_in_the_block(loop, clip, 0.1)


FORGOTTEN = r"step\(\) uses gradients that did not come through amp\.scale_loss"
TWICE = r"the loss is multiplied by two loss scales"
MISSED = r"ended without a backward pass through its scaled loss"
CLIPPED = r"clipped while they are still multiplied by the loss scale"

O1, O2 = {"level": "O1"}, {"level": "O2"}
RELEASED = {"make": optimizers.FusedAdam}

WRONG: dict[str, tuple[dict[str, Any], Callable[[Loop], None], str, str]] = {
    "O1, no block": (O1, plain, FORGOTTEN, "loop.optimizer.step()"),
    "O2, no block": (O2, plain, FORGOTTEN, "loop.optimizer.step()"),
    "O2, no block, cleared by the model": (O2, plain_cleared_by_the_model, FORGOTTEN, "loop.optimizer.step()"),
    "O2, no block, Adagrad": ({"make": torch.optim.Adagrad}, plain, FORGOTTEN, ""),
    "O1, no block, RMSprop": ({**O1, "make": torch.optim.RMSprop}, plain, FORGOTTEN, ""),
    "O2, no block, a static scale": ({"loss_scale": 128.0}, plain, FORGOTTEN, ""),
    "O2, no block, a closure": (O2, plain_with_a_closure, FORGOTTEN, "loop.optimizer.step(closure)"),
    "O2, no block, gradient release": (RELEASED, plain_with_release, FORGOTTEN, ""),
    "O3 with a scale, no block": ({"level": "O3", "loss_scale": 128.0}, plain, FORGOTTEN, ""),
    "torch's scaler outside": ({"loss_scale": 64.0}, block_inside_torchs_scaler, TWICE, "scaler.step(loop.optimizer)"),
    "torch's, RMSprop": ({"make": torch.optim.RMSprop, "loss_scale": 64.0}, block_inside_torchs_scaler, TWICE, ""),
    "torch's scaler, bfloat16": ({"dtype": BF16, "loss_scale": 64.0}, block_inside_torchs_scaler, TWICE, ""),
    "our scaler around the block": (O1, block_inside_our_scaler, TWICE, "scaler.step(loop.optimizer)"),
    "backward after the block": (O2, backward_after_the_block, MISSED, "with amp.scale_loss"),
    "backward of another loss": (O2, backward_of_another_loss, MISSED, "with amp.scale_loss"),
    "backward after it, bfloat16": ({"dtype": BF16, "loss_scale": 64.0}, backward_after_the_block, MISSED, ""),
    "clipped in the block, O1": (O1, clip_in_the_block, CLIPPED, "with amp.scale_loss"),
    "clipped in the block, O2": (O2, clip_in_the_block, CLIPPED, "with amp.scale_loss"),
    "clipped to 0.25": (O2, partial(clip_in_the_block, limit=0.25), CLIPPED, ""),
    "values clipped in the block": (O1, clip_values_in_the_block, CLIPPED, ""),
    "clipped to a number that few people write": (O1, partial(clip_in_the_block, limit=0.01234), CLIPPED, ""),
    "two values clipped in the block": (O1, clip_two_values_in_the_block, CLIPPED, ""),
    "values clipped in the block, O2": (O2, clip_values_in_the_block, CLIPPED, ""),
}


def line_of(warning: warnings.WarningMessage) -> str:
    with open(warning.filename) as file:
        return file.read().splitlines()[warning.lineno - 1]


def several(batch: Callable[..., None], *args: Loop) -> None:
    for _ in range(4):
        batch(*args)


@pytest.mark.parametrize("name", WRONG)
def test_a_loss_that_goes_past_its_scale_is_warned_of_once(name: str) -> None:
    options, batch, words, line = WRONG[name]
    loop = Loop(**options)
    for _ in range(6 if words is CLIPPED else 0):  # clipping may begin late
        in_blocks(loop)
    with pytest.warns(UserWarning, match=words) as caught:
        several(batch, loop)
    assert [w.filename for w in caught] == [__file__]
    assert line in line_of(caught[0])


# ---- what is meant


def in_blocks(loop: Loop) -> None:
    loop.block()
    loop.block()
    step_and_clear(loop.optimizer)


def a_step_again(loop: Loop) -> None:
    loop.block()
    loop.optimizer.step()
    loop.optimizer.step()  # on the same gradients
    loop.optimizer.zero_grad()
    loop.optimizer.step()  # on none


def a_step_on_zeros(loop: Loop) -> None:
    loop.block()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)
    loop.optimizer.step()


def cleared_by_the_model(loop: Loop) -> None:
    for set_to_none in (True, False):
        loop.block()
        loop.optimizer.step()
        loop.model.zero_grad(set_to_none=set_to_none)
        loop.optimizer.step()


def unchecked(loop: Loop) -> None:
    loop.block(delay_overflow_check=True)
    step_and_clear(loop.optimizer)


def a_closure(loop: Loop) -> None:
    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss()
        scaled_backward(loss, loop.optimizer)
        return loss

    loop.optimizer.step(closure)


def release(loop: Loop) -> None:
    if loop.optimizer.release is None:
        loop.optimizer.attach(loop.model, release=True)
    loop.block()
    loop.optimizer.step()


def torchs_scaler_alone(loop: Loop) -> None:
    loop.torchs_scaler.scale(loop.loss()).backward()
    loop.torchs_scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)
    loop.torchs_scaler.step(loop.optimizer)
    loop.torchs_scaler.update()
    loop.optimizer.zero_grad()


def torchs_scaler_off(loop: Loop) -> None:
    block_inside(torch.amp.GradScaler("cpu", enabled=False), loop)


def our_scaler_alone(loop: Loop) -> None:
    loop.our_scaler.scale(loop.loss()).backward()
    loop.our_scaler.clip_grad_norm_(loop.optimizer, 1.0)
    loop.our_scaler.step(loop.optimizer)
    loop.our_scaler.update()
    loop.optimizer.zero_grad()


def accumulated_by_our_scaler(loop: Loop) -> None:
    for _ in range(3):
        loop.our_scaler.scale(loop.loss()).backward()
    loop.our_scaler.step(loop.optimizer)
    loop.our_scaler.update()
    loop.optimizer.zero_grad(set_to_none=False)


def clipped_after_the_block(loop: Loop) -> None:
    loop.block()
    nn.utils.clip_grad_norm_(amp.master_params(loop.optimizer), 1e-3)
    step_and_clear(loop.optimizer)


def two_passes_in_a_block(loop: Loop) -> None:
    with amp.scale_loss(loop.loss(), loop.optimizer) as scaled_loss:
        scaled_loss.backward(retain_graph=True)
        scaled_loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad(set_to_none=False)


def averaged_by_hand_in_the_block(loop: Loop) -> None:
    with amp.scale_loss(loop.loss(), loop.optimizer) as scaled_loss:
        scaled_loss.backward()
        for param in loop.model.parameters():
            param.grad.mul_(4).div_(4)
    step_and_clear(loop.optimizer)


def frozen(loop: Loop) -> None:
    loop.model[0].requires_grad_(False)
    loop.block()
    step_and_clear(loop.optimizer)


def a_failed_pass(loop: Loop) -> None:
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loop.loss(), loop.optimizer):
        raise ZeroDivisionError
    loop.optimizer.step()


def no_gradients_at_all(loop: Loop) -> None:
    with torch.no_grad(), amp.scale_loss(loop.loss(), loop.optimizer):
        pass
    loop.optimizer.step()


MEANT: dict[str, tuple[dict[str, Any], Callable[[Loop], None]]] = {
    "bfloat16 without a block": ({"dtype": BF16}, plain),
    "bfloat16 at O1 without a block": ({"level": "O1", "dtype": BF16}, plain),
    "bfloat16 with a scale without a block": ({"dtype": BF16, "loss_scale": "dynamic"}, plain),
    "a static scale of 1.0": ({"loss_scale": 1.0}, plain),
    "a static scale of 1.0 and a scaler around the block": ({"loss_scale": 1.0}, block_inside_torchs_scaler),
    "a static scale of 1.0 and backward after the block": ({"loss_scale": 1.0}, backward_after_the_block),
    "a static scale of 1.0, clipped in the block": ({"loss_scale": 1.0}, clip_in_the_block),
    "a scale too small to matter, clipped in the block": ({"level": "O1", "loss_scale": 128.0}, clip_in_the_block),
    "O3": ({"level": "O3"}, plain),
    "O0": ({"level": "O0"}, plain),
    "several blocks": (O2, in_blocks),
    "steps on old gradients and none": (O2, a_step_again),
    "steps on zeros": (O2, a_step_on_zeros),
    "steps on zeros at O1": (O1, a_step_on_zeros),
    "cleared by the model": (O2, cleared_by_the_model),
    "no overflow check": (O1, unchecked),
    "a closure": ({"make": torch.optim.LBFGS}, a_closure),
    "a closure of SGD": (O1, a_closure),
    "gradient release": (RELEASED, release),
    "torch's scaler alone": (O1, torchs_scaler_alone),
    "torch's scaler alone, O2": (O2, torchs_scaler_alone),
    "torch's scaler alone, RMSprop": ({"make": torch.optim.RMSprop}, torchs_scaler_alone),
    "torch's scaler that is off": (O2, torchs_scaler_off),
    "our scaler alone": (O2, our_scaler_alone),
    "our scaler alone, O1": (O1, our_scaler_alone),
    "accumulated by our scaler": (O1, accumulated_by_our_scaler),
    "clipped after the block": (O2, clipped_after_the_block),
    "two passes in a block": (O1, two_passes_in_a_block),
    "averaged by hand in the block": (O1, averaged_by_hand_in_the_block),
    "frozen parameters": (O2, frozen),
    "a pass that failed": (O2, a_failed_pass),
    "a loss without a graph": (O2, no_gradients_at_all),
}


@pytest.mark.parametrize("name", MEANT)
def test_what_is_meant_is_not_warned_of(name: str) -> None:
    options, batch = MEANT[name]
    several(batch, Loop(**options))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_gan_whose_losses_reach_one_network_each(level: str) -> None:
    nets: Any = [nn.Linear(4, 4), nn.Linear(4, 1)]
    both: Any = [torch.optim.Adam(net.parameters()) for net in nets]
    (g, d), (opt_g, opt_d) = amp.initialize(nets, both, opt_level=level, dtype=FP16, num_losses=2, verbosity=0)
    for set_to_none in (True, False) * 2:
        opt_d.zero_grad(set_to_none=set_to_none)
        scaled_step(d(g(X).detach()).float().mean(), opt_d, loss_id=0)
        opt_g.zero_grad(set_to_none=set_to_none)
        scaled_step(d(g(X)).float().mean(), opt_g, loss_id=1)


def test_fp16_optimizer_and_the_handle_scale_by_themselves() -> None:
    model = nn.Linear(4, 2).half()
    optimizer = fp16_utils.FP16_Optimizer(
        torch.optim.SGD(model.parameters(), 0.01), dynamic_loss_scale=True, verbose=False
    )
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward(model(X.half()).float().mean())
        optimizer.step()
    handle: Any = amp.init(dtype=FP16)
    other, sgd = with_optimizer(nn.Linear(4, 2), torch.optim.SGD, 0.01)
    for _ in range(2):
        advance(other(X).float().mean(), sgd, by=handle)


def test_gradients_clipped_before_our_scaler_unscales_them() -> None:
    model, optimizer = with_optimizer(nn.Linear(4, 2), torch.optim.SGD, 0.1)
    scaler = amp.GradScaler(init_scale=4096.0)

    def batch() -> None:
        scaler.scale((model(X) - 3).square().mean()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with pytest.warns(UserWarning, match=rf"{CLIPPED} of 4096.*scaler\.unscale_\(optimizer\) before") as caught:
        several(batch)
    assert ["scaler.step(optimizer)" in line_of(each) for each in caught] == [True]


def test_each_optimizer_is_warned_of() -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match=FORGOTTEN):
            plain(Loop())


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_nothing_looks_at_a_settled_training(dtype: torch.dtype) -> None:
    """Where nothing writes into gradients before they are unscaled, their norm is never computed."""
    in_blocks(loop := Loop(dtype=dtype))
    window = loop.optimizer._amp_stash.window
    assert window.subscribers == []
    assert window.clip_check is None if dtype is BF16 else window.clip_check._checks_left == 5


def test_blocks_that_begin_later_below_a_scaler_of_torch_are_warned_of() -> None:
    # Two dynamic scales overflow together, and without a C++ compiler torch's scaler then does not call the step.
    loop = Loop(loss_scale=128.0)
    advance(loop.loss(), loop.optimizer, loop.torchs_scaler)
    with pytest.warns(UserWarning, match=TWICE):
        block_inside_torchs_scaler(loop)


def test_gradients_are_looked_at_for_clipping_in_five_passes() -> None:
    """A norm of many gradients takes time. What is clipped later only is not told of."""
    loop = Loop("O1")
    for _ in range(5):
        clip_in_the_block(loop, limit=1e9)
    clip_in_the_block(loop)
