"""What ``amp.decorate`` refuses, as Paddle was recorded to, and that nothing has changed then."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfstep import amp
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from halfstep.stepping.attached import attached_to
from tests.support.apex_recording import golden
from tests.support.worlds import FP32, with_optimizer

ERRORS = golden("paddle_decorate")["errors"]


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    return with_optimizer(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), torch.optim.SGD, lr=0.1)


# Argument as recorded -> what we are given, and where ours differs.
BAD = {
    **{f"level={level!r}": ({"level": level}, ArgumentValueError) for level in ("O0", "OD", "o2", "O3")},
    "dtype='float32'": ({"dtype": "float32"}, ArgumentValueError),
    "models='x'": ({"models": "x"}, ArgumentTypeError),
    "models=(tuple of layers)": ({"models": (nn.Linear(2, 2),)}, ArgumentTypeError),
    "models=[layer, 'x']": ({"models": [nn.Linear(2, 2), "x"]}, ArgumentTypeError),
    "optimizers=['x']": ({"optimizers": ["x"]}, ArgumentTypeError),
    "save_dtype='int8'": ({"save_dtype": "int8"}, ArgumentValueError),
    "excluded_layers=3": ({"excluded_layers": 3}, ArgumentTypeError),
    "excluded_layers=[3]": ({"excluded_layers": [3]}, ArgumentTypeError),
}
# A tuple is as good as a list.
NOT_REFUSED = {"excluded_layers=(nn.Linear,)", "DataParallel first"}


def test_every_recorded_refusal_is_here() -> None:
    assert {each for each in ERRORS if "returns the same" not in each} == set(BAD) | NOT_REFUSED


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
    assert ERRORS[name]["raises"] in {base.__name__ for base in error.__mro__}
    with pytest.raises(error):
        amp.decorate(**{"models": model, "optimizers": optimizer, "level": "O2", **options})
    assert unchanged(model, optimizer)


def test_the_parallel_wrapper_comes_after() -> None:
    # A real one needs a process group; the class is what is looked at.
    ddp = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(ddp)
    for wrapped in (nn.DataParallel(nn.Linear(2, 2)), ddp):
        model, optimizer = pair()
        expected = rf"after amp\.decorate..: call it on the original model, then wrap .* in {type(wrapped).__name__}\."
        with pytest.raises(UsageError, match=expected):
            amp.decorate([model, wrapped], optimizer, level="O2")
        assert unchanged(model, optimizer)
