"""The default dtype and the default device of torch are for the user's tensors, not for those of halfstep."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._device import _device_constructors

import halfstep
from halfstep import amp, numerics, optimizers
from tests.support.defaults import DEFAULTS, OtherDefaults
from tests.support.worlds import advance

SOURCES = Path(halfstep.__file__).parent
FACTORIES = {function.__name__ for function in _device_constructors()} - {"fill"}
OWN_DTYPE = {"as_tensor", "asarray", "randint", "randperm", "tril_indices", "triu_indices"}
"""Factories that keep the dtype of what they are given, or make integers."""
X = torch.linspace(-1, 1, 24).view(4, 6)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    fp32 = torch.float32
    return nn.Sequential(nn.Linear(6, 8, dtype=fp32), nn.Tanh(), nn.Linear(8, 3, dtype=fp32))


def losses(model: nn.Module) -> Iterator[torch.Tensor]:
    """Those of three batches, of which the second overflows."""
    for factor in (1.0, math.inf, 1.0):
        yield model(X).float().square().mean() * factor


def scale_loss(level: str, kind: Any, *, release: bool = False, **options: Any) -> list[Any]:
    optim = kind((model := net()).parameters(), lr=0.01, **options)
    model, optim = amp.initialize(model, optim, opt_level=level, dtype="float16", verbosity=0, loss_scale="dynamic")
    if release:
        optim.attach(model)
    for loss in losses(model):
        advance(loss, optim)
    return [master.detach().numpy().tolist() for master in amp.master_params(optim)]


def grad_scaler() -> list[Any]:
    optim = torch.optim.AdamW((model := net()).parameters())
    scaler = amp.GradScaler(init_loss_scaling=1024.0)
    for loss in losses(model):
        advance(loss, optim, scaler)
    return [p.tolist() for p in model.parameters()]


def larc() -> list[Any]:
    optim = optimizers.LARC(torch.optim.SGD((model := net()).parameters(), lr=0.01, weight_decay=0.1))
    model(X).square().mean().backward()
    optim.step()
    return [p.tolist() for p in model.parameters()]


def watched() -> list[Any]:
    optim = torch.optim.AdamW((model := net().to(torch.bfloat16)).parameters(), lr=1e-4)
    watch = halfstep.watch(optim, every=1)
    for _ in range(3):
        model(X.to(torch.bfloat16)).float().square().mean().backward()
        optim.step()
    return [[each.code for each in watch.findings()], watch.fraction]


def monitored() -> list[Any]:
    optim = optimizers.FusedAdam((model := net()).parameters())
    with numerics.Monitor(model, optim, every=1) as monitor:
        model(X).square().mean().backward()
        optim.step()
    return [repr(row) for row in monitor.rows()]


FACES: dict[str, Callable[[], list[Any]]] = {
    "scale_loss at O1": lambda: scale_loss("O1", torch.optim.AdamW),
    "scale_loss at O2": lambda: scale_loss("O2", torch.optim.RMSprop),
    "max_grad_norm": lambda: scale_loss("O2", optimizers.FusedAdam, max_grad_norm=0.1),
    "gradient release": lambda: scale_loss("O2", optimizers.FusedSGD, momentum=0.9, release=True),
    "GradScaler": grad_scaler,
    "LARC": larc,
    "watch": watched,
    "Monitor": monitored,
}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.filterwarnings("ignore:.*rounds away")
def test_a_default_changes_no_bit(face: str, default: str) -> None:
    expected = FACES[face]()
    assert expected[-1] not in ([], None)
    amp.deactivate()
    with OtherDefaults(default):
        assert FACES[face]() == expected


def unnamed(source: str) -> Iterator[str]:
    """Calls of torch's factories that name no device, or whose dtype may be the default dtype.

    A factory in ``nn.Parameter(...)`` makes a parameter of a user's module, which takes the defaults as torch's do.
    """
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    parameters = [each for call in calls if ast.unparse(call.func) == "nn.Parameter" for each in call.args]
    for call in calls:
        owner, _, name = ast.unparse(call.func).rpartition(".")
        given = {keyword.arg for keyword in call.keywords}
        wanted = {"device"} if name in OWN_DTYPE else {"device", "dtype"}
        if owner == "torch" and name in FACTORIES and call not in parameters and not given >= wanted:
            yield f"{call.lineno}: {ast.unparse(call)}"


def test_tensors_are_made_with_a_device_and_a_dtype() -> None:
    sources = {path.relative_to(SOURCES): path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py")}
    assert [f"{path}:{call}" for path, source in sources.items() for call in unnamed(source)] == []


@pytest.mark.parametrize("source", ["torch.zeros(3, dtype=x)", "torch.tensor(0, device=y)", "torch.as_tensor(x)"])
def test_what_names_no_device_or_dtype_is_found(source: str) -> None:
    assert list(unnamed(source)) == [f"1: {source}"]
    assert not list(unnamed(f"nn.Parameter({source})"))
