"""Once an optimizer has stepped, nobody but the model holds its gradients: clearing them frees their memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import kernels, optimizers
from tests.support.worlds import scaled_backward, start_amp


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("backend", ["compiled", "eager", "torch"])
@pytest.mark.parametrize("fused", [False, True])
def test_cleared_gradients_are_freed(half: torch.dtype, level: str, backend: str, fused: bool) -> None:
    make = optimizers.FusedSGD if fused else torch.optim.SGD
    model, optimizer = start_amp(nn.Linear(4, 2), make, level, dtype=half, fused=False, loss_scale=128.0, lr=0.1)
    with kernels.backend(backend):
        for _ in range(2):  # in the first step tables are made, in the second they are used again
            for _ in range(2):  # the second pass adds to what the first one left
                scaled_backward(model(torch.ones(3, 4)).float().sum(), optimizer)
            optimizer.step()
            grads = [weakref.ref(p.grad) for p in model.parameters()]
            optimizer.zero_grad()
            assert [grad() for grad in grads] == [None, None]


@pytest.mark.parametrize(
    "make",
    [
        lambda params: optimizers.LARC(torch.optim.SGD(params, lr=0.1)),
        lambda params: optimizers.FusedLAMB(params),
        lambda params: optimizers.FusedNovoGrad(params),
        lambda params: optimizers.FusedAdam(params, max_grad_norm=1.0),
    ],
    ids=["LARC", "LAMB", "NovoGrad", "Adam that clips"],
)
def test_an_optimizer_by_itself_frees_them(make: Any) -> None:
    model = nn.Linear(4, 2)
    optimizer = make(list(model.parameters()))
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        grads = [weakref.ref(p.grad) for p in model.parameters()]
        optimizer.zero_grad()
        assert [grad() for grad in grads] == [None, None]
