"""Programs built line by line: what is recorded, that training equals eager's, names, sizes and errors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import HalfstepError, amp, optimizers, static
from halfstep.core.errors import ArgumentValueError, UsageError
from tests.graph.test_static import MODELS
from tests.support.worlds import Applies, Made, in_a_thread, unscaled_step

pytestmark = [
    pytest.mark.filterwarnings("ignore:The tensor attribute"),  # torch.export, of nn.LSTM's list of weights
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),  # Inductor's imports
]


@pytest.fixture(autouse=True)
def static_mode() -> Iterator[None]:
    torch.manual_seed(0)
    static.enable_static()
    with static.program_guard(static.Program(), static.Program()):
        yield
    static.disable_static()


class Positions(nn.Module):
    """What no variable is an argument of: a slice of a parameter, a constant, statistics, and work on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(20, 8), nn.Parameter(torch.randn(16, 8))
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(8, 20))
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.position[: ids.shape[1]] + torch.arange(ids.size(1))[:, None] / ids.size(1)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        x = x - self.mean
        x[:, 0] = 0.0
        scores: torch.Tensor = self.out(x)
        return scores.reshape(ids.shape[0] * ids.shape[1], -1)


def train_eagerly(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        unscaled_step(loss, optimizer)
        losses.append(loss.item())
    return losses


def build(model: nn.Module, shape: list[int | None], dtype: str = "int64") -> static.Variable:
    """Record a model and its loss. Labels are of the shape of words, and of the batch of images."""
    x, y = static.data("x", shape, dtype), static.data("y", shape if dtype == "int64" else shape[:1], "int64")
    loss: Any = F.cross_entropy(model(x), y.flatten())
    return loss  # type: ignore[no-any-return]


def run_all(loss: static.Variable, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    executor, program = static.Executor(), static.default_main_program()
    return [executor.run(program, {"x": x, "y": _label(x, y)}, [loss])[0].item() for x, y in batches]


def _label(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y if x.is_floating_point() else y.view_as(x)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [("transformer", [None, 8], "int64"), ("resnet", [-1, 3, 8, 8], "float32"), ("rnn", [4, 8], "int64")],
)
def test_training_is_eager_training(name: str, shape: list[int | None], dtype: str) -> None:
    make, batch = MODELS[name]
    model, batches = make(), [batch(n) for n in (4, 4, 7 if shape[0] != 4 else 4)]
    reference = copy.deepcopy(model)
    loss = build(model, shape, dtype)
    for a, b in zip(model.state_dict().values(), reference.state_dict().values(), strict=True):
        assert torch.equal(a, b), "recording computes nothing"
    torch.optim.SGD(model.parameters(), lr=0.1).minimize(loss)  # type: ignore[attr-defined]
    assert run_all(loss, batches) == pytest.approx(train_eagerly(reference, batches), rel=1e-5)
    torch.testing.assert_close([*model.state_dict().values()], [*reference.state_dict().values()], rtol=1e-4, atol=1e-6)


@pytest.mark.exhaustive
def test_everything_in_a_forward_is_recorded_and_sizes_stay_open() -> None:
    model = Positions()
    reference = copy.deepcopy(model)
    loss = build(model, [None, None])
    assert torch.equal(model.mean, torch.zeros(8))
    torch.optim.SGD(model.parameters(), lr=0.1).minimize(loss)  # type: ignore[attr-defined]
    batches = [(torch.randint(20, (n, m)), torch.randint(20, (n * m,))) for n, m in ((4, 5), (3, 9), (2, 16))]
    assert run_all(loss, batches) == pytest.approx(train_eagerly(reference, batches), rel=1e-5)
    torch.testing.assert_close(model.mean, reference.mean)
    torch.testing.assert_close(model.position, reference.position)


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_built_program_is_cast_as_a_captured_one(level: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    other = copy.deepcopy(model)
    x, y = torch.randn(6, 8), torch.randint(4, (6,))
    captured = static.capture(other, nn.CrossEntropyLoss(), (x, y))
    loss: Any = nn.CrossEntropyLoss()(model(static.data("input", [None, 8])), static.data("label", [None], "int64"))
    for each, goal in ((other, captured.loss), (model, loss)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        static.amp.decorate(optimizer, level=level, dtype="bfloat16").minimize(goal)
    program = static.default_main_program()
    assert program.explain() == captured.explain()
    for _ in range(3):
        (mine,) = static.Executor().run(program, {"input": x, "label": y}, [loss])
        assert torch.equal(mine, static.Executor().run(captured, {"input": x, "label": y}, [captured.loss])[0])


@pytest.mark.exhaustive
def test_a_built_program_runs_compiled_in_static_mode() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    loss: Any = model(static.data("x", [None, 8])).square().mean()
    optimizers.FusedSGD(model.parameters(), lr=0.1).minimize(loss)  # type: ignore[attr-defined]
    losses = []
    for n in (4, 9, 9):
        feed = {"x": torch.randn(n, 8, generator=torch.Generator().manual_seed(n))}
        losses += static.Executor(compiled=True).run(static.default_main_program(), feed, [loss])
    assert losses[2] < losses[1]
    assert model[1].num_batches_tracked == 3


def test_values_are_fetched_by_name_and_by_themselves() -> None:
    model = nn.Linear(4, 3)
    x, y = static.data("x", [None, 4]), static.data("y", [None, 3])
    hidden: Any = model(x)
    hit: Any = (hidden.argmax(1) == y.argmax(1)).float().mean()
    loss: Any = F.mse_loss(hidden.relu(), y)
    torch.optim.SGD(model.parameters(), lr=0.0).minimize(loss)  # type: ignore[attr-defined]
    feed = {"x": torch.randn(5, 4), "y": torch.rand(5, 3)}
    program = static.default_main_program()
    found = static.Executor().run(program, feed, [loss.name, hidden, hit, hidden.name, *program.outputs])
    expected = model(feed["x"]).detach()
    torch.testing.assert_close(found[1], expected)
    assert torch.equal(found[3], found[1])
    torch.testing.assert_close(found[0], F.mse_loss(expected.relu(), feed["y"]))
    assert found[2] == (expected.argmax(1) == feed["y"].argmax(1)).float().mean()
    assert found[4:] == found[2:3]  # what no other value is computed from


def normed() -> Any:
    """Make a model of batch normalization and dropout, which compute differently in evaluation mode."""
    parts = {"norm": nn.BatchNorm1d(4), "linear": nn.Linear(4, 3), "dropout": nn.Dropout(0.5)}
    return Made(lambda self, x: self.dropout(self.linear(self.norm(x))), **parts)


@pytest.mark.exhaustive
@pytest.mark.parametrize("when", ["before minimize", "after minimize"])
@pytest.mark.parametrize("level", ["", "O1", "O2"])
def test_a_clone_for_tests_evaluates_with_the_trained_parameters(level: str, when: str) -> None:
    model, program, executor = normed(), static.default_main_program(), static.Executor("cpu")
    reference = copy.deepcopy(model)
    x, y = static.data("x", [None, 4]), static.data("y", [None], "int64")
    scores: Any = model(x)
    loss: Any = F.cross_entropy(scores, y)
    test = program.clone(for_test=True) if when == "before minimize" else None
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if level:
        optimizer = static.amp.decorate(optimizer, level=level, dtype="bfloat16")
    optimizer.minimize(loss)
    test = test or program.clone(for_test=True)

    batches = [{"x": torch.randn(8, 4), "y": torch.randint(3, (8,))} for _ in range(4)]
    before = executor.run(test, batches[0], [scores])[0]
    first = reference.eval()(batches[0]["x"]).detach()
    torch.testing.assert_close(before.float(), first, atol=0.05 if level else 1e-6, rtol=0.0)
    for feed in batches:
        executor.run(program, feed, [loss])
    statistics = copy.deepcopy(model.norm.state_dict())
    found = executor.run(test, batches[0], [scores, loss.name])
    assert {key: value.tolist() for key, value in model.norm.state_dict().items()} == {
        key: value.tolist() for key, value in statistics.items()
    }
    assert statistics["num_batches_tracked"] == 4
    reference.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    expected = reference(batches[0]["x"]).detach()
    torch.testing.assert_close(found[0].float(), expected, atol=0.05 if level else 1e-6, rtol=0.0)
    wanted = F.cross_entropy(expected, batches[0]["y"])
    torch.testing.assert_close(found[1].float(), wanted, atol=0.05 if level else 1e-6, rtol=0.0)
    assert not torch.equal(before, found[0])


def test_a_clone_of_a_captured_program() -> None:
    model = normed()
    program = static.capture(model, nn.CrossEntropyLoss(), (torch.randn(6, 4), torch.randint(3, (6,))))
    test = program.clone(for_test=True)
    x, label = torch.randn(5, 4), torch.randint(3, (5,))
    found = static.Executor().run(test, dict(zip(test.feed_names, (x, label), strict=True)), [test.loss, *test.outputs])
    scores = model.eval()(x).detach()
    torch.testing.assert_close(found[1], scores)
    torch.testing.assert_close(found[0], F.cross_entropy(scores, label))


def test_a_clone_keeps_its_program_where_the_program_begins_anew() -> None:
    model, program = nn.Linear(2, 1), static.default_main_program()
    loss: Any = model(static.data("x", [None, 2])).sum()
    test = program.clone(for_test=True)
    torch.optim.SGD(model.parameters(), lr=0.1).minimize(loss)  # type: ignore[attr-defined]
    _another = static.data("another", [2])
    assert test.feed_names == ["x"]
    x = torch.ones(1, 2)
    assert static.Executor().run(test, {"x": x}, [loss])[0] == model(x).sum()


def test_a_run_without_a_program_is_one_of_the_default_program() -> None:
    doubled: Any = static.data("x", [2]) * 2
    given: Any = {"feed": {"x": torch.ones(2)}, "fetch_list": [doubled, doubled.bfloat16()]}
    found = static.Executor().run(**given, return_numpy=True)
    assert [(each.dtype, *each) for each in found] == [(np.float32, 2, 2)] * 2
    assert all(each.is_meta for each in static.Executor("meta").run(**given))
    with static.program_guard(static.Program()):
        assert static.Executor().run() == []


def test_a_program_without_minimize_computes_and_grows() -> None:
    model, program = nn.Linear(4, 3), static.default_main_program()
    y: Any = model(static.data("x", [None, 4]))
    x = torch.randn(2, 4)
    assert torch.equal(static.Executor().run(program, {"x": x}, [y])[0], model(x).detach())
    z: Any = y.exp()
    assert torch.equal(static.Executor().run(program, {"x": x}, [z, y])[0], model(x).detach().exp())


def test_saving_and_loading(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    loss: Any = F.mse_loss(model(static.data("x", [None, 4])), static.data("y", [None, 3]))
    torch.optim.SGD(model.parameters(), lr=0.1).minimize(loss)  # type: ignore[attr-defined]
    program = static.default_main_program()
    program.save(tmp_path / "program.pt")
    loaded = static.load(tmp_path / "program.pt")
    feed = {"x": torch.randn(5, 4), "y": torch.rand(5, 3)}
    expected = static.Executor().run(program, feed, [loss], train=False)
    assert torch.equal(static.Executor().run(loaded, feed, [loaded.loss])[0], expected[0])


def test_data_after_minimize_begins_the_program_anew() -> None:
    program = static.default_main_program()
    for size in (3, 5):
        model = nn.Linear(size, 1)
        loss: Any = model(static.data("x", [2, size])).mean()
        torch.optim.SGD(model.parameters(), lr=0.1).minimize(loss)  # type: ignore[attr-defined]
        before = model.weight.detach().clone()
        static.Executor().run(program, {"x": torch.ones(2, size)}, [loss])
        torch.testing.assert_close(model.weight, before - 0.1)


def test_programs_of_threads_are_apart() -> None:
    static.data("x", [1])
    seen: list[Any] = []
    in_a_thread(lambda: seen.append(static.data("x", [2]).sizes))
    assert seen == [(2,)]


def test_torch_is_as_before_after_disable_static() -> None:
    static.disable_static()
    static.disable_static()
    assert not hasattr(torch.optim.SGD, "minimize")
    assert not nn.modules.module._global_forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks
    with pytest.raises(HalfstepError, match="enable_static"):
        static.data("x", [1])


@pytest.mark.exhaustive
def test_a_size_that_torch_export_cannot_leave_open() -> None:
    loss = build(MODELS["rnn"][0](), [4, None])
    with pytest.raises(HalfstepError, match=r"static.data\('x'\) leaves the size of dimension 1 open"):
        torch.optim.SGD([torch.zeros(1)], lr=0.1).minimize(loss)  # type: ignore[attr-defined]


def test_an_error_in_a_forward_leaves_no_recording_behind() -> None:
    with pytest.raises(HalfstepError, match="cannot branch"):
        nn.Sequential(Applies(lambda x: x if x.sum() > 0 else -x))(static.data("x", [2]))
    assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]
    assert isinstance(static.data("y", [2]) + 1, static.Variable)


# ---- arguments that Paddle's scripts give


def mean_of_two_layers() -> tuple[nn.Module, Any, Any]:
    """A model, the value in its middle, and the loss."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    hidden = model[0](static.data("x", [2, 4]))
    return model, hidden, model[1](hidden).mean()


@pytest.mark.parametrize("decorated", [False, True])
def test_arguments_without_meaning_here_are_taken(decorated: bool) -> None:
    model, _, loss = mean_of_two_layers()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if decorated:
        lists = static.amp.AutoMixedPrecisionLists(custom_black_list=["mean"], dtype="bfloat16")
        optimizer = static.amp.decorate(optimizer, lists, level="O2", dtype="bfloat16")
    optimizer.minimize(loss, startup_program=static.default_startup_program())
    if decorated:
        optimizer.amp_init("cpu", scope=static.global_scope(), rewrite_master_weight=True)
    given: Any = {"feed": {"x": torch.ones(2, 4)}, "fetch_list": [loss], "scope": static.global_scope()}
    first, second = (static.Executor("cpu").run(**given, return_numpy=True)[0] for _ in range(2))
    assert isinstance(first, np.ndarray)
    assert second < first


def rules(names: Callable[[Any, Any], list[str]]) -> list[str]:
    """The rules of the ops of two layers and a mean, with some values on the black list."""
    model, hidden, loss = mean_of_two_layers()
    lists = static.amp.CustomOpLists(custom_black_varnames=names(hidden, loss))
    static.amp.decorate(torch.optim.SGD(model.parameters(), lr=0.1), lists, dtype="bfloat16").minimize(loss)
    casting = static.default_main_program().casting
    assert casting is not None
    return [row.rule.split()[0] for row in casting.rows]


NAMED: dict[str, tuple[Callable[[Any, Any], list[str]], list[str]]] = {
    "nothing": (lambda hidden, loss: [], ["half", "half", "float"]),
    "a variable": (lambda hidden, loss: [hidden.name], ["black", "half", "float"]),
    "a node": (lambda hidden, loss: ["linear_1"], ["half", "black", "float"]),
    "the loss": (lambda hidden, loss: [loss.name], ["half", "half", "black"]),
    "the loss, as a program has it": (lambda hidden, loss: ["loss"], ["half", "half", "black"]),
}


@pytest.mark.parametrize("name", NAMED)
def test_values_on_the_black_list_are_named_as_elsewhere(name: str) -> None:
    names, expected = NAMED[name]
    assert rules(names) == expected


def test_a_value_on_the_black_list_that_no_program_has_is_an_error() -> None:
    with pytest.raises(ArgumentValueError, match=r"'linear_0\.tmp_1', which this program does not comp"):
        rules(lambda hidden, loss: ["linear_0.tmp_1"])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_auto_cast_around_a_program_is_an_error(level: str) -> None:
    """Paddle 3 builds programs so. Here it had cast some of the ops, and the optimizer was never told of the scaler."""
    x = static.data("x", [2, 4])
    with amp.auto_cast(level=level), pytest.raises(UsageError, match=r"static\.amp\.decorate\(optimizer"):
        nn.Linear(4, 1)(x)
    assert nn.Linear(4, 1)(x).mean().dtype is torch.float32
