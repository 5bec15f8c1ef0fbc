"""Write scikit-learn's digits as a folder of PNG files, one folder for each class: train/0/0001.png."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--limit", type=int, help="write this many images only")
    args = parser.parse_args(argv)
    data = load_digits()
    for i, (image, label) in enumerate(zip(data.images[: args.limit], data.target, strict=False)):
        folder = args.folder / ("val" if i % 5 == 0 else "train") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255 / 16).astype("uint8")).convert("RGB").save(folder / f"{i:04}.png")


if __name__ == "__main__":
    main()
