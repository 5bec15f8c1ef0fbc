"""In which dtype a step finds the gradients of a model, by level, who keeps the masters, and what was done to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import backward
from torch.autograd.graph import get_gradient_edge
from torch.autograd.variable import Variable
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from halfstep import TrainStep, amp
from halfstep.core.errors import UsageError
from halfstep.kernels.backends import compiler
from halfstep.torch_internals.torch_compat import HAS_GRAD_DTYPE
from tests.support.worlds import BF16, FP16, FP32, scaled_backward, start_amp, step_and_clear, with_optimizer

pytestmark = [
    pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="this torch has no Tensor.grad_dtype"),
    pytest.mark.filterwarnings("ignore:.*did not come through amp.scale_loss:UserWarning"),  # of plain passes
]


class Tied(nn.Module):
    """A weight that is used twice, one that is used once, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once, self.never = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.once(self.twice(torch.tanh(self.twice(x))))


Loss, zeros = Callable[[], torch.Tensor], methodcaller("zero_grad", set_to_none=False)


def blocks(loss: Loss, optimizer: Any, *, count: int = 1, then: Any = id, **options: Any) -> None:
    for _ in range(count):
        scaled_backward(loss(), optimizer, **options)
    then(optimizer)


def in_a_block(loss: Loss, optimizer: Any) -> None:
    with amp.scale_loss(loss(), optimizer) as scaled_loss:
        scaled_loss.backward()
        (loss() * (optimizer._amp_stash.window.scale or 1.0)).backward()


def then_by(run: Callable[[Any], Any]) -> Callable[[Loss, Any], None]:
    """A pass without a block after a block."""
    return lambda loss, optimizer: (blocks(loss, optimizer), run(loss))[1]


def by_the_engine(loss: Loss) -> None:
    """As schedules of pipelines do it, such as Megatron-LM's."""
    Variable._execution_engine.run_backward((loss(),), (torch.ones(()),), False, False, accumulate_grad=True)


def by_a_checkpoint(loss: Loss) -> None:
    checkpoint(lambda x: loss() * x, torch.ones(1, requires_grad=True), use_reentrant=True).sum().backward()


def blocks_of_two(loss: Loss, optimizer: Any) -> None:
    _model, other = start_amp(nn.Linear(1, 1), torch.optim.SGD, "O2", lr=0.1)
    blocks(loss, optimizer)
    blocks(loss, other)


def by_train_step(loss: Loss, optimizer: Any, *, clips: float | None = None) -> None:
    zero_grad, optimizer.zero_grad = optimizer.zero_grad, lambda **_: None
    TrainStep(lambda: loss(), None, optimizer, max_grad_norm=clips)()
    optimizer.zero_grad = zero_grad


DOORS: dict[str, tuple[Callable[..., None], torch.dtype]] = {
    "a block": (blocks, BF16),
    "a plain pass": (lambda loss, _: loss().backward(), FP32),
    "two blocks": (partial(blocks, count=2), FP32),
    "two passes in a block": (in_a_block, FP32),
    "a plain pass after a block": (then_by(lambda loss: loss().backward()), FP32),
    "a pass by the engine after a block": (then_by(by_the_engine), FP32),
    "a reentrant checkpoint after a block": (then_by(by_a_checkpoint), FP32),
    "a pass from an edge after a block": (then_by(lambda it: backward(get_gradient_edge(it()), torch.ones(()))), FP32),
    "two blocks, delay_unscale": (lambda loss, it: (blocks(loss, it, delay_unscale=True), blocks(loss, it)), FP32),
    "clip_grad_norm_ of masters": (partial(blocks, then=lambda it: clip_grad_norm_(amp.master_params(it), 1)), FP32),
    "clip_master_grads": (partial(blocks, then=lambda it: it._amp_stash.window.clip(1)), FP32),
    "a plain pass after zeros": (lambda loss, it: (blocks(loss, it, then=zeros), loss().backward()), FP32),
    "a block of another optimizer": (blocks_of_two, FP32),
    "a pass of another model": (then_by(lambda _: nn.Linear(1, 1)(torch.ones(1)).backward()), BF16),
    "TrainStep": (by_train_step, BF16),
    "TrainStep(max_grad_norm=)": (partial(by_train_step, clips=1e9), FP32),
}


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize(
    "options",
    [{}, {"master_grad": True}, {"loss_scale": 128.0}, {"dtype": FP16, "loss_scale": 1.0}],
    ids=["bf16", "master_grad", "scaled", "fp16"],
)
@pytest.mark.parametrize("door", DOORS)
def test_what_a_gradient_becomes_by_each_door(door: str, options: dict[str, Any], optimizer_class: Any) -> None:
    run, dtype = DOORS[door]
    model, optimizer = with_optimizer(Tied(), optimizer_class, lr=0.0)
    options = {"opt_level": "O2", "dtype": BF16, "emulate": False, "verbosity": 0, **options}
    model, optimizer = amp.initialize(model, optimizer, **options)
    for _ in range(2):
        run(lambda: model(torch.ones(2, 16)).sum(), optimizer)
        # A step that is not fused reads fp32.
        plain = door == "TrainStep" and not (optimizer_class is torch.optim.AdamW and compiler.available())
        dtypes = [model.once.weight.grad.dtype, model.twice.weight.grad.dtype]
        assert dtypes == [dtype if len(options) == 4 and not plain else FP32, FP32], "uses add up in fp32"
        optimizer.step()
        model.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {FP32}, "of a plain pass"
        optimizer.zero_grad()


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("door", [name for name in DOORS if "two" in name or "after a block" in name])
def test_passes_add_up_in_fp32(door: str, optimizer_class: Any) -> None:
    """A small gradient after a large one, which bfloat16 would swallow."""
    model, optimizer = start_amp(nn.Linear(1, 1, bias=False), optimizer_class, "O2", dtype=BF16, emulate=False, lr=0.0)
    for _ in range(3):
        factors = iter((1.0, 2.0**-10, 2.0**-10))  # a checkpoint computes the loss again
        DOORS[door][0](lambda factors=factors: (model.weight * next(factors)).sum(), optimizer)
        assert model.weight.grad.item() == 1.0 + 2.0**-10
        step_and_clear(optimizer)


@pytest.mark.parametrize("casts", ["none", "before", "after"])
@pytest.mark.usefixtures("collector_off")
def test_passes_are_watched_while_gradients_may_be_bfloat16(casts: str) -> None:
    own = Variable._execution_engine
    model, optimizer = start_amp(nn.Linear(1, 1, bias=False), torch.optim.SGD, "O2", dtype=BF16, emulate=False, lr=0.0)
    factors = iter((1.0, 1.0, 2.0**-10))
    with amp.auto_cast(enable=casts == "before"):
        blocks(lambda: (model.weight * next(factors)).sum(), optimizer)
    optimizer.zero_grad()
    with amp.auto_cast(enable=casts == "after"):
        DOORS["a plain pass after a block"][0](lambda: (model.weight * next(factors)).sum(), optimizer)
    assert model.weight.grad.item() == 1.0 + 2.0**-10
    del optimizer
    assert Variable._execution_engine is own


@pytest.mark.parametrize(("uses", "dtype"), [(1, BF16), (2, FP32), (64, FP32)])
def test_the_sum_of_the_uses_of_a_weight_against_float64(uses: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    model, optimizer = start_amp(model, torch.optim.SGD, "O2", dtype=BF16, emulate=False, lr=0.0)
    inputs = [torch.randn(8, 64).to(BF16) for _ in range(uses)]
    exact = model.weight.detach().double().requires_grad_()
    sum((x.double() @ exact.T).square().sum() for x in inputs).backward()
    blocks(lambda: sum(model(x).float().square().sum() for x in inputs), optimizer)
    error = (model.weight.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert model.weight.grad.dtype is dtype
    assert error < 0.005, "of 64 uses the sum in bfloat16 is further off"


@pytest.mark.parametrize("master_grad", [False, True])
def test_gradients_of_decorated_models_are_fp32(master_grad: bool) -> None:
    """Also in a block of an optimizer that ``amp.initialize`` has prepared; in its own, ``scale_loss`` refuses them."""
    first, its = start_amp(nn.Linear(4, 4, bias=False), torch.optim.SGD, "O2", dtype=BF16, emulate=False, lr=0.1)
    model, optimizer = with_optimizer(nn.Linear(4, 4, bias=False), torch.optim.AdamW, lr=0.1)
    amp.decorate(model, optimizer, level="O2", dtype=BF16, emulate=False, master_grad=master_grad)
    for run in (torch.Tensor.backward, lambda loss: scaled_backward(loss, its)):
        run(first(model(torch.ones(2, 4).to(BF16))).sum())
        assert model.weight.grad.dtype is FP32
        step_and_clear(optimizer)
        step_and_clear(its)
    with pytest.raises(UsageError, match="did not return"):
        scaled_backward(model(torch.ones(2, 4).to(BF16)).sum(), optimizer)
