"""``FP16_Optimizer``: an optimizer wrapper that runs the backward pass and has masters and a loss scale."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch

from ...core.checks import as_number, check_flag, check_kind, check_number
from ...core.dtypes import dtype_name
from ...core.errors import ArgumentTypeError, ArgumentValueError, UsageError
from ...core.text import show_log
from ...parameters.held_masters import master_of, write_master
from ...parameters.plain import without_masters
from ...stepping.attached import attach
from ...stepping.backward import record_pass
from ...stepping.scaled_backward import ScaledBackward
from ..master_groups import MasterGroups
from ..optimizer_wrapper import ForwardingOptimizer
from .loss_scaler import DynamicLossScaler, LossScaler, saved_entry

__all__ = ["FP16_Optimizer"]

logger = logging.getLogger("halfstep")

_NAME = "FP16_Optimizer"
_DYNAMIC_ARGS = ("init_scale", "scale_factor", "scale_window", "min_loss_scale", "max_loss_scale")


class FP16_Optimizer(ForwardingOptimizer, MasterGroups):  # noqa: N801 - Apex's name
    """Wrap an optimizer: fp32 masters for its 16-bit parameters, and a static or dynamic loss scale.

    ::

        model = torch.nn.Linear(D_in, D_out).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = FP16_Optimizer(optimizer, dynamic_loss_scale=True)
        ...
        optimizer.zero_grad()
        optimizer.backward(loss)  # instead of loss.backward()
        optimizer.step()

    A step is skipped if a gradient since the last step was inf or NaN, at any scale, including static scales and 1.0
    (Apex did not check under a static scale, and the weights became NaN). The wrapper is an ``Optimizer``, so torch's
    schedulers accept it. It shares ``param_groups`` and ``state`` with the wrapped optimizer; they hold the parameters
    of the model (in Apex they held the masters).

    Args:
        init_optimizer: any ``torch.optim.Optimizer``, with float16, bfloat16 and fp32 parameters mixed in any groups.
            Use only the wrapper afterwards.
        static_loss_scale: a finite number above zero.
        dynamic_loss_scale: use a dynamic scale and ignore ``static_loss_scale``.
        dynamic_loss_args: keyword arguments of ``DynamicLossScaler``.
        verbose: log each parameter at level INFO of the logger "halfstep". Skipped steps and the new dynamic scale are
            always logged. The logger writes to stderr if the program has not set up logging.

    Attributes:
        optimizer: the wrapped optimizer.
        loss_scaler: a ``LossScaler`` or ``DynamicLossScaler``.
        dynamic_loss_scale: True if ``loss_scaler`` is a ``DynamicLossScaler``.

    Raises:
        ArgumentTypeError: if ``init_optimizer`` is not an optimizer, or ``dynamic_loss_args`` has an unknown key.
        ArgumentValueError: for an invalid scale or other value.
        UsageError: for an optimizer that already has masters or a loss scale.

    Source: Apex, ``apex.fp16_utils``, https://nvidia.github.io/apex/fp16_utils.html.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: dict[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        if isinstance(init_optimizer, FP16_Optimizer):
            raise UsageError("This optimizer is an FP16_Optimizer already; wrap a plain one once.")
        check_kind("init_optimizer", init_optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        self.dynamic_loss_scale = check_flag("dynamic_loss_scale", dynamic_loss_scale)
        check_flag("verbose", verbose)
        self.loss_scaler = (
            _dynamic({} if dynamic_loss_args is None else dynamic_loss_args)
            if dynamic_loss_scale
            else LossScaler(as_number("static_loss_scale", static_loss_scale))
        )
        self.loss_scaler.engine.name = _NAME  # messages name the object that user code has made
        if verbose or dynamic_loss_scale:
            show_log()
        if verbose:
            _log_groups(init_optimizer)
        self._attached = attach(init_optimizer, masters=True)
        # The overflow flag of the passes since the last step; the first pass after a step starts a new flag.
        self._found_inf: torch.Tensor | None = None
        self._stepped = False
        self._unscaled = False  # True if the current gradients are unscaled
        self._scale: torch.Tensor | None = None  # the scale of the gradients after ``update_master_grads=False``
        super().__init__(init_optimizer)

    # ---- the training step, in its order

    def zero_grad(self, set_grads_to_None: bool = False, *, set_to_none: bool | None = None) -> None:  # type: ignore[override]  # noqa: N803
        """Clear the gradients of model and masters, and the overflow flag of the passes since the last step.

        Args:
            set_grads_to_None: set gradients to None instead of zero.
            set_to_none: torch's name for ``set_grads_to_None``.
        """
        self.optimizer.zero_grad(set_grads_to_None if set_to_none is None else set_to_none)
        self._found_inf = self._scale = None
        self._unscaled = False

    def backward(self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Scale ``loss`` and run its backward pass. Further calls before ``step`` add to the gradients.

        Afterwards the gradients are unscaled fp32 tensors. The model and the masters have the same gradients (Apex left
        the model's gradients scaled).

        Args:
            loss: 0-dim floating tensor; a 16-bit loss is converted to fp32 before it is scaled.
            update_master_grads: False leaves all gradients scaled, to save work if several losses follow each other;
                ``update_master_grads()`` (or the next ``step``) then unscales them.
            retain_graph: the argument of ``Tensor.backward``.

        Raises:
            ArgumentTypeError: if the loss is not a floating tensor.
        """
        window, engine = self._attached.window, self.loss_scaler.engine
        found_inf = torch.zeros((), dtype=torch.float32, device=getattr(loss, "device", None))
        block = ScaledBackward(loss, [window], engine, name=_NAME, found_inf=found_inf, check=update_master_grads)
        if self._scale is not None:
            self._unscale(self._scale, found_inf, moves=False)
        with block as scaled_loss:
            scaled_loss.backward(retain_graph=retain_graph)
        self._unscaled = True
        if update_master_grads:
            self._note(found_inf)
        else:
            scale = engine.scale(loss.device)
            window.multiply(scale)
            self._scale = scale

    def update_master_grads(self) -> None:
        """Unscale gradients that are still scaled, and update a dynamic scale.

        Call it after ``backward(loss, update_master_grads=False)``, or after your own backward pass over
        ``loss * optimizer.loss_scale`` that followed ``zero_grad``. Without scaled gradients it does nothing.
        """
        attached, scale = self._attached, self._scale
        if scale is None:
            if self._unscaled or all(param.grad is None for param in attached.window.params()):
                return
            scale = self.loss_scaler.engine.scale(attached.window.device)
        found_inf = torch.zeros((), dtype=torch.float32, device=attached.window.device)
        self._unscale(scale, found_inf)
        self._unscaled = True
        self._note(found_inf)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the master gradients to a total norm.

        Args:
            max_norm: the largest norm allowed.
            norm_type: the p of the p-norm; ``float("inf")`` for the largest magnitude.

        Returns:
            The norm before clipping, a 0-dim tensor; -1 if the gradients overflowed. Does not read the device.
        """
        check_number("max_norm", max_norm, finite=False)
        check_number("norm_type", norm_type, finite=False)
        self._settle()
        return self._attached.window.clip(max_norm, norm_type)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Update the masters and round them into the model, or skip if a gradient was inf or NaN.

        Args:
            closure: a function for optimizers that evaluate the loss. It calls ``zero_grad()`` and ``backward(loss)``
                on this object and returns the loss. If its gradients overflow under a dynamic scale, it runs again at
                the lowered scale, 64 times at most.
            **kwargs: arguments for the wrapped optimizer.

        Returns:
            The result of the wrapped optimizer; None if the step was skipped.

        Raises:
            UsageError: if the closure overflows at every scale, or under a static scale after the optimizer has already
                changed weights.
        """
        if closure is None:
            self._settle()
            result = self.optimizer.step(**kwargs)
        else:
            result = self.optimizer.step(lambda: self._evaluate(closure), **kwargs)
        self._stepped = True
        return result

    # ---- attributes that scripts read

    @property
    def overflow(self) -> bool:
        """True if a pass since the last step overflowed; after a step, the value for this step until the next pass.

        Reads the device.
        """
        return self._found_inf is not None and bool(self._found_inf)

    @property
    def loss_scale(self) -> float:
        """The current loss scale; set it to a finite number above zero. Reads the device."""
        return self.loss_scaler.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._settle()
        self.loss_scaler.cur_scale = as_number("loss_scale", value)

    def inspect_master_grad_data(self) -> list[list[torch.Tensor | None]] | None:
        """Return the gradients of the masters, in the shapes of the model's parameters. Reads the device.

        Returns:
            A list per group with the fp32 gradient of each parameter, or None for a parameter without a gradient. If
            the gradients overflowed they are meaningless, and the result is None.
        """
        self._settle()
        if self.overflow:
            logger.warning("The gradients overflowed, so inspect_master_grad_data returns None.")
            return None
        return [[None if p.grad is None else p.grad.detach() for p in group] for group in self._stepped_groups()]

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, masters and wrapped optimizer's state as numbers, lists, dicts and tensors only.

        The keys are Apex's. ``torch.load(path, weights_only=True)`` reads the saved dict.
        """
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": True,
            "optimizer_state_dict": without_masters(self.optimizer.state_dict()),
            "fp32_from_fp16": [[master_of(p) for p in group] for group in self.fp16_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of Apex's FP16_Optimizer.

        The masters are rounded into the model, so you need not load the model. The kind of the scale, static or
        dynamic, does not change, nor do its window and factor. A saved scale of the other kind is ignored with a logged
        warning.

        Args:
            state_dict: the saved dict.

        Raises:
            ArgumentValueError: if the state does not fit this optimizer. Nothing is changed.
        """
        if not isinstance(state_dict, Mapping):
            raise ArgumentTypeError(
                "load_state_dict takes what state_dict() of an FP16_Optimizer returned, not "
                f"{type(state_dict).__name__}."
            )
        missing = [k for k in ("loss_scaler", "optimizer_state_dict", "fp32_from_fp16") if k not in state_dict]
        if missing:
            raise ArgumentValueError(
                f"This is no state_dict of an FP16_Optimizer: it has no {', '.join(missing)}. Its keys are "
                f"{sorted(state_dict)}."
            )
        saved = state_dict["fp32_from_fp16"]
        masters = self.fp32_from_fp16_groups
        if not _are_groups_of_tensors(saved):
            raise ArgumentValueError(
                f"fp32_from_fp16 must have a list of tensors for each group, as state_dict() returned, not {saved!r}."
            )
        shapes = [[tuple(tensor.shape) for tensor in group] for group in saved]
        expected = [[tuple(master.shape) for master in group] for group in masters]
        if shapes != expected:
            raise ArgumentValueError(
                f"The saved masters have the shapes {shapes}, group by group, and this optimizer's {expected}; "
                "construct it from the same model in the same dtypes."
            )
        entry = saved_entry(state_dict["loss_scaler"])
        try:
            self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentValueError(
                f"optimizer_state_dict does not fit {type(self.optimizer).__name__}: {error}"
            ) from error
        if bool(state_dict.get("dynamic_loss_scale", self.dynamic_loss_scale)) == self.dynamic_loss_scale:
            self.loss_scaler.load_state_dict(entry)
        else:
            kind = "dynamic" if self.dynamic_loss_scale else "static"
            logger.warning(
                "%s: the loss scale is %s here and was not when saved; it stays %g.", _NAME, kind, self.loss_scale
            )
        self._write(self.fp16_groups, saved)

    # ---- inside

    @torch.no_grad()
    def _write(self, groups: list[list[torch.Tensor]], values: list[list[torch.Tensor]]) -> None:
        """Write values to the masters of parameters, or to parameters without a master."""
        for param, value in zip(chain(*groups), chain(*values), strict=True):
            rounded = write_master(param, value)
            param.copy_(value if rounded is None else rounded)

    def _settle(self) -> None:
        if self._scale is not None:
            self.update_master_grads()

    def _unscale(self, scale: torch.Tensor, found_inf: torch.Tensor, *, moves: bool = True) -> None:
        """Unscale gradients that are still scaled.

        Args:
            scale: the scale of the gradients, a 0-dim tensor.
            found_inf: 0-dim float32 tensor, set to 1.0 if a gradient is not finite.
            moves: update the loss scale by ``found_inf``.
        """
        window, engine = self._attached.window, self.loss_scaler.engine
        window.finish(scale, found_inf, engine)
        self._scale = None
        record_pass([window], found_inf, engine, scaler=engine if moves else None)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._found_inf = None
        loss = closure()
        self._settle()
        return loss

    def _note(self, found_inf: torch.Tensor) -> None:
        before = None if self._stepped else self._found_inf
        self._stepped = False
        self._found_inf = found_inf if before is None else torch.maximum(before.to(found_inf.device), found_inf)


def _dynamic(args: Any) -> DynamicLossScaler:
    check_kind("dynamic_loss_args", args, Mapping, "a dict of arguments of DynamicLossScaler")
    unknown = sorted(set(args) - set(_DYNAMIC_ARGS))
    if unknown:
        raise ArgumentTypeError(
            f"dynamic_loss_args has {', '.join(map(repr, unknown))}, which DynamicLossScaler does not take; it takes "
            f"{', '.join(_DYNAMIC_ARGS)}."
        )
    return DynamicLossScaler(**args)


def _are_groups_of_tensors(saved: Any) -> bool:
    kinds = (list, tuple)
    return isinstance(saved, kinds) and all(
        isinstance(group, kinds) and all(isinstance(tensor, torch.Tensor) for tensor in group) for group in saved
    )


def _log_groups(optimizer: torch.optim.Optimizer) -> None:
    for i, group in enumerate(optimizer.param_groups):
        logger.info("%s: parameter group %d", _NAME, i)
        for param in group["params"]:
            logger.info("%s: %s %s on %s", _NAME, dtype_name(param.dtype), tuple(param.shape), param.device)
