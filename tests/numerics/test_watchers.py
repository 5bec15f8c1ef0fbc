"""All that watches a training takes tensors without elements, and never hides the error that ends a watched step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import halfstep
from halfstep import amp, numerics
from halfstep.diagnostics.observe.reading import Reading
from halfstep.stepping.attached import observers
from halfstep.torch_internals.torch_compat import dispatch_mode_count
from tests.support.worlds import Made, with_optimizer

Step = Callable[[], object]
Watcher = Callable[[nn.Module, Any, Step], object]


def net() -> nn.Module:
    body, prompt = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), nn.Parameter(torch.zeros(0, 4))
    return Made(lambda self, x: self.body(torch.cat([self.prompt, x])), body=body, prompt=prompt)


def monitored(model: nn.Module, optimizer: Any, step: Step) -> object:
    with numerics.Monitor(model, optimizer, every=1) as monitor:
        step()
    return monitor.rows()


def monitored_alone(model: nn.Module, optimizer: Any, step: Step) -> object:
    with numerics.Monitor(model, every=1) as monitor:
        step()
    return monitor.rows()


def watched(model: nn.Module, optimizer: Any, step: Step) -> object:
    watch = halfstep.watch(optimizer, every=1)
    try:
        step()
    finally:
        watch.remove()
    watch.findings()
    return [watch.fraction]


def checked(model: nn.Module, optimizer: Any, step: Step) -> object:
    halfstep.check(model, optimizer, batch=torch.ones(2, 4))
    step()
    return [halfstep.check(model, optimizer), halfstep.memory(model, optimizer)]


def counted(model: nn.Module, optimizer: Any, step: Step) -> object:
    with amp.debugging.collect_operator_stats() as counts:
        step()
    return counts


def tensor_checked(model: nn.Module, optimizer: Any, step: Step) -> object:
    config = amp.debugging.TensorCheckerConfig(True, amp.debugging.DebugMode.CHECK_ALL)
    amp.debugging.enable_tensor_checker(config)
    try:
        return [step()]
    finally:
        amp.debugging.disable_tensor_checker()


def layer_checked(model: nn.Module, optimizer: Any, step: Step) -> object:
    return [amp.debugging.check_layer_numerics(lambda _, x: step())(model, torch.zeros(0))]


WATCHERS: dict[str, Watcher] = {
    "Monitor": monitored,
    "Monitor without an optimizer": monitored_alone,
    "watch": watched,
    "check": checked,
    "op_table": lambda model, _, step: numerics.op_table(step, model).rows(),
    "compare_step": lambda model, _, step: str(numerics.compare_step(step, model, candidate="O1")),
    "collect_operator_stats": counted,
    "TensorChecker": tensor_checked,
    "check_layer_numerics": layer_checked,
}


def hooks_left(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    tables = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    tables += [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    tables += [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
    tables += [table for m in model.modules() for table in (m._forward_pre_hooks, m._forward_hooks)]
    return [*map(len, tables), len(observers), dispatch_mode_count()]


def trained(level: str | None, kind: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, optimizer = with_optimizer(net(), getattr(torch.optim, kind), lr=1e-3)
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype="bfloat16", verbosity=0)
    return model, optimizer


@contextmanager
def all_taken_off(model: nn.Module, optimizer: Any) -> Iterator[None]:
    before = hooks_left(model, optimizer)
    yield
    assert hooks_left(model, optimizer) == before


@pytest.mark.parametrize("level", [None, "O1", "O2"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("name", WATCHERS)
def test_a_parameter_without_elements_is_taken(name: str, kind: str, level: str | None) -> None:
    model, optimizer = trained(level, kind)

    def step() -> object:
        for width in (2, 0):  # rows of an input, which may be empty, too
            loss = model(torch.ones(width, 4)).float().sum()
            loss.backward()
        optimizer.step()
        return 1

    step()
    with all_taken_off(model, optimizer):
        assert WATCHERS[name](model, optimizer, step)


def the_users(*_: object) -> None:
    raise ZeroDivisionError("the user's")


def gone(*_: object) -> None:
    raise RuntimeError("the device is gone")


@pytest.mark.filterwarnings("ignore:module forward hook with `always_call=True` raised")
@pytest.mark.parametrize("itself", ["works", "fails"])
@pytest.mark.parametrize("at", ["the first module", "the backward pass"])
@pytest.mark.parametrize("name", [name for name in WATCHERS if name != "check"])  # which runs no step
def test_the_error_of_a_step_is_the_users_and_nothing_stays(
    name: str, at: str, itself: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained("O2", "AdamW")

    def step() -> None:
        loss = model(torch.ones(2, 4)).float().sum()
        loss.register_hook(the_users)
        loss.backward()

    if at == "the first module":
        model.get_submodule("body.0").register_forward_pre_hook(the_users)
    with all_taken_off(model, optimizer), monkeypatch.context() as patch:
        if itself == "fails":
            patch.setattr(Reading, "send", gone)
        with pytest.raises(ZeroDivisionError, match="the user's"):
            WATCHERS[name](model, optimizer, step)
