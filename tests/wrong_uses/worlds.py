"""What a wrong use is done to, and a snapshot that shows whether it has changed anything."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import halfstep
from halfstep import amp, fp16_utils, optimizers, static
from halfstep.casting.scope import session_casting
from halfstep.torch_internals.torch_compat import module_hooks
from tests.support.worlds import with_optimizer

__all__ = ["World", "same", "snapshot"]

World = SimpleNamespace
"""The objects that a wrong use is done to, by name."""


def net() -> nn.Module:
    """A small model with BatchNorm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def plain() -> World:
    """A model and torch's Adam."""
    model = net()
    return World(model=model, optimizer=torch.optim.Adam(model.parameters()), x=torch.ones(3, 4), loss=torch.ones(()))


def at(level: str = "O2", dtype: torch.dtype = torch.float16, **options: Any) -> Callable[[], World]:
    """The setup that brings the model and optimizer up at a level."""

    def setup() -> World:
        world = plain()
        amp.initialize(world.model, world.optimizer, opt_level=level, dtype=dtype, verbosity=0, **options)
        world.loss = world.model(world.x).float().square().mean()
        return world

    return setup


def inside(*args: Any, **options: Any) -> Callable[[], World]:
    """The setup of a block of ``scale_loss`` that is open after its backward pass."""

    def setup() -> World:
        world = at(*args, **options)()
        world.optimizer.step()  # there are no gradients; torch notes that it was called
        world.loss = world.model(world.x).float().square().mean()
        world.block = amp.scale_loss(world.loss, world.optimizer)
        world.block.__enter__().backward()
        return world

    return setup


def scaled() -> World:
    """A model, Adam and an ``amp.GradScaler`` with a loss that has not gone backward yet."""
    world = plain()
    world.scaler = amp.GradScaler(init_scale=8.0)
    world.loss = world.model(world.x).square().mean()
    return world


def pending() -> World:
    """Gradients that are scaled."""
    world = scaled()
    world.scaler.scale(world.loss).backward()
    return world


def stepped() -> World:
    """A scaler whose iteration is over."""
    world = pending()
    world.scaler.step(world.optimizer)
    world.scaler.update()
    world.optimizer.zero_grad()
    return world


def unscaled() -> World:
    """A scaler that has unscaled."""
    world = pending()
    world.scaler.unscale_(world.optimizer)
    return world


def taken() -> World:
    """A scaler that has stepped and is not updated."""
    world = unscaled()
    world.scaler.step(world.optimizer)
    return world


def two_models() -> World:
    """A second model, with nothing but dropout."""
    world = plain()
    world.second = nn.Dropout()
    return world


def handled() -> World:
    """The handle of 2018, and an optimizer wrapped by it."""
    world = plain()
    world.handle = amp.init(dtype=torch.bfloat16)
    world.wrapped = world.handle.wrap_optimizer(world.optimizer, num_loss=1)
    world.loss = world.model(world.x).float().square().mean()
    return world


def used_up() -> World:
    """The handle, after all losses of a step."""
    world = handled()
    with world.wrapped.scale_loss(world.loss) as scaled_loss:
        scaled_loss.backward()
    return world


def used() -> World:
    """The handle, after a step of its optimizer."""
    world = used_up()
    world.wrapped.step()
    return world


def old() -> World:
    """``FP16_Optimizer`` around Adam over a half model."""
    model, inner = with_optimizer(nn.Linear(4, 2).half(), torch.optim.Adam)
    optimizer = fp16_utils.FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    return World(model=model, inner=inner, optimizer=optimizer, loss=torch.ones((), requires_grad=True))


def weights() -> World:
    """One parameter."""
    return World(weight=nn.Parameter(torch.ones(3)))


def fused() -> World:
    """A bfloat16 layer and FusedAdam with masters after a step."""
    model, optimizer = with_optimizer(nn.Linear(4, 2).bfloat16(), optimizers.FusedAdam, master_weights=True)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return World(model=model, optimizer=optimizer)


def muon() -> World:
    """FusedMuon of a vector, which has no name."""
    return World(optimizer=optimizers.FusedMuon([nn.Parameter(torch.ones(3))]))


def released(level: str | None = None, scaler: Any = None) -> Callable[[], World]:
    """The setup of a FusedAdam with gradient release."""

    def setup() -> World:
        world = plain()
        world.optimizer, world.scaler = optimizers.FusedAdam(world.model.parameters()), scaler
        if level is not None:
            amp.initialize(world.model, world.optimizer, opt_level=level, dtype=torch.float16, verbosity=0)
        world.optimizer.attach(world.model, scaler=scaler)
        world.loss = world.model(world.x).float().square().mean()
        return world

    return setup


def used_inside(scaler: Any = None) -> Callable[[], World]:
    """The setup of a FusedAdam whose parameters have stepped in a backward pass."""

    def setup() -> World:
        world = released("O2" if scaler is None else None, scaler)()
        loss = nullcontext(scaler.scale(world.loss)) if scaler else amp.scale_loss(world.loss, world.optimizer)
        with loss as scaled_loss:
            scaled_loss.backward()
        return world

    return setup


@functools.cache  # a wrong use changes nothing
def captured() -> World:
    """A captured program, and an optimizer of it."""
    model = nn.Linear(4, 2)
    loss_fn = nn.MSELoss()
    program = static.capture(model, loss_fn, (torch.ones(3, 4), torch.ones(3, 2)))
    return World(
        model=model,
        loss_fn=loss_fn,
        program=program,
        optimizer=torch.optim.SGD(program.parameters(), lr=0.1),
        feed={"input": torch.ones(3, 4), "label": torch.ones(3, 2)},
    )


def building() -> World:
    """Static mode, and a program with an input ``x``."""
    static.enable_static()
    guard = static.program_guard(static.Program(), static.Program())
    guard.__enter__()
    world = plain()
    return World(guard=guard, layer=world.model[0], optimizer=world.optimizer, x=static.data("x", [2, 4]))


def ended() -> World:
    """Static mode, and a program that ``minimize`` has ended."""
    world = building()
    world.loss = world.layer(world.x).mean()
    world.optimizer.minimize(world.loss)
    return world


def networked() -> World:
    """A ``halfstep.Model`` that is prepared, with a dataset."""
    world = plain()
    world.network = halfstep.Model(world.model)
    world.network.prepare(world.optimizer, nn.CrossEntropyLoss())
    world.data = [(torch.ones(3, 4), torch.zeros(3, dtype=torch.long))]
    return world


def stepping() -> World:
    """A ``halfstep.TrainStep``."""
    world = plain()
    world.step = halfstep.TrainStep(world.model, nn.MSELoss(), world.optimizer)
    return world


def nothing() -> World:
    """No objects."""
    return World()


# ---- what must not change


def snapshot(world: World) -> dict[str, Any]:
    """The state of every object, and of the process, as numbers that can be compared."""
    found = {name: _state(value) for name, value in vars(world).items()}
    found["the process"] = (
        session_casting(),
        amp._amp_state.session,
        torch.is_grad_enabled(),
        torch._C._len_torch_function_stack(),
    )
    return found


def _state(value: Any) -> Any:
    if isinstance(value, nn.Module):
        hooks = sum(module_hooks(module) for module in value.modules())
        grads = [None if p.grad is None else p.grad.clone() for p in value.parameters()]
        own = {name: (t.dtype, t.clone()) for name, t in (*value.named_parameters(), *value.named_buffers())}
        return type(value), hooks, value.training, own, deepcopy(value.state_dict()), grads
    if isinstance(value, torch.optim.Optimizer) and not isinstance(value, fp16_utils.FP16_Optimizer):
        groups = [{**group, "params": [id(p) for p in group["params"]]} for group in value.param_groups]
        held = {id(p): {k: _copied(v) for k, v in state.items()} for p, state in value.state.items()}
        return type(value), sorted(vars(value)), groups, held
    if isinstance(value, halfstep.TrainStep):
        return value.settings(), value.grad_norm
    if isinstance(value, halfstep.Model):
        return value.optimizer, value._loss, value.scaler, value._scope
    if isinstance(value, (amp.GradScaler, fp16_utils.FP16_Optimizer)):
        return deepcopy(value.state_dict())
    if isinstance(value, static.Variable):
        return value.name  # it has no numbers
    return _copied(value) if isinstance(value, torch.Tensor) else None


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def same(a: Any, b: Any) -> bool:
    """Whether two snapshots are equal to the bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype is b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
