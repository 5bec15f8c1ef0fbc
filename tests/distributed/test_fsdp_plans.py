"""FSDP2 makes new local tensors in every step: what was planned for its parameters is kept all the same."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch

from halfstep import amp
from halfstep.kernels.multi_tensor import TensorGroups
from halfstep.kernels.tensor_table import AddressTable, PointerTable, ScalarTable, TensorTable
from halfstep.optimizers.param_rows import GroupRows, ParamRows
from tests.distributed.test_fsdp import OPTIMIZERS, data, loss_of, sharded
from tests.support.processes import Ranks
from tests.support.worlds import scaled_backward

PLANS = (GroupRows, ParamRows, TensorTable, AddressTable, PointerTable, ScalarTable, TensorGroups)


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def train(rank: int, name: str, face: str, micros: int, steps: int, anew: bool) -> list[tuple[dict[str, int], int]]:
    """For each step: how many plans of each kind were made in it; for the third and last, how many tensors there are.

    ``anew`` clears the optimizer's plans before each step, as if they were keyed by what does not last.
    """
    made: Counter[str] = Counter()
    originals = {cls: cls.__init__ for cls in PLANS}

    def counted(cls: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            made[cls.__name__] += 1
            originals[cls](self, *args, **kwargs)

        return init

    model = sharded()
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = amp.GradScaler(init_scale=64.0, growth_interval=1000)
    if face == "scale_loss":
        amp.initialize(model, optimizer, opt_level="O0", loss_scale="dynamic", verbosity=0)
    figures = []
    try:
        for cls in PLANS:
            cls.__init__ = counted(cls)  # type: ignore[misc]
        for step in range(steps):
            made.clear()
            if anew:
                optimizer._fused.groups.clear()
            for micro in range(micros):
                model.set_requires_gradient_sync(micro == micros - 1)
                loss = loss_of(model, data(rank, step, micro))
                if face == "scale_loss":
                    scaled_backward(loss, optimizer)
                else:
                    (scaler.scale(loss) if face == "GradScaler" else loss).backward()
            if face == "GradScaler":
                scaler.clip_grad_norm_(optimizer, 1.0)
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
            del loss
            figures.append((dict(made), _tensors() if step in (2, steps - 1) else 0))
    finally:
        for cls, init in originals.items():
            cls.__init__ = init  # type: ignore[misc]
        amp.deactivate()
    return figures


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "face", "micros"),
    [
        *((name, "plain", 1) for name in ("FusedAdam", "FusedAdam, clipped", "FusedSGD", "FusedLAMB", "FusedNovoGrad")),
        *((name, face, 2) for name in ("adamw", "FusedAdam, clipped") for face in ("GradScaler", "scale_loss")),
    ],
)
def test_plans_are_made_once_and_nothing_grows(ranks: Ranks, name: str, face: str, micros: int) -> None:
    for figures in ranks.run(train, name, face, micros, 6, False):
        assert [made for made, _ in figures[2:]] == [{}] * 4
        assert figures[5][1] <= figures[2][1]  # what an earlier test left in the rank may go meanwhile


def test_plans_that_are_made_in_every_step_are_noticed(ranks: Ranks) -> None:
    for figures in ranks.run(train, "FusedAdam", "plain", 1, 4, True):
        assert all(made["GroupRows"] == 1 for made, _ in figures)
