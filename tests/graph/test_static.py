"""Graph mode: what is captured, where casts go, that training equals eager's, and the guide's examples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.graph import Block, SimpleNet
from halfstep import HalfstepError, amp, optimizers, static
from halfstep.casting.graph.cast_pass import cast_graph
from halfstep.casting.graph.min_cut import fewest_casts
from halfstep.core.hardware import has_units
from halfstep.core.oplists import OpLists
from tests.support.backends import needs_compiler
from tests.support.worlds import BF16, FP16, Made, unscaled_step


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.Sequential(Block(32, 4), Block(32, 4))
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.out(self.norm(self.blocks(self.embed(ids))))
        return scores.flatten(0, 1)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(c, 8, 3, padding=1, bias=False) for c in (3, 8, 8)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(3)])
        self.out = nn.Linear(8, 5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norms[0](self.convs[0](image)))
        y = self.norms[2](self.convs[2](F.relu(self.norms[1](self.convs[1](x)))))
        scores: torch.Tensor = self.out(F.adaptive_avg_pool2d(F.relu(x + y), 1).flatten(1))
        return scores


def recurrent() -> nn.Module:
    parts = {"embed": nn.Embedding(50, 16), "rnn": nn.LSTM(16, 16, batch_first=True), "out": nn.Linear(16, 50)}
    return Made(lambda self, ids: self.out(self.rnn(self.embed(ids))[0]).flatten(0, 1), **parts)


def words(n: int = 4) -> torch.Tensor:
    return torch.randint(50, (n, 8))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, torch.Tensor]]]] = {
    "transformer": (Transformer, lambda n: (words(n), words(n).flatten())),
    "resnet": (Residual, lambda n: (torch.randn(n, 3, 8, 8), torch.randint(5, (n,)))),
    "rnn": (recurrent, lambda n: (words(n), words(n).flatten())),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:The tensor attribute"),  # torch.export, of nn.LSTM's list of weights
    pytest.mark.filterwarnings(
        "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
    ),  # Inductor's imports
    # Dynamo makes an instance of a Function that it traces.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Casts(TorchDispatchMode):
    """Counts what casts between floating dtypes."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].is_floating_point() and result.dtype != args[0].dtype:
            self.count += 1
        return result


def captured(name: str) -> tuple[nn.Module, static.Program, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model, inputs = make(), batch(4)
    return model, static.capture(model, nn.CrossEntropyLoss(), inputs), inputs


def casts_of_autocast(name: str, run: Callable[[], object]) -> int:
    """How many casts ``torch.autocast`` makes, where it can run at all."""
    if name == "rnn" and not has_units(torch.device("cpu"), BF16, "recurrent"):
        pytest.skip("torch.autocast fails here: oneDNN has no bfloat16 LSTM for this CPU")
    with Casts() as eager, torch.autocast("cpu", BF16):
        run()
    return eager.count


# ---- the casting pass


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_no_more_casts_than_autocast_makes(name: str) -> None:
    model, program, (x, y) = captured(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    static.amp.decorate(optimizer, dtype="bfloat16", emulate=False).minimize(program.loss)
    assert program.casting is not None
    eager = casts_of_autocast(name, lambda: F.cross_entropy(model(x), y))
    with Casts() as graph:
        program.module()(x, y)
    assert program.casting.casts_after <= 0.7 * eager
    assert graph.count == program.casting.casts_after - 1, "the small parameters are one multi-tensor cast"
    apart = cast_graph(program.graph_module, OpLists.default(), BF16, together=0, emulate=False)
    with Casts() as graph:
        apart.module(x, y)
    assert graph.count == apart.casts_after <= eager


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_parameters_together_and_outside_the_loop(name: str) -> None:
    """At O1 on CUDA all of them are one cast; at O2 they are none. On a CPU large ones are cast where they are read."""
    _, program, (x, y) = captured(name)
    eager = casts_of_autocast(name, lambda: program.graph_module(x, y))
    one = cast_graph(program.graph_module, OpLists.default(), BF16, together=2**40)
    outside = cast_graph(program.graph_module, OpLists.default(), BF16, outside=True)
    apart = cast_graph(program.graph_module, OpLists.default(), BF16, together=0)
    assert one.casts_after <= 0.7 * eager
    assert outside.casts_after == one.casts_after - 1
    weights = [p for p in program.parameters() if p.dim() > 1]
    limit = max(p.numel() for p in program.parameters() if p.dim() == 1)
    biases = cast_graph(program.graph_module, OpLists.default(), BF16, together=limit)
    if name == "transformer":  # as with weights that are large
        assert biases.casts_after == one.casts_after + sum(p.numel() > limit for p in weights) - 1 <= 0.7 * eager
    results = [module(x, y)[0] for module in (one.module, apart.module)]
    assert torch.equal(*results)
    grads = []
    for module in (one.module, apart.module):
        module(x, y)[0].backward()
        grads.append([p.grad.clone() for p in module.parameters()])
        module.zero_grad()
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("name", MODELS)
def test_o1_is_eager_o1(name: str, dtype: torch.dtype) -> None:
    """Loss and gradients equal those of amp.auto_cast with the same lists, to the bit for the loss."""
    model, program, (x, y) = captured(name)
    with amp.auto_cast(dtype=dtype):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    found = cast_graph(program.graph_module, OpLists.default(), dtype).module(x, y)[0]
    found.backward()
    assert torch.equal(found, loss.detach())
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.grad, grad, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


AROUND: dict[str, Callable[[], Any]] = {
    "auto_cast": lambda: amp.auto_cast(dtype="bfloat16"),
    "torch.autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a session of O1": lambda: contextlib.nullcontext(
        amp.initialize(nn.Linear(2, 2), opt_level="O1", dtype=BF16, verbosity=0)
    ),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("level", [None, "O1", "O2"])
def test_a_run_computes_as_the_program_says_whatever_is_in_force_around_it(level: str | None, around: str) -> None:
    def losses() -> list[torch.Tensor]:
        torch.manual_seed(0)
        _, program, sgd = ready()
        if level is None:
            program.minimize(sgd)
        else:
            static.amp.decorate(sgd, level=level, dtype="bfloat16").minimize(program.loss)
        feed = {"input": torch.randn(2, 4), "label": torch.randn(2, 4)}
        return [static.Executor("cpu").run(program, feed, [program.loss])[0] for _ in range(3)]

    wanted = losses()
    with AROUND[around]() as _alive:
        assert losses() == wanted


class Views(nn.Module):
    """One value, moved three ways before it is read in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linears = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        views = (y.reshape(2, -1, 8), y.flip(0), y.unsqueeze(0))
        total: torch.Tensor = sum(f(v).float().mean() for f, v in zip(self.linears, views, strict=True))  # type: ignore[assignment]
        return total


@pytest.mark.exhaustive
def test_casts_move_across_views_to_where_they_are_fewest() -> None:
    program = static.capture(Views(), None, [torch.randn(4, 8)])
    cast = cast_graph(program.graph_module, OpLists.default(), BF16, together=2**40)
    names = {row.name: row.gives for row in cast.rows}
    assert {names[name] for name in ("reshape", "flip", "unsqueeze")} == {"bfloat16"}
    assert cast.casts_after == 2, "one before the views and one of the parameters"


def read_in_both(self: Any, x: torch.Tensor) -> Any:
    """Read a view in 16 bits and in fp32."""
    y = F.softmax(x, -1).reshape(-1, 8)
    return self.linear(y).float().sum() + torch.exp(y).sum() + self.linear(y.t()).float().sum()


def test_fp32_numbers_are_not_rounded_on_the_way_to_an_fp32_reader() -> None:
    x, model = torch.randn(8, 8), Made(read_in_both, linear=nn.Linear(8, 8))
    program = static.capture(model, None, [x])
    cast = cast_graph(program.graph_module, OpLists.default(), BF16)
    assert {row.name: row.gives for row in cast.rows}["reshape"] == "float32"
    with amp.auto_cast(dtype=BF16):
        assert torch.equal(cast.module(x)[0], model(x))


def test_an_op_that_torch_does_not_promote_is_given_one_dtype() -> None:
    x = torch.randn(4, 8)
    model = Made(lambda self, x: torch.lerp(self.linear(x), x, 0.5), linear=nn.Linear(8, 8))
    program = static.capture(model, None, [x])
    casting = cast_graph(program.graph_module, OpLists.default(), torch.bfloat16)
    assert next(row.reads for row in casting.rows if row.op == "lerp") == "float32"
    assert casting.module(x)[0].dtype is torch.float32


def test_a_cast_and_back_vanishes() -> None:
    x = torch.randn(2, 8)
    model = Made(lambda self, x: self.b(self.a(x).float()), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    program = static.capture(model, None, [x])
    cast = cast_graph(program.graph_module, OpLists.default(), BF16, together=2**40)
    assert cast.casts_after == 2  # x, and the parameters
    with amp.auto_cast(dtype=BF16):
        assert torch.equal(cast.module(x)[0], model(x))


def written_behind_a_view(self: Any, x: torch.Tensor) -> Any:
    y = F.softmax(x, -1)
    view = y.t()
    first = self.c(view)
    y.mul_(3.0)
    return first + self.c(view)


def written_behind_two_views(self: Any, x: torch.Tensor) -> Any:
    y = F.softmax(x, -1)
    view = y.view(-1)
    first, second = view.view(2, 8), view.view(2, 8)
    y.mul_(3.0)
    return self.a(first) + self.a(second)


def bounded_through_a_view(self: Any, x: torch.Tensor) -> Any:
    y = self.a(x)
    y.view(-1).clamp_(max=1 - 1e-4)
    return y


@pytest.mark.parametrize("forward", [written_behind_a_view, written_behind_two_views, bounded_through_a_view])
def test_what_a_write_in_place_changes_is_read_after_it(forward: Callable[..., Any]) -> None:
    x, model = 5 * torch.randn(2, 8), Made(forward, a=nn.Linear(8, 8), c=nn.Linear(2, 8))
    program = static.capture(model, None, [x])
    cast = cast_graph(program.graph_module, OpLists.default(), BF16)
    with amp.auto_cast(dtype=BF16):
        assert torch.equal(cast.module(x)[0], model(x))


@pytest.mark.exhaustive
@settings(max_examples=200)
@given(st.data())
def test_the_cut_is_a_minimum(data: st.DataObject) -> None:
    """Against trying every choice."""
    count = data.draw(st.integers(1, 5))
    free = list(range(count))
    sources = {f"s{i}": data.draw(st.sampled_from(["half", "float"])) for i in range(2)}
    reading = st.lists(st.sampled_from(["half", "float", *free]), max_size=4)
    readers: dict[Any, Any] = {}
    for value in [*sources, *free]:
        readers[value] = [r for r in data.draw(reading) if r == "half" or r == "float" or value in sources or r > value]

    def cost(choice: dict[Any, str]) -> int:
        label = {**sources, **choice}
        total = 0
        for value, wanted in readers.items():
            total += any((r if isinstance(r, str) else label[r]) != label[value] for r in wanted)
        return total

    found = fewest_casts(free, sources, readers)
    best = min(cost({v: "half" if bits >> v & 1 else "float" for v in free}) for bits in range(2**count))
    assert cost(found) == best


# ---- programs and executors


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_training_learns_and_trains_the_models_own_parameters(level: str, compiled: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    program = static.capture(model, nn.MSELoss(), (torch.randn(4, 8), torch.randn(4, 1)))
    assert [id(p) for p in program.parameters()] == [id(p) for p in model.parameters()]
    optimizer = static.amp.decorate(optimizers.FusedAdam(model.parameters(), lr=0.02), level=level, dtype="bfloat16")
    optimizer.minimize(program.loss)
    executor = static.Executor(compiled=compiled)
    x = torch.randn(32, 8)  # another batch size than the example's
    feed = {"input": x, "label": x.sum(1, keepdim=True)}
    losses = [executor.run(program, feed, [program.loss])[0].item() for _ in range(40)]
    assert losses[-1] < losses[0] / 5
    assert {p.dtype for p in model.parameters()} == {BF16 if level == "O2" else torch.float32}


def test_fp32_training_is_eager_training() -> None:
    _, program, inputs = captured("resnet")
    reference = Residual()
    reference.load_state_dict({k.removeprefix("model."): v for k, v in program.graph_module.state_dict().items()})
    program.minimize(torch.optim.SGD(program.parameters(), lr=0.1, momentum=0.9))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        (loss,) = static.Executor().run(program, dict(zip(program.feed_names, inputs, strict=True)), [program.loss])
        expected = F.cross_entropy(reference(inputs[0]), inputs[1])
        unscaled_step(expected, optimizer)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close([*program.graph_module.buffers()], [*reference.buffers()])


def test_o2_steps_are_those_of_amp_decorate() -> None:
    model, other = SimpleNet(16), SimpleNet(16)
    other.load_state_dict(model.state_dict())
    x, y = torch.rand(8, 16), torch.rand(8, 16)
    program = static.capture(model, nn.MSELoss(), (x, y))
    optimizer = static.amp.decorate(torch.optim.SGD(model.parameters(), lr=0.1), level="O2", dtype="bfloat16")
    optimizer.minimize(program.loss)
    optimizer.amp_init("cpu")
    eager = torch.optim.SGD(other.parameters(), lr=0.1)
    amp.decorate(other, eager, level="O2", dtype="bfloat16")
    for _ in range(5):
        (loss,) = static.Executor().run(program, {"x": x, "label": y}, [program.loss])
        with amp.auto_cast(level="O2", dtype="bfloat16", use_promote=False):
            expected = F.mse_loss(other(x), y)
        unscaled_step(expected, eager)
        torch.testing.assert_close(loss.float(), expected.detach().float(), rtol=2**-7, atol=0)
    torch.testing.assert_close([*model.parameters()], [*other.parameters()], rtol=2**-7, atol=2**-9)


def test_an_overflow_skips_the_step_and_lowers_the_scale() -> None:
    model = nn.Linear(4, 1)
    program = static.capture(model, nn.MSELoss(), (torch.randn(2, 4), torch.randn(2, 1)))
    optimizer = static.amp.decorate(torch.optim.SGD(model.parameters(), lr=0.1), init_loss_scaling=256.0)
    optimizer.minimize(program.loss)
    before = model.weight.detach().clone()
    x = torch.ones(2, 4)
    static.Executor().run(program, {"input": x, "label": torch.full((2, 1), float("inf"))})
    assert torch.equal(model.weight, before)
    assert optimizer.get_loss_scaling() == 128.0
    static.Executor().run(program, {"input": x, "label": torch.ones(2, 1)})
    assert not torch.equal(model.weight, before)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_computing_without_training(level: str) -> None:
    model, program, optimizer = ready()
    static.amp.decorate(optimizer, level=level, dtype="bfloat16").minimize(program.loss)
    before = model.weight.detach().float().clone()
    feed = {"input": torch.randn(3, 4), "label": torch.randn(3, 4)}
    first, output = static.Executor().run(program, feed, [program.loss, "output"], train=False)
    assert output.dtype is (torch.float32 if level == "O0" else BF16)
    torch.testing.assert_close(model.weight.float(), before, rtol=2**-8, atol=0)
    (second,) = static.Executor().run(program, feed, [program.loss])
    assert torch.equal(first, second)
    assert not torch.equal(model.weight.float(), before)


def test_a_16_bit_loss_is_scaled_in_fp32() -> None:
    model, program, optimizer = ready()
    static.amp.decorate(optimizer, use_pure_fp16=True, use_fp16_guard=False).minimize(program.loss)
    before = model.weight.detach().float().clone()
    feed = {"input": torch.zeros(2, 4), "label": torch.full((2, 4), 3.0)}
    (loss,) = static.Executor().run(program, feed, [program.loss])
    assert loss.dtype is FP16
    assert loss.item() * 2**15 > torch.finfo(FP16).max
    model.zero_grad()
    static.Executor().run(program, {**feed, "input": torch.ones(2, 4)})
    assert not torch.equal(model.weight.float(), before), "the step was not skipped"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_training_on_a_gpu(level: str, compiled: bool) -> None:
    model = Transformer().cuda()
    ids, labels = words(8).cuda(), words(8).flatten().cuda()
    program = static.capture(model, nn.CrossEntropyLoss(), (ids, labels))
    static.amp.decorate(optimizers.FusedAdam(model.parameters(), lr=0.01), level=level).minimize(program.loss)
    executor = static.Executor(compiled=compiled)
    feed = dict(zip(program.feed_names, (ids, labels), strict=True))
    losses = [executor.run(program, feed, [program.loss])[0].item() for _ in range(60)]
    assert losses[-1] < losses[0] / 4


def test_fetching_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    program = static.capture(model, nn.MSELoss(), (torch.randn(2, 4), torch.randn(2, 3)))
    x = torch.randn(5, 4)
    feed = {"input": x, "label": torch.zeros(5, 3)}
    loss, output, hidden = static.Executor().run(program, feed, [program.loss, program.outputs[0], "linear"])
    torch.testing.assert_close(hidden, model[0](x).detach())
    assert torch.equal(output, hidden.relu())
    torch.testing.assert_close(loss, output.square().mean())
    assert static.Executor().run(program, feed) == []
    with pytest.raises(HalfstepError, match="fetch_list names lineer"):
        static.Executor().run(program, feed, ["lineer"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_saving_and_loading(level: str, tmp_path: Path) -> None:
    _, program, inputs = captured("resnet")
    feed = dict(zip(program.feed_names, inputs, strict=True))
    optimizer = static.amp.decorate(torch.optim.SGD(program.parameters(), lr=0.1), level=level, dtype="bfloat16")
    optimizer.minimize(program.loss)
    for _ in range(2):
        static.Executor().run(program, feed)
    program.save(tmp_path / "program.pt")
    loaded = static.load(tmp_path / "program.pt")
    assert loaded.feed_names == program.feed_names
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    for name, value in loaded.graph_module.state_dict().items():
        mine = program.graph_module.state_dict()[name]
        assert torch.equal(value.to(mine.dtype), mine)
    again = static.amp.decorate(torch.optim.SGD(loaded.parameters(), lr=0.1), level=level, dtype="bfloat16")
    again.minimize(loaded.loss)
    expected = static.Executor().run(program, feed, [program.loss])[0]
    assert torch.equal(static.Executor().run(loaded, feed, [loaded.loss])[0], expected)


# ---- names, errors, and what Paddle's decorate does


def ready() -> tuple[nn.Module, static.Program, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    program = static.capture(model, nn.MSELoss(), (torch.randn(2, 4), torch.randn(2, 4)))
    return model, program, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("arguments", "keywords", "scale", "half", "level"),
    [
        ((), {}, 2.0**16, FP16, "O1"),
        ((), {"init_loss_scaling": 8.0}, 8.0, FP16, "O1"),
        ((None, 8.0), {}, 8.0, FP16, "O1"),
        ((), {"use_pure_fp16": True}, 2.0**15, FP16, "O2"),
        ((), {"use_bf16": True}, 1.0, BF16, "O1"),
        ((None, "O2", "bfloat16"), {}, 1.0, BF16, "O2"),
        ((), {"level": "OD"}, 2.0**16, FP16, "OD"),
        ((), {"level": "O0"}, 1.0, FP16, "O0"),
    ],
)
def test_both_signatures_of_decorate(arguments: Any, keywords: Any, scale: float, half: Any, level: str) -> None:
    _, program, optimizer = ready()
    found = static.amp.decorate(optimizer, *arguments, **keywords)
    found.minimize(program.loss)
    assert (found.get_loss_scaling(), found._half, found._level) == (scale, half, level)


def test_hysteresis_of_the_older_signature() -> None:
    _, program, optimizer = ready()
    found = static.amp.decorate(optimizer, init_loss_scaling=100.0, use_pure_fp16=False)
    found.minimize(program.loss)
    x = torch.full((2, 4), float("inf"))
    scales = []
    for _ in range(4):
        static.Executor().run(program, {"input": x, "label": x})
        scales.append(found.get_loss_scaling())
    assert scales == pytest.approx([100.0, 80.0, 80.0, 64.0])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_state_of_a_decorated_optimizer_resumes_its_training(level: str, tmp_path: Path) -> None:
    x, y = torch.randn(2, 4), torch.randn(2, 4)

    def decorated(program: static.Program) -> static.amp.MixedPrecisionOptimizer:
        adam = torch.optim.AdamW(program.graph_module.parameters(), lr=0.1)
        found: static.amp.MixedPrecisionOptimizer = static.amp.decorate(
            adam, level=level, init_loss_scaling=8.0, incr_every_n_steps=1
        )
        found.minimize(program.loss)
        found.prepare()
        return found

    def train(program: static.Program) -> None:
        for _ in range(3):
            static.Executor().run(program, {"input": x, "label": y})

    _, first, _ = ready()
    one = decorated(first)
    train(first)
    first.save(tmp_path / "program")
    second = static.load(tmp_path / "program")
    two = decorated(second)
    two.set_state_dict(deepcopy(one.state_dict()))
    assert two.get_loss_scaling() == one.get_loss_scaling() == 64.0
    train(first)
    train(second)
    assert all(map(torch.equal, first.graph_module.parameters(), second.graph_module.parameters()))
    with pytest.raises(HalfstepError, match="has no param_groups"):
        two.set_state_dict({"state": {}})


def test_explain_and_black_values() -> None:
    model, program, optimizer = ready()
    assert "nothing was decorated" in program.explain()
    static.amp.decorate(optimizer, static.amp.CustomOpLists(custom_black_varnames=["linear"])).minimize(program.loss)
    assert "black value" in program.explain()
    static.amp.decorate(torch.optim.SGD(model.parameters(), lr=0.1)).minimize(program.loss)
    lines = program.explain().splitlines()
    assert lines[0].split() == ["node", "op", "reads", "gives", "rule"]
    assert lines[1].split() == ["linear", "linear", "float16", "float16", "half", "(matrix-unit)"]
    assert lines[-1] == "casts: 4 before, 3 after"


@pytest.mark.exhaustive
@pytest.mark.parametrize("emulate", [False, True])
def test_the_backend_with_convolutions_and_other_batch_sizes(emulate: bool) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))
    options = {"inductor": False, "dtype": "bfloat16", "emulate": emulate}
    compiled = torch.compile(model, backend="halfstep", options=options)
    for count, batch in enumerate((3, 2, 5, 7), 1):
        y = compiled(torch.randn(batch, 2, 8, 8))
        y.float().sum().backward()
        assert y.shape == (batch, 5)
        assert y.dtype is BF16
        assert model[1].num_batches_tracked == count, "to trace is not to compute"


@pytest.mark.exhaustive
@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=needs_compiler)])
def test_the_pass_as_a_backend_of_torch_compile(inductor: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 4))
    compiled = torch.compile(model, backend="halfstep", options={"inductor": inductor, "dtype": "bfloat16"})
    x = torch.randn(6, 8)
    with amp.auto_cast(dtype="bfloat16"):
        expected = model(x)
    expected.float().square().mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    found = compiled(x)
    assert found.dtype is BF16
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-8)
    found.float().square().mean().backward()
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert param.grad.dtype is torch.float32
        torch.testing.assert_close(param.grad, grad, rtol=2**-5, atol=2**-8)
    with torch.no_grad():
        assert compiled(torch.randn(9, 8)).shape == (9, 4)


def guarded(self: Any, x: torch.Tensor) -> Any:
    x = self.first(x)
    with static.amp.fp16_guard():
        return self.last(x)


def test_a_captured_program_trains_in_float16_where_its_guard_says_so() -> None:
    """``test_paddle_static_guide.py`` has the networks of Paddle's guide, line by line."""
    model = Made(guarded, first=nn.Linear(4, 4), last=nn.Linear(4, 4))
    x, y = torch.rand(8, 4), torch.rand(8, 4)
    program = static.capture(model, nn.MSELoss(), (x, y))
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = static.amp.decorate(sgd, init_loss_scaling=128.0, use_pure_fp16=True, use_fp16_guard=True)
    optimizer.minimize(program.loss)
    optimizer.amp_init("cpu", scope=None)
    feed = dict(zip(program.feed_names, (x, y), strict=True))
    losses = [static.Executor("cpu").run(program, feed, [program.loss.name])[0] for _ in range(4)]
    assert losses[-1] < losses[0]
    assert losses[0].dtype is torch.float32
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 2 + [FP16] * 2
    assert optimizer.get_loss_scaling() == 128.0


@pytest.mark.parametrize(("master_weight", "codes"), [(None, []), (False, ["HS101", "HS106"])])
def test_amp_init_logs_what_an_optimizer_without_masters_loses(
    master_weight: bool | None, codes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    program = static.capture(model, nn.CrossEntropyLoss(), (torch.randn(4, 8), torch.tensor([0, 1, 2, 1])))
    adam = torch.optim.Adam(model.parameters(), lr=1e-5)
    optimizer = static.amp.decorate(adam, level="O2", dtype="float16", master_weight=master_weight)
    optimizer.minimize(program.loss)
    optimizer.amp_init()
    lines = [record.message for record in caplog.records if record.name == "halfstep"]
    assert len(lines) == bool(codes)
    assert all(code in lines[0] for code in codes)
