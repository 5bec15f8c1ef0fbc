"""Each example of an article on Apex, with the dots filled in: three steps, and how amp works.

The article is "NVIDIA Apex: Tools for Easy Mixed-Precision Training in PyTorch" on NVIDIA's developer blog, of 2018.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp
from tests.casting.test_scopes import casts_in_graph
from tests.support.worlds import Made, advance, unscaled_step

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(100)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = torch.rand(12, 8, 16, generator=torch.Generator().manual_seed(100))
    return [(each, each[:, :8]) for each in data]


@DTYPES
def test_three_steps(dtype: torch.dtype) -> None:
    criterion = nn.MSELoss()
    reference, plain = network()
    for x, y in batches():
        expected = criterion(reference(x), y)
        unscaled_step(expected, plain)

    model, optimizer = network()
    model, optimizer = amp.initialize(model, optimizer, dtype=dtype, verbosity=0)
    for x, y in batches():
        loss = criterion(model(x), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() == pytest.approx(expected.item(), rel=0.05)


@DTYPES
def test_three_sets_of_functions(dtype: torch.dtype) -> None:
    model, optimizer = network()
    amp.initialize(model, optimizer, dtype=dtype, verbosity=0)
    single, half = torch.rand(4, 4), torch.rand(4, 4).to(dtype)
    # Matrix products and convolutions are on the whitelist: their arguments become 16-bit.
    assert (single @ single).dtype is F.conv1d(single[None], single[..., None]).dtype is dtype
    # Loss functions, and math such as torch.log, are on the blacklist: theirs become fp32.
    assert torch.log(half).dtype is F.cross_entropy(half, torch.arange(4)).dtype is torch.float32
    # Everything else: arguments of several types get the widest, and those of one type keep it.
    assert (single + half).dtype is torch.float32
    assert (half + half).dtype is dtype


@DTYPES
def test_linear_casts_its_arguments_as_the_wrapper_of_the_article(dtype: torch.dtype) -> None:
    orig_linear = torch.nn.functional.linear

    def wrapped_linear(*args: Any) -> Any:
        casted_args = []
        for arg in args:
            if torch.is_tensor(arg) and torch.is_floating_point(arg):
                casted_args.append(arg.to(dtype))
            else:
                casted_args.append(arg)
        return orig_linear(*casted_args)

    x, weight, bias = torch.rand(8, 16), torch.rand(4, 16), torch.rand(4)
    expected = wrapped_linear(x, weight, bias)
    model, optimizer = network()
    amp.initialize(model, optimizer, dtype=dtype, verbosity=0)
    found = torch.nn.functional.linear(x, weight, bias)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected)


def unrolled(self: Any, xs: torch.Tensor) -> torch.Tensor:
    """Call an RNN cell once for each timestep with the same fp32 weights."""
    hidden = torch.zeros(2, 8)
    for x in xs:
        hidden = self.cell(x, hidden)
    return hidden


@pytest.mark.parametrize("by", ["initialize", "init"])
def test_a_weight_of_an_rnn_cell_is_cast_once_in_a_call_of_its_model(by: str) -> None:
    model = Made(unrolled, cell=nn.RNNCell(4, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if by == "initialize":
        amp.initialize(model, optimizer, dtype=torch.bfloat16, verbosity=0)
    else:  # knows no model, so nothing says when a weight may be written
        handle = amp.init(dtype=torch.bfloat16)
    for _ in range(2):
        hidden = model(torch.randn(3, 2, 4))
        for weight in (model.cell.weight_ih, model.cell.weight_hh):
            assert casts_in_graph(hidden, weight) == (1 if by == "initialize" else 3)
        advance(hidden.float().sum(), optimizer, by=amp if by == "initialize" else handle)
