"""The parts of Apex that halfstep does not have: tables of modules and of names, each with its replacement."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

from ..core.errors import HalfstepError, MissingModuleError, MissingNameError
from ..torch_internals.callers import caller_in

__all__ = ["refuse_missing", "refusing"]

_TREE = f"{__package__}.apex."

_SHARDED = "with FSDP2 (torch.distributed.fsdp.fully_shard), or in torch.distributed.optim.ZeroRedundancyOptimizer."
_ADAM = {"DistributedFusedAdam": f"Use apex.optimizers.FusedAdam {_SHARDED}"}
_LAMB = {"DistributedFusedLAMB": f"Use apex.optimizers.FusedLAMB {_SHARDED}"}
_FP16UTIL = {
    "Fused_Weight_Norm": "Use apex.reparameterization.WeightNorm, or torch.nn.utils.parametrizations.weight_norm.",
    "backwards_debug_hook": "Use torch.autograd.detect_anomaly().",
}
_INITIALIZE = "Use amp.initialize."
_NO_EPS_OUTSIDE = "It puts eps inside the root; use NpuFusedRMSprop, or RMSpropTF of the package timm."
_NO_CLAMP = "Its trust ratio clamps the norm of the weight to 10; use FusedLAMB, which does not."
_OP_LISTS = "Op lists decide on casts: use amp.register_half_function and its siblings, or edit amp.lists."
_STEPS = "The optimizers of halfstep do it themselves: use amp.scale_loss, step and amp.master_params."
_SYNC = {"SyncBatchnormFunction": "Use apex.parallel.SyncBatchNorm, or the functions of the extension syncbn."}

_MODULES = {
    "contrib.bottleneck": "Use torchvision's Bottleneck with DistributedDataParallel.",
    "contrib.conv_bias_relu": "Use torch.nn.Conv2d and torch.relu under torch.compile, which fuses them.",
    "contrib.cudnn_gbn": "Use apex.parallel.SyncBatchNorm with a process group.",
    "contrib.fmha": "Use torch.nn.functional.scaled_dot_product_attention.",
    "contrib.gpu_direct_storage": "Use torch.cuda.gds.",
    "contrib.groupbn": "Use apex.parallel.SyncBatchNorm with a process group, and channels_last.",
    "contrib.index_mul_2d": "Use in1[idx] * in2.",
    "contrib.multihead_attn": "Use torch.nn.MultiheadAttention, or torch.nn.functional.scaled_dot_product_attention "
    "with projections of your own.",
    "contrib.nccl_allocator": "Use torch.cuda.MemPool.",
    "contrib.openfold_triton": "Use torch.nn.functional.scaled_dot_product_attention and torch.nn.LayerNorm.",
    "contrib.peer_memory": "Use torch.distributed with the NCCL backend.",
    "contrib.sparsity": "Use torch.sparse.to_sparse_semi_structured, or the 2:4 sparsity of torchao.sparsity.",
    "contrib.transducer": "Use torchaudio.functional.rnnt_loss.",
    "pyprof.parse": "Use torch.profiler, and key_averages() of what it gives.",
    "pyprof.prof": "Use torch.profiler, and key_averages() of what it gives.",
    "transformer": "Use Megatron-LM, or torch.distributed.tensor.parallel and torch.distributed.pipelining.",
}
"""The replacement of each module of ``apex`` that is missing."""

_NAMES: dict[str, dict[str, str]] = {
    "amp._amp_state": {"warn_or_err": "Use an error of your own.", "container_abcs": "Use collections.abc."},
    "amp._initialize": {
        "_initialize check_models check_optimizers check_params_fp32": _INITIALIZE,
        "applier to_type wrap_fused_adam O2StateDictHook": _INITIALIZE,
    },
    "amp._process_optimizer": {
        "AmpOptimizerState _process_optimizer lazy_init_with_master_weights lazy_init_no_master_weights": _STEPS,
        "post_backward_models_are_masters post_backward_with_master_weights post_backward_no_master_weights": _STEPS,
        "prepare_backward_with_master_weights prepare_backward_no_master_weights": _STEPS,
    },
    "amp.compat": {"filter_attrs": _OP_LISTS},
    "amp.rnn_compat": {"VariableFunctionsShim whitelist_rnn_cells": _OP_LISTS},
    "amp.scaler": {
        "iter_params scale_check_overflow_python axpby_check_overflow_python": "Use LossScaler.unscale, or "
        "amp_C.multi_tensor_scale and amp_C.multi_tensor_axpby."
    },
    "amp.utils": {
        "cached_cast casted_args collect_fp_tensor_types should_cache verbosify as_inplace": _OP_LISTS,
        "get_func set_func set_func_save": _OP_LISTS,
        "synthesize_flattened_rnn_weights new_synthesize_flattened_rnn_weights": _OP_LISTS,
    },
    "amp.wrap": {
        "make_cast_wrapper cached_cast make_promote_wrapper promote sequence_promote promote_match_arg0": _OP_LISTS,
        "err_if_any_half err_if_arg0_half rnn_cast new_rnn_cast disable_casts": _OP_LISTS,
    },
    "contrib.optimizers": {**_ADAM, **_LAMB},
    "contrib.optimizers.distributed_fused_adam": _ADAM,
    "contrib.optimizers.distributed_fused_lamb": _LAMB,
    "fp16_utils": _FP16UTIL,
    "fp16_utils.fp16util": _FP16UTIL,
    "optimizers": {
        "FusedLARS": "Use apex.parallel.LARC around FusedSGD, which bounds the rate of each parameter in the same way.",
        "FusedLANS": "Use FusedLAMB.",
        "Lamb NpuFusedLamb": _NO_CLAMP,
        "NpuFusedAdamP": "AdamP projects the step, which no optimizer here does; use the package adamp, or "
        "NpuFusedAdamW.",
        "NpuFusedBertAdam": "Use FusedAdam(bias_correction=False), a scheduler for the warm-up, and max_grad_norm=.",
        "NpuFusedRMSpropTF": _NO_EPS_OUTSIDE,
        "NpuFusedOptimizerBase": "Use halfstep.optimizers.FusedAdam or another one of them.",
    },
    "parallel.optimized_sync_batchnorm_kernel": _SYNC,
    "parallel.sync_batchnorm_kernel": _SYNC,
}
"""By module of ``apex``, the replacement of each missing name, or of several names with a space between them."""

_NORM, _ATTENTION = "apex.normalization.FusedLayerNorm", "torch.nn.functional.scaled_dot_product_attention"
_EXTENSIONS = {
    "bnp": "apex.parallel.SyncBatchNorm with a process group, and channels_last",
    "distributed_lamb_cuda": "apex.optimizers.FusedLAMB with FSDP2",
    "fast_layer_norm": _NORM,
    "fast_multihead_attn": "torch.nn.MultiheadAttention",
    "fmhalib": _ATTENTION,
    "fused_adam_cuda": "apex.optimizers.FusedAdam",
    "fused_dense_cuda": "apex.fused_dense",
    "fused_layer_norm_cuda": _NORM,
    "fused_rotary_positional_embedding": "the rotary embedding of Megatron-LM",
    "fused_weight_gradient_mlp_cuda": "torch.nn.Linear",
    "generic_scaled_masked_softmax_cuda": _ATTENTION,
    "mlp_cuda": "apex.mlp.MLP",
    "scaled_masked_softmax_cuda": _ATTENTION,
    "scaled_softmax_cuda": _ATTENTION,
    "scaled_upper_triang_masked_softmax_cuda": f"{_ATTENTION} with is_causal=True",
    "xentropy_cuda": "apex.contrib.xentropy.SoftmaxCrossEntropyLoss",
}
"""The replacements of Apex's compiled modules."""


class NotImportedError(HalfstepError, AttributeError):
    """Raised by an attribute access to a missing module; a ``from`` import then asks the finder below."""


class _Missing(importlib.abc.MetaPathFinder):
    """A finder behind all other finders, which is asked only for modules that no other finder has found."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        name = fullname.removeprefix(_TREE)
        if name != fullname and name in _MODULES:
            # Do not set the error's name, or `from apex import X` hides this error behind its own.
            raise MissingModuleError(f"halfstep does not have apex.{name}. {_MODULES[name]}")
        if fullname in _EXTENSIONS and caller_in("importlib.util") is None:  # not a query by ``find_spec``
            error = MissingModuleError(
                f"No module named {fullname!r}: it is a compiled extension of Apex, and halfstep has none. Use "
                f"{_EXTENSIONS[fullname]}."
            )
            error.name = fullname
            raise error


_finder = _Missing()


def refuse_missing() -> None:
    """Make an import of one of these modules raise an error that names the replacement."""
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def refusing(module: str) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a module of Apex's tree, which names the replacement of a missing name.

    For a missing name it raises an ImportError, because ``from module import name`` hides the message of an
    AttributeError.
    """
    path = module.removeprefix(_TREE[:-1]).removeprefix(".")
    instead = {name: advice for names, advice in _NAMES.get(path, {}).items() for name in names.split()}

    def getattr_(name: str) -> NoReturn:
        if name in instead:
            raise MissingNameError(f"apex.{path}.{name} is not in halfstep. {instead[name]}", name=name)
        below = f"{path}.{name}".removeprefix(".")
        if below in _MODULES:
            raise NotImportedError(f"halfstep does not have apex.{below}. {_MODULES[below]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return getattr_
