"""Ops whose dtypes torch refuses at O1 and O2 are called again with dtypes that agree; others are left alone."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfstep import amp
from halfstep.casting.scope import OpCasting
from tests.support.worlds import HALVES, Made, advance, scaled_backward, unscaled_step, with_optimizer

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}

A = torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
SPARSE = (A * (A > 0)).to_sparse_coo()

OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {  # of a 16-bit and an fp32 tensor
    "linear": F.linear,
    "linear, the other way": lambda half, full: F.linear(full, half),
    "matmul": lambda half, full: half @ full,
    "einsum": lambda half, full: torch.einsum("ij,jk->ik", half, full),
    "conv1d": lambda half, full: F.conv1d(full[None], half[:, :, None]),
    "lstm_cell": lambda half, full: torch.lstm_cell(half, [full, full], *[half.repeat(4, 1)] * 2)[0],
    "gru_cell": lambda half, full: torch.gru_cell(half, full, *[half.repeat(3, 1)] * 2),
    "attention": lambda half, full: F.scaled_dot_product_attention(half[None], full[None], half[None])[0],
    "attention with a mask": lambda half, full: F.scaled_dot_product_attention(half, half, half, attn_mask=full),
    "index_add": lambda half, full: half.index_add(0, torch.tensor([1]), full[:1]),
    "index_copy": lambda half, full: full.index_copy(0, torch.tensor([1]), half[:1]),
    "scatter_reduce": lambda half, full: half.scatter_reduce(0, torch.zeros(4, 4).long(), full, "sum"),
    "masked_scatter": lambda half, full: half.masked_scatter(torch.ones(4, 4, dtype=torch.bool), full),
    "index_put": lambda half, full: full.index_put((torch.tensor([0]),), half[0]),
    "sparse product": lambda half, full: torch.sparse.mm(SPARSE, half) + full,
    "fft": lambda half, full: torch.fft.rfft(half).abs() + full[:, :3],
    "svd": lambda half, full: torch.linalg.svdvals(half) + full[0],
    "bessel": lambda half, full: torch.special.bessel_j0(half) + full,
    "ndtri": lambda half, full: torch.special.ndtri(half.sigmoid()) + full,
    "histogram": lambda half, full: torch.histogram(half, 4, range=(-1.5, 1.5)).hist + full[0],
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("name", OPS)
def test_ops_meet(name: str, lists: bool, half: torch.dtype) -> None:
    op = OPS[name]
    wanted = op(A.to(half).float(), A)
    full = A.clone().requires_grad_()
    with OpCasting(half, enabled=lists, retries=True):
        result = op(A.to(half), full)
    torch.testing.assert_close(result.float(), wanted, atol=TOLERANCE[half] * 4, rtol=TOLERANCE[half] * 4)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("layout", ["to_sparse_coo", "to_sparse_csr"])
def test_a_product_with_a_sparse_matrix_has_a_gradient(layout: str, half: torch.dtype) -> None:
    matrix = getattr(A * (A > 0), layout)()
    dense = A.to(half).requires_grad_()
    for product in (torch.sparse.mm, torch.matmul, torch.mm, lambda m, d: torch.mm(input=m, mat2=d)):
        dense.grad = None
        with OpCasting(half):
            result = product(matrix, dense)
        assert result.dtype is torch.float32
        result.sum().backward()
        wanted = (A * (A > 0)).t() @ torch.ones(4, 4)
        torch.testing.assert_close(dense.grad.float(), wanted, atol=0.05, rtol=TOLERANCE[half])  # type: ignore[union-attr]


def test_a_lookup_in_fp32_gives_its_weight_a_sparse_gradient() -> None:
    weight: Any = nn.Parameter(A.bfloat16())
    with amp.auto_cast(dtype="bfloat16", custom_black_list=["embedding"]):
        found = torch.embedding(weight, torch.tensor([0, 3]), -1, False, True)
    found.sum().backward()
    assert (found.dtype, weight.grad.is_sparse) == (torch.float32, True)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
def test_a_loss_inside_of_a_model_has_gradients(
    loss: Callable[..., torch.Tensor], swapped: bool, half: torch.dtype
) -> None:
    order = slice(None, None, -1 if swapped else 1)
    plain = Made(lambda self, x: loss(*(self.layer(x), A)[order]), layer=nn.Linear(4, 4))
    model = amp.initialize(copy.deepcopy(plain), opt_level="O2", dtype=half, emulate=False, verbosity=0)
    for _ in range(5):
        model.zero_grad()
        model(A).backward()
    plain(A).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.float(), theirs.grad, atol=0.02, rtol=0.05)


INSIDE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of 16 bits alone
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(4)),
    "nll_loss": lambda x: F.nll_loss(x, torch.arange(4)),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() * 2),
    "kl_div": lambda x: F.kl_div(x, x.detach().exp(), reduction="batchmean"),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x.detach().abs() / 4, x.detach().abs() / 4) + x.sum(),
    "binary_cross_entropy_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x.detach().abs() / 4),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", INSIDE)
def test_a_loss_inside_of_a_model_with_16_bit_weights_is_fp32(name: str, half: torch.dtype) -> None:
    x = A.to(half).requires_grad_()
    with OpCasting(half, enabled=False, retries=True):
        found = INSIDE[name](x)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, INSIDE[name](x.detach().float()), atol=0.02, rtol=0.02)


LOGITS = torch.tensor([-30.0, -2.0, 0.5, 30.0])
TARGETS = torch.tensor([1.0, 0.25, 0.0, 0.0])


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("lists", [True, False])
def test_binary_cross_entropy_of_a_sigmoid_is_that_of_its_logits(lists: bool, half: torch.dtype) -> None:
    x = LOGITS.to(half).requires_grad_()
    exact = LOGITS.clone().requires_grad_()
    F.binary_cross_entropy_with_logits(exact, TARGETS, torch.tensor(2.0), reduction="sum").backward()
    with OpCasting(half, enabled=lists, retries=True):
        p = nn.Sigmoid()(x)
        loss = F.binary_cross_entropy(p, TARGETS.to(half), weight=torch.tensor(2.0), reduction="sum")
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                found = F.binary_cross_entropy(input=x.sigmoid(), target=TARGETS)
                assert found == F.binary_cross_entropy_with_logits(LOGITS, TARGETS)
    loss.backward()
    assert p.dtype is half
    assert x.grad is not None
    torch.testing.assert_close(x.grad.float(), exact.grad, atol=0, rtol=TOLERANCE[half])


CHANGED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the probabilities": lambda x: x.sigmoid().mul_(0.5),
    "the logits": lambda x: (x.sigmoid(), x.zero_())[0],
    "the logits, by the sigmoid": lambda x: x.sigmoid_(),
    "another tensor": lambda x: x.sigmoid().clone(),
    "an old sigmoid": lambda x: (x.sigmoid(), *[x.sigmoid() for _ in range(4)])[0],
}


@pytest.mark.parametrize("name", CHANGED)
def test_probabilities_whose_logits_are_not_known_are_refused(name: str) -> None:
    with OpCasting(torch.bfloat16):
        p = CHANGED[name](LOGITS.bfloat16())
        with pytest.raises(amp.UnsafeOpError, match="with_logits"):
            F.binary_cross_entropy(p, TARGETS)


def test_logits_are_kept_no_longer_than_their_sigmoid() -> None:
    with OpCasting(torch.bfloat16):
        x = LOGITS.bfloat16() * 1
        p, seen = x.sigmoid(), weakref.ref(x)
        del x
        assert seen() is not None
        del p
        assert seen() is None


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "x[mask] = y": lambda x, y: x.__setitem__(torch.tensor([True, False, True, False]), y[:2]),
    "x[index] = y": lambda x, y: x.__setitem__(torch.tensor([0, 1]), y[:2]),
    "index_put_": lambda x, y: x.index_put_((torch.tensor([0, 1]),), y[:2]),
    "put_": lambda x, y: x.put_(torch.tensor([0, 1]), y[0, :2]),
    "index_add_": lambda x, y: x.index_add_(0, torch.tensor([0]), y[:1]),
    "scatter_add_": lambda x, y: x.scatter_add_(0, torch.zeros(4, 4).long(), y),
    "scatter_": lambda x, y: x.scatter_(0, torch.tensor([[1, 0, 3, 2]]), y),
    "scatter_ of a number": lambda x, y: x.scatter_(1, torch.tensor([[1], [0]]), 1.0),
    "addmm_": lambda x, y: x.addmm_(y, y),
}


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("written", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_keeps_the_tensor_and_its_dtype(name: str, written: torch.dtype, lists: bool) -> None:
    other = torch.bfloat16 if written is torch.float32 else torch.float32
    wanted = A.clone()
    WRITES[name](wanted, A)
    target = A.to(written)
    memory = target.data_ptr()
    with OpCasting(torch.bfloat16, enabled=lists, retries=True):
        WRITES[name](target, A.to(other))
    assert (target.dtype, target.data_ptr()) == (written, memory)
    torch.testing.assert_close(target.float(), wanted, atol=0.05, rtol=0.02)


def test_an_op_in_place_without_a_16_bit_kernel_writes_its_result() -> None:
    x = A.half()
    memory = x.data_ptr()
    with OpCasting(torch.float16):
        assert F.rrelu(x, 0.25, 0.25, inplace=True) is x
    assert x.data_ptr() == memory
    torch.testing.assert_close(x, F.leaky_relu(A, 0.25).half())
    with OpCasting(torch.float16), pytest.raises(RuntimeError, match="leaf"):
        A.half().requires_grad_().masked_fill_(A > 0, -1e10)
    with OpCasting(torch.float16), pytest.raises(RuntimeError, match="views"):
        A.half().requires_grad_().clone()[0].detach_()


TAKEN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {  # without a right gradient
    "addr": lambda half, full: torch.addr(half, full[0], half[0]),
    "addr_": lambda half, full: (full * 1).addr_(half[0], full[0]),
    "huber_loss": F.huber_loss,
    "matrix_exp": lambda half, full: torch.linalg.matrix_exp(half * 4) + full,
    "pdist": lambda half, full: F.pdist(half * 2) + full[0, 0],
    "i1": lambda half, full: torch.special.i1(half) + full,
    "logcumsumexp": lambda half, full: half.logcumsumexp(0) + full,
    "soft_margin_loss": lambda half, full: F.soft_margin_loss(half * 16, full.sign().detach()),
    "Dirichlet": lambda half, full: torch.distributions.Dirichlet(half.exp() + 2).rsample().square() + full,
}


@pytest.mark.parametrize(
    ("name", "half"),  # the others have gradients that are too large for float16
    [(n, d) for n in TAKEN for d in HALVES if d is torch.bfloat16 or n not in ("matrix_exp", "i1", "Dirichlet")],
)
@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_where_torch_takes_16_bits_and_has_none(name: str, enabled: bool, half: torch.dtype) -> None:
    results = []
    for dtype in (torch.float32, half):
        torch.manual_seed(0)
        x, y = A.to(half).to(dtype).requires_grad_(), A.clone().requires_grad_()
        with OpCasting(half, enabled=enabled and dtype is half, retries=dtype is half):
            result = TAKEN[name](x, y)
        result.sum().backward()
        assert x.grad is not None
        results.append((result.detach().float(), x.grad.float()))
    for wanted, found in zip(*results, strict=True):
        largest = wanted.abs().max().item()
        torch.testing.assert_close(found, wanted, atol=4 * TOLERANCE[half] * largest, rtol=0)


def test_an_error_that_is_not_of_dtypes_is_torchs_own() -> None:
    with OpCasting(torch.bfloat16), pytest.raises(RuntimeError, match="shapes cannot be"):
        F.linear(torch.ones(2, 3), A.bfloat16())


def test_what_is_no_op_is_not_called_again() -> None:
    weight = nn.Parameter(A.bfloat16())
    loss = (weight * 2).sum()
    loss.backward()
    with OpCasting(torch.bfloat16):
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        with pytest.raises(RuntimeError, match="grad"):
            weight.grad = torch.ones(3, 3)
    assert weight.grad is not None
    assert weight.grad.shape == (4, 4)


# ---- models


class Exponential(torch.autograd.Function):
    """Takes fp32 only."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:  # type: ignore[override]
        assert x.dtype is torch.float32
        ctx.save_for_backward(x.exp() * factor)
        return x.exp() * factor

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        assert gradient.dtype is torch.float32
        return gradient * ctx.saved_tensors[0], None


def states(self: Any, x: torch.Tensor) -> Any:
    """Run recurrent cells, with states that are made here."""
    state = torch.zeros(len(x), 8), torch.zeros(len(x), 8)
    outputs = []
    for _ in range(3):
        state = self.cell(x, state)
        outputs.append(state[0])
    return self.out(self.gru(torch.stack(outputs), torch.zeros(1, len(x), 8))[0][-1])


def density(self: Any, x: torch.Tensor) -> Any:
    """Draw samples."""
    gamma = torch.distributions.Gamma(F.softplus(self.rate(x)) + 1, torch.ones(4), validate_args=False)
    return gamma.mean + 0 * gamma.rsample()


def masked(self: Any, x: torch.Tensor) -> torch.Tensor:
    q, k, v = self.qkv(x).chunk(3, -1)
    mask = torch.full((len(x), len(x)), torch.finfo(torch.float32).min).triu(1)
    return self.out((q @ k.t() / 2 + mask).softmax(-1) @ v)  # type: ignore[no-any-return]


def positions(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute a sum over a graph's edges, with a table of positions that is an fp32 attribute."""
    nodes = torch.zeros(3, 4).index_add(0, torch.arange(len(x)) % 3, self.one(x[:, :4]))
    return self.two(nodes[torch.arange(len(x)) % 3] + self.table[0])  # type: ignore[no-any-return]


def square() -> nn.Linear:
    return nn.Linear(4, 4)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "states": lambda: Made(states, cell=nn.LSTMCell(4, 8), gru=nn.GRU(8, 8), out=nn.Linear(8, 4)),
    "Fourier": lambda: Made(lambda self, x: self.m(torch.fft.fft(torch.fft.fft(self.m(x)), dim=0).real), m=square()),
    "masked": lambda: Made(masked, qkv=nn.Linear(4, 12), out=square()),
    "positions": lambda: Made(positions, table=torch.linspace(0, 1, 16).reshape(4, 4), one=square(), two=square()),
    "Cayley": lambda: nn.Sequential(nn.utils.parametrizations.orthogonal(square(), orthogonal_map="cayley")),
    "custom": lambda: Made(lambda self, x: self.b(Exponential.apply(self.a(x), 0.5)), a=square(), b=square()),
    "density": lambda: Made(density, rate=square()),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_makes_fp32_tensors_trains(kind: str, level: str, half: torch.dtype) -> None:
    reference = MODELS[kind]()
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    losses = []
    for mixed in (False, True):
        model, optimizer = with_optimizer(copy.deepcopy(reference), torch.optim.SGD, lr=0.1)
        if mixed:
            amp.initialize(model, optimizer, opt_level=level, dtype=half, loss_scale=16.0, verbosity=0)
        for _ in range(10):
            torch.manual_seed(1)
            loss = F.mse_loss(model(x).float(), y)
            (advance if mixed else unscaled_step)(loss, optimizer)
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("how", "half"), [("compile", torch.bfloat16), ("trace", torch.float16)])
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "custom"])
def test_a_recorded_model_that_makes_fp32_tensors_is_right(kind: str, how: str, half: torch.dtype) -> None:
    if (kind, how) in (("Cayley", "trace"), ("density", "compile")):
        pytest.skip("torch.jit.trace computes parametrizations outside of forward, and Dynamo shows no mode a sample")
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, x, graphs = MODELS[kind](), torch.randn(6, 4), []

    def run(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    model = amp.initialize(copy.deepcopy(plain), opt_level="O2", dtype=half, verbosity=0)
    recorded: Any = (
        torch.jit.trace(model, x, check_trace=False) if how == "trace" else torch.compile(model, backend=run)
    )
    counts = set()
    for _ in range(5):
        torch.manual_seed(1)
        with torch.jit.optimized_execution(False):  # TorchScript's own derivative of fp16 + fp32 is fp32 for both
            found = recorded(x)
            found.float().square().sum().backward()
        counts.add(len(graphs))
    assert len(counts) == 1  # nothing is compiled again
    torch.manual_seed(1)
    wanted = plain(x)
    torch.testing.assert_close(found.float(), wanted, atol=TOLERANCE[half] * 2, rtol=TOLERANCE[half] * 2)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert torch.equal(model(x)[:0], found[:0])  # the same dtype, and eager passes go on


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8)], ids=lambda norm: type(norm).__name__
)
def test_a_recorded_norm_with_fp32_weights_has_the_bits_of_the_eager_one(norm: nn.Module) -> None:
    """Torch takes it, so nothing of it is cast. The activation after it must not get fp32 either."""
    model: Any = nn.Sequential(nn.Linear(4, 8), norm, nn.GELU(), nn.Linear(8, 2))
    amp.decorate(model, torch.optim.SGD(model.parameters(), lr=0.1), level="O2", dtype=torch.bfloat16)
    x = torch.randn(6, 4)
    wanted = model(x)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), wanted)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="eager")(x), wanted)


REFUSED_IN_FP32: dict[str, Callable[[torch.Tensor], Any]] = {  # of a floating tensor
    "int[mask] = y": lambda y: torch.zeros(4).long().__setitem__(torch.arange(4) < 2, y[0, :2]),
    "bool[mask] = y": lambda y: torch.zeros(4).bool().__setitem__(torch.arange(4) < 2, y[0, :2]),
    "double[mask] = y": lambda y: torch.zeros(4).double().__setitem__(torch.arange(4) < 2, y[0, :2]),
    "add_": lambda y: torch.zeros(4, 4).long().add_(y),
    "index_add_": lambda y: torch.zeros(4, 4).long().index_add_(0, torch.tensor([0]), y[:1]),
    "scatter_": lambda y: torch.zeros(4, 4).long().scatter_(0, torch.zeros(1, 4).long(), y),
    "a list of wrong shapes": lambda y: torch._foreach_add_([y.clone(), y.clone()], [y, y[:3]]),
    "a tensor given by name": lambda y: torch.celu_(input=torch.zeros(4).long()),
    "a method in Python": lambda y: y.unflatten(0, (3, 3)),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", REFUSED_IN_FP32)
def test_what_torch_refuses_in_fp32_stays_refused_with_its_error(name: str, half: torch.dtype) -> None:
    refused = REFUSED_IN_FP32[name]
    with pytest.raises(RuntimeError) as expected:
        refused(A.to(half))
    with OpCasting(half), pytest.raises(RuntimeError) as found:
        refused(A.to(half))
    assert str(found.value) == str(expected.value)
    with OpCasting(half), pytest.raises(RuntimeError):
        refused(A)


def test_a_list_that_is_written_in_part_is_not_written_again() -> None:
    sums = [torch.zeros(4), torch.zeros(4)]
    with OpCasting(torch.bfloat16), pytest.raises(RuntimeError, match="size of tensor"):
        torch._foreach_add_(sums, [torch.ones(4), torch.ones(3)])
    assert max(sums[0]) <= 1


def test_an_op_of_somebody_else_that_fails_runs_once() -> None:
    library = torch.library.Library("halfstep_tests_meeting", "DEF")
    calls = []

    def add(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.dtype)
        raise RuntimeError("of the user")

    library.define("add(Tensor x) -> Tensor")
    library.impl("add", add, "CompositeImplicitAutograd")
    with OpCasting(torch.bfloat16):
        for op in (torch.ops.halfstep_tests_meeting.add, torch.ops.halfstep_tests_meeting.add.default):
            for dtype in (torch.bfloat16, torch.float32):
                with pytest.raises(RuntimeError, match="of the user"):
                    op(A.to(dtype))
    assert len(calls) == 4


@pytest.mark.parametrize("half", HALVES)
def test_a_row_that_is_hidden_whole_is_finite_in_attention(half: torch.dtype) -> None:
    mask = torch.zeros(4, 4)
    mask[1:, 2:] = mask[3] = torch.finfo(torch.float32).min
    q = A[None]
    wanted = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    with OpCasting(half):
        for found in (
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
            F.scaled_dot_product_attention(q, q, q, mask),
            F.scaled_dot_product_attention(query=q, key=q, value=q, attn_mask=mask),
        ):
            assert found.isfinite().all()
            assert found[:, 3].any()  # torch gives zeros for a row of -inf
            torch.testing.assert_close(found[:, :3].float(), wanted[:, :3], atol=0.02, rtol=0.02)


FULL_ATTENTION: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "a scope that is switched off": lambda: amp.auto_cast(enable=False, emulate=True),
    "the black list": lambda: amp.auto_cast(custom_black_list=["flash_attn"], emulate=True),
    "level OD": lambda: amp.auto_cast(level="OD", emulate=True),
    "disable_casts": amp.disable_casts,
}


@pytest.mark.parametrize("scope", FULL_ATTENTION)
def test_attention_in_fp32_takes_its_mask_as_it_is(scope: str) -> None:
    """A mask in 16 bits was refused beside an fp32 query, or had lost its digits."""
    mask, q = torch.arange(16.0).reshape(4, 4) / -3, A[None]
    with FULL_ATTENTION[scope]():
        found = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert torch.equal(found, F.scaled_dot_product_attention(q, q, q, attn_mask=mask))


class Product(torch.autograd.Function):
    """The PyLayer of Paddle's PR 39950, by the rule of docs/from-paddle.md."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        return gradient.mm(b.t()), a.t().mm(gradient)


class PlainProduct(torch.autograd.Function):
    """Multiplies a 16-bit gradient by fp32 operands."""

    forward = staticmethod(Product.forward.__wrapped__)
    backward = staticmethod(Product.backward.__wrapped__)


@pytest.mark.parametrize("function", [Product, PlainProduct])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_function_has_its_gradient_after_auto_cast(level: str, half: torch.dtype, function: Any) -> None:
    """Nothing but the graph refers to the block."""
    a, b = (A.clone().requires_grad_() for _ in range(2))
    with amp.auto_cast(level=level, dtype=half):
        found = function.apply(a, b)
    assert found.dtype is half
    found.float().sum().backward()
    torch.testing.assert_close(a.grad, torch.ones(4, 4) @ A.t(), atol=TOLERANCE[half], rtol=TOLERANCE[half])


class FromApex(torch.autograd.Function):
    """As scripts for Apex have it: its backward pass multiplies a 16-bit gradient by an fp32 weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


@pytest.mark.parametrize("half", HALVES)
def test_ops_meet_in_the_backward_pass_of_a_function_at_o1(half: torch.dtype) -> None:
    gradients = []
    for level in ("O0", "O1"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
        model[1].forward = lambda x, weight=model[1].weight: FromApex.apply(x, weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {} if level == "O0" else {"dtype": half, "loss_scale": 64.0}
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        scaled_backward(model(A).float().square().sum(), optimizer)
        gradients.append([p.grad for p in model.parameters()])
    for wide, narrow in zip(*gradients, strict=True):
        assert narrow.dtype is torch.float32
        torch.testing.assert_close(narrow, wide, rtol=5 * TOLERANCE[half], atol=5 * TOLERANCE[half])
