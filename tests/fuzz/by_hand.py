"""Mixed precision by hand, as a reference: plain torch, casts written out, fp32 masters in a list.

It knows nothing of halfstep but its fused updates on fp32 weights, which ``optimizers/test_in_place_of_torch.py`` holds
to torch's.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn import functional as F

from halfstep.kernels.storage import join, round_half_away, split
from halfstep.torch_internals.torch_compat import HAS_GRAD_DTYPE

__all__ = ["ByHand", "Net"]


class Net(nn.Module):
    """Linear layers, a norm, a weight that two layers share, and a layer that is added to the training later.

    Args:
        norm: "batch", "layer" or None.
        shared: whether the second and third layer have one weight.
    """

    def __init__(self, norm: str | None, shared: bool) -> None:
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.norm = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}[norm](6) if norm else None
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 6)
        if shared:
            self.c.weight = self.b.weight
        self.d = nn.Linear(6, 3)
        self.late = nn.Linear(3, 3)
        self.uses_late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        x = x if self.norm is None else self.norm(x)
        x = self.d(torch.relu(self.c(torch.relu(self.b(torch.relu(x))))))
        return self.late(x) if self.uses_late else x

    def first_parameters(self) -> list[nn.Parameter]:
        """All but those of the layer that is added to the training later."""
        return [param for name, param in self.named_parameters() if not name.startswith("late.")]


def _forward_at_o1(net: Net, x: torch.Tensor, half: torch.dtype) -> torch.Tensor:
    """The forward pass of O1, every cast written out; each weight is cast once, also where two layers share it."""
    casts: dict[int, torch.Tensor] = {}

    def cast(param: torch.Tensor) -> torch.Tensor:
        return casts.setdefault(id(param), param.to(half))

    def linear(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(half), cast(layer.weight), cast(layer.bias))

    x = linear(net.a, x)
    if isinstance(net.norm, nn.LayerNorm):
        x = net.norm(x.float())
    elif net.norm is not None:
        x = net.norm(x)  # torch's own takes 16-bit input with fp32 parameters
    x = linear(net.b, torch.relu(x))
    x = linear(net.c, torch.relu(x))
    x = linear(net.d, torch.relu(x))
    return linear(net.late, x) if net.uses_late else x


class ByHand:
    """A model, its masters, an optimizer over them and a loss scale.

    Args:
        net: an fp32 model; it is copied.
        level: an opt level.
        half: the 16-bit dtype.
        make: makes the optimizer from the model's parameters and what to put in their place.
        scales: a loss scale for each loss.
        interval: finite passes in a row after which the scale doubles; None for a scale that stays.
        split: whether weights are the upper halves of their masters, rounded away from zero at a tie.
    """

    def __init__(
        self,
        net: Net,
        level: str,
        half: torch.dtype,
        make: Callable[[Net, Callable[[nn.Parameter], nn.Parameter]], torch.optim.Optimizer],
        scales: list[float],
        interval: int | None,
        split: bool,
    ) -> None:
        self.net = copy.deepcopy(net)
        self.level, self.half, self.split = level, half, split
        self.scales, self.interval, self.good = list(scales), interval, [0] * len(scales)
        self.overflowed = False
        masters = {p: nn.Parameter(p.detach().clone()) for p in self.net.parameters()} if level == "O2" else {}
        if level in ("O2", "O3"):
            for module in self.net.modules():
                if level == "O3" or not isinstance(module, nn.BatchNorm1d):
                    for p in module.parameters(recurse=False):
                        p.data = p.data.to(half)
            if level == "O3":
                self.net.to(half)
        self.masters = {p: master for p, master in masters.items() if p.dtype is half}
        self.start_from_rounded(name for name, _ in self.net.named_parameters() if name.startswith("late."))
        self.narrow: set[nn.Parameter] = set()  # have the gradient of one pass, in bfloat16
        self.delayed: dict[nn.Parameter, torch.Tensor] = {}
        self.delayed_scale: int | None = None
        self.in_place = False
        self.optimizer = make(self.net, lambda p: self.masters.get(p, p))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs."""
        if self.level == "O1":
            return _forward_at_o1(self.net, x, self.half)
        return self.net(x.to(self.half)).float() if self.level in ("O2", "O3") else self.net(x)

    def backward(
        self, loss: torch.Tensor, which: int, *, delay: bool = False, stay: bool = False, block: bool = True
    ) -> None:
        """One scaled pass whose gradients are unscaled, looked at and added.

        Gradients of one pass in a block stay in bfloat16 where nothing is scaled, but for those of a shared weight.

        Args:
            loss: not scaled yet.
            which: the number of its scale.
            delay: leave the gradients scaled. The next pass at the same scale adds to them before it unscales them.
            stay: True if the next pass adds to these gradients in place.
            block: True if the pass is in a block.
        """
        scale = self.scales[which]
        neutral = self.interval is None and scale == 1.0
        which = 0 if neutral else which
        if self.delayed_scale != which:
            self.finish_delayed()
        kept = [(p, p.grad) for p in self.net.parameters()]
        adds_up = HAS_GRAD_DTYPE and (neutral or delay or self.delayed_scale is not None)
        for p, _ in kept:
            p.grad = None
            owner = self.masters.get(p, p)
            # The uses of a shared weight add up in the dtype of the gradient that they are added to.
            if adds_up or (HAS_GRAD_DTYPE and self.in_place and owner.grad is not None):
                p.grad_dtype = owner.dtype
        (loss * scale).backward()
        uses = Counter(p for module in self.net.modules() for p in module.parameters(recurse=False))
        for p, before in kept:
            new, p.grad = p.grad, None
            if HAS_GRAD_DTYPE:
                p.grad_dtype = p.dtype
            p.grad = before
            owner = self.masters.get(p, p)
            if new is not None and owner.grad is None and uses[p] == 1 and block and neutral:
                self.narrow.add(p)
            elif new is not None or self.in_place:
                self.narrow.discard(p)
            if self.in_place and owner.grad is not None:
                new = owner.grad * scale if new is None else owner.grad * scale + new
                owner.grad = None
            if new is not None:
                self.delayed[p] = self.delayed[p] + new if p in self.delayed else new
        self.delayed_scale = which
        if delay:
            return
        finite = self.finish_delayed()
        self.in_place = stay
        if not neutral:
            self.move_scale(which, finite=finite)

    def move_scale(self, which: int, *, finite: bool) -> None:
        """A finite pass, or one that overflowed, moves its scale."""
        scale = self.scales[which]
        if self.interval is None:
            return
        self.good[which] = self.good[which] + 1 if finite else 0
        if not finite:
            self.scales[which] *= 0.5
        elif self.good[which] == self.interval:
            self.scales[which], self.good[which] = min(scale * 2, 2.0**24), 0

    def finish_delayed(self) -> bool:
        """Unscale and add what came since the last time; whether it is finite."""
        finite = True
        for p, new in self.delayed.items():
            owner = self.masters.get(p, p)
            scale = self.scales[self.delayed_scale or 0]
            unscaled = (new.float() * (1.0 / scale)).to(owner.dtype)
            finite = finite and bool(unscaled.isfinite().all())
            owner.grad = unscaled if owner.grad is None else owner.grad + unscaled
        self.delayed.clear()
        self.delayed_scale = None
        neutral = self.interval is None and self.scales[0] == 1.0
        self.overflowed = self.overflowed or not (finite or neutral)
        return finite

    def clip(self, limit: float, door: str) -> None:
        """Clip what there is, in the dtype of each gradient; over masters in fp32."""
        if door == "masters":
            self.narrow.clear()
        half = {self.masters[p] for p in self.narrow if p.dtype is torch.bfloat16 and p in self.masters}
        owners = [p for p in self.stepped() if p.grad is not None]
        shown = [torch.zeros_like(p, dtype=self.half if p in half else p.dtype).requires_grad_() for p in owners]
        for p, each in zip(owners, shown, strict=True):
            each.grad = p.grad.to(each.dtype)
        nn.utils.clip_grad_norm_(shown, limit)
        for p, each in zip(owners, shown, strict=True):
            p.grad.copy_(each.grad)

    def grads(self) -> list[torch.Tensor | None]:
        """The gradients that the next step takes."""
        return [self.masters.get(p, p).grad for p in self.net.parameters()]

    def stepped(self) -> list[nn.Parameter]:
        """What the optimizer updates, in its order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def step(self) -> None:
        """A step, unless a pass overflowed."""
        self.finish_delayed()
        if not self.overflowed:
            self.optimizer.step()
            self.round()
        self.overflowed = False

    def round(self) -> None:
        """Write the masters to the weights."""
        for p, master in self.masters.items():
            p.data.copy_(round_half_away(master.detach()) if self.split else master.detach())

    def write(self, name: str, factor: float, *, keeps_low: bool) -> None:
        """Multiply a weight in place. Its master starts from there, where that has changed it.

        Args:
            name: of the parameter.
            factor: what to multiply by.
            keeps_low: whether the weight is the upper half of its master, whose lower half stays.
        """
        param = self.net.get_parameter(name)
        before = param.detach().clone()
        with torch.no_grad():
            param.mul_(factor)
        if param in self.masters:
            data = self.masters[param].data
            if keeps_low:
                data.copy_(join(param.detach(), split(data)[1]))
            else:
                data.copy_(torch.where(param == before, data, param.float()))

    def reload(self) -> None:
        """Save and load the optimizer: torch casts some state of 16-bit weights then, such as NAdam's products."""
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        self.zero_grad(True)

    def start_from_rounded(self, names: Iterable[str]) -> None:
        """Let masters start from their rounded weights, as those do that were frozen when they were cast."""
        for param in map(self.net.get_parameter, names):
            if param in self.masters:
                param.data.copy_(self.masters[param].data)
                self.masters[param].data.copy_(param.data)

    def roll_back(self, weights: list[torch.Tensor], saved: dict[str, torch.Tensor]) -> None:
        """Load weights, and the buffers of a saved model."""
        self.net.load_state_dict(saved)
        for p, weight in zip(self.net.parameters(), weights, strict=True):
            self.masters.get(p, p).data.copy_(weight)
        self.round()

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear gradients, and forget what overflowed."""
        self.finish_delayed()
        self.optimizer.zero_grad(set_to_none)
        self.overflowed = self.in_place = False

    def weights(self) -> list[torch.Tensor]:
        """The fp32 numbers behind the weights."""
        return [self.masters.get(p, p).detach().float().clone() for p in self.net.parameters()]
