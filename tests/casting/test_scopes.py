"""``amp.auto_cast`` with everything else around it: scopes, threads, checkpoints, compile, transforms, other people."""

from __future__ import annotations

import copy
import inspect
import sys
import threading
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from halfstep import OpLists, amp, optimizers
from halfstep.casting.current import Patches
from halfstep.casting.scope import OpCasting, active_casting
from tests.support.backends import skip_without_compiler
from tests.support.worlds import BF16, FP16, FP32, Applies, in_a_thread, scaled_step

X = torch.linspace(-1, 1, 12).view(3, 4)


def scope(**arguments: Any) -> amp.auto_cast:
    return amp.auto_cast(dtype=BF16, **arguments)


def product() -> torch.dtype:
    return (X @ X.mT).dtype


def native() -> tuple[bool, torch.dtype, bool, int]:
    """What torch itself is told."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch._C._len_torch_function_stack(),
    )


# ---- scopes


def test_a_scope_leaves_everything_as_it_was() -> None:
    before, own = native(), (torch.autograd._engine_run_backward, vars(torch.autograd.Function)["apply"])
    with scope():
        assert product() is BF16
        assert torch.autograd._engine_run_backward is not own[0]
    assert native() == before
    assert own == (torch.autograd._engine_run_backward, vars(torch.autograd.Function)["apply"])
    with pytest.raises(ZeroDivisionError), scope():
        _ = 1 / 0
    assert native() == before
    assert active_casting() is None


def test_an_inner_scope_replaces_the_outer() -> None:
    with scope(custom_white_list=["exp"]):
        assert X.exp().dtype is BF16
        with amp.auto_cast(dtype=FP16, custom_black_list=["matmul"]):
            assert product() is FP32
            assert X.exp().dtype is FP32
            assert F.linear(X, X).dtype is FP16
        assert (X.exp().dtype, product()) == (BF16, BF16)
        for off in (scope(enable=False), scope(level="O0"), amp.disable_casts()):
            with off:
                assert (X.exp().dtype, product()) == (FP32, FP32)
                with scope():
                    assert product() is BF16
        assert (X.exp().dtype, product()) == (BF16, BF16)


def test_one_scope_entered_twice() -> None:
    again = scope()
    with again:
        with again:
            assert product() is BF16
        assert product() is BF16
    assert product() is FP32


def test_as_a_decorator() -> None:
    @scope()
    def forward(x: torch.Tensor) -> torch.dtype:
        """Doc."""
        return (x @ x.mT).dtype

    assert (forward(X), forward.__doc__, product()) == (BF16, "Doc.", FP32)


def test_level_in_any_case_and_dtype_by_default() -> None:
    with amp.auto_cast(level="o1"):
        assert product() is (FP16 if torch.cuda.is_available() else BF16)


@pytest.mark.parametrize("level", ["O1", "O2", "OD"])
def test_op_lists_print_and_parse(level: str) -> None:
    lists = OpLists.custom(["gelu"], [torch.matmul], level=level, use_promote=level != "O2")
    assert OpLists.parse(str(lists)) == lists
    assert hash(OpLists.parse(str(lists))) == hash(lists)


# ---- other people's torch.autocast


def test_plain_autocast_is_untouched() -> None:
    with torch.autocast("cpu", BF16):
        softmax = F.softmax(X.bfloat16(), 1).dtype
    with scope():
        pass
    with torch.autocast("cpu", BF16):
        assert F.softmax(X.bfloat16(), 1).dtype is softmax is BF16  # torch has no list entry for it on the CPU


def test_autocast_off_inside_is_honoured() -> None:
    half = X.bfloat16()
    with scope():
        with torch.autocast("cpu", enabled=False):
            assert product() is FP32
            assert F.softmax(half, 1).dtype is BF16
            F.binary_cross_entropy(half.sigmoid(), half.sigmoid())
        assert F.softmax(half, 1).dtype is FP32


@pytest.mark.parametrize("how", [{}, {"custom_white_list": ["exp"]}, {"emulate": True}], ids=str)
@pytest.mark.parametrize(("ours", "inner"), [(FP16, BF16), (BF16, FP16)], ids=str)
def test_an_autocast_in_the_other_dtype_inside_rounds_only_to_its_own(
    ours: torch.dtype, inner: torch.dtype, how: dict[str, Any]
) -> None:
    x, weight = X.clone(), nn.Parameter(torch.linspace(0.1, 1.1, 8).view(2, 4))
    with torch.no_grad():
        weight[0] *= 1e7 if inner is BF16 else 1.0  # past the largest float16
    with torch.autocast("cpu", inner):
        alone = F.linear(x, weight)
    with amp.auto_cast(dtype=ours, **how):
        with torch.autocast("cpu", inner):
            inside = F.linear(x, weight)
            exponential = x.exp()
        assert F.linear(x, weight).dtype is ours
    assert inside.dtype is inner
    torch.testing.assert_close(inside, alone, rtol=0, atol=0)
    if "custom_white_list" in how:
        torch.testing.assert_close(exponential, x.to(inner).exp(), rtol=0, atol=0)


def test_a_scope_inside_autocast_gives_it_back() -> None:
    with torch.autocast("cpu", FP16):
        with scope():
            assert product() is BF16
        assert product() is FP16


# ---- threads


def test_threads_have_policies_of_their_own() -> None:
    barrier, found = threading.Barrier(3), {}

    def work(name: str, arguments: dict[str, Any]) -> None:
        with amp.auto_cast(**arguments):
            barrier.wait()
            found[name] = (product(), X.exp().dtype)
            barrier.wait()

    lists = {"half": {"dtype": BF16}, "off": {"enable": False}, "white": {"dtype": FP16, "custom_white_list": ["exp"]}}
    threads = [threading.Thread(target=work, args=item) for item in lists.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"half": (BF16, FP32), "off": (FP32, FP32), "white": (FP16, FP16)}


def own_threads(modules: Any, inputs: Any, *_: Any) -> list[torch.dtype]:
    """Run the modules in another thread, as torch does where there are devices."""
    from concurrent.futures import ThreadPoolExecutor  # the code becomes that of a function of torch

    return list(ThreadPoolExecutor(1).map(lambda module, x: module(x).dtype, modules, inputs))


def test_replicas_of_data_parallel_run_under_the_callers_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs each replica in a thread of its own."""
    data_parallel = sys.modules["torch.nn.parallel.data_parallel"]
    # The name may have a wrapper already, for a model of another test: the function of torch in it gets other code.
    monkeypatch.setattr(inspect.unwrap(data_parallel.parallel_apply), "__code__", own_threads.__code__)
    with scope():
        assert data_parallel.parallel_apply([nn.Linear(4, 2), nn.Linear(4, 2)], [X, X]) == [BF16, BF16]


# ---- the copies of weights


def casts_in_graph(output: torch.Tensor, weight: torch.Tensor) -> int:
    """How many casts of the weight the graph of ``output`` holds."""
    seen, todo, casts = set(), [output.grad_fn], 0
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if getattr(following, "variable", None) is weight:
                casts += 1
            todo.append(following)
    return casts


@pytest.mark.parametrize("lists", [OpLists.default(), OpLists.native()], ids=str)
@pytest.mark.parametrize("cache", [True, False])
def test_a_cell_over_100_steps_casts_its_weight_once(cache: bool, lists: OpLists) -> None:
    cell, h = nn.RNNCell(4, 4), torch.zeros(3, 4)
    with OpCasting(BF16, lists, cache=cache):
        for _ in range(100):
            h = cell(X, h)
    assert casts_in_graph(h, cell.weight_ih) == (1 if cache else 100)
    h.float().sum().backward()
    assert cell.weight_ih.grad.dtype is FP32


def linear_of(weight: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.ones(1, 4), weight)


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "optimizer": lambda w: (setattr(w, "grad", torch.ones_like(w)), torch.optim.SGD([w], lr=1.0).step()),
    "fused optimizer": lambda w: (setattr(w, "grad", torch.ones_like(w)), torch.optim.SGD([w], 1.0, fused=True).step()),
    "in place": lambda w: torch.no_grad()(w.add_)(1.0),
    "other memory": lambda w: setattr(w, "data", torch.full_like(w, 7.0)),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_never_goes_stale(change: str, grad: bool) -> None:
    weight = nn.Parameter(torch.ones(1, 4))
    with scope(), torch.set_grad_enabled(grad):
        assert linear_of(weight).item() == 4.0
        CHANGES[change](weight)
        assert weight[0, 0].item() != 1.0
        assert linear_of(weight).item() == 4 * weight[0, 0].item()


def each(change: Callable[[nn.Parameter, torch.Tensor], Any]) -> Callable[[nn.Module, list[torch.Tensor]], None]:
    def write(model: nn.Module, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(model.parameters(), values, strict=True):
            change(parameter, value)

    return write


WRITES: dict[str, Callable[[nn.Module, list[torch.Tensor]], Any]] = {
    "copy_ under no_grad": each(lambda p, value: torch.no_grad()(p.copy_)(value)),
    ".data.copy_": each(lambda p, value: p.data.copy_(value)),
    ".data = value": each(lambda p, value: setattr(p, "data", value.clone())),
    "set_ under no_grad": each(lambda p, value: torch.no_grad()(p.set_)(value.clone())),
    "detach().copy_": each(lambda p, value: p.detach().copy_(value)),
    "a numpy view": each(lambda p, value: np.copyto(p.detach().numpy(), value.numpy())),
    "swap_tensors": each(lambda p, value: torch.utils.swap_tensors(p, nn.Parameter(value.clone()))),
    "_foreach_copy_": lambda model, values: torch._foreach_copy_([p.data for p in model.parameters()], values),
    "load_state_dict": lambda model, values: model.load_state_dict(dict(zip(model.state_dict(), values, strict=True))),
}


@pytest.mark.parametrize("grads", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("write", WRITES)
def test_a_cast_ends_with_the_call_of_the_outermost_model(write: str, grads: tuple[bool, bool]) -> None:
    """So any write between two calls counts, by whatever way it comes: averages and reference policies swapped in."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.linspace(-1, 1, 12).view(3, 4)
    own = [p.detach().clone() for p in model.parameters()]
    others = [value * -0.5 + 0.1 for value in own]
    twin = copy.deepcopy(model)
    WRITES["copy_ under no_grad"](twin, others)
    with scope():
        expected = twin(x).detach()
    amp.initialize(model, opt_level="O1", verbosity=0)

    def answer(with_grad: bool) -> torch.Tensor:
        with torch.set_grad_enabled(with_grad):
            return cast(torch.Tensor, model(x)).detach()

    first = answer(grads[0])
    WRITES[write](model, others)
    assert torch.equal(answer(grads[1]), expected)
    WRITES[write](model, own)
    assert torch.equal(answer(grads[0]), first)
    amp.deactivate()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_cast_of_a_checkpoint_ends_with_the_backward_pass(reentrant: bool) -> None:
    model = nn.Linear(4, 4)
    amp.initialize(model, opt_level="O1", verbosity=0)
    checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()  # type: ignore[no-untyped-call]
    for param in model.parameters():
        param.data.zero_()
    assert not model(X).any()
    amp.deactivate()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, optimizers.FusedAdam])
def test_a_weight_that_a_call_uses_twice_is_cast_once(optimizer: Any) -> None:
    skip_without_compiler(optimizer is optimizers.FusedAdam)
    layer, x = nn.Linear(4, 4), torch.ones(1, 4)
    model, stepping = nn.Sequential(layer, layer), optimizer(layer.parameters(), lr=1e-3)
    amp.initialize(model, stepping, opt_level="O1", verbosity=0)
    for _ in range(3):
        y = model(x)
        assert casts_in_graph(y, layer.weight) == 1
        scaled_step(y.sum(), stepping)
    amp.deactivate()


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_copy_made_without_gradients_does_not_serve_training(first: Any, frozen: bool) -> None:
    weight = nn.Parameter(torch.ones(1, 4), requires_grad=not frozen)
    x = torch.ones(1, 4, requires_grad=True)
    with scope():
        with first():
            F.linear(x, weight)
        y = F.linear(x, weight)
    y.float().sum().backward()
    assert x.grad.tolist() == [[1.0] * 4]
    assert frozen or weight.grad.tolist() == [[1.0] * 4]


def test_thawing_a_weight_inside_a_scope() -> None:
    weight = nn.Parameter(torch.ones(1, 4), requires_grad=False)
    with scope():
        linear_of(weight)
        weight.requires_grad_()
        linear_of(weight).sum().backward()
    assert weight.grad is not None


def test_two_iterations_in_one_scope() -> None:
    weight = nn.Parameter(torch.ones(1, 4))
    with scope():
        for _ in range(2):
            loss = linear_of(weight).float().sum()
            loss.backward()  # frees the graph that the copy hangs on
    assert weight.grad.tolist() == [[2.0] * 4]


def test_no_copy_outlives_its_weight_or_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.casting import weight_cache
    from halfstep.casting.current import thread

    monkeypatch.setattr(weight_cache, "_MOST", 100)
    with scope():
        for _ in range(500):  # each is kept alive by the graph of its copy, until they are many
            linear_of(nn.Parameter(torch.rand(1, 4)))
            assert len(thread.cache.entries) <= 100
        with torch.no_grad():
            thread.cache.clear()
            linear_of(nn.Parameter(torch.rand(1, 4)))
            assert len(thread.cache.entries) == 0
    assert len(thread.cache.entries) == 0
    with amp.auto_cast(dtype=BF16, custom_white_list=["exp"]):
        assert torch.exp(X).dtype is BF16
        assert len(thread.cache.entries) == 0, "of an input"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_recording_holds_no_remembered_constant() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    module = nn.Linear(4, 1, bias=False)
    weight = module.weight
    with scope():
        module(torch.ones(1, 4))
        traced = torch.jit.trace(module, torch.ones(1, 4), check_trace=False)
        graph = make_fx(lambda x, w: F.linear(x, w))(torch.ones(1, 4), weight)
    with torch.no_grad():
        weight.fill_(2.0)
    assert graph(torch.ones(1, 4), weight).item() == 8.0
    assert traced(torch.ones(1, 4)).item() == 8.0


# ---- recurrent modules


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_modules(kind: type[nn.RNNBase], packed: bool, bidirectional: bool) -> None:
    module = kind(4, 5, num_layers=2, bidirectional=bidirectional)
    x = torch.randn(6, 3, 4)
    inputs = nn.utils.rnn.pack_padded_sequence(x, [6, 4, 2]) if packed else x
    hidden = torch.randn(4 if bidirectional else 2, 3, 5)
    state = (hidden, hidden) if kind is nn.LSTM else hidden
    for given in (None, state):  # an fp32 hidden state is fine
        expected, _ = module(inputs, given)
        with scope():
            out, _ = module(inputs, given)
        for y, y32 in zip((out.data, out), (expected.data, expected), strict=True) if packed else [(out, expected)]:
            if isinstance(y, torch.Tensor):
                assert y.dtype is BF16
                torch.testing.assert_close(y.float(), y32, atol=0.03, rtol=0.03)
        (out.data if packed else out).float().sum().backward()
        assert module.weight_ih_l0.grad.dtype is FP32


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells(kind: type[nn.RNNCellBase]) -> None:
    cell = kind(4, 5)
    h = torch.zeros(3, 5)
    with scope():
        out = cell(X, (h, h) if kind is nn.LSTMCell else h)
    assert (out[0] if isinstance(out, tuple) else out).dtype is BF16


# ---- checkpoints, custom functions, higher order


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("outside", [False, True], ids=["backward inside", "backward outside"])
def test_checkpoints_recompute_under_the_same_lists(reentrant: bool, outside: bool) -> None:
    seen, weight = [], nn.Parameter(torch.randn(4, 4))

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append((F.softmax(X.bfloat16(), 1).dtype, (X @ X.mT).dtype, torch.exp(X).dtype))
        return F.softmax(x @ weight, 1)

    x = X.clone().requires_grad_()
    with scope(custom_white_list=["exp"]):
        loss = checkpoint(block, x, use_reentrant=reentrant).sum()
        if not outside:
            loss.backward()
    if outside:
        loss.backward()
    assert seen == [(FP32, BF16, BF16)] * 2
    assert weight.grad is not None


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x @ y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        assert product() is FP32
        assert not torch.is_autocast_enabled("cpu")
        return grad.to(y.dtype) @ y.mT, x.mT @ grad.to(x.dtype)


def test_the_forward_of_a_function_is_cast_and_its_backward_inside_a_scope_is_not() -> None:
    x, y = X.clone().requires_grad_(), X.mT.clone().requires_grad_()
    with scope():
        out = Square.apply(x, y)
        assert out.dtype is BF16
        out.float().sum().backward()
        torch.autograd.grad(Square.apply(x, y).float().sum(), x)
        assert product() is BF16
    assert x.grad.dtype is FP32


def test_custom_op_of_torch_library() -> None:
    @torch.library.custom_op("halfstep_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with scope():
        assert twice(X).dtype is FP32
        assert twice(X.bfloat16()).dtype is BF16
    cast = amp.half_function(twice)
    with scope():
        assert cast(X).dtype is BF16


def test_double_backward() -> None:
    """A gradient penalty, with the second pass inside the scope and outside."""
    weight = nn.Parameter(torch.randn(4, 4))
    for outside in (False, True):
        x = X.clone().requires_grad_()
        with scope():
            y = F.softplus(x @ weight).sum()
            (slope,) = torch.autograd.grad(y, x, create_graph=True)
            assert slope.dtype is FP32
            penalty = slope.square().sum()
            if not outside:
                penalty.backward()
        if outside:
            penalty.backward()
        assert weight.grad.abs().sum() > 0
        weight.grad = None


@pytest.mark.parametrize("warm", [False, True])
def test_func_transforms(warm: bool) -> None:
    weight = nn.Parameter(torch.randn(4, 4))

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(x @ w, -1).square().sum()

    with scope():
        if warm:
            loss(weight, X)
        slope = torch.func.grad(loss)(weight, X)
        rows = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, X)
        products = torch.func.vmap(torch.matmul, in_dims=(None, 0))(weight, X)
    assert slope.dtype is rows.dtype is FP32
    assert products.dtype is BF16
    torch.testing.assert_close(rows.sum(0), torch.func.grad(loss)(weight, X), atol=0.02, rtol=0.05)


@pytest.mark.parametrize("out", [True, False])
def test_out_and_in_place_forms(out: bool) -> None:
    half, buffer = X.bfloat16(), torch.zeros(3, 4)
    with scope():
        if out:
            torch.exp(X, out=buffer)
            assert torch.equal(buffer, X.exp())
            return
        buffer += half
        assert buffer.dtype is FP32
        half += X
        assert half.dtype is BF16
        half.addmm_(X, torch.ones(4, 4))
        assert half.dtype is BF16
        with pytest.raises(amp.UnsafeOpError, match=r"exp_ .* x = x\.exp\(\.\.\.\)"):
            half.exp_()
        X.clone().exp_()


@pytest.mark.parametrize(
    ("lists", "call"),
    [
        ({"custom_white_list": ["exp"]}, lambda out: torch.exp(X, out=out)),
        ({}, lambda out: torch.mm(X, X.mT, out=out)),
        ({"custom_black_list": ["mm"]}, lambda out: torch.mm(X, X.mT, out=out)),
        ({}, lambda out: torch.addcdiv(X, X.bfloat16(), X + 3, out=out)),
        ({}, lambda out: torch.cat([X, X.bfloat16()], out=out)),
    ],
    ids=["half", "half, by torch", "float", "promote", "sequence-promote"],
)
def test_nothing_is_cast_for_a_result_that_has_its_tensor(lists: dict[str, Any], call: Any) -> None:
    expected, found = torch.empty(0), torch.empty(0)
    call(expected)
    with scope(**lists):
        assert call(found) is found
    assert found.dtype is FP32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("emulate", [False, True])
def test_casts_are_logged_if_asked_for(emulate: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="halfstep")
    model = Applies(lambda x: torch.exp(torch.mm(x, X.mT.bfloat16())))
    amp.initialize(model, opt_level="O1", dtype=BF16, emulate=emulate, verbosity=2)(X)
    assert caplog.messages[-2:] == ["Float->BFloat16 (mm)", "BFloat16->Float (exp)"]


@pytest.mark.parametrize("emulate", [False, True])
def test_a_weight_is_logged_when_it_is_cast_not_when_its_copy_is_used_again(
    emulate: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="halfstep")
    weight, half = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4, dtype=BF16))
    with OpCasting(BF16, verbose=True, emulate=emulate):
        x = torch.ones(4, 4, dtype=BF16)
        for _ in range(2):
            torch.mm(torch.mm(x, weight), half)
    assert caplog.messages == ["Float->BFloat16 (mm)"]


def test_a_thread_without_casts_checkpoints_as_ever() -> None:
    found: list[torch.dtype] = []

    def run() -> None:
        x = X.clone().requires_grad_()

        def body(x: torch.Tensor) -> torch.Tensor:
            found.append((x @ x.mT).dtype)
            return x.sin()

        checkpoint(body, x, use_reentrant=False).sum().backward()

    with scope():
        in_a_thread(run)
    assert found == [FP32, FP32]


def interrupted(hook: None) -> None:
    raise KeyboardInterrupt


def test_a_function_that_this_torch_lacks_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("halfstep_tests_of_patches")
    module.there = len  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    before = dict(vars(module))
    patches = Patches({(module.__name__, "absent"): lambda own: 1, (module.__name__, "there"): lambda own: max})
    for holder in (1, 2):
        patches.hold(holder)
        assert module.there is max
    assert not hasattr(module, "absent")
    with pytest.raises(KeyboardInterrupt):
        Patches({(module.__name__, "there"): lambda own: len}, {interrupted: None}).hold(1)
    assert module.there is max  # an interrupted holder undoes what it installed
    for holder in (1, 1, 3):
        patches.release(holder)
        assert module.there is max
    patches.release(2)
    assert vars(module) == before


def test_a_16_bit_result_that_is_asked_for() -> None:
    half = X.bfloat16()
    with scope():
        assert torch.linalg.norm(half, dtype=BF16).dtype is BF16  # torch refuses it for an fp32 tensor
        assert F.softmax(half, 1, dtype=BF16).dtype is BF16
        assert torch.linalg.norm(half, dtype=FP32).dtype is FP32


# ---- torch.compile


def forward(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x @ weight, torch.exp(x)


@pytest.mark.exhaustive
@pytest.mark.parametrize("half", [BF16, FP16])
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("where", ["around", "inside", "made outside", "decorator"])
def test_compiled(where: str, breaks: bool, half: torch.dtype) -> None:
    """Dynamo does not trace a scope that it did not see made, or with a break in it: the scope runs in Python."""
    torch._dynamo.reset()
    weight, before = nn.Parameter(torch.randn(4, 4)), native()
    made = amp.auto_cast(dtype=half, custom_white_list=["exp"])

    def called(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if breaks:
            torch._dynamo.graph_break()
        return forward(x, weight)

    def whole(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with amp.auto_cast(dtype=half, custom_white_list=["exp"]) if where == "inside" else made:
            return called(x, weight)

    function = {"around": called, "decorator": made(called)}.get(where, whole)
    fast = torch.compile(function, backend="aot_eager", fullgraph=where in ("around", "inside") and not breaks)
    with made if where == "around" else nullcontext():
        y, e = fast(X, weight)
    assert native() == before
    assert (y.dtype, e.dtype) == (half, half)
    y.float().sum().backward()
    assert weight.grad.dtype is FP32


@pytest.mark.exhaustive
def test_a_policy_switch_recompiles() -> None:
    torch._dynamo.reset()
    fast, weight = torch.compile(forward, backend="aot_eager", fullgraph=True), torch.randn(4, 4)
    found = []
    for arguments in (
        {"dtype": BF16},
        {"dtype": FP16},
        {"enable": False},
        {"dtype": BF16, "custom_white_list": ["exp"]},
        {"dtype": BF16, "custom_black_list": ["matmul"]},
        {"dtype": BF16},
    ):
        with amp.auto_cast(**arguments):
            found.append(tuple(t.dtype for t in fast(X, weight)))
    assert found == [(BF16, FP32), (FP16, FP32), (FP32, FP32), (BF16, BF16), (FP32, FP32), (BF16, FP32)]


@pytest.mark.exhaustive
def test_compiled_backward_is_not_cast() -> None:
    torch._dynamo.reset()
    x = torch.randn(4, 4, dtype=FP32)
    weight = nn.Parameter(torch.randn(4, 4))

    def penalty(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return (x @ weight).square().sum()  # its backward is a product of fp32 matrices

    def slope(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        weight.grad = None
        with scope():
            function(x).backward()
        return weight.grad

    exact = slope(penalty).clone()
    assert torch.equal(slope(torch.compile(penalty, backend="aot_eager", fullgraph=True)), exact)
