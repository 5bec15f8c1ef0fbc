"""What type checkers know of ``amp.initialize`` and ``amp.decorate``: they return what they were given.

`make lint` runs mypy on this file. There an unused ``type: ignore`` is an error: the calls of the last test stay wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from typing_extensions import assert_type

from halfstep import amp
from halfstep.core.errors import ArgumentTypeError
from halfstep.optimizers import LARC


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


def sgd(*models: nn.Module) -> SGD:
    params: Iterable[nn.Parameter] = [p for model in models for p in model.parameters()]
    return SGD(params, lr=0.1)


def test_a_model_alone() -> None:
    model = linear()
    assert assert_type(amp.initialize(model, opt_level="O1", verbosity=0), nn.Linear) is model
    other = linear()
    assert assert_type(amp.decorate(other, level="O2"), nn.Linear) is other


def test_a_model_and_an_optimizer() -> None:
    model = linear()
    optimizer = sgd(model)
    given = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    assert assert_type(given, tuple[nn.Linear, SGD]) == (model, optimizer)
    other = linear()
    decorated = amp.decorate(other, sgd(other), level="O2", excluded_layers=nn.Linear)
    assert assert_type(decorated, tuple[nn.Linear, SGD])[0] is other


def test_lists() -> None:
    models = [linear(), linear()]
    given = amp.initialize(models, [sgd(*models)], opt_level="O2", verbosity=0)
    assert assert_type(given, tuple[list[nn.Linear], list[SGD]])[0] == models
    others = [linear(), linear()]
    assert assert_type(amp.decorate(others, level="O2", excluded_layers=["", others[0]]), list[nn.Linear])
    assert others[0].weight.dtype is torch.float32
    several = [linear(), linear()]
    mixed = amp.decorate(several, Adam(several[0].parameters()), level="O1")
    assert assert_type(mixed, tuple[list[nn.Linear], Adam])[0] == several


def test_a_larc() -> None:
    model = linear()
    given = amp.initialize(model, LARC(sgd(model)), opt_level="O2", verbosity=0)
    assert isinstance(assert_type(given, tuple[nn.Linear, LARC])[1], LARC)


def test_what_is_wrong_at_run_time_is_wrong_to_a_type_checker() -> None:
    model = linear()
    with pytest.raises(ArgumentTypeError, match="models must be"):
        amp.initialize((model,), opt_level="O1")  # type: ignore[call-overload]
    with pytest.raises(ArgumentTypeError, match="optimizers must be"):
        amp.initialize(model, model.parameters())  # type: ignore[call-overload]
    with pytest.raises(ArgumentTypeError, match="optimizers must be"):
        amp.decorate(model, (sgd(model),))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="opt_levle"):
        amp.initialize(model, opt_levle="O1")  # type: ignore[call-overload]
