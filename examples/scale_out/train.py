"""One training script for one process, DDP, FSDP2, HSDP and tensor parallelism, at any level.

    python train.py
    torchrun --nproc-per-node 2 train.py --parallel ddp
    torchrun --nproc-per-node 2 train.py --parallel fsdp2
    torchrun --nproc-per-node 4 train.py --parallel hsdp
    torchrun --nproc-per-node 2 train.py --parallel tp
    torchrun --nproc-per-node 4 train.py --parallel fsdp2+tp

All of them see the same batches and print the same losses, up to the rounding of sums that are made in another order.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from halfstep import amp

WORDS = 16


class Block(nn.Module):
    """Attention over earlier words and two layers, [batch, length, width] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        # Under tensor parallelism a process has some of the heads, so their number is not written here.
        head = x.shape[-1] // self.heads
        q, k, v = (layer(h).unflatten(-1, (-1, head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A causal transformer from words [batch, length] to the scores of the next word [batch, length, WORDS]."""

    def __init__(self, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.score = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words) + self.place(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.score(self.norm(x))
        return scores


def split_heads(model: Model, mesh: DeviceMesh) -> None:
    """Cut the layers of each block over the processes of a mesh: by outputs, and then by inputs."""
    by_output = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh, {**by_output, "out": RowwiseParallel(), "down": RowwiseParallel()})


def shard(model: Model, mesh: DeviceMesh) -> None:
    """Let each process keep a part of every parameter."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", default="none", choices=["none", "ddp", "fsdp2", "hsdp", "tp", "fsdp2+tp"])
    parser.add_argument("--opt-level", default="O2")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16, help="sentences of a step, of all processes together")
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=2)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and return the mean loss of each step."""
    args = parse(argv)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if args.parallel != "none" and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    torch.manual_seed(0)  # every process makes the same model
    model: nn.Module = Model(args.width, args.depth, 4, args.length).to(device)

    # 1. Cut the model. ``place`` of ``count`` is the part of the batch that this process sees.
    place, count = rank, world
    if args.parallel == "fsdp2":
        shard(model, init_device_mesh(device.type, (world,)))
    elif args.parallel == "hsdp":  # parts within a pair of processes, copies of them in other pairs
        shard(model, init_device_mesh(device.type, (world // 2, 2), mesh_dim_names=("replicate", "shard")))
    elif args.parallel == "tp":
        split_heads(model, init_device_mesh(device.type, (world,)))
        place, count = 0, 1
    elif args.parallel == "fsdp2+tp":
        mesh = init_device_mesh(device.type, (world // 2, 2), mesh_dim_names=("shard", "tp"))
        split_heads(model, mesh["tp"])
        shard(model, mesh["shard"])
        place, count = mesh["shard"].get_local_rank(), world // 2

    # 2. Then the optimizer, from the parameters that the model has now; and then amp.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=args.opt_level, dtype=getattr(torch, args.dtype), verbosity=0
    )
    if args.parallel == "ddp":  # a wrapper comes last
        model = nn.parallel.DistributedDataParallel(model)

    # 3. The loop is the same for all.
    losses = []
    for step in range(args.steps):
        start = torch.randint(0, WORDS, (args.batch_size, 1), generator=torch.Generator().manual_seed(step))
        words = (start + 3 * torch.arange(args.length + 1)) % WORDS  # the next word is 3 further
        mine = words[place::count].to(device)
        scores = model(mine[:, :-1])
        loss = F.cross_entropy(scores.float().flatten(0, 1), mine[:, 1:].flatten())
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.clip_master_grads(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        if world > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / world)
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
