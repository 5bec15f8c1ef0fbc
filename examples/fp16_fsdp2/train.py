"""A policy gradient in float16 on shards: scaled, clipped, skipped on all ranks at once, and resumed. Use torchrun."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from halfstep import amp, optimizers

WORDS = 10


class Policy(nn.Module):
    """A causal transformer from words [batch, length] to the log-probabilities of the next [batch, length, WORDS]."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + 1, width)  # and the word that begins
        self.place = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.score = nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        length = words.shape[1]
        x = self.embed(words) + self.place(torch.arange(length, device=words.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device, dtype=x.dtype)
        return self.score(self.layers(x, mask=mask, is_causal=True)).float().log_softmax(-1)


class Rollout(NamedTuple):
    """Sentences [batch, length + 1] that begin with the word WORDS, and the log-probability of each later word."""

    words: torch.Tensor
    logp: torch.Tensor


@torch.no_grad()
def roll_out(policy: nn.Module, batch: int, length: int, generator: torch.Generator) -> Rollout:
    """Sample word by word, as an inference engine does: with other shapes, and so other roundings, than training."""
    words = torch.full((batch, 1), WORDS)
    logps = []
    for _ in range(length):
        logp = policy(words)[:, -1]
        word = torch.multinomial(logp.exp(), 1, generator=generator)
        words = torch.cat([words, word], 1)
        logps.append(logp.gather(1, word))
    return Rollout(words, torch.cat(logps, 1))


def reward(words: torch.Tensor) -> torch.Tensor:
    """The share of words that follow their predecessor, [batch]: 3 after 2, and 0 after 9."""
    return (words[:, 2:] == (words[:, 1:-1] + 1) % WORDS).float().mean(1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100, help="in all, those of the run that is resumed included")
    parser.add_argument("--batch-size", type=int, default=64, help="sentences of each process and step")
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--scale", type=float, default=2.0**16, help="the loss scale to begin with, in float16")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="resumed from the newest in it")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    return parser.parse_args(argv)


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is complete: ``.metadata`` is written last."""
    complete = [path.parent for path in folder.glob("*/.metadata")]
    return max(complete, key=lambda path: int(path.name), default=None)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, and return the mean reward, the mismatch and the loss scale of each step."""
    args = parse(argv)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, half = dist.get_rank(), getattr(torch, args.dtype)
    torch.manual_seed(args.seed)
    policy = Policy(args.width, args.length)
    # The shards stay fp32: they are the masters. FSDP casts what it gathers, and sums gradients in fp32.
    shard = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(half, reduce_dtype=torch.float32),
    }
    for layer in policy.layers.layers:
        fully_shard(layer, **shard)
    fully_shard(policy, **shard)
    optimizer = optimizers.FusedAdam(policy.parameters(), lr=args.lr)
    scaler = amp.GradScaler(args.dtype == "float16", init_loss_scaling=args.scale, decr_every_n_nan_or_inf=1)

    first, found = 0, newest(args.folder)
    if found is not None:
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "scaler": scaler.state_dict()}
        checkpoint.load(state, checkpoint_id=found)
        set_state_dict(policy, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        scaler.load_state_dict(state["scaler"])
        first = int(found.name)

    history: dict[str, list[float]] = {"reward": [], "mismatch": [], "scale": []}
    for step in range(first, args.steps):
        generator = torch.Generator().manual_seed((args.seed * 1_000_003 + step) * 1_013 + rank)
        with amp.auto_cast(level="O2", dtype=half):
            rollout = roll_out(policy, args.batch_size, args.length, generator)
            rewards = reward(rollout.words)
            advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-3)
            logp = policy(rollout.words[:, :-1]).gather(2, rollout.words[:, 1:, None])[:, :, 0]
            ratio = (logp - rollout.logp).exp()  # 1, but for what training and inference round differently
            loss = -(ratio * advantage[:, None]).mean()
        scaler.scale(loss).backward()
        scaler.clip_grad_norm_(optimizer, args.clip)
        scaler.step(optimizer)  # an overflow on any rank skips the step on all of them
        scaler.update()
        optimizer.zero_grad()

        mismatch = (logp.detach() - rollout.logp).abs().mean()
        for name, value in (("reward", rewards.mean()), ("mismatch", mismatch)):
            dist.all_reduce(value)
            history[name].append(value.item() / dist.get_world_size())
        history["scale"].append(scaler.get_scale())
        done = step + 1
        if done % args.save_every == 0 or done == args.steps:
            model_state, optimizer_state = get_state_dict(policy, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state, "scaler": scaler.state_dict()}
            checkpoint.save(state, checkpoint_id=args.folder / str(done))
            if rank == 0:
                last = {name: values[-1] for name, values in history.items()}
                print(f"step {done}: " + ", ".join(f"{name} {value:.3g}" for name, value in last.items()), flush=True)
    if rank == 0 and history["mismatch"]:
        early = history["mismatch"][:20]
        print(f"mean mismatch of the first {len(early)} steps: {sum(early) / len(early):.2g}", flush=True)
    return history


if __name__ == "__main__":
    main()
    if "RANK" in os.environ:
        dist.destroy_process_group()
