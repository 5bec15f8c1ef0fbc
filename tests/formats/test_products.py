"""The products of linear layers with rounded operands: against float64, torch's own fp8 kernels, and in training."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from halfstep import amp, optimizers
from halfstep.core.errors import ArgumentValueError, UsageError
from halfstep.formats import torchao_products
from halfstep.formats.format import Format
from halfstep.formats.layers import recipe_of
from halfstep.formats.quantize import quantize, round_to
from halfstep.formats.recipe import RECIPES, Recipe
from tests.support.processes import one_rank

BY_DYNAMO = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
"""Dynamo makes an instance of an autograd function while it traces one (torch 2.13)."""

TOKENS, INPUTS, OUTPUTS = 96, 128, 64


@torch.no_grad()
def decibels(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The signal-to-noise ratio."""
    signal, noise = exact.double().square().sum(), (found.double() - exact.double()).square().sum()
    return float(10 * torch.log10(signal / noise))


def rounded(tensor: torch.Tensor, format: Format | None, dim: int) -> torch.Tensor:
    return (tensor if format is None else round_to(tensor, format, dim=dim)).double()


def run(call: Any, x: torch.Tensor, grad: torch.Tensor, layer: nn.Linear | None = None) -> tuple[torch.Tensor, ...]:
    """The result of a layer, and the gradients of its input, weight and bias."""
    x, layer = x.detach().requires_grad_(), call if layer is None else layer
    layer.zero_grad()
    y = call(x)
    y.backward(grad)
    return y.detach(), *(each.grad for each in (x, layer.weight, layer.bias))  # type: ignore[misc]


def layer_with(recipe: Recipe | str, inputs: int = INPUTS, outputs: int = OUTPUTS) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs)
    amp.set_products(layer, recipe)
    return layer


# ---- the numbers


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "quartet2"])
def test_each_product_is_the_product_of_its_rounded_operands(name: str) -> None:
    recipe = RECIPES[name].replace(hadamard=0)
    layer = layer_with(recipe)
    x, grad = torch.randn(TOKENS, INPUTS), torch.randn(TOKENS, OUTPUTS)
    torch.manual_seed(1)  # of stochastic rounding
    found = run(layer, x, grad)
    torch.manual_seed(1)
    weight = layer.weight.detach()
    (fx, fw), (dg, dw), (wg, wx) = recipe.forward, recipe.input_gradient, recipe.weight_gradient
    expected = [
        rounded(x, fx, -1) @ rounded(weight, fw, -1).T + layer.bias.detach().double(),
        rounded(grad, dg, -1) @ rounded(weight, dw, 0),
        rounded(grad, wg, 0).T @ rounded(x, wx, 0),
        grad.double().sum(0),
    ]
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["fp8_tensorwise", "mxfp8"])
def test_a_16_bit_product_is_rounded_once(name: str, dtype: torch.dtype) -> None:
    layer = layer_with(name).to(dtype)
    x, grad = torch.randn(TOKENS, INPUTS).to(dtype), torch.randn(TOKENS, OUTPUTS).to(dtype)
    wide = layer_with(name)
    wide.load_state_dict({key: value.float() for key, value in layer.state_dict().items()})
    for mine, exact in zip(run(layer, x, grad), run(wide, x.float(), grad.float()), strict=True):
        assert mine.dtype is dtype
        assert torch.equal(mine, exact.to(dtype))


@pytest.mark.exhaustive
def test_the_gradients_of_quartet2_are_right_in_the_mean() -> None:
    """In the mean over random signs and scales they are the products of what the forward product has rounded."""
    layer, x, grad = layer_with("quartet2", 192), torch.randn(160, 192), torch.randn(160, OUTPUTS)
    low = [rounded(each, Format.parse("nvfp4,scale_rule=4over6"), -1) for each in (x, layer.weight.detach())]
    exact = low[0] @ low[1].T + layer.bias.detach().double(), grad.double() @ low[1], grad.double().T @ low[0]
    found = [run(layer, x, grad)[:3] for _ in range(64)]
    assert decibels(found[0][0], exact[0]) > 120
    for at in (1, 2):
        passes = torch.stack([each[at] for each in found])
        assert decibels(passes.mean(0), exact[at]) > decibels(passes[0], exact[at]) + 15  # 18 dB less noise
        assert decibels(passes[0], exact[at]) > 15.5
        assert not torch.equal(passes[0], passes[1])


@pytest.mark.parametrize("block", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_agrees_with_torchs_own_fp8_kernel(block: str, dtype: torch.dtype) -> None:
    format = Format.parse("fp8_e4m3").replace(block=block)
    layer = layer_with(Recipe((format, format)))
    layer.bias = None
    x = torch.randn(TOKENS, INPUTS)
    (a, scale_a), (b, scale_b) = quantize(x, format), quantize(layer.weight.detach(), format)
    scales: Any = (scale_a, scale_b if block == "tensor" else scale_b.T)  # type: ignore[union-attr]
    try:
        theirs = torch._scaled_mm(a, b.T, *scales, out_dtype=dtype)
    except RuntimeError as error:  # 2.11: scales of rows; 2.13: after a bfloat16 product, with ONEDNN_MAX_CPU_ISA=AVX2
        pytest.skip(f"torch has no such kernel here: {error}")
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        mine = layer(x).detach()
    assert mine.dtype is dtype
    step = torch.finfo(dtype).eps * theirs.float().abs() + 1e-5  # the order of the sum, or one rounding
    assert bool(((mine - theirs).float().abs() <= step).all())
    assert decibels(mine, theirs) > (100 if dtype is torch.float32 else 60)


# ---- torchao


@pytest.fixture
def torchao() -> None:
    """torchao logs, and warns, when it is imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao")
    if not importlib.metadata.version("torchao").startswith("0.18."):
        pytest.skip("needs torchao 0.18")


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mxfp8_hp_wgrad", "fp8_rowwise_hp_wgrad", "fp8_tensorwise", "fp8_rowwise", "mxfp8"])
def test_the_kernels_agree_with_the_emulation(name: str, dtype: torch.dtype) -> None:
    layers = [layer_with(f"{name}{backend}").to(dtype) for backend in ("", "; backend=torchao")]
    x, grad = torch.randn(2, 45, INPUTS).to(dtype), torch.randn(2, 45, OUTPUTS).to(dtype)  # tokens are padded
    found = [run(layer, x, grad) for layer in layers]
    for exact, mine in zip(*found, strict=True):
        assert mine.dtype is dtype
        assert decibels(mine, exact) > (100 if dtype is torch.float32 else 60)
        assert bool(((mine - exact).abs() <= 1e-4 + torch.finfo(dtype).eps * exact.abs()).all())


@BY_DYNAMO
@pytest.mark.exhaustive
@pytest.mark.usefixtures("torchao")
def test_the_kernels_run_compiled_and_in_a_block_and_change_while_a_model_trains() -> None:
    layer, a, b = layer_with("mxfp8; backend=torchao"), torch.randn(2, 32, INPUTS), torch.randn(2, INPUTS, 32)
    assert torch.equal(torch.compile(layer, backend="aot_eager")(a), layer(a))
    for name in ("fp8_tensorwise", "fp8_rowwise", "mxfp8"):
        found = []
        for backend in ("", "; backend=torchao"):
            with amp.auto_cast(level="O0", products=f"{name}{backend}"):
                found.append(torch.stack([a @ b, (a[None] @ b[None])[0]]))
        assert decibels(*found) > 100
    amp.set_products(layer, None, passes="forward")
    assert recipe_of(layer).backend == "torchao"  # type: ignore[union-attr]
    delayed = layer_with("fp8_tensorwise; amax=delayed")
    amp.set_products(delayed, None, passes="backward")
    assert recipe_of(delayed).amax == "delayed"  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8; hadamard=16", "fp8_tensorwise; amax=delayed", "fp4_backward"])
def test_a_recipe_without_kernels_is_refused(recipe: str) -> None:
    with pytest.raises(ArgumentValueError, match="For other recipes leave out backend="):
        Recipe.parse(f"{recipe}; backend=torchao")
    with pytest.raises(ArgumentValueError, match='backend=\'cuda\' must be "emulate" or "torchao"'):
        Recipe.parse("mxfp8; backend=cuda")


@pytest.mark.parametrize("version", ["0.17.0", ""])
def test_a_torchao_that_was_not_tested_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str) -> str:
        if not version:
            raise importlib.metadata.PackageNotFoundError
        return version

    torchao_products._mx_functions.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", found)
    with pytest.raises(UsageError, match=rf"has {version or 'none'}\. pip install .*torchao"):
        amp.set_products(nn.Linear(64, 64), "mxfp8; backend=torchao")


def test_a_device_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    torchao_products.check_device(torch.device("cuda"), "fp8")
    for device, kind in (("cuda", "mxfp8"), ("mps", "fp8")):
        with pytest.raises(UsageError, match=f"no {kind} product on {device}: it needs a CPU, or a CUDA device"):
            torchao_products.check_device(torch.device(device), kind)


def test_op_casts_do_not_round_the_operands_again() -> None:
    """At O1 the product would otherwise read bfloat16 numbers, which few numbers of NVFP4 are."""
    layer = layer_with("nvfp4")
    x = torch.randn(TOKENS, INPUTS)
    expected = layer(x).bfloat16()
    for casts in (amp.auto_cast(dtype="bfloat16"), torch.autocast("cpu", torch.bfloat16)):
        with casts:
            assert torch.equal(layer(x), expected)
    with amp.auto_cast(dtype="bfloat16", custom_black_list=["linear"]):
        assert layer(x).dtype is torch.float32
    with amp.auto_cast(dtype="bfloat16"), torch.autocast("cpu", enabled=False):
        assert layer(x).dtype is torch.float32


def test_the_hadamard_transform_changes_no_product_and_spreads_outliers() -> None:
    x, grad = torch.randn(TOKENS, INPUTS), torch.randn(TOKENS, OUTPUTS)
    exact = run(layer_with(Recipe((Format.parse("mxfp8"), None))), x, grad)[2]
    format = Format.parse("mxfp8")
    only = run(layer_with(Recipe((format, None), hadamard=32)), x, grad)[2]
    assert decibels(only, exact) > 120
    x[::16] *= 100
    plain = nn.Linear(INPUTS, OUTPUTS)
    reference = run(plain, x, grad)[2]
    fp4 = (Format.parse("nvfp4"),) * 2
    without, spread = (run(layer_with(Recipe(weight_gradient=fp4, hadamard=n)), x, grad)[2] for n in (0, 16))
    assert decibels(without, reference) < decibels(spread, reference) or decibels(spread, reference) > 15


@pytest.mark.parametrize("tokens", [1, 5, 33])
@pytest.mark.parametrize("name", RECIPES)
def test_any_number_of_tokens_is_padded_with_zeros(name: str, tokens: int) -> None:
    layer = layer_with(name, 64, 64)
    plain = nn.Linear(64, 64)
    plain.load_state_dict(layer.state_dict())
    x, grad = torch.randn(1, tokens, 64), torch.randn(1, tokens, 64)
    found, exact = run(layer, x, grad), run(plain, x, grad)
    for mine, reference, least in zip(found, exact, (13, 12, 9), strict=False):
        assert mine.shape == reference.shape
        assert decibels(mine, reference) > least
    y, dx, *_ = run(layer, x[:, :0], grad[:, :0])
    assert y.shape == dx.shape == (1, 0, 64)


def test_a_gradient_that_is_not_needed_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.formats import products

    products_run = []
    own = products._run
    layer = layer_with("fp8_tensorwise")
    monkeypatch.setattr(products, "_run", lambda *args: products_run.append(args[4]) or own(*args))
    layer(torch.randn(4, INPUTS)).sum().backward()
    assert len(products_run) == 2  # no gradient of the input
    layer.weight.requires_grad_(False)
    layer(torch.randn(4, INPUTS, requires_grad=True)).sum().backward()
    assert len(products_run) == 4  # no gradient of the weight


def test_delayed_scales_come_from_the_tensors_before() -> None:
    layer, current = layer_with("fp8_tensorwise; amax=delayed"), layer_with("fp8_tensorwise")
    x = torch.randn(TOKENS, INPUTS)

    def trained_on(x: torch.Tensor) -> torch.Tensor:
        y = layer(x)
        y.sum().backward()
        return y.detach()

    assert torch.equal(trained_on(x), current(x))  # the first tensor has none before it
    assert torch.equal(trained_on(x * 0.5), layer(x * 0.5))
    assert not torch.equal(trained_on(x * 0.3), current(x * 0.3))
    assert decibels(trained_on(x * 4), current(x * 4)) < 15  # saturates
    assert decibels(trained_on(x * 4), current(x * 4)) > 25  # and the next does not
    for _ in range(16):
        trained_on(x * 0.3)
    trained_on(torch.full_like(x, torch.inf))  # spoils no scale
    trained_on(x[:0])
    assert torch.equal(layer(x * 0.3), current(x * 0.3))


def test_delayed_scales_do_not_change_in_an_evaluation_or_a_second_forward_pass() -> None:
    layer = layer_with("fp8_tensorwise; amax=delayed")
    x = torch.randn(TOKENS, INPUTS)
    layer(x).sum().backward()
    expected = run(layer, x * 2, torch.ones(TOKENS, OUTPUTS))
    layer = layer_with("fp8_tensorwise; amax=delayed")
    layer(x).sum().backward()
    with torch.no_grad():
        layer.eval()(x * 100)
    layer.train()(x * 100)  # no backward pass
    found = run(lambda t: checkpoint(layer, t, use_reentrant=False), x * 2, torch.ones(TOKENS, OUTPUTS), layer)
    assert all(map(torch.equal, found, expected))


# ---- transforms of functions


def test_torch_func_gives_each_sample_its_own_products() -> None:
    layer = layer_with("fp8_tensorwise")
    xs = torch.randn(3, 8, INPUTS) * torch.tensor([1.0, 10.0, 1e-3]).view(3, 1, 1)
    assert torch.equal(torch.vmap(layer)(xs), torch.stack([layer(x) for x in xs]))

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, params, (x,)).square().sum()

    params = {name: param.detach() for name, param in layer.named_parameters()}
    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, xs)
    for i, x in enumerate(xs):
        layer.zero_grad()
        layer(x).square().sum().backward()
        for name, param in layer.named_parameters():
            torch.testing.assert_close(found[name][i], param.grad)


@pytest.mark.exhaustive
def test_a_graph_computes_other_inputs_than_the_recorded_one() -> None:
    layer, x = layer_with("mxfp8").requires_grad_(False), torch.randn(8, INPUTS)
    exported = torch.export.export(layer, (x[:3],), dynamic_shapes=({0: torch.export.Dim("tokens")},)).module()
    for graph in (make_fx(layer)(torch.ones_like(x)), exported):
        torch.testing.assert_close(graph(x), layer(x))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_is_refused_with_what_to_do() -> None:
    model, x = nn.Sequential(layer_with("mxfp8")), torch.randn(4, INPUTS)
    block = amp.auto_cast(products="mxfp8")(lambda x: x @ x.T)
    for call in (lambda: torch.jit.script(model), lambda: torch.jit.trace(model, x), lambda: torch.jit.trace(block, x)):
        with pytest.raises(UsageError, match=r"TorchScript has no products.*set_products\(model, None\)"):
            call()
    amp.set_products(model, None)
    assert torch.jit.script(model)(x).shape == (4, OUTPUTS)


def test_a_second_derivative_is_refused_and_not_wrong() -> None:
    layer = layer_with("mxfp8")
    x = torch.randn(TOKENS, INPUTS, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_the_rows_of_a_nested_tensor_are_those_of_its_parts(layout: torch.layout) -> None:
    layer, parts = layer_with("mxfp8"), [torch.randn(3, INPUTS), torch.randn(5, INPUTS)]
    nested: Any = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    found = layer(nested)
    expected = [layer(part) for part in parts]
    torch.testing.assert_close(list(found.unbind()), expected)  # the order of sums depends on the number of rows
    sum(part.sum() for part in found.unbind()).backward()
    assert nested.grad is not None


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
def test_inputs_that_are_no_matrices_of_numbers() -> None:
    layer = layer_with("mxfp8")
    x = torch.eye(INPUTS)
    assert torch.equal(layer(x.to_sparse()), layer(x))
    assert layer_with("mxfp8", inputs=0)(torch.ones(4, 0)).shape == (4, OUTPUTS)
    for wrong in (x.long(), x.cfloat()):
        with pytest.raises(RuntimeError, match="same dtype"):
            layer(wrong)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8_tensorwise"])
def test_an_evaluation_in_inference_mode_leaves_nothing_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came before the first step of training, or has the larger batches."""
    from halfstep.formats import products

    monkeypatch.setattr(products, "_scratch", products._Scratch())
    layer, x = layer_with(name).bfloat16(), torch.randn(TOKENS, INPUTS, dtype=torch.bfloat16)
    with torch.inference_mode():
        evaluated = layer(x)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, evaluated)
    assert layer.weight.grad is not None


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("where", ["FakeTensorMode", "meta"])
def test_tensors_without_numbers_have_shapes(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfstep.formats import products

    monkeypatch.setattr(products, "_scratch", products._Scratch())
    products._hadamard.cache_clear()
    with FakeTensorMode() if where == "FakeTensorMode" else torch.device("meta"):
        layer, x = layer_with(name), torch.randn(TOKENS, INPUTS, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        rounding = round_to(x, "nvfp4,rounding=stochastic")
    assert y.shape == (TOKENS, OUTPUTS)
    assert x.grad is not None
    assert x.grad.shape == x.shape == rounding.shape
    real = run(layer_with(name), torch.randn(TOKENS, INPUTS), torch.randn(TOKENS, OUTPUTS))  # no buffer is a fake
    assert all(type(each) is torch.Tensor and each.isfinite().all() for each in real)


# ---- overflows


@pytest.mark.parametrize("name", [*RECIPES, "fp8_tensorwise; amax=delayed"])
def test_an_overflow_skips_the_step_in_which_it_happens(name: str) -> None:
    """A cast to e4m3 makes inf the greatest number, so that it would never reach the check for overflows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    amp.set_products(model, name)
    scaler = amp.GradScaler(init_loss_scaling=1.0, decr_every_n_nan_or_inf=None, collapse_after=None)
    bad = torch.tensor([float("inf"), float("-inf"), float("nan")])
    skipped = []
    for step in range(24):
        optimizer.zero_grad()
        x, grad = torch.randn(16, 64), torch.randn(16, 64)
        if step % 2:
            (x, grad)[step // 2 % 2].view(-1)[torch.randint(1024, ())] = bad[step % 3]
        scaler.scale((model(x) * grad).sum()).backward()
        skipped.append(not scaler.step(optimizer))
        scaler.update()
    assert skipped == [bool(step % 2) for step in range(24)]
    assert all(param.isfinite().all() for param in model.parameters())


# ---- training


class Network(nn.Module):
    """Four layers; the two in the middle have formats."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = (32, 64, 64, 64, 8)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.checkpoints = checkpoints

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layers[2](F.relu(self.layers[1](x))))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.layers[0](x))
        x = checkpoint(self._middle, x, use_reentrant=False) if self.checkpoints else self._middle(x)
        return self.layers[3](x)  # type: ignore[no-any-return]


def trained(level: str, kind: Any, recipe: str | None, way: str = "") -> tuple[list[float], nn.Module]:
    """The losses of some steps, and the model."""
    model = Network(checkpoints=way == "checkpoints")
    optimizer = kind(model.parameters(), lr=0.01)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, dtype="bfloat16", products=recipe, verbosity=0)
    call: Any = {
        "compiled": functools.partial(torch.compile, backend="aot_eager"),
        "DDP": nn.parallel.DistributedDataParallel,
    }.get(way, lambda m: m)(model)
    torch.manual_seed(2)
    x, y, losses = torch.randn(64, 32), torch.randn(64, 8), []
    parts = 2 if way == "accumulation" else 1
    for _ in range(4):
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = F.mse_loss(call(a), b) / parts
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    amp.deactivate()
    return losses, model


@BY_DYNAMO
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, optimizers.FusedAdam])
@pytest.mark.parametrize(
    "way", ["accumulation", "checkpoints", "DDP", pytest.param("compiled", marks=pytest.mark.exhaustive)]
)
def test_training_is_the_same_in_each_way(level: str, kind: Any, way: str) -> None:
    losses, model = trained(level, kind, "fp8_rowwise")
    with one_rank():
        others, other = trained(level, kind, "fp8_rowwise", way)
    if way == "accumulation":
        assert others != losses
        assert others[-1] < others[0]
    else:
        assert others == losses
        torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)
    plain, _ = trained(level, kind, None)
    assert plain != losses
    assert abs(plain[-1] - losses[-1]) < 0.02 * plain[-1]


@BY_DYNAMO
@pytest.mark.exhaustive
def test_formats_change_while_a_model_trains() -> None:
    model = Network()
    amp.set_products(model, "nvfp4; layers=all; last_blocks=0")
    x = torch.randn(16, 32)
    plain = Network()
    compiled = torch.compile(model, backend="eager")
    assert not torch.equal(model(x), plain(x))
    assert torch.equal(compiled(x), model(x))
    amp.set_products(model, None, passes="forward")
    assert torch.equal(model(x), plain(x))
    assert torch.equal(compiled(x), model(x))
    for each in (model, plain):
        each(x).square().sum().backward()
    assert not torch.equal(model.layers[1].weight.grad, plain.layers[1].weight.grad)  # type: ignore[arg-type, union-attr]
    amp.set_products(model, None)
    model.zero_grad()
    model(x).square().sum().backward()
    assert torch.equal(model.layers[1].weight.grad, plain.layers[1].weight.grad)  # type: ignore[arg-type, union-attr]


# ---- a block


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_block_rounds_the_operands_of_every_product(level: str) -> None:
    model, chosen = Network(checkpoints=True), Network()
    amp.set_products(chosen, "nvfp4; layers=all; last_blocks=0; hadamard=0")
    model.layers[3], chosen.layers[3] = nn.Identity(), nn.Identity()
    x = torch.randn(16, 32)
    casts = {"level": level, "dtype": "bfloat16"}
    losses = []
    for each, options in ((model, {"products": "nvfp4; hadamard=0"}), (chosen, {})):
        torch.manual_seed(3)
        with amp.auto_cast(**casts, **options):  # type: ignore[arg-type]
            y = each(x)
        y.float().square().sum().backward()
        losses.append(y)
    assert torch.equal(*losses)
    assert losses[0].dtype is (torch.bfloat16 if level == "O1" else torch.float32)
    weights = zip(model.parameters(), chosen.parameters(), strict=True)
    assert all(torch.equal(mine.grad, theirs.grad) for mine, theirs in weights)  # type: ignore[arg-type]
    with amp.auto_cast(products="nvfp4", enable=False):
        assert torch.equal(model(x), Network.forward(model, x))


def test_the_products_of_a_block() -> None:
    a, b = torch.randn(4, 32, 64), torch.randn(4, 64, 32)
    format = Format.parse("mxfp8")
    exact = round_to(a, format) @ round_to(b, format, dim=-2)
    scope = amp.auto_cast(level="O0", products="mxfp8")
    with scope:
        found = [a @ b, torch.bmm(a, b), a.matmul(b), torch.matmul(a, other=b), a[0] @ b[0], a[0].mm(mat2=b[0])]
        found += [F.linear(a[0], b[0].T), a @ b[0], F.linear(input=a[0], weight=b[0].T, bias=torch.zeros(32))]
        others = [a[:, :, :5] @ b[:, :5], a.double() @ b.double(), a[0, 0] @ b[0]]
        heads = [a[None] @ b[None], a[:, None] @ b, a[0] @ b]  # of attention
        for wrong in (lambda: torch.mm(a, b[0]), lambda: torch.bmm(a, b[0]), lambda: torch.bmm(a, b[:2])):
            with pytest.raises(RuntimeError):
                wrong()
    first, second = round_to(a, format), round_to(b, format, dim=-2)
    expected = [exact] * 4 + [exact[0]] * 3 + [first @ second[0], exact[0]]
    torch.testing.assert_close(heads, [exact[None], first[:, None] @ second, first[0] @ second])
    torch.testing.assert_close(found, expected)
    plain = [a[:, :, :5] @ b[:, :5], a.double() @ b.double(), a[0, 0] @ b[0]]
    assert all(map(torch.equal, others, plain))  # sizes, dtypes and shapes that do not fit


@BY_DYNAMO
@pytest.mark.exhaustive
def test_the_products_of_a_compiled_block() -> None:
    a, scope = torch.randn(4, 32, 64), amp.auto_cast(level="O0", products="mxfp8")
    layer = nn.Linear(64, 32)
    compiled = torch.compile(layer, backend="aot_eager")

    def inside(x: torch.Tensor) -> torch.Tensor:
        with amp.auto_cast(level="O0", products="mxfp8"):
            return layer(x)  # type: ignore[no-any-return]

    with scope, torch.no_grad():
        assert torch.equal(compiled(a), layer(a))
        assert torch.equal(torch.compile(inside, backend="aot_eager", fullgraph=True)(a), layer(a))
    with torch.no_grad():
        assert torch.equal(compiled(a), layer(a))


def test_a_sum_with_a_product_is_rounded_once() -> None:
    a, b, c = torch.randn(2, 32, 64), torch.randn(2, 64, 32), torch.randn(2, 32, 32)
    exact = round_to(a, "mxfp8") @ round_to(b, "mxfp8", dim=-2)
    with amp.auto_cast(level="O0", products="mxfp8"):
        found = [torch.baddbmm(c, a, b), c.baddbmm(a, batch2=b, alpha=2, beta=0.5), torch.baddbmm(c / 0, a, b, beta=0)]
        single = [torch.addmm(c[0, 0], a[0], b[0]), c[0].addmm(a[0], b[0], beta=3), torch.addmm(c[0], a[0], mat2=b[0])]
        misfit = torch.addmm(c[0], a[0, :, :5], b[0, :5])
        with pytest.raises(TypeError):
            torch.addmm(c[0], a[0])  # type: ignore[call-overload]
        with pytest.raises(RuntimeError, match="number of sizes"):
            torch.addmm(c, a[0], b[0])
    torch.testing.assert_close(found, [c + exact, 0.5 * c + 2 * exact, exact])
    torch.testing.assert_close(single, [c[0, 0] + exact[0], 3 * c[0] + exact[0], c[0] + exact[0]])
    assert torch.equal(misfit, torch.addmm(c[0], a[0, :, :5], b[0, :5]))
    with amp.auto_cast(dtype="bfloat16", products="mxfp8"):
        assert torch.equal(torch.addmm(c[0], a[0], b[0]), (c[0] + exact[0]).bfloat16())


def test_each_expert_has_scales_of_its_own() -> None:
    tokens, experts = torch.randn(40, 64, requires_grad=True), torch.randn(3, 64, 32, requires_grad=True)
    ends = torch.tensor([8, 8, 33], dtype=torch.int32)
    with amp.auto_cast(level="O0", products="fp8_tensorwise"):
        found = F.grouped_mm(tokens, experts, offs=ends)
        stacked = F.grouped_mm(tokens.view(5, 8, 64)[:3], experts)
    found.sum().backward()
    parts = [(tokens[:8], experts[0]), (tokens[8:33], experts[2])]
    expected = [round_to(x, "fp8_e4m3") @ round_to(w, "fp8_e4m3") for x, w in parts]
    torch.testing.assert_close(found, torch.cat([*expected, torch.zeros(7, 32)]))
    torch.testing.assert_close(stacked, round_to(tokens.view(5, 8, 64)[:3], "fp8_e4m3") @ round_to(experts, "fp8_e4m3"))
    assert tokens.grad is not None
    assert experts.grad is not None
    assert tokens.grad[33:].abs().sum() == experts.grad[1].abs().sum() == 0
    assert decibels(tokens.grad[:8], experts[0].detach().sum(1).expand(8, -1)) > 20


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"is_causal": True}, {"scale": 0.5}, {"attn_mask": torch.ones(32, 64).tril(8).bool()}),
        *({"enable_gqa": True}, {"attn_mask": torch.zeros(32, 64).index_fill(0, torch.tensor(3), -torch.inf)}),
    ],
    ids=["plain", "causal", "scale", "mask", "gqa", "a query that reads nothing"],
)
def test_attention_is_rounded_where_a_recipe_asks_for_it(options: dict[str, Any]) -> None:
    keys = 2 if "enable_gqa" in options else 4
    q, k, v = torch.randn(2, 4, 32, 64, requires_grad=True), torch.randn(2, keys, 64, 64), torch.randn(2, keys, 64, 32)
    plain = F.scaled_dot_product_attention(q, k, v, **options)
    exact = Recipe(attention=True)
    for recipe, least, most in (("mxfp8; attention=True", 20, 40), (exact, 90, 1000), ("mxfp8", 1000, 1e9)):
        with amp.auto_cast(level="O0", products=recipe):
            found = F.scaled_dot_product_attention(q, k, v, **options)
            spoiled = F.scaled_dot_product_attention(q * torch.nan, k, v, **options)
        assert least < decibels(found, plain) < most or (least == 1000 and torch.equal(found, plain))
        assert torch.autograd.grad(found.sum(), q)[0].isfinite().all()
        assert spoiled[..., 4:, :].isnan().all()


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_the_linear_products_in_functions_of_torch_are_rounded_too(level: str) -> None:
    attention, x = nn.MultiheadAttention(64, 4, batch_first=True), torch.randn(2, 32, 64)
    casts = {"level": level, "dtype": "bfloat16"}
    with amp.auto_cast(**casts):  # type: ignore[arg-type]
        plain = attention(x, x, x)[0]
    with amp.auto_cast(**casts, products="mxfp8"):  # type: ignore[arg-type]
        rounded = attention(x, x, x)[0]
    assert 20 < decibels(rounded, plain) < 35


def test_the_gradients_of_broadcast_matrices() -> None:
    a, b = torch.randn(32, 64, requires_grad=True), torch.randn(2, 3, 64, 32, requires_grad=True)
    with amp.auto_cast(level="O0", products="mxfp8"):
        (a @ b).square().sum().backward()
    found = [a.grad, b.grad]
    a.grad = b.grad = None
    (a @ b).square().sum().backward()
    assert all(decibels(mine, exact) > 25 for mine, exact in zip(found, (a.grad, b.grad), strict=True))  # type: ignore[arg-type]


# ---- the example


@pytest.mark.exhaustive
def test_the_example_trains_in_each_precision(tmp_path: Path) -> None:
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples/low_bit_language_model/main.py"))["main"]
    small = ["--steps", "12", "--width", "64", "--time", "32", "--bf16-from", "9", "--device", "cpu"]
    losses = main([*small, "--recipe", "all", "--picture", str(tmp_path / "losses.svg")])
    assert list(losses) == ["fp32", "bf16", *RECIPES]
    assert all(abs(loss / losses["fp32"] - 1) < 0.03 for loss in losses.values())
    assert len(set(losses.values())) == len(losses)
    assert (tmp_path / "losses.svg").read_text().count("<polyline") == len(losses)
