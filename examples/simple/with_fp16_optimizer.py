"""The loop with FP16_Optimizer. In the middle the training is saved and resumed."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from task import make_task, parse, report

from halfstep.fp16_utils import FP16_Optimizer


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    args = parse(argv, __doc__)
    task = make_task(args.device)
    half = getattr(torch, args.dtype)
    model = task.model.to(half)
    optimizer = make_optimizer(model)
    losses = []
    for step in range(args.steps):
        if step == args.steps // 2:
            optimizer = resumed(model, optimizer)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(task.x.to(half)).float(), task.y)
        optimizer.backward(loss)  # instead of loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return report(losses[0], losses[-1])


def make_optimizer(model: torch.nn.Module) -> FP16_Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return FP16_Optimizer(optimizer, dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 2.0**10}, verbose=False)


def resumed(model: torch.nn.Module, optimizer: FP16_Optimizer) -> FP16_Optimizer:
    """Save everything and load it into a new optimizer, which continues with the same masters, momentum and scale."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    del optimizer
    model.load_state_dict(state["model"])
    fresh = make_optimizer(model)
    fresh.load_state_dict(state["optimizer"])
    return fresh


if __name__ == "__main__":
    main()
