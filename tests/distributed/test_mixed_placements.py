"""Plain, replicated and sharded parameters in one optimizer, as tensor parallelism leaves them: each row is its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfstep import amp, optimizers
from halfstep.core.errors import UsageError
from halfstep.kernels.multi_tensor import TensorGroups
from halfstep.kernels.tensor_table import TensorTable
from tests.distributed.test_fsdp import OPTIMIZERS
from tests.support.processes import Ranks
from tests.support.shards import mesh, whole
from tests.support.worlds import step_and_clear

KINDS = ("plain", "replicated", "sharded")
ORDERS = [("plain", "replicated", "sharded"), ("sharded", "replicated", "plain"), ("replicated", "plain", "replicated")]


def placed(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if kind == "plain":
        return tensor.clone()
    return distribute_tensor(tensor, mesh(), [Replicate() if kind == "replicated" else Shard(0)])


def values(index: int, step: int = 99) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + index))


def train(rank: int, name: str, kinds: tuple[str, ...]) -> list[torch.Tensor]:
    params = [nn.Parameter(placed(values(i), kind)) for i, kind in enumerate(kinds)]
    optimizer = OPTIMIZERS[name](params)
    for step in range(4):
        for i, (param, kind) in enumerate(zip(params, kinds, strict=True)):
            if (i, step) != (1, 2):  # another set of rows for one step
                param.grad = placed(values(i, step), kind)
        step_and_clear(optimizer)
    return [whole(p) for p in params]


@pytest.mark.costly
@pytest.mark.parametrize("kinds", ORDERS)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_each_parameter_steps_as_if_all_were_plain(ranks: Ranks, name: str, kinds: tuple[str, ...]) -> None:
    plain = train(0, name, ("plain",) * len(kinds))
    for found in ranks.run(train, name, kinds):
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


def unscale_and_clip(rank: int, kinds: tuple[str, ...]) -> list[torch.Tensor]:
    params = [nn.Parameter(placed(values(i), kind)) for i, kind in enumerate(kinds)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = amp.GradScaler(init_scale=8.0)
    norms = []
    for step in range(3):
        for i, (param, kind) in enumerate(zip(params, kinds, strict=True)):
            param.grad = placed(8.0 * values(i, step), kind)
        scaler.scale(torch.ones(()))
        norms.append(whole(scaler.clip_grad_norm_(optimizer, 1.0)))
        scaler.step(optimizer)
        scaler.update()
    return norms


@pytest.mark.parametrize("kinds", ORDERS)
def test_clipping_takes_the_norm_of_all_of_them(ranks: Ranks, kinds: tuple[str, ...]) -> None:
    expected = [torch.cat([values(i, step).flatten() for i in range(3)]).norm() for step in range(3)]
    for norms in ranks.run(unscale_and_clip, kinds):
        torch.testing.assert_close(torch.stack(norms), torch.stack(expected), check_dtype=False)


def renewed(rank: int) -> list[bool]:
    """A table made for each kind of gradient, renewed with each."""
    tensors = {kind: [placed(values(0), kind)] for kind in KINDS}
    return [
        TensorTable.of(grad=tensors[first], param=tensors[first]).renew(tensors[then])
        for first in KINDS
        for then in KINDS
    ]


def test_a_table_is_renewed_with_tensors_of_its_own_kind_alone(ranks: Ranks) -> None:
    """A replicated tensor and its shard have the same strides: nothing but the placement tells their lengths apart."""
    for answers in ranks.run(renewed):
        assert answers == [first == then for first in KINDS for then in KINDS]


def moved(rank: int) -> str:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    param = nn.Parameter(distribute_tensor(values(0), mesh(), [Replicate()]))
    optimizer = optimizers.FusedSGD([param], lr=0.1)
    for placement in (Replicate(), Shard(0)):
        param.grad = distribute_tensor(values(1), mesh(), [placement])
        try:
            optimizer.step()
        except UsageError as error:
            return str(error)
    return "nobody minded"


def test_a_gradient_that_is_cut_otherwise_than_its_parameter_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(moved):
        assert message.startswith("grad of a parameter has shape (2, 3) here, where the parameter has (4, 3).")


def grouped(rank: int) -> list[list[int]]:
    """Groups of plain tensors, used for a list of which some are replicated."""
    groups = TensorGroups([values(i) for i in range(3)])
    columns = groups.split([placed(values(i), kind) for i, kind in enumerate(("plain", "replicated", "plain"))])
    return [[type(t) is torch.Tensor for t in column] for group in columns for column in group]


def test_groups_hand_out_plain_tensors(ranks: Ranks) -> None:
    assert ranks.run(grouped) == [[[True] * 3]] * 2
