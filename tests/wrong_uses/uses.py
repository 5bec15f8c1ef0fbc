"""Functions and values that the tables of wrong uses call by a short name."""

from __future__ import annotations

import copy  # noqa: F401 - the tables use it
import math
import pickle  # noqa: F401 - as above
import warnings
from pathlib import Path
from typing import Any

import torch
from halfstep.apex.contrib import group_norm  # noqa: F401 - as above
from halfstep.apex.contrib import optimizers as contrib  # noqa: F401 - as above
from torch import nn
from torch.utils.data import DataLoader

import halfstep
from halfstep import amp, fp16_utils, metrics, multi_tensor, numerics, oplists, optimizers, parallel, static
from halfstep.apex import RNN, fused_dense, mlp, reparameterization  # noqa: F401 - the tables use it
from halfstep.apex import optimizers as apex_optimizers  # noqa: F401 - as above
from halfstep.integrations.figures import FiguresCallback  # noqa: F401 - as above
from halfstep.integrations.training_precision import TrainingPrecision  # noqa: F401 - as above
from halfstep.model import CheckPrecision  # noqa: F401 - as above
from halfstep.numerics import Row

from . import worlds
from .worlds import World

__all__ = ["NAMES"]

GOOD = {"scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 10, "_growth_tracker": 1}
SINGLES: Any = DataLoader([(torch.ones(4), 1)], batch_size=None)  # type: ignore[arg-type]

# ---- faces with right arguments, but for the options


def bring(models: Any, optimizers: Any, **options: Any) -> Any:
    return amp.initialize(models, optimizers, opt_level="O2", verbosity=0, **options)


def initialize(w: World, **options: Any) -> Any:
    return amp.initialize(w.model, w.optimizer, **{"opt_level": "O2", "verbosity": 0, **options})


def by_policy(w: World, policy: Any, **options: Any) -> Any:
    return amp.initialize(w.model, w.optimizer, policy=policy, verbosity=0, **options)


def halves(flat: bool) -> Any:
    """The parameters of a 16-bit layer, which have gradients, and their masters."""
    params, masters = fp16_utils.prep_param_lists(nn.Linear(3, 2).half(), flat_master=flat)
    for param in params:
        param.grad = torch.zeros_like(param)
    return params, masters


def decorate(w: World, **options: Any) -> Any:
    return amp.decorate(**{"models": w.model, "optimizers": w.optimizer, "level": "O2", **options})


def prepare(w: World, **options: Any) -> None:
    w.network.prepare(**{"optimizer": w.optimizer, "loss": nn.CrossEntropyLoss(), **options})


def fit(w: World, **options: Any) -> None:
    w.network.fit(**{"train_data": w.data, "verbose": 0, **options})


def train_step(w: World, **options: Any) -> Any:
    return halfstep.TrainStep(**{"model": w.model, "loss_fn": nn.MSELoss(), "optimizer": w.optimizer, **options})


def capture(w: World, **options: Any) -> Any:
    inputs = (w.x, torch.ones(3, 2))
    return static.capture(**{"model": w.model, "loss_fn": nn.MSELoss(), "example_inputs": inputs, **options})


# ---- blocks and functions that an expression cannot have


def enter(block: Any) -> None:
    with block:
        pass


def generator() -> Any:
    yield 1


def other_loss(w: World) -> None:
    with amp.scale_loss(w.loss, w.optimizer):
        w.loss.backward()


def fp32_hook(w: World) -> None:
    with w.model[2].register_full_backward_pre_hook(lambda _, grads: (grads[0].float(),)):
        with amp.scale_loss(w.model[2](w.x.half().requires_grad_()).sum(), w.optimizer) as loss:
            loss.backward()


def mixed_programs(w: World) -> None:
    with static.program_guard(static.Program()):
        static.data("x", [2, 4]) + w.x


def nested(w: World) -> None:
    with amp.scale_loss(w.loss, w.optimizer), amp.scale_loss(w.loss, w.optimizer):
        pass


def load_swapping(w: World) -> None:
    saved = {name: torch.zeros_like(value) for name, value in w.model.state_dict().items()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        w.model.load_state_dict(saved)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def scripted(model: nn.Module) -> Any:
    """The model as ``torch.jit.script`` compiles it, which newer versions of torch warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(model)


def only_dropout(module: nn.Module, name: str) -> torch.dtype | None:
    return torch.int32 if isinstance(module, nn.Dropout) else None


def wide(x: torch.Tensor) -> torch.Tensor:
    return x


def number(x: torch.Tensor) -> float:
    return 3.0


def detached(x: torch.Tensor) -> torch.Tensor:
    return x.mean()


class Unexportable(nn.Module):
    """Its forward pass depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


# ---- files and saved states


def garbage(name: str) -> str:
    Path(name).write_bytes(b"no checkpoint")
    return name


def weights_alone(w: World) -> str:
    torch.save(w.model.state_dict(), "x.pt")
    return "x"


def of_another() -> str:
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    halfstep.Model(other).save("x")
    return "x"


def rows_and(name: str, *lines: str) -> str:
    numerics.save_rows(name, [Row(0, "m", "grad")])
    with Path(name).open("a", encoding="utf-8") as file:
        file.write("\n".join(lines))
    return name


def saved(w: World, **changes: Any) -> dict[str, Any]:
    return {**w.optimizer.state_dict(), **changes}


_MODULES = (math, torch, nn, amp, fp16_utils, metrics, multi_tensor, numerics, oplists, optimizers, parallel, static)
NAMES: dict[str, Any] = {
    **{module.__name__.rpartition(".")[2]: module for module in _MODULES},
    **{name: getattr(halfstep, name) for name in halfstep.__all__},
    **vars(fp16_utils),
    **vars(optimizers),
    **vars(worlds),
    **globals(),
}
"""All that an expression of a table may use, beside the objects of its world."""
