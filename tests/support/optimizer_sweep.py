"""Every optimizer of torch with every setting of ``optim_db``, at O2 and on fp32 weights that get the same gradients.

python -m tests.support.optimizer_sweep plain fused
python -m tests.support.optimizer_sweep fused --all
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from halfstep import amp
from tests.support.op_sweep import HALVES
from tests.support.sweeps import Found, command
from tests.support.worlds import advance

LEFT_OUT = {"LBFGS": "steps only with a closure", "SparseAdam": "takes sparse gradients only"}
HOWS = ("plain", "fused")
"""The argument ``fused`` of ``amp.initialize``."""
STEPS = 5


@dataclasses.dataclass
class Setting:
    """A row of torch's table with one implementation: ``for loop``, ``foreach`` or ``fused``."""

    name: str
    info: Any
    options: dict[str, Any]

    def net(self) -> Net:
        torch.manual_seed(0)
        return Net(matrices=self.info.name == "Muon")

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return self.info.optim_cls(params, **copy.deepcopy(self.options))


class Net(nn.Module):
    """Parameters in 16 bits and in fp32. Each has its input as gradient."""

    def __init__(self, matrices: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 5, bias=not matrices), nn.Linear(5, 4, bias=not matrices)
        self.norm = nn.Identity() if matrices else nn.BatchNorm1d(5)

    def forward(self, *gradients: torch.Tensor) -> torch.Tensor:
        products = [(p * g.to(p.dtype)).sum() for p, g in zip(self.parameters(), gradients, strict=True)]
        return sum((product.float() for product in products), torch.zeros(()))


class Training:
    """A model at O2 with its optimizer, beside the same optimizer on fp32 weights."""

    def __init__(self, setting: Setting, half: torch.dtype, fused: bool, params: Callable[[Any], Any]) -> None:
        self.setting, self.half = setting, half
        self.wanted, self.net = setting.net(), setting.net()
        self.reference, optim = setting.optimizer(params(self.wanted)), setting.optimizer(params(self.net))
        amp.initialize(self.net, optim, opt_level="O2", dtype=half, fused=fused, loss_scale=1.0, verbosity=0)
        self.optim = optim
        self.schedulers: list[Any] = []

    def train(self, steps: range) -> None:
        for t in steps:
            torch.manual_seed(100 + t)
            gradients = [torch.randn(p.shape).to(self.half) for p in self.wanted.parameters()]
            for p, gradient in zip(self.wanted.parameters(), gradients, strict=True):
                p.grad = gradient.float()
            self.reference.step()
            advance(self.net(*gradients), self.optim)
            for scheduler in self.schedulers:
                scheduler.step()

    def problem(self) -> str:
        start, wanted = list(self.setting.net().parameters()), list(self.wanted.parameters())
        found, weights = list(amp.master_params(self.optim)), list(self.net.parameters())
        for name, kinds in {"master": found, "weight": weights}.items():
            for i, (a, b, before) in enumerate(zip(kinds, wanted, start, strict=True)):
                bound = 1e-4 * (b - before).abs().max() + 3e-7
                bound = bound + (torch.finfo(self.half).eps * b.abs().max() if a.dtype is self.half else 0)
                if not (far := (a.float() - b).abs().max()) <= bound:
                    return f"{name} {i} is off by {far.item():.1e}"
        ours, theirs = self.optim.state_dict()["state"], self.reference.state_dict()["state"]
        for i, name in ((i, name) for i, state in theirs.items() for name in state):
            if not _same(ours[i].get(name), theirs[i][name]):
                return f"state {name!r} of {i}"
        return ""


def _same(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, torch.Tensor):
        return bool(found == wanted)
    return found is not None and torch.allclose(found.float(), wanted.float(), rtol=1e-4, atol=1e-6)


# ---- what is done with each setting


def groups(setting: Setting, half: torch.dtype, fused: bool) -> str:
    """Named parameters in two groups, and the first of torch's schedulers for this optimizer."""

    def split(net: nn.Module) -> list[dict[str, Any]]:
        first, *rest = net.named_parameters()
        return [{"params": [first]}, {"params": rest, "lr": 0.02, "weight_decay": 0.05}]

    training = Training(setting, half, fused, split)
    for optim in (training.reference, training.optim):
        training.schedulers.append(torch.optim.lr_scheduler.StepLR(optim, gamma=0.5, step_size=2))
    training.train(range(STEPS))
    return training.problem()


def resumed(setting: Setting, half: torch.dtype, fused: bool, *, from_fp32: bool = False) -> str:
    """A checkpoint of training at O2, or of training in fp32, is loaded at O2."""
    first, training = (Training(setting, half, fused, nn.Module.parameters) for _ in range(2))
    first.train(range(2))
    for ours, reference in (("net", "wanted"), ("optim", "reference")):
        for part in (ours, reference):
            saved = getattr(first, reference if from_fp32 else part).state_dict()
            getattr(training, part).load_state_dict(copy.deepcopy(saved))
    training.train(range(2, STEPS))
    return training.problem()


CHECKS: dict[str, Callable[..., str]] = {
    "groups": groups,
    "resumed": resumed,
    "resumed from fp32": functools.partial(resumed, from_fp32=True),
}


def settings() -> Iterator[Setting]:
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        if info.name not in LEFT_OUT:
            loops = {
                "for loop": {},
                **{name: {name: True} for name in info.supported_impls if name != "differentiable"},
            }
            for given, (how, options) in itertools.product(info.optim_inputs_func("cpu"), loops.items()):
                yield Setting(f"{info.name}, {given.desc}, {how}", info, given.kwargs | options)


def sweep(hows: list[str], names: frozenset[str], every: bool) -> Found:
    """Run every check of every setting in both dtypes, or of each setting one check in one way, by its name."""
    found: Found = {how: {"cases": 0, "refused": [], "wrong": {}} for how in hows}
    for setting in settings():
        if names and setting.info.name not in names:
            continue
        place = zlib.crc32(setting.name.encode())
        chosen = CHECKS if every else ((*CHECKS,)[place // 2 % len(CHECKS)],)
        halves = HALVES if every else (HALVES[place % 2],)
        ways = [*found.items()] if every else [[*found.items()][place // 6 % len(found)]]
        for check, half, (how, row) in itertools.product(chosen, halves, ways):
            try:
                problem = CHECKS[check](setting, half, how == "fused")
            except Exception as error:  # noqa: BLE001 - any
                problem = f"{type(error).__name__}: {str(error)[:150]}"
            row["cases"] += 1
            if problem:
                row["wrong"].setdefault(setting.name, []).append(f"{check}, {str(half)[6:]}: {problem}")
    return found


if __name__ == "__main__":
    command(sweep, HOWS)
