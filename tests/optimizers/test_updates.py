"""Every fused optimizer on every backend, in every form of storage, against float64 and against torch's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from halfstep import optimizers
from halfstep.core.errors import UsageError
from halfstep.kernels import backend
from halfstep.kernels.storage import join, round_half_away
from tests.support.backends import needs_interpreter, needs_triton
from tests.support.optimizer_references import CASES, Case, Reference
from tests.support.worlds import BF16, FP16, FP32, FP64, assert_equal

SHAPES = [(5,), (), (0,), (3, 4), (2, 3, 4, 4), (257,)]
FORMS = [  # weights, gradients, masters
    (FP32, FP32, None),
    (FP64, FP64, None),
    (BF16, BF16, None),
    (FP16, FP16, None),
    (BF16, BF16, "split"),
    (BF16, BF16, "plain"),
    (FP16, FP16, "plain"),
    (BF16, FP32, "split"),
]
SETTINGS = {"bare": (None, None), "clip": (0.5, None), "overflow": (None, 6), "clip-overflow": (0.5, 6)}
HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def no_word_of_lost_updates() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*updates .* weights in place", category=UserWarning)
        yield


def make_params(dtype: torch.dtype, grad_dtype: Any, device: str) -> list[Any]:
    params = [torch.nn.Parameter(torch.randn(s, dtype=FP64).to(device, dtype)) for s in SHAPES]
    for p in params:
        if p.dim() == 4:
            p.data = p.data.to(memory_format=torch.channels_last)
        if grad_dtype is not None and grad_dtype is not dtype:
            p.grad_dtype = grad_dtype
    return params


def set_grads(params: list[Any], dtype: torch.dtype, scale: float = 1.0) -> list[torch.Tensor]:
    """Random gradients, times ``scale`` in the parameters; returned unscaled."""
    grads = [torch.randn(p.shape).to(p.device, dtype) for p in params]
    for p, g in zip(params, grads, strict=True):
        p.grad = g * scale
    return grads


def ulps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def run_against_reference(
    case: Case, form: tuple[Any, Any, Any], setting: str, steps: int, overflow_at: int, device: str = "cpu"
) -> None:
    dtype, grad_dtype, masters = form
    clip, overflow = SETTINGS[setting]
    params = make_params(dtype, grad_dtype, device)
    clips = {} if case.clips and clip is None else {"max_grad_norm": clip}
    optimizer: Any = case.cls(params, lr=0.03, weight_decay=0.05, master_weights=masters, **clips, **case.arguments)
    reference = Reference(case, params, 0.03, 0.05, clip or case.clips)
    precise = masters is not None or dtype in (FP32, FP64)
    scale = 1024.0 if overflow is not None else 1.0
    for i in range(steps):
        grads = set_grads(params, grad_dtype, scale)
        if overflow is not None:
            optimizer.grad_scale = torch.tensor(scale, device=device)
            optimizer.found_inf = torch.tensor(float(i == overflow_at), device=device)
        if overflow is not None and i == overflow_at:
            params[0].grad[0] = torch.inf
            before = copy.deepcopy((params, optimizer.state_dict()["state"]))
            optimizer.step()
            assert_equal(before, (params, optimizer.state_dict()["state"]))
        else:
            optimizer.step()
            reference.step(grads, lambda x: x if precise else x.to(dtype).double())
    # A step of the size of lr is exact to some ulps of the weight; without masters, a rounding may fall the other way.
    unit = ulps(FP64 if dtype is FP64 else FP32) * 64 if precise else 2 * ulps(dtype)
    if "novograd" in case.name:
        unit = max(unit, ulps(FP32) * 64)  # its moving norm is a float32 number
    for p, expected in zip(params, reference.params, strict=True):
        state = optimizer.state.get(p, {})
        value = join(p.detach(), state["remainder"]) if masters == "split" else state.get("master", p.detach())
        torch.testing.assert_close(value.double(), expected, rtol=unit, atol=unit)
        if masters == "split":
            assert torch.equal(p, round_half_away(value))
        if masters == "plain":
            assert torch.equal(p, value.to(dtype))


def form_name(form: tuple[Any, Any, Any]) -> str:
    return "-".join(str(x).removeprefix("torch.") for x in form)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *((name, setting) for name in ("eager", "torch") for setting in ("bare", "clip-overflow")),
        *(("compiled", setting) for setting in SETTINGS),
    ],
)
@pytest.mark.parametrize("form", FORMS, ids=form_name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ten_steps_follow_the_papers(name: str, case: Case, form: tuple[Any, Any, Any], setting: str) -> None:
    with backend(name):
        run_against_reference(case, form, setting, steps=10, overflow_at=6)


@pytest.mark.costly
@pytest.mark.exhaustive
@needs_triton
@pytest.mark.parametrize("form", FORMS, ids=form_name)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=needs_interpreter),
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")]),
    ],
)
def test_triton_kernels_follow_the_papers(device: str, case: Case, form: tuple[Any, Any, Any]) -> None:
    with backend("triton"):
        run_against_reference(case, form, "clip-overflow", steps=4, overflow_at=2, device=device)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
def test_more_elements_than_int32_counts() -> None:
    size = 2**31 + 5
    param = torch.nn.Parameter(torch.ones(size, dtype=BF16, device="cuda"))
    param.grad = torch.ones_like(param)
    optimizers.FusedSGD([param], lr=0.5).step()
    assert param.detach()[[0, 2**31 - 1, 2**31, size - 1]].tolist() == [0.5] * 4
    assert param.detach().float().mean().item() == 0.5


@pytest.mark.parametrize(("saved", "loaded"), [("FusedAdam", "FusedNovoGrad"), ("FusedNovoGrad", "FusedLAMB")])
def test_state_of_another_kind_of_optimizer_is_refused_by_name(saved: str, loaded: str) -> None:
    params = make_params(FP32, None, "cpu")
    first, second = getattr(optimizers, saved)(params), getattr(optimizers, loaded)(params)
    set_grads(params, FP32)
    first.step()
    second.load_state_dict(first.state_dict())
    with pytest.raises(UsageError, match=r"exp_avg_sq of a parameter has shape .* NovoGrad keeps a number"):
        second.step()
