"""The loop with amp.initialize and amp.scale_loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from task import make_task, parse, report

from halfstep import amp


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    args = parse(argv, __doc__, opt_level="O2")
    task = make_task(args.device)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = amp.initialize(
        task.model, optimizer, opt_level=args.opt_level, dtype=None if args.opt_level == "O0" else args.dtype
    )
    losses = []
    for _ in range(args.steps):
        loss = torch.nn.functional.mse_loss(model(task.x).float(), task.y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return report(losses[0], losses[-1])


if __name__ == "__main__":
    main()
