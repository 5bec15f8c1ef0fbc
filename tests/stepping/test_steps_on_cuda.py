"""On a GPU: a steady step makes the host wait for nothing, and a whole step is captured in a CUDA graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from halfstep import amp
from tests.support.worlds import scaled_step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def sync_is_an_error() -> Iterator[Callable[[str], None]]:
    yield torch.cuda.set_sync_debug_mode
    torch.cuda.set_sync_debug_mode("default")


def training(face: str) -> tuple[nn.Parameter, torch.Tensor, Callable[[], None], Callable[[], float]]:
    """A parameter, the factor of its loss, one step, and the scale."""
    torch.cuda.init()
    param = nn.Parameter(torch.ones(64, 64, device="cuda"))
    factor = torch.ones((), device="cuda")
    optim = torch.optim.AdamW([param], lr=0.1, fused=True, capturable=True)
    if face == "GradScaler":
        scaler = amp.GradScaler(init_loss_scaling=2.0**10, decr_every_n_nan_or_inf=1)

        def step() -> None:
            scaler.scale((param * factor).sum()).backward()
            scaler.clip_grad_norm_(optim, 1.0)
            scaler.step(optim)
            scaler.update()
            optim.zero_grad(set_to_none=False)

        return param, factor, step, scaler.get_scale

    amp.initialize(nn.Module(), optim, opt_level="O0", loss_scale="dynamic", verbosity=0)

    def step_of_scale_loss() -> None:
        scaled_step((param * factor).sum(), optim)
        optim.zero_grad(set_to_none=False)

    return param, factor, step_of_scale_loss, lambda: amp.state_dict()["loss_scaler0"]["loss_scale"]


@pytest.mark.parametrize("face", ["GradScaler", "scale_loss"])
def test_a_steady_step_does_not_wait(face: str, sync_is_an_error: Callable[[str], None]) -> None:
    _, factor, step, scale = training(face)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before = scale()
    sync_is_an_error("error")
    for overflow in (1.0, math.inf, 1.0):
        factor.fill_(overflow)
        step()
    sync_is_an_error("default")
    assert scale() == before / 2


def test_whole_step_in_a_cuda_graph() -> None:
    param, factor, step, scale = training("GradScaler")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before, values = scale(), [param.detach().clone()]
    for overflow in (1.0, math.inf, 1.0):
        factor.fill_(overflow)
        graph.replay()
        values.append(param.detach().clone())
    assert scale() == before / 2
    assert [torch.equal(a, b) for a, b in itertools.pairwise(values)] == [False, True, False]
