"""``apex.amp.utils`` and ``compat``: predicates and casts for tensors, which scripts use."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from .... import amp
from ...fp16_utils.params import to_python_float
from ...missing import refusing

__all__ = [
    "get_cuda_version",
    "has_func",
    "is_cuda_enabled",
    "is_fp_tensor",
    "is_nested",
    "maybe_float",
    "maybe_half",
    "to_python_float",
    "type_string",
]

logger = logging.getLogger("halfstep")

RNN_NAMES = ["rnn_relu", "rnn_tanh", "gru", "lstm"]

__getattr__ = refusing(__name__)


def is_cuda_enabled() -> bool:
    """True if torch was built with CUDA."""
    return torch.version.cuda is not None


def get_cuda_version() -> tuple[int, ...]:
    """Return the CUDA version that torch was built with; () without CUDA."""
    return tuple(map(int, (torch.version.cuda or "").split("."))) if torch.version.cuda else ()


def is_nested(x: object) -> bool:
    """True for a tuple or list."""
    return isinstance(x, (tuple, list))


def is_fp_tensor(x: Any) -> bool:
    """True for a floating tensor, or a tuple or list of floating tensors."""
    if isinstance(x, (tuple, list)):
        return all(map(is_fp_tensor, x))
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def type_string(x: torch.Tensor) -> str:
    """Return the type name of a tensor: ``"HalfTensor"``, ``"FloatTensor"``..."""
    return x.type().rpartition(".")[2]


def maybe_half(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Cast a floating tensor, or each tensor in a tuple or list, to float16."""
    return type(x)([maybe_half(y) for y in x]) if isinstance(x, (tuple, list)) else x.half()


def maybe_float(x: Any, name: str = "", verbose: bool = False) -> Any:
    """Cast a floating tensor, or each tensor in a tuple or list, to float32."""
    return type(x)([maybe_float(y) for y in x]) if isinstance(x, (tuple, list)) else x.float()


def has_func(mod: Any, fn: str) -> bool:
    """True if a module or dictionary has a name."""
    return fn in mod if isinstance(mod, dict) else hasattr(mod, fn)


# ---- apex.amp.compat, of which tensors and variables are the same thing today


def is_tensor_like(x: object) -> bool:
    """True for a tensor."""
    return isinstance(x, torch.Tensor)


def is_floating_point(x: torch.Tensor) -> bool:
    """True for a floating tensor."""
    return x.is_floating_point()


scalar_python_val = to_python_float


def tensor_is_variable() -> bool:
    """True."""
    return True


variable_is_tensor = tensor_is_variable


def tensor_is_float_tensor() -> bool:
    """False: ``torch.FloatTensor`` is no longer the class of tensors."""
    return False


# ---- others


def has_old_rnns() -> bool:
    """False: torch 0.5 replaced the old RNN modules."""
    return False


def maybe_print(msg: object, rank0: bool = False) -> None:
    """Log at level INFO, if the latest ``initialize`` was called with a verbosity above 0.

    Args:
        msg: the message.
        rank0: log on rank 0 only.
    """
    session = amp._amp_state.session
    if session is not None and session.verbosity == 0:
        return
    if not rank0 or not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        logger.info("%s", msg)
