"""An optimizer's step computes in the dtypes that it has, whatever is cast around it; a closure in it is cast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp
from tests.support.worlds import BF16, scaled_backward


class Orthogonal(torch.optim.Optimizer):
    """With matrix products and a softmax in its step, as Muon or Shampoo have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.dtypes: list[torch.dtype] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in self.param_groups[0]["params"]:
            product = p.grad @ p.grad.T @ p.grad
            self.dtypes += [product.dtype, (p.grad @ p).dtype, torch.nn.functional.linear(p, product).dtype]
            p.sub_(product, alpha=0.1)
        return loss


class Wrapper(torch.optim.Optimizer):
    """Has never been in torch's constructor, which puts hooks around ``step``; halfstep's casts end in such a hook."""

    def __init__(self, optimizer: Orthogonal) -> None:
        self.inner = optimizer
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return Orthogonal.step.__wrapped__(self.inner, closure)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def on_the_instance(optimizer: Orthogonal) -> Orthogonal:
    """As a profiler or Accelerate does it."""
    step = Orthogonal.step.__wrapped__  # type: ignore[attr-defined]
    optimizer.step = lambda closure=None: step(optimizer, closure)  # type: ignore[method-assign]
    return optimizer


KINDS: dict[str, Callable[[Orthogonal], Any]] = {
    "with hooks": lambda optimizer: optimizer,
    "wrapper": Wrapper,
    "on the instance": on_the_instance,
}
SCOPES: dict[str, Callable[[], Any]] = {
    "no scope": nullcontext,
    "auto_cast": lambda: amp.auto_cast(dtype="bfloat16"),
    "auto_cast with lists": lambda: amp.auto_cast(dtype="bfloat16", custom_white_list=["mul"]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("closure", [False, True], ids=["bare", "closure"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_products_in_a_step_are_fp32(level: str, scope: str, closure: bool, kind: str) -> None:
    model: Any = nn.Linear(4, 4, bias=False)
    optimizer = KINDS[kind](Orthogonal(model.parameters()))
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=BF16, loss_scale=1.0, verbosity=0)
    outputs = []

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        outputs.append(nn.functional.linear(torch.ones(2, 4), torch.ones(4, 4)).dtype)
        scaled_backward(loss := model(torch.ones(2, 4)).float().sum(), optimizer)
        return loss

    with SCOPES[scope]():
        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
    assert set(optimizer.dtypes) == {torch.float32}
    cast = scope != "no scope" or level == "O1"
    assert outputs == [torch.bfloat16 if cast else torch.float32]
