"""``halfstep migrate``: before and after, what it leaves and says, and that what it writes runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from click.testing import CliRunner

from halfstep.cli.migrate import command, migrate

SAME = [  # to halfstep: before, after
    ("from apex import amp\n", "from halfstep import amp\n"),
    ("from apex import amp, parallel as p  # both\n", "from halfstep import amp, parallel as p  # both\n"),
    ("import apex.amp as mixed\n", "import halfstep.amp as mixed\n"),
    ("from apex.fp16_utils import FP16_Optimizer\n", "from halfstep.fp16_utils import FP16_Optimizer\n"),
    ("from apex.fp16_utils import *\n", "from halfstep.fp16_utils import *\n"),
    ("from apex.optimizers import FusedAdam\n", "from halfstep.optimizers import FusedAdam\n"),
    (
        "from apex.parallel import DistributedDataParallel as DDP\n",
        "from halfstep.parallel import DistributedDataParallel as DDP\n",
    ),
    ("from apex.parallel.LARC import LARC\n", "from halfstep.parallel import LARC\n"),
    ("from apex.parallel import LARC\n", "from halfstep.apex.parallel import LARC\n"),
    ("from apex.amp import _amp_state\n", "from halfstep.amp import _amp_state\n"),
    ("from apex.amp._amp_state import _amp_state\n", "from halfstep.amp import _amp_state\n"),
    ("from apex.contrib import clip_grad\n", "from halfstep.apex.contrib import clip_grad\n"),
    ("from apex import amp, RNN\n", "from halfstep import amp\nfrom halfstep.apex import RNN\n"),
    (
        "from apex.multi_tensor_apply import multi_tensor_applier\n",
        "from halfstep.multi_tensor import multi_tensor_applier\n",
    ),
    ("import amp_C\n", "import halfstep.multi_tensor as amp_C\n"),
    (
        "try:\n    from apex import amp\nexcept ImportError:\n    raise ImportError('Please install apex')\n",
        "try:\n    from halfstep import amp\nexcept ImportError:\n    raise ImportError('Please install apex')\n",
    ),
    (
        "import apex\nm = apex.parallel.convert_syncbn_model(m)\nx = apex.amp.scale_loss(l, o)\n",
        "import halfstep.amp, halfstep.parallel\n"
        "m = halfstep.parallel.convert_syncbn_model(m)\nx = halfstep.amp.scale_loss(l, o)\n",
    ),
    ("import apex\n", "import halfstep\n"),
    (
        "from apex import amp\nm, o = amp.initialize(m, o, opt_level='O2')\n",
        "from halfstep import amp\nm, o = amp.initialize(m, o, opt_level='O2', dtype=\"float16\")\n",
    ),
    (
        "from apex import amp as a\nm = a.initialize(\n    m,\n    opt_level=level,  # which\n)\n",
        "from halfstep import amp as a\n"
        'm = a.initialize(\n    m,\n    opt_level=level,  # which\n    dtype="float16",\n)\n',
    ),
    ("from apex import amp\nh = amp.init()\n", 'from halfstep import amp\nh = amp.init(dtype="float16")\n'),
    (
        "from apex import amp\nm = amp.initialize(m, opt_level='O5')\n",
        "from halfstep import amp\nm = amp.initialize(m, opt_level='O5')\n",
    ),
    (
        "if   x :  # odd   spacing\n\tfrom apex import amp ;  y = {1:2}\nelse: pass\n",
        "if   x :  # odd   spacing\n\tfrom halfstep import amp ;  y = {1:2}\nelse: pass\n",
    ),
    ("amp = 3\napex = amp.initialize\n", "amp = 3\napex = amp.initialize\n"),
    ("from .apex import amp\n", "from .apex import amp\n"),
]


@pytest.mark.parametrize(("before", "after"), SAME)
def test_to_halfstep(before: str, after: str) -> None:
    found = migrate(before)
    assert found.after == after
    again = migrate(found.after)
    assert again.after == after, "a second time changes nothing"


@pytest.mark.parametrize(
    ("code", "line", "said"),
    [
        ("\nfrom apex import transformer\n", 2, "from apex import transformer"),
        ("from apex.contrib.sparsity import ASP\n", 1, "ASP"),
        ("import apex.pyprof\n", 1, "import apex.pyprof"),
        ("import apex\n\napex.pyprof.nvtx.init()\n", 3, "pyprof"),
        ("from apex.pyprof import *\n", 1, "pyprof"),
    ],
)
def test_what_is_left_is_named(code: str, line: int, said: str) -> None:
    found = migrate(code)
    assert [number for number, _ in found.problems] == [line]
    assert said in found.problems[0][1]


TORCH_BEFORE = """\
    import torch
    from apex import amp
    from apex.parallel import DistributedDataParallel as DDP

    model, optimizer = build()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    model = DDP(model, delay_allreduce=True)
    for x, y in data:
        optimizer.zero_grad()
        # forward
        out = model(x)
        loss = criterion(out, y)
        # backward
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward(retain_graph=True)
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
        optimizer.step()  # go
    torch.save({"amp": amp.state_dict()}, "c.pt")
    amp.load_state_dict(torch.load("c.pt")["amp"])
"""
TORCH_AFTER = """\
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP

    model, optimizer = build()
    scaler = torch.amp.GradScaler()
    model = DDP(model, find_unused_parameters=True)
    for x, y in data:
        optimizer.zero_grad()
        # forward
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
            loss = criterion(out, y)
        # backward
        scaler.scale(loss).backward(retain_graph=True)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
        scaler.step(optimizer)  # go
        scaler.update()
    torch.save({"amp": scaler.state_dict()}, "c.pt")
    scaler.load_state_dict(torch.load("c.pt")["amp"])
"""


def test_to_torch() -> None:
    found = migrate(dedent(TORCH_BEFORE), "torch")
    assert found.problems == []
    assert found.after == dedent(TORCH_AFTER)
    assert migrate(found.after, "torch").after == found.after


def test_o0_to_torch_has_neither_casts_nor_scale() -> None:
    found = migrate(dedent(TORCH_BEFORE).replace("O1", "O0"), "torch")
    assert found.problems == []
    assert "autocast" not in found.after
    assert "torch.amp.GradScaler(enabled=False)" in found.after


REFUSED = {
    "O2": ("O1", "O2", "O2 and O3 keep 16-bit weights"),
    "a level from elsewhere": ('"O1"', "args.level", "the level cannot be read here"),
    "losses": ('opt_level="O1"', 'opt_level="O1", num_losses=2', "num_losses"),
    "a static scale": ('opt_level="O1"', 'opt_level="O1", loss_scale=128.0', "a static loss_scale"),
    "bounds": ('opt_level="O1"', 'opt_level="O1", max_loss_scale=2.0', "max_loss_scale"),
    "models": ("amp.initialize(model, optimizer", "amp.initialize([model], [optimizer]", "several models"),
    "arguments": ("(model, optimizer, opt_level", "(*both, opt_level", "cannot be read here"),
    "a longer block": ("retain_graph=True)\n", "retain_graph=True)\n        check()\n", "does more than"),
    "a closure": ("optimizer.step()", "optimizer.step(closure)", "step with a closure"),
    "no model": ("out = model(x)", "out = other(x)", "no call of the model"),
    "a function": ("amp.state_dict()", "(lambda: amp._amp_state)()", "_amp_state"),
    "an optimizer": (
        "from apex import amp\n",
        "from apex import amp\nfrom apex.optimizers import FusedLAMB\n",
        "FusedLAMB",
    ),
    "a wrapper": ("delay_allreduce=True", "gradient_average=False", "gradient_average"),
    "no initialize": ('model, optimizer = amp.initialize(model, optimizer, opt_level="O1")\n', "", "no amp.initi"),
    "no torch": ("import torch\n", "import torch as t\n", "import torch"),
    "a star": ("from apex import amp\n", "from apex import amp\nfrom apex.fp16_utils import *\n", "say which names"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_torch_has_not_is_refused_as_a_whole(why: str) -> None:
    old, new, said = REFUSED[why]
    source = dedent(TORCH_BEFORE)
    assert old in source
    source = source.replace(old, new)
    found = migrate(source, "torch")
    assert found.after == source
    assert any(said in text for _, text in found.problems), found.problems


def test_amp_in_several_functions_is_refused() -> None:
    source = """\
        import torch
        from apex import amp

        def main():
            model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
            train(model, optimizer)

        def train(model, optimizer):
            loss = model(x)
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
    """
    found = migrate(dedent(source), "torch")
    assert found.problems == [
        (10, "amp is used in several functions; hand a GradScaler from one to the other yourself")
    ]


# ---- the command


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_it_shows_first_and_writes_when_told(tmp_path: Path) -> None:
    for name, text in (("a.py", "from apex import amp\n"), ("sub/b.py", "x = 1\n"), (".hidden/c.py", "import apex\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "a.py").chmod(0o755)
    code, said = run(str(tmp_path))
    assert code == 0
    assert "-from apex import amp" in said
    assert "+from halfstep import amp" in said
    assert "1 files would change, 0 places left" in said
    assert (tmp_path / "a.py").read_text() == "from apex import amp\n"
    code, said = run(str(tmp_path), "--write")
    assert "1 files changed" in said
    assert (tmp_path / "a.py").read_text() == "from halfstep import amp\n"
    assert (tmp_path / "a.py").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / ".hidden/c.py").read_text() == "import apex\n"
    assert run(str(tmp_path))[1].strip() == "0 files would change, 0 places left"


def test_what_is_left_shows_in_the_exit_status(tmp_path: Path) -> None:
    script, broken = tmp_path / "a.py", tmp_path / "b.py"
    script.write_text("from apex import transformer\n")
    broken.write_text("import apex\nprint 'python 2'\n")
    code, said = run(str(script), str(broken), "--write")
    assert code == 1
    assert "halfstep has no such name" in said
    assert "not Python that can be read" in said
    assert broken.read_text() == "import apex\nprint 'python 2'\n"


def test_without_libcst_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libcst", None)
    code, said = run(str(tmp_path))
    assert code == 1
    assert "pip install 'halfstep[migrate]'" in said


def test_a_write_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "a.py"
    script.write_text("from apex import amp\n")

    def failing(a: str, b: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", failing)
    result = CliRunner().invoke(command, [str(script), "--write"])
    assert isinstance(result.exception, OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["a.py"]
    assert script.read_text() == "from apex import amp\n"


SCRIPT = """\
import torch
import torch.nn as nn
from apex import amp
from apex.parallel import convert_syncbn_model

torch.manual_seed(0)
model = convert_syncbn_model(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
x = torch.randn(32, 8)
for step in range(20):
    loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}")
"""


def losses_of(*arguments: str) -> list[float]:
    done = subprocess.run([sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(map(float, done.stdout.split()))


@pytest.mark.exhaustive
def test_what_it_writes_does_the_same(tmp_path: Path) -> None:
    original, migrated = tmp_path / "original.py", tmp_path / "migrated.py"
    original.write_text(SCRIPT)
    migrated.write_text(migrate(SCRIPT).after)
    losses = losses_of("-m", "halfstep", "run", str(original))
    assert losses_of(str(migrated)) == losses
    assert losses[-1] < losses[0]


@pytest.mark.exhaustive
def test_what_it_writes_for_torch_runs(tmp_path: Path) -> None:
    source = SCRIPT.replace('"O2", verbosity=0', '"O1"').replace("convert_syncbn_model(", "(")
    source = source.replace("from apex.parallel import convert_syncbn_model\n", "")
    found = migrate(source, "torch")
    assert found.problems == []
    (tmp_path / "migrated.py").write_text(found.after)
    losses = losses_of(str(tmp_path / "migrated.py"))
    assert losses[-1] < losses[0] / 2
