"""``amp.GradScaler`` does what torch's documentation and tests say of ``torch.amp.GradScaler``, one statement a row.

Torch's own scaler is the reference: both are asked, and must answer alike.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp

FACTORS = {"F": 1.0, "I": math.inf, "N": math.nan}
SETTINGS = {"init_scale": 2.0**10, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
TORCH = functools.partial(torch.amp.GradScaler, "cpu", **SETTINGS)
OURS = functools.partial(amp.GradScaler, "cpu", **SETTINGS, decr_every_n_nan_or_inf=1)
New = Any
X = torch.ones(())
GOOD, BAD = "scale F, step a, update, clear", "scale I, step a, update, clear"
ORDERS = {  # statement -> calls; a loss for each parameter is finite, inf or NaN; each of two optimizers has one
    "a loss is multiplied by the scale": "scale F",
    "unscale_ divides the gradients": "scale F, unscale a",
    "unscale_ divides those of its optimizer only": "scale FF, unscale a",
    "unscale_ is refused a second time": "scale F, unscale a, unscale a",
    "unscale_ is refused after step": "scale F, step a, unscale a",
    "unscale_ is refused before scale": "unscale a",
    "unscale_ is there again after update": f"{GOOD}, scale F, unscale a, step a, update",
    "step unscales": "scale F, step a",
    "step does not divide again after unscale_": "scale F, unscale a, step a",
    "step skips an inf": "scale I, step a",
    "step skips a NaN": "scale N, step a",
    "step skips what unscale_ found": "scale I, unscale a, clear, step a",
    "step takes what is written after unscale_": "scale F, unscale a, spoil, step a, update",
    "step is refused a second time": "scale F, step a, step a",
    "step is refused before scale": "step a",
    "step is refused without gradients": "scale F, step b",
    "update is refused without step": "scale F, update",
    "update is refused before scale": "update",
    "update takes unscale_ for step": "scale I, unscale a, update",
    "the scale grows after growth_interval good steps": f"{GOOD}, {GOOD}",
    "the scale backs off at an overflow": BAD,
    "an overflow lets good steps count anew": f"{GOOD}, {BAD}, {GOOD}, {GOOD}",
    "a skipped optimizer does not hold up another": "scale IF, step a, step b, update",
    "an overflow of the last optimizer counts": "scale FI, step a, step b, update",
    "several optimizers are unscaled first": "scale FF, unscale a, unscale b, step a, step b, update",
    "gradients add up over passes": "scale F, scale F, step a, update",
    "an overflow in one of several passes skips": "scale I, scale F, step a, update",
    "gradients are clipped after unscale_": "scale F, unscale a, clip, step a, update",
    "update takes a number": f"{GOOD}, update 32",
}
OTHERS: dict[str, Callable[[New], Any]] = {
    "the first scale is read before a loss": lambda new: new().get_scale(),
    "losses in lists and tuples are scaled": lambda new: new().scale([X, (X, X.double())]),
    "what is no loss is refused": lambda new: new().scale(3.0),
    "a 16-bit loss without dimensions is scaled in fp32": lambda new: new().scale(X.half()),
    "a 16-bit loss with dimensions stays in 16 bits": lambda new: new().scale(X.half()[None]),
    "fp16 gradients are refused": lambda new: World(new, dtype=torch.float16).run("scale F, unscale a"),
    "bf16 gradients are unscaled": lambda new: World(new, dtype=torch.bfloat16).run(f"{GOOD}, scale F, unscale a"),
    "sparse gradients are unscaled": lambda new: World(new, sparse=True).run(f"{GOOD}, scale F, unscale a"),
    "an inf in a sparse gradient skips": lambda new: World(new, sparse=True).run(BAD),
    "the scale grows to no inf": lambda new: World(new, init_scale=2.0**126).run(f"{GOOD}, {GOOD}"),
    "an overflow lowers the scale of 2**16 by default": lambda new: World(lambda: new.func("cpu")).run(BAD),
    "settings are set": lambda new: World(new).set(lambda s, name, value: getattr(s, f"set{name}")(value)),
    "settings are set by private names": lambda new: World(new).set(setattr),
    "a growth factor of 1 is refused": lambda new: new(growth_factor=1.0),
    "a backoff factor of 1 is refused": lambda new: new(backoff_factor=1.0),
    "the state goes on in another scaler": lambda new: moved(new, new),
    "the state of torch's goes on": lambda new: moved(TORCH, new),
    "the state goes on in torch's": lambda new: moved(new, TORCH),
    "an empty state is refused": lambda new: new().load_state_dict({}),
    "a pickled scaler goes on": lambda new: pickle.loads(pickle.dumps(World(new).after(GOOD))).get_scale(),
    "pickling is refused in the middle of a step": lambda new: pickle.dumps(World(new).after("scale F, unscale a")),
    "a disabled scaler changes no loss": lambda new: new(enabled=False).scale(X) is X,
    "a disabled scaler steps": lambda new: World(new, enabled=False).run("scale F, unscale a, step a, update"),
    "a disabled scaler skips nothing": lambda new: World(new, enabled=False).run("scale I, step a, update"),
    "a disabled scaler has no state": lambda new: new(enabled=False).state_dict(),
    "a disabled scaler loads nothing": lambda new: new(enabled=False).load_state_dict({"scale": 2.0}),
    "step returns what the optimizer's returns": lambda new: World(new).step(),
    "closures are refused": lambda new: World(new).step(closes=True),
    "an optimizer that takes grad_scaler is given it": lambda new: World(new, own_step=True).run(f"{GOOD}, {BAD}"),
}
DIFFERENT = {  # why
    "step is refused without gradients": "a step without gradients counts as finite, as in Paddle",
    "a 16-bit loss with dimensions stays in 16 bits": "16-bit losses are scaled in fp32",
    "an overflow lowers the scale of 2**16 by default": "2**15, and two in a row do, as in Paddle's guide",
    "fp16 gradients are refused": "fp16 gradients are unscaled",
    "step returns what the optimizer's returns": "step returns whether it stepped, and `.returned` with that",
    "closures are refused": "a closure runs again at a lower scale after an overflow",
    "an optimizer that takes grad_scaler is given it": "its gradients are unscaled before its step",
}


class TakesScaler(torch.optim.SGD):
    """Torch's older contract for scalers."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = 0.125 if grad_scaler is None else 0.25
        super().step()


class World:
    """A scaler, and two optimizers with a parameter each, whose gradients are 1, inf or NaN times the scale."""

    def __init__(
        self, new: New, dtype: torch.dtype = torch.float32, sparse: bool = False, own_step: bool = False, **more: Any
    ) -> None:
        self.scaler, self.sparse = new(**more), sparse
        self.params = [nn.Parameter(torch.ones(3, 1, dtype=dtype)) for _ in "ab"]
        kind = TakesScaler if own_step else torch.optim.SGD
        self.optims = {name: kind([p], lr=0.125) for name, p in zip("ab", self.params, strict=True)}

    def call(self, verb: str, what: str = "") -> None:
        if verb == "scale":
            for p, letter in zip(self.params, what, strict=False):
                row = nn.functional.embedding(torch.tensor([1]), p, sparse=self.sparse)
                self.scaler.scale((row.float() * FACTORS[letter]).sum()).backward()
        elif verb == "unscale":
            self.scaler.unscale_(self.optims[what])
        elif verb == "step":
            self.scaler.step(self.optims[what])
        elif verb == "update":
            self.scaler.update(float(what) if what else None)
        elif verb == "clip":
            nn.utils.clip_grad_norm_(self.params, 0.5)
        elif verb == "clear":
            self.params[0].grad = self.params[1].grad = None
        else:
            self.params[0].grad[0] = 2.0  # type: ignore[index]

    def after(self, calls: str) -> Any:
        for call in calls.split(", "):
            self.call(*call.split())
        return self.scaler

    def run(self, calls: str) -> Any:
        """What the calls leave, also under the private names that trainers read."""
        scaler = self.after(calls)
        left = [(p.tolist(), None if p.grad is None else p.grad.to_dense().tolist()) for p in self.params]
        if not scaler.is_enabled():
            return left
        private = [getattr(scaler, f"_{name}") for name in (*SETTINGS, "enabled", "init_growth_tracker")]
        tensors = [t if t is None else (t.dtype, t.shape, t.item()) for t in (scaler._scale, scaler._growth_tracker)]
        states = [(s["stage"], s["found_inf_per_device"]) for s in scaler._per_optimizer_states.values()]
        getters = [getattr(scaler, f"get_{name}")() for name in ("scale", *list(SETTINGS)[1:])]
        found = [scaler._found_inf_per_device(optim) for optim in self.optims.values()]
        return private, tensors, states, found, getters, scaler._get_growth_tracker(), left

    def set(self, way: Callable[[Any, str, Any], Any]) -> Any:
        for name, value in {"_growth_factor": 3.0, "_backoff_factor": 0.125, "_growth_interval": 1}.items():
            way(self.scaler, name, value)
        return self.run(f"{GOOD}, {BAD}")

    def step(self, closes: bool = False) -> Any:
        scaler = self.after("scale F")
        closure = {"closure": lambda: self.after("scale F").scale(X)} if closes else {}
        return scaler.step(self.optims["a"], **closure)


def moved(first: New, second: New) -> Any:
    """What is left of a training that goes on with the state of another scaler."""
    (world := World(second, growth_interval=9)).scaler.load_state_dict(
        World(first).after(f"{GOOD}, {BAD}, {GOOD}").state_dict()
    )
    return world.run(f"{GOOD}, {BAD}")


def outcome(new: New, statement: str) -> str:
    try:
        return repr(OTHERS[statement](new) if statement in OTHERS else World(new).run(ORDERS[statement]))
    except (AssertionError, RuntimeError, TypeError, ValueError):
        return "raises"


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
@pytest.mark.parametrize("statement", [*ORDERS, *OTHERS])
def test_the_contract_of_torch(statement: str) -> None:
    assert (outcome(TORCH, statement) == outcome(OURS, statement)) == (statement not in DIFFERENT)
