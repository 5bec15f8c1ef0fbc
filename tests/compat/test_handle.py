"""``amp.init()`` of 2018: what the handle casts, how it scales, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
import types
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import DynamicLossScale, amp
from halfstep.core.errors import UsageError
from tests.support.apex_recording import fill, grid
from tests.support.fp16_training import values
from tests.support.worlds import in_a_thread, scaled_backward, scaled_step, with_optimizer

HALF = torch.float16 if torch.cuda.is_available() else torch.bfloat16


def linear() -> nn.Linear:
    model = nn.Linear(3, 2)
    fill(model, weight=grid((2, 3), 51), bias=grid((2,), 52, 0.5))
    return model


def loss_on(model: nn.Module, k: int = 0) -> torch.Tensor:
    return F.mse_loss(model(grid((8, 3), 53 + k)).float(), grid((8, 2), 54 + k))


def computes_in(dtype: torch.dtype = torch.float32) -> torch.dtype:
    return linear()(torch.ones(1, 3, dtype=dtype)).dtype


# ---- casting


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, "fp16"])
def test_init_casts_ops_and_leaves_weights(dtype: Any) -> None:
    model = linear()
    handle = amp.init(dtype=dtype)
    assert handle.is_active()
    out = model(torch.ones(1, 3))
    assert out.dtype == {None: HALF, "fp16": torch.float16}.get(dtype, dtype)
    assert F.log_softmax(out, -1).dtype == torch.float32
    assert model.weight.dtype == torch.float32


def test_disable_casts() -> None:
    handle = amp.init()
    with handle._disable_casts():
        assert not handle.is_active()
    assert handle.is_active()


def test_properties() -> None:
    plain, other = amp.init(), amp.init(enable_caching=False, verbose=True)
    assert (plain.has_cache, plain.verbose) == (True, False)
    assert (other.has_cache, other.verbose) == (False, True)
    assert plain._scaler.rule == DynamicLossScale()
    plain._clear_cache()
    plain.remove_cache(torch.ones(1))


@pytest.mark.parametrize("level", [logging.NOTSET, logging.WARNING])
def test_verbose_shows_casts_unless_the_program_chose_another_level(
    level: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    logging.getLogger("halfstep").setLevel(level)
    amp.init(enable=True, verbose=True, dtype=torch.float16)
    F.linear(torch.ones(1, 3), torch.ones(2, 3))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ([] if level else ["Float->Half (linear)"] * 2)


@pytest.mark.parametrize("caching", [True, False])
def test_verbose_lists_the_casts_of_a_network(caching: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The network and the list of an article of June 2018."""
    caplog.set_level(logging.INFO, logger="halfstep")
    amp.init(enable_caching=caching, verbose=True, dtype=torch.float16)
    convolutions = [nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(10, 20, 5), nn.MaxPool2d(2), nn.ReLU()]
    linear_layers = [nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10)]
    model = nn.Sequential(*convolutions, nn.Flatten(), *linear_layers, nn.LogSoftmax(1))
    assert model(torch.zeros(1, 1, 28, 28)).dtype == torch.float32
    casts = [message for message in caplog.messages if "->" in message]
    # Input, two weights and two biases; two weights and two biases; its input.
    assert casts == ["Float->Half (conv2d)"] * 5 + ["Float->Half (linear)"] * 4 + ["Half->Float (log_softmax)"]


ARGUMENTS = (torch.ones(2), torch.ones(2).half(), torch.ones(2).bfloat16())


@pytest.mark.parametrize("when", ["before init", "after init"])
@pytest.mark.parametrize(("kind", "wanted"), [("half", HALF), ("float", torch.float32), ("promote", torch.float32)])
def test_functions_of_the_user_s_own(kind: str, wanted: torch.dtype, when: str) -> None:
    backend = types.SimpleNamespace(run=lambda *tensors: [t.dtype for t in tensors])
    handle = amp.init() if when == "after init" else None
    decorated = getattr(amp, f"{kind}_function")(backend.run)
    getattr(amp, f"register_{kind}_function")(backend, "run")
    handle = handle or amp.init()
    assert decorated(*ARGUMENTS) == backend.run(*ARGUMENTS) == [wanted] * 3
    handle._deactivate()
    assert decorated(*ARGUMENTS) == backend.run(*ARGUMENTS) == [t.dtype for t in ARGUMENTS]


def test_weights_written_between_forwards_are_seen() -> None:
    handle = amp.init()
    model, optimizer = with_optimizer(linear(), torch.optim.SGD, lr=1.0)
    for _ in range(2):
        scaled_step(loss_on(model), optimizer, by=handle)
        expected = F.linear(torch.ones(1, 3).to(HALF), model.weight.to(HALF), model.bias.to(HALF))
        assert torch.equal(model(torch.ones(1, 3)), expected)
        handle._clear_cache()


def test_other_threads_take_part() -> None:
    handle, found = amp.init(), []
    in_a_thread(lambda: found.append(computes_in()))
    handle._deactivate()
    in_a_thread(lambda: found.append(computes_in()))
    assert found == [HALF, torch.float32]


# ---- putting back


def everything(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Whatever a handle could have changed."""
    hooks = torch.nn.modules.module
    return (
        [torch.is_autocast_enabled(d) for d in ("cpu", "cuda")],
        [torch.get_autocast_dtype(d) for d in ("cpu", "cuda")],
        torch.is_autocast_cache_enabled(),
        torch._C._len_torch_function_stack(),
        [getattr(F, name) for name in ("linear", "softmax", "binary_cross_entropy")],
        [torch.autograd.backward, torch.autograd.grad, torch.Tensor.backward, torch.Tensor.__matmul__, torch.matmul],
        dict(hooks._global_forward_pre_hooks),
        {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")},
        computes_in(),
    )


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_deactivating_in_any_order(order: tuple[int, ...]) -> None:
    optimizer = torch.optim.SGD(linear().parameters(), lr=0.1)
    before = everything(optimizer)
    dtypes = [torch.float16, torch.bfloat16, torch.float16]
    opened = [amp.init(dtype=dtype) for dtype in dtypes]
    for handle in opened:
        scaled_backward(torch.ones(1, requires_grad=True).sum(), optimizer, by=handle)
    alive = [0, 1, 2]
    for i in order:
        assert computes_in() == dtypes[alive[-1]]
        opened[i]._deactivate()
        opened[i]._deactivate()
        assert not opened[i].is_active()
        alive.remove(i)
    assert everything(optimizer) == before


@pytest.mark.parametrize("handle_first", [True, False])
def test_beside_initialize(handle_first: bool) -> None:
    model, optimizer = linear(), torch.optim.SGD(linear().parameters(), lr=0.1)
    before = everything(optimizer)
    handle = amp.init(dtype=torch.float16) if handle_first else None
    amp.initialize(model, opt_level="O1", dtype=torch.bfloat16, verbosity=0)
    assert computes_in() == torch.bfloat16
    if handle is None:
        handle = amp.init(dtype=torch.float16)
        assert computes_in() == torch.float16
    handle._deactivate()
    assert computes_in() == torch.bfloat16, "what amp.initialize had turned on stays on"
    amp.deactivate()
    assert everything(optimizer) == before


def test_a_handle_that_was_overruled_does_not_come_back() -> None:
    old = amp.init(dtype=torch.float16)
    amp.deactivate()
    assert computes_in() == torch.float32
    new = amp.init(dtype=torch.bfloat16)
    new._deactivate()
    assert computes_in() == torch.float32
    old._deactivate()
    assert computes_in() == torch.float32


def test_a_scheduler_that_wrapped_step_keeps_working() -> None:
    model, optimizer = with_optimizer(linear(), torch.optim.SGD, lr=0.1)
    handle = amp.init()
    scaled_backward(loss_on(model), optimizer, by=handle)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    handle._deactivate()
    before = values(model.parameters())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert not torch.equal(before, values(model.parameters()))


def test_after_deactivation_nothing_is_scaled() -> None:
    handle = amp.init()
    optimizer = torch.optim.SGD(linear().parameters(), lr=0.1)
    wrapper = handle.wrap_optimizer(optimizer)
    handle._deactivate()
    loss = torch.ones(1, requires_grad=True).sum()
    with handle.scale_loss(loss, optimizer) as same, wrapper.scale_loss(loss) as also:
        assert same is loss
        assert also is loss


# ---- scaling


def test_several_optimizers_and_a_wrapper_in_scale_loss() -> None:
    handle = amp.init(loss_scale=8.0)
    one, two = linear(), linear()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, two)]
    scaled_backward(loss_on(one) + loss_on(two), optimizers, by=handle)
    assert torch.equal(one.weight.grad, two.weight.grad)
    wrapper = handle.wrap_optimizer(optimizers[0])
    wrapper.zero_grad()
    scaled_backward(loss_on(one), wrapper, by=handle)
    assert torch.equal(one.weight.grad, two.weight.grad)


# ---- the wrapper


def test_each_loss_has_a_scale_of_its_own() -> None:
    handle = amp.init()
    model = linear()
    optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_loss=2)
    seen: list[list[float]] = [[], []]
    moved = []
    for t in range(4):
        optimizer.zero_grad()
        for i in range(2):
            loss = loss_on(model, i) * (float("inf") if (t, i) in ((1, 0), (2, 1), (2, 0)) else 1.0)
            with optimizer.scale_loss(loss) as scaled_loss:
                seen[i].append((scaled_loss / loss).item() if loss.isfinite() else 0.0)
                scaled_loss.backward()
        before = values(model.parameters())
        optimizer.step()
        moved.append(not torch.equal(before, values(model.parameters())))
    assert moved == [True, False, False, True]
    assert seen[0] == pytest.approx([2.0**16, 0.0, 0.0, 2.0**14])
    assert seen[1] == pytest.approx([2.0**16, 2.0**16, 0.0, 2.0**15])


def test_one_loss_too_many() -> None:
    model = linear()
    optimizer = amp.init().wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_loss=2)

    def loss_block() -> None:
        with optimizer.scale_loss(loss_on(model)) as scaled_loss:
            scaled_loss.backward()

    for begin_anew in (optimizer.step, optimizer.zero_grad):
        loss_block()
        loss_block()
        with pytest.raises(UsageError, match=r"loss number 3 .* num_loss=2"):
            loss_block()
        begin_anew()
    loss_block()


def test_everything_else_is_the_optimizers() -> None:
    model, inner = with_optimizer(linear(), torch.optim.Adam, lr=0.1)
    inner.note = "mine"
    optimizer = amp.init().wrap_optimizer(inner, num_loss=1)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert optimizer.note == "mine"
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with optimizer.scale_loss(loss_on(model)) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    scheduler.step()
    assert inner.param_groups[0]["lr"] == 0.05
    assert optimizer.state_dict() == inner.state_dict()
    optimizer.load_state_dict(copy.deepcopy(inner.state_dict()))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(inner.param_groups) == 2
    optimizer.param_groups = inner.param_groups[:1]
    assert len(inner.param_groups) == 1
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert isinstance(optimizer.step(lambda: loss_on(model).detach()), torch.Tensor)
    with pytest.raises(AttributeError, match="nothing"):
        _ = optimizer.nothing
    with pytest.raises(UsageError, match="OptimWrapper cannot be pickled"):
        pickle.dumps(optimizer)


# ---- off, and refused


def test_disabled_does_nothing() -> None:
    model, inner = with_optimizer(linear(), torch.optim.SGD, lr=0.1)
    before = everything(inner)
    handle = amp.init(enabled=False)
    assert (handle.is_active(), handle.has_cache, handle.verbose) == (False, False, False)
    loss = loss_on(model)
    with handle.scale_loss(loss, inner) as same:
        assert same is loss
    optimizer = handle.wrap_optimizer(inner, num_loss=2)
    for _ in range(5):
        with optimizer.scale_loss(loss) as same:
            assert same is loss
    loss.backward()
    weights = values(model.parameters())
    optimizer.step()
    assert not torch.equal(weights, values(model.parameters()))
    with handle._disable_casts():
        pass
    handle._clear_cache()
    handle.remove_cache(model.weight)
    handle._deactivate()
    assert everything(inner) == before


@pytest.mark.exhaustive
def test_compiled_model_under_init() -> None:
    amp.init(dtype=torch.bfloat16)
    model = linear()
    fast = torch.compile(model, backend="aot_eager")
    x = torch.ones(2, 3)
    with pytest.warns(UserWarning, match="global hooks on modules"):  # one that joins a thread: twice is as well
        y = fast(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, model(x))


@pytest.mark.parametrize("allow", [False, True])
def test_banned(allow: bool) -> None:
    amp.init(allow_banned=allow, dtype=torch.bfloat16)
    guess, target = torch.full((2,), 0.5, dtype=torch.bfloat16), torch.ones(2)
    if allow:
        assert nn.functional.binary_cross_entropy(guess, target).dtype == torch.float32
    else:
        with pytest.raises(amp.UnsafeOpError, match="binary_cross_entropy_with_logits"):
            nn.functional.binary_cross_entropy(guess, target)
