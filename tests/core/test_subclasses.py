"""Classes of users get subclasses, which live no longer than what has them."""

from __future__ import annotations

import abc
import copy
import gc
import types
import weakref
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch
from torch import nn

from halfstep import amp
from halfstep.torch_internals.subclasses import Mixin, subclass_with, superclass_of
from tests.support.worlds import scaled_step, with_optimizer


def classes() -> tuple[Any, Any]:
    """A model and an optimizer with public methods, as a cell of a notebook makes them."""

    class Network(nn.Linear):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self(x)  # type: ignore[no-any-return]

    class Descent(torch.optim.SGD):
        def look_ahead(self) -> None:
            """Something of its own."""

    return Network, Descent


@pytest.mark.parametrize("steps_hooked", [True, False])
def test_classes_made_in_a_function_go_with_their_instances(steps_hooked: bool) -> None:
    def train() -> list[Any]:
        network, descent = classes()
        model, optimizer = network(4, 2), descent([nn.Parameter(torch.ones(2))], lr=0.1)
        optimizer.add_param_group({"params": model.parameters()})
        if not steps_hooked:
            optimizer.step = lambda: None
        amp.initialize(model, optimizer, opt_level="O2", dtype="bfloat16", verbosity=0)
        assert type(model) is not network
        assert type(optimizer) is not descent
        assert isinstance(copy.deepcopy(model), network)
        return [weakref.ref(cls) for cls in (network, descent, type(model), type(optimizer))]

    refs = train()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


class Stepping(Protocol):
    """A protocol that is a base."""


class Slotted:
    """A base without a dict."""

    __slots__ = ()


BASES: dict[str, Any] = {"ABC": abc.ABC, "Generic": Generic[TypeVar("T")], "Protocol": Stepping, "__slots__": Slotted}


@pytest.mark.parametrize("first", BASES)
def test_another_base_may_come_before_that_of_torch(first: str) -> None:
    """Python refuses to set a class whose instances have another layout, and the first base decides on that."""
    network, descent = (types.new_class(cls.__name__, (BASES[first], cls)) for cls in classes())
    model, optimizer = with_optimizer(network(4, 2), descent, lr=0.1)
    amp.initialize(model, optimizer, opt_level="O2", dtype="bfloat16", verbosity=0)
    before = model.weight.detach().clone()
    scaled_step(model.features(torch.ones(2, 4)).float().sum(), optimizer)
    assert not torch.equal(model.weight, before)
    assert isinstance(model, network)
    assert isinstance(optimizer, descent)
    assert not optimizer.step_was_skipped


class Greeting(Mixin):
    """Methods that go before those of a class."""

    def name(self) -> str:
        return f"our {super().name()}"  # type: ignore[misc]


class Theirs:
    """A class of a user's, who keeps a register of those below it."""

    register: list[type] = []  # noqa: RUF012

    def __init_subclass__(cls) -> None:
        cls.register.append(cls)

    def name(self) -> str:
        return "name"


def test_two_instances_have_one_subclass_while_it_lives() -> None:
    first, again = subclass_with(Greeting, Theirs, {}), subclass_with(Greeting, Theirs, {})
    assert first is again
    assert first().name() == "our name"
    assert (first.__name__, first.__qualname__, first.__module__, first.__doc__) == (
        Theirs.__name__, Theirs.__qualname__, Theirs.__module__, Theirs.__doc__,
    )  # fmt: skip
    assert superclass_of(first, Greeting) is Theirs
    assert superclass_of(Theirs, Greeting) is Theirs
    assert first not in Theirs.register
    base: Any = type("Base", (Theirs,), {})
    kid = type("Kid", (base,), {})
    assert subclass_with(Greeting, base, {}) is not kid


class Loud:
    """What a user adds to a class."""


def test_a_class_that_a_user_makes_below_is_the_users() -> None:
    made = subclass_with(Greeting, Theirs, {})
    for theirs in (type("Kid", (made,), {}), type("Mixed", (made, Loud), {})):
        assert superclass_of(theirs, Greeting) is theirs


@pytest.mark.parametrize("more", [(), (Loud,)])
def test_a_model_that_is_given_a_class_below_its_own_is_copied(more: tuple[type, ...]) -> None:
    model = classes()[0](4, 2)
    amp.initialize(model, opt_level="O2", dtype="bfloat16", verbosity=0)
    model.__class__ = type("Louder", (type(model), *more), {})
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    assert torch.equal(twin(torch.ones(1, 4)), model(torch.ones(1, 4)))


class Old:
    """A base of a class that looks for it in the way of Python 2."""

    def __init__(self) -> None:
        self.calls = 0

    def name(self) -> str:
        return "old"


class ByClass(Old):
    def name(self) -> str:
        self.calls += 1
        return f"by class, {super(self.__class__, self).name()}"


def test_super_of_the_own_class_finds_the_class_above() -> None:
    made = subclass_with(Greeting, ByClass, {})
    instance = ByClass()
    instance.__class__ = made
    assert instance.name() == "our by class, old"
    assert instance.calls == 1
    assert type(instance) is made
    assert instance.__class__ is ByClass
    assert isinstance(instance, ByClass)
    assert isinstance(instance, Greeting)
    instance.__class__ = type("Below", (made,), {"name": Greeting.name})
    assert instance.__class__ is type(instance)
    instance.__class__ = ByClass
    assert type(instance) is ByClass
    assert "__class__" not in vars(subclass_with(Greeting, Theirs, {}))


def test_a_model_may_look_for_the_class_above_so() -> None:
    class Network(nn.Linear):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return super(self.__class__, self).forward(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super(self.__class__, self).forward(x).relu()

    model = Network(4, 2)
    amp.initialize(model, opt_level="O2", dtype="bfloat16", verbosity=0)
    assert type(model) is not Network
    for each in (model, copy.deepcopy(model)):
        assert torch.equal(each(torch.ones(1, 4)), each.features(torch.ones(1, 4)).relu().float())
        assert each.__class__ is Network
