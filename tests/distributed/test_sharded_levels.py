"""``amp.initialize`` at O2 and O3 on models that FSDP2, HSDP or tensor parallelism has cut, against one process.

One process has the batches of all ranks. The sums of a rank's part are rounded in other places there, so masters agree
within some roundings of the 16-bit dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfstep
from halfstep import amp, optimizers
from halfstep.core.errors import UsageError
from tests.support.processes import Ranks, ranks_of
from tests.support.shards import load, save, whole
from tests.support.worlds import BF16, FP16, advance, scaled_backward, start_amp, step_and_clear

pytestmark = pytest.mark.exhaustive  # they start processes

STEPS = 4
KINDS = {"fsdp": 2, "tp": 2, "hsdp": 4, "fsdp+tp": 4}  # ways to cut a model, and ranks
NEAR = {BF16: 2e-2, FP16: 4e-3}  # RMSprop and Muon make much of a gradient that is rounded otherwise


class Net(nn.Module):
    """A norm that stays plain under tensor parallelism, and two layers that it cuts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return out


def net(kind: str = "fsdp") -> Net:
    torch.manual_seed(0)
    return Net(16 if "tp" in kind else 15)  # FSDP2 has shards of unequal sizes


def cut(kind: str, model: nn.Module, **fsdp: Any) -> tuple[Any, range]:
    """A model that is cut, and the batches that this rank sees."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank, world = dist.get_rank(), dist.get_world_size()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    wide = kind in ("hsdp", "fsdp+tp")
    mesh = init_device_mesh("cpu", (2, world // 2) if wide else (world,), mesh_dim_names=("dp", "tp") if wide else None)
    data = {"fsdp": rank, "hsdp": rank, "tp": 0, "fsdp+tp": rank // 2}[kind]
    if kind in ("tp", "fsdp+tp"):
        model = parallelize_module(model, mesh["tp"] if wide else mesh, plan)
    warnings.filterwarnings(
        "ignore", "FSDP2-wrapped module .* returned a view tensor"
    )  # what tensor parallelism returns
    if kind != "tp":
        for module in (*model.children(), model):
            fully_shard(module, mesh=mesh["dp"] if kind == "fsdp+tp" else mesh, **fsdp)
    return model, range(data, data + 1)


def batches(kind: str, world: int) -> int:
    return {"fsdp": world, "hsdp": world, "tp": 1, "fsdp+tp": 2}[kind]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.01),
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=0.01),
    "FusedLAMB": lambda p: optimizers.FusedLAMB(p, lr=0.01),
}


def train(
    model: Any, data: range, name: str, dtype: torch.dtype, clip: str, level: str = "O2", poison: int | None = None
) -> dict[str, Any]:
    """``poison``: the batch that has an infinite loss at step 1."""
    optimizer = OPTIMIZERS[name](model.parameters())
    scale = None if dtype is BF16 else "dynamic" if poison is not None else 128.0
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, dtype=dtype, loss_scale=scale, max_loss_scale=128.0, verbosity=0
    )
    step = halfstep.TrainStep(model, loss_of, optimizer, max_grad_norm=0.5) if clip == "TrainStep" else None
    norms: list[torch.Tensor] = []
    for i in range(STEPS):
        for batch in data:
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * i + batch))
            weight = torch.tensor(float("inf") if (i, batch) == (1, poison) else 1.0 / len(data))
            if step is not None:
                step(x, weight)
                continue
            scaled_backward(loss_of(model(x), weight), optimizer)
        if clip == "torch":
            norms.append(whole(torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)).float())
        elif clip == "halfstep":
            norms.append(whole(optimizer.clip_master_grads(0.5)).float())
        if step is None:
            step_and_clear(optimizer)
    found = {
        "dtypes": {p.dtype for p in model.parameters()},
        "masters": [whole(p) for p in amp.master_params(optimizer)],
        "norms": norms,
        "scale": amp.state_dict()["loss_scaler0"]["loss_scale"],
    }
    amp.deactivate()
    return found


def loss_of(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (out.float() * 3 - 1).square().mean() * weight


def both(rank: int, kind: str, dtype: torch.dtype, *runs: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """For each run what the cut model has at the end, and what one process has, which is the first."""
    count = batches(kind, dist.get_world_size())
    return [
        (
            train(*cut(kind, net(kind)), r[0], dtype, *r[1:]),
            train(net(kind), range(count), r[0], dtype, *r[1:]) if rank == 0 else None,
        )
        for r in runs
    ]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)


def assert_as_alone(kind: str, dtype: torch.dtype, *runs: tuple[Any, ...]) -> None:
    answers = ranks_of(KINDS[kind]).run(both, kind, dtype, *runs)
    for each in zip(*answers, strict=True):
        expected = each[0][1]
        for found, _ in each:
            assert found["dtypes"] == {dtype}
            assert found["scale"] == expected["scale"] == each[0][0]["scale"]
            assert_near(found["masters"], each[0][0]["masters"], 0.0)
            assert_near(found["masters"], expected["masters"], NEAR[dtype])
            torch.testing.assert_close([*found["norms"]], [*expected["norms"]], rtol=0.02, atol=0.0)


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("kind", KINDS)
def test_o2_trains_shards_as_one_process_does(kind: str, dtype: torch.dtype) -> None:
    runs = [(name, "") for name in OPTIMIZERS] + [("AdamW", "halfstep"), ("RMSprop", "halfstep")]
    if kind == "tp":  # one batch, and plain parameters beside shards
        runs.append(("AdamW", "TrainStep"))
    elif kind != "fsdp+tp":  # torch's clipping takes no list of plain tensors and shards
        runs.append(("AdamW", "torch"))
    assert_as_alone(kind, dtype, *runs)


@pytest.mark.parametrize("kind", KINDS)
def test_o3_and_fp32_levels_train_shards(kind: str) -> None:
    answers = [answer for (answer,) in ranks_of(KINDS[kind]).run(both, kind, BF16, ("SGD", "", "O3"))]
    for found, _ in answers:
        assert_near(found["masters"], answers[0][1]["masters"], 0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_on_one_rank_is_skipped_by_all(kind: str) -> None:
    runs = [(name, "", "O2", 0) for name in ("AdamW", "RMSprop", "FusedLAMB")]
    assert_as_alone(kind, FP16, *runs)


# ---- bit for bit


def by_hand(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The masters of FSDP2 at O2, and those of a process that averages the ranks' gradients in fp32 and rounds once."""
    found = train(*cut("fsdp", net()), "FusedAdam", BF16, "")["masters"]
    model, optimizer = start_amp(net(), optimizers.FusedAdam, "O2", dtype=BF16, lr=0.01)
    for i in range(STEPS):
        grads: list[list[torch.Tensor]] = []
        for batch in range(dist.get_world_size()):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * i + batch))
            grads.append(list(torch.autograd.grad(loss_of(model(x), torch.tensor(1.0)), list(model.parameters()))))
        for param, *each in zip(model.parameters(), *grads, strict=True):
            param.grad = torch.stack([g.float() for g in each]).mean(0).to(BF16).float()
        step_and_clear(optimizer)
    expected = [whole(p) for p in amp.master_params(optimizer)]
    amp.deactivate()
    return found, expected


def test_fsdp2_at_o2_is_bit_for_bit_one_process(ranks: Ranks) -> None:
    """The masters start from the fp32 weights that were there, and ranks add up gradients in fp32."""
    for found, expected in ranks.run(by_hand):
        assert_near(found, expected, 0.0)


# ---- what is refused, before anything has changed


def refusals(rank: int) -> list[str]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    def prepare(model: Any, **options: Any) -> str:
        before = [p.dtype for p in model.parameters()]
        try:
            amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", dtype=BF16, **options)
        except UsageError as error:
            assert before == [p.dtype for p in model.parameters()]
            return str(error)
        finally:
            amp.deactivate()
        return "nobody minded"

    run, _ = cut("fsdp", net())
    run(torch.randn(2, 8))
    other, _ = cut("fsdp", net(), mp_policy=MixedPrecisionPolicy(param_dtype=FP16))
    mixed, _ = cut("fsdp", nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))))
    return [prepare(run), prepare(other), prepare(mixed), prepare(mixed, keep_batchnorm_fp32=False)]


def test_what_fsdp2_cannot_do_is_refused_before_anything_changes(ranks: Ranks) -> None:
    for ran, other, mixed, one_dtype in ranks.run(refusals):
        assert ran.startswith("This model has already run since fully_shard")
        assert "MixedPrecisionPolicy(param_dtype=torch.float16)" in other
        assert mixed.startswith("FSDP2 gathers parameters together that would have different dtypes")
        assert "0.0.weight torch.bfloat16 and 0.1.weight torch.float32" in mixed
        assert one_dtype == "nobody minded"


# ---- checkpoints


def resumed(rank: int, kind: str, name: str, folder: str, stop: int | None) -> list[torch.Tensor]:
    """Masters after four steps. ``stop``: save after so many; None loads what was saved and goes on."""
    model, _ = cut(kind, net(kind))
    optimizer = OPTIMIZERS[name](model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", dtype=BF16, verbosity=0)
    if stop is None:
        load(model, optimizer, folder)
    for i in range(2 if stop is None else 0, STEPS):
        if i == stop:
            save(model, optimizer, folder)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))  # every rank the same: any number of them
        advance(loss_of(model(x), torch.tensor(1.0)), optimizer)
    masters = [whole(p) for p in amp.master_params(optimizer)]
    amp.deactivate()
    return masters


@pytest.mark.costly
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])  # split masters, and plain ones
@pytest.mark.parametrize(("saved", "loaded"), [*((kind, kind) for kind in KINDS), ("fsdp", "hsdp"), ("hsdp", "fsdp")])
def test_a_sharded_checkpoint_resumes_bit_for_bit(saved: str, loaded: str, name: str, tmp_path: Path) -> None:
    expected, *_ = ranks_of(KINDS[saved]).run(resumed, saved, name, str(tmp_path), 2)
    for found in ranks_of(KINDS[loaded]).run(resumed, loaded, name, str(tmp_path), None):
        assert_near(found, expected, 0.0)
