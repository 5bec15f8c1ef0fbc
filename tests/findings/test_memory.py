"""Bytes a parameter: the table says what live models hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import halfstep
from halfstep import amp, optimizers
from halfstep.diagnostics.findings.memory import OPTIMIZERS, MemoryLine, lines
from tests.support.backends import skip_without_compiler
from tests.support.worlds import scaled_backward, step_and_clear, with_optimizer

MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch.optim.SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "torch.optim.SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "torch.optim.AdamW": torch.optim.AdamW,
    "torch.optim.Adagrad": torch.optim.Adagrad,
    "torch.optim.RMSprop": torch.optim.RMSprop,
    "torch.optim.Muon": torch.optim.Muon,
    "FusedSGD, momentum": lambda p: optimizers.FusedSGD(p, lr=0.1, momentum=0.9),
    "FusedAdam": optimizers.FusedAdam,
    "FusedAdam, bfloat16 state": lambda p: optimizers.FusedAdam(p, state_dtype=torch.bfloat16),
    "FusedAdam, release=True": optimizers.FusedAdam,
    "FusedLAMB": optimizers.FusedLAMB,
    "FusedMuon": lambda p: optimizers.FusedMuon(p, use_muon=True),
    "FusedNovoGrad": optimizers.FusedNovoGrad,
    "FusedAdagrad": optimizers.FusedAdagrad,
}


def test_every_optimizer_of_the_table_is_tried() -> None:
    assert list(MAKE) == [kept.name for kept in OPTIMIZERS]


@pytest.mark.filterwarnings("ignore:.* rounds away:UserWarning")  # at O3
@pytest.mark.parametrize("line", list(lines()), ids=lambda line: f"{line.optimizer} {line.level} {line.dtype}")
def test_a_live_count_is_what_the_table_says(line: MemoryLine) -> None:
    skip_without_compiler(line.masters == 2)  # there a master is an fp32 copy of 4 bytes
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    optimizer = MAKE[line.optimizer](model.parameters())
    dtype = None if line.level == "O0" else line.dtype
    scale = 128.0 if dtype == "float16" else 1.0
    amp.initialize(model, optimizer, opt_level=line.level, dtype=dtype, loss_scale=scale, verbosity=0)
    if "release" in line.optimizer:
        optimizer.attach(model)  # type: ignore[attr-defined]
    for passes in range(2):
        scaled_backward(model(torch.ones(2, 64)).float().mean(), optimizer)
        if passes == 0:
            step_and_clear(optimizer)
    found = halfstep.memory(model, optimizer)
    counts = found.weights, found.masters, found.state, found.gradients
    assert found.parameters == 64 * 64
    assert tuple(round(size / found.parameters, 2) for size in counts) == line[3:7]
    assert found.total == sum(counts)


def test_what_is_shared_counts_once_and_what_is_not_there_does_not_count() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    found = halfstep.memory(model)
    assert found == (16 + 4 + 8 + 4, 4 * (16 + 4 + 8 + 4), 0, 0, 0, 4 * 8 + 8)
    F.mse_loss(model(torch.ones(2, 4)), torch.ones(2, 4)).backward()
    assert halfstep.memory(model).gradients == found.weights
    assert "32 parameters" in str(found)
    model[1].register_buffer("seen", model[0].weight.detach())
    assert halfstep.memory(model).buffers == found.buffers


def of_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


def of_fake_tensors() -> nn.Module:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


def tied_on_meta() -> nn.Module:
    model = of_meta()
    model[1].weight = nn.Parameter(model[0].weight.view(8, 8))  # type: ignore[index,operator]
    return model


def with_sparse_gradient() -> nn.Module:
    model = nn.Embedding(100, 8, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()
    return model


def of_layout(layout: torch.layout) -> nn.Module:
    model = nn.Module()
    values = torch.zeros(4, 4)
    values[0, 0] = 1.0
    model.register_buffer("adjacency", values.to_sparse(layout=layout))
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1, bias=False))


KINDS: dict[
    str, tuple[Callable[[], nn.Module], tuple[int, int, int, int]]
] = {  # parameters, weights, gradients, buffers
    "meta": (of_meta, (128, 512, 0, 0)),
    "fake": (of_fake_tensors, (128, 512, 0, 0)),
    "one storage on meta": (tied_on_meta, (128, 256, 0, 0)),
    "sparse gradient": (with_sparse_gradient, (800, 3200, 2 * 8 + 2 * 8 * 4, 0)),
    "coo": (lambda: of_layout(torch.sparse_coo), (0, 0, 0, 2 * 8 + 4)),
    "csr": (lambda: of_layout(torch.sparse_csr), (0, 0, 0, 5 * 8 + 2 * 8 + 4)),
    "csc": (lambda: of_layout(torch.sparse_csc), (0, 0, 0, 5 * 8 + 2 * 8 + 4)),
    "lazy": (lazy, (3, 12, 0, 0)),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature", "ignore:Sparse CS. tensor support")
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_any_kind_of_tensor_count(kind: str) -> None:
    make, counts = KINDS[kind]
    found = halfstep.memory(make())
    assert (found.parameters, found.weights, found.gradients, found.buffers) == counts


def test_state_of_any_form_counts() -> None:
    model, optimizer = with_optimizer(nn.Linear(8, 8, bias=False), torch.optim.LBFGS, max_iter=2, line_search_fn=None)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 8)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.state["note"] = torch.zeros(5)  # type: ignore[index,assignment]
    tensors = [t for t in tree_leaves(dict(optimizer.state)) if isinstance(t, torch.Tensor)]
    storages = {t.untyped_storage() for t in tensors}
    assert len(storages) >= 4
    assert halfstep.memory(model, optimizer).state == sum(storage.nbytes() for storage in storages)
