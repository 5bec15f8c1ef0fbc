"""What was broken in Apex and is right here: one test for each defect that was found in it or that its users reported.

Issue numbers are those of github.com/NVIDIA/apex. What the fix is for is in the name; the tests of the rooms that hold
the fixes go further.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import warnings
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from halfstep.apex.amp import initialize
from torch import nn
from torch.nn import functional as F

from halfstep import HalfstepError, amp
from halfstep.core.errors import LossScaleCollapsed, UnsafeOpError
from halfstep.fp16_utils import DynamicLossScaler, FP16_Optimizer, LossScaler
from tests.support.worlds import (
    FP16,
    LEVELS,
    advance,
    assert_equal,
    read_back,
    scaled_backward,
    scaled_step,
    with_optimizer,
)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def ready(level: str, model: nn.Module | None = None, lr: float = 0.1, **options: Any) -> tuple[Any, Any]:
    model, optimizer = with_optimizer(model or net(), torch.optim.Adam, lr=lr, eps=1e-4)
    found: tuple[Any, Any] = initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return found


def train(model: Any, optimizer: Any, x: torch.Tensor, steps: int = 1) -> float:
    loss = torch.zeros(())
    for _ in range(steps):
        loss = (model(x).float() - 1).square().mean()
        advance(loss, optimizer)
    return loss.item()


def test_a_weight_used_twice() -> None:
    """IndexError in the cache of casts: #694, #1228, and any tied weight on torch since 1.5."""
    embed, linear = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    linear.weight = embed.weight
    model, optimizer = ready("O1", nn.Sequential(embed, linear, nn.Linear(5, 4), nn.Tanh(), linear))
    for _ in range(2):
        advance(model(torch.arange(5)).float().square().mean(), optimizer)
    assert embed.weight is linear.weight


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_recurrent_layers_under_o1(kind: Any, bidirectional: bool) -> None:
    """RNN and its cells were not patched, and a 16-bit input was refused."""
    cell = "Cell" in kind.__name__
    model, optimizer = ready("O1", kind(4, 3) if cell else kind(4, 3, 2, bidirectional=bidirectional))
    for dtype in (torch.float32, FP16):
        out = model(torch.randn(5, 4, dtype=dtype) if cell else torch.randn(6, 5, 4, dtype=dtype))
        out = out if isinstance(out, torch.Tensor) else out[0]
        scaled_backward(out.float().square().mean(), optimizer)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("loss_scale", [1.0, 2.0, "dynamic"])
def test_batchnorm_gradients_accumulate(loss_scale: Any) -> None:
    """With a static scale of 1.0 only those of the last pass survived."""
    model, optimizer = ready("O2", loss_scale=loss_scale)
    model.eval()
    x = torch.randn(8, 4)
    for count in (1, 2, 3):
        scaled_backward(model(x).square().mean(), optimizer)
        if count == 1:
            once = model[1].weight.grad.clone()
    torch.testing.assert_close(model[1].weight.grad, 3 * once)


ORDERS = list(itertools.permutations(["initialize", "model", "optimizer", "amp"]))


@pytest.mark.parametrize("order", [o for o in ORDERS if o.index("amp") > o.index("initialize")], ids="-".join)
def test_resuming_in_any_order(order: tuple[str, ...]) -> None:
    """Loaded too early, Adam's second moments became float16: those below 6e-8 were zero, and the loss leapt."""
    x = torch.randn(16, 4)
    model, optimizer = ready("O2", lr=1e-3)
    train(model, optimizer, x, 3)
    for state in optimizer.state.values():
        state["exp_avg_sq"].mul_(1e-6)  # as small as they are late in a training
    state = read_back({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()})
    second, other = with_optimizer(net(), torch.optim.Adam, lr=1e-3, eps=1e-4)
    for what in order:
        if what == "initialize":
            second, other = initialize(second, other, opt_level="O2", verbosity=0)
        elif what == "model":
            second.load_state_dict(state["model"])
        elif what == "optimizer":
            other.load_state_dict(state["optimizer"])
        else:
            amp.load_state_dict(state["amp"])
    assert all(s["exp_avg_sq"].dtype is torch.float32 for s in other.state.values())
    train(model, optimizer, x, 2)
    train(second, other, x, 2)
    rounded = order.index("model") < order.index("initialize")  # then masters start from rounded weights
    for a, b in zip(amp.master_params(optimizer), amp.master_params(other), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3 if rounded else 0)


def test_weights_loaded_after_a_step_stay() -> None:
    """The next step overwrote them with masters that were not loaded."""
    model, optimizer = ready("O2", lr=0.0)
    x = torch.randn(8, 4)
    train(model, optimizer, x)
    other = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    train(model, optimizer, x)
    assert torch.equal(model[0].weight, torch.full((8, 4), 0.25, dtype=FP16))


def test_inference_sees_new_weights() -> None:
    """Without gradients, the cast copy of a weight was used for ever: #480, #665."""
    model, _ = ready("O1", nn.Linear(4, 2, bias=False))
    x = torch.ones(1, 4)
    with torch.no_grad():
        for value in (1.0, 2.0, 3.0):
            model.load_state_dict({"weight": torch.full((2, 4), value)})
            assert model(x).tolist() == [[4 * value] * 2]


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("level", LEVELS)
def test_copies_are_models_of_their_own(level: str, how: str) -> None:
    """A deep copy ran the original's weights, an average of weights among them, and pickle failed: #381, #1235."""
    model, optimizer = ready(level)
    average = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
    x = torch.randn(8, 4)
    before = average(x)
    train(model, optimizer, x, 5)
    assert torch.equal(average(x), before)
    with torch.no_grad():
        for mean, param in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(param, 0.5)
    assert not torch.equal(average(x), before)
    assert average(x).dtype is model(x).dtype


@pytest.mark.parametrize("level", LEVELS)
def test_replicas_run_their_own_weights(level: str) -> None:
    """Under DataParallel all of them ran those of the first: #227, #503."""
    model, _ = ready(level, nn.Linear(4, 2, bias=False))
    replica = model._replicate_for_data_parallel()  # what DataParallel makes of a model, on each device
    replica.weight, replica.bias = torch.ones_like(model.weight), None
    assert replica(torch.ones(1, 4)).float().tolist() == [[4.0, 4.0]]


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@dataclass
class Record:
    x: torch.Tensor
    count: int = 0


class Bag(dict):  # type: ignore[type-arg]
    """As libraries have them, with attributes."""


CONTAINERS: dict[str, Any] = {
    "list": lambda x: [x, 1],
    "tuple": lambda x: (x, None),
    "dict": lambda x: {"x": x},
    "OrderedDict": lambda x: OrderedDict(x=x),
    "a dict with attributes": lambda x: Bag(x=x),
    "named tuple": lambda x: Pair(x, "name"),
    "dataclass": Record,
}


def tensor_in(value: Any) -> torch.Tensor:
    if isinstance(value, (list, tuple)):
        return value[0]  # type: ignore[no-any-return]
    return value["x"] if isinstance(value, dict) else value.x  # type: ignore[no-any-return]


class Through(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: Any = None

    def forward(self, value: Any) -> Any:
        self.seen = value
        y = self.linear(tensor_in(value))
        self.make: Any
        return self.make(y)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("level", LEVELS)
def test_containers_go_in_and_out(level: str, container: str) -> None:
    """Named tuples were a TypeError, subclasses became plain dicts, what went in was changed in place: #435."""
    module, make = Through(), CONTAINERS[container]
    module.make = make
    model, _ = ready(level, module)
    given = make(torch.randn(2, 4))
    out = model(given)
    assert type(out) is type(model.seen) is type(given)
    assert tensor_in(given).dtype is torch.float32
    assert tensor_in(out).dtype is (FP16 if level == "O1" else torch.float32)


def test_disable_casts_survives_exceptions_and_nesting() -> None:
    """An exception left the casts off for good; an inner block turned them on again too early."""
    _alive = ready("O1")
    x = torch.ones(2, 2)
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert torch.mm(x, x).dtype is FP16
    with amp.disable_casts():
        with amp.disable_casts():
            pass
        assert torch.mm(x, x).dtype is torch.float32
    assert torch.mm(x, x).dtype is FP16


@pytest.mark.parametrize("level", LEVELS)
def test_scale_loss_survives_exceptions(level: str) -> None:
    model, optimizer = ready(level, loss_scale=128.0)
    model.eval()
    x = torch.randn(8, 4)
    scaled_backward(model(x).float().square().mean(), optimizer)
    before = [p.grad.clone() for p in amp.master_params(optimizer)]

    def failing() -> None:
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert_equal([param.grad for param in amp.master_params(optimizer)], before)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 128.0


@pytest.mark.parametrize("face", ["scale_loss", "LossScaler"])
def test_finite_gradients_whose_sum_overflows(face: str) -> None:
    """The check added them up."""
    param = nn.Parameter(torch.zeros(4))
    if face == "LossScaler":
        param.grad = torch.full((4,), 2e38)
        assert not DynamicLossScaler().has_overflow([param])
        return
    model = nn.Module()
    model.weight = param
    optimizer = torch.optim.SGD([param], lr=1e-38)
    initialize(model, optimizer, opt_level="O0", loss_scale=2.0, verbosity=0)
    scaled_step((param * 1e38).sum(), optimizer)
    assert amp.steps_skipped(optimizer) == 0
    torch.testing.assert_close(param.detach(), torch.full((4,), -1.0))


def test_float64_stays_float64() -> None:
    """Mixed with others it was a NotImplementedError; by itself it silently became 16 or 32 bits: #505."""
    ready("O1")
    x, y = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2)
    assert torch.mm(x, x).dtype is F.softmax(x, -1).dtype is (x + y).dtype is torch.float64
    assert (x + y.half()).dtype is torch.cat([x, y.half()]).dtype is torch.float64


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", LEVELS)
def test_the_next_fold_starts_afresh_and_the_last_is_freed(level: str) -> None:
    """A second initialize was an error or wrapped everything twice, and nothing was ever freed: #392, #439, #626."""
    gone = []
    for _ in range(3):
        model, optimizer = ready(level)
        before = train(model, optimizer, x := torch.randn(16, 4))
        assert train(model, optimizer, x, 20) < before
        gone += [weakref.ref(model), weakref.ref(next(iter(amp.master_params(optimizer))))]
        del model, optimizer
    ready("O0", nn.Linear(1, 1))  # the latest session is always known
    gc.collect()
    assert [ref() for ref in gone] == [None] * 6


def test_two_models_of_which_one_is_under_amp() -> None:
    """O1 patched torch for all of them: #694."""
    student, _ = ready("O1", nn.Linear(4, 2))
    teacher = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    assert amp.exempt(amp.exempt(teacher)) is teacher
    x = torch.randn(3, 4)
    for module in (teacher, copy.deepcopy(teacher), pickle.loads(pickle.dumps(teacher))):
        assert module(x).dtype is torch.float32
    assert student(x).dtype is FP16
    with pytest.raises(RuntimeError):
        teacher(torch.randn(3, 5))
    assert torch.mm(x, x.t()).dtype is FP16, "an exception in an exempted model leaves the casts on"
    amp.exempt(teacher[0])
    assert teacher(x).dtype is torch.float32, "one inside of another"


@pytest.mark.parametrize("level", LEVELS[:3])
def test_gradient_penalty(level: str) -> None:
    """ "Not possible with amp" (#215, #873): a loss made of gradients, backward through a backward pass."""
    model, optimizer = ready(level, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), loss_scale=128.0)
    reference = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    reference.load_state_dict({k: v.double() for k, v in model.state_dict().items()})
    x = torch.randn(16, 4)

    def penalty(module: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return (grad.to(torch.promote_types(grad.dtype, torch.float32)).norm(dim=1) - 1).square().mean()

    scaled_backward(penalty(model, x), optimizer)
    amp.deactivate()
    penalty(reference, x.double()).backward()
    masters = list(amp.master_params(optimizer))
    for param, exact in zip(masters, reference.parameters(), strict=True):
        if exact.grad is not None:
            torch.testing.assert_close(param.grad.double(), exact.grad, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("level", LEVELS)
def test_layers_unfrozen_after_initialize_train(level: str) -> None:
    """They never got a master: #643."""
    model = net()
    model[0].requires_grad_(False)
    model, optimizer = ready(level, model)
    x = torch.randn(16, 4)
    train(model, optimizer, x)
    before = model[0].weight.detach().clone()
    train(model, optimizer, x)
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    train(model, optimizer, x, 3)
    assert not torch.equal(model[0].weight, before)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})  # 292


def test_a_loss_scale_never_reaches_zero() -> None:
    """1,200 NaN steps, then a ZeroDivisionError: #26, #318, #777. Now it stops at its floor and names the gradient."""
    model, optimizer = ready("O2")

    def hopeless() -> None:
        for _ in range(1200):
            train(model, optimizer, torch.full((8, 4), float("nan")))

    with pytest.raises(LossScaleCollapsed, match=r"0\.weight"):
        hopeless()
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] > 0


def test_evaluation_does_not_grow() -> None:
    """Copies of weights piled up without gradients: #258, #439, #634."""
    from halfstep.casting.current import thread

    model, _ = ready("O1")
    model.eval()
    sizes = []
    with torch.no_grad():
        for _ in range(5):
            model(torch.randn(8, 4))
            sizes.append(len(thread.cache))
    assert sizes[-1] == sizes[0]


def test_a_scheduler_made_before_initialize() -> None:
    """A warning that optimizer.step() had been overridden, or, after a skipped first step, that it was forgotten."""
    model, optimizer = with_optimizer(net(), torch.optim.SGD, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = initialize(model, optimizer, opt_level="O2", verbosity=0)
    x = torch.randn(8, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, x * float("inf"))
        scheduler.step()
        train(model, optimizer, x)
        scheduler.step()
    assert amp.steps_skipped(optimizer) >= 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_the_handle_scales_losses() -> None:
    """In the last Apex that had it nothing of the 2018 loss scaling worked."""
    handle = amp.init(verbose=False)
    model = nn.Linear(4, 2)
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    with optimizer.scale_loss(model(torch.ones(3, 4)).float().mean()) as scaled:
        scaled.backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    handle._deactivate()


def test_documented_defaults_reach_the_scaler() -> None:
    """scale_factor was ignored, and so were FP16_Optimizer's documented defaults."""
    scaler = DynamicLossScaler(scale_factor=4.0, scale_window=1)
    before = scaler.loss_scale
    scaler.update_scale(True)
    assert scaler.loss_scale == before / 4
    optimizer = FP16_Optimizer(
        torch.optim.SGD(nn.Linear(2, 2).half().parameters(), 0.1), dynamic_loss_scale=True, verbose=False
    )
    assert optimizer.loss_scale == 2.0**32
    assert LossScaler(4.0).loss_scale == 4.0


@pytest.mark.parametrize(("wrong", "said"), [("01", "'01'.*O0"), ("o1", "'o1'"), (1, "level 1"), ("O9", "'O9'")])
def test_a_level_with_a_zero_is_pointed_out(wrong: Any, said: str) -> None:
    """ "01" instead of "O1": #339."""
    with pytest.raises(HalfstepError, match=said):
        initialize(net(), opt_level=wrong)


def test_bceloss_says_what_to_use() -> None:
    """#504, #506, #1017: banned, and the message has to help."""
    _alive = ready("O1")
    p = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).clamp(0, 1)  # that of a sigmoid is computed from its argument
    with pytest.raises(UnsafeOpError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(p, torch.ones_like(p))
    with amp.disable_casts():
        F.binary_cross_entropy(p.float(), torch.ones(2, 2))


def test_tracing_and_compiling() -> None:
    """A model with a forward of its own could not be traced: #303, #561."""
    model, _ = ready("O2", nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    x = torch.randn(2, 4)
    compiled: Any = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(x), model(x))
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), model(x))
