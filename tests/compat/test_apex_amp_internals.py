"""``apex.amp`` from inside: the lists that scripts edit, opt levels as objects, and the arguments of Ascend's fork."""

from __future__ import annotations

import copy
import logging
import operator
from typing import Any

import pytest
import torch
from halfstep.apex.amp import frontend, lists, utils
from torch import nn
from torch.nn import functional as F

from halfstep.apex import amp
from halfstep.core.errors import ArgumentValueError, UsageError
from halfstep.core.loss_scale import DynamicLossScale
from tests.compat.test_apex_names import table
from tests.support.worlds import FP16, FP32, with_optimizer

X = torch.ones(2, 2)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists of the process are as before."""
    for name in ("functional_overrides", "tensor_overrides", "torch_overrides"):
        module = getattr(lists, name)
        for key, value in vars(module).items():
            if isinstance(value, list):
                monkeypatch.setattr(module, key, list(value))
    monkeypatch.setattr(frontend, "_logged", set())


def bring_up(**options: Any) -> tuple[Any, Any]:
    model, optimizer = with_optimizer(nn.Linear(2, 2), torch.optim.SGD, 0.1)
    return amp.initialize(model, optimizer, **{"opt_level": "O1", "verbosity": 0, **options})  # type: ignore[no-any-return]


# ---- lists


APEX_LISTS = table("lists")


@pytest.mark.parametrize("path", APEX_LISTS)
def test_lists_have_the_names_of_the_original(path: str) -> None:
    assert set(APEX_LISTS[path]) <= set(operator.attrgetter(path)(amp.lists))


def test_lists_that_are_not_edited_change_nothing() -> None:
    assert lists.edited() is None
    assert [name for name, _ in amp.lists.functional_overrides.BANNED_FUNCS] == ["binary_cross_entropy"]
    _alive = bring_up()
    assert F.softmax(X.half(), -1).dtype is FP32


def test_a_name_moved_from_one_list_to_another() -> None:
    """Two lines of NVIDIA's Tacotron 2."""
    amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")
    amp.lists.functional_overrides.FP16_FUNCS.append("softmax")
    _alive = bring_up()
    assert F.softmax(X, -1).dtype is torch.softmax(X, -1).dtype is FP16
    assert F.log_softmax(X.half(), -1).dtype is FP32


def test_names_taken_off_and_put_on_the_lists() -> None:
    amp.lists.torch_overrides.FP16_FUNCS.remove("bmm")
    amp.lists.tensor_overrides.FP32_FUNCS.remove("__pow__")
    amp.lists.functional_overrides.BANNED_FUNCS = []
    amp.lists.torch_overrides.FP32_FUNCS += ["mm"]
    _alive = bring_up()
    assert torch.bmm(X[None], X[None]).dtype is FP32
    assert torch.pow(X.half(), 2).dtype is FP16
    assert F.binary_cross_entropy(X.half() / 2, X.half()).dtype is FP16
    assert torch.mm(X.half(), X.half()).dtype is FP32
    assert torch.matmul(X, X).dtype is FP16


def test_an_edit_holds_for_the_handle_of_2018_and_not_for_other_levels() -> None:
    amp.lists.functional_overrides.FP16_FUNCS.append("softmax")
    handle = amp.init()
    assert F.softmax(X, -1).dtype is FP16
    handle._deactivate()
    model, _ = bring_up(opt_level="O2")
    assert model.weight.dtype is FP16
    assert F.softmax(X, -1).dtype is FP32


@pytest.mark.parametrize(("level", "after"), [("O1", FP32), ("O2", FP16)])
def test_the_handle_ends_the_casts_of_models_at_o1_too(level: str, after: torch.dtype) -> None:
    model, _ = bring_up(opt_level=level, cast_model_outputs=None)
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.dtype), prepend=True)
    twin = copy.deepcopy(model)
    model(X)
    amp._amp_state.handle._deactivate()
    amp._amp_state.handle._deactivate()
    model(X)
    twin(X)
    assert seen == [FP16, after, after]
    assert torch.mm(X, X).dtype is FP32
    assert not amp._amp_state.handle.is_active()


@pytest.mark.parametrize(
    ("key", "name", "error", "message"),
    [
        ("CASTS", "sigmoid", UsageError, "sigmoid cannot be added to CASTS.*register_promote_function"),
        ("SEQUENCE_CASTS", "relu", UsageError, "relu cannot be added to SEQUENCE_CASTS"),
        ("BANNED_FUNCS", ("relu", "no"), UsageError, "relu cannot be added to BANNED_FUNCS"),
        ("FP16_FUNCS", "no_such_op", ArgumentValueError, "'no_such_op' is not an op"),
    ],
)
def test_what_cannot_be_added(key: str, name: Any, error: type[Exception], message: str) -> None:
    getattr(amp.lists.torch_overrides, key).append(name)
    with pytest.raises(error, match=message):
        bring_up()


def test_an_op_on_two_lists() -> None:
    amp.lists.functional_overrides.FP16_FUNCS.append("relu")
    amp.lists.functional_overrides.FP32_FUNCS.append("relu")
    with pytest.raises(ArgumentValueError, match="relu cannot run in both precisions"):
        bring_up()


# ---- opt levels as objects


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_levels_set_properties(level: str) -> None:
    properties = frontend.opt_levels[level](frontend.Properties())
    assert type(frontend.opt_levels[level]) is getattr(frontend, level)
    assert frontend.opt_levels[level].brief.startswith(level)
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    assert properties.options == amp._amp_state.opt_properties.options
    assert properties.loss_scale == ("dynamic" if level in ("O1", "O2") else 1.0)


def test_properties_are_checked() -> None:
    properties = frontend.Properties()
    assert (properties.enabled, properties.opt_level, properties.loss_scale) == (False, None, 1.0)
    frontend.O2()(properties)
    properties.keep_batchnorm_fp32 = "False"
    properties.loss_scale = "128.0"
    assert (properties.keep_batchnorm_fp32, properties.loss_scale) == (False, 128.0)
    with pytest.raises(UsageError, match="patch_torch_functions=True works only at opt_level O1"):
        properties.patch_torch_functions = True
    with pytest.raises(ArgumentValueError, match="'nothing' is none of the properties"):
        properties.nothing = 1
    with pytest.raises(AttributeError, match="nothing"):
        _ = properties.nothing


# ---- utils and compat


def test_utils(caplog: pytest.LogCaptureFixture) -> None:
    from halfstep.apex.amp import _amp_state as _  # noqa: F401 - its import must not hide the module below

    assert utils.is_fp_tensor([X, (X.half(),)])
    assert not utils.is_fp_tensor([X, X.long()])
    assert utils.is_nested([X])
    assert utils.type_string(X.half()) == "HalfTensor"
    assert [t.dtype for t in utils.maybe_half((X, X.double()))] == [FP16, FP16]
    assert utils.maybe_float([X.half()])[0].dtype is FP32
    assert utils.has_func(torch, "add")
    assert not utils.has_func({}, "add")
    assert utils.is_cuda_enabled() is (utils.get_cuda_version() != ())
    assert utils.scalar_python_val(torch.tensor(2.0)) == utils.scalar_python_val([2.0]) == 2.0
    assert utils.is_tensor_like(X)
    assert utils.is_floating_point(X)
    bring_up(verbosity=0)
    with caplog.at_level(logging.INFO, "halfstep"):
        utils.maybe_print("silent")
        amp._amp_state.verbosity = 1
        utils.maybe_print("told", rank0=True)
    assert [record.getMessage() for record in caplog.records] == ["told"]


# ---- the arguments of Ascend's fork


def test_hints_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    hints = {"combine_grad": True, "combine_ddp": True, "ddp_replica_count": 8, "check_combined_tensors": True}
    with caplog.at_level(logging.INFO, "halfstep"):
        for _ in range(2):
            model, _ = bring_up(opt_level="O2", user_cast_preferred=True, **hints)
    assert model.weight.dtype is FP16
    told = [record.getMessage() for record in caplog.records if "not needed here" in record.getMessage()]
    assert told == [
        "amp.initialize: check_combined_tensors, combine_ddp, combine_grad, ddp_replica_count, user_cast_preferred are "
        "not needed here and change nothing."
    ]


def test_combined_ddp_is_refused_where_it_would_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UsageError, match="wrap the model in torch"):
        bring_up(combine_ddp=True)


def test_how_the_scale_moves(caplog: pytest.LogCaptureFixture) -> None:
    moving = {"dynamic_init_scale": 8.0, "scale_growth_factor": 4.0, "scale_backoff_factor": 0.25, "scale_window": 3}
    bring_up(**moving, min_loss_scale=2.0, max_loss_scale=64.0)
    expected = DynamicLossScale(8.0, 4.0, 0.25, 3, min_scale=2.0, max_scale=64.0)
    assert amp._amp_state.loss_scalers[0].rule == expected
    bring_up(scale_window=3, loss_scale="dynamic", opt_level="O0")
    assert amp._amp_state.loss_scalers[0].rule == DynamicLossScale(growth_interval=3)
    with caplog.at_level(logging.WARNING, "halfstep"):
        bring_up(scale_window=3, loss_scale=4.0)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 4.0
    assert "the loss scale is static, so it is not moved by scale_window." in caplog.text
