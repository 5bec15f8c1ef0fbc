"""Nothing grows: 100 iterations of every face leave as many objects and tensors as there were, and the same memory.

A face is a function that returns one iteration. Objects are counted after a collection; memory is what the process
holds, which after the warm-up may grow by less than what a leak of 40 KiB in each iteration would add.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import halfstep
from halfstep import OpLists, Policy, amp, fp16_utils, multi_tensor, optimizers, static
from tests.support.worlds import (
    read_back,
    scaled_backward,
    scaled_step,
    start_amp,
    step_and_clear,
    unscaled_step,
    with_optimizer,
)

pytestmark = pytest.mark.exhaustive

WARM_UP, ITERATIONS = 30, 100
OBJECTS, TENSORS, MEBIBYTES = 80, 60, 4.0  # fewer than iterations; some lists are shortened now and then

Iteration = Callable[[int], Any]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


X, Y = torch.ones(4, 8), torch.zeros(4, dtype=torch.long)


def loss_of(model: Any) -> torch.Tensor:
    return F.cross_entropy(model(X).float(), Y)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-4)


def initialized(level: str, make: Any = adam, **options: Any) -> tuple[Any, Any]:
    return start_amp(net(), make, level, **{"dtype": torch.float16, "loss_scale": "dynamic", **options})


def by_level(level: str, make: Any = adam, overflows: bool = False, step: bool = True, **options: Any) -> Iteration:
    rule = halfstep.DynamicLossScale(collapse_after=None)
    model, optimizer = initialized(level, make, loss_scale=rule)

    def iterate(i: int) -> None:
        loss = loss_of(model) * (float("inf") if overflows and i % 2 else 1.0)
        scaled_backward(loss, optimizer, **options)
        if step:
            step_and_clear(optimizer)

    return iterate


def by_scaler(level: str, decorated: bool) -> Iteration:
    model, optimizer = with_optimizer(net(), adam)
    if decorated:
        model, optimizer = amp.decorate(model, optimizer, level="O2", dtype="bfloat16")
    scaler = amp.GradScaler()

    def iterate(i: int) -> None:
        with amp.auto_cast(level=level, dtype="bfloat16", custom_black_list=["relu"]):
            loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return iterate


def sessions() -> Iteration:
    def iterate(i: int) -> None:
        model, optimizer = initialized(f"O{i % 4}")
        scaled_step(loss_of(model), optimizer)

    return iterate


def by_handle() -> Iteration:
    def iterate(i: int) -> None:
        handle = amp.init(dtype="bfloat16")
        model = net()
        optimizer = handle.wrap_optimizer(adam(model.parameters()))
        with optimizer.scale_loss(loss_of(model)) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        handle._deactivate()

    return iterate


def by_one_handle() -> Iteration:
    handle = amp.init(dtype="bfloat16")
    model = net()
    optimizer = handle.wrap_optimizer(adam(model.parameters()))

    def iterate(i: int) -> None:
        with optimizer.scale_loss(loss_of(model)) as scaled_loss:
            scaled_loss.backward()
        step_and_clear(optimizer)
        if i == WARM_UP + ITERATIONS - 1:
            handle._deactivate()

    return iterate


def by_fp16_optimizer() -> Iteration:
    model, inner = with_optimizer(fp16_utils.network_to_half(net()), adam)
    optimizer = fp16_utils.FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)

    def iterate(i: int) -> None:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model))
        optimizer.clip_master_grads(1.0)
        optimizer.step()

    return iterate


def fused(make: Any, **options: Any) -> Iteration:
    model, optimizer = with_optimizer(net().bfloat16(), make, master_weights=True, max_grad_norm=1.0, **options)
    return lambda i: unscaled_step(F.cross_entropy(model(X.bfloat16()).float(), Y), optimizer)


def released() -> Iteration:
    model, optimizer = initialized("O2", optimizers.FusedAdam)
    optimizer.attach(model)
    return lambda i: scaled_step(loss_of(model), optimizer)


def attached_and_removed() -> Iteration:
    model, optimizer = initialized("O2", optimizers.FusedAdam)
    return lambda i: optimizer.attach(model).remove()


def train_step() -> Iteration:
    model, optimizer = initialized("O2")
    step = halfstep.TrainStep(model, nn.CrossEntropyLoss(), optimizer, max_grad_norm=1.0, accumulate=2)
    return lambda i: step(torch.ones(2 + i % 3, 8), torch.zeros(2 + i % 3, dtype=torch.long))


def by_model(level: str) -> Iteration:
    network = net()
    model = halfstep.Model(network)
    model.prepare(adam(network.parameters()), nn.CrossEntropyLoss(), amp_configs={"level": level, "dtype": "bfloat16"})
    data = [(X, Y)]

    def iterate(i: int) -> None:
        model.fit(data, verbose=0)
        model.evaluate(data, verbose=0)
        model.predict([X], verbose=0)

    return iterate


def executed(level: str) -> Iteration:
    program = static.capture(net(), nn.CrossEntropyLoss(), (X, Y))
    optimizer = static.amp.decorate(adam(program.parameters()), level=level, dtype="bfloat16")
    optimizer.minimize(program.loss)
    executor = static.Executor()
    return lambda i: executor.run(program, {"input": X, "label": Y}, [program.loss])


def checked() -> Iteration:
    model, optimizer = initialized("O2")
    return lambda i: halfstep.check(model, optimizer, batch=(X,))


def watched() -> Iteration:
    model, optimizer = initialized("O2")
    watch = halfstep.watch(optimizer, every=2)

    def iterate(i: int) -> None:
        unscaled_step(loss_of(model), optimizer)
        halfstep.watch(optimizer).remove()
        watch.findings()

    return iterate


def saved_and_loaded() -> Iteration:
    model, optimizer = initialized("O2")
    by_level("O2")(0)

    def iterate(i: int) -> None:
        saved = model.state_dict(), optimizer.state_dict(), amp.state_dict(optimizer=optimizer)
        weights, state, scales = read_back(saved)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        amp.load_state_dict(scales, optimizer=optimizer)

    return iterate


def masters_looked_at() -> Iteration:
    model, optimizer = initialized("O2")

    def iterate(i: int) -> None:
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        amp.master_model(model)(X)

    return iterate


def copied() -> Iteration:
    pair = initialized("O2", optimizers.FusedAdam)
    return lambda i: copy.deepcopy(pair)


def groups_added() -> Iteration:
    """Each iteration has an optimizer of its own, to which it adds."""

    def iterate(i: int) -> None:
        _, optimizer = initialized("O2")
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float16))]})

    return iterate


def values() -> Iteration:
    def iterate(i: int) -> None:
        Policy.parse(str(Policy.from_level("O1", "bfloat16")))
        OpLists.parse(f"O1+relu-{'exp' if i % 2 else 'softmax'}").rule("softmax")

    return iterate


def functions() -> Iteration:
    class Own:
        @staticmethod
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

    def iterate(i: int) -> None:
        registration = amp.register_half_function(Own, "double")
        with amp.auto_cast(dtype="bfloat16"):
            assert Own.double(X).dtype is torch.bfloat16
            amp.float_function(lambda x: x + 1)(X)
        registration.remove()

    return iterate


def lists_of_tensors() -> Iteration:
    flag, tensors = torch.zeros(1, dtype=torch.int), [torch.ones(3), torch.ones(2, 2)]
    apply, scale = multi_tensor.multi_tensor_applier, multi_tensor.multi_tensor_scale
    return lambda i: apply(scale, flag, [tensors, tensors], 1.0)


def refused() -> Iteration:
    """What fails leaves nothing behind either."""
    model, optimizer = initialized("O2")

    def iterate(i: int) -> None:
        other = net()
        with pytest.raises(halfstep.HalfstepError):
            amp.initialize(other, adam(other.parameters()), opt_level="O9")
        with pytest.raises(ZeroDivisionError), amp.scale_loss(loss_of(model), optimizer):
            _ = 1 / 0

    return iterate


FACES: dict[str, Callable[[], Iteration]] = {
    **{f"initialize {level}": lambda level=level: by_level(level) for level in ("O0", "O1", "O2", "O3")},  # type: ignore[misc]
    "initialize O2, torch's own step": lambda: by_level("O2", lambda p: torch.optim.RMSprop(p, lr=1e-4)),
    "initialize O2, overflows": lambda: by_level("O2", overflows=True),
    "initialize O1, overflows": lambda: by_level("O1", overflows=True),
    "initialize O1, never a step": lambda: by_level("O1", step=False),
    "initialize O2, never a step": lambda: by_level("O2", step=False),
    "GradScaler O1": lambda: by_scaler("O1", False),
    "GradScaler O2": lambda: by_scaler("O2", True),
    "GradScaler OD": lambda: by_scaler("OD", False),
    "a session in each iteration": sessions,
    "a handle in each iteration": by_handle,
    "one handle": by_one_handle,
    "FP16_Optimizer": by_fp16_optimizer,
    "FusedAdam": lambda: fused(optimizers.FusedAdam),
    "FusedSGD": lambda: fused(optimizers.FusedSGD, momentum=0.9, lr=1e-4),
    "FusedLAMB": lambda: fused(optimizers.FusedLAMB),
    "FusedNovoGrad": lambda: fused(optimizers.FusedNovoGrad),
    "FusedAdagrad": lambda: fused(optimizers.FusedAdagrad),
    "gradient release": released,
    "gradient release begun and ended": attached_and_removed,
    "TrainStep": train_step,
    "Model O0": lambda: by_model("O0"),
    "Model O1": lambda: by_model("O1"),
    "Model O2": lambda: by_model("O2"),
    "Executor O1": lambda: executed("O1"),
    "Executor O2": lambda: executed("O2"),
    "check": checked,
    "watch": watched,
    "saving and loading": saved_and_loaded,
    "masters": masters_looked_at,
    "deep copies": copied,
    "groups added": groups_added,
    "policies and lists": values,
    "functions": functions,
    "multi-tensor": lists_of_tensors,
    "refusals": refused,
}


def counts() -> tuple[int, int]:
    """How many objects there are, and how many of them are tensors."""
    gc.collect()
    objects = gc.get_objects()
    return len(objects), sum(issubclass(type(each), torch.Tensor) for each in objects)


def resident() -> float:
    """The memory of this process in mebibytes, where the system tells."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 / 2**20 if status.exists() else 0.0


@pytest.mark.filterwarnings("ignore:.*did not come through amp.scale_loss:UserWarning")  # "watch" has none
@pytest.mark.parametrize("face", FACES)
def test_nothing_grows(face: str) -> None:
    iterate = FACES[face]()
    for i in range(WARM_UP):
        iterate(i)
    objects, tensors = counts()
    memory = resident()
    for i in range(WARM_UP, WARM_UP + ITERATIONS):
        iterate(i)
    grown = resident() - memory
    objects_then, tensors_then = counts()
    assert tensors_then - tensors < TENSORS
    assert objects_then - objects < OBJECTS
    assert grown < MEBIBYTES
