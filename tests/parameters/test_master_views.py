"""What ``amp.master_params`` yields: an fp32 parameter to read, write, clip, copy and pickle in front of a master."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp
from tests.support.worlds import in_both_halves, scaled_backward, start_amp, with_both_masters


def start(half: torch.dtype, fused: bool) -> tuple[Any, Any]:
    return start_amp(nn.Linear(4, 3), torch.optim.SGD, "O2", dtype=half, fused=fused, loss_scale=1.0, lr=0.5)


def backward(model: Any, optimizer: Any) -> None:
    scaled_backward(model(torch.ones(2, 4)).float().sum(), optimizer)


@in_both_halves
@with_both_masters
def test_it_is_an_fp32_parameter_and_the_same_one_when_asked_again(fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused)
    views = list(amp.master_params(optimizer))
    for view, param in zip(views, model.parameters(), strict=True):
        assert isinstance(view, nn.Parameter)
        assert view.requires_grad
        assert (view.dtype, view.shape, view.device) == (torch.float32, param.shape, param.device)
        assert view.stride() == param.stride()
    assert list(map(id, amp.master_params(optimizer))) == list(map(id, views))
    optimizer.param_groups[0]["params"].pop()
    assert list(map(id, amp.master_params(optimizer))) == [id(views[0])]


@in_both_halves
@with_both_masters
def test_it_lies_in_memory_as_the_weight_does(fused: bool, half: torch.dtype) -> None:
    model = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    model, optimizer = start_amp(model, torch.optim.SGD, "O2", dtype=half, fused=fused, lr=0.5)
    view, _ = amp.master_params(optimizer)
    assert view.stride() == model.weight.stride() != torch.empty(3, 2, 3, 3).stride()


@in_both_halves
@with_both_masters
@pytest.mark.parametrize("passes", [1, 2])
def test_its_gradient_is_the_weight_s_in_fp32(passes: int, fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused)
    view, _ = amp.master_params(optimizer)
    assert view.grad is None
    for _ in range(passes):
        backward(model, optimizer)
    assert view.grad.dtype is torch.float32
    assert torch.equal(view.grad, torch.full((3, 4), 2.0 * passes))
    view.grad.mul_(0.5)
    assert torch.equal(model.weight.grad.float(), torch.full((3, 4), 1.0 * passes))
    view.grad = torch.full((3, 4), 1 + 2.0**-20)
    assert torch.equal(model.weight.grad, torch.full((3, 4), 1 + 2.0**-20))
    view.grad = None
    assert model.weight.grad is None


@in_both_halves
@with_both_masters
def test_copies_and_pickles_are_ordinary_parameters(fused: bool, half: torch.dtype) -> None:
    model, optimizer = start(half, fused)
    expected = model.state_dict()["weight"].clone()
    view, _ = amp.master_params(optimizer)
    first, second = copy.deepcopy([view, view])
    assert first is second
    memo: dict[int, Any] = {}
    assert view.__deepcopy__(memo) is view.__deepcopy__(memo), "also for who calls it without copy.deepcopy"
    for made in (first, pickle.loads(pickle.dumps(view))):
        assert type(made) is nn.Parameter
        assert made.requires_grad
        assert torch.equal(made, expected)
        made.detach().zero_()
    assert torch.equal(view, expected)
