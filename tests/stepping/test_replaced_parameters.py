"""Every parameter that trains is one that an optimizer has: what was replaced in a model is refused at the step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from halfstep import amp
from halfstep.core.errors import UsageError
from halfstep.stepping import replaced
from halfstep.stepping.replaced import modules_in
from tests.support.worlds import BF16, Applies, advance, scaled_backward

CASTING_LEVELS = ["O1", "O2"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.aux: nn.Module | None = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        out: torch.Tensor = self.head(x)
        return out if self.aux is None else out + self.aux(x)


def start(level: str, params: Callable[[Any], Any] = nn.Module.parameters) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(params(model), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype=BF16, verbosity=0)
    return model, optimizer


def step(model: Any, optimizer: Any) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).to(next(model.parameters()).dtype)
    advance(model(x).float().square().mean(), optimizer)


def like(model: Any) -> Any:
    return {"dtype": model.first.weight.dtype}


def new_layer(model: Any) -> None:
    model.head = nn.Linear(6, 3, **like(model))


def one_parameter(model: Any) -> None:
    model.head.bias = nn.Parameter(torch.zeros(3, **like(model)))


def assigned(model: Any) -> None:
    state = {name: value.clone().to(model.first.weight.dtype) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def emptied(model: Any) -> None:
    model.aux = nn.Linear(6, 3, device="meta", **like(model)).to_empty(device="cpu")
    with torch.no_grad():
        for param in model.aux.parameters():
            param.fill_(0.1)


def weight_norm(model: Any) -> None:
    parametrizations.weight_norm(model.second)


def adapted(model: Any) -> None:
    """As an adapter of a quantized layer: the old weights are gone, the new ones are deeper."""
    model.head = nn.Sequential(nn.Linear(6, 2, **like(model)), nn.Linear(2, 3, **like(model)))


def unseen(model: Any) -> None:
    """No hook of torch sees this; the old parameter has no gradient afterwards."""
    model.head._parameters["bias"] = nn.Parameter(torch.zeros(3, **like(model)))


def taken_from_another_model(model: Any) -> None:
    other = OTHER.to(**like(model))
    model.head = other.head


OTHER = Net()


def flattened(model: Any) -> None:
    """As FSDP: one parameter outside of the layers, which are views of it."""
    layer = model.head
    model.flat = nn.Parameter(torch.cat([layer.weight.detach().flatten(), layer.bias.detach()]))
    del layer.weight, layer.bias
    layer.forward = lambda x: nn.functional.linear(x, model.flat[:18].view(3, 6), model.flat[18:])


REPLACING: list[tuple[Callable[[Any], None], str, str]] = [
    (new_layer, "head.weight, head.bias", "head.weight, head.bias"),
    (one_parameter, "head.bias", "head.bias"),
    (assigned, "first.weight, first.bias, second.weight and 5 more", "first.weight, first.bias, second.weight"),
    (unseen, "head.bias", "head.bias"),
    (taken_from_another_model, "head.weight, head.bias", "head.weight, head.bias"),
    (emptied, "aux.weight, aux.bias", "aux.weight, aux.bias"),
    (
        weight_norm,
        "second.weight",
        "second.parametrizations.weight.original0, second.parametrizations.weight.original1",
    ),
    (adapted, "head.weight, head.bias", "head.0.weight, head.0.bias, head.1.weight and 1 more"),
    (flattened, "head.weight, head.bias", "flat"),
]


@pytest.mark.parametrize("level", CASTING_LEVELS)
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(("replace", "old", "new"), REPLACING)
def test_a_replaced_parameter_is_refused_at_the_next_step(
    level: str, replace: Callable[[Any], None], old: str, new: str, steps: int
) -> None:
    model, optimizer = start(level)
    for _ in range(steps):
        step(model, optimizer)
    replace(model)
    before = model.first.weight.detach().clone()
    with pytest.raises(UsageError, match="This SGD has parameters that are no longer in its model") as error:
        step(model, optimizer)
    assert f"({old})" in str(error.value)
    assert f"({new}" in str(error.value)
    for word in ("parallelize_module", "fully_shard", "assign=True", "to_empty", "add_param_group", "freeze"):
        assert word in str(error.value)
    assert torch.equal(model.first.weight, before)  # nothing has stepped


def test_the_modules_are_walked_in_the_first_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    walks: list[int] = []
    model, optimizer = start("O2")
    step(model, optimizer)
    monkeypatch.setattr(replaced, "modules_in", lambda models: walks.append(1) or modules_in(models))
    for _ in range(5):
        step(model, optimizer)
    assert len(walks) == 2
    nn.Linear(1, 1)  # may be put into the model
    step(model, optimizer)
    assert len(walks) == 3


@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_a_closure_and_a_scaler_are_refused_too(level: str) -> None:
    model, optimizer = start(level)
    new_layer(model)
    scaler = amp.GradScaler(init_scale=2.0)
    x = torch.ones(4, 6, **like(model))
    scaler.scale(model(x).float().sum()).backward()
    with pytest.raises(UsageError, match="no longer in its model"):
        scaler.step(optimizer)

    def closure() -> torch.Tensor:
        loss: torch.Tensor = model(x).float().sum()
        loss.backward()
        return loss

    with pytest.raises(UsageError, match="no longer in its model"):
        optimizer.step(closure)


# ---- what is right


def nothing(model: Any, optimizer: Any) -> None:
    pass


def given_to_the_optimizer(model: Any, optimizer: Any) -> None:
    new_layer(model)
    optimizer.add_param_group({"params": list(model.head.parameters())})


def given_to_another_optimizer(model: Any, optimizer: Any) -> Any:
    new_layer(model)
    return torch.optim.SGD(model.head.parameters(), lr=0.1)


def taken_over(model: Any, optimizer: Any) -> None:
    one_parameter(model)
    params = optimizer.param_groups[0]["params"]
    params[:] = list(model.parameters())


def frozen(model: Any, optimizer: Any) -> None:
    new_layer(model)
    model.head.requires_grad_(requires_grad=False)


def deleted(model: Any, optimizer: Any) -> None:
    model.aux = None


def tied(model: Any, optimizer: Any) -> None:
    model.second.weight = model.first.weight


def adapter(model: Any, optimizer: Any) -> None:
    """LoRA: the old weights stay, frozen, and new ones come beside them."""
    old = model.head
    old.requires_grad_(requires_grad=False)
    model.head = nn.Sequential(nn.Linear(6, 6, **like(model)), old)


def elsewhere(model: Any, optimizer: Any) -> None:
    """A layer goes, and another place gets a parameter that the script steps itself."""
    model.aux = None
    model.first.register_parameter("delta", nn.Parameter(torch.zeros((), **like(model))))
    model.first.register_forward_hook(lambda module, _, out: out + module.delta)


def pruned(model: Any, optimizer: Any) -> None:
    prune.random_unstructured(model.second, "weight", 0.5)


def orthogonal(model: Any, optimizer: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.second, "weight", Applies(lambda x: 2 * x))


def averaged(model: Any, optimizer: Any) -> Any:
    return torch.optim.swa_utils.AveragedModel(model), copy.deepcopy(model)


def called_functionally(model: Any, optimizer: Any) -> None:
    others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    x = torch.ones(4, 6, **like(model))
    torch.func.functional_call(model, others, (x,)).float().sum().backward()


def unused(model: Any, optimizer: Any) -> None:
    """A new layer in the place of an old one that no forward pass asks."""
    model.aux = None
    model.first.aux = nn.Linear(2, 2)
    one: Any = model.first
    one.weight, weight = None, one.weight
    one.forward = lambda x: nn.functional.linear(x, weight, one.bias)


def stepped_by_hand(model: Any, optimizer: Any) -> None:
    """A layer is given up, and its bias, which the optimizer has no longer, stays."""
    one = model.first
    params = optimizer.param_groups[0]["params"]
    params[:] = [p for p in params if p is not one.bias]
    one.weight, weight = None, one.weight
    one.forward = lambda x: nn.functional.linear(x, weight, one.bias)


RIGHT: list[Any] = [
    *(nothing, given_to_the_optimizer, given_to_another_optimizer, taken_over, frozen, deleted, tied, adapter),
    *(elsewhere, pruned, orthogonal, averaged, called_functionally, unused, stepped_by_hand),
]


@pytest.mark.parametrize("level", CASTING_LEVELS)
@pytest.mark.parametrize("change", RIGHT)
def test_other_changes_of_a_model_are_not_refused(level: str, change: Callable[[Any, Any], Any]) -> None:
    model, optimizer = start(level)
    for _ in range(2):
        step(model, optimizer)
    kept = change(model, optimizer)
    for _ in range(3):
        step(model, optimizer)
    del kept


@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_a_parameter_that_was_always_there_replaces_none(level: str) -> None:
    model, optimizer = start(level)
    stepped_by_hand(model, optimizer)
    assert optimizer._amp_stash.replaced.find(optimizer) == []


@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_an_optimizer_of_a_part_minds_that_part_alone(level: str) -> None:
    model, optimizer = start(level, lambda model: [*model.second.parameters(), *model.head.parameters()])
    model.first = nn.Linear(6, 6, **like(model))  # never trained by it
    model.aux = nn.Linear(6, 3, **like(model))
    step(model, optimizer)
    new_layer(model)
    with pytest.raises(UsageError, match="no longer in its model"):
        step(model, optimizer)


@pytest.mark.parametrize("level", CASTING_LEVELS)
def test_each_of_two_optimizers_minds_its_own(level: str) -> None:
    model: Any = Net()
    both: Any = [
        torch.optim.SGD([*model.first.parameters(), *model.second.parameters()], lr=0.1),
        torch.optim.SGD([*model.head.parameters(), *model.aux.parameters()], lr=0.1),
    ]
    model, both = amp.initialize(model, both, opt_level=level, dtype=BF16, verbosity=0)
    new_layer(model)
    x = torch.ones(4, 6, **like(model))
    scaled_backward(model(x).float().square().mean(), both)
    both[0].step()
    with pytest.raises(UsageError, match="no longer in its model"):
        both[1].step()
    both[0].add_param_group({"params": list(model.head.parameters())})  # one of them has it, which is enough
    both[1].step()


def test_what_one_model_lost_and_another_got_are_two_things() -> None:
    models: Any = [Net(), Net()]
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    models, optimizer = amp.initialize(models, optimizer, opt_level="O1", dtype=BF16, verbosity=0)
    models[0].aux = None
    models[1].aux.delta = nn.Parameter(torch.zeros(()))  # stepped by the script
    models[1].aux.delta.grad = torch.ones(())
    step(models[0], optimizer)


def test_a_model_that_is_gone_is_no_error() -> None:
    model, optimizer = start("O1")
    params = list(model.parameters())
    del model
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
