"""``halfstep migrate --to torch``: scripts as people write them, rewritten, run, and equal to halfstep's losses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from halfstep.cli.migrate import command, migrate, migrate_to_torch

ONE_FUNCTION = '''\
import torch.nn.functional as F
import torch.nn as nn

def train(args, model, data):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if args.fp16:
        try:
            from apex import amp
        except ImportError:
            raise ImportError("Please install it")
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.level)
    losses = []
    for step, (x, y) in enumerate(data):
        out = model(x)
        loss = F.cross_entropy(out, y)  # of one batch
        if args.accumulate > 1:
            loss = loss / args.accumulate
        text = """as
it is"""
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        losses.append(loss.item())
        if (step + 1) % args.accumulate == 0:
            if args.fp16:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            model.zero_grad()
    assert text == "as\\nit is"
    return losses
'''.replace("import torch.nn.functional", "import torch\nimport torch.nn.functional")

TWO_FUNCTIONS = """\
import torch.nn as nn
try:
    from apex import amp
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedSGD
except ImportError:
    amp = None

def train(args, model, data):
    assert amp is not None
    net = nn.Sequential(*model, FusedLayerNorm(4))
    optimizer = FusedSGD(net.parameters(), lr=0.1, momentum=0.5)
    if args.level != "O0":
        net, optimizer = amp.initialize(net, optimizer, opt_level=args.level)
    losses = epoch(args, net, nn.CrossEntropyLoss(), data, optimizer)
    if args.level != "O0":
        state = amp.state_dict()
    return losses

def epoch(args, net, criterion, data, optimizer):
    losses = []
    for x, y in data:
        loss = criterion(net(x), y)
        net.zero_grad()
        if args.level != "O0":
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            norm = nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1)
        else:
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses
"""


def losses_of(source: str, level: str, accumulate: int) -> list[float]:
    names: dict[str, Any] = {}
    exec(compile(source, "<script>", "exec"), names)
    torch.manual_seed(0)
    data = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(12)]
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    args = SimpleNamespace(fp16=level != "fp32", level=level, accumulate=accumulate)
    return list(names["train"](args, model, data))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("level", ["fp32", "O0", "O1"])
@pytest.mark.parametrize("source", [ONE_FUNCTION, TWO_FUNCTIONS], ids=["one function", "two functions"])
def test_it_trains_as_halfstep_does(source: str, level: str, accumulate: int) -> None:
    if source == TWO_FUNCTIONS and (level == "fp32" or accumulate > 1):
        return
    found = migrate_to_torch({"": source}, accumulation=True)[""]
    assert found.problems == []
    on_cpu = found.after.replace('"cuda"', '"cpu"').replace("GradScaler(", "GradScaler('cpu', ")
    want = losses_of(migrate(source).after, level, accumulate)
    assert losses_of(on_cpu, level, accumulate) == pytest.approx(want, rel=2e-3 if level == "O1" else 1e-6)


@pytest.mark.parametrize("source", [ONE_FUNCTION, TWO_FUNCTIONS], ids=["one function", "two functions"])
def test_a_level_that_torch_has_not_is_refused_when_it_runs(source: str) -> None:
    found = migrate_to_torch({"": source}, accumulation=True)[""]
    with pytest.raises(ValueError, match="O0 and O1 only"):
        losses_of(found.after, "O2", 1)


def test_accumulation_is_refused_unless_it_is_asked_for() -> None:
    found = migrate(ONE_FUNCTION, "torch")
    assert found.after == ONE_FUNCTION
    assert [line for line, _ in found.problems] == [ONE_FUNCTION.splitlines().index("            optimizer.step()") + 1]
    assert "several backward passes" in found.problems[0][1]


HEAD = "import torch\nfrom apex import amp\nmodel, optimizer = amp.initialize(model, optimizer)\n"
LOOP = "for x in data:\n    loss = model(x)\n    with amp.scale_loss(loss, optimizer) as s:\n        s.backward()\n"
STEP = "    optimizer.step()\n"
SCALED = """\
import torch
scaler = torch.amp.GradScaler()
for x in data:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x)
    scaler.scale(loss).backward()
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (HEAD + LOOP + STEP, f"{SCALED}    scaler.step(optimizer)\n    scaler.update()\n"),
        (  # gradients that somebody clips, by whatever name, are unscaled
            f"{HEAD}{LOOP}    clip_grad_norm_(model.parameters(), 1.0)\n{STEP}",
            f"{SCALED}    scaler.unscale_(optimizer)\n    clip_grad_norm_(model.parameters(), 1.0)\n"
            "    scaler.step(optimizer)\n    scaler.update()\n",
        ),
        ("from apex.normalization import FusedLayerNorm as N\n", "from torch.nn import LayerNorm as N\n"),
        (
            "import apex\nm = apex.parallel.DistributedDataParallel(m)\nisinstance(m, apex.parallel.SyncBatchNorm)\n",
            "import torch\nm = torch.nn.parallel.DistributedDataParallel(m)\nisinstance(m, torch.nn.SyncBatchNorm)\n",
        ),
        (
            "from apex.parallel import convert_syncbn_model\nm = convert_syncbn_model(m)\n",
            "import torch\nm = torch.nn.SyncBatchNorm.convert_sync_batchnorm(m)\n",
        ),
        (
            "from apex.optimizers import FusedAdam\no = FusedAdam(p, lr=1)\n",
            "from torch.optim import AdamW as FusedAdam\no = FusedAdam(p, lr=1, weight_decay=0.0)\n",
        ),
        ("try:\n    import apex\n    has = True\nexcept ImportError:\n    has = False\n", "has = True\n"),
        ("def f():\n    from apex import amp\n", "def f():\n    pass\n"),
        (
            HEAD.replace("(model, optimizer)", "(net, optimizer, loss_scale=scale)") + LOOP + STEP,
            SCALED.replace(
                "scaler =",
                "model = net\nif scale not in (None, 'dynamic'):\n"
                '    raise ValueError("torch.amp has no loss_scale")\nscaler =',
            )
            + "    scaler.step(optimizer)\n    scaler.update()\n",
        ),
    ],
)
def test_what_it_writes(before: str, after: str) -> None:
    found = migrate(before, "torch")
    assert found.problems == []
    assert found.after == after
    assert migrate(after, "torch").after == after


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (HEAD + LOOP + "optimizer.step()\n", "no optimizer.step() after it in the same loop"),
        (HEAD + LOOP + STEP + "loss.backward()\n", "without scale_loss"),
        (HEAD + LOOP + STEP + STEP, "without scale_loss before it"),
        (HEAD + LOOP + LOOP.partition("\n")[2] + STEP, "several backward passes"),
        (HEAD + "def f(loss):\n" + LOOP.partition("model(x)\n")[2] + STEP, "no call of the model"),
        (LOOP.replace("    loss", "    import apex.amp as amp\n    loss") + STEP, "there is no amp.initialize"),
        ("from apex.optimizers import FusedAdam\no = FusedAdam\n", "defaults differ"),
        ("from apex.optimizers import FusedAdam\no = FusedAdam(p, bias_correction=False)\n", "bias_correction"),
        ("from .tools import amp\namp.scale_loss\n# apex", "taken from another file"),
        (HEAD.replace("optimizer)\n", "optimizer, opt_level=level())\n") + LOOP + STEP, "cannot be read here"),
    ],
)
def test_what_it_refuses(source: str, said: str) -> None:
    found = migrate(source, "torch")
    assert found.after == source
    assert any(said in text for _, text in found.problems), found.problems


def test_a_folder_is_rewritten_whole_or_not_at_all(tmp_path: Path) -> None:
    """One file asks ``isinstance`` of a class that another one wraps with."""
    asks = "from apex.parallel import DistributedDataParallel as DDP\nx = isinstance(m, DDP)\n"
    (tmp_path / "hooks.py").write_text(asks)
    (tmp_path / "wraps.py").write_text(
        "from apex.parallel import DistributedDataParallel as D\nm = D(m, allreduce=1)\n"
    )
    result = CliRunner().invoke(command, [str(tmp_path), "--to", "torch", "--write"])
    assert result.exit_code == 1
    assert "wraps.py:2: allreduce" in result.output
    assert (tmp_path / "hooks.py").read_text() == asks
    (tmp_path / "wraps.py").write_text("from apex.parallel import DistributedDataParallel as D\nm = D(m)\n")
    assert CliRunner().invoke(command, [str(tmp_path), "--to", "torch", "--write"]).exit_code == 0
    assert "torch.nn.parallel" in (tmp_path / "hooks.py").read_text()
    assert "torch.nn.parallel" in (tmp_path / "wraps.py").read_text()
