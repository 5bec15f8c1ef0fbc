"""``torch.set_default_dtype`` is for the user's tensors: what halfstep makes for itself has the dtype it needs."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfstep
from halfstep import amp, numerics, optimizers

SOURCES = Path(halfstep.__file__).parent
FACTORIES = {"empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "tensor", "zeros"}
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
        with amp.scale_loss(loss, optim) as scaled:
            scaled.backward()
        optim.step()
        optim.zero_grad()
    return [master.detach().numpy().tolist() for master in amp.master_params(optim)]


def grad_scaler() -> list[Any]:
    optim = torch.optim.AdamW((model := net()).parameters())
    scaler = amp.GradScaler(init_loss_scaling=1024.0)
    for loss in losses(model):
        scaler.scale(loss).backward()
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.filterwarnings("ignore:.*rounds away")
def test_the_default_dtype_changes_no_bit(face: str, dtype: torch.dtype) -> None:
    expected = FACES[face]()
    assert expected[-1] not in ([], None)
    amp.deactivate()
    torch.set_default_dtype(dtype)
    try:
        assert FACES[face]() == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_tensors_are_made_with_a_dtype() -> None:
    """But for the parameters of modules of Apex's, which have the default dtype as torch's do."""
    found = [
        f"{path.relative_to(SOURCES)}:{node.lineno}: {ast.unparse(node)}"
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in FACTORIES
        and not {keyword.arg for keyword in node.keywords} & {"dtype", None}
        and not (node.func.attr == "empty" and "apex" in path.relative_to(SOURCES).parts)
    ]
    assert not found
