"""The ``FP16_Optimizer`` of 2018, of ``apex.optimizers`` and ``apex.contrib``, for the optimizers of that year."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.errors import ArgumentTypeError, ArgumentValueError
from . import fp16_utils
from .optimizer_wrapper import forwarded

__all__ = ["FP16OptimizerOf2018"]


class FP16OptimizerOf2018(fp16_utils.FP16_Optimizer):
    """Masters and a loss scale around a fused optimizer, in the form that ``apex.optimizers`` had in 2018.

    Unlike in ``halfstep.fp16_utils.FP16_Optimizer``, ``backward`` leaves the gradients scaled, ``step`` unscales them
    and updates the scale, a dynamic scale starts at 2**16, and ``zero_grad`` sets gradients to None.

    Args:
        init_optimizer: any ``torch.optim.Optimizer``; Apex took its fused ones only.
        static_loss_scale: a finite number above zero.
        dynamic_loss_scale: use a dynamic scale and ignore ``static_loss_scale``.
        dynamic_loss_args: keyword arguments of ``DynamicLossScaler``; Apex took none.
        verbose: kept for Apex. Skipped steps are logged.

    Raises:
        ArgumentTypeError: if ``init_optimizer`` is not an optimizer, or ``dynamic_loss_args`` has an unknown key.
        ArgumentValueError: for an invalid scale or other value.
        UsageError: for an optimizer that already has masters or a loss scale.

    Source: Apex, ``apex.contrib.optimizers.fp16_optimizer``.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        args = {"init_scale": 2.0**16, "scale_window": 1000, **(dynamic_loss_args or {})}
        super().__init__(init_optimizer, static_loss_scale, dynamic_loss_scale, args, verbose=False)
        self.verbose = verbose

    def zero_grad(self, set_grads_to_None: bool = True, *, set_to_none: bool | None = None) -> None:  # type: ignore[override]  # noqa: N803
        """Clear the gradients: to None by default."""
        super().zero_grad(set_grads_to_None, set_to_none=set_to_none)

    def backward(self, loss: torch.Tensor, update_master_grads: bool = False, retain_graph: bool = False) -> None:
        """Scale ``loss`` and run its backward pass. The gradients stay scaled until ``step``.

        Args:
            loss: 0-dim floating tensor; a 16-bit loss is converted to fp32 before it is scaled.
            update_master_grads: True unscales the gradients at once.
            retain_graph: the argument of ``Tensor.backward``.
        """
        super().backward(loss, update_master_grads, retain_graph)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Unscale the gradients and update the masters, or skip if a gradient was inf or NaN; update the scale."""
        if closure is None:
            self.update_master_grads()
        return super().step(closure, **kwargs)

    # ---- attributes that scripts read

    cur_scale = forwarded(
        "loss_scale", "The present loss scale; set it to a finite number above zero. Reads the device."
    )
    cur_iter = forwarded("loss_scaler.engine.cur_iter", "The number of steps so far.")
    last_overflow_iter = forwarded(
        "loss_scaler.engine.last_overflow_iter",
        "The number of the last step that overflowed, counted from 0; -1 if none did. Reads the device.",
    )
    # For a dynamic scale only: as in Apex, a static scale has neither.
    scale_factor = forwarded("loss_scaler.scale_factor")
    scale_window = forwarded("loss_scaler.scale_window")

    @property
    def fp16_groups_flat(self) -> list[torch.Tensor]:
        """A copy of ``fp16_groups``, with one vector per group in the group's dtype. Writes to it have no effect."""
        return [torch.cat([p.detach().reshape(-1) for p in group]) for group in self.fp16_groups if group]

    @property
    def fp32_groups(self) -> list[list[torch.Tensor]]:
        """The tensors that steps update, group by group: the masters of 16-bit parameters, and the other parameters."""
        return self._stepped_groups()

    @property
    def fp32_groups_flat(self) -> list[torch.Tensor]:
        """A copy of ``fp32_groups``, with one vector per group. Writes to it have no effect."""
        return [torch.cat([p.detach().float().reshape(-1) for p in group]) for group in self.fp32_groups]

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, masters and wrapped optimizer's state as numbers, lists, dicts and tensors only.

        The keys are the same as in ``apex.optimizers``.
        """
        own = {"dynamic_loss_scale": self.dynamic_loss_scale, "cur_scale": self.cur_scale, "cur_iter": self.cur_iter}
        if self.dynamic_loss_scale:
            own |= {"last_overflow_iter": self.last_overflow_iter}
            own |= {"scale_factor": self.scale_factor, "scale_window": self.scale_window}
        return {**own, "optimizer_state_dict": self.optimizer.state_dict(), "fp32_groups_flat": self.fp32_groups_flat}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of the class in ``apex.optimizers`` or ``apex.contrib``.

        The masters are rounded into the model. The kind of the scale, static or dynamic, does not change, nor do the
        window and factor of a dynamic scale.

        Raises:
            ArgumentValueError: if the state does not fit this optimizer. Nothing is changed.
        """
        missing = [key for key in ("cur_scale", "cur_iter", "optimizer_state_dict") if key not in state_dict]
        masters = state_dict.get("fp32_groups_flat", state_dict.get("fp32_groups"))
        if missing or masters is None:
            raise ArgumentValueError(
                "This is no state_dict of an FP16_Optimizer of apex.optimizers: it has no "
                f"{', '.join(missing) or 'fp32_groups_flat'}. Its keys are {sorted(state_dict)}."
            )
        groups: list[list[torch.Tensor]] = [group["params"] for group in self.param_groups]
        values = [_pieces(saved, group) for saved, group in zip(masters, groups, strict=len(masters) == len(groups))]
        if len(values) != len(groups):
            raise ArgumentValueError(
                f"Masters of {len(values)} groups were saved, and this optimizer has {len(groups)}."
            )
        self.optimizer.load_state_dict(_unflattened(state_dict["optimizer_state_dict"], groups))
        iteration, last = int(state_dict["cur_iter"]), int(state_dict.get("last_overflow_iter", -1))
        scaler: Any = self.loss_scaler
        entry = {"loss_scale": float(state_dict["cur_scale"]), "cur_iter": iteration, "last_overflow_iter": last}
        window = getattr(scaler, "scale_window", 1000)
        scaler.load_state_dict({**entry, "unskipped": (iteration - last - 1) % window})
        self._write(groups, values)


def _pieces(saved: Any, group: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a group in the shapes of its parameters, from one vector or a list of tensors."""
    flat = torch.cat([t.detach().reshape(-1) for t in (saved if isinstance(saved, (list, tuple)) else [saved])])
    sizes = [param.numel() for param in group]
    if flat.numel() != sum(sizes):
        raise ArgumentValueError(f"A group was saved with {flat.numel()} values, and here it has {sum(sizes)}.")
    return [piece.view_as(param) for piece, param in zip(flat.split(sizes), group, strict=True)]


def _unflattened(saved: dict[str, Any], groups: list[list[torch.Tensor]]) -> dict[str, Any]:
    """Convert the state of an optimizer over one vector per group to the state of an optimizer over parameters."""
    if all(_fits(saved, names, group) for names, group in zip(saved["param_groups"], groups, strict=True)):
        return saved
    state: dict[int, dict[str, Any]] = {}
    param_groups: list[dict[str, Any]] = []
    for names, group in zip(saved["param_groups"], groups, strict=True):
        if len(names["params"]) != 1:
            raise ArgumentTypeError(f"optimizer_state_dict has {len(names['params'])} parameters, here {len(group)}.")
        first = sum(len(other["params"]) for other in param_groups)
        numbers = list(range(first, first + len(group)))
        param_groups.append({**names, "params": numbers})
        entries = saved["state"].get(names["params"][0], {})
        for key, value in entries.items():
            vector = isinstance(value, torch.Tensor) and value.dim() > 0
            for number, piece in zip(numbers, _pieces(value, group) if vector else [value] * len(group), strict=True):
                state.setdefault(number, {})[key] = piece.clone() if isinstance(piece, torch.Tensor) else piece
    return {"state": state, "param_groups": param_groups}


def _fits(saved: dict[str, Any], names: dict[str, Any], group: list[torch.Tensor]) -> bool:
    entries = zip((saved["state"].get(name, {}) for name in names["params"]), group, strict=False)
    return len(names["params"]) == len(group) and all(
        value.shape == param.shape
        for entry, param in entries
        for value in entry.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
