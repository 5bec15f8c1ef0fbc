"""Fused optimizers against torch's: any parameters and groups, missing gradients, overflows, state that goes across."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from torch import nn

from halfstep import optimizers
from halfstep.kernels import backend
from halfstep.kernels.backends import compiler
from tests.support.worlds import BF16, FP16, FP32, FP64, read_back

__all__ = ["Fused"]

ULPS = 64  # a case has up to 20 steps, and torch's own implementations differ by a few in each

ADAM = {"lr": 0.01, "eps": 1e-6}
PAIRS: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {  # ours, torch's
    "AdamW": (optimizers.FusedAdam, ADAM | {"weight_decay": 0.1}, torch.optim.AdamW, ADAM | {"weight_decay": 0.1}),
    "Adam": (
        optimizers.FusedAdam,
        ADAM | {"adam_w_mode": False, "weight_decay": 0.1},
        torch.optim.Adam,
        ADAM | {"weight_decay": 0.1},
    ),
    "Adam amsgrad": (
        optimizers.FusedAdam,
        ADAM | {"adam_w_mode": False, "amsgrad": True},
        torch.optim.Adam,
        ADAM | {"amsgrad": True},
    ),
    **{
        f"SGD {options}": (optimizers.FusedSGD, {"lr": 0.01} | options, torch.optim.SGD, {"lr": 0.01} | options)
        for options in (
            {},
            {"momentum": 0.9},
            {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
            {"momentum": 0.9, "dampening": 0.5},
        )
    },
    "Adagrad": (
        optimizers.FusedAdagrad,
        {"lr": 0.01, "eps": 1e-6, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
        torch.optim.Adagrad,
        {"lr": 0.01, "eps": 1e-6, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1},
    ),
}
SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5)
BACKENDS = ["eager", "torch", *(["compiled"] if compiler.available() else [])]


class Fused(RuleBasedStateMachine):
    """One fused optimizer beside torch's, on weights of the same values."""

    cases = 0
    steps = 20
    phases = tuple(Phase)

    @initialize(
        name=st.sampled_from(sorted(PAIRS)),
        shapes=SHAPES,
        dtype=st.sampled_from([FP32, FP32, FP64, BF16, FP16]),
        groups=st.integers(1, 2),
        maximize=st.booleans(),
        masters=st.sampled_from([True, "plain"]),
        on=st.sampled_from(BACKENDS),
    )
    def begin(
        self, name: str, shapes: list[Any], dtype: torch.dtype, groups: int, maximize: bool, masters: Any, on: str
    ) -> None:
        """Make both."""
        Fused.cases += 1
        self.name, self.on, self.dtype, self.masters, self.maximize = name, on, dtype, masters, maximize
        self.ours: list[nn.Parameter] = []
        self.theirs: list[nn.Parameter] = []
        rows = [self.pair(shape, seed) for seed, shape in enumerate(shapes)]
        count = min(groups, len(rows))
        self.a = self.make([{"params": [a for a, _ in rows[i::count]]} for i in range(count)], ours=True)
        self.b = self.make([{"params": [b for _, b in rows[i::count]]} for i in range(count)], ours=False)

    def pair(self, shape: Any, seed: int) -> tuple[nn.Parameter, nn.Parameter]:
        """A parameter of ours, and one of torch's with its value; a 16-bit one is an fp32 one there."""
        value = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)
        wide = self.dtype if self.dtype in (FP32, FP64) else FP32
        self.ours.append(nn.Parameter(value))
        self.theirs.append(nn.Parameter(value.to(wide, copy=True)))
        return self.ours[-1], self.theirs[-1]

    def make(self, groups: list[Any], *, ours: bool) -> Any:
        """One of the two optimizers."""
        made, options, reference, their_options = PAIRS[self.name]
        if ours:
            return made(groups, **options, maximize=self.maximize, master_weights=self.masters)
        return reference(groups, **their_options, maximize=self.maximize, foreach=False)

    @rule(
        seed=st.integers(0, 99),
        missing=st.integers(0, 31),
        scale=st.sampled_from([None, 8.0]),
        overflow=st.sampled_from([False, False, True]),
        transposed=st.booleans(),
    )
    def step(self, seed: int, missing: int, scale: float | None, overflow: bool, transposed: bool) -> None:
        """A step, by torch's contract for scalers if there is a scale."""
        generator = torch.Generator().manual_seed(seed)
        for i, (p, q) in enumerate(zip(self.ours, self.theirs, strict=True)):
            grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            if transposed and grad.dim() == 2:
                grad = grad.t().contiguous().t()
            gone = bool(missing >> (i % 5) & 1)
            p.grad = None if gone else grad * (scale or 1.0)
            q.grad = None if gone else grad.to(q.dtype)
        with backend(self.on), warnings.catch_warnings():
            if scale is None:
                self.a.step()
            else:
                self.a.grad_scale, self.a.found_inf = torch.tensor(scale), torch.tensor(float(overflow))
                self.a.step()
                del self.a.grad_scale, self.a.found_inf
        if scale is None or not overflow:
            self.b.step()
        self.compare()

    @rule(rate=st.sampled_from([0.0, 0.003, 0.1]), group=st.integers(0, 3), tensor=st.booleans())
    def set_rate(self, rate: float, group: int, tensor: bool) -> None:
        """Another learning rate, which may be a tensor in ours."""
        group %= len(self.a.param_groups)
        self.a.param_groups[group]["lr"] = torch.tensor(rate, dtype=FP64) if tensor else rate
        self.b.param_groups[group]["lr"] = rate

    @rule(shape=st.lists(st.integers(0, 4), max_size=2).map(tuple), rate=st.sampled_from([0.02, 0.05]))
    def add_group(self, shape: Any, rate: float) -> None:
        """One more group."""
        if len(self.ours) < 8:
            ours, theirs = self.pair(shape, 50 + len(self.ours))
            self.a.add_param_group({"params": [ours], "lr": rate})
            self.b.add_param_group({"params": [theirs], "lr": rate})

    @rule(on=st.sampled_from(BACKENDS))
    def use(self, on: str) -> None:
        """Go on with another backend; split masters are not for torch's."""
        if self.dtype is not BF16 or self.masters == "plain":
            self.on = on

    @rule(way=st.sampled_from(["state", "copy", "file"]))
    def renew(self, way: str) -> None:
        """Go on with a new optimizer that got the state, or with copies."""
        if way == "copy":
            self.ours, self.a = copy.deepcopy((self.ours, self.a))
            return
        saved = self.a.state_dict()
        if way == "file":
            saved = read_back(saved)
        self.a = self.make([{"params": group["params"]} for group in self.a.param_groups], ours=True)
        self.a.load_state_dict(saved)

    @rule()
    def across(self) -> None:
        """Give torch's state to ours."""
        if self.dtype not in (FP32, FP64):
            return  # torch's has no masters
        with torch.no_grad():
            for p, q in zip(self.ours, self.theirs, strict=True):
                p.copy_(q)
        groups = self.a.state_dict()["param_groups"]
        self.a.load_state_dict({"state": copy.deepcopy(self.b.state_dict()["state"]), "param_groups": groups})

    def compare(self) -> None:
        """Masters, or the weights themselves."""
        for p, q in zip(self.ours, self.theirs, strict=True):
            found = self.a.master_value(p) if self.dtype not in (FP32, FP64) else p.detach()
            tolerance = ULPS * torch.finfo(FP32).eps  # numbers of a step have 53 bits, moments of fp64 weights too
            torch.testing.assert_close(found, q.detach(), rtol=tolerance, atol=tolerance)
