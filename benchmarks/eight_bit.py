"""8-bit moments against fp32 ones: the loss of a small language model over seeds, bytes a parameter, time of a step.

The model reads source code of Python's own library, character by character: an embedding of 16 characters, one hidden
layer and a head, whose weights are fp32, so that nothing else is rounded. A loss is the mean over the last tenth of the
steps. A pair of runs has the same weights at the start and the same batches. The time is that of the step alone, on one
large matrix: a bfloat16 weight with a split master.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from halfstep import optimizers

from .harness import Contender, add_common_arguments, interleave, pick_device, table, write_json

__all__ = ["CharModel", "batches", "losses_of"]

BASELINE = "fp32 state"
FORMS: dict[str, Any] = {BASELINE: None, "8-bit state": "8bit"}
WIDTH, LENGTH, BATCH = 32, 16, 64


class CharModel(nn.Module):
    """The language model of Bengio et al. (JMLR 2003), of characters: input [batch, 16], output [batch, 128]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.hidden = nn.Linear(LENGTH * WIDTH, 4 * WIDTH)
        self.norm = nn.LayerNorm(4 * WIDTH)
        self.head = nn.Linear(4 * WIDTH, 128)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.norm(self.hidden(self.embedding(text).flatten(1)))))
        return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser)
    parser.add_argument("--training-steps", type=int, default=2000, help="of each run (default 2000); 0 for no runs")
    parser.add_argument("--seeds", type=int, default=5, help="pairs of runs (default 5)")
    parser.add_argument("--elements", type=int, default=2**24, help="of the step that is timed (default 2**24)")


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    ratios = []
    for seed in range(args.seeds if args.training_steps else 0):
        wide, narrow = (losses_of(form, seed, args.training_steps, device) for form in FORMS.values())
        ratios.append(narrow / wide)
        figures = f"loss {wide:.4f} with fp32 state, {narrow:.4f} with 8-bit state, {ratios[-1] - 1:+.2%}"
        print(f"seed {seed}: {figures}", flush=True)
    if ratios:
        print(f"mean {statistics.mean(ratios) - 1:+.2%}, from {min(ratios) - 1:+.2%} to {max(ratios) - 1:+.2%}")
    steps = {name: _step(form, args.elements, device) for name, form in FORMS.items()}
    limits = {"rounds": args.steps, "min_seconds": args.min_seconds, "max_seconds": args.max_seconds}
    timings = interleave(
        [Contender(name, step) for name, (step, _) in steps.items()], device=device, baseline=BASELINE, **limits
    )
    for name, (_, held) in steps.items():
        print(f"{name}: {held:.2f} bytes a parameter for bfloat16 weight, split master and state")
    print(table(timings, BASELINE))
    if args.json:
        settings = {"elements": args.elements, "loss_ratios": ratios, "training_steps": args.training_steps, **limits}
        write_json(args.json, "eight_bit", device, settings, BASELINE, timings)
    return 0


def batches(seed: int, steps: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield batches [64, 17] of character codes: 16 characters, and the character after them."""
    text = inspect.getsource(argparse) + inspect.getsource(ast) + inspect.getsource(inspect)
    data = torch.tensor([min(code, 127) for code in text.encode()], device=device).unfold(0, LENGTH + 1, 1)
    places = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield data[torch.randint(len(data), (BATCH,), generator=places).to(device)]


def losses_of(form: Any, seed: int, steps: int, device: torch.device, lr: float = 2e-3) -> float:
    """The mean loss over the last tenth of a run."""
    torch.manual_seed(seed)
    model = CharModel().to(device)
    optimizer = optimizers.FusedAdam(model.parameters(), lr=lr, weight_decay=0.1, max_grad_norm=1.0, state_dtype=form)
    losses = []
    for step, batch in enumerate(batches(seed, steps, device)):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 100) * (1.0 - 0.9 * step / steps)
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return float(torch.stack(losses[-max(steps // 10, 1) :]).mean())


def _step(form: Any, elements: int, device: torch.device) -> tuple[Callable[[], Any], float]:
    """A step on one matrix, and the bytes that each of its elements takes."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(elements // 256, 256, device=device).bfloat16())
    param.grad = torch.randn_like(param)
    optimizer = optimizers.FusedAdam([param], lr=1e-3, master_weights="split", state_dtype=form)
    optimizer.step()
    held = param.nbytes + sum(kept.nbytes for kept in optimizer.state[param].values())
    return optimizer.step, held / param.numel()
