"""``TrainStep(compiled=True)``: forward, scaling and backward as one graph that trains as eager steps do."""

from __future__ import annotations

import copy
import functools
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from halfstep import TrainStep, amp, optimizers
from halfstep.amp.train_step import program
from halfstep.torch_internals.compiler_compat import compile_with_autograd
from tests.support.python import python
from tests.support.worlds import BF16, FP16, FP32, loss_of
from tests.train_step.runs import random_batch, run_of

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),  # Inductor calls it
]


class Block(nn.Module):
    """A transformer block with a batch norm, whose buffers a step changes too."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.block(x).flatten(0, 1)).unflatten(0, x.shape[:2])  # type: ignore[no-any-return]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))


batch = functools.partial(random_batch, x=(5, 16), y=(5, 16))


def made(kind: Callable[[], nn.Module], *how: Any, **options: Any) -> tuple[Any, Any, TrainStep]:
    torch.manual_seed(0)
    return run_of(kind(), *how, **options)


@pytest.fixture
def graphs() -> Callable[[], int]:
    """How many graphs were compiled since the test began."""
    torch._dynamo.reset()
    counters.clear()
    return lambda: counters["stats"]["unique_graphs"]


@pytest.fixture
def aot_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture whole steps, but do not generate code for them."""
    captured = functools.partial(compile_with_autograd, backend="aot_eager")
    monkeypatch.setattr(program, "compile_with_autograd", captured)


def ulps(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest distance of two tensors, in units of the last place of the numbers at hand."""
    wide = a.detach().double(), b.detach().double()
    eps = torch.finfo(a.dtype).eps
    return float(((wide[0] - wide[1]).abs() / (eps * wide[0].abs().clamp(min=1e-3))).max())


@pytest.mark.costly
@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("level", "dtype", "make", "scaled"),
    [
        ("O0", FP16, torch.optim.AdamW, False),
        ("O1", BF16, torch.optim.AdamW, False),
        ("O1", FP16, optimizers.FusedAdam, False),
        ("O2", BF16, optimizers.FusedAdam, False),
        ("O2", FP16, torch.optim.SGD, False),
        ("O2", FP16, optimizers.FusedLAMB, False),
        ("O3", BF16, torch.optim.SGD, False),
        (None, FP32, torch.optim.AdamW, False),
        (None, FP32, torch.optim.AdamW, True),
        (None, FP32, optimizers.FusedAdam, True),
    ],
)
@pytest.mark.parametrize("kind", [mlp, Block])
def test_it_trains_as_eager_steps_do(
    kind: Any, level: str | None, dtype: Any, make: Any, scaled: bool, accumulate: int, graphs: Callable[[], int]
) -> None:
    options = {"accumulate": accumulate, "max_grad_norm": 1.0}
    model, optimizer, step = made(kind, level, dtype, make, scaled, compiled=True, **options)
    theirs, their_optimizer, their_step = made(kind, level, dtype, make, scaled, **options)
    scales = scaled or (dtype is FP16 and level in ("O1", "O2"))
    for i in range(10):
        for one in (optimizer, their_optimizer):
            one.param_groups[0]["lr"] = 1e-3 / (i + 1)
        given = batch(i, overflow=scales and i in (3, 4) and kind is mlp)  # BatchNorm would keep the inf
        torch.testing.assert_close(step(*given), their_step(*given), rtol=1e-5, atol=1e-6, equal_nan=True)
    assert graphs() == 1
    for (name, p), q in zip(model.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6, msg=name)
    if scales and kind is mlp:
        assert amp.steps_skipped(optimizer) == amp.steps_skipped(their_optimizer) if level else True
    (signature,) = step.signatures
    assert (signature.runs, signature.reason, signature.calls) == ("compiled", None, 10)


def test_compiled_steps_with_overflows_are_within_an_ulp(graphs: Callable[[], int]) -> None:
    model, optimizer, step = made(mlp, "O2", FP16, optimizers.FusedAdam, False, compiled=True)
    theirs, their_optimizer, their_step = made(mlp, "O2", FP16, optimizers.FusedAdam, False)
    overflows = {10, 30, 31, 40}
    for i in range(50):
        given = batch(i, overflow=i in overflows)
        step(*given)
        their_step(*given)
    assert graphs() == 1
    assert amp.steps_skipped(optimizer) == amp.steps_skipped(their_optimizer) == len(overflows)
    assert max(map(ulps, model.parameters(), theirs.parameters())) <= 1.0


@pytest.mark.usefixtures("aot_eager")
def test_only_another_kind_of_batch_is_compiled_again(graphs: Callable[[], int]) -> None:
    model, optimizer, step = made(mlp, "O2", FP16, optimizers.FusedAdam, False, compiled=True, accumulate=2)
    for i in range(6):
        optimizer.param_groups[0]["lr"] = 1e-3 / (i + 1)
        step(*batch(i, overflow=i == 2))
    assert graphs() == 1
    step(*batch(9, rows=3))
    step(*batch(9, rows=3))
    assert graphs() == 2
    for rows in (5, 6, 7, 8):  # torch.compile has made the number of rows a symbol
        step(*batch(9, rows=rows))
    assert graphs() == 2
    model.eval()
    step(*batch(1))
    assert [s.training for s in step.signatures].count(False) == 1


FIRST_COMPILED_UNDER_O1 = """
import functools, gc, torch
from halfstep import TrainStep, amp
from halfstep.amp.train_step import program

program.compile_with_autograd = functools.partial(program.compile_with_autograd, backend="aot_eager")
model = amp.initialize(torch.nn.Linear(2, 2), opt_level="O1", dtype=torch.bfloat16, verbosity=0)
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
for level in ("none", "O1", "none"):
    del model
    gc.collect()
    model = torch.nn.Linear(2, 2)
    if level == "O1":
        model = amp.initialize(model, opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainStep(model, lambda output, y: ((output - y) ** 2).mean(), optimizer, compiled=True)
    step(torch.ones(2, 2), torch.ones(2, 2))
    print(level, step.signatures[0].runs, step.signatures[0].reason)
    del step, optimizer
"""


def test_steps_are_one_graph_where_the_process_first_compiled_under_o1() -> None:
    """Dynamo then finds our wrapper under the name of torch.autograd.grad, and remembers it."""
    run = python("-c", FIRST_COMPILED_UNDER_O1)
    assert run.stdout.splitlines() == ["none compiled None", "O1 compiled None", "none compiled None"], run.stderr


@pytest.mark.usefixtures("aot_eager")
def test_a_frozen_parameter_stays_and_its_thawing_counts() -> None:
    model, _, step = made(mlp, "O2", BF16, optimizers.FusedAdam, False, compiled=True)
    frozen = next(model.parameters()).requires_grad_(False)
    before = frozen.clone()
    step(*batch(0))
    assert torch.equal(frozen, before)
    frozen.requires_grad_(True)
    step(*batch(1))
    assert not torch.equal(frozen, before)
    assert step.signatures[0].runs == "compiled"


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return F.relu(y)


def with_hook() -> nn.Module:
    model = mlp()
    next(model.parameters()).register_hook(lambda grad: grad * 2)
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize(
    ("kind", "reason"), [(Breaks, "Call to `torch._dynamo.graph_break()`"), (with_hook, "hooks on its gradient")]
)
def test_what_cannot_be_one_graph_runs_in_parts(kind: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "halfstep")
    torch._dynamo.reset()
    model, _, step = made(kind, "O2", BF16, optimizers.FusedAdam, False, compiled=True)
    theirs, _, their_step = made(kind, "O2", BF16, optimizers.FusedAdam, False)
    for i in range(3):
        torch.testing.assert_close(step(*batch(i)), their_step(*batch(i)), rtol=2e-2, atol=1e-3)
    (signature,) = step.signatures
    assert signature.runs == "in parts"
    assert reason in str(signature.reason)
    assert [r.message.count("runs in parts") for r in caplog.records] == [1]
    torch.testing.assert_close([*model.parameters()], [*theirs.parameters()], rtol=2e-2, atol=1e-3)


def test_a_torch_that_cannot_put_backward_into_a_graph_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "compile_with_autograd", lambda function: None)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    _, _, step = made(mlp, "O2", BF16, optimizers.FusedAdam, False, compiled=True)
    step(*batch(0))
    (signature,) = step.signatures
    assert (signature.runs, signature.reason) == (
        "in parts",
        f"torch {torch.__version__} cannot put a backward pass into a graph",
    )


def test_what_cannot_be_compiled_at_all_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(RuntimeError):
        pass

    def refuse(*_: Any) -> Any:
        raise Refused("no compiler\nat all")

    monkeypatch.setattr(program, "compile_with_autograd", lambda function: refuse)
    monkeypatch.setattr(program, "compile_errors", lambda: (Refused,))
    monkeypatch.setattr(torch, "compile", lambda function: refuse)
    model, _, step = made(mlp, "O2", FP16, optimizers.FusedAdam, False, compiled=True, accumulate=2)
    theirs, _, their_step = made(mlp, "O2", FP16, optimizers.FusedAdam, False, accumulate=2)
    for i in range(4):
        assert step(*batch(i)) == their_step(*batch(i))
    assert all(map(torch.equal, model.parameters(), theirs.parameters()))
    (signature,) = step.signatures
    assert (signature.runs, signature.reason) == ("eager", "no compiler")


@pytest.mark.usefixtures("aot_eager")
@pytest.mark.parametrize("half", [BF16, FP16])
def test_a_scope_around_the_step_casts_as_in_eager_mode(half: torch.dtype) -> None:
    steps = []
    for compiled in (True, False):
        model, _, step = made(mlp, None, half, torch.optim.SGD, False, compiled=compiled)
        with amp.auto_cast(dtype=half):
            losses = [step(*batch(i)) for i in range(3)]
        steps.append((losses, [p.detach() for p in model.parameters()], step.signatures[0].runs))
    assert [s[2] for s in steps] == ["compiled", "eager"]
    torch.testing.assert_close(steps[0][:2], steps[1][:2], rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("aot_eager")
def test_parameters_that_another_optimizer_steps_get_gradients() -> None:
    grads = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16))
        step = TrainStep(model, loss_of, torch.optim.SGD(model[0].parameters(), lr=0.1), compiled=compiled)
        step(*batch(0))
        grads.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1])


@pytest.mark.usefixtures("aot_eager")
def test_a_copy_compiles_for_itself() -> None:
    _, _, step = made(mlp, "O2", BF16, optimizers.FusedAdam, False, compiled=True)
    theirs, _, their_step = made(mlp, "O2", BF16, optimizers.FusedAdam, False)
    step(*batch(0))
    their_step(*batch(0))
    copied, before = copy.deepcopy(step), [p.clone() for p in step.model.parameters()]  # type: ignore[attr-defined]
    for i in range(1, 4):
        torch.testing.assert_close(copied(*batch(i)), their_step(*batch(i)), rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, before, step.model.parameters()))  # type: ignore[attr-defined]
    for p, q in zip(copied.model.parameters(), theirs.parameters(), strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("aot_eager")
def test_a_batch_that_is_wrong_ends_no_graph() -> None:
    _, _, step = made(mlp, "O2", BF16, optimizers.FusedAdam, False, compiled=True)
    step(*batch(0))
    with pytest.raises(RuntimeError):
        step(torch.ones(4, 5, 17), torch.ones(4, 5, 16))
    step(*batch(1))
    assert (step.signatures[0].runs, step.signatures[0].reason) == ("compiled", None)


@pytest.mark.parametrize("whole", [True, False])
def test_each_train_step_is_compiled_for_static_shapes(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    dynamic: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        dynamic.append(any(isinstance(size, torch.SymInt) for x in inputs for size in (x, *getattr(x, "shape", ()))))
        return graph.forward

    if whole:
        monkeypatch.setattr(program, "compile_with_autograd", functools.partial(compile_with_autograd, backend=backend))
    else:
        monkeypatch.setattr(program, "compile_with_autograd", lambda function: None)
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    for rows in range(2, 11):  # Dynamo gives up after eight compilations of one function
        model = (mlp(), nn.Linear(16, 16))[rows % 2]
        step = TrainStep(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), compiled=True)
        step(*batch(0, rows=rows))
        assert step.signatures[0].runs == ("compiled" if whole else "in parts")
    assert len(dynamic) >= 9
    assert not any(dynamic)


class Collecting:
    def passes(self) -> bool:
        return gc.isenabled()


def test_no_garbage_is_collected_while_a_graph_may_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    call = compile_with_autograd(Collecting().passes)
    assert call is not None
    assert call() is False
    assert gc.isenabled()


@pytest.mark.usefixtures("aot_eager")
def test_an_error_of_the_model_is_its_own() -> None:
    _, _, step = made(mlp, "O2", BF16, optimizers.FusedAdam, False, compiled=True)
    with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|must match"):
        step(torch.ones(4, 5, 17), torch.ones(4, 5, 16))


def test_an_error_of_code_that_the_model_itself_compiles_is_raised() -> None:
    inner = torch.compile(lambda x: torch._dynamo.graph_break() or x, backend="eager", fullgraph=True)
    model = nn.Linear(2, 2)
    step = TrainStep(lambda x: inner(model(x)).sum(), None, torch.optim.SGD(model.parameters()), compiled=True)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        step(torch.ones(1, 2))
