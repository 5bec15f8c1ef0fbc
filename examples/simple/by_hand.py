"""The loop with every step written out: masters by prep_param_lists, gradients and weights copied, a fixed scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from task import make_task, parse, report

from halfstep.fp16_utils import master_params_to_model_params, model_grads_to_master_grads, prep_param_lists

SCALE = 128.0


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    args = parse(argv, __doc__)
    task = make_task(args.device)
    half = getattr(torch, args.dtype)
    model = task.model.to(half)
    model_params, master_params = prep_param_lists(model)
    optimizer = torch.optim.SGD(master_params, lr=0.1, momentum=0.9)  # it updates the masters
    losses = []
    for _ in range(args.steps):
        loss = torch.nn.functional.mse_loss(model(task.x.to(half)).float(), task.y)
        (loss * SCALE).backward()
        model_grads_to_master_grads(model_params, master_params)
        for param in master_params:
            assert param.grad is not None
            param.grad.div_(SCALE)
        optimizer.step()
        master_params_to_model_params(model_params, master_params)
        model.zero_grad()
        losses.append(loss.detach())
    return report(losses[0], losses[-1])


if __name__ == "__main__":
    main()
