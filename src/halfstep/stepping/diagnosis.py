"""Diagnosis of gradients: the first one with inf or NaN for error messages (slow), and a check for early clipping."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch

from ..core.dtypes import dtype_name, is_half
from ..core.inner_optimizers import params_of
from ..core.text import counted
from ..kernels import multi_tensor
from ..parameters.async_reader import AsyncReader, capturing
from ..parameters.held_masters import master_of
from ..torch_internals.callers import callers_level
from ..torch_internals.torch_compat import values_of

__all__ = ["ClippedGradients", "first_bad_gradient"]

_CLIP_AFTER = (
    "Clip after the block, when they are unscaled: torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), ...)."
)
_UNSCALE_BEFORE = (
    "Call scaler.unscale_(optimizer) before you clip, or scaler.clip_grad_norm_(optimizer, max_norm), which does both."
)

_LARGEST_CLIP = 100.0
"""The largest norm to which user code is expected to clip. Scaled gradients have a smaller norm only if they vanish."""
_SMALLEST_SCALE = 256.0
_CHECKS = 5


def first_bad_gradient(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Describe the first parameter whose gradient holds inf or NaN, by its qualified name if known. Reads the device.

    Args:
        optimizers: the optimizers whose parameters to check, in this order. If an optimizer is attached, the parameters
            of its models come first, in the order of ``named_parameters``.

    Returns:
        For example ``layers.0.weight (4x3, float16: 2 inf, 0 NaN among 12 values)``. If an optimizer updates 16-bit
        weights without masters, a sentence about it follows, because its steps may have made the weights inf or NaN.
    """
    seen: set[int] = set()
    for name, param in _named(optimizers):
        grad = param.grad
        if grad is None or id(param) in seen:
            continue
        seen.add(id(param))
        values = values_of(grad) if grad.is_sparse else grad
        infs, nans = int(values.isinf().sum()), int(values.isnan().sum())
        if infs or nans:
            shape = "x".join(map(str, param.shape)) or "scalar"
            counts = f"{infs} inf, {nans} NaN among {values.numel()} values"
            return f"{name} ({shape}, {dtype_name(grad.dtype)}: {counts}){_on_masters(optimizers)}"
    return "unknown, because the gradients were cleared or replaced before the loss scale was updated"


def _on_masters(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return a sentence about the first optimizer that updates 16-bit weights without masters, or an empty string."""
    for optimizer in optimizers:
        if getattr(getattr(optimizer, "options", None), "master_weights", None):
            continue
        params = params_of(optimizer)
        half = [p for p in params if is_half(p) and p.requires_grad and master_of(p) is None]
        if half:
            return (
                f". {len(half)} of {counted(len(params), 'parameter')} of {type(optimizer).__name__} are "
                f"{dtype_name(half[0].dtype)} and have no fp32 masters: small updates are lost (HS101), large updates "
                "overflow, and an eps that is 0 in this dtype divides by 0 (HS106). Initialize with fp32 weights "
                '(model.float()), or use opt_level="O2", which keeps masters'
            )
    return ""


def _named(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    for optimizer in optimizers:
        attached = getattr(optimizer, "_amp_stash", None)
        for ref in () if attached is None else attached.replaced.models:
            if (model := ref()) is not None:
                yield from model.named_parameters()
    for optimizer in optimizers:
        for g, group in enumerate(optimizer.param_groups):
            names = group.get("param_names")
            for i, param in enumerate(group["params"]):
                yield names[i] if names else f"parameter {i} of group {g} of {type(optimizer).__name__}", param


class ClippedGradients:
    """Warns if user code clips gradients before they are unscaled.

    Clipping writes into the gradients of a backward pass, so only gradients whose version changed are checked, and only
    the first few times. Clipped gradients have the same norm, or the same largest value, in two consecutive steps.
    """

    def __init__(self) -> None:
        self._checks_left = _CHECKS
        self._reader: AsyncReader | None = None
        self._seen: tuple[float, float] | None = None  # the norm and the largest value at the latest check

    def check(self, params: Sequence[torch.Tensor], scale: torch.Tensor, *, by: str) -> None:
        """Compare gradients that user code changed with the gradients of earlier passes.

        Args:
            params: the parameters of the optimizer.
            scale: the loss scale of the gradients, a 0-dim tensor.
            by: the caller that unscales them, "block" or "GradScaler".
        """
        if self._reader is not None:
            self._judge(by)
        first = next((grad for p in params if (grad := p.grad) is not None), None) if self._checks_left else None
        if first is None or first._version == 0 or type(first) is not torch.Tensor or capturing(first.device):
            return
        grads = [g for param in params if (g := param.grad) is not None]
        if any(g.is_sparse or g.is_complex() or g.device != first.device or type(g) is not torch.Tensor for g in grads):
            return
        self._checks_left -= 1
        norm = multi_tensor.norm(grads).to(torch.float32)
        largest = multi_tensor.norm(grads, float("inf")).to(torch.float32)
        half = torch.full_like(norm, float(any(map(is_half, grads))))
        self._reader = self._reader or AsyncReader(4)
        self._reader.post(norm, largest, half, scale.to(norm.device, torch.float32, non_blocking=True))
        self._judge(by)

    def _judge(self, by: str) -> None:
        """Compare the norms that have arrived on the host, and warn once."""
        assert self._reader is not None
        for norm, largest, half, scale in self._reader.poll():
            before, self._seen = self._seen, (norm, largest)
            tolerance = 2e-3 if half else 1e-5  # torch's clip_grad_norm_ rounds the norm of 16-bit gradients
            same = [n for n, old in zip(self._seen, before or (), strict=False) if abs(n - old) <= tolerance * n]
            if not same or not 0.0 < same[0] <= _LARGEST_CLIP or scale < _SMALLEST_SCALE:
                continue
            what = "norm" if same[0] == norm else "largest value"
            self._checks_left, self._reader = 0, None
            warnings.warn(
                f"Gradients seem to be clipped while they are still multiplied by the loss scale of {scale:g}: their "
                f"{what} was {same[0]:.3g} in two checks, so the step uses only {same[0] / scale:.3g}. "
                f"{_CLIP_AFTER if by == 'block' else _UNSCALE_BEFORE}",
                UserWarning,
                stacklevel=callers_level(),
            )
            return
