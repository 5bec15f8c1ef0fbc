"""``import apex`` finds halfstep, and scripts written for Apex run unedited."""

from __future__ import annotations

import importlib
import importlib.util
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
from halfstep.core.errors import UsageError
from tests.support.python import python
from tests.support.worlds import assert_equal

NAMES = (
    "amp fp16_utils optimizers parallel parallel.LARC parallel.sync_batchnorm parallel.multiproc multi_tensor_apply"
    " normalization mlp fused_dense contrib contrib.clip_grad RNN RNN.models reparameterization parallel.distributed"
    " reparameterization.weight_norm reparameterization.reparameterization parallel.optimized_sync_batchnorm"
)
EXTENSIONS = ["amp_C", "apex_C", "syncbn"]
MODULES = ["apex", *EXTENSIONS, *(f"apex.{name}" for name in NAMES.split(" "))]


@pytest.fixture
def installed() -> Iterator[None]:
    tree.install()
    yield
    tree.uninstall()


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_found_and_is_ours(installed: None, name: str) -> None:
    module = importlib.import_module(name)
    stands_for = "apex" + (f".{name}" if name in EXTENSIONS else name.removeprefix("apex"))
    assert module is importlib.import_module(f"halfstep.{stands_for}")
    assert module is importlib.import_module(f"halfstep.compat.{stands_for}")
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == f"halfstep.compat.{stands_for}"


def test_private_names_that_scripts_reach_into(installed: None) -> None:
    """What old scripts and tests took from inside Apex."""
    from apex import amp, optimizers, parallel
    from apex.amp import _amp_state
    from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
    from apex.parallel.LARC import LARC
    from apex.parallel.sync_batchnorm import SyncBatchNorm

    model: Any = nn.Linear(2, 2)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), 0.1), opt_level="O1", verbosity=0)
    state = _amp_state
    state.loss_scalers[0]._loss_scale = 2.0**7
    assert state.loss_scalers[0].loss_scale() == state.loss_scalers[0]._loss_scale == 128.0
    with amp.scale_loss(torch.ones((), requires_grad=True), optimizer) as scaled:
        assert scaled.item() == 128.0
        scaled.backward()
    state.allow_incoming_model_not_fp32 = True
    try:
        amp.initialize(nn.Linear(2, 2).half(), opt_level="O3", verbosity=0)
    finally:
        state.allow_incoming_model_not_fp32 = False
    assert parallel.LARC.LARC is LARC
    assert SyncBatchNorm is parallel.SyncBatchNorm
    assert multi_tensor_applier.available
    assert isinstance(multi_tensor_applier, MultiTensorApply)
    optimizers.FusedSGD([nn.Parameter(torch.ones(2))], lr=0.1, materialize_master_grads=False)
    lamb = optimizers.FusedMixedPrecisionLamb([nn.Parameter(torch.ones(2))])
    lamb.reduced_precision_dtype = torch.bfloat16


def test_flattening(installed: None) -> None:
    import apex_C
    from apex.parallel import distributed

    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.zeros(0), torch.arange(4.0).view(2, 2).t()]
    flat = apex_C.flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 0, 2, 1, 3]
    assert_equal(apex_C.unflatten(flat, tensors), tensors)
    found: list[torch.Tensor] = []
    distributed.extract_tensors([tensors[0], (tensors[1], [tensors[2]]), "no tensor"], found)
    assert list(map(id, found)) == list(map(id, tensors[:3]))
    half, double = tensors[0].half(), tensors[0].double()
    assert distributed.split_half_float_double([double, half]) == [[half], [double]]
    assert list(distributed.split_by_type([half, tensors[0]])) == ["torch.HalfTensor", "torch.FloatTensor"]
    doubled = torch.ones(3)
    distributed.flat_dist_call([doubled, half], lambda flat, factor: flat.mul_(factor), (2.0,))
    assert torch.equal(doubled, torch.full((3,), 2.0))
    assert torch.equal(half, tensors[0].half() * 2)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("c_last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_syncbn_pieces_make_a_batchnorm(dtype: torch.dtype, c_last: bool, affine: bool) -> None:
    from halfstep.apex import syncbn

    batches = [torch.randn(n, 3, 4) * 2 + n for n in (2, 5)]  # of two ranks
    grads = [torch.randn_like(x) for x in batches]
    weight, shift = (torch.rand(3) + 0.5, torch.randn(3)) if affine else (None, None)
    whole = torch.cat(batches).to(dtype).double().requires_grad_()
    w, b = (None if t is None else t.double().requires_grad_() for t in (weight, shift))
    expected = F.batch_norm(whole, None, None, w, b, training=True)
    expected.backward(torch.cat(grads).to(dtype).double())
    suffix = "_c_last" if c_last else ""

    def call(name: str, *args: Any) -> Any:
        return getattr(syncbn, name + suffix)(*args)

    def lay(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).movedim(1, -1).contiguous() if c_last else x.to(dtype)

    xs, dys = list(map(lay, batches)), list(map(lay, grads))
    means, variances = zip(*(call("welford_mean_var", x) for x in xs), strict=True)
    counts = torch.tensor([x.numel() // 3 for x in xs], dtype=torch.int32)
    mean, var, inv_std = syncbn.welford_parallel(torch.stack(means), torch.stack(variances), counts, 1e-5)
    close = {"rtol": 1e-2, "atol": 1e-2} if dtype is torch.float16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(var.double(), whole.detach().var((0, 2), correction=0), **close)
    extra = (None,) if c_last else ()
    ys = [call("batchnorm_forward", x, *extra, mean, inv_std, weight, shift) for x in xs]
    y = torch.cat([y.movedim(-1, 1) if c_last else y for y in ys])
    assert y.dtype is dtype
    torch.testing.assert_close(y.double(), expected.detach(), **close)
    sums = [call("reduce_bn", dy, x, mean, inv_std, weight) for dy, x in zip(dys, xs, strict=True)]
    dy_sum, dy_xmu_sum = (torch.stack([s[i] for s in sums]).sum(0) for i in (0, 1))
    if affine:
        assert w is not None
        torch.testing.assert_close((sums[0][2] + sums[1][2]).double(), w.grad, **close)
    grad = [
        call("batchnorm_backward", dy, x, mean, inv_std, weight, dy_sum, dy_xmu_sum, counts)
        for dy, x in zip(dys, xs, strict=True)
    ]
    found = torch.cat([g.movedim(-1, 1) if c_last else g for g in grad])
    assert whole.grad is not None
    torch.testing.assert_close(found.double(), whole.grad, **close)
    if c_last:
        z = torch.randn_like(xs[0])
        fused = syncbn.batchnorm_forward_c_last(xs[0], z, mean, inv_std, weight, shift, True)
        passed = syncbn.relu_bw_c_last(dys[0], xs[0], z, mean, inv_std, weight, shift)
        assert torch.equal(passed != 0, (fused > 0) & (dys[0] != 0))


COMPILED = (
    "bnp distributed_lamb_cuda fast_layer_norm fast_multihead_attn fmhalib fused_adam_cuda fused_dense_cuda"
    " fused_layer_norm_cuda fused_rotary_positional_embedding fused_weight_gradient_mlp_cuda"
    " generic_scaled_masked_softmax_cuda mlp_cuda scaled_masked_softmax_cuda scaled_softmax_cuda"
    " scaled_upper_triang_masked_softmax_cuda xentropy_cuda"
)


@pytest.mark.parametrize("name", COMPILED.split(" "))
def test_a_compiled_extension_that_is_not_here_says_what_to_use(name: str, installed: None) -> None:
    with pytest.raises(ModuleNotFoundError, match=rf"No module named '{name}': it is a compiled .* Use ") as caught:
        importlib.import_module(name)
    assert caught.value.name == name
    assert importlib.util.find_spec(name) is None  # so scripts ask whether it is there


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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "asked", "told"),
    [
        ([], "O2", "__main__ O2 torch.float16"),
        (["--dtype", "bfloat16"], "O2", "__main__ O2 torch.bfloat16"),
        (["--opt-level", "o0"], "O2", "__main__ O2 torch.float32"),
    ],
)
def test_run(tmp_path: Path, options: list[str], asked: str, told: str) -> None:
    script, out = tmp_path / "train.py", tmp_path / "out.txt"
    script.write_text(SCRIPT)
    python("-m", "halfstep", "run", *options, str(script), "--opt-level", asked, str(out)).check_returncode()
    assert out.read_text().startswith(told)


# ---- the rest of the tree


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [4, (4,), [3, 4]], ids=str)
def test_normalization(shape: Any, inputs: torch.dtype, weights: torch.dtype) -> None:
    from halfstep.apex.normalization import fused_layer_norm as ours

    from halfstep.apex import normalization

    dims = [shape] if isinstance(shape, int) else list(shape)
    x = torch.linspace(-1, 1, 24).view(2, 3, 4).to(inputs)
    weight = torch.linspace(1, 2, 12).view(3, 4)[-1 if len(dims) == 1 else slice(None)].to(weights)
    bias = weight - 1
    layer = F.layer_norm(x.double(), dims, weight.double(), bias.double(), 1e-6)
    rms = F.rms_norm(x.double(), dims, weight.double(), 1e-6)
    found = [
        (ours.fused_layer_norm_affine(x, weight, bias, shape), layer, inputs),
        (ours.mixed_dtype_fused_layer_norm_affine(x, weight, bias, shape), layer, weights),
        (ours.fused_rms_norm_affine(x, weight, shape), rms, inputs),
        (ours.mixed_dtype_fused_rms_norm_affine(x, weight, shape), rms, weights),
        (ours.manual_rms_norm(x, dims, weight, 1e-6), rms, weights),
        (ours.manual_rms_norm(x, dims, None, 1e-6), F.rms_norm(x.double(), dims, None, 1e-6), inputs),
        (ours.fused_layer_norm(x, shape), F.layer_norm(x.double(), dims, None, None, 1e-6), inputs),
        (ours.fused_rms_norm(x, shape), F.rms_norm(x.double(), dims, None, 1e-6), inputs),
    ]
    for prefix, dtype in (("", inputs), ("Mixed", weights)):
        for kind, exact in (("Layer", layer), ("RMS", rms)):
            module = getattr(normalization, f"{prefix}Fused{kind}Norm")(shape).to(weights)
            module.load_state_dict({"weight": weight, "bias": bias} if kind == "Layer" else {"weight": weight})
            found.append((module(x), exact, dtype))
    for y, exact, dtype in found:
        assert y.dtype is dtype
        torch.testing.assert_close(y.double(), exact, atol=0.02, rtol=0.02)


def test_mlp() -> None:
    from halfstep.apex.mlp import MLP

    module = MLP([4, 8, 2])
    x = torch.randn(3, 4)
    hidden = torch.relu(F.linear(x, module.weight_0, module.bias_0))
    assert torch.equal(module(x), torch.relu(F.linear(hidden, module.weight_1, module.bias_1)))
    assert [name for name, _ in MLP([4, 2], bias=False).named_parameters()] == ["weight_0"]


def test_fused_dense() -> None:
    from halfstep.apex.fused_dense import FusedDense, FusedDenseGeluDense

    x, module = torch.randn(3, 4), FusedDenseGeluDense(4, 8, 2)
    expected = F.linear(F.gelu(F.linear(x, module.weight1, module.bias1)), module.weight2, module.bias2)
    assert torch.equal(module(x), expected)
    assert isinstance(FusedDense(4, 2), nn.Linear)


@pytest.mark.parametrize(
    ("name", "stands_for"),
    [
        ("halfstep.apex.parallel.LARC", "halfstep.compat.apex.parallel.LARC"),
        ("halfstep.fp16_utils", "halfstep.compat.fp16_utils"),
        ("halfstep.fp16_utils.loss_scaler", "halfstep.compat.fp16_utils.loss_scaler"),
        ("halfstep.multi_tensor", "halfstep.compat.multi_tensor"),
        ("halfstep.multi_tensor.steps", "halfstep.compat.multi_tensor.steps"),
    ],
)
def test_a_public_path_is_the_module_itself(name: str, stands_for: str) -> None:
    assert importlib.import_module(name) is importlib.import_module(stands_for)


@pytest.mark.parametrize("name", ["halfstep.static.backend", "halfstep.parallel.multiproc"])
def test_a_public_module_can_be_imported(name: str) -> None:
    assert importlib.import_module(name).__all__


def test_a_module_runs_under_its_second_name() -> None:
    spec = importlib.util.find_spec("halfstep.apex.parallel.multiproc")
    assert spec is not None
    assert spec.origin is not None
    assert spec.loader.get_code(spec.name).co_filename == spec.origin  # type: ignore[union-attr]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("halfstep.fp16_utils.nothing")
