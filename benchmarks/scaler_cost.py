"""What a loss scaler adds to a step of fused AdamW over many small tensors. Almost all of it is the time of the host.

A step scales the loss, runs its backward pass, which reaches no parameter, makes scaled gradients, unscales, checks,
updates, and moves the scale. The cost of a scaler is its step minus the step of the bare optimizer in the same round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from halfstep import amp

from .harness import Contender, Timing, add_common_arguments, interleave, pick_device, table, write_json

BARE = "AdamW, no scaler"
BASELINE = "torch GradScaler"
SIZE = 16  # values in a tensor

_Backward = Callable[[torch.Tensor], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.set_defaults(steps=300)
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 10, 100, 1600], help="default: 1 10 100 1600")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    print(f"{SIZE} values a tensor, {device.type}, {torch.get_num_threads()} threads")
    everything: list[Timing] = []
    for tensors in args.tensors:
        timings = interleave(contenders(device, tensors), device=device, baseline=BASELINE, warm_up=20, **limits)
        print(f"\n{tensors} tensors\n{table(timings, BASELINE)}")
        costs = added(timings)
        for name, cost in costs.items():
            print(f"  {name} adds {1e6 * cost:.1f} us, {cost / costs[BASELINE]:.2f} of what {BASELINE} adds")
        everything += [Timing(f"{t.name}, {tensors} tensors", t.seconds, t.ratio) for t in timings]
    if args.json:
        settings = {"tensors": args.tensors, "values": SIZE, "device": device.type, **limits}
        write_json(args.json, "scaler_cost", device, settings, BASELINE, everything)
    return 0


def added(timings: list[Timing]) -> dict[str, float]:
    """Seconds that each scaler adds to the bare step: the median over rounds of the difference."""
    bare = next(t.seconds for t in timings if t.name == BARE)
    return {
        t.name: statistics.median(with_it - without for with_it, without in zip(t.seconds, bare, strict=True))
        for t in timings
        if t.name != BARE
    }


def contenders(device: torch.device, tensors: int) -> list[Contender]:
    return [
        Contender(BARE, _bare(*_problem(device, tensors))),
        Contender(BASELINE, _grad_scaler(torch.amp.GradScaler(device.type), *_problem(device, tensors))),
        Contender("halfstep GradScaler", _grad_scaler(amp.GradScaler(), *_problem(device, tensors))),
        Contender("halfstep scale_loss", _scale_loss(*_problem(device, tensors))),
    ]


def _problem(device: torch.device, tensors: int) -> tuple[torch.optim.Optimizer, _Backward, torch.Tensor]:
    """An optimizer, a function of the loss that gives the optimizer's parameters new gradients, and the loss."""
    params = [torch.nn.Parameter(torch.randn(SIZE, device=device)) for _ in range(tensors)]
    source = [torch.randn(SIZE, device=device) for _ in params]
    loss = torch.ones((), device=device, requires_grad=True)

    def backward(scaled: torch.Tensor) -> None:
        scaled.backward()
        loss.grad = None
        for param, grad in zip(params, torch._foreach_mul(source, scaled.detach()), strict=True):
            param.grad = grad

    return torch.optim.AdamW(params, fused=True), backward, loss


def _bare(optimizer: torch.optim.Optimizer, backward: _Backward, loss: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _grad_scaler(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, backward: _Backward, loss: torch.Tensor
) -> Callable[[], None]:
    def step() -> None:
        backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def _scale_loss(optimizer: torch.optim.Optimizer, backward: _Backward, loss: torch.Tensor) -> Callable[[], None]:
    _, optimizer = amp.initialize(torch.nn.Module(), optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0)

    def step() -> None:
        with amp.scale_loss(loss, optimizer) as scaled:
            backward(scaled)
        optimizer.step()
        optimizer.zero_grad()

    return step
