"""Launch configurations: the fastest is taken and remembered, and every one gives the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from halfstep import optimizers
from halfstep.kernels import backend
from halfstep.kernels.backends import autotune
from halfstep.kernels.backends.autotune import CONFIGS, DEFAULT, LaunchConfig, fastest

HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HALFSTEP_CACHE_DIR", str(tmp_path))
    return tmp_path


def stopwatch(times: dict[LaunchConfig, float]) -> tuple[Callable[[LaunchConfig], float], list[LaunchConfig]]:
    measured: list[LaunchConfig] = []

    def measure(config: LaunchConfig) -> float:
        measured.append(config)
        return times.get(config, 9.0)

    return measure, measured


@pytest.mark.parametrize("best", CONFIGS)
def test_the_fastest_is_taken_and_remembered(best: LaunchConfig) -> None:
    measure, measured = stopwatch({best: 1.0})
    assert fastest("adam on one GPU", measure) == best
    assert measured == list(CONFIGS)
    assert fastest("adam on one GPU", measure) == best
    assert len(measured) == len(CONFIGS), "the second answer comes from the cache"
    other, _ = stopwatch({DEFAULT: 1.0})
    assert fastest("adam on another GPU", other) == DEFAULT


@pytest.mark.parametrize("text", ["", "{", "[]", '{"elements": 4096}', '{"elements": 7, "warps": 1}'])
def test_a_cache_that_makes_no_sense_is_measured_again(cache: Path, text: str) -> None:
    measure, measured = stopwatch({CONFIGS[0]: 1.0})
    fastest("adam", measure)
    (file,) = cache.iterdir()
    file.write_text(text)
    assert fastest("adam", measure) == CONFIGS[0]
    assert len(measured) == 2 * len(CONFIGS)


def test_what_cannot_run_is_not_taken(cache: Path) -> None:
    measure, _ = stopwatch(dict.fromkeys(CONFIGS, math.inf) | {CONFIGS[-1]: 5.0})
    assert fastest("adam", measure) == CONFIGS[-1]
    nothing, _ = stopwatch(dict.fromkeys(CONFIGS, math.inf))
    assert fastest("lamb", nothing) == DEFAULT
    assert len(list(cache.iterdir())) == 1, "what could not be measured is tried again"


def trained(size: int, device: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n).to(device, torch.bfloat16)) for n in (size, 5)]
    optimizer = optimizers.FusedAdam(params, lr=0.1, master_weights="split", max_grad_norm=1.0)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn(param.shape).to(device, torch.bfloat16)
        optimizer.step()
    return [p.detach().clone() for p in params] + [optimizer.state[p]["remainder"] for p in params]


@pytest.mark.exhaustive
@pytest.mark.skipif(HAS_CUDA, reason="Triton compiles here and does not interpret")
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_config_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch, config: LaunchConfig) -> None:
    pytest.importorskip("triton")
    with backend("triton"):
        expected = trained(9000, "cpu")
        monkeypatch.setattr(autotune, "DEFAULT", config)
        found = trained(9000, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
def test_large_batches_are_tuned_on_a_gpu(cache: Path) -> None:
    found = trained(2**22, "cuda")
    assert list(cache.glob("launch-*.json"))
    with backend("eager"):
        expected = trained(2**22, "cuda")
    for a, b in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=2**-8, atol=2**-8)


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
