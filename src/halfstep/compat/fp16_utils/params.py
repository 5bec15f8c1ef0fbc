"""Manual master parameters: create them, copy gradients to them, and copy updated weights back.

::

    model_params, master_params = prep_param_lists(model)
    optimizer = torch.optim.SGD(master_params, lr=1e-3)
    ...
    loss.backward()
    model_grads_to_master_grads(model_params, master_params)
    optimizer.step()
    master_params_to_model_params(model_params, master_params)

``FP16_Optimizer`` does all of this, and also scales the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...core.checks import check_kind
from ...core.dtypes import dtype_name
from ...core.errors import ArgumentValueError, UsageError
from ...kernels import multi_tensor
from ...torch_internals.torch_compat import unflatten_dense_tensors

__all__ = [
    "clip_grad_norm",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "prep_param_lists",
    "to_python_float",
]

clip_grad_norm = torch.nn.utils.clip_grad_norm_


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """Return the trainable parameters of a model and fp32 copies of these parameters.

    Args:
        model: a model with parameters of any dtypes.
        flat_master: keep all copies in one 1-dim tensor, in the order of ``model.parameters()``. This requires that all
            parameters have one dtype and one device.

    Returns:
        ``(model_params, master_params)``. The masters are fp32 and require grad, one for each parameter with its
        shape and no gradient, or, flat, a list of one ``Parameter`` whose gradient is zeros.

    Raises:
        UsageError: if ``flat_master`` meets mixed dtypes or devices, or no trainable parameter.
    """
    check_kind("prep_param_lists: model", model, nn.Module, "a torch.nn.Module")
    model_params = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        masters = [param.detach().to(torch.float32, copy=True).requires_grad_() for param in model_params]
        return model_params, masters
    _check_uniform(model)
    flat = nn.Parameter(torch.cat([param.detach().reshape(-1) for param in model_params]).to(torch.float32, copy=True))
    flat.grad = torch.zeros_like(flat)
    return model_params, [flat]


def model_grads_to_master_grads(
    model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor], flat_master: bool = False
) -> None:
    """Copy the model's gradients over the masters' gradients; scaled gradients stay scaled.

    If a parameter has no gradient, its master's gradient becomes None, or zeros in a flat master. If no parameter has a
    gradient, the gradient of a flat master also becomes None.

    Args:
        model_params: from ``prep_param_lists``.
        master_params: from the same call.
        flat_master: as in that call.

    Raises:
        ArgumentValueError: if the lists do not belong together.
    """
    with torch.no_grad():
        grads, targets = (_flat_rows if flat_master else _rows)(model_params, master_params)
        if grads:
            multi_tensor.copy(grads, targets)


def master_params_to_model_params(
    model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor], flat_master: bool = False
) -> None:
    """Round the masters into the model's parameters.

    Args:
        model_params: from ``prep_param_lists``.
        master_params: from the same call.
        flat_master: as in that call.

    Raises:
        ArgumentValueError: if the lists do not belong together.
    """
    with torch.no_grad():
        if flat_master:
            masters = _views(_only(master_params), model_params)
        else:
            _check_lengths(model_params, master_params)
            masters = list(master_params)
        multi_tensor.copy(masters, list(model_params))


def to_python_float(t: Any) -> float:
    """Return the number in a one-element tensor, or the first item of a sequence."""
    return t.item() if hasattr(t, "item") else t[0]  # type: ignore[no-any-return]


_Rows = tuple[list[torch.Tensor], list[torch.Tensor]]


def _rows(model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor]) -> _Rows:
    """Return the model's gradients and the masters' gradients, creating gradients that do not exist yet."""
    _check_lengths(model_params, master_params)
    grads, targets = [], []
    for param, master in zip(model_params, master_params, strict=True):
        if param.grad is None or param.grad.is_sparse:
            master.grad = None if param.grad is None else param.grad.to(master.dtype)
            continue
        if master.grad is None or master.grad.is_sparse:
            master.grad = torch.empty_like(master)
        grads.append(param.grad)
        targets.append(master.grad)
    return grads, targets


def _flat_rows(model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor]) -> _Rows:
    """Return the model's gradients and their pieces of the flat gradient; other pieces become zeros."""
    flat = _only(master_params)
    if all(param.grad is None for param in model_params):
        flat.grad = None
        return [], []
    if flat.grad is None:
        flat.grad = torch.empty_like(flat)
    grads, targets = [], []
    for param, piece in zip(model_params, _views(flat.grad, model_params), strict=True):
        if param.grad is None:
            piece.zero_()
        else:
            grads.append(param.grad.to_dense() if param.grad.is_sparse else param.grad)
            targets.append(piece)
    return grads, targets


def _views(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of consecutive pieces of a 1-dim tensor, in the shapes of ``like``."""
    expected = sum(tensor.numel() for tensor in like)
    if flat.numel() != expected:
        raise ArgumentValueError(
            f"The flat master has {flat.numel()} elements and model_params have {expected}; pass the two lists that "
            "one call of prep_param_lists(model, flat_master=True) returned."
        )
    return list(unflatten_dense_tensors(flat, like))


def _only(master_params: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(master_params) != 1 or master_params[0].dim() != 1:
        raise ArgumentValueError(
            f"flat_master=True needs the list of one 1-dim tensor that prep_param_lists(model, flat_master=True) "
            f"returned, not {len(master_params)} tensors; were they made with flat_master=False?"
        )
    return master_params[0]


def _check_lengths(model_params: Sequence[torch.Tensor], master_params: Sequence[torch.Tensor]) -> None:
    if len(model_params) != len(master_params):
        raise ArgumentValueError(
            f"model_params has {len(model_params)} tensors and master_params {len(master_params)}; pass the two lists "
            "that one call of prep_param_lists returned, and its flat_master."
        )


def _check_uniform(model: nn.Module) -> None:
    kinds: dict[tuple[torch.dtype, torch.device], str] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            kinds.setdefault((param.dtype, param.device), name)
    if len(kinds) != 1:
        found = ", ".join(f"{dtype_name(dtype)} on {device} ({name})" for (dtype, device), name in kinds.items())
        raise UsageError(
            f"flat_master=True needs trainable parameters of one dtype on one device, and this model has "
            f"{found or 'none'}; use flat_master=False, or FP16_Optimizer, which takes any mixture."
        )
