"""On a device without float64, such as Apple's MPS, nothing asks for it, and steps are those of other devices.

The CPU plays such a device: with the backend that such devices have, and a mode that refuses every float64 tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep import amp, kernels, optimizers
from halfstep.core import scalars
from halfstep.kernels import multi_tensor
from halfstep.numerics import Monitor
from halfstep.optimizers.base import bias_corrections
from tests.support.worlds import scaled_step, with_optimizer


class RefusesFloat64(TorchDispatchMode):
    """As the device does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float64 for leaf in tree_leaves(result)):
            raise TypeError(f"{func} gives float64, which this device has not")
        return result


@contextmanager
def without_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch, RefusesFloat64():
        patch.setattr(scalars, "has_float64", lambda device: False)
        yield


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    with kernels.backend("eager"):
        yield


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "FusedAdam": lambda p, **o: optimizers.FusedAdam(p, lr=1e-2, **o),
    "FusedSGD": lambda p, **o: optimizers.FusedSGD(p, lr=1e-2, momentum=0.9, **o),
    "FusedLAMB": lambda p, **o: optimizers.FusedLAMB(p, lr=1e-2, **o),
    "FusedNovoGrad": lambda p, **o: optimizers.FusedNovoGrad(p, lr=1e-2, **o),
    "FusedNovoGrad of largest": lambda p, **o: optimizers.FusedNovoGrad(p, lr=1e-2, norm_type=0, **o),
    "FusedAdagrad": lambda p, **o: optimizers.FusedAdagrad(p, lr=1e-2, **o),
    "LARC": lambda p, **o: optimizers.LARC(torch.optim.SGD(p, lr=1e-2)),
    "AdamW": lambda p, **o: torch.optim.AdamW(p, lr=1e-2),
}


def plain(model: nn.Module, optimizer: Any) -> Callable[[torch.Tensor], None]:
    def step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()

    return step


def scaled(model: nn.Module, optimizer: Any) -> Callable[[torch.Tensor], None]:
    amp.initialize(model, optimizer, opt_level="O2", dtype=torch.float16, loss_scale="dynamic", verbosity=0)
    return lambda loss: scaled_step(loss, optimizer)


def by_scaler(model: nn.Module, optimizer: Any) -> Callable[[torch.Tensor], None]:
    scaler = amp.GradScaler(init_loss_scaling=1024.0)

    def step(loss: torch.Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()

    return step


def deferred(model: nn.Module, optimizer: Any) -> Callable[[torch.Tensor], None]:
    scaler = amp.GradScaler(init_loss_scaling=1024.0)
    return lambda loss: scaled_step(loss, optimizer, scaler)


def released(model: nn.Module, optimizer: Any) -> Callable[[torch.Tensor], None]:
    scaler = amp.GradScaler(init_loss_scaling=1024.0)
    optimizer.attach(model, release=True, scaler=scaler)
    return lambda loss: scaled_step(loss, optimizer, scaler)


WAYS = {"plain": plain, "scale_loss": scaled, "GradScaler": by_scaler, "deferred": deferred, "release": released}


def trained(name: str, way: str, clip: float | None) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    options = {} if clip is None else {"max_grad_norm": clip}
    optimizer = OPTIMIZERS[name](model.parameters(), **options)
    step = WAYS[way](model, optimizer)
    for _ in range(4):
        optimizer.zero_grad()
        step(model(torch.randn(16, 8)).float().square().mean())
    return torch.cat([p.detach().float().flatten() for p in model.state_dict().values()])


RUNS = [(name, way, None) for name in OPTIMIZERS for way in WAYS if way != "release" or name.startswith("Fused")]
RUNS += [(name, "plain", 0.1) for name in OPTIMIZERS if name.startswith("Fused")]
RUNS.remove(("FusedLAMB", "release", None))  # it clips by default, which release refuses


@pytest.mark.parametrize(("name", "way", "clip"), RUNS)
def test_steps_need_no_float64(name: str, way: str, clip: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = trained(name, way, clip)
    with without_float64(monkeypatch):
        found = trained(name, way, clip)
    tolerance = 2e-3 if way == "scale_loss" else 1e-6  # an ulp of float16 may fall to the other side
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)


def test_elsewhere_the_numbers_of_a_step_are_float64() -> None:
    with pytest.raises(TypeError, match="gives float64"), RefusesFloat64():
        trained("FusedAdam", "plain", None)


def test_multi_tensor_functions_need_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(5), torch.randn(2, 3).half()]
    expected = multi_tensor.l2norm(tensors, per_tensor=True)
    with without_float64(monkeypatch):
        found = multi_tensor.l2norm(tensors, per_tensor=True)
        multi_tensor.scale(tensors, tensors, 0.5)
        torch.testing.assert_close(multi_tensor.norm(tensors), found[0] / 2, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


def test_a_monitor_needs_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_float64(monkeypatch):
        model, optimizer = with_optimizer(nn.Linear(8, 4), optimizers.FusedAdam, max_grad_norm=1.0)
        with Monitor(model, optimizer, every=1) as monitor:
            for _ in range(2):
                model(torch.randn(16, 8)).square().mean().backward()
                optimizer.step()
        assert {row.step for row in monitor.rows()} == {0, 1}


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 1.0 - 2.0**-20])
@pytest.mark.parametrize("t", [1.0, 2.0, 1000.0, 1e6])
def test_a_bias_correction_in_float32_keeps_its_digits(beta: float, t: float) -> None:
    (exact,) = bias_corrections([beta], torch.tensor([t], dtype=torch.float64))
    assert torch.equal(exact, 1.0 - beta ** torch.tensor([t], dtype=torch.float64))
    (found,) = bias_corrections([beta], torch.tensor([t]))
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=3e-7, atol=0.0)


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_which_devices_have_float64(device: str) -> None:
    expected = torch.float32 if device == "mps" else torch.float64
    assert scalars.scalar_dtype(torch.device(device)) is expected


@pytest.mark.parametrize("has", [True, False])
def test_a_gpu_of_intel_s_is_asked(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("Properties", (), {"has_fp64": has})
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: properties)
    assert scalars.has_float64.__wrapped__(torch.device("xpu", 0)) is has
