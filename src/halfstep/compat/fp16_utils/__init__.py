"""Apex's ``fp16_utils``: mixed precision with 16-bit weights, managed by an optimizer wrapper or manually."""

from .loss_scaler import DynamicLossScaler, LossScaler
from .modules import BN_convert_float, FP16Model, convert_module, convert_network, network_to_half, tofp16
from .optimizer import FP16_Optimizer
from .params import (
    clip_grad_norm,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
    to_python_float,
)

__all__ = [
    "BN_convert_float",
    "DynamicLossScaler",
    "FP16Model",
    "FP16_Optimizer",
    "LossScaler",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]
__dir__ = __all__.copy
