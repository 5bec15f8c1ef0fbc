"""Train a residual network on a folder of images, in mixed precision, on one process or several."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from halfstep import amp
from halfstep.parallel import convert_syncbn_model


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """Images of shape [3, size, size], fp32 in [-1, 1], with their class: the number of their folder."""

    def __init__(self, folder: Path, size: int) -> None:
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        files = [path for path in folder.glob("*/*") if path.suffix.lower() in (".png", ".jpg", ".jpeg")]
        self.items = [(path, self.classes.index(path.parent.name)) for path in sorted(files)]
        self.size = size

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        path, label = self.items[i]
        with Image.open(path) as image:
            pixels = image.convert("RGB").resize((self.size, self.size)).tobytes()
        flat = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
        return flat.view(self.size, self.size, 3).permute(2, 0, 1).float() / 127.5 - 1, label

    def __len__(self) -> int:
        return len(self.items)


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.carry: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.carry = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.carry(x))


def resnet(classes: int, widths: Sequence[int] = (32, 64, 128), depth: int = 2) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    inputs = widths[0]
    for stage, width in enumerate(widths):
        for i in range(depth):
            layers.append(Block(inputs, width, 2 if stage and not i else 1))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="a folder with train/ and val/")
    parser.add_argument("--size", type=int, default=32, help="images are resized to SIZE x SIZE")
    parser.add_argument("--epochs", type=int, default=5, help="in all, those of the run that is resumed included")
    parser.add_argument("--batch-size", type=int, default=64, help="on each process")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--opt-level", default="O1", choices=["O0", "O1", "O2", "O3"])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], help="default: float16 on CUDA, bfloat16 on a CPU")
    parser.add_argument("--loss-scale", help='a number or "dynamic"')
    parser.add_argument("--keep-batchnorm-fp32", help='"True" or "False"')
    parser.add_argument("--sync-bn", action="store_true", help="BatchNorm over all processes")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"), help="written after every epoch")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> float:
    """Train and return the accuracy on val/, from 0 to 1."""
    args = parse(argv)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0)) if args.device == "cuda" else None)

    train, val = ImageFolder(args.data / "train", args.size), ImageFolder(args.data / "val", args.size)
    torch.manual_seed(0)
    sampler: DistributedSampler[tuple[torch.Tensor, int]] | None = DistributedSampler(train) if world > 1 else None
    loader = DataLoader(train, args.batch_size, shuffle=sampler is None, sampler=sampler, num_workers=args.workers)
    tests = DataLoader(val, 256, num_workers=args.workers)

    model = resnet(len(train.classes)).to(device)
    if args.sync_bn and world > 1:
        model = convert_syncbn_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        dtype=None if args.opt_level == "O0" else args.dtype,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
    )
    first = 0
    if args.resume:
        state = torch.load(args.resume, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        amp.load_state_dict(state["amp"])
        first = state["epoch"]
    # This is after initialize, because DistributedDataParallel needs the parameters that will be trained.
    trained = nn.parallel.DistributedDataParallel(model) if world > 1 else model

    found = accuracy(model, tests, device)
    for epoch in range(first, args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        began = time.perf_counter()
        loss = train_epoch(trained, optimizer, loader, device)
        found = accuracy(model, tests, device)
        if rank == 0:
            seconds = time.perf_counter() - began
            print(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {found:.1%}, {seconds:.1f} s")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, args.checkpoint)
    if world > 1:
        dist.destroy_process_group()
    return found


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[tuple[torch.Tensor, int]],
    device: torch.device,
) -> float:
    """Train on all batches once, and return the mean loss."""
    model.train()
    total = torch.zeros((), device=device)
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        total += loss.detach()  # stays on the device; only the end of the epoch reads it
    return total.item() / max(len(loader), 1)


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, int]], device: torch.device) -> float:
    model.eval()
    right = torch.zeros((), device=device)
    for images, labels in loader:
        right += (model(images.to(device)).argmax(1) == labels.to(device)).sum()
    return right.item() / len(loader.dataset)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
