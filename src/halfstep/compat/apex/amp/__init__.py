"""``apex.amp``: ``halfstep.amp`` with float16 as default on every device.

``HALFSTEP_OPT_LEVEL`` and ``HALFSTEP_DTYPE`` in the environment override what a script asks for; ``halfstep run`` sets
them.
"""

from ....amp import *  # noqa: F403
from ....amp import __all__ as __all__
from ....amp import _amp_state as _amp_state
from ....amp import handle as _handle
from ....amp import loss_scaler as _loss_scaler
from ....amp import session as _session
from ...submodules import add_submodules
from . import frontend as frontend
from . import lists as lists
from . import utils
from .frontend import init as init
from .frontend import initialize as initialize  # type: ignore[no-redef]  # with other defaults

_OP_LISTS = "Op lists decide on casts: use amp.register_half_function and its siblings, or edit amp.lists."
_INITIALIZE = "Use amp.initialize."

add_submodules(
    __name__,
    {
        "_amp_state": "_amp_state AmpState master_params maybe_print",
        "_initialize": "",
        "_process_optimizer": "",
        "amp": "init half_function float_function promote_function register_half_function register_float_function"
        " register_promote_function AmpHandle NoOpHandle _amp_state",
        "compat": "is_tensor_like is_floating_point scalar_python_val tensor_is_float_tensor tensor_is_variable"
        " variable_is_tensor",
        "handle": "AmpHandle NoOpHandle scale_loss disable_casts",
        "opt": "OptimWrapper",
        "rnn_compat": "RNN_NAMES has_old_rnns",
        "scaler": "LossScaler",
        "wrap": "",
    },
    also={**vars(_handle), **vars(_loss_scaler), **vars(_session), **vars(utils)},
    refused={
        "_amp_state": {"warn_or_err": "Use an error of your own.", "container_abcs": "Use collections.abc."},
        "_initialize": {
            "_initialize check_models check_optimizers check_params_fp32": _INITIALIZE,
            "applier to_type wrap_fused_adam O2StateDictHook": _INITIALIZE,
        },
        "_process_optimizer": {
            "AmpOptimizerState _process_optimizer lazy_init_with_master_weights lazy_init_no_master_weights"
            " post_backward_models_are_masters post_backward_with_master_weights post_backward_no_master_weights"
            " prepare_backward_with_master_weights prepare_backward_no_master_weights": "The optimizers of halfstep do "
            "it themselves: use amp.scale_loss, step and amp.master_params."
        },
        "compat": {"filter_attrs": _OP_LISTS},
        "rnn_compat": {"VariableFunctionsShim whitelist_rnn_cells": _OP_LISTS},
        "scaler": {
            "iter_params scale_check_overflow_python axpby_check_overflow_python": "Use LossScaler.unscale, or "
            "amp_C.multi_tensor_scale and amp_C.multi_tensor_axpby."
        },
        "wrap": {
            "make_cast_wrapper cached_cast make_promote_wrapper promote sequence_promote promote_match_arg0"
            " err_if_any_half err_if_arg0_half rnn_cast new_rnn_cast disable_casts": _OP_LISTS
        },
    },
)
