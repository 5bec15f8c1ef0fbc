"""LARC, the wrapper on one process and SyncBatchNorm, against what the real Apex did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import HalfstepError, amp, parallel
from halfstep.core.dtypes import dtype_name
from halfstep.parallel import LARC
from tests.support.apex_recording import assert_near, batch, flat, golden, grid, net
from tests.support.processes import one_rank
from tests.support.worlds import FP16, scaled_backward, start_amp, step_and_clear

FACTS = golden("apex_parallel")


@pytest.fixture
def group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize("name", FACTS["larc"]["cases"])
def test_larc(name: str) -> None:
    given = dict(part.split("=") for part in name.split(","))
    p = [grid((2, 3), 81), grid((3,), 82, 0.01), torch.zeros(2), grid((2,), 84), grid((2,), 85)]
    params = [nn.Parameter(t) for t in p]
    inner = torch.optim.SGD(
        [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}],
        lr=0.1,
        momentum=0.9,
        weight_decay=float(given["wd"]),
    )
    larc = LARC(inner, trust_coefficient=float(given["tc"]), clip=given["clip"] == "True")
    for fact in FACTS["larc"]["cases"][name]:
        grads = [grid((2, 3), 86, 0.1), grid((3,), 87), grid((2,), 88), torch.zeros(2), None]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        larc.step()
        for param, value, grad in zip(params, fact["params"], fact["grads_after_step"], strict=True):
            assert_near(flat(param), value, 1e-6)
            assert (param.grad is None) == (grad is None)
            if grad is not None:
                assert_near(flat(param.grad), grad, 1e-6)
        assert [g["weight_decay"] for g in larc.param_groups] == fact["weight_decay_after_step"]


@pytest.mark.parametrize("level", FACTS["larc"]["amp"])
def test_larc_under_amp(level: str) -> None:
    case = FACTS["larc"]["amp"][level]
    model, inner = start_amp(
        net(),
        torch.optim.SGD,
        level,
        dtype=FP16 if level != "O0" else None,
        loss_scale=128.0,
        lr=0.1,
        momentum=0.9,
        weight_decay=0.01,
    )
    larc = LARC(inner, trust_coefficient=0.02)
    loose = 1e-2 if level == "O3" else 1e-3
    for t, expected in enumerate(case["loss"]):
        x, y, _ = batch(t)
        loss = F.cross_entropy(model(x), y)
        assert_near([loss.item()], [expected], loose)
        scaled_backward(loss, inner)
        step_and_clear(larc)
    for param, expected in zip(amp.master_params(inner), case["final_masters"], strict=True):
        assert_near(flat(param), expected, loose)
    assert [dtype_name(p.dtype) for p in amp.master_params(inner)] == case["master_dtypes"]


def test_larc_is_what_it_was_but_takes_closures_and_torchs_zero_grad() -> None:
    facts = FACTS["larc"]["misc"]
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    larc = LARC(inner)
    assert [larc.trust_coefficient, larc.clip, larc.eps] == facts["defaults"]
    assert isinstance(larc, torch.optim.Optimizer) == facts["is torch Optimizer"]
    assert (larc.param_groups is inner.param_groups) == facts["param_groups is the wrapped one's"]
    assert facts["step(closure)"] == facts["zero_grad(set_to_none=True)"] == {"raises": "TypeError"}
    larc.zero_grad(set_to_none=True)
    assert larc.step(lambda: 3.0) == 3.0


WRAPPERS: dict[str, dict[str, Any]] = {
    "default": {},
    "delay_allreduce": {"delay_allreduce": True},
    "predivide=2": {"gradient_predivide_factor": 2.0},
    "no average, predivide=2": {"gradient_average": False, "gradient_predivide_factor": 2.0},
    "shared_param=True": {"shared_param": True},
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_wrapper_on_one_process(group: None, name: str) -> None:
    fact = FACTS["ddp_one"][name]
    if "raises" in fact:
        with pytest.raises(ValueError, match=fact["words"][0]) as refusal:
            parallel.DistributedDataParallel(net(), **WRAPPERS[name])
        assert isinstance(refusal.value, HalfstepError)
        return
    model = parallel.DistributedDataParallel(net(), **WRAPPERS[name])
    assert all(key.startswith("module.") for key in model.state_dict()) == fact["state_dict_prefix_module"]
    x, y, _ = batch(0)
    F.cross_entropy(model(x), y).backward()
    for param, expected in zip(model.parameters(), fact["grads"], strict=True):
        assert param.grad is not None
        assert_near(flat(param.grad), expected, 1e-5)


def test_reducer_and_groups_on_one_process(group: None) -> None:
    facts = FACTS["ddp_one"]
    model = net()
    x, y, _ = batch(0)
    F.cross_entropy(model(x), y).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    parallel.Reducer(model).reduce()
    assert facts["Reducer(module).reduce() keeps 1-process grads"]["same"]
    for param, grad in zip(model.parameters(), before, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, grad)
    assert facts["create_syncbn_process_group(1) is a group"]["not_none"]
    assert parallel.create_syncbn_process_group(1) is not None
    assert parallel.create_syncbn_process_group(0) is None
    wrongs: list[Any] = [2, -1, "2"]
    for wrong in wrongs:
        with pytest.raises(HalfstepError, match=f"group_size={wrong!r}"):
            parallel.create_syncbn_process_group(wrong)


MODULES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (6, 4, 5)),
    "BatchNorm1d eval": (lambda: nn.BatchNorm1d(4).eval(), (6, 4, 5)),
    "BatchNorm1d half": (lambda: nn.BatchNorm1d(4).half(), (6, 4, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), (6, 4, 5, 5)),
    "BatchNorm2d affine=False": (lambda: nn.BatchNorm2d(4, affine=False), (6, 4, 5, 5)),
    "BatchNorm2d momentum=None": (lambda: nn.BatchNorm2d(4, momentum=None), (6, 4, 5, 5)),
    "BatchNorm2d no stats": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (6, 4, 5, 5)),
    "BatchNorm2d(eps,momentum)": (lambda: nn.BatchNorm2d(4, 1e-3, 0.3), (6, 4, 5, 5)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(4), (2, 4, 3, 3, 3)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4), (2, 4, 3)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4), (2, 4, 3, 3)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(4), (2, 4, 3, 3, 3)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (2, 4)),
    "Linear": (lambda: nn.Linear(4, 4), (2, 4)),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_convert_syncbn_model_converts(name: str) -> None:
    fact = FACTS["convert_syncbn_model"][name]
    make, shape = MODULES[name]
    before = make()
    after: Any = parallel.convert_syncbn_model(before)
    assert type(after).__name__ == fact["class"]
    assert (after is not before) == fact["replaced"]
    if not fact["replaced"]:
        return
    for attribute in ("affine", "eps", "momentum", "num_features", "track_running_stats"):
        assert getattr(after, attribute) == fact[attribute]
    assert (after.running_mean is before.running_mean) == fact["running_mean_is_shared"]
    assert all(one is other for one, other in zip(after.parameters(), before.parameters(), strict=True))
    assert after.training == before.training, "Apex's was always in training mode"
    dtype = torch.float16 if "half" in name else torch.float32
    out = after(grid(shape, 1).to(dtype))
    assert out.dtype is dtype
    if "raises" in fact["train_forward"]:
        assert name in ("BatchNorm2d momentum=None", "BatchNorm2d no stats"), "these failed in Apex"


def test_frozen_weights_and_shared_modules() -> None:
    """Departures: a frozen weight stays frozen, and a module used twice is one module still."""
    frozen = nn.BatchNorm1d(4)
    frozen.weight.requires_grad_(False)
    assert not parallel.convert_syncbn_model(frozen).weight.requires_grad
    shared = nn.BatchNorm1d(4)
    model: Any = parallel.convert_syncbn_model(nn.Sequential(shared, nn.ReLU(), shared))
    assert model[0] is model[2]
    assert isinstance(model[0], parallel.SyncBatchNorm)


@pytest.mark.parametrize("name", FACTS["syncbn_numbers"])
def test_syncbn_numbers(name: str) -> None:
    fact = FACTS["syncbn_numbers"][name]
    dtype = {"fp16": torch.float16, "fp32": torch.float32}[name]
    plain = nn.BatchNorm1d(4)
    with torch.no_grad():
        plain.weight.copy_(grid((4,), 93, 0.25, 1.0))
        plain.bias.copy_(grid((4,), 94, 0.25))
    module: Any = parallel.convert_syncbn_model(plain)
    x = grid((6, 4, 5), 92, 2.0, 0.3).to(dtype).requires_grad_()
    y = module(x)
    (y.float() * grid((6, 4, 5), 95)).sum().backward()
    loose = 1e-3 if name == "fp16" else 1e-5
    assert y.dtype is dtype, "Apex's came back as fp32"
    assert_near(flat(y[0]), fact["output_first_row"], loose)
    assert dtype_name(x.grad.dtype) == fact["input_grad_dtype"]
    assert_near(flat(x.grad[0]), fact["input_grad_first_row"], 2 * loose)
    for ours, key in (
        (module.weight.grad, "weight_grad"),
        (module.bias.grad, "bias_grad"),
        (module.running_mean, "running_mean"),
        (module.running_var, "running_var"),
    ):
        assert_near(flat(ours), fact[key], loose)
    assert int(module.num_batches_tracked) == fact["num_batches_tracked"]
    assert_near(flat(module.eval()(x)[0]), fact["eval_first_row"], loose)
