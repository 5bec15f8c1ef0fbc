"""A model computes by its own level, whatever else was brought up in the process; what is outside follows the latest O1
session, as long as there is one."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from halfstep import OpLists, amp, optimizers, static
from halfstep.casting import dynamo, rules
from halfstep.casting.current import leave_traced, thread
from halfstep.casting.dispatch import function_modes
from halfstep.casting.scope import NO_CASTING, OpCasting, leave, session_casting
from halfstep.torch_internals.compiler_compat import tracer_follows_autocast
from tests.support.worlds import (
    BF16,
    FP16,
    FP32,
    HALVES,
    LEVELS,
    Made,
    advance,
    in_a_thread,
    read_back,
    scaled_step,
    start_amp,
    with_optimizer,
)

from .test_islands import Twice

X = torch.linspace(-1, 1, 12).view(3, 4)


class Net(nn.Module):
    """Notes the dtypes of a product and of a softmax of it; ``inner`` is another model that it calls."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.seen += [y.dtype, F.softmax(y, -1).dtype]
        return y if self.inner is None else self.inner(y.float())


def computes(level: str, dtype: torch.dtype) -> list[torch.dtype]:
    """What ``Net.seen`` must be."""
    return {"O0": [FP32, FP32], "O1": [dtype, FP32], "O2": [dtype, dtype], "O3": [dtype, dtype]}[level]


def bring_up(
    level: str, dtype: torch.dtype = BF16, inner: nn.Module | None = None, face: str = "initialize", **arguments: Any
) -> Net:
    torch.manual_seed(0)
    model, optimizer = with_optimizer(Net(inner), torch.optim.SGD, lr=0.1)
    if face == "initialize":
        amp.initialize(model, optimizer, opt_level=level, dtype=dtype, verbosity=0, **arguments)
    else:
        amp.decorate(model, optimizer, level=level, dtype=dtype)
    model.optimizer = [optimizer]  # alive as long as the model
    return model


def seen(model: Net, run: Callable[[torch.Tensor], Any] | None = None) -> list[torch.dtype]:
    model.seen.clear()
    (run or model)(X)
    return model.seen


def outside() -> torch.dtype:
    return (X @ X.mT).dtype


CASES = list(itertools.product(LEVELS, HALVES))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("second", "second_dtype"), CASES)
@pytest.mark.parametrize(("first", "first_dtype"), CASES)
def test_two_models_after_each_other(
    first: str, first_dtype: torch.dtype, second: str, second_dtype: torch.dtype
) -> None:
    """A notebook that compares levels: training of each, in both orders, forward and backward."""
    one, two = bring_up(first, first_dtype), bring_up(second, second_dtype)
    for _ in range(2):
        for model, level, dtype in ((one, first, first_dtype), (two, second, second_dtype)):
            model.seen.clear()
            (optimizer,) = model.optimizer
            loss = model(X).float().square().mean()
            scaled_step(loss, optimizer)
            assert model.seen == computes(level, dtype)
    latest = [dtype for level, dtype in ((first, first_dtype), (second, second_dtype)) if level == "O1"]
    assert outside() is (latest[-1] if latest else FP32)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_decorated_models_are_left_alone_as_well(level: str) -> None:
    session = bring_up("O1", FP16)
    model = bring_up(level, BF16, face="decorate")
    x = X if level == "O1" else X.bfloat16()
    model(x)
    assert model.seen == ([FP32, FP32] if level == "O1" else [BF16, BF16])
    model.seen.clear()
    with amp.auto_cast(dtype=BF16):
        model(x)
    assert model.seen == [BF16, FP32]
    assert seen(session) == [FP16, FP32]


@pytest.mark.parametrize("inner", ["O0", "O1"])
def test_an_inner_model_with_fp32_weights(inner: str) -> None:
    inside = bring_up(inner, FP16)

    def forward(self: Any, x: torch.Tensor) -> Any:
        before = self.linear(x)
        inside(x)
        assert self.linear(x).dtype is before.dtype
        return before

    around = Made(forward, linear=nn.Linear(4, 4))
    amp.initialize(around, opt_level="O1", dtype=BF16, verbosity=0)
    assert around(X).dtype is BF16
    assert inside.seen == computes(inner, FP16)


@pytest.mark.parametrize("level", LEVELS)
def test_explicit_scopes_have_their_way(level: str) -> None:
    _alive = bring_up("O1", FP16)
    model = bring_up(level)
    weight = model.linear.weight.dtype
    with amp.disable_casts():
        assert seen(model) == [weight, weight]
    with amp.auto_cast(dtype=FP16, custom_white_list=["softmax"]):
        assert seen(model) == [FP16, FP16]
    assert seen(model) == computes(level, BF16)


@pytest.mark.parametrize("level", LEVELS)
def test_copies_and_pickles(level: str) -> None:
    model = bring_up(level)
    model.optimizer = []
    twins = [copy.deepcopy(model), read_back(model, weights_only=False)]
    _alive = bring_up("O1", FP16)
    for twin in (model, *twins):
        assert seen(twin) == computes(level, BF16)


@pytest.mark.parametrize("level", LEVELS)
def test_threads(level: str) -> None:
    model, found = bring_up(level), []
    session = bring_up("O1", FP16)

    def work() -> None:
        found.append((list(seen(model)), seen(session), outside()))

    in_a_thread(work)
    assert found == [(computes(level, BF16), [FP16, FP32], FP16)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(level: str, reentrant: bool) -> None:
    class Saving(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    model = Saving()
    amp.initialize(model, opt_level=level, dtype=BF16, verbosity=0)
    _alive = bring_up("O1", FP16)
    with set_checkpoint_early_stop(False):
        model(X.clone().requires_grad_()).float().sum().backward()
    assert model.seen == computes(level, BF16) * 2
    assert model.linear.weight.grad is not None


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y, F.softmax(y, -1)


class Broken(Wide):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return y, F.softmax(y, -1)


PYTHON_METHODS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pow": lambda y: y**2,
    "rpow": lambda y: 2.0**y,
    "rsub": lambda y: 2.0 - y,
    "norm": lambda y: y.norm(),
    "split": lambda y: y.split(2, -1)[0],
    "unflatten": lambda y: y.unflatten(-1, (2, 2)),
    "exp": lambda y: y.exp(),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("method", PYTHON_METHODS)
def test_a_compiled_method_is_cast_as_it_is_in_eager_mode(method: str, level: str) -> None:
    torch._dynamo.reset()
    model = Made(lambda self, x: self.call(self.linear(x)), linear=nn.Linear(4, 4))
    model.call = PYTHON_METHODS[method]
    amp.initialize(model, opt_level=level, dtype=BF16, cast_model_outputs=BF16, verbosity=0)
    inner: list[torch.dtype] = []
    model.call = lambda y: inner.append((out := PYTHON_METHODS[method](y)).dtype) or out
    expected, fast = model(X), torch.compile(model, backend="eager", fullgraph=True)
    found = fast(X)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert inner[0] is inner[1]


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_with_a_layer_that_dynamo_skips_is_compiled_around_it(level: str) -> None:
    torch._dynamo.reset()
    recurrent = Made(lambda self, x: self.lstm(x)[0] * 2, lstm=nn.LSTM(4, 4, batch_first=True))
    model, _optimizer = start_amp(recurrent, torch.optim.SGD, level, dtype=BF16, lr=0.1)
    expected, found = model(X), torch.compile(model, backend="eager")(X)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize("kind", [Wide, Broken])
@pytest.mark.parametrize(("level", "in_session"), [("O0", True), ("O1", False), ("O2", True)])
def test_compiled(level: str, in_session: bool, kind: type[Wide]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = kind()
    keep = torch.float32 if level in ("O2", "O3") else None
    amp.initialize(model, opt_level=level, dtype=BF16, verbosity=0)
    amp.deactivate()
    session = bring_up("O1", FP16) if in_session else None
    fast = torch.compile(model, backend="aot_eager", fullgraph=kind is Wide)
    before = torch._C._len_torch_function_stack()
    for _ in range(2):
        expected, found = model(X), fast(X)
        assert [t.dtype for t in found] == [keep or dtype for dtype in computes(level, BF16)]
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
        assert torch._C._len_torch_function_stack() == before
        assert outside() is (FP16 if in_session else FP32)
    with amp.disable_casts():
        assert fast(X)[0].dtype is FP32
    assert fast(X)[0].dtype is (keep or computes(level, BF16)[0])
    del session


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_forward_that_ends_early(level: str, error: type[BaseException]) -> None:
    """A notebook's stop button raises KeyboardInterrupt, for which torch calls no hooks."""
    session, model = bring_up("O1", FP16), bring_up(level)

    def stop(*_: Any) -> None:
        raise error

    hook = model.linear.register_forward_hook(stop)
    with pytest.raises(error), amp.auto_cast(dtype=FP16):
        model(X)
    hook.remove()
    assert seen(session) == [FP16, FP32]
    assert seen(model) == computes(level, BF16)
    assert outside() is FP16 if level != "O1" else BF16


@pytest.mark.parametrize("around", [nullcontext, lambda: amp.auto_cast(dtype=FP16)], ids=["nothing", "fp16"])
@pytest.mark.parametrize("level", LEVELS)
def test_the_next_op_after_an_interrupted_model_is_as_before_it(level: str, around: Callable[[], Any]) -> None:
    """Nobody calls halfstep in between: a notebook goes on in another cell."""
    model = bring_up(level, BF16)
    amp.deactivate()
    outer = nn.Sequential(nn.Sequential(model))

    def stop(*_: Any) -> None:
        with amp.auto_cast(dtype=FP16):
            raise KeyboardInterrupt

    hook = model.linear.register_forward_hook(stop)
    with around():
        before = outside(), torch.is_autocast_enabled("cpu")
        with pytest.raises(KeyboardInterrupt) as kept:  # its traceback has all frames
            outer(X)
        assert (outside(), torch.is_autocast_enabled("cpu")) == before
    assert outside() is FP32
    hook.remove()
    del kept
    assert seen(model) == computes(level, BF16)
    assert torch._C._len_torch_function_stack() == 0


def test_a_scope_that_outlives_the_model_it_began_in() -> None:
    left_open = amp.auto_cast(dtype=FP16)

    class Leaky(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left_open.__enter__()
            return super().forward(x)

    model = Leaky()
    amp.initialize(model, opt_level="O0", verbosity=0)
    assert seen(model) == [FP16, FP32]
    assert outside() is FP32
    left_open.__exit__(None, None, None)
    assert outside() is FP32


AROUND = {
    "off": lambda: torch.autocast("cpu", enabled=False),
    "float16": lambda: torch.autocast("cpu", FP16),
    "bfloat16": lambda: torch.autocast("cpu", BF16),
}


@pytest.mark.parametrize("beside", [None, "O0", "O1"])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("around", AROUND)
def test_torch_autocast_around_a_model_has_no_say(around: str, level: str, beside: str | None) -> None:
    model = bring_up(level, BF16)
    amp.deactivate()
    other = beside and bring_up(beside, FP16)
    with AROUND[around]():
        assert seen(model) == computes(level, BF16)
        assert torch.is_autocast_enabled("cpu") == (around != "off")
    del other


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("level", "emulate", "inlined"),
    [("O0", False, True), ("O1", True, True), ("O1", False, False), ("O2", False, True), ("decorate", True, True)],
)
def test_torch_autocast_around_a_compiled_model_is_as_in_eager_mode(level: str, emulate: bool, inlined: bool) -> None:
    """Where the root of what is compiled is a module of torch, and where the model is inside of a larger one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    if level == "decorate":  # a plain torch.autocast around it stays in force
        model = amp.decorate(model, level="O2", dtype="bfloat16", emulate=emulate)
    else:
        amp.initialize(model, opt_level=level, dtype=BF16, verbosity=0, emulate=emulate)
    called = nn.Sequential(model) if inlined else model
    fast = torch.compile(called, backend="aot_eager", fullgraph=True)
    for around in ("float16", "bfloat16", *(() if level == "decorate" else ("off",))):
        with AROUND[around](), torch.no_grad():
            expected, found = called(X), fast(X)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        own = {"O0": FP32, "O1": BF16, "O2": FP32, "decorate": FP16 if around == "float16" else BF16}
        assert found.dtype is own[level]


@pytest.mark.exhaustive
@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("inside", AROUND)
@pytest.mark.parametrize("compiled", [False, True])
def test_torch_autocast_inside_a_model_has_its_way(compiled: bool, inside: str, level: str, emulate: bool) -> None:
    torch._dynamo.reset()

    def forward(self: Any, x: torch.Tensor) -> Any:
        with AROUND[inside]():
            return self.linear(x)

    model = Made(forward, linear=nn.Linear(4, 4))
    amp.initialize(model, opt_level=level, dtype=BF16, verbosity=0, emulate=emulate)
    hook: list[torch.dtype] = []
    model.linear.register_forward_hook(lambda m, a, o: hook.append(o.dtype))
    (torch.compile(model, backend="aot_eager") if compiled else model)(X)
    weight = model.linear.weight.dtype
    assert hook == [{"off": weight, "float16": FP16, "bfloat16": BF16}[inside]]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_where_autocast_is_off(reentrant: bool) -> None:
    _alive = bring_up("O1", BF16)
    linear, dtypes = nn.Linear(4, 4), []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        dtypes.append(y.dtype)
        return y.exp()

    with torch.autocast("cpu", enabled=False), set_checkpoint_early_stop(False):
        y = checkpoint(block, X.clone().requires_grad_(), use_reentrant=reentrant)
    y.sum().backward()
    assert dtypes == [FP32, FP32]


@pytest.mark.exhaustive
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_compiled_checkpoint(level: str) -> None:
    torch._dynamo.reset()

    model = Made(lambda self, x: checkpoint(self.linear, x, use_reentrant=False), linear=nn.Linear(4, 4))
    amp.initialize(model, opt_level=level, dtype=BF16, verbosity=0)
    amp.deactivate()
    session = bring_up("O1", FP16, custom_white_list=["relu"])
    assert torch.compile(model, backend="aot_eager")(X).dtype is computes(level, BF16)[0]
    del session


def test_a_fused_step_in_another_thread() -> None:
    """It writes to the weights without a new version; this thread has casts of them."""
    model, optimizer = with_optimizer(nn.Linear(4, 4), torch.optim.Adam, lr=1.0, fused=True)
    amp.initialize(model, optimizer, opt_level="O1", dtype=BF16, verbosity=0)
    before = model(X)

    def step() -> None:
        model(X).float().square().sum().backward()
        optimizer.step()

    in_a_thread(step)
    assert (model(X) - before).abs().max() > 0.5


def behind_a_graph_break(body: Callable[[], None]) -> None:
    """Run code as compiled code does behind a graph break: a frame of Dynamo's is on the stack."""
    with mock.patch.object(dynamo, "restore_dtypes_after_trace"):  # there is no trace
        torch._dynamo.disable(body)()


@pytest.mark.parametrize("explicit", [False, True], ids=["model", "scope"])
def test_a_scope_behind_a_graph_break_decides_and_gives_back(explicit: bool) -> None:
    casting = OpCasting(BF16, devices=["cpu"])
    before = torch._C._len_torch_function_stack()

    def body() -> None:
        (dynamo.enter_scope if explicit else dynamo.enter_model)(casting)
        natively = explicit and tracer_follows_autocast()
        assert (outside(), torch.is_autocast_enabled("cpu")) == (BF16, natively)
        for other, dtype in ((NO_CASTING, FP32), (OpCasting(FP16, devices=["cpu"]), FP16)):
            with other:
                assert outside() is dtype
            assert outside() is BF16
        if explicit:
            leave_traced()
        else:
            leave(object())  # the hook of the model, which is not compiled

    behind_a_graph_break(body)
    assert (outside(), torch.is_autocast_enabled("cpu")) == (FP32, False)
    assert torch._C._len_torch_function_stack() == before
    leave(object())
    assert outside() is FP32


def test_a_model_in_compiled_code_changes_nothing_where_a_scope_decides_or_its_casts_are_in_force() -> None:
    mine, other, nothing = (OpCasting(dtype, enabled=dtype is not None, emulate=False) for dtype in (BF16, FP16, None))

    def body() -> None:
        dynamo.enter_model(nothing)
        assert outside() is FP32
        dynamo.enter_model(mine)
        modes = function_modes()
        dynamo.enter_model(mine)
        assert function_modes() == modes
        leave_traced()
        dynamo.enter_scope(mine)
        dynamo.enter_model(other)
        assert outside() is BF16
        for expected in (BF16, BF16, FP32, FP32):
            leave_traced()
            assert outside() is expected

    behind_a_graph_break(body)


@pytest.mark.parametrize("begin", [amp.disable_casts, lambda: amp.auto_cast(dtype=FP16)], ids=["off", "fp16"])
def test_what_interrupted_compiled_code_left_is_put_back(begin: Callable[[], Any]) -> None:
    before = torch._C._len_torch_function_stack()

    def body() -> None:
        dynamo.enter_model(OpCasting(BF16))
        dynamo.enter_scope(OpCasting(BF16, OpLists.custom(["exp"])))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        behind_a_graph_break(body)
    assert outside() is BF16
    with begin():
        assert outside() is (FP32 if begin is amp.disable_casts else FP16)
    assert outside() is FP32
    assert torch._C._len_torch_function_stack() == before
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize("inlined", [False, True])
def test_an_interrupt_behind_a_graph_break(inlined: bool) -> None:
    torch._dynamo.reset()

    class Stopped(Wide):
        def forward(self, x: torch.Tensor) -> Any:
            self.linear(x)
            torch._dynamo.graph_break()
            raise KeyboardInterrupt

    inner = Stopped()
    amp.initialize(inner, opt_level="O1", dtype=BF16, verbosity=0)
    amp.deactivate()
    model = torch.compile(nn.Sequential(inner) if inlined else inner, backend="aot_eager")
    with pytest.raises(KeyboardInterrupt):
        model(X)
    amp.deactivate()
    assert outside() is FP32
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiled", [False, True])
def test_an_exempted_model(compiled: bool) -> None:
    torch._dynamo.reset()
    session = bring_up("O1", FP16)
    teacher = amp.exempt(nn.Sequential(nn.Linear(4, 4)))
    run = torch.compile(teacher, backend="aot_eager", fullgraph=True) if compiled else teacher
    assert run(X).dtype is FP32
    with amp.auto_cast(dtype=BF16):
        assert run(X).dtype is FP32
    assert seen(session) == [FP16, FP32]
    assert outside() is FP16


# ---- outside of models


def replaceable() -> tuple[Any, ...]:
    """Names of torch that have wrappers while ops are cast."""
    return (torch.autograd._engine_run_backward, vars(torch.autograd.Function)["apply"])


TORCHS_OWN = replaceable()


def torch_is_untouched() -> bool:
    """Whether nothing of the casts is left in torch, once somebody has asked for them."""
    session_casting()
    with amp.disable_casts():
        pass
    return replaceable() == TORCHS_OWN and not (function_modes() or thread.open or torch.is_autocast_enabled("cpu"))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "FusedAdam": optimizers.FusedAdam,
    "LARC": lambda params: optimizers.LARC(torch.optim.SGD(params, lr=0.1)),
}


@pytest.mark.usefixtures("collector_off")
def test_outside_follows_the_latest_session_that_is_there() -> None:
    one = bring_up("O1", BF16)
    two = bring_up("O1", FP16)
    assert outside() is FP16
    del two
    assert outside() is BF16
    assert seen(one) == [BF16, FP32]
    (optimizer,) = one.optimizer
    del one
    assert outside() is BF16, "its optimizer is still there"
    del optimizer
    assert outside() is FP32
    assert session_casting() is None
    assert torch_is_untouched()


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize(
    ("ask", "lists"),
    [(ask, None) for ask in ("an op", "a scope", "a model", "a backward pass", "another thread")]
    + [("an op", OpLists.native())],
)
def test_whoever_comes_next_finds_that_a_session_is_over(ask: str, lists: OpLists | None) -> None:
    others, leaf = [bring_up("O0")], torch.ones(2, requires_grad=True)
    model = bring_up("O1", BF16, op_lists=lists)
    assert outside() is BF16
    loss = leaf.sum()
    del model
    if ask == "a scope":
        with amp.auto_cast(dtype=FP16):
            assert outside() is FP16
    elif ask == "a model":
        others[0](X)
    elif ask == "a backward pass":
        loss.backward()
    elif ask == "another thread":
        found: list[Any] = []
        in_a_thread(lambda: found.append((seen(others[0]) == [FP32, FP32], outside())))
        assert found == [(True, FP32)]
    assert outside() is FP32
    others.clear()  # where products are emulated, it holds the names of torch that checkpoints need
    assert torch_is_untouched()


@pytest.mark.usefixtures("collector_off")
def test_a_thread_that_has_joined_a_session_finds_that_it_is_over() -> None:
    models, go, gone, found = [bring_up("O1", FP16)], threading.Event(), threading.Event(), []

    def work() -> None:
        models[0](X)
        found.append(outside())
        go.set()
        gone.wait(60)
        found.append(outside())

    worker = threading.Thread(target=work)
    worker.start()
    go.wait(60)
    models.clear()
    gone.set()
    worker.join()
    assert found == [FP16, FP32]
    assert outside() is FP32


@pytest.mark.usefixtures("collector_off")
def test_a_scope_or_a_checkpoint_that_a_session_began_in_goes_on_without_it() -> None:
    model = bring_up("O1", BF16)
    dtypes: list[torch.dtype] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        dtypes.append((x @ x.mT).dtype)
        return x.sin()

    y = checkpoint(block, X.clone().requires_grad_(), use_reentrant=False)
    with amp.auto_cast(dtype=FP16):
        del model
        assert outside() is FP16
    assert outside() is FP32
    y.sum().backward()
    assert dtypes == [BF16, BF16]
    assert outside() is FP32
    assert torch_is_untouched()


@pytest.mark.usefixtures("collector_off")
@pytest.mark.filterwarnings("ignore:FusedAdam")  # at O3 without masters
@pytest.mark.parametrize("level", LEVELS)
def test_models_and_optimizers_go_with_their_last_reference(level: str) -> None:
    """In a notebook, ``del model, optimizer`` ends a session at once, and not when the garbage collector runs."""
    for made, trained in itertools.product(OPTIMIZERS.values(), [False, True]):
        model: Any = Net()
        model, stepping = amp.initialize(model, made(model.parameters()), opt_level=level, dtype=BF16, verbosity=0)
        assert outside() is (BF16 if level == "O1" else FP32)
        if trained:
            advance(model(X).float().sum(), stepping)
        gone = [weakref.ref(model), weakref.ref(stepping)]
        del model, stepping
        assert [each() for each in gone] == [None, None]
        assert outside() is FP32


@pytest.mark.usefixtures("collector_off")
def test_a_session_lasts_as_long_as_a_copy_of_its_model() -> None:
    model = bring_up("O1", FP16)
    twin = copy.deepcopy(model)
    third = copy.deepcopy(twin)
    del model, twin
    assert seen(third) == [FP16, FP32]
    assert outside() is FP16
    del third
    assert outside() is FP32


def test_deactivate_ends_what_is_outside_and_a_copy_does_not_bring_it_back() -> None:
    one, two = bring_up("O1", BF16), bring_up("O1", FP16)
    amp.deactivate()
    assert outside() is FP32
    twin = copy.deepcopy(two)
    assert [seen(model) for model in (one, two, twin)] == [[BF16, FP32], [FP16, FP32], [FP16, FP32]]
    assert outside() is FP32


def test_a_session_that_ends_inside_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector may run while the mode handles an op, and is then not on the stack."""
    model = bring_up("O1", FP16)
    monkeypatch.setitem(thread.mode.plan.table, torch.relu, lambda mode, func, args, _: (gc.collect(), func(*args))[1])
    model.itself = [model]  # only the collector finds it
    del model
    assert outside() is FP16
    torch.relu(X)
    assert outside() is FP32
    again = bring_up("O1", FP16)
    gc.collect()
    seen(again)
    assert outside() is FP16
    amp.deactivate()
    assert outside() is FP32


@pytest.mark.parametrize("inside", ["an op", "a backward pass"])
def test_a_session_that_ends_where_native_autocast_is_off_for_a_while(inside: str) -> None:
    """It is put on again, and off by the next op, which finds that the session is over."""
    model = bring_up("O1", BF16)
    model.itself = [model]  # only the collector finds it
    del model
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: gc.collect() and None)
    if inside == "an op":

        def collect(x: torch.Tensor) -> torch.Tensor:
            gc.collect()
            return x

        assert outside() is BF16
        rules.without_native(thread.mode, collect, (x,), {})
    else:
        x.sum().backward()
    assert outside() is FP32
    assert not torch.is_autocast_enabled("cpu")
    assert torch_is_untouched()


@pytest.mark.usefixtures("collector_off")
def test_names_of_torch_are_replaced_until_the_models_are_gone() -> None:
    """What is put on and off in each pass costs each pass, and a model may come to use a checkpoint in any of them."""
    model = bring_up("O2", BF16, emulate=True)
    seen(model)
    model = copy.deepcopy(model)
    assert replaceable() != TORCHS_OWN
    loss = bring_up("O1")(X).sum()
    loss.register_hook(lambda grad: Twice.apply(grad, grad))  # an autograd function inside of a backward pass
    loss.backward()
    del model, loss
    assert torch_is_untouched()


# ---- lists of a session


def test_custom_lists_at_o1() -> None:
    model = bring_up("O1", custom_white_list=["softmax"], custom_black_list=[F.linear])
    assert seen(model) == [FP32, BF16]
    lists = bring_up("O1", op_lists=OpLists.custom(["softmax"]))
    assert seen(lists) == [BF16, BF16]
    assert seen(model) == [FP32, BF16]
    assert F.softmax(X, -1).dtype is BF16, "outside, those of the latest session"
    free = bring_up("O1", op_lists=OpLists.custom(free=["softmax", "linear"]))
    assert seen(free) == [FP32, FP32]
    assert F.softmax(X.to(BF16), -1).dtype is BF16, "in the dtype of its input"


# ---- torch.export


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:While compiling, we found certain side effects")  # of what is open in the thread
@pytest.mark.parametrize("emulate", ["auto", True])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_its_casts(strict: bool, emulate: Any) -> None:
    model = Wide()
    amp.initialize(model, opt_level="O1", dtype=BF16, verbosity=0, emulate=emulate)
    expected = model(X)
    program = torch.export.export(model, (X,), strict=strict).module()
    active = program(X)
    amp.deactivate()
    for found in (active, program(X)):
        assert [t.dtype for t in found] == [BF16, FP32]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_capture_is_free_of_the_sessions_casts() -> None:
    _alive = bring_up("O1", FP16)
    program = static.capture(nn.Linear(4, 4), None, [X])
    amp.deactivate()
    (output,) = static.Executor().run(program, {program.feed_names[0]: X}, [program.outputs[0]])
    assert output.dtype is FP32


# ---- devices


def test_casts_act_on_the_devices_of_the_models() -> None:
    """A session on another device than the CPU leaves tensors of the CPU alone."""
    model = nn.Linear(4, 4, device="meta")
    amp.initialize(model, opt_level="O1", dtype=BF16, verbosity=0)
    assert outside() is FP32
    assert model(X.to("meta")).dtype is BF16
    assert (X.to("meta") @ X.mT.to("meta")).dtype is BF16
    assert F.softmax(X.to("meta").bfloat16(), -1).dtype is FP32
    cpu = bring_up("O1", FP16)
    assert seen(cpu) == [FP16, FP32]
    assert (X.to("meta") @ X.mT.to("meta")).dtype is FP32
    assert model(X.to("meta")).dtype is BF16


def test_a_model_that_moves_takes_its_casts_along() -> None:
    model = nn.Linear(4, 4)
    amp.initialize(model, opt_level="O1", dtype=BF16, verbosity=0)
    model.to("meta")
    assert model(X.to("meta")).dtype is BF16
    assert (X.to("meta") @ X.mT.to("meta")).dtype is BF16


# ---- slips


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("ask", ["an op", "a model"])
def test_a_session_that_ends_inside_of_torchs_autocast(ask: str, older: bool) -> None:
    first = bring_up("O1", FP16) if older else None
    model, other = bring_up("O1", FP16), bring_up("O0")
    with torch.autocast("cpu", dtype=BF16):
        del model
        if ask == "an op":
            assert outside() is BF16
        else:
            other(X)
        assert torch.is_autocast_enabled("cpu")
        assert outside() is BF16
    other(X)  # what torch has put back goes with the next model
    assert outside() is (FP16 if older else FP32)
    del first
    assert outside() is FP32
    del other
    assert torch_is_untouched()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_tensors_of_the_other_dtype_are_joined_while_an_o1_model_lives(dtype: torch.dtype) -> None:
    """Native autocast on a CPU refuses them, and the gradients of another model are such tensors."""
    other = torch.bfloat16 if dtype is torch.float16 else torch.float16
    model = amp.initialize(nn.Linear(2, 2), opt_level="O1", dtype=dtype, verbosity=0)
    x = torch.ones(2, dtype=other)
    assert torch.cat([x, x]).dtype is torch.stack([x, x]).dtype is other
    assert torch.index_copy(x, 0, torch.tensor([0]), x[:1]).dtype is other
    assert torch.cat([x, x.float()]).dtype is torch.float32
    params = [nn.Parameter(x.clone()), nn.Parameter(x.clone())]
    for p in params:
        p.grad = x.clone()
    assert float(nn.utils.clip_grad_norm_(params, 1.0)) == pytest.approx(2.0, rel=1e-2)
    assert model is not None


# ---- optimizers that amp was not given


class Recording(torch.optim.Optimizer):
    """Its step notes in which dtype it computes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.seen: list[torch.dtype] = []
        self.fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (weight, *_) = self.param_groups[0]["params"]
        self.seen.append((weight @ weight.mT).dtype)
        if closure is not None:
            with torch.enable_grad():
                closure()
            self.seen.append((weight @ weight.mT).dtype)
        if self.fails:
            raise ZeroDivisionError


CASTING: dict[str, Callable[[], Any]] = {
    "a session of O1": nullcontext,
    "auto_cast": lambda: amp.auto_cast(dtype=BF16),
    "both": lambda: amp.auto_cast(dtype=BF16),
}


@pytest.mark.parametrize("around", CASTING)
def test_the_step_of_any_optimizer_is_not_cast_and_its_closure_is(around: str) -> None:
    _alive = None if around == "auto_cast" else bring_up("O1", BF16)
    other = nn.Linear(4, 4)
    optimizer, inside = Recording(other.parameters()), []
    with CASTING[around]():
        optimizer.step()
        assert outside() is BF16
        optimizer.step(lambda: inside.append(outside()))
        assert outside() is BF16
        optimizer.step(closure=lambda: inside.append(outside()))
        assert outside() is BF16
    assert optimizer.seen == [FP32] * 5
    assert inside == [BF16, BF16]
    assert torch._C._len_torch_function_stack() == (around != "auto_cast")


def test_a_step_that_fails_gives_the_casts_back_and_leaves_no_hooks_once_the_session_has_ended() -> None:
    hooks = sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks
    before = len(hooks)
    model = bring_up("O1", BF16)
    optimizer = Recording(nn.Linear(4, 4).parameters())
    optimizer.fails = True
    assert len(hooks) == before + 1
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        assert seen(model) == [BF16, FP32]
        assert outside() is BF16
    del model
    gc.collect()
    assert torch_is_untouched()
    assert len(hooks) == before


@pytest.mark.parametrize("when", ["before the step", "after the step"])
def test_a_session_that_ends_inside_of_a_step_leaves_nothing_behind(when: str) -> None:
    """As the garbage collector may have it: the last session of the process ends between torch's hooks of a step."""
    kept = [amp.initialize(nn.Linear(2, 2), opt_level="O1", dtype=BF16, verbosity=0)]
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)

    class Forgets(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if when == "before the step":
                forget()

    def forget(*_: Any) -> None:
        kept.clear()
        gc.collect()

    optimizer = Forgets([weight], lr=0.1)
    if when == "after the step":
        optimizer.register_step_post_hook(forget)
    optimizer.step()
    assert torch_is_untouched()
