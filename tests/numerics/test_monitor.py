"""``Monitor``: what it writes down, that it changes nothing, and every way in which steps and passes come."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import amp, optimizers
from halfstep.core.errors import UsageError
from halfstep.fp16_utils import FP16_Optimizer
from halfstep.numerics import Monitor, Row
from tests.support.worlds import (
    FP16,
    HALVES,
    Applies,
    Made,
    advance,
    scaled_backward,
    scaled_step,
    start_amp,
    unscaled_step,
    with_optimizer,
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW not fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=False),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "FusedAdam": lambda params: optimizers.FusedAdam(params, lr=1e-2),
    "FusedAdam clipping": lambda params: optimizers.FusedAdam(params, lr=1e-2, max_grad_norm=0.1),
    "FusedLAMB": lambda params: optimizers.FusedLAMB(params, lr=1e-2, weight_decay=0.0),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(step)).float().square().mean()
    return loss


def by_block(model: nn.Module, optimizer: Any, step: int) -> None:
    advance(loss_of(model, step), optimizer)


def prepared(level: str, dtype: torch.dtype, kind: str, **options: Any) -> tuple[nn.Module, Any]:
    return start_amp(net(), OPTIMIZERS[kind], level, dtype=dtype, **options)


def plainly(model: nn.Module, optimizer: Any, step: int) -> None:
    unscaled_step(loss_of(model, step), optimizer)


def watched(model: nn.Module, optimizer: Any, train: Any = by_block, steps: int = 1, **options: Any) -> list[Row]:
    """Train under a monitor; return its rows."""
    with Monitor(model, optimizer, **{"every": 1, **options}) as monitor:
        for step in range(steps):
            train(model, optimizer, step)
    return monitor.rows()


def passed(model: nn.Module, x: torch.Tensor, **options: Any) -> tuple[Any, list[Row]]:
    """Run a forward pass under a monitor; return its output and the rows."""
    with Monitor(model, every=1, **options) as monitor:
        output = model(x)
    return output, monitor.rows()


def of(rows: list[Row], tensor: str, module: str | None = None, step: int | None = None) -> list[Row]:
    return [r for r in rows if r.tensor == tensor and module in (None, r.module) and step in (None, r.step)]


def exact(row: Row, tensor: torch.Tensor) -> None:
    """A row against float64 and ``frexp``."""
    wide = tensor.detach().double().flatten()
    magnitudes = wide.abs()
    some = magnitudes[(magnitudes > 0) & magnitudes.isfinite()]
    assert row.numel == tensor.numel()
    assert row.amax == pytest.approx(float(magnitudes.max()), rel=1e-6)
    assert row.rms == pytest.approx(float(wide.square().mean().sqrt()), rel=1e-5)
    assert row.zeros == pytest.approx(float((wide == 0).double().mean()))
    exponents = (torch.frexp(some).exponent - 1).tolist()
    assert row.exponents == {e: exponents.count(e) for e in exponents}


# ---- what it writes down


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_rows_of_a_small_model_are_exact(dtype: torch.dtype) -> None:
    model = net().to(dtype)
    seen: dict[tuple[str, str], torch.Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            seen[name, "output"] = output.detach().clone()
            output.register_hook(lambda grad: seen.__setitem__((name, "output_grad"), grad.clone()))

        return hook

    for name, module in model.named_children():
        module.register_forward_hook(keep(name))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with Monitor(model, optimizer, every=1) as monitor:
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model(batch(0).to(dtype)).float().square().mean().backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    rows = monitor.rows()
    assert len(rows) == 4 + 4 + 3 * 6
    for (name, tensor), values in seen.items():
        (row,) = of(rows, tensor, name)
        assert row.dtype == str(dtype).removeprefix("torch.")
        exact(row, values)
    for name, p in model.named_parameters():
        exact(of(rows, "grad", name)[0], grads[name])
        exact(of(rows, "weight", name)[0], before[name])
        exact(of(rows, "update", name)[0], p.detach().float() - before[name].float())


def test_probes_are_values_at_the_same_places() -> None:
    output, rows = passed(net(), batch(0))
    (row,) = of(rows, "output", "3")
    assert row.probe == tuple(output.detach().flatten()[: row.numel].tolist())
    output, (row,) = passed(nn.Linear(16, 1000), batch(0), sample=1)
    sampled = sum(row.exponents.values())
    assert 200 <= sampled <= 256
    assert len(row.probe) == 64
    stride = -(-8000 // 256) | 1
    assert row.probe == tuple(output.detach().flatten()[::stride][:: sampled // 64][:64].tolist())
    assert row.amax == float(output.detach().abs().max()), "the largest is that of all elements"


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.T,
    "expanded": lambda x: x[:1].expand(8, 16),
    "channels last": lambda x: x.reshape(2, 4, 4, 4).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_read(layout: str) -> None:
    output, rows = passed(Applies(LAYOUTS[layout]), batch(0))
    exact(rows[0], output)


def test_negative_zero_is_zero_and_a_zero_of_relu_is_no_underflow() -> None:
    zeros = Applies(lambda x: torch.where(x > 0, x, -0.0).half())
    output, rows = passed(nn.Sequential(zeros, nn.ReLU()), batch(0))
    assert {"0", "1"} <= {row.module for row in rows}
    for row in rows:
        assert row.zeros == float((output == 0).double().mean())
        assert 0.3 < row.zeros < 0.7
        assert row.flushed == row.subnormal == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_are_counted(bad: float) -> None:
    _, (row,) = passed(Applies(lambda x: x.index_fill(0, torch.tensor([3]), bad)), batch(0))
    assert (row.overflow, row.nan) == ((0.0, 1 / 8) if math.isnan(bad) else (1 / 8, 0.0))
    assert math.isnan(row.amax) == math.isnan(bad)
    assert row.headroom == -math.inf
    assert math.isfinite(row.rms)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_are_those_of_the_backward_pass_without_their_scale(
    kind: str, level: str, dtype: torch.dtype
) -> None:
    loss_scale = 1024.0 if dtype is torch.float16 else 1.0
    model, optimizer = prepared(level, dtype, kind, loss_scale=loss_scale)
    with Monitor(model, optimizer, every=1) as monitor:
        scaled_backward(loss_of(model, 0), optimizer)
        grads = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    rows = of(monitor.rows(), "grad")
    assert {row.module for row in rows} == set(grads)
    for row in rows:
        grad = grads[row.module]
        assert row.amax == pytest.approx(float(grad.abs().max()), rel=1e-5)
        assert row.rms == pytest.approx(float(grad.square().mean().sqrt()), rel=1e-4)
        assert row.scale == loss_scale
        half = level in ("O2", "O3") and model.get_parameter(row.module).dtype is dtype
        assert row.dtype == (str(dtype).removeprefix("torch.") if half else "float32")
    (output_grad,) = of(monitor.rows(), "output_grad", "3")
    assert output_grad.scale == loss_scale
    assert output_grad.amax < 1.0


def test_updates_are_those_of_the_masters() -> None:
    model, optimizer = prepared("O2", torch.bfloat16, "AdamW")
    with Monitor(model, optimizer, every=1) as monitor:
        by_block(model, optimizer, 0)  # makes the masters
        masters = [p.detach().clone() for p in amp.master_params(optimizer)]
        by_block(model, optimizer, 1)
    after = [p.detach().clone() for p in amp.master_params(optimizer)]
    rows = {row.module: row for row in of(monitor.rows(), "update", step=1)}
    for (name, _), old, new in zip(model.named_parameters(), masters, after, strict=True):
        assert rows[name].dtype == "float32"
        assert rows[name].amax == pytest.approx(float((new - old).abs().max()), rel=1e-6)
    lost, plain = with_optimizer(net().bfloat16(), torch.optim.AdamW, lr=1e-7, foreach=False)
    rows_of_lost = watched(
        lost, plain, lambda *_: unscaled_step(lost(batch(0).bfloat16()).float().square().mean(), plain)
    )
    assert all(row.zeros > 0.9 for row in of(rows_of_lost, "update", "0.weight"))


def test_a_skipped_step_has_no_updates_and_its_overflow_is_seen() -> None:
    model, optimizer = prepared("O2", torch.float16, "AdamW", loss_scale=2.0**20)
    rows = watched(model, optimizer, lambda *_: scaled_step(loss_of(model, 0) * 1e4, optimizer))
    assert not of(rows, "update")
    assert max(row.overflow + row.nan for row in of(rows, "grad")) >= 1.0


# ---- it changes nothing


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_watched_training_is_the_same_to_the_bit(kind: str, level: str, dtype: torch.dtype) -> None:
    results = []
    for watched in (False, True):
        model, optimizer = prepared(level, dtype, kind)
        monitor = Monitor(model, optimizer, every=2)
        if watched:
            monitor.attach()
        random = torch.get_rng_state()
        for step in range(5):
            by_block(model, optimizer, step)
        assert torch.equal(torch.get_rng_state(), random)
        if watched:
            assert {row.step for row in monitor.rows()} == {0, 2, 4}
            monitor.detach()
        results.append([*model.state_dict().values()])
    for plain, after in zip(*results, strict=True):
        torch.testing.assert_close(after, plain, rtol=0.0, atol=0.0, equal_nan=True)


def test_no_hook_is_left_between_sampled_steps_and_none_afterwards() -> None:
    model, optimizer = prepared("O2", torch.bfloat16, "AdamW")
    before = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    monitor = Monitor(model, optimizer, every=3).attach()
    hooks = []
    for step in range(4):
        hooks.append(sum(len(module._forward_hooks) for module in model.modules()))
        by_block(model, optimizer, step)
    monitor.detach()
    after = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert after == before
    assert hooks[1] == hooks[2] < hooks[0] == hooks[3]
    count = len(monitor.rows())
    by_block(model, optimizer, 4)
    assert len(monitor.rows()) == count


def test_a_watched_optimizer_is_copied_and_saved_without_its_monitor() -> None:
    model, optimizer = prepared("O2", torch.bfloat16, "AdamW")
    with Monitor(model, optimizer, every=1) as monitor:
        by_block(model, optimizer, 0)
        twin, other = copy.deepcopy((model, optimizer))
        count = len(monitor.rows())
        by_block(twin, other, 1)
        assert len(monitor.rows()) == count
        by_block(model, optimizer, 1)
        assert len(monitor.rows()) > count


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_watched_model_is_copied_and_pickled_and_the_copy_is_not_watched(level: str) -> None:
    model, optimizer = prepared(level, torch.bfloat16, "AdamW")
    alone = nn.Sequential(nn.Linear(4, 4))
    with Monitor(model, optimizer, every=1) as monitor, Monitor(alone, every=1) as other:
        by_block(model, optimizer, 0)
        count = len(monitor.rows())
        twin = copy.deepcopy(model)
        twin(batch(1))
        pickle.loads(pickle.dumps(copy.deepcopy(alone)))(torch.ones(1, 4))
        copy.deepcopy(alone)(torch.ones(1, 4))
        assert len(monitor.rows()) == count
        assert other.rows() == []
    if level == "O0":
        pickle.loads(pickle.dumps(twin))(batch(2))


def test_a_parameter_that_a_module_returns_keeps_no_hook() -> None:
    table = Made(lambda self: self.weight, weight=nn.Parameter(torch.ones(16)))
    model, optimizer = with_optimizer(Made(lambda self, x: x * self.table(), table=table), torch.optim.SGD, lr=0.1)
    rows = watched(model, optimizer, plainly, 3)
    assert not table.weight._backward_hooks
    assert [row.step for row in of(rows, "output", "table")] == [0, 1, 2]


# ---- steps and passes


def test_fp16_optimizer_is_watched_step_by_step() -> None:
    model = net().half()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=1e-2), static_loss_scale=8.0, verbose=False)
    with Monitor(model, optimizer, every=1) as monitor:
        for step in range(3):
            optimizer.zero_grad()
            optimizer.backward(model(batch(step).half()).float().square().mean())
            optimizer.step()
    rows = monitor.rows()
    assert {row.step for row in of(rows, "grad")} == {row.step for row in of(rows, "output")} == {0, 1, 2}
    assert {row.scale for row in of(rows, "output_grad")} == {8.0}


def test_two_monitors_of_one_optimizer_see_the_same() -> None:
    model, optimizer = prepared("O2", torch.bfloat16, "AdamW")
    first, second = Monitor(model, optimizer, every=1).attach(), Monitor(model, optimizer, every=1).attach()
    by_block(model, optimizer, 0)
    first.detach()
    by_block(model, optimizer, 1)
    second.detach()
    assert of(first.rows(), "grad") == of(second.rows(), "grad", step=0)
    assert of(second.rows(), "grad", step=1)


def test_a_monitor_may_come_before_amp() -> None:
    model, optimizer = with_optimizer(net(), torch.optim.AdamW, lr=1e-2)
    with Monitor(model, optimizer, every=1) as monitor:
        amp.initialize(model, optimizer, opt_level="O2", dtype=torch.bfloat16, verbosity=0)
        for step in range(2):
            by_block(model, optimizer, step)
    assert {row.step for row in of(monitor.rows(), "grad")} == {0, 1}


def test_a_tied_weight_has_its_first_name() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    model[1].weight = model[0].weight
    rows = watched(*with_optimizer(model, torch.optim.SGD, lr=0.1), plainly)
    assert [row.module for row in of(rows, "grad")] == ["0.weight"]


def test_layers_and_weights_that_come_later_are_seen() -> None:
    model, optimizer = with_optimizer(net(), torch.optim.SGD, lr=0.1)
    with Monitor(model, optimizer, every=1) as monitor:
        loss_of(model, 0).backward()
        optimizer.step()
        model.append(nn.Linear(4, 4))
        optimizer.add_param_group({"params": model[4].parameters()})
        for step in range(2):  # the step that has begun has the old layers
            loss_of(model, step).backward()
            optimizer.step()
    assert of(monitor.rows(), "output", "4", step=2)
    assert of(monitor.rows(), "grad", "4.weight", step=2)


def test_a_module_that_works_in_place_and_a_dataclass_have_rows() -> None:
    @dataclasses.dataclass
    class Out:
        value: torch.Tensor

    parts = nn.Sequential(nn.Linear(16, 4), Applies(lambda x: x.mul_(1e6)))
    with torch.no_grad():
        _, rows = passed(Made(lambda self, x: Out(self.parts(x) * 2), parts=parts), batch(0))
    assert [row.module for row in rows] == ["parts.0", "parts.1", "(root)"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_parts_of_torchscript_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(16, 4), torch.jit.script(nn.ReLU()))
    rows = watched(*with_optimizer(model, torch.optim.SGD, lr=0.1), plainly)
    assert {row.module for row in of(rows, "output")} == {"0", "(root)"}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_compilation_goes_on_when_monitors_overlap_in_any_order() -> None:
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: calls.append(1) or graph.forward(*args)

    nets = [net(), net()]
    fast = [torch.compile(each, backend=backend) for each in nets]
    steppers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in nets]
    monitors = [Monitor(n, o, every=3).attach() for n, o in zip(nets, steppers, strict=True)]
    for step in range(5):
        for model, optimizer in zip(fast, steppers, strict=True):
            loss_of(model, step).backward()
            optimizer.step()
    for monitor in monitors:
        monitor.detach()
        assert len(of(monitor.rows(), "output", "0")) == 2
    calls.clear()
    for model in fast:
        model(batch(0))
    assert len(calls) == 2


def test_passes_of_one_step_are_added_up() -> None:
    model, optimizer = prepared("O2", torch.bfloat16, "AdamW")
    with Monitor(model, optimizer, every=1) as monitor:
        for step in range(3):
            scaled_backward(loss_of(model, step), optimizer)
        optimizer.step()
    rows = monitor.rows()
    assert {row.step for row in rows} == {0}
    assert of(rows, "output", "0")[0].numel == 3 * 8 * 32


def test_a_module_that_is_called_twice_has_two_rows() -> None:
    model = Made(lambda self, x: self.inner(self.inner(x)), inner=nn.Linear(16, 16))
    with Monitor(model, every=1) as monitor:
        for step in range(2):
            model(batch(step))
    assert [(row.step, row.module, row.call) for row in monitor.rows()] == [
        (0, "inner", 0), (0, "inner", 1), (1, "inner", 0), (1, "inner", 1),
    ]  # fmt: skip


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_recomputes_counts_once(reentrant: bool) -> None:
    model = Made(lambda self, x: checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant), inner=net())
    rows = watched(*with_optimizer(model, torch.optim.SGD, lr=0.1), plainly)
    for name in ("inner.0", "inner.1", "inner.2"):
        assert [(row.call, row.numel) for row in of(rows, "output", name)] == [(0, 8 * 32)]
        assert [(row.call, row.numel) for row in of(rows, "output_grad", name)] == [(0, 8 * 32)]


def test_forward_passes_without_gradients_do_not_count() -> None:
    model, optimizer = prepared("O1", torch.bfloat16, "AdamW")
    with Monitor(model, optimizer, every=1) as monitor:
        with torch.no_grad():
            model(batch(7))
        by_block(model, optimizer, 0)
    assert of(monitor.rows(), "output", "0")[0].numel == 8 * 32


@pytest.mark.parametrize("scaler_of", [amp.GradScaler, lambda **o: torch.amp.GradScaler("cpu", **o)])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_way_to_scale_is_known(kind: str, scaler_of: Any) -> None:
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = scaler_of(init_scale=256.0)
    exactly = {"scaler": scaler} if type(scaler) is torch.amp.GradScaler else {}
    with Monitor(model, optimizer, every=1, **exactly) as monitor:
        for step in range(2):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of(model, step)
            scaler.scale(loss).backward()
            exact_grads = {name: p.grad / 256.0 for name, p in model.named_parameters()}
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    rows = monitor.rows()
    assert {row.step for row in rows} == {0, 1}
    assert {row.scale for row in of(rows, "grad")} == {256.0}
    assert {row.scale for row in of(rows, "output_grad")} == {256.0}
    for row in of(rows, "grad", step=1):
        assert row.amax == pytest.approx(float(exact_grads[row.module].abs().max()), rel=1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_it_is_not_cast_by_another_model_nor_by_autocast(dtype: torch.dtype) -> None:
    other = amp.initialize(net(), opt_level="O1", dtype=dtype, verbosity=0)
    model = net().to(torch.float16 if dtype is torch.bfloat16 else torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Monitor(model, optimizer, every=1) as monitor:
        model[0](batch(0).to(model[0].weight.dtype)).sum().backward()
        with torch.autocast("cpu", dtype):
            optimizer.step()
    assert other is not None
    for row in of(monitor.rows(), "weight", "0.weight"):
        assert row.dtype == str(model[0].weight.dtype).removeprefix("torch.")


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_a_function_mode_hears_nothing_of_it() -> None:
    """As the casting mode of O1 is one, each attribute that is read through it would cost a call."""

    class Heard(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    model, alone, watched = net(), Heard(), Heard()
    with alone:
        loss_of(model, 0).backward()
    with (
        Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), tensors=("output", "output_grad")) as monitor,
        watched,
    ):
        loss_of(model, 0).backward()
    assert len(monitor.rows()) == 8
    assert watched.names == alone.names


def test_a_compiled_model_is_seen_and_not_compiled_again() -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    model, optimizer = with_optimizer(net(), torch.optim.SGD, lr=0.1)
    fast = torch.compile(model, backend=backend)
    loss_of(fast, 0).backward()
    count = len(compiled)
    with Monitor(model, optimizer, every=2) as monitor:
        for step in range(4):
            loss_of(fast, step).backward()
            optimizer.step()
    loss_of(fast, 9)
    assert len(compiled) == count
    assert {row.step for row in of(monitor.rows(), "output", "0")} == {0, 2}


def test_vmap_and_functional_calls_are_left_alone() -> None:
    model = net()
    with Monitor(model, every=1) as monitor:
        torch.func.vmap(model)(batch(0))
        torch.func.grad(lambda x: model(x).sum())(batch(0))
    assert monitor.rows() == []


def test_released_gradients_are_not_seen_and_the_rest_is() -> None:
    model, optimizer = with_optimizer(net(), optimizers.FusedAdam, lr=1e-2)
    release = optimizer.attach(model)
    rows = watched(model, optimizer, plainly)
    release.remove()
    assert not of(rows, "grad")
    assert of(rows, "output")


def test_train_step_is_watched() -> None:
    model, optimizer = prepared("O2", torch.bfloat16, "AdamW")
    step = halfstep.TrainStep(model, lambda output, _: output.float().square().mean(), optimizer)
    rows = watched(model, optimizer, lambda _model, _optimizer, index: step(batch(index), torch.zeros(())), 2)
    assert {row.step for row in of(rows, "grad")} == {0, 1}


def test_sparse_integer_and_empty_tensors_are_taken_or_left() -> None:
    def outputs(self: Any, ids: torch.Tensor) -> Any:
        return {"out": self.table(ids), "ids": ids, "none": torch.zeros(0), "z": torch.ones(2) * 1j}

    model, optimizer = with_optimizer(Made(outputs, table=nn.Embedding(50, 4, sparse=True)), torch.optim.SparseAdam)
    rows = watched(model, optimizer, lambda *_: unscaled_step(model(torch.tensor([1, 2, 1]))["out"].sum(), optimizer))
    assert [row.module for row in of(rows, "output")] == ["table"]
    assert of(rows, "grad")[0].numel == 2 * 4


# ---- what it gives


def test_latest_is_plain_numbers_by_name() -> None:
    model, optimizer = prepared("O2", torch.float16, "AdamW")
    monitor = Monitor(model, optimizer, every=1)
    assert monitor.latest() == {}
    with monitor:
        for step in range(3):
            by_block(model, optimizer, step)
    latest = monitor.latest()
    assert latest, "the step that had begun when it was detached is none"
    row = of(monitor.rows(), "output", "0", step=2)[0]
    assert latest["numerics/0/output/amax"] == row.amax
    assert latest["numerics/0.weight/grad/headroom"] == of(monitor.rows(), "grad", "0.weight", step=2)[0].headroom
    assert all(type(value) is float for value in latest.values())


def test_names_leave_out_the_wrapper() -> None:
    model, optimizer = prepared("O1", torch.bfloat16, "AdamW")
    wrapped = nn.DataParallel(model)
    rows = watched(wrapped, optimizer, lambda *_: by_block(model, optimizer, 0), tensors=("output",))
    assert {row.module for row in rows} == {"0", "1", "2", "3"}


def test_it_is_attached_once() -> None:
    monitor = Monitor(net(), every=1).attach()
    with pytest.raises(UsageError, match="attached already"):
        monitor.attach()
    monitor.detach()
    monitor.detach()
    monitor.attach().detach()


# ---- alarms


def gain(factor: float = 1.0) -> Made:
    return Made(lambda self, x: x * self.factor, factor=factor)


@pytest.mark.exhaustive
def test_a_ramp_of_activations_is_announced_before_the_first_skipped_step(caplog: pytest.LogCaptureFixture) -> None:
    ahead = []
    for seed in range(10):
        torch.manual_seed(seed)
        random = torch.Generator().manual_seed(seed)
        growth = 1.02 + 0.13 * float(torch.rand((), generator=random))
        ramp, layers = gain(), [nn.Linear(16, 16) for _ in range(4)]
        layers.insert(int(torch.randint(0, 5, (), generator=random)), ramp)
        model, optimizer = start_amp(nn.Sequential(*layers), torch.optim.SGD, "O2", dtype=FP16, loss_scale=2.0, lr=1e-4)
        announced = skipped = None
        with Monitor(model, optimizer, every=2, tensors=("output",)) as monitor, caplog.at_level("ERROR", "halfstep"):
            for step in range(200):
                ramp.factor = 65504.0 * growth ** (step - 60)
                noise = 1 + 0.1 * torch.randn((), generator=random)
                advance(model(batch(step) * noise).float().square().mean() * 1e-7, optimizer)
                if announced is None and monitor.findings():
                    announced = step
                if optimizer.step_was_skipped:
                    skipped = step
                    break
        assert skipped is not None, "the ramp ends in an overflow"
        ahead.append(announced is not None and skipped - announced >= 10)
    assert sum(ahead) >= 8, f"{sum(ahead)} of 10 overflows were announced 10 steps before"


def test_an_overflow_that_is_there_already_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(16, 4), gain(1e8), nn.Linear(4, 4)).half()
    with Monitor(model, every=1) as monitor:
        model(batch(0).half())
    (finding,) = monitor.findings()
    (record,) = caplog.records
    assert record.message.startswith("halfstep.numerics.Monitor: HS116 error at ")
    assert finding.fix in record.message
    assert "halfstep.check(" not in record.message
    assert (finding.code, finding.severity, finding.where) == ("HS116", "error", "1, 2")
    assert "at step 0 the output of 1 holds inf or NaN" in finding.message


def test_one_inf_that_the_sample_misses_is_counted() -> None:
    one = Applies(lambda x: x.repeat(1000, 10).index_fill(0, torch.tensor([7]), math.inf))
    _, (row,) = passed(one, batch(0)[:1], sample=1)
    assert row.overflow > 0
    assert row.headroom == -math.inf


def test_a_run_that_stays_where_it_is_raises_no_alarm() -> None:
    model, optimizer = prepared("O2", torch.float16, "AdamW")
    with Monitor(model, optimizer, every=1) as monitor:
        for step in range(30):
            by_block(model, optimizer, step)
    assert monitor.findings() == []


def test_flushed_gradients_are_found_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = with_optimizer(net().half(), torch.optim.SGD, lr=1e-4)
    with caplog.at_level(logging.INFO, "halfstep"), Monitor(model, optimizer, every=1) as monitor:
        for step in range(3):
            unscaled_step(model(batch(step).half()).float().square().mean() * 1e-5, optimizer)
    (finding,) = monitor.findings()
    assert finding.code == "HS117"
    assert finding.evidence["flushed"] > 0.01
    assert [record.message.count("HS117") for record in caplog.records if "HS117" in record.message] == [1]
    assert finding.fix in caplog.text
    assert "halfstep.check(" not in caplog.text
