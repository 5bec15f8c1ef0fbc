"""What ``amp.decorate`` refuses, as Paddle was recorded to, and that nothing has changed then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, HalfstepError, UsageError
from halfstep.stepping.attached import attached_to
from tests.support.apex_recording import golden
from tests.support.worlds import FP32

ERRORS = golden("paddle_decorate")["errors"]


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


# Argument as recorded -> what we are given, and where ours differs.
BAD = {
    "level='O0'": ({"level": "O0"}, ArgumentValueError),
    "level='OD'": ({"level": "OD"}, ArgumentValueError),
    "level='o2'": ({"level": "o2"}, ArgumentValueError),
    "level='O3'": ({"level": "O3"}, ArgumentValueError),
    "dtype='float32'": ({"dtype": "float32"}, ArgumentValueError),
    "models='x'": ({"models": "x"}, ArgumentTypeError),
    "models=(tuple of layers)": ({"models": (nn.Linear(2, 2),)}, ArgumentTypeError),
    "models=[layer, 'x']": ({"models": [nn.Linear(2, 2), "x"]}, ArgumentTypeError),
    "optimizers=['x']": ({"optimizers": ["x"]}, ArgumentTypeError),
    "save_dtype='int8'": ({"save_dtype": "int8"}, ArgumentValueError),
    "excluded_layers=3": ({"excluded_layers": 3}, ArgumentTypeError),
    "excluded_layers=[3]": ({"excluded_layers": [3]}, ArgumentTypeError),
}
NOT_REFUSED = {
    "excluded_layers=(nn.Linear,)": "a tuple is as good as a list",
    "DataParallel first": "has a test of its own",
    "O1 returns the same objects": "is no refusal",
    "O2 returns the same object": "is no refusal",
}


def test_every_recorded_refusal_is_here() -> None:
    assert set(ERRORS) == set(BAD) | set(NOT_REFUSED)


def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    return (
        all(p.dtype is FP32 and p.grad_dtype is FP32 for p in model.parameters())
        and not any(m._state_dict_hooks or m._forward_pre_hooks or m._forward_hooks for m in model.modules())
        and attached_to(optimizer) is None
        and [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    )


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_as_recorded(name: str) -> None:
    options, error = BAD[name]
    model, optimizer = pair()
    arguments = {"models": model, "optimizers": optimizer, "level": "O2", **options}
    assert ERRORS[name]["raises"] in {base.__name__ for base in error.__mro__}
    with pytest.raises(error) as raised:
        amp.decorate(**arguments)
    assert isinstance(raised.value, HalfstepError)
    assert unchanged(model, optimizer)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"level": "O3"}, ArgumentValueError, r"level='O3' should be O1 or O2"),
        ({"level": None}, ArgumentValueError, r"level=None should be O1 or O2"),
        ({"dtype": "int8"}, ArgumentValueError, r"dtype='int8', but dtype can only be float16, bfloat16\."),
        ({"dtype": torch.float64}, ArgumentValueError, r"dtype can only be float16, bfloat16\."),
        ({"dtype": 16}, ArgumentTypeError, r"dtype must be a torch\.dtype or its name, not 16"),
        ({"save_dtype": "int8"}, ArgumentValueError, r"save_dtype can only be float16, bfloat16, float32, float64\."),
        ({"optimizers": "x"}, ArgumentTypeError, r"optimizers must be either a single optimizer .*, not str\."),
        ({"models": [3]}, ArgumentTypeError, r"models must be either .*, not list with an item of type int\."),
        ({"master_weight": "no"}, ArgumentTypeError, r"master_weight='no' must be True, False or None"),
        ({"master_weight": 0}, ArgumentTypeError, r"master_weight=0 must be True, False or None"),
        ({"master_grad": None}, ArgumentTypeError, r"master_grad=None must be True or False"),
        ({"master_grad": True, "master_weight": False}, UsageError, r"leave out master_weight=False"),
        ({"excluded_layers": "fc"}, ArgumentTypeError, r"excluded_layers must be .*; 'fc' is neither\."),
        ({"excluded_layers": [nn.Linear, int]}, ArgumentTypeError, r"<class 'int'> is neither\."),
        ({"module_filter": lambda m, n: "int8" if n == "1" else None}, ArgumentValueError, r"dtype='int8'"),
    ],
)
def test_bad_arguments_leave_everything_unchanged(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    model, optimizer = pair()
    with pytest.raises(error, match=message):
        amp.decorate(**{"models": model, "optimizers": optimizer, "level": "O2", **options})
    assert unchanged(model, optimizer)


@pytest.mark.parametrize("twice", ["model", "optimizer"])
def test_the_same_twice_in_a_list(twice: str) -> None:
    model, optimizer = pair()
    models, optimizers = ([model, model], optimizer) if twice == "model" else (model, [optimizer, optimizer])
    with pytest.raises(UsageError, match=r"in the list twice; amp\.decorate takes each once"):
        amp.decorate(models, optimizers, level="O2")
    assert unchanged(model, optimizer)


def test_an_optimizer_only_once() -> None:
    _, optimizer = amp.decorate(*pair(), level="O2")
    other, fresh = pair()
    for again in (optimizer, [fresh, optimizer]):
        with pytest.raises(UsageError, match=r"This SGD has been through .* once, and once is all it can; make a new"):
            amp.decorate(other, again, level="O2")
        assert unchanged(other, fresh)
    with pytest.raises(UsageError, match="make a new optimizer"):
        amp.initialize(nn.Linear(2, 2), optimizer, opt_level="O2", verbosity=0)


def test_the_parallel_wrapper_comes_after() -> None:
    assert ERRORS["DataParallel first"]["result"]["raises"] == "RuntimeError"
    # A real one needs a process group; the class is what is looked at.
    ddp = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(ddp)
    for wrapped in (nn.DataParallel(nn.Linear(2, 2)), ddp):
        model, optimizer = pair()
        expected = (
            r"first call amp\.decorate\(\) on the original model, and then wrap what it returns in "
            rf"{type(wrapped).__name__}\."
        )
        with pytest.raises(UsageError, match=expected):
            amp.decorate([model, wrapped], optimizer, level="O2")
        assert unchanged(model, optimizer)
