"""``fuse`` and ``unfuse``: what they make is torch's optimizer to everybody else, whatever its class and settings."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfstep import amp, optimizers
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from halfstep.optimizers import can_fuse, fuse, unfuse
from tests.support.backends import skip_without_compiler
from tests.support.python import python
from tests.support.worlds import BF16, FP16, FP32, close, read_back

OURS = {
    torch.optim.Adam: optimizers.FusedAdam,
    torch.optim.AdamW: optimizers.FusedAdam,
    torch.optim.SGD: optimizers.FusedSGD,
    torch.optim.Adagrad: optimizers.FusedAdagrad,
}
CLASSES = list(OURS)
TABLE: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adam, {}),
    (torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-3}),
    (torch.optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"weight_decay": 0.3, "amsgrad": True}),
    (torch.optim.AdamW, {"maximize": True, "foreach": True}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.02), "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": torch.tensor([0.02]), "fused": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "fused": True}),
    (torch.optim.SGD, {"momentum": 0.9, "lr": torch.tensor([0.02])}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1, "foreach": False}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5, "eps": 1e-3, "maximize": True}),
    (torch.optim.Adagrad, {"lr": torch.tensor(0.02)}),
]


def case_name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else ",".join(f"{k}={v}" for k, v in value.items()) or "defaults"


OF_OURS = {"bias_correction": False, "adagrad_w_mode": True, "wd_after_momentum": True, "use_muon": False}
"""Hyperparameters of ``FusedAdam`` and others, which a loaded state brings into groups of torch's classes."""

table = pytest.mark.parametrize(("cls", "settings"), TABLE, ids=case_name)
every_class = pytest.mark.parametrize("cls", CLASSES, ids=case_name)


def weights(seed: int = 1, dtype: torch.dtype = FP32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((3, 4), (), (17,))]


def make(cls: Any, params: Any, **settings: Any) -> Any:
    return cls(params, **{"lr": 0.02, **copy.deepcopy(settings)})


def train(optim: Any, steps: int, seed: int = 2) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optim.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optim.step()


def shape_of(saved: dict[str, Any]) -> Any:
    """What a checkpoint holds: the groups as they are, and of the state, names, shapes and dtypes."""
    state = {
        i: {name: (value.shape, value.dtype) for name, value in kept.items() if name != "params"}
        for i, kept in saved["state"].items()
    }
    return saved["param_groups"], state


# ---- one of torch's


@table
def test_numbers_groups_and_state_are_torchs(cls: Any, settings: dict[str, Any]) -> None:
    ours, theirs = weights(), weights()
    a, b = fuse(make(cls, ours, **settings)), make(cls, theirs, **settings)
    train(a, 10)
    train(b, 10)
    close(ours, theirs)
    if settings.get("dampening"):
        for kept in a.state_dict()["state"].values():
            assert kept["step"] == 10
        unfuse(a)
    assert a.defaults == b.defaults
    assert shape_of(a.state_dict()) == shape_of(b.state_dict())
    torch.testing.assert_close([a.state[p] for p in ours], [b.state[q] for q in theirs], rtol=1e-5, atol=1e-6)


@every_class
def test_is_what_it_was_and_ours(cls: Any) -> None:
    optim = fuse(make(cls, weights()))
    assert isinstance(optim, cls)
    assert isinstance(optim, OURS[cls])
    assert isinstance(optim, torch.optim.AdamW) == (cls is torch.optim.AdamW)
    assert type(optim).__name__ == cls.__name__
    assert repr(optim) == repr(make(cls, weights()))
    assert inspect.signature(type(optim)) == inspect.signature(cls)


@every_class
def test_another_one_of_its_class(cls: Any) -> None:
    """Frameworks make optimizers anew from the class of one."""
    ours, theirs = weights(), weights()
    a = type(fuse(make(cls, weights())))(ours, lr=0.1, weight_decay=0.1)
    a.param_groups[0].update(OF_OURS)
    b = cls(theirs, lr=0.1, weight_decay=0.1)
    train(a, 3)
    train(b, 3)
    close(ours, theirs)


def test_decoupled_is_for_each_group_to_say() -> None:
    def grouped(params: list[nn.Parameter]) -> Any:
        groups = [{"params": params[:1], "decoupled_weight_decay": True}, {"params": params[1:]}]
        return torch.optim.Adam(groups, lr=0.02, weight_decay=0.5)

    ours, theirs = weights(), weights()
    a, b = fuse(grouped(ours)), grouped(theirs)
    train(a, 10)
    train(b, 10)
    close(ours, theirs)


@table
def test_groups_added_later(cls: Any, settings: dict[str, Any]) -> None:
    if cls is torch.optim.Adagrad and torch.__version__ < (2, 12):
        pytest.skip("Adagrad of torch 2.11 has no state for groups that are added later")
    both = []
    for is_fused in (True, False):
        first, second = weights(), weights(3)
        optim = make(cls, first, **settings)
        if is_fused:
            fuse(optim)
        train(optim, 2)
        optim.add_param_group({"params": second, "weight_decay": 0.2})
        train(optim, 3)
        both.append((first + second, [{**g, "params": None} for g in optim.param_groups]))
    (ours, groups), (theirs, their_groups) = both
    close(ours, theirs)
    assert groups == their_groups


# ---- checkpoints, copies


@table
@pytest.mark.parametrize("way", ["from torch", "to torch", "ours"])
def test_checkpoints_go_both_ways(cls: Any, settings: dict[str, Any], way: str) -> None:
    straight, first, second = weights(), weights(), weights()
    reference = make(cls, straight, **settings)
    train(reference, 5)
    train(reference, 5, seed=3)
    a, b = make(cls, first, **settings), make(cls, second, **settings)
    for optim, fused in ((a, way != "from torch"), (b, way != "to torch")):
        if fused:
            fuse(optim)
    train(a, 5)
    a.state["note"] = 0  # type: ignore[index,assignment]  # as hooks write them
    saved, values = read_back([a.state_dict(), [p.data for p in first]])
    for p, value in zip(second, values, strict=True):
        p.data.copy_(value)
    b.load_state_dict(saved)
    assert b.state.pop("note") == 0  # type: ignore[call-overload]
    assert [{**g, "params": None} for g in b.param_groups] == [{**g, "params": None} for g in reference.param_groups]
    train(b, 5, seed=3)
    close(second, straight, 16)


@table
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_step_on_their_own(cls: Any, settings: dict[str, Any], way: Callable[..., Any]) -> None:
    params, theirs = weights(), weights()
    optim, reference = fuse(make(cls, params, **settings), max_grad_norm=1.0), make(cls, theirs, **settings)
    train(optim, 3)
    optim.state["note"] = 0  # type: ignore[index,assignment]
    before = [p.detach().clone() for p in params]
    copied = way(optim)
    assert copied.state["note"] == 0
    assert type(copied) is type(optim)
    assert copied.options == optim.options
    assert copied.defaults == optim.defaults == reference.defaults
    train(copied, 3, seed=3)
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    train(optim, 3, seed=3)
    for p, q in zip(params, copied.param_groups[0]["params"], strict=True):
        assert p is not q
        assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@every_class
def test_masters_go_through_checkpoints_and_not_through_torch(cls: Any, dtype: torch.dtype) -> None:
    def fused() -> tuple[list[nn.Parameter], Any]:
        params = weights(dtype=dtype)
        return params, fuse(make(cls, params, lr=1e-3), master_weights=True)

    (params, optim), (again, resumed), (late, back) = fused(), fused(), fused()
    train(optim, 3)
    saved = copy.deepcopy(optim.state_dict())
    plain = make(cls, weights(dtype=dtype), lr=1e-3)
    plain.load_state_dict(copy.deepcopy(saved))
    with torch.no_grad():
        for p, q, r, s in zip(params, again, late, plain.param_groups[0]["params"], strict=True):
            q.copy_(p)
            s.copy_(p)
            r.fill_(3.0)
    resumed.load_state_dict(saved)
    train(optim, 3, seed=3)
    train(resumed, 3, seed=3)
    assert all(torch.equal(p, q) for p, q in zip(params, again, strict=True))
    train(plain, 3, seed=3)  # its masters are stale now, and in 16 bits
    back.load_state_dict(plain.state_dict())
    assert not {"master", "remainder"} & set().union(*back.state.values())
    train(back, 1)
    assert all((p - 3.0).abs().max() < 0.1 for p in late)
    fuse(plain, master_weights=True)
    assert not {"master", "remainder"} & set().union(*plain.state.values())
    train(plain, 1)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@every_class
def test_a_master_from_before_the_first_step(cls: Any, way: Callable[..., Any]) -> None:
    params = [nn.Parameter(torch.full((4,), 1.0, dtype=FP16))]
    optim = fuse(make(cls, params, lr=0.0, weight_decay=0.0), master_weights=True)
    optim.state[params[0]]["master"] = torch.full((4,), 1.0 + 2**-20)
    optim = way(optim)
    (param,) = optim.param_groups[0]["params"]
    assert optim.state[param]["master"][0] == 1.0 + 2**-20
    bare = way(optim)
    (masters,) = unfuse(bare).values()
    assert masters[0] == 1.0 + 2**-20
    train(bare, 1)
    train(optim, 1)
    assert optim.state[param]["master"][0] == 1.0 + 2**-20


# ---- hooks and schedulers


@every_class
@pytest.mark.parametrize("direction", ["plain", "fused", "unfused"])
def test_hooks_run_once(cls: Any, direction: str) -> None:
    calls: list[str] = []
    optim = make(cls, weights())
    optim.register_step_pre_hook(lambda *_: calls.append("before"))
    optim.register_step_post_hook(lambda *_: calls.append("after"))
    optim.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    if direction != "plain":
        fuse(optim)
    if direction == "unfused":
        unfuse(optim)
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("everywhere"))
    try:
        train(optim, 1)
    finally:
        handle.remove()
    optim.state_dict()
    assert calls == ["before", "after", "everywhere", "saved"]


@pytest.mark.exhaustive
def test_hooks_run_once_where_torch_has_made_no_optimizer_of_the_class(tmp_path: Path) -> None:
    """torch puts its hooks around the step of a class when a process makes the first one: here, none is made."""
    optim = fuse(make(torch.optim.AdamW, weights()))
    for p in optim.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    (tmp_path / "optimizer").write_bytes(pickle.dumps(optim))
    program = """if True:
        import pickle, sys
        from halfstep.optimizers import fuse, unfuse
        optim = pickle.load(open(sys.argv[1], "rb"))
        optim.register_step_post_hook(lambda *_: print(type(optim).__module__))
        for change in (lambda _: None, unfuse, fuse):
            change(optim)
            for p in optim.param_groups[0]["params"]:
                p.grad = p.detach().clone()
            optim.step()
    """
    run = python("-c", program, str(tmp_path / "optimizer"))
    assert run.stdout.split() == ["halfstep.optimizers.fuse", "torch.optim.adamw", "halfstep.optimizers.fuse"]


@every_class
@pytest.mark.parametrize("made", ["before", "while fused"])
def test_schedulers_go_on_and_tell_of_a_wrong_order(cls: Any, made: str) -> None:
    lrs, ours, theirs = [], weights(), weights()
    for params, is_fused in ((ours, True), (theirs, False)):
        optim = make(cls, params)
        scheduler = None
        if made == "before":
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optim, 0.5)
        if is_fused:
            assert can_fuse(optim)
            fuse(optim)
        scheduler = scheduler or torch.optim.lr_scheduler.ExponentialLR(optim, 0.5)
        for step in range(6):
            train(optim, 1, seed=step)
            scheduler.step()
            if is_fused and step in (1, 4):
                unfuse(optim)
                assert type(optim) is cls
            if is_fused and step == 2:
                fuse(optim)
        lrs.append(optim.param_groups[0]["lr"])
    assert lrs[0] == lrs[1] < 0.001
    close(ours, theirs)
    optim = make(cls, weights())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optim, 0.5)
    fuse(optim)
    with pytest.warns(UserWarning, match=r"before `optimizer\.step"):
        scheduler.step()


def test_a_mark_holds_nothing_alive() -> None:
    gc.disable()
    try:
        optim = make(torch.optim.AdamW, weights())
        torch.optim.lr_scheduler.ExponentialLR(optim, 0.5)
        fuse(optim)
        gone = weakref.ref(optim)
        del optim
        assert gone() is None
    finally:
        gc.enable()


def test_bound_methods_outlive_unfuse() -> None:
    """``amp`` and others hold the ``step`` and ``zero_grad`` that they replaced."""
    ours, theirs = weights(), weights()
    optim, reference = fuse(make(torch.optim.AdamW, ours)), make(torch.optim.AdamW, theirs)
    step, zero_grad = optim.step, optim.zero_grad
    unfuse(optim)
    for p, q in zip(ours, theirs, strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    step()
    reference.step()
    zero_grad()
    assert all(p.grad is None for p in ours)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


# ---- unfuse


@table
def test_unfused_in_the_middle(cls: Any, settings: dict[str, Any]) -> None:
    ours, theirs = weights(), weights()
    a, b = make(cls, ours, **settings), make(cls, theirs, **settings)
    names = set(vars(b))
    fuse(a)
    for seed in range(4):
        assert unfuse(a) == {} if seed % 2 else fuse(a) is a if seed else True
        train(a, 3, seed)
        train(b, 3, seed)
    assert type(a) is cls
    assert set(vars(a)) <= names | {"_need_device_dtype_check_for_fused"}
    close(ours, theirs)
    assert shape_of(a.state_dict()) == shape_of(b.state_dict())
    assert all(kept["step"]._base is None for kept in a.state.values() if "step" in kept)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@every_class
def test_unfuse_hands_over_the_masters(cls: Any, dtype: torch.dtype) -> None:
    params, wide = [*weights(dtype=dtype), *weights(3)], [*weights(), *weights(3)]
    for p, q in zip(params, wide, strict=True):
        q.data.copy_(p.data)
    settings = {"lr": 1e-4, **({"momentum": 0.9} if cls is torch.optim.SGD else {})}
    optim, reference = fuse(make(cls, params, **settings), master_weights=True), make(cls, wide, **settings)
    for p, q in zip(params, wide, strict=True):
        p.grad = torch.ones_like(p)
        q.grad = torch.ones_like(q)
    optim.step()
    reference.step()
    masters = unfuse(optim)
    assert list(map(id, masters)) == list(map(id, params[:3]))
    for p, q in zip(params, wide, strict=True):
        value = masters.get(p, p)
        assert value.dtype is FP32
        assert not value.requires_grad or value is p
        torch.testing.assert_close(value.detach(), q.detach(), rtol=1e-6, atol=1e-6)
        assert optim.state[p].keys() == reference.state[q].keys()
        assert all(value.dtype is FP32 for value in optim.state[p].values())


def test_unfuse_without_masters_leaves_what_torch_steps_on() -> None:
    params = weights(dtype=BF16)
    optim = fuse(make(torch.optim.AdamW, params, lr=0.1, weight_decay=0.1), state_dtype=BF16)
    train(optim, 2)
    assert unfuse(optim) == {}
    assert {optim.state[p]["exp_avg_sq"].dtype for p in params} == {BF16}
    train(optim, 1)


def test_a_sparse_gradient_finds_nothing_changed() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Embedding(5, 3, sparse=True))
    optim = fuse(torch.optim.SGD(model.parameters(), lr=0.1))
    before = [p.detach().clone() for p in model.parameters()]
    model[0](torch.ones(3)).sum().backward()
    model[1](torch.tensor([1, 1])).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        optim.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    unfuse(optim)
    optim.step()
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_unfuse_takes_what_fuse_made() -> None:
    for cls in (torch.optim.AdamW, optimizers.FusedAdam):
        with pytest.raises(ArgumentTypeError, match="unfuse takes what fuse"):
            unfuse(make(cls, weights()))


def test_a_skipped_first_step_leaves_no_buffer() -> None:
    ours, theirs = weights(), weights()
    settings = {"momentum": 0.9, "dampening": 0.5}
    optim, reference = fuse(make(torch.optim.SGD, ours, **settings)), make(torch.optim.SGD, theirs, **settings)
    optim.found_inf = torch.ones(())
    train(optim, 1)
    del optim.found_inf
    unfuse(optim)
    train(optim, 2)
    train(reference, 2)
    close(ours, theirs)


# ---- what can be fused


def replaced_step(optim: Any) -> Any:
    optim.step = lambda *_: None
    return optim


def wrapped_after_a_scheduler(optim: Any) -> Any:
    torch.optim.lr_scheduler.ExponentialLR(optim, 0.5)
    inner = optim.step
    optim.step = functools.wraps(inner)(lambda *_: inner())  # has the scheduler's mark, too
    return optim


def with_a_sparse_gradient(optim: Any) -> Any:
    param = optim.param_groups[0]["params"][0]
    param.grad = torch.zeros_like(param).to_sparse()
    return optim


def under_amp(level: str) -> Any:
    model = nn.Linear(2, 2)
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=level, dtype=BF16, verbosity=0)[
        1
    ]


class Descendant(torch.optim.AdamW):
    pass


UNFIT: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "another class": (lambda: torch.optim.RMSprop(weights()), ArgumentTypeError, "not RMSprop"),
    "a subclass": (lambda: Descendant(weights()), ArgumentTypeError, "not Descendant"),
    "fused": (lambda: fuse(torch.optim.AdamW(weights())), ArgumentTypeError, "not AdamW that is fused already"),
    "ours": (lambda: optimizers.FusedAdam(weights()), ArgumentTypeError, "not FusedAdam that is fused already"),
    "differentiable": (lambda: torch.optim.Adam(weights(), differentiable=True), ArgumentValueError, "differentiable"),
    "complex": (lambda: torch.optim.SGD(weights(dtype=torch.complex64)), ArgumentTypeError, "torch.complex64"),
    "float8": (lambda: torch.optim.SGD(weights(dtype=torch.float8_e4m3fn)), ArgumentTypeError, "torch.float8_e4m3fn"),
    "sparse": (lambda: with_a_sparse_gradient(torch.optim.SGD(weights())), ArgumentValueError, "sparse"),
    "a replaced step": (lambda: replaced_step(torch.optim.SGD(weights())), ArgumentValueError, "has been replaced"),
    "a wrapped step": (
        lambda: wrapped_after_a_scheduler(torch.optim.SGD(weights())), ArgumentValueError, "has been replaced",
    ),
    "under amp": (lambda: under_amp("O2"), ArgumentTypeError, "fused already"),
    "under amp, not fused": (lambda: under_amp("O1"), ArgumentValueError, "fuse comes before amp.initialize"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_fused_stays_as_it_is(name: str) -> None:
    skip_without_compiler(name == "under amp")
    build, error, message = UNFIT[name]
    optim = build()
    before, attributes = type(optim), dict(vars(optim))
    assert not can_fuse(optim)
    with pytest.raises(error, match=message):
        fuse(optim)
    assert type(optim) is before
    assert vars(optim).keys() == attributes.keys()


@pytest.mark.parametrize("dtype", [torch.float64, FP32, BF16, FP16])
@every_class
def test_what_can_be_fused(cls: Any, dtype: torch.dtype) -> None:
    optim = make(cls, weights(dtype=dtype))
    assert can_fuse(optim)
    assert type(optim) is cls
    unfuse(fuse(optim))
    assert can_fuse(optim)


@every_class
def test_lost_updates_are_told_of_where_step_was_called(cls: Any) -> None:
    optim = fuse(make(cls, weights(dtype=BF16), lr=1e-6))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(optim, 2)
    assert [(str(w.message).split()[0], w.filename) for w in told] == [(cls.__name__, __file__)]
