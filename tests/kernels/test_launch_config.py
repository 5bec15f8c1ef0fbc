"""Launch configurations: every one gives the same bits."""

from __future__ import annotations

import functools

import pytest
import torch

from halfstep import optimizers
from halfstep.kernels import backend
from halfstep.kernels.backends import launch_config
from halfstep.kernels.backends.launch_config import DEFAULT, READING, LaunchConfig
from tests.support.backends import needs_interpreter
from tests.support.worlds import assert_equal

HAS_CUDA = torch.cuda.is_available()
CONFIGS = (LaunchConfig(512, 4), DEFAULT, LaunchConfig(1024, 8), LaunchConfig(2048, 8), READING, LaunchConfig(4096, 16))


def trained(size: int, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n).to(device, torch.bfloat16)) for n in (size, 5)]
    optimizer = optimizers.FusedAdam(params, lr=0.1, master_weights="split", max_grad_norm=1.0)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn(param.shape).to(device, torch.bfloat16)
        optimizer.step()
    return [p.detach().clone() for p in params] + [optimizer.state[p]["remainder"] for p in params]


@functools.cache
def interpreted() -> list[torch.Tensor]:
    """What the first configuration gives."""
    return trained(5000, "cpu")


@pytest.mark.exhaustive
@needs_interpreter
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_config_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, config: LaunchConfig) -> None:
    with backend("triton"):
        expected = interpreted()
        monkeypatch.setattr(launch_config, "DEFAULT", config)
        found = trained(5000, "cpu")
    assert_equal(found, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
def test_large_tables_step_as_the_reference_on_a_gpu() -> None:
    found = trained(2**22, "cuda")
    with backend("eager"):
        expected = trained(2**22, "cuda")
    torch.testing.assert_close(found[:2], expected[:2], rtol=2**-8, atol=2**-8)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
@pytest.mark.parametrize("others", ["cpu", "cuda:1"])
def test_parameters_on_several_devices(others: str) -> None:
    if others == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device only")
    params = [torch.nn.Parameter(torch.ones(4, 5, device=d, dtype=torch.bfloat16)) for d in ("cuda:0", others)]
    optimizer = optimizers.FusedAdam(params, lr=0.25, eps=0.0, weight_decay=0.0, master_weights="split")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    for param in params:
        torch.testing.assert_close(param.detach().cpu().float(), torch.full((4, 5), 0.75))
