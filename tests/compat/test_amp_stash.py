"""Names that Apex put on optimizers and in its state, by which public scripts resume, average and scale by hand."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from halfstep.apex.optimizers import FP16_Optimizer
from torch import nn

from halfstep import optimizers
from halfstep.apex import amp
from tests.support.worlds import assert_equal, scaled_backward, step_and_clear

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, 1e-2),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, 1e-2),
}
INPUTS = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)]


def build(name: str = "SGD", **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    options = {"opt_level": "O2", "loss_scale": "dynamic", "verbosity": 0, **options}
    return amp.initialize(model, OPTIMIZERS[name](model.parameters()), **options)  # type: ignore[no-any-return]


def step(model: Any, optimizer: Any, x: torch.Tensor, block: Any = amp.scale_loss) -> None:
    with block(model(x).float().pow(2).mean(), optimizer) as scaled_loss:
        scaled_loss.backward()
    step_and_clear(optimizer)


def masters(optimizer: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in amp.master_params(optimizer)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resuming_as_nvidias_bert_does(name: str, dtype: str) -> None:
    model, optimizer = build(name, dtype=dtype)
    for x in INPUTS[:3]:
        step(model, optimizer, x)
    saved: Any = [model.state_dict(), optimizer.state_dict(), masters(optimizer), amp.state_dict()]
    saved = copy.deepcopy(saved)
    for x in INPUTS[3:]:
        step(model, optimizer, x)
    expected = masters(optimizer)

    model, optimizer = build(name, dtype=dtype)
    model.load_state_dict(saved[0])
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(saved[1])
    for param, value in zip(amp.master_params(optimizer), saved[2], strict=True):
        param.data.copy_(value.data)
    amp.load_state_dict(saved[3])
    for x in INPUTS[3:]:
        step(model, optimizer, x)
    assert_equal(masters(optimizer), expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fields_of_the_stash(name: str) -> None:
    model, optimizer = build(name)
    stash = optimizer._amp_stash
    norm = model[1]
    half = [model[0].weight, model[0].bias, model[2].weight, model[2].bias]
    assert [id(p) for p in stash.all_fp16_params] == [id(p) for group in stash.fp16_groups for p in group]
    assert [*map(id, stash.all_fp16_params)] == [*map(id, half)]
    assert [*map(id, stash.all_fp32_from_fp32_params)] == [id(norm.weight), id(norm.bias)]
    assert (
        [*map(id, stash.fp32_from_fp32_groups[0])]
        == [*map(id, stash.all_fp32_params)]
        == [id(norm.weight), id(norm.bias)]
    )
    by_place = dict(zip(map(id, optimizer.param_groups[0]["params"]), amp.master_params(optimizer), strict=True))
    for param, master in zip(half, stash.all_fp32_from_fp16_params, strict=True):
        assert master is by_place[id(param)]
    assert [len(group) for group in stash.fp32_from_fp16_groups] == [4]
    assert (stash.lazy_init_called, stash.params_have_scaled_gradients, stash.process_zero_grad) == (True, False, True)
    assert stash.all_fp16_grad_stash == [None] * 4
    assert stash.all_fp32_grad_stash == stash.all_fp32_from_fp32_grad_stash == [None] * 2
    stash.multi_tensor_scale(65536, flag := stash.dummy_overflow_buf, [[torch.tensor([torch.inf])]] * 2, 1.0)
    assert flag.tolist() == [1]
    assert not hasattr(stash, "nothing_like_it")
    assert not hasattr(optimizer, "nothing_like_it")
    copied = copy.deepcopy(optimizer)
    assert len(copied._amp_stash.all_fp32_from_fp16_params) == 4


def test_a_level_without_masters_has_no_masters() -> None:
    _, optimizer = build(opt_level="O0")
    assert optimizer._amp_stash.all_fp32_from_fp16_params == optimizer._amp_stash.all_fp16_params == []
    assert len(optimizer._amp_stash.all_fp32_params) == 6
    optimizer._lazy_init_maybe_master_weights()
    optimizer._master_params_to_model_params()


def test_a_step_that_will_be_skipped() -> None:
    model, optimizer = build()
    assert optimizer._amp_stash.already_patched is False
    scaled_backward(model(INPUTS[0]).float().sum() * torch.inf, optimizer)
    assert optimizer._amp_stash.already_patched is True
    optimizer.step()
    assert optimizer._amp_stash.already_patched is False


@contextlib.contextmanager
def scale_loss(loss: torch.Tensor, optimizer: Any) -> Iterator[torch.Tensor]:
    """The block that scripts wrote for themselves out of the parts of Apex's."""
    scaler = amp._amp_state.loss_scalers[0]
    if not optimizer._amp_stash.params_have_scaled_gradients:
        optimizer._prepare_amp_backward()
    yield loss.float() * scaler.loss_scale()
    scaler.clear_overflow_state()
    optimizer._post_amp_backward(scaler)
    optimizer._amp_stash.params_have_scaled_gradients = False
    scaler.update_scale()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_block_of_the_scripts_own(name: str) -> None:
    """Gradients add up, and a step after an overflow is skipped and lowers the scale."""
    found = []
    for block in (amp.scale_loss, scale_loss):
        model, optimizer = build(name)
        for number, x in enumerate(INPUTS):
            with block(model(x).float().pow(2).mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            if number == 3:
                model[2].weight.grad.fill_(0.5)
            step(model, optimizer, x * torch.inf if number == 2 else x, block)
        found.append((masters(optimizer), amp._amp_state.loss_scalers[0].loss_scale()))
    (one, scale), (two, other) = found
    assert scale == other == 2.0**15
    assert_equal(one, two)


def test_masters_written_by_hand_reach_the_model() -> None:
    model, optimizer = build()
    for master in optimizer._amp_stash.all_fp32_from_fp16_params:
        master.data.fill_(0.125)
    optimizer._master_params_to_model_params()
    assert model[0].weight.unique().tolist() == [0.125]


@pytest.mark.parametrize("overflow", [False, True])
def test_an_overflow_buffer_of_the_script(overflow: bool) -> None:
    """Scripts that average gradients by hand put the flag of their multi-tensor operation into the scaler."""
    build()
    scaler = amp._amp_state.loss_scalers[0]
    before = scaler.loss_scale()
    old, scaler._overflow_buf = scaler._overflow_buf, torch.tensor([int(overflow)], dtype=torch.int32)
    assert old.tolist() == [0]
    assert scaler._overflow_buf.tolist() == [int(overflow)]
    assert scaler.update_scale() is overflow
    assert scaler.loss_scale() == (before / 2 if overflow else before)


@pytest.mark.parametrize("of", ["initialize", "init"])
def test_a_handle_that_is_switched_off_by_hand(of: str) -> None:
    x = torch.ones(2, 2)
    if of == "init":
        handle: Any = amp.init(dtype="bfloat16")
    else:
        model: Any = nn.Linear(2, 2)
        _alive = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O1", verbosity=0)
        handle = amp._amp_state.handle
    try:
        assert handle._is_active is True
        assert torch.mm(x, x).dtype is not torch.float32
        for _ in range(2):
            handle._is_active = False
            assert handle.is_active() is False
            assert torch.mm(x, x).dtype is torch.float32
        for _ in range(2):
            handle._is_active = True
            assert torch.mm(x, x).dtype is not torch.float32
    finally:
        handle._deactivate()


def test_what_subclasses_of_the_optimizer_of_2018_read() -> None:
    model = nn.Sequential(nn.Linear(4, 2).half(), nn.Linear(2, 2))
    params: Any = model.parameters()
    optimizer: Any = FP16_Optimizer(torch.optim.SGD(params, 0.1), dynamic_loss_scale=True, verbose=False)
    assert (optimizer.scale_factor, optimizer.scale_window) == (2.0, 1000)
    (flat,) = optimizer.fp16_groups_flat
    assert (flat.dtype, flat.shape) == (torch.float16, (10,))
    assert torch.equal(flat[:8].view(2, 4), model[0].weight)
    static: Any = FP16_Optimizer(torch.optim.SGD(nn.Linear(2, 2).half().parameters(), 0.1), verbose=False)
    assert not hasattr(static, "scale_factor")
    assert not hasattr(static, "scale_window")


def test_casts_under_autocast() -> None:
    from halfstep.apex import _autocast_utils as utils

    given = (torch.ones(1), [torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.long)], "text", None)
    assert utils._cast_if_autocast_enabled(*given) == given
    with torch.autocast("cpu", torch.bfloat16):
        found = utils._cast_if_autocast_enabled(*given)
    assert [found[0].dtype, *(t.dtype for t in found[1])] == [torch.bfloat16, torch.float64, torch.long]
    assert found[2:] == ("text", None)
    assert utils._get_current_dtype() is torch.float32
    assert utils._get_current_dtype(torch.float64) is torch.float64
    assert utils._get_autocast_dtypes() == [torch.float16, torch.bfloat16]
