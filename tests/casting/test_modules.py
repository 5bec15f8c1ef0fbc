"""What hangs on a module: casts of weights, arguments and results, what is saved and loaded, and how all of it goes."""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from halfstep import amp
from halfstep.casting import saved as saving
from halfstep.casting.containers import cast_tree, map_tensors, tensors_in
from halfstep.casting.modules import ModuleHooks, add_hooks, cast_module, device_types, has_casting, remove_hooks
from halfstep.casting.scope import OpCasting, begin_session, deactivate, end_session, moved_to, session_casting
from halfstep.core.errors import UsageError
from halfstep.parameters import held_masters
from tests.support.worlds import BF16, FP16, FP32, FP64, advance, start_amp, unscaled_step, with_optimizer

# ---- containers


class Pair(NamedTuple):
    x: Any
    n: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Any
    label: str = "cat"


class Bag(dict[str, Any]):
    """A dict with a constructor of its own."""

    def __init__(self, x: Any, *, owner: str) -> None:
        super().__init__(x=x)
        self.owner = owner


class Box:
    """Not a container, and asked to convert itself."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def to(self, dtype: torch.dtype) -> Box:
        return Box(self.value.to(dtype))


CONTAINERS: dict[str, Any] = {
    "list": (lambda x: [x, 1], lambda c: c[0]),
    "tuple": (lambda x: (x, "s"), lambda c: c[0]),
    "named tuple": (lambda x: Pair(x, 3), lambda c: c.x),
    "dict": (lambda x: {"x": x, "n": None}, lambda c: c["x"]),
    "ordered dict": (lambda x: collections.OrderedDict(x=x), lambda c: c["x"]),
    "default dict": (lambda x: collections.defaultdict(list, x=x), lambda c: c["x"]),
    "a dict's own subclass": (lambda x: Bag(x, owner="me"), lambda c: c["x"]),
    "mapping proxy": (lambda x: types.MappingProxyType({"x": x}), lambda c: c["x"]),
    "set": (lambda x: {x}, lambda c: next(iter(c))),
    "frozen set": (lambda x: frozenset([x]), lambda c: next(iter(c))),
    "data class": (lambda x: Sample(x), lambda c: c.x),
    "packed sequence": (lambda x: pack_sequence([x]), lambda c: c.data),
    "its own": (Box, lambda c: c.value),
    "nest": (lambda x: [{"deep": (x,)}], lambda c: c[0]["deep"][0]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_is_cast_and_keeps_its_type(kind: str) -> None:
    make, get = CONTAINERS[kind]
    value = make(torch.ones(2))
    cast = cast_tree(value, BF16)
    assert type(cast) is type(value)
    assert getattr(cast, "owner", "me") == "me"
    assert (get(cast).dtype, get(value).dtype) == (BF16, FP32), "and the one that was given stays as it is"


@pytest.mark.parametrize("kind", [kind for kind in CONTAINERS if kind != "its own"])
def test_a_container_without_anything_to_cast_is_the_same_object(kind: str) -> None:
    make, _ = CONTAINERS[kind]
    for dtype in (BF16, torch.int64):
        value = make(torch.ones(2).to(dtype))
        assert cast_tree(value, BF16) is value


@pytest.mark.parametrize(
    "value", [None, "text", b"bytes", 3, 1.5, 2j, nn.Linear(1, 1), torch.Tensor, object()], ids=str
)
def test_anything_else_passes(value: object) -> None:
    assert cast_tree(value, BF16) is value


class Filling(nn.Linear):
    """Puts its output into what it is given."""

    def forward(self, given: Any, put: Callable[[Any, torch.Tensor], Any]) -> torch.Tensor:  # type: ignore[override]
        put(given, y := super().forward(torch.ones(2, dtype=BF16)))
        return y


PUTS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "list": lambda c, y: c.append(y),
    "dict": lambda c, y: c.update(y=y),
    "ordered dict": lambda c, y: c.update(y=y),
    "data class": lambda c, y: vars(c).update(y=y),
    "nest": lambda c, y: c[0].update(y=y),
}


@pytest.mark.parametrize("kind", PUTS)
def test_what_a_model_puts_into_a_container_is_in_the_one_that_was_given(kind: str) -> None:
    make, get = CONTAINERS[kind]
    given = make(x := torch.ones(2))
    model = amp.initialize(Filling(2, 2), opt_level="O2", dtype="bfloat16", verbosity=0)
    y = model(given, PUTS[kind])
    items = given[0] if kind == "nest" else given
    put = items[-1] if kind == "list" else vars(items)["y"] if kind == "data class" else items["y"]
    assert torch.equal(put.float(), y)
    assert get(given) is x


def test_tensors_are_found_and_replaced_in_nests() -> None:
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    nest = [a, {"b": (b, "text")}, Pair(c, 3)]
    assert [id(t) for t in tensors_in(nest, 5)] == [id(a), id(b), id(c)]
    found = map_tensors(lambda t: t.numel(), nest)
    assert found == [1, {"b": (1, "text")}, Pair(2, 3)]
    assert type(found[2]) is Pair


# ---- weights


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.linear(x)))


def test_a_model_is_cast_but_for_what_is_kept() -> None:
    model = Net()
    model.linear.weight.grad = torch.ones(4, 4)
    model.linear.bias = model.norm.bias  # what is shared with a kept module stays
    before = model.linear.weight
    cast_module(model, BF16, keep=lambda module: isinstance(module, nn.BatchNorm1d))
    assert model.linear.weight is before
    assert (before.dtype, before.grad.dtype) == (BF16, BF16)
    assert (model.norm.weight.dtype, model.norm.running_mean.dtype, model.linear.bias.dtype) == (FP32, FP32, FP32)
    assert (model.head.weight.dtype, model.count.dtype) == (BF16, torch.int64)


def test_a_probe_that_is_gone_is_not_missed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cast_module(model, BF16)
    model[0] = nn.Identity()
    assert model(torch.ones(1, 4, dtype=BF16)).dtype is BF16


# ---- hooks


def test_hooks_are_put_on_and_taken_off() -> None:
    model, calls = Net(), []
    model.register_forward_hook(lambda *_: calls.append("user"))
    add_hooks(model, inputs=FP64, outputs=FP16, saved=FP64, casting=OpCasting(BF16))
    cast_module(model, FP64)
    assert model(torch.ones(3, 4)).dtype is FP16
    assert has_casting(model)
    assert model.state_dict()["linear.weight"].dtype is FP64
    model.to(FP32)
    remove_hooks(model)
    assert not has_casting(model)
    assert model(torch.ones(3, 4)).dtype is FP32
    assert model.state_dict()["linear.weight"].dtype is FP32
    assert calls == ["user", "user"], "what the user hung on it stays"


def test_no_hook_that_was_not_asked_for() -> None:
    model = Net()
    add_hooks(model)
    assert [len(h) for h in (model._forward_pre_hooks, model._forward_hooks, model._state_dict_hooks)] == [0, 0, 0]


def test_a_copy_saves_its_own_values_and_the_model_those_of_its_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2, bias=False)
    model.register_parameter("none", None)
    model.register_buffer("hidden", torch.ones(1), persistent=False)
    add_hooks(model, saved=FP32)
    cast_module(model, BF16)
    master = torch.full((2, 2), 1.0 + 2.0**-12)
    written: list[torch.Tensor] = []

    def write_master(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
        if param is not model.weight:
            return None
        written.append(value)
        return value.to(BF16)

    monkeypatch.setattr(saving, "master_of", lambda t: master if t is model.weight else None)
    monkeypatch.setattr(saving, "write_master", write_master)
    saved, copied = model.state_dict(), copy.deepcopy(model).state_dict()
    assert saved.keys() == copied.keys() == {"weight"}
    assert torch.equal(saved["weight"], master)
    assert copied["weight"].dtype is BF16
    loaded = {"weight": torch.full((2, 2), 3.0 + 2.0**-12)}
    model.load_state_dict(loaded)
    assert [torch.equal(value, loaded["weight"]) for value in written] == [True]
    assert model.weight.tolist() == [[3.0, 3.0]] * 2
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({"weight": torch.ones(3, 3)})
    assert len(written) == 1, "what does not fit is not written to the master"
    assert held_masters.master_of(model.weight) is None


def test_a_model_is_exempted_once_and_nothing_else_is() -> None:
    model = amp.exempt(amp.exempt(Net()))
    assert len(model._forward_pre_hooks) == 1
    assert has_casting(model, explicit=True)
    assert not has_casting(model)
    with amp.auto_cast(dtype=BF16):
        assert model(torch.ones(3, 4)).dtype is FP32


# ---- devices


def test_the_devices_of_models() -> None:
    assert device_types([nn.Identity()]) is None
    assert device_types([nn.Linear(1, 1), nn.Linear(1, 1, device="meta")]) == {"cpu", "meta"}


def test_a_model_that_has_not_moved_keeps_its_casting_whatever_it_is_given() -> None:
    model, casting = nn.Linear(4, 4), OpCasting(BF16, devices=["cpu"])
    hook = ModuleHooks(casting)
    for module in (model, nn.Identity()):
        hook._follow(module, (torch.empty(4, device="meta"),), casting)
        assert hook.casting is casting
    hook._follow(nn.Linear(4, 4, device="meta"), (torch.empty(4, device="meta"),), casting)
    assert hook.casting.devices == ("cpu", "meta")


def test_only_the_session_of_the_moved_model_follows_it() -> None:
    one, two = (OpCasting(BF16, devices=["cpu"]) for _ in range(2))
    for casting in (one, two):
        begin_session(casting)
    try:
        new = moved_to("cuda", one)
        assert new.devices == ("cpu", "cuda")
        assert session_casting() is two
        end_session(two)
        assert session_casting() is new
    finally:
        deactivate()


class Frozen(torch.Tensor):
    """Keeps its dtype in a cast, as the int8 weights of torchao do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.to else super().__torch_function__(func, types, args, kwargs or {})


def test_a_weight_that_no_cast_changes_is_not_the_one_that_is_checked() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(torch.ones(4, 4).as_subclass(Frozen), requires_grad=False)
    model = amp.initialize(model, opt_level="O2", dtype="bfloat16", verbosity=0)
    assert (model[0].weight.dtype, model(torch.ones(2, 4)).dtype) == (FP32, FP32)
    with pytest.raises(UsageError, match=r"The weight 1\.weight was cast to bfloat16"):
        model.float()(torch.ones(2, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrap", [lambda w: w, nn.Parameter], ids=["tensors", "parameters"])
def test_functional_call_with_fp32_weights_is_named_and_the_advice_works(dtype: torch.dtype, wrap: Any) -> None:
    model: Any = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model = amp.initialize(model, opt_level="O2", dtype=dtype, verbosity=0, cast_ops=False)
    weights = {name: wrap(p.detach().float()).requires_grad_() for name, p in model.named_parameters()}
    with pytest.raises(UsageError, match=r"functional_call got 0\.weight in float32") as raised:
        torch.func.functional_call(model, weights, (torch.ones(1, 4),))
    assert "model.float()" not in str(raised.value)
    weights_of = {name: w.to(model.get_parameter(name).dtype) for name, w in weights.items()}
    torch.func.functional_call(model, weights_of, (torch.ones(1, 4),)).sum().backward()
    assert all(w.grad is not None and w.grad.dtype is torch.float32 for w in weights.values())
    assert model(torch.ones(1, 4)).dtype is torch.float32  # the model is as it was


def test_a_load_that_would_swap_some_masters_loads_nothing() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model, _optimizer = start_amp(model, torch.optim.SGD, "O2", dtype=BF16, lr=0.1)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with pytest.raises(UsageError, match="Nothing was loaded"):
            model.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert torch.equal(model[0].weight, torch.ones(2))


class Solver(nn.Module):
    """A model with a part in float64, as physics has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(12, 16), nn.Linear(8, 4)
        self.exact = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.exact(self.first(x).double()).float())
        return y


@pytest.mark.parametrize("half", [BF16, FP16], ids=str)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_part_in_float64_stays_so(level: str, half: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 16 * 12).reshape(16, 12)
    losses: list[list[float]] = []
    for train in (unscaled_step, advance):
        model, optimizer = with_optimizer(Solver(), torch.optim.SGD, lr=0.05, momentum=0.9)
        if train is advance:
            options: dict[str, Any] = {} if level == "O0" else {"dtype": half}
            amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0, **options)
        losses.append([])
        for _ in range(8):
            loss = (model(x).float() - 1.0).square().mean()
            train(loss, optimizer)
            losses[-1].append(loss.item())
    assert {t.dtype for t in model.exact.state_dict().values() if t.is_floating_point()} == {FP64}
    assert {p.dtype for p in model.exact.parameters()} == {FP64}
    saved = copy.deepcopy(model.state_dict())
    assert torch.equal(saved["exact.0.weight"], model.exact[0].weight)
    torch.testing.assert_close(*losses, rtol=3e-2, atol=2e-2)


def test_a_model_in_float64_is_cast_as_a_whole() -> None:
    model = Solver().double()
    amp.initialize(model, opt_level="O3", dtype=BF16, verbosity=0)
    assert {p.dtype for p in model.parameters()} == {BF16}
