"""16-bit products in fp32 kernels: the numbers of a matrix unit, forward and backward, at every level and face."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from halfstep import Model, OpLists, amp, static
from halfstep.casting import config, emulation
from halfstep.casting.scope import OpCasting
from halfstep.core import hardware
from halfstep.core.oplists.tables import KINDS
from tests.support.backends import needs_compiler
from tests.support.worlds import BF16, FP16, FP32, HALVES, scaled_backward, start_amp, step_and_clear, with_optimizer

INDUCTOR = "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"  # torch 2.13 says so of itself

Call = Callable[..., torch.Tensor]
CALLS: dict[str, tuple[Call, list[tuple[int, ...]]]] = {
    "linear": (F.linear, [(16, 64), (32, 64), (32,)]),
    "matmul": (torch.matmul, [(16, 64), (64, 32)]),
    "operator": (lambda a, b: a @ b, [(16, 64), (64, 32)]),
    "bmm": (torch.bmm, [(3, 16, 64), (3, 64, 8)]),
    "addmm": (torch.addmm, [(16, 8), (16, 64), (64, 8)]),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [(3, 16, 64), (3, 8, 64)]),
    "conv1d": (F.conv1d, [(2, 8, 16), (4, 8, 3), (4,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(2, 8, 9, 9), (4, 8, 3, 3), (4,)]),
    "grouped conv2d": (lambda x, w: F.conv2d(x, w, groups=4), [(2, 8, 9, 9), (4, 2, 3, 3)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 8, 5, 5), (8, 4, 3, 3)]),
}
ATTENTION: dict[str, tuple[Call, list[tuple[int, ...]]]] = {
    "attention": (F.scaled_dot_product_attention, [(2, 3, 16, 8)] * 3),
    "causal attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 3, 16, 8)] * 3),
}


def inputs(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    """fp32 tensors whose values are numbers of a 16-bit dtype."""
    return [torch.randn(shape).to(dtype).float() for shape in shapes]


def scope(dtype: torch.dtype, emulate: bool = True) -> amp.auto_cast:
    return amp.auto_cast(dtype=dtype, emulate=emulate)


def gradients(call: Call, tensors: list[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = call(*leaves)
    return [out, *torch.autograd.grad((out * weight.to(out.dtype)).sum(), leaves)]


def off_by_more_than_rounding(found: torch.Tensor, exact: torch.Tensor, size: torch.Tensor, dtype: torch.dtype) -> Any:
    """Where a result is further from the exact one than one rounding, and what fp32 sums of this size may lose."""
    half_ulp = 0.5 * torch.finfo(dtype).eps * exact.abs().clamp(min=torch.finfo(dtype).tiny)
    slack = 1e-5 * size
    return ((found.double() - exact).abs() > half_ulp + slack).sum().item()


# ---- values


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CALLS)
def test_one_rounding_of_the_exact_products(name: str, dtype: torch.dtype) -> None:
    """Forward and every gradient, against float64."""
    call, shapes = CALLS[name]
    tensors = inputs(shapes, dtype)
    weight = torch.randn_like(call(*tensors)).to(dtype).float()
    with scope(dtype):
        found = gradients(call, tensors, weight)
    assert found[0].dtype is dtype
    exact = gradients(call, [t.double() for t in tensors], weight.double())
    size = gradients(call, [t.double().abs() for t in tensors], weight.double().abs())
    for got, want, most in zip(found, exact, size, strict=True):
        assert off_by_more_than_rounding(got, want, most, dtype) == 0
        assert torch.equal(got.to(dtype).to(got.dtype), got), "a number that the 16-bit dtype does not have"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", [*CALLS, *ATTENTION])
def test_agrees_with_the_units_of_this_machine(name: str, dtype: torch.dtype) -> None:
    """Within 2 ulp of what units compute in 16 bits, and 4 of what torch's loops compute where there are none.

    Where positive and negative terms cancel, the order of the additions shows, so an ulp is that of a quarter of the
    sum of magnitudes, if that is more. For attention, whose probabilities torch rounds in between, it is that of the
    largest number of a head.
    """
    call, shapes = (CALLS | ATTENTION)[name]
    kind = "attention" if name in ATTENTION else "convolution" if "conv" in name else "product"
    limit = 2.0 if hardware.has_units(torch.device("cpu"), dtype, kind) else 4.0
    tensors = inputs(shapes, dtype)
    weight = torch.randn_like(call(*tensors)).to(dtype).float()
    with scope(dtype):
        found = gradients(call, tensors, weight)
    with scope(dtype, emulate=False):
        native = gradients(call, tensors, weight)
    magnitudes = gradients(call, [t.abs() for t in tensors], weight.abs())
    for got, want, most in zip(found, native, magnitudes, strict=True):
        largest = want.float().abs().amax((-2, -1), keepdim=True) if name in ATTENTION else most.float() / 4
        ulp = torch.finfo(dtype).eps * torch.maximum(want.float().abs(), largest).clamp(min=1e-3)
        assert ((got.float() - want.float()).abs() / ulp).max() <= limit


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_the_fp32_ones_with_rounded_edges(kind: type[nn.RNNBase], dtype: torch.dtype) -> None:
    layer = kind(8, 8, num_layers=2, bidirectional=True)
    rounded = copy.deepcopy(layer)
    for param in rounded.parameters():
        param.data = param.data.to(dtype).float()
    x = torch.randn(5, 3, 8)
    with scope(dtype):
        found, state = layer(x)
    expected, _ = rounded(x.to(dtype).float())
    assert found.dtype is dtype
    assert all(t.dtype is dtype for t in (state if isinstance(state, tuple) else (state,)))
    assert torch.equal(found, expected.to(dtype))
    found.float().sum().backward()
    assert all(torch.equal(p.grad, p.grad.to(dtype).float()) for p in layer.parameters())


def test_overflow_is_float16s() -> None:
    big = torch.full((2, 2), 300.0)
    with scope(FP16):
        assert torch.isinf(big @ big).all()
        layer = nn.Linear(2, 2)
        (layer(torch.ones(1, 2)).float() * 1e6).sum().backward()  # the gradient of 1e6 is no float16
    assert not layer.weight.grad.isfinite().any()


# ---- dtypes are what they are without


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.rnn, self.out = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x))).flatten(2).mT
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.out(self.rnn(x)[0][:, -1])


def data(dtype: torch.dtype = FP32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 2, 3, 3), torch.arange(8) % 3


def run(level: str, dtype: torch.dtype, emulate: bool, face: str) -> tuple[list[Any], list[torch.Tensor]]:
    torch.manual_seed(0)
    model, optimizer = with_optimizer(Everything(), torch.optim.SGD, lr=0.1)
    seen: list[Any] = []
    for name, module in model.named_children():
        module.register_forward_hook(
            lambda m, a, o, n=name: seen.append((n, (o[0] if isinstance(o, tuple) else o).dtype))
        )
    x, y = data()
    if face == "initialize":
        amp.initialize(model, optimizer, opt_level=level, dtype=dtype, loss_scale=128.0, verbosity=0, emulate=emulate)
    else:
        amp.decorate(model, optimizer, level="O2", dtype=dtype, emulate=emulate)
    for _ in range(3):
        if face == "initialize":
            loss = F.cross_entropy(model(x).float(), y)
            scaled_backward(loss, optimizer)
        else:
            with amp.auto_cast(level="O2", dtype=dtype, emulate=emulate):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
        step_and_clear(optimizer)
    seen.extend((name, p.dtype) for name, p in model.named_parameters())
    return seen, [loss, *(p.detach().float() for p in model.parameters())]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("face", "level"), [*(("initialize", f"O{i}") for i in range(4)), ("decorate", "O2")])
def test_dtypes_and_training_are_those_without_emulation(face: str, level: str, dtype: torch.dtype) -> None:
    (dtypes, values), (native_dtypes, native_values) = (run(level, dtype, emulate, face) for emulate in (True, False))
    assert dtypes == native_dtypes
    torch.testing.assert_close(values, native_values, rtol=0.05, atol=0.02)


class Products(TorchDispatchMode):
    """Notes the dtypes in which products run, below autograd: forward and backward."""

    NAMES = ("mm", "addmm", "bmm", "convolution", "convolution_backward", "mkldnn_rnn_layer")

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in self.NAMES:
            self.dtypes |= {t.dtype for t in args if isinstance(t, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("emulate", [True, False])
def test_no_product_runs_in_16_bits(emulate: bool, level: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 3))
    model, optimizer = start_amp(model, torch.optim.SGD, level, dtype=dtype, emulate=emulate, lr=0.1)
    x, y = data()
    with Products() as products:
        loss = F.cross_entropy(model(x).float(), y)
        scaled_backward(loss, optimizer)
    assert products.dtypes == ({FP32} if emulate else {dtype})


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", HALVES)
def test_model_emulates(dtype: torch.dtype) -> None:
    x, y = data()
    for level in ("O1", "O2"):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 3))
        model = Model(network)
        model.prepare(
            torch.optim.SGD(network.parameters(), lr=0.1),
            nn.CrossEntropyLoss(),
            amp_configs={"level": level, "dtype": dtype, "emulate": True},
        )
        with Products() as products:
            model.train_batch(x, y)
        assert products.dtypes == {FP32}


@pytest.mark.exhaustive
def test_graph_mode_emulates() -> None:
    x, y = data()
    program = static.capture(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 3)), F.cross_entropy, (x, y))
    sgd = torch.optim.SGD(program.parameters(), lr=0.1)
    static.amp.decorate(sgd, level="O2", dtype="bfloat16", emulate=True).minimize(program.loss)
    with Products() as products:
        static.Executor().run(program, dict(zip(program.feed_names, (x, y), strict=True)))
    assert products.dtypes == {FP32}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings(INDUCTOR)
@pytest.mark.parametrize(
    ("backend", "level", "dtype"),
    [
        *[("aot_eager", "O1", FP16), ("aot_eager", "O2", BF16), ("aot_eager", "O3", FP16)],
        pytest.param("inductor", "O1", BF16, marks=needs_compiler),
        pytest.param("inductor", "O2", FP16, marks=needs_compiler),
    ],
)
def test_compiled(dtype: torch.dtype, backend: str, level: str) -> None:
    """The rounding is there as well: Inductor would drop casts that it sees."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    amp.initialize(model, opt_level=level, dtype=dtype, verbosity=0, emulate=True)
    x = torch.randn(8, 16)
    outputs = []
    for run_ in (model, torch.compile(model, backend=backend, fullgraph=True)):
        y = run_(x)
        y.float().square().sum().backward()
        outputs.append([y.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad()
    for eager, fast in zip(*outputs, strict=True):
        assert eager.dtype is fast.dtype
        torch.testing.assert_close(fast, eager, rtol=2 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.filterwarnings(INDUCTOR)
def test_a_compiled_float16_overflow_is_seen() -> None:
    torch._dynamo.reset()

    def product(x: torch.Tensor) -> torch.Tensor:
        with amp.auto_cast(dtype=FP16, emulate=True):
            return F.relu(x @ x).float() / 1e6

    assert torch.isinf(torch.compile(product, fullgraph=True)(torch.full((2, 2), 300.0))).all()


# ---- where


@pytest.mark.parametrize("half", HALVES)
def test_gradients_of_opaque_casts_have_the_dtype_of_what_was_cast(half: torch.dtype) -> None:
    narrow, wide = torch.ones(2, dtype=half, requires_grad=True), torch.ones(2, requires_grad=True)
    (emulation._widen(narrow) * 3.0).sum().backward()
    (emulation._narrow(wide, half) * 3.0).sum().backward()
    for tensor, dtype in ((narrow, half), (wide, FP32)):
        assert tensor.grad is not None
        assert (tensor.grad.dtype, tensor.grad.tolist()) == (dtype, [3.0, 3.0])


@pytest.mark.parametrize("emulate", [True, False])
def test_a_casting_that_traced_code_makes_emulates_as_it_says(emulate: bool) -> None:
    made = config.CastingConfig(BF16, None, emulate=emulate)
    assert config._key_of(BF16, None, emulate=emulate) == made.key
    assert config._key_of(BF16, None, emulate=not emulate) != made.key


def lacking(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    """A machine whose CPU has no units for these classes of ops."""
    monkeypatch.setattr(emulation, "has_units", lambda device, dtype, kind: kind not in kinds)
    emulation._kinds.cache_clear()
    config.derive.cache_clear()


def test_only_the_classes_that_lack_units_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, "convolution")
    layers = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 3))
    with amp.auto_cast(dtype=BF16), Products() as products:
        layers[0](data()[0])
    assert products.dtypes == {FP32}
    with amp.auto_cast(dtype=BF16), Products() as products:
        layers[2](torch.randn(2, 4))
    assert products.dtypes == {BF16}


def test_what_has_units_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch)
    model = nn.Linear(2, 2)
    amp.initialize(model, opt_level="O3", dtype=BF16, verbosity=0)
    depth = []
    model.register_forward_hook(lambda *_: depth.append(torch._C._len_torch_function_stack()))
    for _ in range(5):
        model(torch.ones(1, 2))
    assert depth[3:] == [0, 0]  # after the first passes, in which ops are watched


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", ["AVX2", "avx512_core", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "ALL", ""])
def test_units_that_the_environment_takes_from_onednn(limit: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    units = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(units, True), raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    cpu = torch.device("cpu")
    assert hardware.has_units(cpu, BF16, kind) is (limit not in ("AVX2", "avx512_core"))
    fast = kind == "product" and limit in ("AVX512_CORE_FP16", "ALL", "")
    assert hardware.has_units(cpu, FP16, kind) is fast


def test_forms_that_write_into_a_tensor_are_left_alone() -> None:
    a, out = torch.randn(3, 3, dtype=BF16), torch.empty(3, 3, dtype=BF16)
    with OpCasting(BF16, emulate=True):
        torch.mm(a, a, out=out)
        assert (b := a.clone()).addmm_(a, a) is b
    assert torch.equal(out, torch.mm(a, a))
    assert torch.equal(b, a.addmm(a, a))


def test_only_floating_arguments_are_rounded() -> None:
    q = torch.randn(1, 2, 3, 8)
    mask = torch.tensor([True, False, True]).expand(3, 3)
    with OpCasting(BF16, emulate=True):
        found = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    half = q.bfloat16().float()
    expected = F.scaled_dot_product_attention(half, half, half, attn_mask=mask)
    assert found.dtype is BF16
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2.0**-7, atol=2.0**-7)


def test_the_lists_of_torch_are_emulated_too() -> None:
    a, b = torch.randn(16, 64), torch.randn(64, 32)
    with OpCasting(BF16, OpLists.native(), emulate=True):
        found, free, kept = a @ b, torch.exp(a.bfloat16()), torch.dot(a[0], a[1])
    half = (a.bfloat16().float(), b.bfloat16().float())
    assert (found.dtype, free.dtype, kept) == (BF16, BF16, a[0].dot(a[1]))
    assert torch.equal(found, (half[0] @ half[1]).bfloat16())


def test_an_einsum_of_one_tensor_stays_a_view() -> None:
    a = torch.ones(3, 3, dtype=BF16)
    with OpCasting(BF16, emulate=True):
        torch.einsum("ii->i", a).zero_()
    assert a.diagonal().tolist() == [0.0, 0.0, 0.0]


def test_mixed_inputs_fail_as_without() -> None:
    with OpCasting(BF16, enabled=False, emulate=True), pytest.raises(RuntimeError, match="dtype"):
        F.linear(torch.ones(1, 2, dtype=BF16), torch.ones(2, 2))


def test_widened_weights_follow_the_weight() -> None:
    layer = nn.Linear(2, 2, bias=False).to(BF16)
    x = torch.ones(1, 2, dtype=BF16)
    with OpCasting(BF16, enabled=False, emulate=True):
        with torch.no_grad():
            layer.weight.fill_(1.0)
            assert layer(x).tolist() == [[2.0, 2.0]]
            layer.weight.fill_(2.0)
            assert layer(x).tolist() == [[4.0, 4.0]]
            layer.weight.data = torch.full((2, 2), 3.0, dtype=BF16)
            assert layer(x).tolist() == [[6.0, 6.0]]
        layer(x).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0, 1.0]] * 2


class Signs(torch.Tensor):
    """Somebody's tensor: it keeps signs and a size, and knows what a product with them is, and no other dtype."""

    @staticmethod
    def __new__(cls, dense: torch.Tensor) -> Signs:
        made = torch.Tensor._make_wrapper_subclass(cls, dense.shape, dtype=dense.dtype)  # type: ignore[attr-defined]
        made.signs, made.size_of_all = dense.sign(), dense.abs().mean()
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.t.default:
            return Signs(args[0].signs.t() * args[0].size_of_all)
        if func is torch.ops.aten.mm.default:
            a, b = args
            return a @ b.signs * b.size_of_all
        raise NotImplementedError(f"{func} of Signs")


class Named(torch.Tensor):
    """Somebody's tensor that carries a label through every op."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        labels = [arg.label for arg in args if isinstance(arg, Named)]
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Named):
            result.label = "+".join(labels)
        return result


class Tagged(nn.Parameter):
    """A parameter with a class of its own, and nothing else."""


@pytest.mark.parametrize("dtype", HALVES, ids=["fp16", "bf16"])
def test_an_op_on_somebody_s_tensor_subclass_is_left_to_it(dtype: torch.dtype) -> None:
    x, weight = torch.randn(4, 8, dtype=dtype), Signs(torch.randn(6, 8, dtype=dtype))
    named = torch.randn(8, 6, dtype=dtype).as_subclass(Named)
    named.label = "w"
    expected, product = torch.mm(x, weight.t()), torch.mm(x, named)
    with OpCasting(dtype, enabled=False, emulate=True), Products() as products:
        assert torch.equal(torch.mm(x, weight.t()), expected)
        found = torch.mm(x, named)
    assert products.dtypes == {dtype}
    assert (found.label, found.dtype) == ("w", dtype)
    assert torch.equal(found.as_subclass(torch.Tensor), product.as_subclass(torch.Tensor))


@pytest.mark.parametrize("kind", [nn.Parameter, Tagged, nn.Buffer])
def test_a_weight_of_a_class_without_ops_of_its_own_is_emulated(kind: Any) -> None:
    weight = kind(torch.randn(6, 8).bfloat16())
    with OpCasting(BF16, enabled=False, emulate=True), Products() as products:
        F.linear(torch.randn(4, 8).bfloat16(), weight)
    assert products.dtypes == {FP32}


class Recomputing(nn.Module):
    """Notes what of torch is replaced while it runs."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.reentrant = reentrant
        self.found: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.found += [torch.autograd.backward, torch.autograd.grad]
        return checkpoint(self.linear, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_is_emulated_is_so_where_it_is_recomputed_and_wraps_no_backward_pass(reentrant: bool) -> None:
    model, own = Recomputing(reentrant), [torch.autograd.backward, torch.autograd.grad]
    amp.initialize(model, opt_level="O2", dtype=BF16, verbosity=0, emulate=True)
    with set_checkpoint_early_stop(False):
        y = model(torch.ones(2, 4, requires_grad=True))
    with Products() as products:
        y.sum().backward()
    assert products.dtypes == {FP32}
    assert model.found == own
