"""The loop with FP16_Optimizer around LBFGS, which computes the loss several times a step by a closure."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from task import make_task, parse, report

from halfstep.fp16_utils import FP16_Optimizer


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    args = parse(argv, __doc__)
    task = make_task(args.device)
    half = getattr(torch, args.dtype)
    model = task.model.to(half)
    optimizer = FP16_Optimizer(torch.optim.LBFGS(model.parameters(), lr=0.1), static_loss_scale=128.0, verbose=False)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(task.x.to(half)).float(), task.y)
        optimizer.backward(loss)
        losses.append(loss.detach())
        return loss

    for _ in range(max(1, args.steps // 20)):
        optimizer.step(closure)
    return report(losses[0], losses[-1])


if __name__ == "__main__":
    main()
