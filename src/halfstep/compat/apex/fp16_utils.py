"""``apex.fp16_utils``."""

from ..fp16_utils import *  # noqa: F403
from ..fp16_utils import __all__ as __all__
from ..submodules import add_submodules

add_submodules(
    __name__,
    {
        "fp16_optimizer": "FP16_Optimizer",
        "fp16util": "BN_convert_float FP16Model clip_grad_norm convert_module convert_network"
        " master_params_to_model_params model_grads_to_master_grads network_to_half prep_param_lists to_python_float"
        " tofp16",
        "loss_scaler": "DynamicLossScaler LossScaler to_python_float",
    },
)
