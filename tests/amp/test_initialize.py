"""What ``amp.initialize`` takes, refuses and returns: the real Apex's answers, and where ours differs on purpose."""

from __future__ import annotations

import ast
import copy
import dataclasses
import gc
import inspect
import logging
import pickle
import re
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep import amp
from halfstep.amp.options import ARGUMENTS
from halfstep.core.dtypes import dtype_name
from halfstep.core.errors import ArgumentValueError, HalfstepError, UsageError
from halfstep.core.policy import LEVELS as MEANINGS
from halfstep.core.policy import Policy
from halfstep.integrations.training_precision import TrainingPrecision
from halfstep.scaling import DynamicLossScale, StaticLossScale
from tests.support.apex_recording import batch, golden, net, optimizer
from tests.support.processes import one_rank
from tests.support.worlds import HALVES, LEVELS, Applies, read_back, scaled_backward, step_and_clear

FACTS = golden("apex_amp")["banner_and_errors"]
EXCEPTIONS = {"RuntimeError": RuntimeError, "TypeError": TypeError, "ValueError": ValueError, "IndexError": IndexError}


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    return model, optimizer("sgd", model.parameters())


def start(level: str, half: torch.dtype = torch.bfloat16, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    return amp.initialize(*fresh(), opt_level=level, dtype=half, verbosity=0, **options)


def backward(model: nn.Module, optim: Any, t: int = 0, factor: float = 1.0, **kwargs: Any) -> None:
    x, y, _ = batch(t)
    scaled_backward(F.cross_entropy(model(x), y) * factor, optim, **kwargs)


# ---- options, as recorded

# key of the recording -> what ours does instead, and why
OTHER_OPTIONS = {
    "loss_scale=0.0": ArgumentValueError,  # no range check there; a scale of 0 destroys every gradient
    "loss_scale=-1.0": ArgumentValueError,
    "loss_scale='inf'": ArgumentValueError,
    "num_losses=0": ArgumentValueError,  # and with it no loss can be scaled
    "keep_batchnorm_fp32='foo'": ArgumentValueError,  # an AssertionError there
    "keep_batchnorm_fp32='true'": ArgumentValueError,
    "keep_batchnorm_fp32=1": ArgumentValueError,
}


def parse_options(key: str) -> dict[str, Any]:
    level, *rest = key.split(",")
    options: dict[str, Any] = {}
    if level.startswith("opt_level="):
        return {"opt_level": ast.literal_eval(level.removeprefix("opt_level="))}
    for part in rest:
        name, value = part.split("=")
        options[name] = getattr(torch, value[6:]) if value.startswith("torch.") else ast.literal_eval(value)
    return {"opt_level": level, **options}


@pytest.mark.parametrize("key", [key for key in FACTS["options"] if key != "opt_level='O4'"])  # which ROCm's fork has
def test_options(key: str) -> None:
    recorded = FACTS["options"][key]
    given = parse_options(key)
    change = next((error for part, error in OTHER_OPTIONS.items() if part in key), None)
    if change is not None and not (given["opt_level"] == "O1" and "keep_batchnorm" in key):
        with pytest.raises(change):
            amp.initialize(*fresh(), dtype=torch.float16, verbosity=0, **given)
        return
    if "raises" in recorded:
        with pytest.raises(EXCEPTIONS[recorded["raises"]]) as caught:
            amp.initialize(*fresh(), dtype=torch.float16, verbosity=0, **given)
        assert isinstance(caught.value, HalfstepError)
        for word in recorded["words"]:
            assert word.lower() in str(caught.value).lower()
        return
    model, optim = fresh()
    returned = amp.initialize(model, optim, dtype=torch.float16, verbosity=0, **given)
    assert [*map(id, returned)] == [id(model), id(optim)]
    options = amp._amp_state.opt_properties.options
    shown = {k: dtype_name(v) if isinstance(v, torch.dtype) else v for k, v in options.items()}
    assert {k: v for k, v in shown.items() if v != float("inf")} == recorded["options"]


class Fp16Optimizer(torch.optim.SGD):
    pass


Fp16Optimizer.__name__ = "FP16_Optimizer"


def half_buffer() -> nn.Module:
    model = net()
    model[1].running_mean = model[1].running_mean.half()
    return model


def types_case(key: str) -> tuple[Any, Any, dict[str, Any]]:
    model, optim = fresh()
    kinds: dict[str, Any] = {
        "DataParallel wrapped": lambda: (nn.DataParallel(model), optim),
        "model float64": lambda: (model.double(), optim),
        "model half, O0": lambda: (model.half(), optim, {"opt_level": "O0"}),
        "model half, O1": lambda: (model.half(), optim, {"opt_level": "O1"}),
        "model half, O2": lambda: (model.half(), optim),
        "model half, O3": lambda: (model.half(), optim, {"opt_level": "O3"}),
        "model is a function": lambda: (lambda x: x, optim),
        "model, no optimizer": lambda: (model, None),
        "models dict": lambda: ({"m": model}, optim),
        "models list": lambda: ([model], optim),
        "models list, no optimizer": lambda: ([model], None),
        "models tuple": lambda: ((model,), optim),
        "one half buffer": lambda: (half := half_buffer(), optimizer("sgd", half.parameters())),
        "optimizer FP16_Optimizer": lambda: (model, Fp16Optimizer(model.parameters(), lr=1.0)),
        "optimizer [FP16_Optimizer]": lambda: (model, [Fp16Optimizer(model.parameters(), lr=1.0)]),
        "optimizer is a string": lambda: (model, "sgd"),
        "optimizers empty list": lambda: (model, []),
        "optimizers list": lambda: (model, [optim]),
        "optimizers tuple": lambda: (model, (optim,)),
    }
    if key not in kinds:
        return None, None, {}
    models, optims, *rest = kinds[key]()
    return models, optims, {"opt_level": "O2", **(rest[0] if rest else {})}


@pytest.mark.parametrize("key", FACTS["types"])
def test_types(key: str) -> None:
    recorded = FACTS["types"][key]
    models, optims, options = types_case(key)
    if models is None:
        pytest.skip("has a test of its own, or (LARC, Apex's DDP, cudnn) belongs to what this face does not know")
    before = copy.deepcopy([p.dtype for p in models.parameters()]) if isinstance(models, nn.Module) else []
    if "raises" in recorded and "half" not in key:  # Apex refused a model in 16 bits
        with pytest.raises(EXCEPTIONS[recorded["raises"]]) as caught:
            amp.initialize(models, optims, dtype=torch.float16, verbosity=0, **options)
        for word in recorded["words"]:
            assert word.lower() in str(caught.value).lower()
        if before:
            assert [p.dtype for p in models.parameters()] == before, "a refused model was changed"
            assert not hasattr(optims, "_amp_stash")
        return
    result = amp.initialize(models, optims, dtype=torch.float16, verbosity=0, **options)
    assert result is models if optims is None else (result[0] is models and result[1] is optims)


def test_wrapped_for_parallel_training_is_refused() -> None:
    with one_rank(), pytest.raises(UsageError, match=r"original model"):
        amp.initialize(nn.parallel.DistributedDataParallel(net()), opt_level="O2", verbosity=0)


@pytest.mark.parametrize("name", ["float16", "fp16", "torch.float16"])
def test_dtype_of_the_outputs_by_name(name: str) -> None:
    model, _ = start("O2", cast_model_outputs=name)
    assert model(batch(0)[0]).dtype is torch.float16


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("rule", "same"),
    [
        (DynamicLossScale(), "dynamic"),
        (StaticLossScale(128.0), 128.0),
        (DynamicLossScale(init_scale=2.0**10, max_scale=2.0**10, growth_interval=1), None),
    ],
)
def test_loss_scale_as_a_value(level: str, rule: Any, same: Any) -> None:
    results = []
    for spec in [rule] if same is None else [rule, same]:
        model, optim = start(level, torch.float16, loss_scale=spec)
        assert amp._amp_state.opt_properties.loss_scale == spec
        assert amp._amp_state.opt_properties.options["loss_scale"] is amp._amp_state.opt_properties.loss_scale
        scales = []
        for t in range(4):
            backward(model, optim, t, factor=float("inf") if t == 1 else 1.0)
            step_and_clear(optim)
            scales.append(amp.state_dict()["loss_scaler0"])
        results.append(scales)
    assert results[0] == results[-1]
    assert same is not None or [each["loss_scale"] for each in results[0]] == [1024.0, 512.0, 1024.0, 1024.0]


# ---- a policy in the place of a level


def trained(**options: Any) -> dict[str, Any]:
    """Everything that three steps leave behind, the second of which overflows."""
    model, optim = amp.initialize(*fresh(), verbosity=0, **options)
    outputs = []
    for t in range(3):
        outputs.append(model(batch(t)[0]).detach())
        backward(model, optim, t, factor=float("inf") if t == 1 else 1.0)
        step_and_clear(optim)
    return {
        "outputs": outputs,
        "weights": [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())],
        "saved": list(model.state_dict().values()),
        "masters": list(amp.master_params(optim)),
        "scales": amp.state_dict(),
        "skipped": amp.steps_skipped(optim),
        "options": amp._amp_state.opt_properties,
    }


@pytest.mark.parametrize("loss_scale", [None, "dynamic", 8.0])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", LEVELS)
def test_policy_of_a_level(level: str, half: torch.dtype, loss_scale: Any) -> None:
    by_level = trained(opt_level=level, dtype=half, loss_scale=loss_scale)
    by_policy = trained(policy=Policy.from_level(level, half), loss_scale=loss_scale)
    for name, expected in by_level.items():
        found = by_policy[name]
        if isinstance(expected, list):
            assert [each.dtype for each in found] == [each.dtype for each in expected]
            assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(found, expected, strict=True))
        else:
            assert found == expected, name


def test_a_policy_of_ones_own() -> None:
    lists = halfstep.OpLists.custom(["softmax"])
    policy = Policy.from_level("O1", torch.bfloat16).replace(op_lists=lists, loss_scale=DynamicLossScale(8.0))
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1))
    model, _ = amp.initialize(model, torch.optim.SGD(model.parameters()), policy=policy, verbosity=0)
    assert model(torch.ones(1, 4)).dtype is torch.bfloat16
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 8.0
    shown = amp._amp_state.opt_properties
    assert (shown.opt_level, shown.patch_torch_functions, shown.loss_scale) == ("O1", True, policy.loss_scale)
    policy = Policy(torch.float16, torch.float16, torch.bfloat16, loss_scale=2.0)
    model = amp.initialize(net(), policy=policy, verbosity=0)
    assert {each.dtype for each in model.parameters()} == {torch.float16}
    assert model(batch(0)[0]).dtype is torch.bfloat16
    shown = amp._amp_state.opt_properties
    assert (shown.opt_level, shown.cast_model_type, shown.loss_scale) == ("O3", torch.float16, 2.0)
    assert (shown.keep_batchnorm_fp32, shown.master_weights) == (False, False)


def test_lists_at_o2_cast_the_listed_ops_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Applies(lambda x: (x.exp().dtype, x.relu().dtype)))
    model = amp.initialize(model, opt_level="O2", custom_black_list=["relu"], verbosity=0)
    assert model(torch.ones(1, 4)) == (torch.bfloat16, torch.float32)


def test_a_policy_without_16_bits_is_like_O0() -> None:
    model = amp.initialize(net(), policy=Policy(), verbosity=0)
    assert model(batch(0)[0]).dtype is torch.float32
    shown = amp._amp_state.opt_properties
    assert (shown.opt_level, shown.cast_model_type, shown.loss_scale) == ("O0", None, 1.0)


def test_a_policy_under_the_name_of_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.apex import amp as apex_amp

    monkeypatch.setenv("HALFSTEP_OPT_LEVEL", "O1")
    model = apex_amp.initialize(net(), policy=Policy.from_level("O3", torch.bfloat16), verbosity=0)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


def test_policy_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="halfstep")
    policy = Policy.from_level("O2", torch.float16)
    amp.initialize(*fresh(), policy=policy, loss_scale=4.0)
    assert f"Policy {policy.replace(loss_scale=4.0)}" in caplog.text


def test_the_table_of_arguments_says_what_initialize_takes() -> None:
    parameters = inspect.signature(amp.initialize).parameters
    names = {field.name for field in dataclasses.fields(Policy)}
    for name, argument in ARGUMENTS.items():
        assert parameters[name].default == argument.default
        assert argument.field is None or argument.field in names


# ---- defaults and the banner


@pytest.mark.parametrize("level", LEVELS)
def test_default_dtype_on_cpu_is_bfloat16_with_a_static_scale(level: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="halfstep")
    amp.initialize(*fresh(), opt_level=level)
    assert f"Opt level {level}{' in bfloat16' * (level != 'O0')}: {MEANINGS[level]}, loss scale 1" in caplog.text
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}


@pytest.mark.parametrize(("alias", "level"), [("O4", "O1"), ("O5", "O2")])
def test_rocm_levels(alias: str, level: str) -> None:
    amp.initialize(*fresh(), opt_level=alias, verbosity=0)
    assert amp._amp_state.opt_properties.opt_level == level
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 1.0


@pytest.mark.parametrize(
    ("verbosity", "rank", "handlers", "said"),
    [(1, "0", [], "Opt level"), (0, "0", [], ""), (1, "1", [], ""), (1, "0", [logging.NullHandler()], "")],
)
def test_a_line_is_shown_where_a_program_has_not_set_up_logging(
    verbosity: int, rank: str, handlers: list[logging.Handler], said: str, monkeypatch: Any, caplog: Any, capsys: Any
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(logging.getLogger("halfstep"), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    caplog.set_level(logging.NOTSET, logger="halfstep")
    amp.initialize(*fresh(), opt_level="O2", verbosity=verbosity)
    assert capsys.readouterr().err[:9] == said


def test_verbosity_0_is_silent_and_1_tells_of_skips(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="halfstep")
    for verbosity in (0, 1):
        caplog.clear()
        model, optim = amp.initialize(*fresh(), opt_level="O2", dtype=torch.float16, verbosity=verbosity)
        for t in range(2):
            backward(model, optim, t, factor=float("inf") if t == 0 else 1.0)
            step_and_clear(optim)
        for said in ("Gradient overflow", "loss scaler 0", "32768"):
            assert (said in caplog.text) == (verbosity == 1)


# ---- enabled=False


def test_disabled_does_nothing() -> None:
    model, optim = fresh()
    hooks = len(model._forward_pre_hooks) + len(model._forward_hooks)
    assert amp.initialize(model, optim, enabled=False) == (model, optim)
    assert amp.initialize(model, enabled=False) is model
    assert not hasattr(optim, "_amp_stash")
    assert len(model._forward_pre_hooks) + len(model._forward_hooks) == hooks
    loss = F.cross_entropy(model(batch(0)[0]), batch(0)[1])
    with amp.scale_loss(loss, optim, loss_id=7) as scaled_loss:
        assert scaled_loss is loss
        scaled_loss.backward()
    optim.step()
    assert list(amp.master_params(optim)) == list(model.parameters())
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    assert amp.steps_skipped(optim) == 0
    with amp.disable_casts():
        assert model(batch(0)[0]).dtype is torch.float32


# ---- at run time


def test_before_initialize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amp._amp_state, "session", None)
    model, optim = fresh()
    loss = model(batch(0)[0]).sum()
    with pytest.raises(UsageError, match="initialize to be called before"), amp.scale_loss(loss, optim):
        pass
    for call in (amp.state_dict, lambda: amp.load_state_dict({}), lambda: amp._amp_state.loss_scalers):
        with pytest.raises(UsageError, match=r"amp\.initialize"):
            call()
    with amp.disable_casts():
        pass


@pytest.mark.parametrize("level", LEVELS)
def test_scale_loss_takes_optimizers_in_a_tuple_and_losses_in_float64(level: str) -> None:
    model, optim = start(level)
    loss = F.cross_entropy(model(batch(0)[0]), batch(0)[1])
    with amp.scale_loss(loss.double(), optim) as scaled:
        assert scaled.dtype is torch.float64
    scaled_backward(loss, (optim,), loss_id=0, model=model)
    optim.step()
    optim.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in amp.master_params(optim))
    with pytest.raises(AttributeError, match="scale_loss returns a context manager, which has no 'backward'"):
        copy.copy(amp.scale_loss(loss, optim)).backward()  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("half", HALVES)
def test_state_dict_round_trip(level: str, half: torch.dtype) -> None:
    start(level, half, loss_scale="dynamic", num_losses=2)
    assert list(amp.state_dict()) == ["loss_scaler0", "loss_scaler1"]
    changed = {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 5}, "loss_scaler1": {"loss_scale": 2.0, "unskipped": 1}}
    amp.load_state_dict(changed)
    assert amp.state_dict() == changed
    for bad in ({"foo": 1}, {**changed, "foo": {}}, {"loss_scaler0": {"loss_scale": 4.0}}):
        with pytest.raises(ArgumentValueError, match="Nothing was loaded"):
            amp.load_state_dict(bad)
        assert amp.state_dict() == changed
    amp.load_state_dict({})
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 7}})
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 4.0, "unskipped": 7}


@pytest.mark.parametrize(("scale", "warned"), [(1.0, True), (2.0, False)])
def test_a_dynamic_scale_that_begins_with_that_of_bfloat16_is_told_of(
    scale: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {"loss_scaler0": {"loss_scale": scale, "unskipped": 0}}
    for rule in (1.0, "dynamic"):
        start("O2", loss_scale=rule)
        assert "small gradients are lost" not in caplog.text
        amp.load_state_dict(saved)
        assert amp.state_dict() == saved
    assert ("loss_scaler0 is 1.0, as in bfloat16" in caplog.text) == warned


@pytest.mark.parametrize("level", LEVELS)
def test_two_sessions_keep_their_own_scales(level: str) -> None:
    _, first = start(level, loss_scale="dynamic")
    model, second = start(level, loss_scale=4.0)
    backward(model, second)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 4.0
    assert amp.state_dict(optimizer=first)["loss_scaler0"] == {"loss_scale": 65536.0, "unskipped": 0}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 3}}, optimizer=first)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 4.0
    assert amp.state_dict(optimizer=first)["loss_scaler0"]["loss_scale"] == 2.0


# ---- what is attached to the model


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_copied_model_is_a_model_of_its_own(level: str, way: str) -> None:
    """In Apex a deep copy ran the original's weights, and pickling failed."""
    model, optim = start(level)
    backward(model, optim)
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        twin = read_back(model, weights_only=False)
    model.eval()
    twin.eval()
    x = batch(0)[0]
    assert torch.equal(model(x), twin(x))
    before = twin(x)
    optim.step()
    assert torch.equal(twin(x), before)
    assert not torch.equal(model(x), before)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert all((v == 0).all() for k, v in twin.state_dict().items() if "weight" in k), "a copy has no masters"


@pytest.mark.parametrize("level", LEVELS)
def test_data_parallel_replicas_run_their_own_weights(level: str) -> None:
    """In Apex all of them ran the weights of the first."""
    model = amp.initialize(nn.Linear(4, 2, bias=False), opt_level=level, verbosity=0)
    replica = model._replicate_for_data_parallel()  # what DataParallel makes of a model, on each device
    replica._forward_pre_hooks = model._forward_pre_hooks
    replica.weight, replica.bias = torch.ones_like(model.weight), None
    assert replica(torch.ones(1, 4)).tolist() == [[4.0, 4.0]]


def test_memory_of_a_finished_fold_is_freed() -> None:
    model, optim = start("O2")
    backward(model, optim)
    optim.step()
    master, param = next(amp.master_params(optim)), next(model.parameters())
    value, stored = master.tolist(), weakref.ref(optim.state[param]["momentum_buffer"])
    start("O2")  # the next fold
    del optim
    gc.collect()
    assert stored() is None, "though a master is held"
    assert master.tolist() == value
    assert torch.equal(model.state_dict()["0.weight"], param.detach().float())


def test_master_params_of_a_list_are_those_of_its_optimizers_in_order() -> None:
    first, second = start("O2")[1], start("O2")[1]
    plain = fresh()[1]
    separate = [p for each in (first, second, plain) for p in amp.master_params(each)]
    assert list(map(id, amp.master_params([first, second, plain]))) == list(map(id, separate))
    assert {p.dtype for p in separate} == {torch.float32}


@pytest.mark.parametrize(("level", "refused"), [("O0", False), ("O1", False), ("O2", True), ("O3", True)])
def test_weights_that_fsdp1_has_flattened_stay_fp32(level: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.stepping.prepare.is_flattened", lambda param: True)
    model = nn.Linear(2, 2)
    arguments: Any = {"opt_level": level, "dtype": torch.bfloat16, "verbosity": 0}
    with pytest.raises(UsageError, match="has flattened the parameter weight") if refused else nullcontext():
        amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)
    assert model.weight.dtype is torch.float32


@pytest.mark.parametrize("name", ["level", "opt_level"])
def test_every_face_takes_both_spellings_of_levels_and_layers(name: str) -> None:
    given, model = {name: "O2", "dtype": torch.float16}, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert amp.auto_cast(**given).casting.lists.level == "O2"
    assert halfstep.search(model, lambda m, x: m(x).sum(), [torch.ones(1, 2)] * 2, **given).level == "O2"
    for face in (amp.initialize, amp.decorate, lambda model, **options: TrainingPrecision.of(**options).cast(model)):
        for layers in ({"excluded_layers": "0"}, {"module_filter": lambda _, at: torch.float32 if at == "0" else None}):
            changed = face(copy.deepcopy(model), **given, **layers)
            assert [layer.weight.dtype for layer in changed] == [torch.float32, torch.float16]


def test_a_repr_says_what_an_object_is_and_its_state() -> None:
    _, optim = amp.initialize(*fresh(), opt_level="O2", dtype=torch.float16, verbosity=0)
    assert repr(amp.GradScaler(init_loss_scaling=8.0)) == "GradScaler(enable=True, scale=8, overflows=0)"
    cast = amp.auto_cast(level="O2", dtype="float16", device_type="cpu")
    assert repr(cast) == "auto_cast(enable=True, level='O2', dtype=torch.float16, device_type=('cpu',))"
    assert repr(amp.scale_loss(torch.ones(()), optim)) == "<amp.scale_loss block for 1 optimizer, loss scaler 0>"
    found = repr([halfstep.watch(optim, every=2), halfstep.numerics.Monitor(nn.Linear(2, 2), optim, every=7)])
    assert re.fullmatch(
        r"\[Watch\(.*, every=2, steps=0, lost=None\), Monitor\(Linear, .*, every=7, .*, steps=0\)]", found
    )
    assert halfstep.Diagnosis([], 3)._repr_html_() == "<pre>halfstep.diagnose: nothing found in 3 steps</pre>"
