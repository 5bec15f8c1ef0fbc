"""Train a small language model in fp32, bfloat16 and each recipe for eight bits and fewer, and draw the losses."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from halfstep import amp
from halfstep.formats import RECIPES

PRECISIONS = ("fp32", "bf16", *RECIPES)


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's result for [batch, time, width]."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Characters(nn.Module):
    """Embedding, blocks, and scores for the next character."""

    def __init__(self, vocabulary: int, width: int, blocks: int, time: int) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(time, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.score = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, time, vocabulary] for character numbers [batch, time]."""
        x = self.embed(text) + self.position
        for block in self.blocks:
            x = block(x)
        return self.score(self.norm(x))


def train(precision: str, seed: int, text: torch.Tensor, vocabulary: int, args: argparse.Namespace) -> list[float]:
    """Train in one precision from one seed, and return the loss of each step."""
    torch.manual_seed(seed)
    model = Characters(vocabulary, args.width, args.blocks, args.time).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    level = "O0" if precision == "fp32" else "O1"
    products = precision if precision in RECIPES else None
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=level, dtype="bfloat16", products=products, verbosity=0
    )
    batches, losses = torch.Generator().manual_seed(seed), []
    for step in range(args.steps):
        if products and step == args.bf16_from:
            amp.set_products(model, None, passes="forward")
        starts = torch.randint(0, len(text) - args.time - 1, (args.batch_size, 1), generator=batches)
        batch = text[starts + torch.arange(args.time + 1)].to(args.device)
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    amp.deactivate()
    return losses


def smooth(losses: Sequence[float], over: int = 20) -> list[float]:
    """Return means over the latest steps."""
    return [sum(part) / len(part) for part in (losses[max(0, i - over) : i + 1] for i in range(len(losses)))]


def table(ends: dict[str, list[float]]) -> str:
    """Print the gaps of each precision to bf16: the mean over seeds, and the standard deviation of one seed."""
    rows = ["| precision | loss | gap to bf16 | spread |", "|---|---|---|---|"]
    for name, losses in ends.items():
        gaps = [100 * (loss / reference - 1) for loss, reference in zip(losses, ends["bf16"], strict=True)]
        spread = statistics.stdev(gaps) if len(gaps) > 1 else float("nan")
        rows.append(f"| {name} | {statistics.mean(losses):.4f} | {statistics.mean(gaps):+.2f} % | {spread:.2f} % |")
    return "\n".join(rows)


def picture(curves: dict[str, list[float]], width: int = 720, height: int = 400) -> str:
    """Draw one line for each precision, as SVG."""
    low, high = (choose(value for losses in curves.values() for value in losses) for choose in (min, max))
    steps, parts = max(map(len, curves.values())), []
    for i, (name, losses) in enumerate(curves.items()):
        color = f"hsl({360 * i // len(curves)} 70% 40%)"
        across, up = (width - 220) / max(1, steps - 1), (height - 50) / (high - low or 1)
        points = " ".join(
            f"{40 + across * at:.1f},{height - 30 - up * (loss - low):.1f}" for at, loss in enumerate(losses)
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>')
        label = f"{name} {losses[-1]:.4f}"
        parts.append(f'<text x="{width - 170}" y="{30 + 18 * i}" fill="{color}">{label}</text>')
    parts.append(f'<text x="4" y="24">{high:.1f}</text><text x="4" y="{height - 30}">{low:.1f}</text>')
    parts.append(f'<text x="40" y="{height - 8}">steps 1 to {steps}, loss as a mean over 20 steps</text>')
    box = f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13"'
    body = "".join(['<rect width="100%" height="100%" fill="white"/>', *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {box}>{body}</svg>\n'


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, print the last losses, and return them by precision."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="mxfp8", choices=[*PRECISIONS, "all"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--bf16-from", type=int, help="the step from which the forward pass is in bfloat16 again")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--time", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="the number of runs, from --seed on")
    parser.add_argument("--last", type=int, default=50, help="the number of steps whose mean loss is compared")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--picture", type=Path, default=Path("losses.svg"))
    args = parser.parse_args(argv)

    documents = "".join(getattr(nn, name).__doc__ or "" for name in sorted(dir(nn)))
    characters = sorted(set(documents))
    numbers = {character: i for i, character in enumerate(characters)}
    text = torch.tensor([numbers[character] for character in documents])
    chosen = PRECISIONS if args.recipe == "all" else dict.fromkeys(("fp32", "bf16", args.recipe))
    curves, ends = {}, {}
    for precision in chosen:
        runs = [train(precision, args.seed + i, text, len(characters), args) for i in range(args.seeds)]
        curves[precision] = smooth([statistics.mean(losses) for losses in zip(*runs, strict=True)])
        ends[precision] = [statistics.mean(losses[-args.last :]) for losses in runs]
        print(f"{precision:22} loss {curves[precision][-1]:.4f}", flush=True)
    print(f"\nthe mean of the last {args.last} steps of {args.seeds} seeds\n\n{table(ends)}")
    args.picture.write_text(picture(curves), encoding="utf-8")
    return {precision: losses[-1] for precision, losses in curves.items()}


if __name__ == "__main__":
    main()
