"""Every name of Apex: it is here, or who asks for it is told what to use.

The rows are the modules of Apex 0.1 with amp, and what scripts of public repositories import, private names too.
"""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import apex as tree
from halfstep.cli.migrate import migrate
from halfstep.core.errors import MissingNameError

PRESENT = {
    "apex": "__version__ DeprecatedFeatureWarning deprecated_warning amp fp16_utils optimizers normalization parallel"
    " RNN"
    " reparameterization mlp fused_dense multi_tensor_apply contrib",
    "apex.amp": "init half_function float_function promote_function register_half_function register_float_function"
    " register_promote_function scale_loss disable_casts initialize state_dict load_state_dict master_params _amp_state"
    " amp compat frontend handle lists opt rnn_compat scaler utils wrap _initialize _process_optimizer",
    "apex._autocast_utils": "_cast_if_autocast_enabled _get_autocast_dtypes _get_current_dtype",
    "apex.amp.__version__": "VERSION __version__",
    "apex.amp._amp_state": "_amp_state AmpState maybe_print master_params",
    "apex.amp.amp": "init half_function float_function promote_function register_half_function register_float_function"
    " register_promote_function",
    "apex.amp.compat": "is_floating_point is_tensor_like scalar_python_val tensor_is_float_tensor tensor_is_variable"
    " variable_is_tensor",
    "apex.amp.frontend": "O0 O1 O2 O3 Properties opt_levels initialize state_dict load_state_dict",
    "apex.amp.handle": "AmpHandle NoOpHandle scale_loss disable_casts",
    "apex.amp.lists": "functional_overrides tensor_overrides torch_overrides",
    "apex.amp.lists.functional_overrides": "MODULE FP16_FUNCS FP32_FUNCS BANNED_FUNCS",
    "apex.amp.lists.tensor_overrides": "MODULE FP16_FUNCS FP32_FUNCS CASTS SEQUENCE_CASTS",
    "apex.amp.lists.torch_overrides": "MODULE FP16_FUNCS FP32_FUNCS CASTS SEQUENCE_CASTS",
    "apex.amp.opt": "OptimWrapper",
    "apex.amp.rnn_compat": "RNN_NAMES has_old_rnns",
    "apex.amp.scaler": "LossScaler",
    "apex.amp.utils": "get_cuda_version has_func is_cuda_enabled is_fp_tensor is_nested maybe_float maybe_half"
    " to_python_float type_string",
    "apex.fp16_utils": "BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads"
    " master_params_to_model_params tofp16 to_python_float clip_grad_norm convert_module convert_network FP16Model"
    " FP16_Optimizer LossScaler DynamicLossScaler fp16_optimizer fp16util loss_scaler",
    "apex.fp16_utils.fp16_optimizer": "FP16_Optimizer",
    "apex.fp16_utils.fp16util": "BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads"
    " master_params_to_model_params tofp16 to_python_float clip_grad_norm convert_module convert_network FP16Model",
    "apex.fp16_utils.loss_scaler": "LossScaler DynamicLossScaler to_python_float",
    "apex.parallel": "DistributedDataParallel Reducer SyncBatchNorm convert_syncbn_model create_syncbn_process_group"
    " LARC"
    " ReduceOp distributed multiproc optimized_sync_batchnorm sync_batchnorm",
    "apex.parallel.LARC": "LARC",
    "apex.parallel.distributed": "DistributedDataParallel Reducer flat_dist_call apply_flat_dist_call split_by_type"
    " split_half_float_double flatten unflatten extract_tensors",
    "apex.parallel.multiproc": "main",
    "apex.parallel.optimized_sync_batchnorm": "SyncBatchNorm",
    "apex.parallel.sync_batchnorm": "SyncBatchNorm",
    "apex.reparameterization": "apply_weight_norm remove_weight_norm apply_reparameterization remove_reparameterization"
    " Reparameterization WeightNorm",
    "apex.reparameterization.reparameterization": "Reparameterization",
    "apex.reparameterization.weight_norm": "WeightNorm",
    "apex.RNN": "LSTM GRU ReLU Tanh mLSTM models cells RNNBackend",
    "apex.RNN.RNNBackend": "bidirectionalRNN stackedRNN RNNCell",
    "apex.RNN.cells": "mLSTMRNNCell mLSTMCell",
    "apex.RNN.models": "LSTM GRU ReLU Tanh mLSTM toRNNBackend bidirectionalRNN stackedRNN RNNCell mLSTMRNNCell",
    "apex.optimizers": "FusedAdam FusedLAMB FusedSGD FusedNovoGrad FusedAdagrad FusedMixedPrecisionLamb FP16_Optimizer"
    " NpuFusedSGD NpuFusedAdam NpuFusedAdamW NpuFusedAdadelta NpuFusedRMSprop",
    "apex.optimizers.fp16_optimizer": "FP16_Optimizer",
    "apex.optimizers.fused_adagrad": "FusedAdagrad",
    "apex.optimizers.fused_adam": "FusedAdam",
    "apex.optimizers.fused_lamb": "FusedLAMB",
    "apex.optimizers.fused_mixed_precision_lamb": "FusedMixedPrecisionLamb",
    "apex.optimizers.fused_novograd": "FusedNovoGrad",
    "apex.optimizers.fused_sgd": "FusedSGD",
    "apex.optimizers.npu_fused_adadelta": "NpuFusedAdadelta",
    "apex.optimizers.npu_fused_adam": "NpuFusedAdam",
    "apex.optimizers.npu_fused_adamw": "NpuFusedAdamW",
    "apex.optimizers.npu_fused_rmsprop": "NpuFusedRMSprop",
    "apex.optimizers.npu_fused_sgd": "NpuFusedSGD",
    "apex.multi_tensor_apply": "MultiTensorApply multi_tensor_applier",
    "apex.multi_tensor_apply.multi_tensor_apply": "MultiTensorApply multi_tensor_applier",
    "amp_C": "multi_tensor_scale multi_tensor_axpby multi_tensor_l2norm multi_tensor_l2norm_mp"
    " multi_tensor_l2norm_scale"
    " multi_tensor_unscale_l2norm multi_tensor_sgd multi_tensor_adam multi_tensor_adam_capturable"
    " multi_tensor_adam_capturable_master multi_tensor_adagrad multi_tensor_novograd multi_tensor_lamb"
    " multi_tensor_lamb_mp multi_tensor_lamb_stage1_cuda multi_tensor_lamb_stage2_cuda update_scale_hysteresis",
    "apex_C": "flatten unflatten",
    "syncbn": "welford_mean_var welford_mean_var_c_last welford_parallel batchnorm_forward batchnorm_forward_c_last"
    " reduce_bn reduce_bn_c_last batchnorm_backward batchnorm_backward_c_last relu_bw_c_last",
    "apex.normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm fused_layer_norm",
    "apex.normalization.fused_layer_norm": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm"
    " fused_layer_norm fused_layer_norm_affine fused_rms_norm fused_rms_norm_affine mixed_dtype_fused_layer_norm_affine"
    " mixed_dtype_fused_rms_norm_affine manual_rms_norm FusedLayerNormAffineFunction FusedLayerNormFunction"
    " FusedLayerNormAffineMixedDtypesFunction FusedRMSNormAffineFunction FusedRMSNormFunction"
    " FusedRMSNormAffineMixedDtypesFunction",
    "apex.mlp": "MLP mlp_function mlp",
    "apex.mlp.mlp": "MLP mlp_function MlpFunction",
    "apex.fused_dense": "FusedDense FusedDenseGeluDense fused_dense_function dense_no_bias_function"
    " fused_dense_gelu_dense_function fused_dense",
    "apex.fused_dense.fused_dense": "FusedDense FusedDenseGeluDense",
    "apex.contrib.clip_grad": "clip_grad_norm_ clip_grad",
    "apex.contrib.clip_grad.clip_grad": "clip_grad_norm_",
    "apex.contrib.layer_norm.layer_norm": "FastLayerNorm FastLayerNormFN _fast_layer_norm",
    "apex.contrib.optimizers": "FP16_Optimizer FusedAdam FusedLAMB FusedSGD",
    "apex.contrib.optimizers.fp16_optimizer": "FP16_Optimizer",
    "apex.contrib.optimizers.fused_adam": "FusedAdam",
    "apex.contrib.optimizers.fused_lamb": "FusedLAMB",
    "apex.contrib.optimizers.fused_sgd": "FusedSGD",
}
REFUSED = {
    "apex.amp._amp_state": "warn_or_err container_abcs",
    "apex.amp._initialize": "_initialize check_models check_optimizers check_params_fp32 applier to_type"
    " O2StateDictHook",
    "apex.amp._process_optimizer": "AmpOptimizerState _process_optimizer lazy_init_with_master_weights"
    " post_backward_models_are_masters prepare_backward_no_master_weights",
    "apex.amp.compat": "filter_attrs",
    "apex.amp.rnn_compat": "VariableFunctionsShim whitelist_rnn_cells",
    "apex.amp.scaler": "iter_params scale_check_overflow_python axpby_check_overflow_python",
    "apex.amp.utils": "cached_cast casted_args collect_fp_tensor_types set_func_save",
    "apex.amp.wrap": "make_cast_wrapper cached_cast promote sequence_promote promote_match_arg0 rnn_cast",
    "apex.fp16_utils": "Fused_Weight_Norm",
    "apex.fp16_utils.fp16util": "backwards_debug_hook",
    "apex.optimizers": "FusedLARS FusedLANS Lamb NpuFusedLamb NpuFusedAdamP NpuFusedBertAdam NpuFusedRMSpropTF"
    " NpuFusedOptimizerBase",
    "apex.contrib.optimizers": "DistributedFusedAdam DistributedFusedLAMB",
    "apex.contrib.optimizers.distributed_fused_adam": "DistributedFusedAdam",
    "apex.contrib.optimizers.distributed_fused_lamb": "DistributedFusedLAMB",
    "apex.parallel.optimized_sync_batchnorm_kernel": "SyncBatchnormFunction",
    "apex.parallel.sync_batchnorm_kernel": "SyncBatchnormFunction",
}
MEMBERS = {
    "apex.amp._amp_state:AmpState": "loss_scalers opt_properties verbosity min_loss_scale max_loss_scale",
    "apex.amp.handle:AmpHandle": "is_active _is_active has_cache verbose scale_loss wrap_optimizer _disable_casts"
    " _clear_cache remove_cache _deactivate",
    "apex.amp.handle:NoOpHandle": "is_active _is_active has_cache verbose scale_loss wrap_optimizer _disable_casts"
    " _clear_cache _deactivate",
    "apex.amp.opt:OptimWrapper": "scale_loss step",
    "apex.amp.scaler:LossScaler": "loss_scale clear_overflow_state unscale unscale_with_stashed update_scale dynamic"
    " _loss_scale _unskipped _has_overflow _scale_seq_len _max_loss_scale _min_loss_scale _dynamic has_fused_kernel"
    " warned_no_fused_kernel warned_unscaling_non_fp32_grad",
    "apex.fp16_utils:FP16_Optimizer": "backward update_master_grads step zero_grad clip_master_grads"
    " inspect_master_grad_data state_dict load_state_dict loss_scale state param_groups",
    "apex.fp16_utils:LossScaler": "loss_scale has_overflow update_scale scale_gradient backward",
    "apex.fp16_utils:DynamicLossScaler": "loss_scale has_overflow update_scale backward cur_scale cur_iter"
    " last_overflow_iter",
    "apex.optimizers:FP16_Optimizer": "backward step zero_grad state_dict load_state_dict state param_groups cur_scale"
    " cur_iter last_overflow_iter fp32_groups fp32_groups_flat fp16_groups fp16_groups_flat scale_factor scale_window",
    "apex.contrib.optimizers:FP16_Optimizer": "backward step zero_grad state_dict load_state_dict cur_scale"
    " fp32_groups",
    "apex.parallel:DistributedDataParallel": "enable_allreduce disable_allreduce forward",
    "apex.parallel:Reducer": "reduce",
    "apex.parallel.LARC:LARC": "step",
    "apex.mlp:MLP": "weights biases reset_parameters",
    "apex.multi_tensor_apply:MultiTensorApply": "available import_err",
    "apex.RNN.models:stackedRNN": "init_hidden reset_hidden detach_hidden reset_parameters",
    "apex.RNN.models:RNNCell": "new_like reset_parameters",
    "apex.reparameterization:Reparameterization": "compute_weight reparameterize apply get_params remove",
    "apex.normalization.fused_layer_norm:FusedLayerNormAffineFunction": "apply",
    "apex.normalization.fused_layer_norm:FusedRMSNormAffineFunction": "apply",
    "apex.mlp.mlp:MlpFunction": "apply",
}
PARAMETERS = {
    "apex.amp:initialize": "models optimizers enabled opt_level cast_model_type patch_torch_functions"
    " keep_batchnorm_fp32"
    " master_weights loss_scale cast_model_outputs num_losses verbosity min_loss_scale max_loss_scale",
    "apex.amp:scale_loss": "loss optimizers loss_id model delay_unscale delay_overflow_check",
    "apex.amp:init": "enabled loss_scale enable_caching verbose allow_banned",
    "apex.amp.scaler:LossScaler": "loss_scale init_scale scale_factor scale_window min_loss_scale max_loss_scale",
    "apex.fp16_utils:FP16_Optimizer": "init_optimizer static_loss_scale dynamic_loss_scale dynamic_loss_args verbose",
    "apex.optimizers:FP16_Optimizer": "init_optimizer static_loss_scale dynamic_loss_scale dynamic_loss_args verbose",
    "apex.contrib.optimizers:FusedAdam": "params lr bias_correction betas eps eps_inside_sqrt weight_decay"
    " max_grad_norm"
    " amsgrad use_mt amp_scale_adjustment",
    "apex.contrib.optimizers:FusedAdam.step": "self closure grads output_params scale grad_norms",
    "apex.contrib.optimizers:FusedSGD": "params lr momentum dampening weight_decay nesterov wd_after_momentum"
    " materialize_master_grads",
    "apex.optimizers:FusedAdam.step": "self closure grads output_params scale grad_norms",
    "apex.optimizers:FusedLAMB": "params lr bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging"
    " set_grad_none max_grad_norm use_nvlamb",
    "apex.optimizers:FusedSGD": "params lr momentum dampening weight_decay nesterov wd_after_momentum"
    " materialize_master_grads set_grad_none",
    "apex.optimizers:FusedNovoGrad": "params lr bias_correction betas eps weight_decay amsgrad reg_inside_moment"
    " grad_averaging norm_type init_zero set_grad_none",
    "apex.optimizers:FusedAdagrad": "params lr eps weight_decay set_grad_none adagrad_w_mode",
    "apex.optimizers:NpuFusedAdam": "params lr betas eps weight_decay amsgrad",
    "apex.optimizers:NpuFusedAdamW": "params lr betas eps weight_decay amsgrad",
    "apex.optimizers:NpuFusedSGD": "params lr momentum dampening weight_decay nesterov",
    "apex.optimizers:NpuFusedAdadelta": "params lr rho eps weight_decay",
    "apex.optimizers:NpuFusedRMSprop": "params lr alpha eps weight_decay momentum centered",
    "apex.parallel:DistributedDataParallel": "module message_size delay_allreduce shared_param allreduce_trigger_params"
    " retain_allreduce_buffers allreduce_always_fp32 num_allreduce_streams allreduce_communicators gradient_average"
    " gradient_predivide_factor gradient_average_split_factor prof",
    "apex.parallel.LARC:LARC": "optimizer trust_coefficient clip eps",
    "apex.parallel:convert_syncbn_model": "module process_group channel_last",
    "apex.normalization:FusedLayerNorm": "normalized_shape eps elementwise_affine memory_efficient",
    "apex.mlp:MLP": "mlp_sizes bias activation",
    "apex.RNN:LSTM": "input_size hidden_size num_layers bias batch_first dropout bidirectional output_size",
}
"""The parameters that Apex had, in their order; more may follow."""


def rows(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(module, name) for module, names in table.items() for name in names.split()]


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    tree.install()
    yield
    tree.uninstall()


@pytest.mark.parametrize(("module", "name"), rows(PRESENT))
def test_a_name_is_here(module: str, name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"from {module} import {name}\nimport {module}", space)
    assert space[name] is getattr(importlib.import_module(module), name)
    migrated: dict[str, Any] = {}
    exec(migrate(f"from {module} import {name}\n").after, migrated)
    own = isinstance(space[name], ModuleType) or name in ("__version__", "init", "initialize")  # with other defaults
    assert own or migrated[name] is space[name]


@pytest.mark.parametrize(("module", "name"), rows(REFUSED))
def test_a_name_is_refused_by_saying_what_to_use(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=rf"^{module}\.{name} is not in halfstep\. .*(Use|use) ?") as caught:
        exec(f"from {module} import {name}")
    assert isinstance(caught.value, MissingNameError)
    assert caught.value.name == name
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = importlib.import_module(module).nothing_like_it


def found(path: str) -> Any:
    module, _, names = path.partition(":")
    value = importlib.import_module(module)
    for name in names.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize("path", ["transformer", "contrib.groupbn", "pyprof.parse"])
def test_a_module_that_is_not_here_as_an_attribute(path: str) -> None:
    import apex

    parent = apex
    *above, name = path.split(".")
    for part in above:
        parent = getattr(parent, part)
    with pytest.raises(AttributeError, match=f"^halfstep does not have apex.{path}. Use"):
        getattr(parent, name)
    assert not hasattr(parent, name)
    for line in (f"import apex.{path}", f"from {'.'.join(['apex', *above])} import {name}"):
        with pytest.raises(ModuleNotFoundError, match=f"^halfstep does not have apex.{path}. Use"):
            exec(line)


@pytest.mark.parametrize(("owner", "name"), rows(MEMBERS))
def test_a_member_is_here(owner: str, name: str) -> None:
    assert hasattr(found(owner), name)


@pytest.mark.parametrize("path", PARAMETERS)
def test_parameters_have_the_names_and_order_of_the_original(path: str) -> None:
    expected = PARAMETERS[path].split()
    assert list(inspect.signature(found(path)).parameters)[: len(expected)] == expected


# ---- what holds for all of them


def test_a_submodule_that_shares_its_name_with_an_object() -> None:
    """``amp._amp_state`` is the state; the module of that name is found by importing it."""
    import apex
    from apex.amp import _amp_state
    from apex.amp._amp_state import _amp_state as state

    assert _amp_state is state is apex.amp._amp_state
    importlib.import_module("apex.amp._amp_state")
    assert apex.amp._amp_state is state
    assert inspect.ismodule(apex.normalization.fused_layer_norm)


def test_classes_are_pickled_by_either_name() -> None:
    from apex.normalization.fused_layer_norm import FusedLayerNorm
    from apex.optimizers.fused_adam import FusedAdam

    assert FusedAdam.__module__.startswith("halfstep.")
    assert pickle.loads(pickle.dumps(FusedAdam)) is FusedAdam
    assert pickle.loads(b"capex.normalization.fused_layer_norm\nFusedLayerNorm\n.") is FusedLayerNorm
    module: Any = pickle.loads(pickle.dumps(FusedLayerNorm(4)))
    assert type(module) is FusedLayerNorm


@pytest.mark.exhaustive
def test_the_public_path_and_a_fresh_process() -> None:
    script = (
        "import halfstep.apex.optimizers.fused_adam as one\n"
        "import halfstep.apex\n"
        "halfstep.apex.install()\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('apex.optimizers.fused_lamb') is not None\n"
        "import apex.optimizers.fused_adam as other, apex.amp.lists.functional_overrides\n"
        "import apex.normalization.fused_layer_norm, apex.contrib.optimizers.fused_sgd\n"
        "assert one is other\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=120)


# ---- what computes


def test_functions_by_apply() -> None:
    from apex.mlp.mlp import MLP, MlpFunction
    from apex.normalization import fused_layer_norm as module

    x, weight, bias = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    weight, bias = weight[0], bias[0]
    layer = nn.functional.layer_norm(x, (4,), weight, bias, 1e-3)
    rms = nn.functional.rms_norm(x, (4,), weight, 1e-3)
    torch.testing.assert_close(module.FusedLayerNormAffineFunction.apply(x, weight, bias, (4,), 1e-3), layer)
    torch.testing.assert_close(
        module.FusedLayerNormAffineMixedDtypesFunction.apply(x, weight, bias, (4,), 1e-3, True), layer
    )
    torch.testing.assert_close(module.FusedRMSNormAffineFunction.apply(x, weight, (4,), 1e-3), rms)
    torch.testing.assert_close(module.FusedRMSNormAffineMixedDtypesFunction.apply(x, weight, (4,), 1e-3, False), rms)
    plain = nn.functional.layer_norm(x, (4,), None, None, 1e-3), nn.functional.rms_norm(x, (4,), None, 1e-3)
    torch.testing.assert_close(module.FusedLayerNormFunction.apply(x, (4,), 1e-3), plain[0])
    torch.testing.assert_close(module.FusedRMSNormFunction.apply(x, (4,), 1e-3), plain[1])

    mlp = MLP([4, 8, 2])
    assert [tuple(w.shape) for w in mlp.weights] == [(8, 4), (2, 8)]
    assert [tuple(b.shape) for b in mlp.biases] == [(8,), (2,)]
    assert MLP([4, 2], bias=False).biases == []
    y = torch.randn(3, 4)
    for number, name in enumerate(("none", "relu", "sigmoid")):
        mlp.activation = name
        for activation in (number, name):
            assert torch.equal(MlpFunction.apply(True, activation, y, *mlp.weights, *mlp.biases), mlp(y))


def test_fused_dense_functions() -> None:
    from apex import fused_dense

    x, w1, b1, w2, b2 = (torch.randn(4, 4) for _ in range(5))
    hidden = nn.functional.linear(x, w1, b1[0])
    assert torch.equal(fused_dense.fused_dense_function(x, w1, b1[0]), hidden)
    assert torch.equal(fused_dense.dense_no_bias_function(x, w1), nn.functional.linear(x, w1))
    expected = nn.functional.linear(nn.functional.gelu(hidden), w2, b2[0])
    assert torch.equal(fused_dense.fused_dense_gelu_dense_function(x, w1, b1[0], w2, b2[0]), expected)


def test_a_multiplicative_lstm_by_its_function() -> None:
    from apex.RNN import cells, models

    torch.manual_seed(0)
    cell = cells.mLSTMRNNCell(4, 3, 5, bias=True)
    x, h, c = torch.randn(2, 3), torch.randn(2, 5), torch.randn(2, 5)
    weights = (cell.w_ih, cell.w_hh, cell.w_mih, cell.w_mhh, cell.b_ih, cell.b_hh)
    after = cells.mLSTMCell(x, (h, c), *weights)
    stack = models.toRNNBackend(cell, 1)
    stack.rnns[0].hidden = [h, c]
    _, hiddens = stack(x[None])
    torch.testing.assert_close(after[0], hiddens[0][0])
    torch.testing.assert_close(after[1], hiddens[1][0])
    assert type(models.toRNNBackend(cells.mLSTMRNNCell(4, 3, 5), 1, bidirectional=True)) is models.bidirectionalRNN


def test_mixed_norms_take_the_argument_of_the_original() -> None:
    from apex.normalization import MixedFusedLayerNorm, MixedFusedRMSNorm

    for kind in (MixedFusedLayerNorm, MixedFusedRMSNorm):
        assert kind(4, elementwise_affine=True).weight is not None
        with pytest.raises(RuntimeError, match=f"elementwise_affine=False use {kind.__name__.removeprefix('Mixed')}"):
            kind(4, elementwise_affine=False)
