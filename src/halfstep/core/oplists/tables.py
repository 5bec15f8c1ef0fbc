"""The facts: which torch ops gain from 16 bits, which need fp32 and why, and what other libraries call them.

One name stands for one op in all its spellings: ``softmax`` is ``torch.softmax``, ``Tensor.softmax``,
``torch.nn.functional.softmax`` and ``torch.special.softmax``. An op in no table is free: its inputs decide.

Sources: the op lists of NVIDIA Apex (``apex.amp.lists``), of torch 2.13 (``aten/src/ATen/autocast_mode.h``) and of
Paddle 3.3 (``paddle.amp``); where they differ, ``docs/precision.md`` says which one was followed.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ALIASES",
    "ATEN_NAMES",
    "BANNED",
    "FLOAT",
    "HALF",
    "INNER_MATMUL",
    "NATIVE_HALF",
    "NATIVE_UNLISTED",
    "O2_FLOAT",
    "PADDLE_NAMES",
    "PROMOTE",
    "PROMOTE_BY_TORCH",
    "SEQUENCE_PROMOTE",
    "VIEWS_AND_FACTS",
]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_CONVOLUTIONS = _words("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc")
_MATRIX_PRODUCTS = _words("linear matmul mm mv bmm addmm addmv addr addbmm baddbmm einsum chain_matmul") + (
    "linalg.multi_dot",
    "linalg.vecdot",
)
_RECURRENT = _words("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")

HALF: Final = (*_CONVOLUTIONS, *_MATRIX_PRODUCTS, "prelu", "scaled_dot_product_attention", *_RECURRENT)
"""Fast in 16 bits and safe: products that accumulate in fp32 inside their kernels."""

NATIVE_HALF: Final = frozenset(
    {*_CONVOLUTIONS, *_words("linear matmul mm bmm addmm addbmm baddbmm prelu scaled_dot_product_attention")}
    | {"linalg.vecdot"}
)
"""Those that ``torch.autocast`` itself runs in 16 bits, on the CPU and on CUDA."""

FLOAT: Final[dict[str, tuple[str, ...]]] = {
    "exp range": _words(
        "exp exp2 expm1 cosh sinh softplus erfinv pow square log log10 log2 log1p reciprocal rsqrt tan acos asin atanh"
    ),
    "softmax": _words("softmax log_softmax softmin logsumexp logcumsumexp"),
    "large reduction": _words(
        "sum nansum mean nanmean prod cumsum cumprod std var std_mean var_mean trace cov corrcoef quantile nanquantile"
    ),
    "norm": (
        *_words("norm renorm dist pdist cdist pairwise_distance cosine_similarity normalize nuclear_norm"),
        *_words("frobenius_norm linalg.norm linalg.vector_norm linalg.matrix_norm"),
    ),
    "normalization statistics": _words("layer_norm native_layer_norm group_norm rms_norm local_response_norm"),
    "loss": _words(
        "cross_entropy nll_loss nll_loss2d mse_loss l1_loss smooth_l1_loss huber_loss kl_div ctc_loss"
        " binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss hinge_embedding_loss"
        " cosine_embedding_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss"
        " multi_margin_loss soft_margin_loss triplet_margin_loss"
    ),
    "cancellation": _words("gelu tanhshrink"),
    "resampling weights": _words("interpolate grid_sample"),
    "gradient summed over rows": _words("embedding embedding_bag"),
    "no 16-bit kernels": (
        *_words("stft istft cholesky cholesky_inverse cholesky_solve inverse pinverse det logdet slogdet qr svd"),
        *_words("lu_solve triangular_solve geqrf ormqr orgqr matrix_exp matrix_power polar"),
        *(
            f"linalg.{name}"
            for name in _words(
                "cholesky cholesky_ex cond det eig eigh eigvals eigvalsh householder_product inv inv_ex lstsq lu"
                " lu_factor lu_solve matrix_exp matrix_power matrix_rank pinv qr slogdet solve solve_triangular svd"
                " svdvals tensorinv tensorsolve ldl_factor ldl_solve"
            )
        ),
        *(
            f"fft.{name}"
            for name in _words(
                "fft fft2 fftn hfft hfft2 hfftn ifft ifft2 ifftn ihfft ihfft2 ihfftn irfft irfft2 irfftn rfft rfft2"
                " rfftn"
            )
        ),
    ),
}
"""Ops that need fp32 inputs, by the reason in a word."""

O2_FLOAT: Final = _words("embedding embedding_bag interpolate")
"""What stays fp32 even at level O2: Paddle's extra black list."""

PROMOTE: Final = (
    *_words("addcdiv addcmul atan2 bilinear cross dot vdot inner tensordot lerp equal isclose allclose bucketize"),
    *_words("index_put index_add index_copy index_reduce scatter scatter_add scatter_reduce masked_scatter take_along"),
    *_words("searchsorted put where complex linalg.cross"),
)
"""Ops that torch refuses when their inputs differ in dtype: they run in the widest of their floating inputs."""

PROMOTE_BY_TORCH: Final = _words(
    "add sub mul div eq ge gt le lt ne maximum minimum fmax fmin fmod remainder floor_divide hypot copysign xlogy rsub"
    " logaddexp logaddexp2"
)
"""Ops whose inputs torch itself brings to the widest dtype, with casts fused into the kernel."""

SEQUENCE_PROMOTE: Final = _words("cat stack hstack vstack dstack column_stack block_diag cartesian_prod")
"""Ops that take a sequence of tensors and bring them to the widest dtype."""

BANNED: Final = {
    "binary_cross_entropy": (
        "its logarithm has no safe range in 16 bits, and the sigmoid before it has rounded already. Let the model end "
        "in a linear layer and use binary_cross_entropy_with_logits (nn.BCEWithLogitsLoss), or put "
        '"binary_cross_entropy" on the black list to have its inputs cast to fp32'
    )
}
"""Ops that are refused on 16-bit inputs, with what to do instead."""

INNER_MATMUL: Final = frozenset(
    _words("bilinear tensordot inner cdist cov corrcoef matrix_power matrix_exp pinverse interpolate chain_matmul")
)
"""Ops whose own implementation calls an op that ``torch.autocast`` casts to 16 bits."""

NATIVE_UNLISTED: Final = _words(
    "avg_pool3d adaptive_avg_pool3d max_pool3d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d"
    " max_unpool1d max_unpool2d max_unpool3d pad fake_quantize_per_tensor_affine view_as_complex"
)
"""Free here, but cast to fp32 by ``torch.autocast`` on the CPU: to be kept from it there."""

VIEWS_AND_FACTS: Final = frozenset(
    _words(
        "view view_as reshape reshape_as transpose swapaxes swapdims permute movedim moveaxis t adjoint squeeze unsqueeze"
        " expand expand_as broadcast_to broadcast_tensors narrow select split tensor_split hsplit vsplit dsplit"
        " split_with_sizes chunk unbind unfold unflatten flatten ravel diagonal as_strided real imag view_as_real"
        " view_as_complex resolve_conj resolve_neg conj detach alias contiguous clone atleast_1d atleast_2d atleast_3d"
        " unsafe_chunk unsafe_split unsafe_split_with_sizes meshgrid"
        " to type type_as half bfloat16 float double bool byte char short int long cpu cuda xpu ipu mtia numpy tolist"
        " item data_ptr const_data_ptr dim ndimension size stride numel nelement element_size storage storage_offset"
        " untyped_storage storage_type get_device dim_order is_complex is_conj is_contiguous is_coalesced"
        " is_distributed is_floating_point is_inference is_neg is_nonzero is_pinned is_same_size is_set_to is_shared"
        " is_signed backward register_hook register_post_accumulate_grad_hook retain_grad record_stream pin_memory"
        " empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_full new_ones"
        " new_tensor new_zeros new_empty_strided sparse_dim dense_dim indices values coalesce to_dense to_sparse"
        " to_mkldnn layout module_load bernoulli multinomial normal poisson isfinite isinf isnan isneginf isposinf"
        " isreal signbit argmax argmin argsort nonzero count_nonzero all any sum_to_size autocast quantize_per_tensor"
        " quantize_per_channel dequantize int_repr q_scale q_zero_point qscheme lobpcg sym_float sym_int sym_max sym_min"
        " sym_not sym_sum sym_ite apply_ map_ map2_ resize resize_as index hash_tensor has_names refine_names"
    )
)
"""Free at every level, even where unlisted ops are cast: views (a cast would break the tie to their base), facts about
a tensor, conversions the user asked for, and fresh tensors."""

ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "add": ("Tensor.__add__", "Tensor.__radd__"),
    "sub": ("subtract", "Tensor.__sub__", "Tensor.__rsub__"),
    "mul": ("multiply", "Tensor.__mul__", "Tensor.__rmul__"),
    "div": ("divide", "true_divide", "Tensor.__truediv__", "Tensor.__rtruediv__", "Tensor.__div__", "Tensor.__rdiv__"),
    "floor_divide": ("Tensor.__floordiv__", "Tensor.__rfloordiv__"),
    "remainder": ("Tensor.__mod__", "Tensor.__rmod__"),
    "matmul": ("Tensor.__matmul__", "Tensor.__rmatmul__", "linalg.matmul"),
    "pow": ("Tensor.__pow__", "Tensor.__rpow__", "Tensor.__ipow__"),
    "neg": ("negative", "Tensor.__neg__"),
    "abs": ("absolute", "Tensor.__abs__"),
    "eq": ("Tensor.__eq__",),
    "ne": ("not_equal", "Tensor.__ne__"),
    "ge": ("greater_equal", "Tensor.__ge__"),
    "gt": ("greater", "Tensor.__gt__"),
    "le": ("less_equal", "Tensor.__le__"),
    "lt": ("less", "Tensor.__lt__"),
    "acos": ("arccos",),
    "asin": ("arcsin",),
    "atan": ("arctan",),
    "acosh": ("arccosh",),
    "asinh": ("arcsinh",),
    "atanh": ("arctanh",),
    "atan2": ("arctan2",),
    "exp2": ("special.exp2",),
    "expm1": ("special.expm1",),
    "log1p": ("special.log1p",),
    "erfinv": ("special.erfinv",),
    "erf": ("special.erf",),
    "erfc": ("special.erfc",),
    "sigmoid": ("special.expit",),
    "softmax": ("special.softmax",),
    "log_softmax": ("special.log_softmax",),
    "logsumexp": ("special.logsumexp",),
    "clamp": ("clip",),
    "cat": ("concat", "concatenate"),
    "vstack": ("row_stack",),
    "norm": ("functional.norm",),
    "cdist": ("functional.cdist",),
    "einsum": ("functional.einsum",),
    "outer": ("ger",),
    "linalg.vecdot": (),
    "linalg.inv": (),
    "cholesky": (),
    "take_along": ("take_along_dim",),
    "grid_sample": ("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"),
    "interpolate": ("nn.functional.upsample", "nn.functional.upsample_nearest", "nn.functional.upsample_bilinear"),
    "group_norm": ("native_group_norm",),
    "logsigmoid": ("nn.functional.logsigmoid", "_C._nn.log_sigmoid"),
    "hardtanh": ("nn.functional.hardtanh",),
}
"""Other spellings of an op, under ``torch``. In-place forms (a trailing underscore) are found by themselves."""

ATEN_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "convolution": _CONVOLUTIONS,
    "_convolution": _CONVOLUTIONS,
    "cudnn_convolution": _CONVOLUTIONS,
    "_softmax": ("softmax",),
    "_log_softmax": ("log_softmax",),
    "native_group_norm": ("group_norm",),
    "native_layer_norm": ("layer_norm",),
    "_thnn_fused_lstm_cell": ("lstm_cell",),
    "_thnn_fused_gru_cell": ("gru_cell",),
    "_scaled_dot_product_flash_attention": ("scaled_dot_product_attention",),
    "_scaled_dot_product_efficient_attention": ("scaled_dot_product_attention",),
    "cross_entropy_loss": ("cross_entropy",),
    **{
        name: ("interpolate",)
        for name in _words(
            "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d"
            " _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d"
            " _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa upsample_trilinear3d"
        )
    },
}
"""Names that torch's dispatcher has for ops and torch's Python interface has not."""

PADDLE_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "matmul_v2": ("matmul", "mm", "linear"),
    "linear_v2": ("linear",),
    "fused_gemm_epilogue": ("linear",),
    "flash_attn": ("scaled_dot_product_attention",),
    "fused_attention": ("scaled_dot_product_attention",),
    "depthwise_conv2d": ("conv2d",),
    "conv2d_transpose": ("conv_transpose2d",),
    "conv3d_transpose": ("conv_transpose3d",),
    "depthwise_conv2d_transpose": ("conv_transpose2d",),
    "elementwise_add": ("add",),
    "elementwise_sub": ("sub",),
    "elementwise_mul": ("mul",),
    "elementwise_div": ("div",),
    "elementwise_pow": ("pow",),
    "elementwise_max": ("maximum",),
    "elementwise_min": ("minimum",),
    "elementwise_mod": ("remainder",),
    "elementwise_floordiv": ("floor_divide",),
    "scale": ("mul",),
    "greater_than": ("gt",),
    "less_than": ("lt",),
    "reduce_sum": ("sum",),
    "reduce_mean": ("mean",),
    "reduce_prod": ("prod",),
    "reduce_max": ("amax", "max"),
    "reduce_min": ("amin", "min"),
    "p_norm": ("norm", "linalg.norm", "linalg.vector_norm"),
    "pnorm": ("norm", "linalg.norm", "linalg.vector_norm"),
    "tanh_shrink": ("tanhshrink",),
    "softmax_with_cross_entropy": ("cross_entropy",),
    "c_softmax_with_cross_entropy": ("cross_entropy",),
    "c_softmax_with_multi_label_cross_entropy": ("cross_entropy",),
    "margin_cross_entropy": ("cross_entropy",),
    "cross_entropy2": ("cross_entropy",),
    "sigmoid_cross_entropy_with_logits": ("binary_cross_entropy_with_logits",),
    "bce_loss": ("binary_cross_entropy",),
    "log_loss": ("binary_cross_entropy",),
    "kldiv_loss": ("kl_div",),
    "lookup_table": ("embedding",),
    "lookup_table_v2": ("embedding",),
    "linear_interp_v2": ("interpolate",),
    "nearest_interp_v2": ("interpolate",),
    "bilinear_interp_v2": ("interpolate",),
    "bicubic_interp_v2": ("interpolate",),
    "trilinear_interp_v2": ("interpolate",),
    "grid_sampler": ("grid_sample",),
    "concat": ("cat",),
    "pool2d": ("max_pool2d", "avg_pool2d"),
    "pool3d": ("max_pool3d", "avg_pool3d"),
    "max_pool2d_with_index": ("max_pool2d",),
    "max_pool3d_with_index": ("max_pool3d",),
    "pad3d": ("pad",),
    "dropout_nd": ("dropout",),
    "transpose2": ("transpose",),
    "reshape2": ("reshape",),
    "squeeze2": ("squeeze",),
    "unsqueeze2": ("unsqueeze",),
    "flatten2": ("flatten",),
    "top_k": ("topk",),
    "top_k_v2": ("topk",),
    "expand_v2": ("expand",),
    "swish": ("silu",),
    "hard_swish": ("hardswish",),
    "hard_sigmoid": ("hardsigmoid",),
    "logsigmoid": ("logsigmoid",),
    "brelu": ("hardtanh",),
}
"""Paddle's names that torch does not share, and what torch calls the op. A name that both have means torch's op."""
