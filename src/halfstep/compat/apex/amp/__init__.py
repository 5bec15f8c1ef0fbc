"""``apex.amp``: ``halfstep.amp`` with float16 as default on every device.

The environment variables ``HALFSTEP_OPT_LEVEL`` and ``HALFSTEP_DTYPE``, which ``halfstep run`` sets, override the
arguments of a script.
"""

from ....amp import *  # noqa: F403
from ....amp import __all__ as __all__
from ....amp import _amp_state as _amp_state
from ....amp import loss_scaler as _loss_scaler
from ....amp import session as _session
from ... import amp_state as _state
from ... import handle_2018 as _handle
from ...submodules import add_submodules
from . import frontend as frontend
from . import lists as lists
from . import utils
from .frontend import init as init
from .frontend import initialize as initialize  # with other defaults

add_submodules(
    __name__,
    {
        "__version__": "VERSION __version__",
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
    also={
        "VERSION": (0, 1, 0),
        "__version__": "0.1.0",
        **vars(_handle),
        **vars(_loss_scaler),
        **vars(_session),
        **vars(_state),
        **vars(utils),
    },
)
