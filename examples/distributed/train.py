"""Train a character-level language model on several processes, and resume after a crash. Run it with torchrun."""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep import amp, optimizers
from halfstep.parallel import save_checkpoint

CHARACTERS = 128  # ASCII; any other character becomes "?"


def text(limit: int) -> torch.Tensor:
    """The source of the standard library's top-level modules, one uint8 number for each character."""
    found = b""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += file.read_text(encoding="utf-8", errors="replace").encode("ascii", "replace")
        if len(found) >= limit:
            break
    return torch.frombuffer(bytearray(found[:limit]), dtype=torch.uint8)


class Model(nn.Module):
    """A causal transformer from characters [batch, length] to scores [batch, length, CHARACTERS]."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, width)
        self.place = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.score = nn.Linear(width, CHARACTERS)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        length = characters.shape[1]
        x = self.embed(characters) + self.place(torch.arange(length, device=characters.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=x.device, dtype=x.dtype)
        scores: torch.Tensor = self.score(self.layers(x, mask=mask, is_causal=True))
        return scores


def batch(data: torch.Tensor, args: argparse.Namespace, step: int, micro: int, rank: int) -> torch.Tensor:
    """Characters of shape [batch, length + 1]. The same step, pass and rank always give the same characters."""
    generator = torch.Generator().manual_seed(((args.seed * 1_000_003 + step) * 1_009 + micro) * 1_013 + rank)
    starts = torch.randint(len(data) - args.length - 1, (args.batch_size,), generator=generator)
    return data[starts[:, None] + torch.arange(args.length + 1)].long()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="in all, those of the run that is resumed included")
    parser.add_argument("--batch-size", type=int, default=16, help="of each process and pass")
    parser.add_argument("--accumulate", type=int, default=2, help="passes to a step")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--characters", type=int, default=1_000_000, help="how much text to read")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--opt-level", default="O2", choices=["O0", "O1", "O2"])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], help="default: float16 on CUDA, bfloat16 on a CPU")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"), help="resumed from where it is there")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    return parser.parse_args(argv)


def join(args: argparse.Namespace, world: int, rank: int) -> None:
    """Meet the other processes. A process whose peer has died gives up after 30 seconds, and is started again."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    store: dist.Store | None = None
    if run != "none":  # torchrun --standalone
        # A file for each start, which has nothing of processes that were killed. torch's TCP store may wait for them.
        start = f"{run}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
        args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        store = dist.FileStore(str(args.checkpoint.with_name(f"{args.checkpoint.name}.{start}")), world)
    backend, patience = "nccl" if args.device == "cuda" else "gloo", timedelta(seconds=30)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=patience)


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and return the loss of the last step, in nats a character."""
    args = parse(argv)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0)) if args.device == "cuda" else None)
    if world > 1:
        join(args, world, rank)
    data = text(args.characters)

    torch.manual_seed(args.seed)
    model: nn.Module = Model(args.width, args.layers, args.length).to(device)
    optimizer = optimizers.FusedAdam(model.parameters(), lr=args.lr, weight_decay=0.01)
    dtype = None if args.opt_level == "O0" else args.dtype
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, dtype=dtype)
    first = 0
    if args.checkpoint.exists():
        state = torch.load(args.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])
        first = state["step"]
        if rank == 0:
            print(f"resumed at step {first}", flush=True)
    trained: nn.Module = DistributedDataParallel(model) if world > 1 else model

    loss = torch.zeros(())
    for step in range(first, args.steps):
        for micro in range(args.accumulate):
            characters = batch(data, args, step, micro, rank).to(device)
            last = micro == args.accumulate - 1
            with nullcontext() if last or world == 1 else trained.no_sync():  # type: ignore[operator]
                scores = trained(characters[:, :-1]).float()
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), characters[:, 1:].flatten())
                with amp.scale_loss(loss / args.accumulate, optimizer) as scaled_loss:
                    scaled_loss.backward()
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        if done % args.save_every == 0 or done == args.steps:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
            save_checkpoint({**state, "step": done}, args.checkpoint)
            if rank == 0:
                print(f"step {done}: loss {loss.item():.3f}", flush=True)
    if world > 1:
        dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main()
