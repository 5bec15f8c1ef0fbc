"""The multi-tensor operations and Apex's names for them, against float64, on every backend that runs here."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp, multi_tensor, optimizers
from halfstep.multi_tensor import multi_tensor_applier
from tests.support import optimizer_references as papers
from tests.support.backends import on_each_backend, skip_without_compiler  # noqa: F401
from tests.support.worlds import BF16, FP16, FP32, scaled_step, start_amp

SHAPES = [(3, 4), (), (0,), (5000,)]


def some(dtype: torch.dtype = FP32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def mixed(seed: int = 0) -> list[torch.Tensor]:
    return [t.to(d) for t, d in zip(some(seed=seed), (FP32, BF16, FP16, BF16), strict=True)]


def zeros(like: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.zeros_like(t, dtype=FP32) for t in like]


def flag(value: int = 0) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


def close(found: Any, expected: Any, ulps: float = 8) -> None:
    for a, b in zip(found, expected, strict=True):
        eps = torch.finfo(a.dtype).eps
        torch.testing.assert_close(a.double(), b.double(), rtol=ulps * eps, atol=ulps * eps)


# ---- Apex's names


def test_scale_and_norms_by_their_old_names() -> None:
    x, noop = mixed(), flag()
    out = zeros(x)
    assert multi_tensor_applier(multi_tensor.multi_tensor_scale, noop, [x, out], 4.0) is None
    close(out, [t.double() * 4 for t in x])
    norm, each = multi_tensor_applier(multi_tensor.multi_tensor_l2norm, noop, [x], True)
    assert (norm.shape, each.shape, norm.dtype) == ((1,), (4,), FP32)
    assert multi_tensor_applier(multi_tensor.multi_tensor_l2norm, noop, [x])[1].numel() == 0
    scaled, _ = multi_tensor_applier(multi_tensor.multi_tensor_l2norm_scale, noop, [x, out], 0.25, True)
    unscaled, _ = multi_tensor_applier(multi_tensor.multi_tensor_unscale_l2norm, noop, [x], torch.tensor([0.25]))
    close([scaled, unscaled], [norm * 0.25] * 2)
    assert noop.item() == 0
    x[0][0, 0] = math.nan
    multi_tensor_applier(multi_tensor.multi_tensor_scale, noop, [x, out], 4.0)
    assert noop.item() == 1
    norm, _ = multi_tensor_applier(multi_tensor.multi_tensor_l2norm_mp, noop, [x], False)
    assert norm.item() == 0.0


@pytest.mark.parametrize(("check", "found"), [(-1, 1), (0, 0), (1, 1)])
def test_axpby_checks_what_it_is_told_to(check: int, found: int) -> None:
    x, y, noop = some(), some(seed=1), flag()
    y[0][0, 0] = math.inf
    multi_tensor_applier(multi_tensor.multi_tensor_axpby, noop, [x, y, y], 1.0, 1.0, check)
    assert noop.item() == found


OPTIMIZERS: dict[str, tuple[Any, Any, int, tuple[Any, ...]]] = {  # -> function, paper's, state lists, arguments
    "adamw": (multi_tensor.multi_tensor_adam, papers.adam, 2, (0.01, 0.9, 0.999, 1e-8, "t", 1, 1, 0.1)),
    "sgd": (multi_tensor.multi_tensor_sgd, papers.sgd, 1, (0.1, 0.9, 0.0, 0.01, False, "first", False, 1.0)),
    "adagrad": (multi_tensor.multi_tensor_adagrad, papers.adagrad, 1, (0.01, 1e-10, 0, 0.1)),
    "lamb": (multi_tensor.multi_tensor_lamb, papers.lamb, 2, (0.01, 0.9, 0.999, 1e-6, "t", 1, 0.1, 1, 1, 0.0, 0.0)),
    "novograd": (
        multi_tensor.multi_tensor_novograd,
        papers.novograd,
        1,
        ("norms", 0.01, 0.9, 0.999, 1e-8, "t", 1, 0.1, 1, 1, 2),
    ),
}
HYPER = {"sgd": {"momentum": 0.9}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_steps(name: str) -> None:
    function, paper, states, arguments = OPTIMIZERS[name]
    params, noop = some(seed=3), flag()
    exact: list[torch.Tensor] = [p.double() for p in params]
    kept, memory = [zeros(params) for _ in range(states)], [{} for _ in params]
    norms = torch.stack([g.norm() for g in some(seed=10)])  # the first step's, as the optimizer has it
    for step in range(1, 6):
        grads = some(seed=9 + step)
        given = {"t": step, "first": step == 1, "norms": norms}
        numbers = [given.get(a, a) if isinstance(a, str) else a for a in arguments]
        multi_tensor_applier(function, noop, [grads, params, *kept], *numbers)
        exact = [
            paper(p, g.double(), s, step, lr=0.01, weight_decay=0.1, **HYPER.get(name, {}))
            for p, g, s in zip(exact, grads, memory, strict=True)
        ]
    close(params, exact, 64)
    before = [t.clone() for t in [*params, *chain(*kept)]]
    multi_tensor_applier(function, flag(1), [some(), params, *kept], *numbers)
    assert all(torch.equal(a, b) for a, b in zip(before, [*params, *chain(*kept)], strict=True))


def test_capturable_adam_is_adam_on_unscaled_gradients() -> None:
    params, grads = some(), [g * 8 for g in some(seed=1)]
    same, moments, others = [p.clone() for p in params], [zeros(params), zeros(params)], [zeros(params), zeros(params)]
    arguments = (0.01, 0.9, 0.999, 1e-8, torch.tensor([1]), 1, 1, 0.1)
    multi_tensor_applier(multi_tensor.multi_tensor_adam, flag(), [some(seed=1), same, *others], *arguments)
    lists = [grads, params, *moments]
    for noop in (0, 1):
        multi_tensor_applier(multi_tensor.multi_tensor_adam_capturable, flag(noop), lists, *arguments, 0.125)
        assert all(torch.equal(a, b) for a, b in zip(params, same, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(chain(*moments), chain(*others), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(grads, some(seed=1), strict=True))


@pytest.mark.parametrize("copied", [True, False])
def test_lamb_for_mixed_precision_is_lamb_on_unscaled_gradients(copied: bool) -> None:
    params, grads = some(), [g * 8 for g in some(seed=1)]
    same, moments, others = [p.clone() for p in params], [zeros(params), zeros(params)], [zeros(params), zeros(params)]
    arguments = (0.01, 0.9, 0.999, 1e-6, 1, 1, 0.1, 1, 1, torch.tensor([20.0]), 10.0, None)
    multi_tensor_applier(multi_tensor.multi_tensor_lamb, flag(), [some(seed=1), same, *others], *arguments)
    copies = [p.bfloat16() for p in params]
    lists = [grads, params, *moments, *([copies] if copied else [])]
    for noop, found_inf in ((0, 0.0), (1, 0.0), (0, 1.0)):  # the last two change nothing
        flags = (torch.tensor([found_inf]), torch.tensor(0.125))
        multi_tensor_applier(multi_tensor.multi_tensor_lamb_mp, flag(noop), lists, *arguments, *flags)
        assert all(torch.equal(a, b) for a, b in zip(params, same, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(chain(*moments), chain(*others), strict=True))
        for copy, param, before in zip(copies, params, some(), strict=True):
            assert torch.equal(copy, (param if copied else before).bfloat16())


@pytest.mark.parametrize(("decay", "nvlamb"), [(0.1, None), (0.0, None), (0.0, True)])
def test_lamb_in_two_stages_is_lamb(decay: float, nvlamb: bool | None) -> None:
    params, updates, noop = some(seed=3), zeros(some()), flag(1)  # neither stage obeys
    kept = [zeros(params), zeros(params)]
    exact: list[torch.Tensor] = [p.double() for p in params]
    memory: list[dict[str, Any]] = [{} for _ in params]
    for step in range(5):
        grads = some(seed=9 + step)
        lists = [grads, params, *kept, updates]
        decays, norm = torch.full((4,), decay), torch.tensor([200.0])  # twice what is allowed
        numbers = (decays, step, 0.9, 0.999, 1e-6, norm, 100.0)
        multi_tensor_applier(multi_tensor.multi_tensor_lamb_stage1_cuda, noop, lists, *numbers)
        norms = [multi_tensor.multi_tensor_l2norm(0, flag(), [tensors], True)[1] for tensors in (params, updates)]
        arguments = (*norms, 0.01, decay, nvlamb)
        multi_tensor_applier(multi_tensor.multi_tensor_lamb_stage2_cuda, noop, [params, updates], *arguments)
        exact = [
            papers.lamb(p, g.double() / 2, s, step + 1, lr=0.01, weight_decay=decay, use_nvlamb=bool(nvlamb))
            for p, g, s in zip(exact, grads, memory, strict=True)
        ]
    close(params, exact, 64)


def test_capturable_adam_leaves_unscaled_gradients_and_follows_its_masters() -> None:
    params, grads = some(BF16), [g * 8 for g in some(BF16, 1)]
    masters, moments = [p.float() for p in params], [zeros(params), zeros(params)]
    arguments = (torch.tensor(0.01), 0.9, 0.999, 1e-8, torch.tensor([1]), 1, 1, 0.1)
    same, plain = [m.clone() for m in masters], [zeros(params), zeros(params)]
    multi_tensor_applier(multi_tensor.multi_tensor_adam, flag(), [some(BF16, 1), same, *plain], *arguments)
    lists = [grads, params, *moments, masters]
    multi_tensor_applier(
        multi_tensor.multi_tensor_adam_capturable_master, flag(), lists, *arguments, torch.tensor(0.125)
    )
    assert all(torch.equal(a, b) for a, b in zip(grads, some(BF16, 1), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(masters, same, strict=True))
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(params, masters, strict=True))


@pytest.mark.parametrize(
    ("factor", "pattern", "scales", "counts"),
    [
        (2.0, "FF", [8, 16], [1, 0]),
        (2.0, "IFII", [8, 8, 8, 4], [0, 1, 0, 0]),
        (2.0, "III", [8, 4, 2], [0, 0, 0]),
        (2.0, "FIFF", [8, 8, 8, 16], [1, 0, 1, 0]),
        # As upstream's tests have it: the scale only backs off, and good steps are counted.
        (1.0, "FFF", [8, 8, 8], [1, 0, 1]),
        (1.0, "IIFF", [8, 4, 4, 4], [0, 0, 1, 0]),
    ],
)
@pytest.mark.parametrize("shape", [(), (1,)])
def test_hysteresis(
    factor: float, pattern: str, scales: list[float], counts: list[int], shape: tuple[int, ...]
) -> None:
    scale, growth, left = torch.full(shape, 8.0), torch.zeros(shape, dtype=torch.int32), torch.full(shape, 2)
    found = []
    for letter in pattern:
        overflow = torch.full(shape, float(letter == "I"))
        multi_tensor.update_scale_hysteresis(scale, growth, left, overflow, factor, 0.5, 2, 2)
        found.append((scale.item(), growth.item()))
    assert found == list(zip(scales, counts, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masters_that_a_fused_optimizer_keeps(dtype: torch.dtype) -> None:
    """Kernels read and write what ``master_params`` yields, although it has no memory before it is used."""
    model, optimizer = start_amp(nn.Linear(8, 4), optimizers.FusedAdam, "O2", dtype=dtype, lr=1e-2)
    scaled_step(model(torch.ones(2, 8)).sum(), optimizer)
    masters = list(amp.master_params(optimizer))
    before = [master.detach().clone() for master in masters]
    flag = torch.zeros(1, dtype=torch.int32)
    norm, _ = multi_tensor.multi_tensor_l2norm(2048, flag, [masters])
    torch.testing.assert_close(norm[0], torch.cat([value.flatten() for value in before]).norm())
    multi_tensor.multi_tensor_scale(2048, flag, [masters, masters], 0.75)
    assert list(map(id, amp.master_params(optimizer))) == list(map(id, masters))
    for master, weight, value in zip(masters, model.parameters(), before, strict=True):
        assert torch.equal(master.detach(), value * 0.75)
        assert torch.equal(weight, (value * 0.75).to(dtype))
