"""``import apex`` finds halfstep, and scripts written for Apex run unedited."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from halfstep import amp as ours
from halfstep import apex as tree
from halfstep.core.errors import ArgumentTypeError, ArgumentValueError, UsageError

NAMES = (
    "amp fp16_utils optimizers parallel parallel.LARC parallel.sync_batchnorm parallel.multiproc multi_tensor_apply"
    " normalization mlp fused_dense contrib contrib.clip_grad"
)
MODULES = ["apex", "amp_C", *(f"apex.{name}" for name in NAMES.split(" "))]


@pytest.fixture
def installed() -> Iterator[None]:
    tree.install()
    yield
    tree.uninstall()


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_found_and_is_ours(installed: None, name: str) -> None:
    module = importlib.import_module(name)
    stands_for = "halfstep.apex" + (".amp_C" if name == "amp_C" else name.removeprefix("apex"))
    assert module is importlib.import_module(stands_for)
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == stands_for


def test_unknown_modules_are_not_found(installed: None) -> None:
    with pytest.raises(ModuleNotFoundError, match="apex"):
        importlib.import_module("apex.transformer")


def test_install_twice_and_uninstall() -> None:
    tree.install()
    tree.install()
    tree.uninstall()
    tree.uninstall()
    assert importlib.util.find_spec("apex") is None


@pytest.mark.parametrize("has_amp", [True, False])
def test_a_real_apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_amp: bool) -> None:
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text("real = True\n")
    (package / "optimizers.py").write_text("real = True\n")
    if has_amp:
        (package / "amp.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        if has_amp:
            with pytest.raises(UsageError, match="force=True"):
                tree.install()
            tree.install(force=True)
            assert not hasattr(importlib.import_module("apex.amp"), "real")
        else:
            tree.install()
            assert importlib.import_module("apex.optimizers").real
            assert importlib.import_module("apex.amp").initialize is not ours.initialize
            assert importlib.import_module("apex.parallel").Reducer
    finally:
        tree.uninstall()
        for name in [name for name in sys.modules if name.partition(".")[0] == "apex"]:
            del sys.modules[name]


SCRIPT = """
import argparse, torch
import apex
from apex import amp
from apex.parallel import DistributedDataParallel as DDP
from apex.optimizers import FusedAdam
from apex.parallel.LARC import LARC
from apex.amp import _amp_state

parser = argparse.ArgumentParser()
parser.add_argument("--opt-level", default="O1")
parser.add_argument("out")
args = parser.parse_args()
model = torch.nn.Linear(4, 2)
optimizer = FusedAdam(model.parameters(), lr=1e-2)
model, optimizer = apex.amp.initialize(model, optimizer, opt_level=args.opt_level)
for step in range(3):
    loss = model(torch.ones(3, 4)).float().pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
with open(args.out, "w") as file:
    print(__name__, args.opt_level, model.weight.dtype, _amp_state.loss_scalers[0].loss_scale(), file=file)
"""


@pytest.mark.parametrize(
    ("options", "asked", "told"),
    [
        ([], "O2", "__main__ O2 torch.float16"),
        (["--dtype", "bfloat16"], "O2", "__main__ O2 torch.bfloat16"),
        (["--opt-level", "O0"], "O2", "__main__ O2 torch.float32"),
        ([], "O1", "__main__ O1 torch.float32"),
    ],
)
def test_run(tmp_path: Path, options: list[str], asked: str, told: str) -> None:
    script, out = tmp_path / "train.py", tmp_path / "out.txt"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "halfstep", "run", *options, str(script), "--opt-level", asked, str(out)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert out.read_text().startswith(told)


CUDA_SCRIPT = """
import sys, torch
from apex import amp
from apex.fp16_utils import FP16_Optimizer

torch.cuda.set_device(0)
torch.cuda.manual_seed(0)
device = torch.device("cuda", 0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2")
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record()
x = torch.randn(16, 4, device="cuda")
y = torch.randint(2, (16,)).to(device, non_blocking=True)
weight = torch.cuda.FloatTensor(2).fill_(1.0).to("cuda:0")
losses = []
for step in range(5):
    loss = torch.nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y, weight.to(0))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
end.record()
torch.cuda.synchronize()
assert start.elapsed_time(end) > 0 and losses[-1] < losses[0]
torch.save(model.state_dict(), sys.argv[1])
state = torch.load(sys.argv[1], map_location=lambda storage, loc: storage.cuda(0))
state = torch.load(sys.argv[1], map_location="cuda")
model.load_state_dict(state)
assert torch.zeros(1, device=device).device.type == "cpu"
torch.distributed.init_process_group("nccl", init_method="file://" + sys.argv[2], rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0], output_device=0)
model(x).sum().backward()
"""


def test_a_script_with_cuda_all_over_it_runs_on_the_cpu(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(CUDA_SCRIPT)
    command = [sys.executable, "-m", "halfstep", "run", "--device", "cpu", str(script)]
    files = [str(tmp_path / "model.pt"), str(tmp_path / "meeting")]
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("asks for CUDA runs on the CPU") == 1


def test_cuda_is_given_back() -> None:
    from halfstep.apex.on_cpu import cuda_on_cpu

    before = torch.cuda.is_available, torch.load, nn.Module.cuda, torch.cuda.Event
    with cuda_on_cpu():
        assert torch.ones(1).cuda().device.type == "cpu"
        assert nn.Linear(1, 1).to("cuda").weight.device.type == "cpu"
    assert before == (torch.cuda.is_available, torch.load, nn.Module.cuda, torch.cuda.Event)


# ---- the rest of the tree


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Layer", "RMS"])
def test_normalization(kind: str, inputs: torch.dtype, weights: torch.dtype) -> None:
    from halfstep.apex import normalization

    x = torch.linspace(-1, 1, 12).view(3, 4).to(inputs)
    shape, weight, bias = (4,), torch.linspace(1, 2, 4), torch.linspace(0, 1, 4)
    exact = (
        F.layer_norm(x.double(), shape, weight.double(), bias.double(), 1e-5)
        if kind == "Layer"
        else F.rms_norm(x.double(), shape, weight.double(), 1e-5)
    )
    for prefix, wanted in (("", inputs), ("Mixed", weights)):
        module: Any = getattr(normalization, f"{prefix}Fused{kind}Norm")(4)
        with torch.no_grad():
            module.weight.copy_(weight)
            if kind == "Layer":
                module.bias.copy_(bias)
        y = module.to(weights)(x)
        assert y.dtype is wanted
        torch.testing.assert_close(y.double(), exact, atol=0.02, rtol=0.02)
    function = normalization.fused_layer_norm if kind == "Layer" else normalization.fused_rms_norm
    assert function(x, shape).dtype is inputs


def test_mlp() -> None:
    from halfstep.apex.mlp import MLP

    module = MLP([4, 8, 2])
    x = torch.randn(3, 4)
    hidden = torch.relu(F.linear(x, module.weight_0, module.bias_0))
    assert torch.equal(module(x), torch.relu(F.linear(hidden, module.weight_1, module.bias_1)))
    assert [name for name, _ in MLP([4, 2], bias=False).named_parameters()] == ["weight_0"]
    with pytest.raises(ArgumentTypeError, match="'none', 'relu' or 'sigmoid'"):
        MLP([4, 2], activation="gelu")


def test_fused_dense() -> None:
    from halfstep.apex.fused_dense import FusedDense, FusedDenseGeluDense

    x, module = torch.randn(3, 4), FusedDenseGeluDense(4, 8, 2)
    expected = F.linear(F.gelu(F.linear(x, module.weight1, module.bias1)), module.weight2, module.bias2)
    assert torch.equal(module(x), expected)
    assert isinstance(FusedDense(4, 2), nn.Linear)
    with pytest.raises(ArgumentValueError, match="bias=False"):
        FusedDenseGeluDense(4, 8, 2, bias=False)
