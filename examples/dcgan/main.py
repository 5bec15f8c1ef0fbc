"""A DCGAN on digits in mixed precision: two models, two optimizers, and three losses, each with a loss scale."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfstep import amp

REAL, FAKE, GENERATED = range(3)  # the losses


def generator(noise: int, width: int) -> nn.Module:
    """A model from noise of shape [N, noise, 1, 1] to images of shape [N, 1, 16, 16]."""
    return nn.Sequential(
        nn.ConvTranspose2d(noise, 2 * width, 4, 1, 0, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, 2, 1),
        nn.Tanh(),
    )


def discriminator(width: int) -> nn.Module:
    """A model from images of shape [N, 1, 16, 16] to logits of shape [N]."""
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 1, 4, 1, 0),
        nn.Flatten(0),
    )


def digits(limit: int | None) -> TensorDataset:
    images = torch.tensor(load_digits().images[:limit]).float()[:, None] / 8 - 1
    return TensorDataset(nn.functional.interpolate(images, size=16, mode="bilinear"))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--limit", type=int, help="train on this many images only")
    parser.add_argument("--noise", type=int, default=32)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--opt-level", default="O1", choices=["O0", "O1", "O2", "O3"])
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], help="default: float16 on CUDA, bfloat16 on a CPU")
    parser.add_argument("--samples", type=Path, default=Path("samples.png"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Train, and return the mean losses of the last epoch."""
    args = parse(argv)
    torch.manual_seed(0)
    data = DataLoader(digits(args.limit), args.batch_size, shuffle=True, drop_last=True)
    models = [generator(args.noise, args.width).to(args.device), discriminator(args.width).to(args.device)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=args.lr, betas=(0.5, 0.999)) for model in models]
    dtype = None if args.opt_level == "O0" else args.dtype
    (draw, judge), (draw_optimizer, judge_optimizer) = amp.initialize(
        models, optimizers, opt_level=args.opt_level, dtype=dtype, num_losses=3
    )
    fixed = torch.randn(64, args.noise, 1, 1, device=args.device)
    found: dict[str, float] = {}
    for epoch in range(args.epochs):
        totals = torch.zeros(3, device=args.device)
        for (real,) in data:
            # The judge learns to tell real images from generated ones: two backward passes, one step.
            judge_optimizer.zero_grad()
            fake = draw(torch.randn(len(real), args.noise, 1, 1, device=args.device))
            loss_real = backward(judge(real.to(args.device)), 1.0, judge_optimizer, REAL)
            loss_fake = backward(judge(fake.detach()), 0.0, judge_optimizer, FAKE)
            judge_optimizer.step()
            # The generator learns to make images that the judge calls real.
            draw_optimizer.zero_grad()
            loss_drawn = backward(judge(fake), 1.0, draw_optimizer, GENERATED)
            draw_optimizer.step()
            totals += torch.stack([loss_real, loss_fake, loss_drawn])
        real_loss, fake_loss, drawn_loss = (totals / len(data)).tolist()
        found = {"discriminator": real_loss + fake_loss, "generator": drawn_loss}
        skipped = amp.steps_skipped(draw_optimizer) + amp.steps_skipped(judge_optimizer)
        scales = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
        print(f"epoch {epoch + 1}: {found}, scales {scales}, {skipped} steps skipped")
        save_samples(draw, fixed, args.samples)
    return found


def backward(logits: torch.Tensor, label: float, optimizer: torch.optim.Optimizer, loss_id: int) -> torch.Tensor:
    """The loss if all images have this label. Runs its backward pass with the loss scale of ``loss_id``."""
    loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), torch.full_like(logits, label).float())
    with amp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled_loss:
        scaled_loss.backward()
    return loss.detach()


@torch.no_grad()
def save_samples(draw: nn.Module, noise: torch.Tensor, path: Path) -> None:
    """Write 64 generated images as one picture, 8 x 8."""
    images = ((draw(noise).float().cpu() + 1) * 127.5).to(torch.uint8).view(8, 8, 16, 16)
    grid = images.permute(0, 2, 1, 3).reshape(128, 128)
    Image.fromarray(grid.numpy()).save(path)


if __name__ == "__main__":
    main()
