"""The fused optimizers in the place of torch's: same numbers in fp32, same state, same manners."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from halfstep import optimizers
from halfstep.core.errors import ArgumentValueError
from halfstep.kernels import backend
from halfstep.kernels.backends import compiler
from halfstep.parameters.ledger import set_grads
from tests.support.worlds import BF16, FP16, FP32, assert_equal, close

Optimizer = torch.optim.Optimizer
BACKENDS = ["eager", "torch", "compiled"]


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = FP32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(optim: Any, params: list[nn.Parameter], steps: int, seed: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optim.step()


# ---- masters


@pytest.mark.parametrize("on", BACKENDS)
def test_stochastic_rounding_is_unbiased_and_reproducible(on: str) -> None:
    def run(seed: int) -> torch.Tensor:
        param = nn.Parameter(torch.ones(4096, dtype=BF16))
        optim = optimizers.FusedSGD([param], lr=1e-3, rounding="stochastic", seed=seed)
        for _ in range(20):
            param.grad = torch.ones_like(param)
            optim.step()
        return param.detach().float()

    with backend(on):
        first = run(0)
        assert torch.equal(first, run(0))
        assert not torch.equal(first, run(1))
    assert first.mean().item() == pytest.approx(0.98, abs=1e-3)
    with backend("eager"):
        assert torch.equal(first, run(0))  # the same bits on every backend


# ---- manners


@pytest.mark.parametrize(
    "cls", [optimizers.FusedAdam, optimizers.FusedSGD, optimizers.FusedLAMB, optimizers.FusedNovoGrad]
)
def test_groups_schedulers_closures_and_tensor_lr(cls: type[Any]) -> None:
    a, b = weights((3,), (4,))
    optim = cls([a], lr=0.1)
    optim.add_param_group({"params": [b], "lr": 0.0})
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, 0.5)
    before = b.detach().clone()

    def closure() -> torch.Tensor:
        optim.zero_grad()
        loss = a.square().sum() + b.square().sum()
        loss.backward()
        return loss

    first = optim.step(closure)
    scheduler.step()
    second = optim.step(closure)
    assert second < first
    assert torch.equal(b, before)
    assert optim.param_groups[0]["lr"] == 0.05
    (c,) = weights((3,))
    tensor_lr = cls([c], lr=torch.tensor(0.1))
    tensor_lr.param_groups[0]["lr"].fill_(0.0)
    c.grad = torch.ones_like(c)
    kept = c.detach().clone()
    tensor_lr.step()
    assert torch.equal(c, kept)


def test_split_masters_need_bfloat16() -> None:
    (param,) = weights((3,), dtype=FP16)
    optim = optimizers.FusedAdam([param], master_weights="split")
    param.grad = torch.ones_like(param)
    with pytest.raises(ArgumentValueError, match=r"works on bfloat16 weights.*is float16"):
        optim.step()


def test_what_changes_between_steps_is_noticed() -> None:
    """A gradient that comes or goes, other storage, a thawed parameter: each step sees what is there."""
    ours, theirs = weights((3,), (4,), (2, 3)), weights((3,), (4,), (2, 3))
    a, b = optimizers.FusedAdam(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.0)
    for step in range(8):
        for params, optim in ((ours, a), (theirs, b)):
            generator = torch.Generator().manual_seed(step)
            for i, p in enumerate(params):
                gone = step < 5 and (step + i) % 3 == 0
                grad = torch.randn(p.shape, generator=generator)
                p.grad = None if gone else grad.t().contiguous().t() if step == 4 and p.dim() == 2 else grad
            if step == 6:
                params[1].data = params[1].data.clone()
            optim.step()
    close(ours, theirs)


@settings(max_examples=20)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6),
    dtypes=st.lists(st.sampled_from([FP32, BF16, FP16, torch.float64]), min_size=6, max_size=6),
    permute=st.booleans(),
)
@pytest.mark.skipif(not compiler.available(), reason="there is no C++ compiler")
@pytest.mark.filterwarnings("ignore:.*updates .* weights in place")
def test_backends_agree_on_any_shapes(shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], permute: bool) -> None:
    results = []
    for on in ("eager", "compiled"):
        generator = torch.Generator().manual_seed(0)
        params = []
        for shape, dtype in zip(shapes, itertools.cycle(dtypes)):
            value = torch.randn(shape, generator=generator).to(dtype)
            params.append(nn.Parameter(value.permute(tuple(reversed(range(value.dim())))) if permute else value))
        with backend(on):
            optim = optimizers.FusedAdam(params, lr=0.01, weight_decay=0.1, master_weights=True)
            train(optim, params, 3)
        state = [optim.state[p] for p in params]
        results.append((params, [s[name] for s in state for name in ("exp_avg", "exp_avg_sq")]))
    assert_equal(results[0][1], results[1][1])
    for a, b in zip(results[0][0], results[1][0], strict=True):  # torch's square root is not always the nearest number
        ulp = torch.finfo(a.dtype).eps
        torch.testing.assert_close(a, b, rtol=2 * ulp, atol=2 * ulp)


def test_parameters_that_are_views_of_one_storage() -> None:
    base = torch.randn(10)
    a, b = nn.Parameter(base[:4]), nn.Parameter(base[4:])
    optim = optimizers.FusedSGD([a, b], lr=0.5)
    a.grad, b.grad = torch.ones(4), torch.ones(6)
    expected = base - 0.5
    optim.step()
    assert torch.equal(base, expected)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_larc_bounds_the_rate(dtype: torch.dtype) -> None:
    """You, Gitman and Ginsburg, as Apex has it: the gradient is scaled by min(local / lr, 1), in fp32."""
    param = nn.Parameter(torch.full((4,), 2.0))
    optim = optimizers.LARC(torch.optim.SGD([param], lr=1.0, weight_decay=0.1), trust_coefficient=0.02)
    set_grads([param], [torch.full((4,), 3.0, dtype=dtype)])
    optim.step()
    local = 0.02 * 4.0 / (6.0 + 0.1 * 4.0 + 1e-8)
    assert param.tolist() == pytest.approx([2.0 - local * (3.0 + 0.1 * 2.0)] * 4)
    assert optim.param_groups[0]["weight_decay"] == 0.1


@pytest.mark.parametrize("way", ["pickled", "copied"])
def test_larc_is_printed_and_copied_with_its_optimizer(way: str) -> None:
    def step(optim: Any) -> list[float]:
        (param,) = optim.param_groups[0]["params"]
        param.grad = torch.full((4,), 3.0)
        optim.step()
        return param.tolist()  # type: ignore[no-any-return]

    param = nn.Parameter(torch.full((4,), 2.0))
    optim = optimizers.LARC(torch.optim.SGD([param], lr=1.0, momentum=0.9), trust_coefficient=0.5, clip=False, eps=0.1)
    step(optim)
    assert repr(optim) == f"LARC({optim.optim!r})"
    other = copy.deepcopy(optim) if way == "copied" else pickle.loads(pickle.dumps(optim))
    assert (other.trust_coefficient, other.clip, other.eps) == (0.5, False, 0.1)
    assert other.param_groups[0]["params"][0] is not param
    before = param.tolist()
    after = step(other)
    assert param.tolist() == before, "the copy moves its own parameter"
    assert step(optim) == after, "from the same momentum"


def test_state_that_was_exchanged_is_used() -> None:
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optim = optimizers.FusedAdam(params, lr=0.1, betas=(0.5, 0.5))
    for _ in range(2):
        train(optim, params, 1)
    first, second = ({**optim.state[p], "step": torch.tensor([2.0])} for p in params)
    optim.state[params[0]], optim.state[params[1]] = second, first
    second["exp_avg"].fill_(1e6)
    before = params[0].detach().clone()
    train(optim, params, 1)
    assert (params[0] - before < -1e3).all()
    del optim.state[params[0]]
    train(optim, params, 1)
    assert optim.state[params[0]]["step"] == 1.0
