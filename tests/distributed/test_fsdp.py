"""FSDP2: optimizers, masters, loss scales and checkpoints on shards, against one process with one large batch."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import amp, optimizers
from halfstep.core.errors import UsageError
from halfstep.fp16_utils import FP16_Optimizer
from halfstep.kernels import multi_tensor
from tests.support import shards
from tests.support.processes import RankFailed, Ranks, ranks_of
from tests.support.worlds import BF16, scaled_backward, step_and_clear, with_optimizer

STEPS = 4


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))  # shards of unequal size, and bias shards


def sharded(half: bool = False, compute: torch.dtype | None = None) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model: Any = net().bfloat16() if half else net()
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=shards.mesh(), mp_policy=policy)
    return model


def data(rank: int, step: int, micro: int = 0) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(x.to(next(model.parameters()).dtype))
    return (out.float() * 3 - 1).square().mean()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "FusedAdam": lambda p: optimizers.FusedAdam(p, lr=0.02),
    "FusedAdam, clipped": lambda p: optimizers.FusedAdam(p, lr=0.02, max_grad_norm=0.5),
    "FusedSGD": lambda p: optimizers.FusedSGD(p, lr=0.05, momentum=0.9),
    "FusedAdagrad": lambda p: optimizers.FusedAdagrad(p, lr=0.05),
    "FusedLAMB": lambda p: optimizers.FusedLAMB(p, lr=0.02),
    "FusedNovoGrad": lambda p: optimizers.FusedNovoGrad(p, lr=0.02),
    "FusedNovoGrad, largest": lambda p: optimizers.FusedNovoGrad(p, lr=0.02, norm_type=0),
    "LARC": lambda p: optimizers.LARC(torch.optim.SGD(p, lr=0.05, momentum=0.9)),
}


def whole(tensors: Any) -> list[torch.Tensor]:
    # Neither gloo nor NCCL sends int16.
    return [(t.int() if t.dtype is torch.int16 else t.detach()).full_tensor().clone() for t in tensors]


def grouped_summands(rank: int) -> str:
    from torch.distributed.tensor import DTensor, Partial

    summand = DTensor.from_local(torch.ones(2), shards.mesh(), [Partial()])
    try:
        multi_tensor.scale_([summand], torch.tensor(2.0))
    except UsageError as error:
        return str(error)
    return f"nobody minded {summand}"


def test_tensors_of_which_processes_hold_summands_are_refused(ranks: Ranks) -> None:
    for message in ranks.run(grouped_summands):
        assert message.startswith("A tensor of shape (2,) is placed as (Partial(sum),): its processes hold summands.")


def train(rank: int, name: str, face: str, poison: int | None = None, micros: int = 1) -> dict[str, Any]:
    """``poison``: the loss of this rank is infinite at step 1."""
    model = sharded()
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = amp.GradScaler(init_scale=64.0, growth_interval=1000, decr_every_n_nan_or_inf=1)
    if face == "scale_loss":
        inner = optimizer.optim if name == "LARC" else optimizer
        amp.initialize(model, inner, opt_level="O0", loss_scale="dynamic", verbosity=0)
    for step in range(STEPS):
        for micro in range(micros):
            model.set_requires_gradient_sync(micro == micros - 1)
            loss = loss_of(model, data(rank, step, micro))
            if poison == rank and step == 1 and micro == 0:
                loss = loss * float("inf")
            if face == "GradScaler":
                scaler.scale(loss).backward()
            elif face == "scale_loss":
                scaled_backward(loss, inner)
            else:
                loss.backward()
        if face == "GradScaler":
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    scale = amp.state_dict()["loss_scaler0"] if face == "scale_loss" else scaler.state_dict()
    amp.deactivate()
    return {"params": whole(model.parameters()), "scale": scale}


def reference(name: str, world: int, poison: bool = False, micros: int = 1) -> list[torch.Tensor]:
    model = net().double()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(STEPS):
        for micro in range(micros):
            for rank in range(world):
                (loss_of(model, data(rank, step, micro)) / world).backward()
        if not (poison and step == 1):
            optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "face"),
    [
        *((name, "plain") for name in OPTIMIZERS),
        *product(("adamw", "FusedAdam, clipped", "FusedLAMB"), ("GradScaler", "scale_loss")),
        ("LARC", "scale_loss"),  # it is no optimizer that GradScaler knows
    ],
)
def test_every_optimizer(ranks: Ranks, name: str, face: str) -> None:
    first, second = ranks.run(train, name, face)
    assert first["scale"] == second["scale"]
    assert_near(first["params"], second["params"], 0.0)
    assert_near(first["params"], reference(name, 2))


@pytest.mark.parametrize("poison", [0, 1])
@pytest.mark.parametrize("face", ["GradScaler", "scale_loss"])
@pytest.mark.parametrize("name", ["adamw", "FusedAdam", "FusedAdam, clipped", "FusedLAMB"])
def test_overflow_on_one_rank_skips_on_all(ranks: Ranks, name: str, face: str, poison: int) -> None:
    first, second = ranks.run(train, name, face, poison)
    assert first["scale"] == second["scale"]
    assert (first["scale"].get("scale") or first["scale"]["loss_scale"]) in (32.0, 2.0**15)
    assert_near(first["params"], reference(name, 2, poison=True))


@pytest.mark.costly
@pytest.mark.parametrize(
    ("face", "poison"),
    [("plain", None), ("GradScaler", None), ("GradScaler", 1), ("scale_loss", None), ("scale_loss", 1)],
)
@pytest.mark.parametrize("name", ["adamw", "FusedAdam, clipped"])
def test_accumulation(ranks: Ranks, name: str, face: str, poison: int | None) -> None:
    first, _ = ranks.run(train, name, face, poison, 3)
    assert_near(first["params"], reference(name, 2, poison is not None, micros=3))
    if face == "scale_loss" and poison is None:
        assert first["scale"]["unskipped"] == STEPS, "a pass whose gradients have not come does not count"


def halves(rank: int, masters: Any, micros: int) -> dict[str, Any]:
    """bfloat16 shards with masters, in our optimizer or in FP16_Optimizer's."""
    model = sharded(half=True)
    if masters == "FP16_Optimizer":
        optimizer: Any = FP16_Optimizer(torch.optim.AdamW(model.parameters(), lr=0.02), 64.0, verbose=False)
    else:
        optimizer = optimizers.FusedAdam(model.parameters(), lr=0.02, weight_decay=0.01, master_weights=masters)
    for step in range(STEPS):
        for micro in range(micros):
            model.set_requires_gradient_sync(micro == micros - 1)
            loss = loss_of(model, data(rank, step, micro))
            optimizer.backward(loss) if masters == "FP16_Optimizer" else loss.backward()
        step_and_clear(optimizer)
    params = list(model.parameters())
    if masters == "FP16_Optimizer":
        kept = [p for group in optimizer.fp32_from_fp16_groups for p in group]
        return {"params": whole(params), "kept": whole(kept)}
    name = {"split": "remainder", "plain": "master"}[masters]
    return {"params": whole(params), "kept": whole(optimizer.state[p][name] for p in params)}


def halves_alone(masters: str, micros: int) -> dict[str, Any]:
    model = net().bfloat16()
    optimizer = optimizers.FusedAdam(
        model.parameters(),
        lr=0.02,
        weight_decay=0.01,
        master_weights="plain" if masters == "FP16_Optimizer" else masters,
    )
    for step in range(STEPS):
        sums: list[Any] = [0.0 for _ in model.parameters()]
        for rank in range(2):
            for micro in range(micros):
                loss_of(model, data(rank, step, micro)).backward()
            for i, p in enumerate(model.parameters()):
                sums[i] = sums[i] + p.grad.float() / 2  # type: ignore[union-attr]
                p.grad = None
        for p, g in zip(model.parameters(), sums, strict=True):
            p.grad = g.to(BF16)
        step_and_clear(optimizer)
    name = {"split": "remainder"}.get(masters, "master")
    params = list(model.parameters())
    return {"params": [p.detach() for p in params], "kept": [optimizer.state[p][name] for p in params]}


@pytest.mark.parametrize("masters", ["split", "plain", "FP16_Optimizer"])
@pytest.mark.parametrize("micros", [1, 2])
def test_masters_of_16_bit_shards(ranks: Ranks, masters: str, micros: int) -> None:
    first, second = ranks.run(halves, masters, micros)
    alone = halves_alone(masters, micros)
    assert_near(first["params"], second["params"], 0.0)
    exact = micros == 1 and masters != "FP16_Optimizer"  # torch adds up unsynced passes in fp32, a process in bfloat16
    assert_near(first["params"], alone["params"], 0.0 if exact else 0.02)
    if exact:
        assert_near(first["kept"], alone["kept"], 0.0)
    for p, master in zip(first["params"], first["kept"], strict=True):
        assert masters == "split" or torch.equal(p, master.to(BF16))


def norms(rank: int, p: float) -> list[float]:
    model, optimizer = amp.initialize(*with_optimizer(sharded(), torch.optim.SGD, lr=1.0), opt_level="O0", verbosity=0)
    scaled_backward(loss_of(model, data(rank, 0)), optimizer)
    found = optimizer.clip_master_grads(0.25, p).item()  # type: ignore[attr-defined]
    after = torch.cat([g.flatten() for g in whole(q.grad for q in model.parameters())])
    amp.deactivate()
    return [found, torch.linalg.vector_norm(after, p).item()]


@pytest.mark.parametrize("p", [1.0, 2.0, float("inf")])
def test_norms_are_of_whole_gradients(ranks: Ranks, p: float) -> None:
    model = net()
    sum(loss_of(model, data(rank, 0)) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
    grads = torch.cat([q.grad.flatten() for q in model.parameters()])  # type: ignore[union-attr]
    expected = torch.linalg.vector_norm(grads, p).item()
    for found, after in ranks.run(norms, p):
        assert found == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(0.25, rel=1e-4)


def two_forward_passes(rank: int, other_first: bool) -> list[torch.Tensor]:
    """The gradients of some passes, each after another forward pass without a backward pass."""
    model = sharded()
    model = amp.initialize(model, opt_level="O1", dtype=BF16, verbosity=0)
    for step in range(10):  # memory lies where it lay before in some of them
        if other_first:
            loss_of(model, data(rank, 1)).item()
        loss_of(model, data(rank, step)).backward()
    amp.deactivate()
    return whole(p.grad for p in model.parameters())


def test_a_cast_of_an_earlier_forward_pass_is_not_used_for_whole_weights(ranks: Ranks) -> None:
    """Its gradient comes when FSDP2 has reduced those of the module, on this rank or on another."""
    found, expected = ranks.run(two_forward_passes, True), ranks.run(two_forward_passes, False)
    for some, others in zip(found, expected, strict=True):
        assert_near(some, others, 0.0)


def misplaced(rank: int) -> None:
    model, optimizer = with_optimizer(sharded(), optimizers.FusedAdam)
    state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(7, 5), "exp_avg_sq": torch.zeros(7, 5)}
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {0: state}
    optimizer.load_state_dict(saved)
    loss_of(model, data(rank, 0)).backward()
    with pytest.raises(UsageError, match=r"exp_avg of a parameter has shape \(7, 5\).*torch.distributed.checkpoint"):
        optimizer.step()


def test_whole_state_for_a_shard_is_refused(ranks: Ranks) -> None:
    ranks.run(misplaced)


# ---- checkpoints


def make(masters: Any) -> tuple[Any, Any]:
    return with_optimizer(sharded(half=masters is not None), optimizers.FusedAdam, lr=0.02, master_weights=masters)


def some_steps(model: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        loss_of(model, data(0, step)).backward()  # every rank the same, so that their number does not matter
        step_and_clear(optimizer)


def save(rank: int, folder: str, masters: Any) -> list[torch.Tensor]:
    model, optimizer = make(masters)
    some_steps(model, optimizer, 0, 3)
    shards.save(model, optimizer, folder)
    some_steps(model, optimizer, 3, 5)
    return whole(model.parameters())


def resume(rank: int, folder: str, masters: Any) -> list[torch.Tensor]:
    model, optimizer = make(masters)
    shards.load(model, optimizer, folder)
    some_steps(model, optimizer, 3, 5)
    return whole(model.parameters())


@pytest.mark.parametrize("masters", [None, "split", "plain"])
def test_saved_on_two_ranks_and_loaded_on_one_and_four(ranks: Ranks, tmp_path: Path, masters: Any) -> None:
    (expected, _) = ranks.run(save, str(tmp_path), masters)
    for world in (1, 2, 4):
        for found in ranks_of(world).run(resume, str(tmp_path), masters):
            assert_near(found, expected, 1e-6 if masters is None else 0.0)


def killed_while_saving(rank: int, folder: str, killed: int) -> None:
    import torch.distributed.checkpoint as dcp

    model, optimizer = make("split")
    for step in range(2):
        some_steps(model, optimizer, step, step + 1)
        writer: Any = dcp.FileSystemWriter(f"{folder}/{step}")
        if step == 1 and rank == killed:
            writer.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        dcp.save(shards.state_dicts(model, optimizer), storage_writer=writer)


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_while_saving_shards_the_folder_before_is_whole(ranks: Ranks, tmp_path: Path, killed: int) -> None:
    with pytest.raises(RankFailed, match="rank"):
        ranks.run(killed_while_saving, str(tmp_path), killed)
    assert {p.name for p in tmp_path.iterdir() if (p / ".metadata").exists()} == {"0"}
    assert ranks.run(resume, str(tmp_path / "0"), "split")
