"""Every op on a list: called under ``auto_cast`` on both dtypes and every device, it computes where its list says.

Native autocast has other lists on CUDA than on the CPU, so a cast that is right on one may be missing on the other, and
where both device types are cast what is done must suit both. A GPU that is not there is a fake one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import linalg, nn
from torch.nn import functional as F

from halfstep import amp
from halfstep.casting.scope import OpCasting
from halfstep.core.errors import UnsafeOpError
from halfstep.core.oplists import OpLists
from halfstep.core.oplists.tables import BANNED, OPS
from tests.support.apex_recording import grid
from tests.support.fake_cuda import DEVICES, FAKE, NOT_ON_FAKES, READS_THE_HOST, of_ops, on, skip_unless_it_runs
from tests.support.op_calls import BATCH, LABELS, SHAPES, SQUARE, beside
from tests.support.worlds import HALVES

HALF, FLOAT, PROMOTE, SEQUENCE = (
    {op.name for op in OPS.values() if op.list == rule} for rule in ("half", "float", "promote", "sequence-promote")
)
IMAGE = (1, 2, 4, 4)

ROWS: dict[str, str] = {  # the slots of a call -> ops that take them and nothing else
    "3x4": """
        exp expm1 exp2 cosh sinh tan square log log10 log2 log1p acos asin atanh erfinv reciprocal rsqrt
        amax amin tril triu hardswish hardsigmoid hardshrink silu diag unbind hardtanh logit nan_to_num linalg_vander t
        squeeze flatten contiguous clone detach empty_like zeros_like ones_like rand_like randn_like bernoulli poisson
        special_bessel_j0 special_bessel_y0 special_erfcx special_log_ndtr special_modified_bessel_i0 special_ndtri
        tanhshrink softplus gelu sum nansum mean nanmean prod std var std_mean var_mean cov corrcoef norm
        normalize trapz trapezoid cumulative_trapezoid histc
        """,
    "4x4": """
        trace inverse pinverse det slogdet logdet matrix_exp linalg_det linalg_eig linalg_eigh linalg_eigvals
        linalg_eigvalsh linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_lu
        linalg_lu_factor linalg_lu_factor_ex linalg_matrix_exp linalg_pinv linalg_qr linalg_slogdet linalg_svd
        linalg_svdvals qr svd geqrf linalg_cond linalg_norm linalg_vector_norm linalg_matrix_norm pdist fft_fft
        fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_hfft fft_hfft2
        fft_hfftn fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn
        """,
    "3x4 3x4": """
        max min floor_divide clamp_min clamp_max view_as expand_as binomial special_zeta
        logaddexp logaddexp2 float_power cdist pairwise_distance minimum fmax fmin hypot copysign remainder
        fmod kron isclose allclose inner heaviside linalg_vecdot complex
        """,
    "4x4 4x4": "linalg_solve linalg_solve_ex linalg_lstsq linalg_matmul",
}
SHAPES_OF = {"3x4": (BATCH,), "4x4": (SQUARE,), "3x4 3x4": (BATCH, BATCH), "4x4 4x4": (SQUARE, SQUARE)}
CHOLESKY = ("linalg_cholesky", "linalg_cholesky_ex")
INDEX, ROW = torch.tensor([0, 2]), torch.zeros(1, 4, dtype=torch.int64)
PARTS, LENGTHS = torch.tensor([2, 1]), (torch.tensor([5, 5]), torch.tensor([2, 2]))


def rnn(kind: type[nn.RNNBase]) -> Callable[..., Any]:
    def call(x: torch.Tensor) -> Any:
        torch.manual_seed(0)
        return kind(4, 4, device=x.device)(x.unsqueeze(0))[0]

    return call


def cell(kind: type[nn.RNNCellBase]) -> Callable[..., Any]:
    def call(x: torch.Tensor) -> Any:
        torch.manual_seed(0)
        return kind(4, 4, device=x.device)(x)

    return call


def positive(x: torch.Tensor) -> torch.Tensor:
    """A symmetric positive definite matrix."""
    return x @ x.mT + 4 * torch.eye(4, dtype=x.dtype, device=x.device)


def triangle(x: torch.Tensor) -> torch.Tensor:
    return x.tril() + 2 * torch.eye(4, dtype=x.dtype, device=x.device)


CALLS: dict[str, tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]] = {
    "einsum": ((BATCH, (4, 5)), lambda a, b: torch.einsum("ij,jk->ik", a, b)),
    **dict.fromkeys(("chain_matmul", "linalg_multi_dot"), ((BATCH, (4, 5)), lambda a, b: linalg.multi_dot([a, b]))),
    "lstm": ((BATCH,), rnn(nn.LSTM)),
    "gru": ((BATCH,), rnn(nn.GRU)),
    "rnn_tanh": ((BATCH,), rnn(nn.RNN)),
    "rnn_relu": ((BATCH,), lambda x: nn.RNN(4, 4, nonlinearity="relu", device=x.device)(x.unsqueeze(0))[0]),
    "lstm_cell": ((BATCH,), cell(nn.LSTMCell)),
    "gru_cell": ((BATCH,), cell(nn.GRUCell)),
    "rnn_tanh_cell": ((BATCH,), cell(nn.RNNCell)),
    "rnn_relu_cell": ((BATCH,), lambda x: nn.RNNCell(4, 4, nonlinearity="relu", device=x.device)(x)),
    **{f"special_{name}": ((BATCH,), getattr(torch.special, name)) for name in ("i1", "i1e")},
    "segment_reduce": ((BATCH,), lambda x: torch.segment_reduce(x, "sum", lengths=beside(x, PARTS), unsafe=True)),
    "sum_to_size": ((BATCH,), lambda x: x.sum_to_size(1, 4)),
    **{
        n: ((BATCH,), lambda x, n=n: getattr(x, n)(0)) for n in ("logcumsumexp", "logsumexp", "quantile", "nanquantile")
    },
    "rms_norm": ((BATCH, (4,)), lambda x, w: F.rms_norm(x, (4,), w)),
    "layer_norm": ((BATCH, (4,), (4,)), lambda x, w, b: F.layer_norm(x, (4,), w, b)),
    "group_norm": ((BATCH, (4,), (4,)), lambda x, w, b: F.group_norm(x, 2, w, b)),
    "ctc_loss": (((5, 2, 4),), lambda x: F.ctc_loss(x, torch.ones(2, 2, dtype=torch.int64), *LENGTHS)),
    "gaussian_nll_loss": ((BATCH, BATCH, BATCH), F.gaussian_nll_loss),
    "affine_grid_generator": (((1, 2, 3),), lambda t: F.affine_grid(t, [1, 1, 4, 4], align_corners=False)),
    **{
        name: ((SQUARE,), lambda x, n=name: getattr(linalg, n[7:])(positive(x.float()).to(x.dtype)))
        for name in CHOLESKY
    },
    "cholesky_solve": ((BATCH[::-1], SQUARE), lambda b, x: torch.cholesky_solve(b, triangle(x))),
    "cholesky_inverse": ((SQUARE,), lambda x: torch.cholesky_inverse(triangle(x))),
    "triangular_solve": ((SQUARE, SQUARE), lambda b, x: torch.triangular_solve(b, x, upper=False)),
    "linalg_solve_triangular": ((SQUARE, SQUARE), lambda x, b: linalg.solve_triangular(x, b, upper=False)),
    "matrix_power": ((SQUARE,), lambda x: torch.matrix_power(x, 3)),
    "linalg_matrix_power": ((SQUARE,), lambda x: linalg.matrix_power(x, 3)),
    "linalg_householder_product": ((SQUARE, (4,)), linalg.householder_product),
    "orgqr": ((SQUARE, (4,)), torch.orgqr),
    "ormqr": ((SQUARE, (4,), SQUARE), torch.ormqr),
    "lu": ((SQUARE,), lambda x: torch.lu(x)[0]),
    "lu_solve": ((SQUARE, SQUARE), lambda b, x: torch.lu_solve(b, x, pivots(x))),
    "linalg_lu_solve": ((SQUARE, SQUARE), lambda x, b: linalg.lu_solve(x, pivots(x), b)),
    "linalg_ldl_solve": ((SQUARE, SQUARE), lambda x, b: linalg.ldl_solve(x, pivots(x), b)),
    "linalg_tensorinv": ((SQUARE,), lambda x: linalg.tensorinv(x, 1)),
    "linalg_tensorsolve": ((SQUARE, (4,)), linalg.tensorsolve),
    "polar": ((BATCH, BATCH), torch.polar),
    "view_as_complex": (((3, 2),), torch.view_as_complex),
    "stft": (((32,),), lambda x: torch.stft(x, 8, window=torch.ones(8, device=x.device), return_complex=True)),
    "istft": (((32,),), lambda x: istft(x)),
    "embedding": ((SQUARE,), lambda w: F.embedding(beside(w, INDEX), w)),
    "embedding_bag": ((SQUARE,), lambda w: F.embedding_bag(beside(w, INDEX.view(1, 2)), w)),
    "scatter": ((BATCH, BATCH), lambda a, b: a.scatter(0, beside(a, ROW), b)),
    "scatter_add": ((BATCH, BATCH), lambda a, b: a.scatter_add(0, beside(a, ROW), b)),
    "scatter_reduce": ((BATCH, BATCH), lambda a, b: a.scatter_reduce(0, beside(a, ROW), b, "sum")),
    "index_put": ((BATCH, (4,)), lambda a, b: a.index_put((beside(a, INDEX),), b)),
    "index_add": ((BATCH, (2, 4)), lambda a, b: a.index_add(0, beside(a, INDEX), b)),
    "index_copy": ((BATCH, (2, 4)), lambda a, b: a.index_copy(0, beside(a, INDEX), b)),
    "index_reduce": ((BATCH, (2, 4)), lambda a, b: a.index_reduce(0, beside(a, INDEX), b, "amax")),
    "masked_scatter": ((BATCH, BATCH), lambda a, b: a.masked_scatter(a > 0, b)),
    "where": ((BATCH, BATCH), lambda a, b: torch.where(a > 0, a, b)),
    "lerp": ((BATCH, BATCH), lambda a, b: torch.lerp(a, b, 0.5)),
    "vdot": (((4,), (4,)), torch.vdot),
    "tensordot": ((BATCH, (4, 5)), lambda a, b: torch.tensordot(a, b, 1)),
    "outer": (((3,), (4,)), torch.outer),
    "linalg_cross": (((2, 3), (2, 3)), linalg.cross),
    "linalg_matmul": ((SQUARE, SQUARE), linalg.matmul),
    "frobenius_norm": ((BATCH,), lambda x: torch.norm(x, "fro")),
    "nuclear_norm": ((BATCH,), lambda x: torch.norm(x, "nuc")),
    "upsample": ((IMAGE,), lambda x: F.interpolate(x, scale_factor=2)),
    "linear_cross_entropy": ((BATCH, (5, 4)), lambda x, w: F.linear_cross_entropy(x, w, beside(x, LABELS))),
    "grouped_mm": (((8, 16), (2, 16, 8)), lambda a, b: F.grouped_mm(a, b, offs=beside(a, INDEX.int() * 4))),
    "cat": ((BATCH, BATCH), lambda a, b: torch.cat([a, b])),
    **{name: ((BATCH, BATCH), lambda a, b, n=name: getattr(torch, n)([a, b])) for name in SEQUENCE - {"cat"}},
}

UNDER_OTHERS = """
    convolution native_layer_norm cross_entropy_loss nll_loss2d nll_loss_nd multilabel_margin_loss_forward grid_sampler
    grid_sampler_2d grid_sampler_3d mkldnn_rnn_layer cholesky upsample_nearest upsample_bilinear
    """
NO_CALL = {
    "linalg_matrix_rank": "gives an integer",
    "varlen_attn": "has kernels for CUDA only",
    **dict.fromkeys(UNDER_OTHERS.split(), "is called by an op that is here"),
    **dict.fromkeys((name for name in FLOAT if name.startswith("upsample_")), "under interpolate"),
    **({} if hasattr(F, "linear_cross_entropy") else {"linear_cross_entropy": "since torch 2.12 or 2.13"}),
}


def pivots(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(1, 5, dtype=torch.int32, device=x.device)


def istft(x: torch.Tensor) -> torch.Tensor:
    window = torch.ones(8, device=x.device)
    return torch.istft(torch.stft(x, 8, window=window, return_complex=True), 8, window=window)


def function_of(name: str) -> Callable[..., Any]:
    for prefix, space in (("linalg_", linalg), ("fft_", torch.fft), ("special_", torch.special)):
        if name.startswith(prefix):
            return getattr(space, name.removeprefix(prefix))
    for space in (F, torch, torch.Tensor):
        if hasattr(space, name):
            return getattr(space, name)
    raise AssertionError(f"no call for {name}; add one to CALLS or a reason to NO_CALL")


def call_of(name: str) -> tuple[tuple[tuple[int, ...], ...], Callable[..., Any]]:
    if name in CALLS:
        return CALLS[name]
    if name in SHAPES:
        shapes, args, kwargs = SHAPES[name]
        function = function_of(name)
        return shapes, lambda *t: function(*t, *[beside(t[0], a) for a in args], **kwargs)
    row = next(row for row, names in ROWS.items() if name in names.split())
    return SHAPES_OF[row], function_of(name)


def public(names: Any) -> list[str]:
    return sorted(name for name in names if not name.startswith("_") and name not in NO_CALL)


def slots(shapes: tuple[tuple[int, ...], ...], dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    made = []
    for i, shape in enumerate(shapes):
        made.append(grid(shape, 61 + i, 0.4, 0.5).to(dtypes[min(i, len(dtypes) - 1)]))
    # A square matrix that can be inverted and decomposed.
    return [t + 2 * torch.eye(4, dtype=t.dtype) if t.shape == SQUARE else t for t in made]


def kinds(result: Any) -> set[torch.dtype]:
    """The dtypes of the floating results, a complex one as that of its parts."""
    found = torch.utils._pytree.tree_leaves(result)
    return {
        t.dtype.to_real() for t in found if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex())
    }


def run(
    name: str, half: torch.dtype, dtypes: list[torch.dtype], device: str, both: bool, **level: Any
) -> set[torch.dtype]:
    """The dtypes that come out where casting is on for the device alone, or for the CPU and CUDA both."""
    skip_unless_it_runs(name, device)
    shapes, call = call_of(name)
    made = slots(shapes, dtypes)
    with on(device) as where:
        tensors = [t.to(where) for t in made]
        with amp.auto_cast(dtype=half, device_type=["cpu", "cuda"] if both else where, **level):
            return kinds(call(*tensors))


BOTH = pytest.mark.parametrize("both", [False, True], ids=["alone", "both"])


TRUTH_VALUES = {"eq", "ne", "ge", "gt", "le", "lt", "equal", "isclose", "allclose"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("half", HALVES)
@BOTH
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", of_ops(public(HALF | FLOAT | PROMOTE | SEQUENCE)))
@pytest.mark.filterwarnings("ignore:.*(deprecated|float_power|index_reduce).*")
def test_listed_ops(name: str, device: str, both: bool, half: torch.dtype) -> None:
    wide = torch.float64 if name == "float_power" else torch.float32
    for dtypes in ([half, torch.float32], [torch.float32, half], [half], [torch.float32]):
        kept = dtypes == [half] and (half is torch.bfloat16 or name not in ("dot", "vdot"))  # these add as sum does
        wanted = half if name in HALF or (kept and name not in FLOAT) else wide
        assert run(name, half, dtypes, device, both) == (set() if name in TRUTH_VALUES else {wanted}), dtypes


@pytest.mark.parametrize("half", HALVES)
@BOTH
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", of_ops(public(BANNED)))
def test_banned(name: str, device: str, both: bool, half: torch.dtype) -> None:
    assert run(name, half, [torch.float32], device, both) == {torch.float32}
    with pytest.raises(amp.UnsafeOpError, match="binary_cross_entropy_with_logits"):
        run(name, half, [half, torch.float32], device, both)


HAS_FP32_WEIGHTS = {"lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name", sorted(set(public(HALF | FLOAT | PROMOTE | SEQUENCE)) - HAS_FP32_WEIGHTS - {"grouped_mm"})
)
def test_float64_is_never_touched(name: str, device: str) -> None:
    assert run(name, torch.bfloat16, [torch.float64], device, True) <= {torch.float64}


NO_16_BITS = {"float_power", "nuclear_norm", "quantile", "nanquantile", "view_as_complex"}
TAKES_16_BITS = [n for n in FLOAT - NO_16_BITS if OPS[n].reason not in ("linalg", "fft", "complex")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("use_promote", [True, False])
@BOTH
@pytest.mark.parametrize("name", of_ops(public(TAKES_16_BITS)))
def test_float_list_at_o2(name: str, both: bool, use_promote: bool, device: str) -> None:
    """There most of it is free, or lowered: native autocast must not widen what is inside these ops.

    Not on the CPU, which has no 16-bit kernels for many of them.
    """
    half = torch.bfloat16
    rule = OpLists.custom(level="O2", use_promote=use_promote).rule_of(name)
    for dtype in (half, torch.float32):
        wanted = {"half": half, "float": torch.float32}.get(rule, dtype)
        assert run(name, half, [dtype], device, both, level="O2", use_promote=use_promote) == {wanted}, (rule, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", of_ops(public(op.name for op in OPS.values() if op.inside)))
def test_matrix_products_inside_an_op_are_not_lowered_at_o2(name: str, device: str) -> None:
    assert OpLists.custom(level="O2").rule_of(name) in ("free", "promote", "half")
    wanted = torch.bfloat16 if name in HALF else torch.float32
    assert run(name, torch.bfloat16, [torch.float32], device, True, level="O2") == {wanted}


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this build of torch may run them on a real GPU")
@pytest.mark.parametrize("name", NOT_ON_FAKES)
def test_what_is_not_run_on_fakes_cannot_be(name: str) -> None:
    shapes, call = call_of(name)
    with on(FAKE) as where, pytest.raises((*READS_THE_HOST, AssertionError, RuntimeError)):
        call(*[t.to(where) for t in slots(shapes, [torch.float32])])


@pytest.mark.parametrize("pool", [F.max_pool1d, F.max_pool2d, F.max_pool3d])
@pytest.mark.parametrize("grad", [False, True])
def test_max_pooling_with_indices_follows_the_entry_of_max_pooling(pool: Callable[..., Any], grad: bool) -> None:
    x = torch.randn(1, 2, 4, 4, 4, requires_grad=grad)
    if pool is not F.max_pool3d:
        x = x[0] if pool is F.max_pool2d else x[0, 0]
    with amp.auto_cast(dtype=torch.float16, emulate=False, custom_white_list=[pool]):
        values, indices = pool(x, 2, return_indices=True)
        assert pool(x, 2).dtype is values.dtype is torch.float16
    assert indices.dtype is torch.int64
    with amp.auto_cast(dtype=torch.float16, emulate=False, custom_black_list=[pool]):
        assert pool(x.half(), 2, return_indices=True)[0].dtype is torch.float32


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_counts_beyond_the_whole_numbers_of_16_bits(half: torch.dtype) -> None:
    with OpCasting(half):
        counts = torch.histc(torch.ones(3001, dtype=half), 1, 0.0, 2.0)
        sums = torch.segment_reduce(torch.ones(3001, dtype=half), "sum", lengths=torch.tensor([3001]))
    assert (counts.item(), sums.item()) == (3001, 3001)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_binary_cross_entropy_of_fp32_probabilities_takes_16_bit_targets(half: torch.dtype) -> None:
    x, y = torch.tensor([0.25, 0.75]), torch.tensor([0.0, 1.0])
    with OpCasting(half):
        loss = F.binary_cross_entropy(x, y.to(half), weight=torch.ones(2, dtype=half))
        with pytest.raises(UnsafeOpError):
            F.binary_cross_entropy(input=x.to(half), target=y)
    assert loss.item() == F.binary_cross_entropy(x, y).item()
