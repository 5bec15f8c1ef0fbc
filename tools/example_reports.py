"""One small example of each HTML report of halfstep, for tools/screenshots.py to look at."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

from halfstep import amp, numerics
from halfstep.cli.app import app
from halfstep.cli.run_report import recording, write_report
from tools import search_picture


def main(folder: Path) -> None:
    """Write demo.html, numerics.html, comparison.html, run.html and search.html into a folder."""
    torch.set_num_threads(1)  # for so little work others only get in the way
    app(["demo", "--device", "cpu", "--epochs", "1", "--width", "8", "--out", str(folder)], standalone_mode=False)
    os.replace(folder / "report.html", folder / "demo.html")
    with recording() as record:
        reference = _train("O0", folder / "numerics.html")
        candidate = _train("O2", folder / "numerics.html")
    numerics.compare(reference, candidate).report(folder / "comparison.html")
    write_report(folder / "run.html", record, "train.py", "halfstep run --report run.html train.py", "It ended well.")
    search_picture.example().report(folder / "search.html", "halfstep search unet.py:setup --level O2")


def _train(level: str, report: Path) -> list[numerics.Row]:
    """The rows of a short training in float16 of a model whose modules have long names."""
    torch.manual_seed(0)
    model: nn.Module = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    )
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype="float16", verbosity=0)
    with numerics.Monitor(model, optimizer, every=2) as monitor:
        for step in range(12):
            x = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(step))
            with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    monitor.report(report)
    return list(monitor.rows())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
