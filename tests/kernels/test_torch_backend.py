"""The ``torch`` backend: which updates run on torch's fused calls, in pieces or whole, and how far their numbers go.

What every backend does is tested in ``test_launch`` and, for whole optimizers, in ``optimizers/test_updates``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from halfstep import optimizers
from halfstep.kernels import backend
from halfstep.kernels.backends import torch_fused
from halfstep.kernels.launch import launch
from halfstep.kernels.multi_tensor import read_gradients
from halfstep.kernels.storage import join
from halfstep.kernels.tensor_table import TensorTable
from tests.support.worlds import BF16, FP16, FP32, FP64, assert_equal

SHAPES = [(7,), (), (0,), (3, 50), (2, 3, 4, 4), (130,)]
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (optimizers.FusedAdam, {"weight_decay": 0.1}),
    "adam": (optimizers.FusedAdam, {"weight_decay": 0.1, "adam_w_mode": False, "amsgrad": True}),
    "adam, uncorrected": (optimizers.FusedAdam, {"bias_correction": False}),
    "adam, bf16 moment": (optimizers.FusedAdam, {"state_dtype": BF16}),
    "sgd": (optimizers.FusedSGD, {"weight_decay": 0.1}),
    "momentum": (optimizers.FusedSGD, {"momentum": 0.9, "maximize": True}),
    "nesterov": (optimizers.FusedSGD, {"momentum": 0.9, "nesterov": True}),
    "adagrad": (optimizers.FusedAdagrad, {"weight_decay": 0.1, "lr_decay": 0.1}),
    "lamb": (optimizers.FusedLAMB, {"weight_decay": 0.1}),
    "novograd": (optimizers.FusedNovoGrad, {"weight_decay": 0.1}),
    "adagrad, decoupled": (optimizers.FusedAdagrad, {"weight_decay": 0.1, "adagrad_w_mode": True}),
}
FORMS = [(FP32, None), (FP64, None), (BF16, True), (BF16, "split"), (FP16, True), (BF16, None)]


@pytest.fixture(autouse=True)
def on_torch() -> Iterator[None]:
    with backend("torch"):
        yield


def make(case: str, dtype: torch.dtype, masters: Any, **options: Any) -> tuple[list[Any], Any]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]
    params[4].data = params[4].data.to(memory_format=torch.channels_last)
    cls, arguments = CASES[case]
    return params, cls(params, lr=0.03, master_weights=masters, **arguments, **options)


def train(params: list[Any], optimizer: Any, steps: int = 3, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for i, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            # Of one row the tensors do not lie in the same order, so it is staged.
            p.grad = grad.t().contiguous().t() if i == 3 else grad
        optimizer.step()


def values(params: list[Any], optimizer: Any) -> list[torch.Tensor]:
    return [optimizer.master_value(p) if p.dtype in (BF16, FP16) else p.detach().clone() for p in params]


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("this runs on torch._foreach")


@pytest.mark.filterwarnings("ignore:.*updates .* weights in place")
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_reference_up_to_roundings(
    case: str, form: tuple[torch.dtype, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, masters = form
    with backend("eager"):
        params, optimizer = make(case, dtype, masters, max_grad_norm=1.0)
        train(params, optimizer)
        expected, weights = values(params, optimizer), [p.detach().clone() for p in params]
    monkeypatch.setattr(torch_fused.ForeachLauncher, "__call__", refuse)
    params, optimizer = make(case, dtype, masters, max_grad_norm=1.0)
    train(params, optimizer)
    # Without masters, and of a 16-bit moment, every rounding may fall the other way.
    narrow = masters is None and dtype is BF16
    unit = 4 * torch.finfo(BF16).eps if narrow else 2e-4 if "bf16 moment" in case else 1e-5
    torch.testing.assert_close([*values(params, optimizer)], [*expected], rtol=unit, atol=unit)
    for ours, theirs in zip(params, weights, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=2 * torch.finfo(dtype).eps + unit, atol=unit)


@pytest.mark.parametrize("form", [(FP32, None), (BF16, True), (BF16, "split")], ids=str)
@pytest.mark.parametrize("case", ["adamw", "momentum", "adagrad", "lamb", "novograd"])
def test_pieces_change_nothing(case: str, form: tuple[torch.dtype, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for piece in (1 << 20, 64):
        monkeypatch.setattr(torch_fused, "_PIECE", piece)
        params, optimizer = make(case, *form)
        train(params, optimizer)
        assert torch.isfinite(params[5]).all()
        with torch.no_grad():
            params[5].data[3::50] = 0.5  # written from outside, in some pieces
        train(params, optimizer, seed=2)
        results.append(values(params, optimizer))
    # Norms of tensors, which LAMB and NovoGrad have, are added up in another order.
    unit = 1e-6 if case in ("lamb", "novograd") else 0.0
    for whole, cut in zip(*results, strict=True):
        torch.testing.assert_close(whole, cut, rtol=unit, atol=unit)


def test_what_torch_has_no_call_for_is_the_reference_itself() -> None:
    for options in (
        {"momentum": 0.9, "weight_decay": 0.1, "wd_after_momentum": True},
        {"momentum": 0.9, "dampening": 0.5},
    ):
        results = []
        for name in ("torch", "eager"):
            with backend(name):
                params = [torch.nn.Parameter(torch.linspace(-1.0, 1.0, 9))]
                optimizer = optimizers.FusedSGD(params, lr=0.1, **options)  # type: ignore[arg-type]
                train(params, optimizer)
                results.append(params[0].detach())
        assert torch.equal(*results)


# ---- masters


def test_masters_are_plain_unless_told_otherwise() -> None:
    for masters, name in ((True, "master"), ("plain", "master"), ("split", "remainder")):
        params, optimizer = make("adamw", BF16, masters)
        train(params, optimizer, 1)
        assert name in optimizer.state[params[0]], masters
    with backend("eager"):
        params, optimizer = make("adamw", BF16, True)
        train(params, optimizer, 1)
    assert "remainder" in optimizer.state[params[0]]


@pytest.mark.parametrize(("first", "second"), [("eager", "torch"), ("torch", "eager")])
def test_a_checkpoint_moves_between_machines_with_and_without_a_compiler(first: str, second: str) -> None:
    with backend(first):
        params, optimizer = make("adamw", BF16, True)
        train(params, optimizer)
        saved = copy.deepcopy(([p.detach() for p in params], optimizer.state_dict()))
        kept = values(params, optimizer)
        train(params, optimizer, seed=2)
        expected = values(params, optimizer)
    with backend(second):
        params, optimizer = make("adamw", BF16, True)
        with torch.no_grad():
            for p, weight in zip(params, saved[0], strict=True):
                p.copy_(weight)
        optimizer.load_state_dict(saved[1])
        assert_equal(values(params, optimizer), kept)
        train(params, optimizer, seed=2)
        for p, ours, theirs in zip(params, values(params, optimizer), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            state = optimizer.state[p]
            assert ("master" in state) is (second == "torch")
            if second == "eager":
                assert torch.equal(join(p.detach(), state["remainder"]), ours)


# ---- sums of squares


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64], ids=str)
@pytest.mark.parametrize("factor", [1.0, 1e-4, 1e4])
@pytest.mark.parametrize("piece", [1 << 20, 64])
def test_sums_of_squares(dtype: torch.dtype, factor: float, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_fused, "_PIECE", piece)
    monkeypatch.setattr(torch_fused.ForeachLauncher, "__call__", refuse)
    grads = [(torch.randn(shape) * factor).to(dtype) for shape in SHAPES]
    found = torch.zeros(())
    sums = launch(TensorTable.of(grad=grads), read_gradients, {}, found=found)
    expected = torch.stack([g.double().square().sum() for g in grads])
    torch.testing.assert_close(sums[0], expected, rtol=1e-5, atol=0.0)
    assert not found


# ---- whose call it is


@pytest.mark.parametrize(
    ("case", "call"),
    [
        ("adamw", "adam.fused_adamw_"),
        ("adam", "adam.fused_adam_"),
        ("nesterov", "sgd.fused_sgd_"),
        ("adagrad", "adagrad.fused_adagrad_"),
    ],
)
def test_an_update_is_one_call_of_torch(case: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(f"halfstep.optimizers.{call}", lambda params, *rest, **numbers: called.append(len(params)))
    params, optimizer = make(case, BF16, True)
    train(params, optimizer, steps=2)
    assert called == [len(SHAPES) - 1] * 2, "of all parameters but the empty one"
