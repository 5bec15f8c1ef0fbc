"""The names of modules and ops in every report about a run."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import nn

from ...core.oplists.tables import pairs
from ...torch_internals.torch_compat import children_of, parameters_of

__all__ = ["OPTIMIZER", "OUTSIDE", "ROOT", "canonical", "owner_of", "part_of", "parts_of", "qualified_names"]

OUTSIDE = "(step)"
"""The name for ops outside of every module, such as the loss in most scripts."""

ROOT = "(root)"
"""The name of the model itself."""

OPTIMIZER = "(optimizer)"
"""The name for ops of an optimizer's step."""

_PUBLIC = pairs("""
    mm=matmul bmm=matmul addmm=linear _to_copy=cast copy_=cast to_copy=cast
    native_layer_norm=layer_norm native_group_norm=group_norm native_batch_norm=batch_norm
    _native_batch_norm_legit=batch_norm _batch_norm_with_update=batch_norm cudnn_batch_norm=batch_norm
    miopen_batch_norm=batch_norm native_dropout=dropout _fused_dropout=dropout _fused_rms_norm=rms_norm
    nll_loss_forward=nll_loss nll_loss2d_forward=nll_loss2d max_pool2d_with_indices=max_pool2d
    max_pool3d_with_indices=max_pool3d _adaptive_avg_pool2d=adaptive_avg_pool2d
    _adaptive_avg_pool3d=adaptive_avg_pool3d upsample_linear1d=interpolate upsample_bilinear2d=interpolate
    upsample_trilinear3d=interpolate upsample_nearest2d=interpolate upsample_bicubic2d=interpolate
    _thnn_fused_lstm_cell=lstm _thnn_fused_gru_cell=gru mkldnn_linear=linear
    _cdist_forward=cdist _pdist_forward=pdist native_norm=norm
    """)
"""The torch function that users know, by the ATen op that it runs, where the names differ."""

_PARALLEL = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def qualified_names(model: nn.Module) -> dict[nn.Module, str]:
    """Name the modules of a model, in the order of ``named_modules``; "(root)" is the model.

    The names leave out the wrappers of ``torch.compile`` and DDP.
    """
    found: dict[nn.Module, str] = {}
    left = [("", model)]
    while left:
        name, module = left.pop()
        if module not in found:
            found[module] = name or ROOT
            for key, child in reversed(children_of(module).items()):
                if child is not None:
                    hidden = key == "_orig_mod" or (isinstance(module, _PARALLEL) and module is model)
                    left.append((name if hidden else f"{name}.{key}".lstrip("."), child))
    return found


def parts_of(names: Mapping[nn.Module, str]) -> dict[int, str]:
    """Return the qualified names of modules' parameters, by the ``id`` of each parameter; a tied one has its first."""
    found: dict[int, str] = {}
    for module, name in names.items():
        for key, param in parameters_of(module).items():
            if param is not None:
                found.setdefault(id(param), part_of(name, key))
    return found


def part_of(module: str, own: str) -> str:
    """Return the qualified name of a module's parameter or buffer."""
    return own if module == ROOT else f"{module}.{own}"


def owner_of(param: str) -> str:
    """Return the name of the module that owns a parameter, from the parameter's name."""
    return param.rpartition(".")[0] or ROOT


@functools.cache
def canonical(name: str, dims: int = 2) -> str:
    """Return the name of the torch function that runs an ATen op.

    Args:
        name: the name of the op, without namespace and overload.
        dims: the number of spatial dimensions of a convolution.
    """
    if "convolution" in name:
        return f"conv{dims}d"
    if "scaled_dot_product" in name:
        return "scaled_dot_product_attention"
    name = _PUBLIC.get(name, name)
    bare = name.strip("_") if not name.startswith("__") else name
    return _PUBLIC.get(bare, bare)
