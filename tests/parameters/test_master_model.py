"""``amp.master_model``: fp32 in every part, from the masters where there are any; what is fp32 is the model's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from halfstep import amp
from tests.support.worlds import start_amp, with_both_masters

X = torch.linspace(-1.0, 1.0, 8).reshape(2, 4)


def start(fused: bool) -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model.register_buffer("offset", torch.full((2,), 1.5, dtype=torch.bfloat16))
    model[2].weight.requires_grad_(False)
    fp32 = model[0].weight.detach().clone()
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[1].parameters()], lr=0.1)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", dtype=torch.bfloat16, fused=fused, loss_scale=1.0, verbosity=0
    )
    return model, optimizer, fp32


@with_both_masters
def test_every_part_is_fp32(fused: bool) -> None:
    model, _, fp32 = start(fused)
    masters = amp.master_model(model)
    assert torch.equal(masters[0].weight, fp32)
    assert masters[1].weight is model[1].weight, "what is fp32 is the model's own"
    assert masters[1].running_mean is model[1].running_mean
    weight, bias = masters[2].weight, masters[2].bias
    assert (type(weight), type(bias), type(masters.offset)) == (nn.Parameter, nn.Parameter, torch.Tensor)
    assert (weight.dtype, bias.dtype, masters.offset.dtype) == (torch.float32,) * 3
    assert (weight.requires_grad, bias.requires_grad) == (False, True)
    assert torch.equal(weight, model[2].weight.float())
    assert masters.offset.tolist() == [1.5, 1.5]
    assert model[2].weight.dtype is torch.bfloat16, "the model itself has not changed"


@pytest.mark.parametrize("copied", [copy.deepcopy, AveragedModel, amp.master_model])
def test_copies_of_16_bit_weights_are_logged_and_those_of_masters_are_not(copied: Any, caplog: Any) -> None:
    model, _, _ = start(fused=True)
    with caplog.at_level("INFO", "halfstep"):
        copied(nn.DataParallel(model))
    told = ["use amp.master_model(model)" in record.getMessage() for record in caplog.records]
    assert told == ([] if copied is amp.master_model else [True])


@with_both_masters
def test_it_computes_in_fp32(fused: bool) -> None:
    model, _, fp32 = start(fused)
    masters = amp.master_model(model).eval()
    plain = nn.functional.linear(X, fp32, masters[0].bias)
    torch.testing.assert_close(masters[0](X), plain, rtol=1e-6, atol=1e-6)
    assert torch.equal(masters(X), masters[2](masters[1](masters[0](X)))), "nothing is cast on the way in or out"
    assert model[0](X.bfloat16()).dtype is torch.bfloat16


TRANSFORMS: dict[str, Any] = {
    "jit.trace": lambda model: torch.jit.trace(model, X)(X),
    "jit.script": lambda model: torch.jit.script(model)(X),
    "vmap": lambda model: torch.func.vmap(model)(X),
    "functional_call": lambda model: torch.func.functional_call(model, dict(model.named_parameters()), (X,)),
    "jvp": lambda model: torch.func.jvp(
        lambda params: torch.func.functional_call(model, params, (X,)),
        (dict(model.named_parameters()),),
        (dict(model.named_parameters()),),
    )[0],
    "double": lambda model: model.to(torch.float64)(X.double()).float(),
}


@pytest.mark.filterwarnings("ignore")  # of torch.jit, which is deprecated
@with_both_masters
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_it_is_exported_and_transformed_as_any_model(transform: str, fused: bool) -> None:
    model, _, fp32 = start(fused)
    masters = amp.master_model(model)[0]
    plain = nn.functional.linear(X, fp32, model.state_dict()["0.bias"])
    torch.testing.assert_close(TRANSFORMS[transform](masters), plain, rtol=1e-6, atol=1e-6)


@with_both_masters
def test_a_frozen_weight_of_the_optimizer_is_fp32_in_it(fused: bool) -> None:
    model: Any = nn.Linear(4, 3)
    model.weight.requires_grad_(False)
    model, optimizer = start_amp(model, torch.optim.SGD, "O2", dtype="bfloat16", fused=fused, lr=0.1)
    masters = amp.master_model(model)
    assert (masters.weight.dtype, masters.weight.requires_grad) == (torch.float32, False)
    assert torch.equal(masters.weight, model.weight.float())
    assert masters.bias is list(amp.master_params(optimizer))[1]


def test_a_model_that_amp_does_not_know_is_copied_in_fp32() -> None:
    model = nn.Linear(4, 3, dtype=torch.float16)
    masters = amp.master_model(model)
    assert masters.weight.dtype is torch.float32
    assert torch.equal(masters.weight, model.weight.float())
    assert masters.bias.requires_grad
