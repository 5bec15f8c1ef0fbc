"""The op lists and classes of ops, by canonical (ATen) name. Data only.

The lists are the union of Apex's O1 lists, Paddle's and ``torch.autocast``'s for CUDA, plus the ops that came later.
``NATIVE`` holds facts about torch (2.11 to 2.13): what ``torch.autocast`` itself casts on each device.
"""

from __future__ import annotations

__all__ = [
    "BANNED",
    "CLASS_OF",
    "CORE_HALF",
    "EXTRA_FLOAT",
    "FLOAT",
    "FOLLOWS_FIRST",
    "HALF",
    "INNER_PRODUCT",
    "KEEPS_DTYPE",
    "LISTED",
    "MEETING_FLOAT",
    "MEETING_PROMOTE",
    "MOVEMENT",
    "NATIVE",
    "NO_HALF",
    "OP_CLASSES",
    "PADDLE_NAMES",
    "PROMOTE",
    "SELF_MATCHING",
    "SELF_PROMOTING",
    "SEQUENCE",
    "pairs",
    "words",
]


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def pairs(text: str) -> dict[str, str]:
    """A dictionary from a text of pairs: ``name=value name=value``."""
    return dict(pair.split("=") for pair in text.split())


def _each(words: str, reason: str) -> dict[str, str]:
    return dict.fromkeys(words.split(), reason)


_PRODUCTS = words("""
    linear matmul mm bmm mv addmm addmv addbmm baddbmm einsum chain_matmul linalg_multi_dot linalg_matmul
    """)
_CONVOLUTIONS = words("""
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution
    """)
_ATTENTION = words("""
    scaled_dot_product_attention _scaled_dot_product_flash_attention _native_multi_head_attention
    """)
_RECURRENT = words("""
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
    _thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer
    """)

OP_CLASSES: dict[str, frozenset[str]] = {
    "product": _PRODUCTS | words("linalg_vecdot inner _addmm_activation bilinear tensordot dot vdot"),
    "convolution": _CONVOLUTIONS,
    "attention": _ATTENTION | words("_transformer_encoder_layer_fwd"),
    "recurrent": _RECURRENT,
}
"""Sums of products, which a chip may have 16-bit units for. Libraries implement the ops of one class together."""

CLASS_OF: dict[str, str] = {name: kind for kind, names in OP_CLASSES.items() for name in names}
"""The key in ``OP_CLASSES`` of each op that has one."""

CORE_HALF: frozenset[str] = _PRODUCTS | _CONVOLUTIONS
"""Matrix products and convolutions: the ops that matrix units run, and all that level OD casts."""

HALF: frozenset[str] = CORE_HALF | _ATTENTION | _RECURRENT | words("addr prelu linalg_vecdot inner _addmm_activation")
"""Fast in 16 bits, and safe because the sums inside are fp32."""

EXTRA_FLOAT: dict[str, str] = {
    **_each(
        """interpolate upsample upsample_nearest upsample_bilinear
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
        upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa _upsample_bilinear2d_aa
        _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d""",
        "interpolation",
    ),
    **_each("embedding embedding_bag scatter", "accumulation"),
}
"""The part of ``FLOAT`` that also holds at level O2."""

FLOAT: dict[str, str] = {
    **EXTRA_FLOAT,
    **_each("exp expm1 exp2 cosh sinh tan pow float_power square logaddexp logaddexp2 logcumsumexp", "exp-range"),
    **_each("special_i1 special_i1e", "no-16-bit-gradient"),
    **_each("log log10 log2 log1p acos asin atanh erfinv reciprocal rsqrt tanhshrink softplus gelu", "cancellation"),
    **_each("softmax softmin log_softmax logsumexp", "exp-range"),
    **_each("sum nansum mean nanmean prod cumsum cumprod trace", "large-reduction"),
    **_each("histc segment_reduce", "large-reduction"),
    **_each("sum_to_size trapz trapezoid cumulative_trapezoid", "large-reduction"),
    **_each("std var std_mean var_mean cov corrcoef quantile nanquantile", "large-reduction"),
    **_each("dist cdist pdist pairwise_distance cosine_similarity", "norm"),
    **_each("norm renorm frobenius_norm nuclear_norm normalize", "norm"),
    **_each("linalg_norm linalg_vector_norm linalg_matrix_norm", "norm"),
    **_each("layer_norm native_layer_norm group_norm rms_norm local_response_norm", "norm"),
    **_each(
        """cross_entropy cross_entropy_loss nll_loss nll_loss2d nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss
        kl_div binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss cosine_embedding_loss ctc_loss
        hinge_embedding_loss margin_ranking_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward
        multilabel_soft_margin_loss soft_margin_loss triplet_margin_loss linear_cross_entropy""",
        "loss",
    ),
    **_each("grid_sample grid_sampler grid_sampler_2d grid_sampler_3d affine_grid_generator", "coordinates"),
    **_each(
        """inverse pinverse cholesky cholesky_inverse cholesky_solve qr svd geqrf orgqr ormqr lu lu_solve
        triangular_solve logdet slogdet det matrix_exp matrix_power
        linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex linalg_ldl_solve
        linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp
        linalg_matrix_power linalg_matrix_rank linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
        linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve""",
        "linalg",
    ),
    **_each(
        """fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft fft_irfft2
        fft_irfftn fft_hfft fft_hfft2 fft_hfftn fft_ihfft fft_ihfft2 fft_ihfftn stft istft""",
        "fft",
    ),
    **_each("polar complex view_as_complex", "complex"),
}
"""Run in fp32. The value is the reason, in a word."""

PROMOTE: frozenset[str] = words("""
    addcdiv addcmul atan2 cross linalg_cross bilinear dot vdot tensordot lerp
    index_put index_add index_copy index_reduce scatter_add scatter_reduce masked_scatter heaviside isclose allclose
    add sub mul div eq ne ge gt le lt equal maximum minimum fmax fmin where hypot copysign remainder fmod outer kron
    """)
"""Run in the widest dtype among the inputs."""

SEQUENCE: frozenset[str] = words("cat stack hstack vstack dstack column_stack")
"""Run in the widest dtype among a sequence of tensors."""

BANNED: dict[str, str] = {
    "binary_cross_entropy": (
        "Its gradient, and the sigmoid before it, overflow in 16 bits. Use binary_cross_entropy_with_logits "
        "(nn.BCEWithLogitsLoss) on the output before the sigmoid, which is safe; or compute the sigmoid in fp32 "
        "(amp.register_float_function(torch, 'sigmoid')); or put the op on the black list "
        "(custom_black_list=['binary_cross_entropy']) to run it in fp32."
    )
}
"""Refused for 16-bit inputs: what to do instead, as the error says it."""

LISTED: frozenset[str] = HALF | FLOAT.keys() | PROMOTE | SEQUENCE | BANNED.keys()
"""Every op on a list."""

MEETING_FLOAT: frozenset[str] = (
    words("""
    matrix_exp linalg_matrix_exp lu_solve linalg_lu_solve pdist special_i1 special_i1e logcumsumexp soft_margin_loss
    grid_sample grid_sampler grid_sampler_2d grid_sampler_3d
    """)
    | BANNED.keys()
    | {name for name, reason in FLOAT.items() if reason == "loss"} - {"linear_cross_entropy"}
)
"""Losses, and ops that torch takes in 16 bits and computes wrong, or whose gradient it has not in 16 bits (2.11 to
2.13, CPU)."""

NO_HALF: frozenset[str] = words("""
    cdist quantile nanquantile avg_pool3d _upsample_bilinear2d_aa rrelu histogram histogramdd nuclear_norm linalg_vander
    _standard_gamma _sample_dirichlet
    """) | {
    f"special_{name}"
    for name in words("""
        zeta ndtri log_ndtr erfcx airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 spherical_bessel_j0
        modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1
        scaled_modified_bessel_k0 scaled_modified_bessel_k1 hermite_polynomial_h hermite_polynomial_he
        laguerre_polynomial_l legendre_polynomial_p
        chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
        shifted_chebyshev_polynomial_w
        """)
}
"""Ops that have no kernel for 16 bits (torch 2.11 to 2.13, CPU), beside those for linear algebra and FFT.
``python -m tests.support.op_sweep "O2, recorded"`` finds them."""

MEETING_PROMOTE: frozenset[str] = words("addr linear_cross_entropy meshgrid cartesian_prod put _weight_norm")
"""Ops that take a 16-bit tensor beside an fp32 one, while their gradient does not, or that refuse it."""

INNER_PRODUCT: frozenset[str] = words(
    """bilinear tensordot inner linalg_vecdot cov corrcoef matrix_power matrix_exp linalg_matrix_power linalg_matrix_exp
    pinverse linalg_pinv cdist pairwise_distance linalg_det linalg_lstsq linear_cross_entropy
    affine_grid_generator"""
)
"""Ops whose own implementation may call a matrix product, which native autocast would run in 16 bits."""

SELF_MATCHING: frozenset[str] = words("add sub mul div eq ne ge gt le lt addcmul addcdiv atan2 remainder fmod copysign")
"""Ops whose in-place form accepts inputs of other dtypes without autocast."""

SELF_PROMOTING: frozenset[str] = (
    SELF_MATCHING | SEQUENCE | words("equal maximum minimum fmax fmin where hypot outer kron pow")
)
"""Ops for which torch itself promotes inputs of different dtypes, without autocast."""

MOVEMENT: frozenset[str] = words(
    """view reshape _unsafe_view view_as transpose permute t numpy_T mT expand expand_as slice select unsqueeze squeeze
    flatten unflatten contiguous clone detach alias narrow movedim swapaxes unfold flip roll repeat"""
)
"""Ops of one tensor that move numbers and compute none."""

FOLLOWS_FIRST: frozenset[str] = words("batch_norm instance_norm _native_batch_norm_legit native_batch_norm embedding")
"""Ops that accept fp32 parameters beside a 16-bit input, and compute in the dtype of the input."""

KEEPS_DTYPE: frozenset[str] = words("""
    to type type_as clone copy detach contiguous float double half bfloat16 int long bool item tolist numpy
    lift lift_fresh empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros
    new_ones new_full new_tensor empty zeros ones full set resize record_stream is_nonzero
    alias fill zero normal uniform random bernoulli binomial cauchy exponential geometric log_normal poisson multinomial
    linspace logspace int_repr dequantize
    """)
"""Conversions, factories and other ops that are given their dtype and compute no value from their inputs."""

NATIVE: dict[str, dict[str, frozenset[str]]] = {
    "cpu": {
        "half": words("""
            _addmm_activation _convolution _native_multi_head_attention addbmm addmm baddbmm bmm conv1d conv2d conv3d
            conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d linalg_vecdot linear matmul mkldnn_rnn_layer mm
            scaled_dot_product_attention prelu
            """),
        "float": words("""
            binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky cholesky_inverse cholesky_solve
            cosine_embedding_loss cross_entropy cross_entropy_loss ctc_loss geqrf grid_sample grid_sampler
            grid_sampler_2d grid_sampler_3d hinge_embedding_loss huber_loss inverse kl_div l1_loss lu_solve
            margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward
            nanquantile nll_loss nll_loss2d nll_loss_nd orgqr ormqr pinverse poisson_nll_loss polar prod qr quantile
            smooth_l1_loss soft_margin_loss stft svd trace triangular_solve triplet_margin_loss view_as_complex
            linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
            linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_qr linalg_solve
            linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve
            fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn fft_irfft fft_irfft2
            fft_irfftn fft_hfft fft_ihfft
            adaptive_avg_pool3d adaptive_max_pool3d max_pool3d fractional_max_pool2d fractional_max_pool3d
            max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
            replication_pad3d pad fake_quantize_per_tensor_affine linear_cross_entropy
            """),
        "promote": words("cat stack index_copy"),
    },
    "cuda": {
        "half": words("""
            _convolution convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
            _scaled_dot_product_flash_attention scaled_dot_product_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell
            addbmm addmm addmv addr baddbmm bmm chain_matmul einsum gru_cell linalg_multi_dot linalg_vecdot linear
            lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell lstm gru rnn_tanh rnn_relu
            """),
        "float": words("""
            acos asin cosh cosine_similarity cdist cosine_embedding_loss cumprod cumsum dist erfinv exp expm1
            frobenius_norm group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm linalg_matrix_norm
            linalg_vector_norm log log10 log1p log2 log_softmax logsumexp margin_ranking_loss mse_loss multi_margin_loss
            multilabel_margin_loss native_layer_norm nll_loss nll_loss2d norm nuclear_norm pdist poisson_nll_loss pow
            prod reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softplus sum tan
            triplet_margin_loss binary_cross_entropy_with_logits interpolate upsample
            upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
            upsample_nearest3d upsample_trilinear3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa
            _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d cross_entropy
            sum_to_size trapz trapezoid cumulative_trapezoid square stft softmin normalize local_response_norm
            multilabel_soft_margin_loss pairwise_distance linalg_norm gaussian_nll_loss linear_cross_entropy
            """),
        "promote": words("""
            addcdiv addcmul atan2 bilinear cross dot grid_sampler grid_sample index_put scatter_add tensordot vdot
            cat stack
            """),
        "banned": frozenset(("binary_cross_entropy",)),
    },
}
"""The ops that ``torch.autocast`` casts, by device type and rule. Some only call an op that it casts."""

PADDLE_NAMES: dict[str, tuple[str, ...]] = {
    **{
        name: (op,)
        for name, op in pairs("""
            linear_v2=linear fused_gemm_epilogue=linear conv2d_transpose=conv_transpose2d
            conv3d_transpose=conv_transpose3d depthwise_conv2d=conv2d depthwise_conv2d_transpose=conv_transpose2d
            flash_attn=scaled_dot_product_attention fused_attention=scaled_dot_product_attention elementwise_add=add
            elementwise_sub=sub elementwise_mul=mul elementwise_div=div elementwise_max=maximum elementwise_min=minimum
            elementwise_pow=pow elementwise_mod=remainder elementwise_floordiv=floor_divide tanh_shrink=tanhshrink
            hard_swish=hardswish hard_sigmoid=hardsigmoid hard_shrink=hardshrink swish=silu reduce_sum=sum
            reduce_mean=mean reduce_prod=prod arg_max=argmax arg_min=argmin top_k_v2=topk lookup_table=embedding
            lookup_table_v2=embedding linear_interp_v2=interpolate nearest_interp_v2=interpolate
            bilinear_interp_v2=interpolate bicubic_interp_v2=interpolate trilinear_interp_v2=interpolate
            reshape2=reshape squeeze2=squeeze unsqueeze2=unsqueeze flatten2=flatten split_with_num=split
            expand_v2=expand pad3d=pad fill_any_like=full_like less_than=lt greater_than=gt
            softmax_with_cross_entropy=cross_entropy c_softmax_with_cross_entropy=cross_entropy
            c_softmax_with_multi_label_cross_entropy=cross_entropy margin_cross_entropy=cross_entropy
            cross_entropy2=cross_entropy hsigmoid_loss=binary_cross_entropy_with_logits log_loss=binary_cross_entropy
            bce_loss=binary_cross_entropy kldiv_loss=kl_div warpctc=ctc_loss sync_batch_norm=batch_norm
            sigmoid_cross_entropy_with_logits=binary_cross_entropy_with_logits cross_entropy_with_softmax=cross_entropy
            parallel_cross_entropy=cross_entropy square_error_cost=mse_loss linear_interp=interpolate
            nearest_interp=interpolate bilinear_interp=interpolate bicubic_interp=interpolate
            trilinear_interp=interpolate flatten_contiguous_range=flatten pad2d=pad c_embedding=embedding fc=linear
            swiglu=silu flash_attention=scaled_dot_product_attention flash_attn_npu=scaled_dot_product_attention
            flash_attn_unpadded=scaled_dot_product_attention flash_attn_varlen=scaled_dot_product_attention
            memory_efficient_attention=scaled_dot_product_attention soft_relu=softplus elementwise_fmax=fmax
            elementwise_fmin=fmin reduce_any=any reduce_all=all reduce_amax=amax expand_as_v2=expand_as top_k=topk
            one_hot_v2=one_hot where_index=nonzero strided_slice=slice diag_v2=diag assign=clone gather_nd=index
            scatter_nd_add=index_put index_sample=gather take_along_axis=take_along_dim put_along_axis=scatter
            unstack=unbind isfinite_v2=isfinite isnan_v2=isnan determinant=linalg_det bilinear_tensor_product=bilinear
            isinf_v2=isinf logsigmoid=log_sigmoid as_complex=view_as_complex as_real=view_as_real
            flashmask_attention=scaled_dot_product_attention eigh=linalg_eigh lrn=local_response_norm
            """).items()
    },
    "tril_triu": ("tril", "triu"),
    **dict.fromkeys(words("cast set_value shape increment assign_value fill_constant"), ()),
    **dict.fromkeys(words("fill_constant_batch_size_like uniform_random gaussian_random"), ()),
    **dict.fromkeys(words("uniform_random_batch_size_like get_tensor_from_selected_rows rank c_identity c_concat"), ()),
    **dict.fromkeys(words("all_reduce all_gather reduce_scatter send_v2 recv_v2 fused_rotary_position_embedding"), ()),
    **dict.fromkeys(words("c_split c_broadcast c_allgather c_reducescatter c_allreduce_sum mp_allreduce_sum"), ()),
    "matmul_v2": ("matmul", "mm", "linear"),
    "pool2d": ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"),
    "max_pool2d_with_index": ("max_pool2d",),
    "pool3d": ("max_pool3d", "avg_pool3d", "adaptive_avg_pool3d"),
    "scale": ("mul", "add"),
    "reduce_max": ("amax", "max"),
    "reduce_min": ("amin", "min"),
    "pnorm": ("norm", "linalg_vector_norm"),
    "p_norm": ("norm", "linalg_vector_norm"),
    "transpose2": ("transpose", "permute"),
    "rnn": ("lstm", "gru", "rnn_tanh", "rnn_relu"),
}
"""Paddle's operator names that differ from torch's, and the torch ops that do the same. None for an op that is given
the dtype of its result, that sends tensors, or that torch does not have: there is nothing that a list could change."""

PADDLE_KERNELS: dict[str, str] = pairs("""
    fused_layernorm=layer_norm fused_rms_norm=rms_norm softmax_mask_fuse=softmax
    softmax_mask_fuse_upper_triangle=softmax fused_softmax_mask=softmax fused_softmax_mask_upper_triangle=softmax
    fused_conv2d_add_act=conv2d conv2d_fusion=conv2d fused_linear=linear fused_feedforward=linear cudnn_lstm=lstm
    gru_unit=gru_cell fused_bn_add_activation=batch_norm fused_multi_transformer=linear
    fake_quantize_dequantize_abs_max=fake_quantize_per_tensor_affine
    fake_quantize_dequantize_moving_average_abs_max=fused_moving_avg_obs_fake_quant
    """)
"""Paddle's names of kernels that do an op together with others, or in one library only. Its lists may have them."""

OF_TORCHVISION = pairs("""roi_align=roi_align roi_pool=roi_pool psroi_pool=ps_roi_pool deformable_conv=deform_conv2d
    multiclass_nms3=batched_nms""")
"""Paddle's names of ops that torch does not have and torchvision has."""
