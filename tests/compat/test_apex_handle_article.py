"""Each example of an article on Apex of June 2018: ``amp.init()`` and its handle, with the dots filled in.

The article is "混合精度训练之APEX(上)", https://kuaibao.qq.com/s/20180624G0UZD400.
"""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp
from tests.support.apex_recording import batch, grid

HALF = torch.float16 if torch.cuda.is_available() else torch.bfloat16


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(grid(tuple(p.shape), 5 * k))
    return model


def compute_loss(model: nn.Module, t: int) -> torch.Tensor:
    x, y, _ = batch(t)
    return F.cross_entropy(model(x), y)


def assert_follows(model: nn.Module, *losses: list[int]) -> None:
    """As close to fp32 training on the sums of these losses as 8 bits allow."""
    reference = network()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in losses:
        optimizer.zero_grad()
        sum(compute_loss(reference, t) for t in step).backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2)


def test_one_optimizer() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # ... some optimizer
    amp_handle = amp.init()
    for t in range(5):
        optimizer.zero_grad()
        loss = compute_loss(model, t)  # ... do a bunch of stuff to compute a loss
        with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        # ...finish the iteration
    assert model[0](torch.ones(1, 3)).dtype == HALF
    assert_follows(model, [0], [1], [2], [3], [4])


def test_several_losses() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp_handle = amp.init()
    optimizer = amp_handle.wrap_optimizer(optimizer, num_loss=2)
    for t in range(5):
        # ...
        optimizer.zero_grad()
        loss1 = compute_loss(model, t)
        with optimizer.scale_loss(loss1) as scaled_loss:
            scaled_loss.backward()
        # ...
        loss2 = compute_loss(model, t + 5)
        with optimizer.scale_loss(loss2) as scaled_loss:
            scaled_loss.backward()
        # ...
        optimizer.step()
    assert_follows(model, *[[t, t + 5] for t in range(5)])


@pytest.mark.exhaustive
def test_the_automatic_loss_scale() -> None:
    """Start large; inf or NaN: reduce and skip; N good updates: increase. N is 2,000 and the factor 2."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp_handle = amp.init()
    scales = []
    for t in range(2003):
        loss = model[0].bias.sum() * (float("inf") if t == 0 else 1.0)
        with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
            if t in (0, 1, 2001):
                scales.append((scaled_loss / loss).item() if t else 2.0**16)
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert scales == [2.0**16, 2.0**15, 2.0**16]


def test_disabled() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp_handle = amp.init(enabled=False)
    loss = compute_loss(model, 0)
    with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert scaled_loss is loss
    assert model[0](torch.ones(1, 3)).dtype == torch.float32


class Mnist(nn.Module):
    """The network behind the article's list of casts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, 5)
        self.conv2 = nn.Conv2d(10, 20, 5)
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.view(-1, 320)))
        return F.log_softmax(self.fc2(x), dim=1)


@pytest.mark.parametrize("caching", [True, False])
def test_verbose_lists_the_casts(caching: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="halfstep")
    amp.init(enable_caching=caching, verbose=True, dtype=torch.float16)
    out = Mnist()(torch.zeros(1, 1, 28, 28))
    assert out.dtype == torch.float32
    casts = [message for message in caplog.messages if "->" in message]
    # Input, two weights and two biases; two weights and two biases; its input.
    assert casts == ["Float->Half (conv2d)"] * 5 + ["Float->Half (linear)"] * 4 + ["Half->Float (log_softmax)"]


# ---- functions of the user's own


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """``from backend import FRUBackend``: a call to CUDA code that takes 16-bit tensors only."""
    module = types.ModuleType("backend")

    def fru_backend(input: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        return [t.dtype for t in (input, hidden, weight, bias)]

    module.FRUBackend = fru_backend
    monkeypatch.setitem(sys.modules, "backend", module)
    return module


ARGUMENTS = (torch.ones(2), torch.ones(2).half(), torch.ones(2), torch.ones(2).bfloat16())
PLAIN = [t.dtype for t in ARGUMENTS]
WANTED = {"half": [HALF] * 4, "float": [torch.float32] * 4, "promote": [torch.float32] * 4}


@pytest.mark.parametrize("when", ["before init", "after init"])
@pytest.mark.parametrize("kind", ["half", "float", "promote"])
def test_function_annotation(kind: str, when: str, backend: types.ModuleType) -> None:
    amp_handle = amp.init() if when == "after init" else None

    @getattr(amp, f"{kind}_function")
    def fru(input: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        # call to CUDA code
        return backend.FRUBackend(input, hidden, weight, bias)

    if amp_handle is None:
        assert fru(*ARGUMENTS) == PLAIN
        amp_handle = amp.init()
    assert fru(*ARGUMENTS) == WANTED[kind]
    amp_handle._deactivate()
    assert fru(*ARGUMENTS) == PLAIN


@pytest.mark.parametrize("when", ["before init", "after init"])
@pytest.mark.parametrize("kind", ["half", "float", "promote"])
def test_explicit_registration(kind: str, when: str, backend: types.ModuleType) -> None:
    register = getattr(amp, f"register_{kind}_function")
    if when == "before init":  # as the article asks; here it may also come later
        register(backend, "FRUBackend")
    amp_handle = amp.init()
    if when == "after init":
        register(backend, "FRUBackend")
    assert backend.FRUBackend(*ARGUMENTS) == WANTED[kind]
    amp_handle._deactivate()
    assert backend.FRUBackend(*ARGUMENTS) == PLAIN
