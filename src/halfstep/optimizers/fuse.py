"""``fuse``: makes the optimizer of an existing script a fused one in place; ``unfuse`` converts it back.

A fused optimizer remains an instance of torch's class: its groups, defaults and state have exactly torch's keys. Only
its step differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ..core.dtypes import HALF_DTYPES, StateForm
from ..core.errors import ArgumentTypeError, ArgumentValueError, HalfstepError
from ..kernels.shards import is_sharded
from ..parameters.split import entries, master_value
from ..torch_internals.torch_compat import is_traceable_wrapper_subclass
from .adagrad import FusedAdagrad
from .adam import FusedAdam
from .base import FusedOptimizer, Hyper
from .class_swap import counts_steps, rebase
from .fused_state import FusedData
from .muon import FusedMuon
from .options import FusedOptions, MasterForm
from .param_rows import StateLayout
from .sgd import FusedSGD

__all__ = ["FusedTorchOptimizer", "can_fuse", "fuse", "fused_base", "has_moments", "unfuse"]

_DTYPES = {torch.float64, torch.float32, *HALF_DTYPES}
_MASTERS = {"remainder": torch.int16, "master": torch.float32}
"""The dtypes of masters in the state of a 16-bit parameter. torch's own ``load_state_dict`` casts them to 16 bits."""


class FusedTorchOptimizer(FusedOptimizer):
    """The common part of torch's optimizers in fused form.

    Bound methods that a scheduler or ``amp`` stored before ``unfuse`` keep working after it.
    """

    _counts: ClassVar[bool] = True  # torch expects a ``step`` in every state
    _groups_of_torch: ClassVar[bool] = True

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Make an instance for torch's ``__init__``, for frameworks that construct another optimizer of its class."""
        optimizer: Any = super().__new__(cls)
        optimizer._fused = FusedData.of(optimizer)
        return optimizer

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step like ``FusedOptimizer.step``, or like torch after ``unfuse``."""
        own: Any = _hooked_step if isinstance(self, FusedTorchOptimizer) else _of_torch(type(self)).step
        return own(self, closure, **kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # keeps torch from adding hooks, which both branches have
    _unhooked_step = FusedOptimizer.step

    def zero_grad(self, set_to_none: bool = True) -> None:  # type: ignore[override]
        """Clear gradients like torch."""
        torch.optim.Optimizer.zero_grad(self, set_to_none)
        release = getattr(self, "release", None)  # missing after ``unfuse``
        if release is not None:
            release.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the state like torch, without entries for parameters without state."""
        saved = super().state_dict()
        saved["state"] = {key: kept for key, kept in saved["state"].items() if kept != {}}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of torch's class, possibly saved again by torch's class."""
        super().load_state_dict(state_dict)
        _drop_spoilt_masters(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        if self._counts:
            for kept in entries(state.get("state", {})).values():
                if kept:  # may be only a master, before the first step
                    kept.setdefault("step", torch.tensor(0.0, dtype=torch.float32, device="cpu"))
        super().__setstate__(state)


_hooked_step = torch.optim.Optimizer.profile_hook_step(FusedOptimizer.step)


def _of_torch(cls: type) -> type[torch.optim.Optimizer]:
    """Return the class of ``torch.optim`` that a class is or extends."""
    return next(each for each in cls.__mro__ if getattr(torch.optim, each.__name__, None) is each)  # type: ignore[no-any-return]


class Adam(FusedTorchOptimizer, FusedAdam, torch.optim.Adam):
    """``torch.optim.Adam`` with a fused step."""

    __init__ = torch.optim.Adam.__init__


class AdamW(FusedTorchOptimizer, FusedAdam, torch.optim.AdamW):
    """``torch.optim.AdamW`` with a fused step."""

    __init__ = torch.optim.AdamW.__init__


class SGD(FusedTorchOptimizer, FusedSGD, torch.optim.SGD):
    """``torch.optim.SGD`` with a fused step. With ``dampening`` its state has a ``step``, which torch ignores."""

    _counts = False
    materialize_master_grads = True
    __init__ = torch.optim.SGD.__init__


class Adagrad(FusedTorchOptimizer, FusedAdagrad, torch.optim.Adagrad):
    """``torch.optim.Adagrad`` with a fused step."""

    __init__ = torch.optim.Adagrad.__init__

    def _layout(self, group: Hyper) -> StateLayout:
        initial = self.defaults["initial_accumulator_value"]  # torch does not read it from groups
        return super()._layout({**group, "initial_accumulator_value": initial})


class Muon(FusedTorchOptimizer, FusedMuon, torch.optim.Muon):
    """``torch.optim.Muon`` with a fused step."""

    _counts = False
    __init__ = torch.optim.Muon.__init__


_CLASSES: tuple[type[FusedTorchOptimizer], ...] = (Adam, AdamW, SGD, Adagrad, Muon)
_FUSED: dict[type[torch.optim.Optimizer], type[FusedTorchOptimizer]] = {_of_torch(cls): cls for cls in _CLASSES}


def can_fuse(optimizer: torch.optim.Optimizer) -> bool:
    """True if ``fuse`` accepts this optimizer.

    It must be exactly torch's ``Adam``, ``AdamW``, ``SGD``, ``Adagrad`` or ``Muon``, without ``differentiable``, not
    yet under ``amp``, and with torch's own ``step``, which a scheduler may have wrapped. Its parameters must be real
    dense floating-point tensors, which may be sharded (except for Muon), and no present gradient may be sparse.
    """
    return _obstacle(optimizer) is None


def fuse(
    optimizer: torch.optim.Optimizer,
    *,
    master_weights: MasterForm = None,
    max_grad_norm: float | None = None,
    state_dtype: StateForm = None,
) -> torch.optim.Optimizer:
    """Turn torch's ``Adam``, ``AdamW``, ``SGD``, ``Adagrad`` or ``Muon`` into its fused counterpart, in place.

    ::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        optimizers.fuse(optimizer)
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2")

    The optimizer stays the same object, with its groups, state and hooks, so existing schedulers keep driving it. It is
    an instance of torch's class and of halfstep's, its groups have torch's keys, and its ``state_dict()`` loads in
    either.

    Args:
        optimizer: an instance of exactly one of these classes, not yet passed to ``amp.initialize``.
        master_weights: see ``CommonOptions``.
        max_grad_norm: see ``CommonOptions``.
        state_dtype: see ``CommonOptions``.

    Returns:
        The optimizer.

    Raises:
        ArgumentTypeError: for an optimizer of another class, or a parameter that is not a real floating-point tensor.
        ArgumentValueError: if another condition of ``can_fuse`` is not met.
    """
    options = FusedOptions(max_grad_norm, master_weights, state_dtype)
    obstacle = _obstacle(optimizer)
    if obstacle is not None:
        raise obstacle
    if options.state_dtype == "8bit" and not has_moments(optimizer):
        raise ArgumentValueError(
            f"fuse: state_dtype='8bit' is for moments, which are averages. {type(optimizer).__name__} adds up squares, "
            "and a sum that is rounded stops growing; leave state_dtype out."
        )
    rebase(optimizer, fused_base(optimizer, options))
    return optimizer


def has_moments(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer is fused, or can be fused, and keeps moments."""
    adds_up = isinstance(optimizer, (FusedAdagrad, torch.optim.Adagrad))
    return not adds_up and (isinstance(optimizer, FusedOptimizer) or can_fuse(optimizer))


def fused_base(optimizer: torch.optim.Optimizer, options: FusedOptions | None = None) -> type[FusedTorchOptimizer]:
    """Return the fused class of an optimizer that ``can_fuse`` accepts, after adding its data to the optimizer."""
    optimizer._fused = FusedData.of(optimizer, options or FusedOptions())  # type: ignore[attr-defined]
    _drop_spoilt_masters(optimizer)
    return _FUSED[type(optimizer)]


@torch.no_grad()
def unfuse(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, torch.Tensor]:
    """Turn an optimizer that ``fuse`` converted back into torch's optimizer, in place.

    Its state becomes torch's: in fp32 for a parameter that had a master, else in the parameter's dtype.

    Args:
        optimizer: a fused ``torch.optim.Adam``, ``AdamW``, ``SGD``, ``Adagrad`` or ``Muon``.

    Returns:
        The fp32 values of the 16-bit parameters that had masters. No other copy of them remains, and torch's step needs
        them as its parameters, because its fp32 state does not match a 16-bit parameter.

    Raises:
        ArgumentTypeError: for an optimizer that ``fuse`` did not convert.
    """
    if not isinstance(optimizer, FusedTorchOptimizer):
        raise ArgumentTypeError(f"unfuse takes what fuse has made, not {type(optimizer).__name__}.")
    if optimizer.release is not None:
        optimizer.release.remove()
    masters = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            state = optimizer.state.get(param)
            if state is not None:
                master = _take_master(param, state)
                if master is not None:
                    masters[param] = master
                optimizer._widen_moments(group, state)
                _restore(param, state, group, param.dtype if master is None else master.dtype, optimizer._counts)
                if not state:
                    del optimizer.state[param]
    del optimizer._fused
    rebase(optimizer, _of_torch(type(optimizer)), getattr(optimizer, "_amp_stash", None))
    return masters


# ---- inside


def _obstacle(optimizer: torch.optim.Optimizer) -> HalfstepError | None:
    """Return the error that tells why an optimizer cannot be fused; None if it can."""
    kind = type(optimizer)
    if hasattr(optimizer, "_amp_stash") and not isinstance(optimizer, FusedOptimizer):
        return ArgumentValueError("fuse comes before amp.initialize or amp.decorate, not after.")
    if kind not in _FUSED:
        names = ", ".join(f"torch.optim.{cls.__name__}" for cls in _FUSED)
        fused = " that is fused already" if isinstance(optimizer, FusedOptimizer) else ""
        return ArgumentTypeError(f"fuse takes {names}, not {kind.__name__}{fused}.")
    if "step" in vars(optimizer) and not counts_steps(optimizer):
        return ArgumentValueError(f"fuse: the step of this {kind.__name__} has been replaced; fuse it before.")
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return ArgumentValueError("fuse: differentiable=True needs a step that autograd can follow; leave it out.")
        for param in group["params"]:
            if kind is torch.optim.Muon and is_sharded(param):
                return ArgumentValueError(
                    f"fuse: a matrix of shape {tuple(param.shape)} is sharded, and a fused Muon needs whole ones. "
                    "Leave this optimizer as it is: torch's Muon gathers them."
                )
            foreign = not is_sharded(param) and is_traceable_wrapper_subclass(param)
            if param.dtype not in _DTYPES or foreign or param.layout is not torch.strided:
                kind_of = f"{type(param).__name__}, {param.dtype}, {param.layout}"
                return ArgumentTypeError(
                    f"fuse: a parameter is of type {kind_of}; fused optimizers update dense "
                    "real floating-point parameters. Give the others to a torch.optim optimizer."
                )
            if param.grad is not None and param.grad.layout is not torch.strided:
                return ArgumentValueError(
                    f"fuse: a gradient of shape {tuple(param.shape)} is sparse ({param.grad.layout}); fused optimizers "
                    "need dense ones. Leave this optimizer as it is, or use nn.Embedding(sparse=False)."
                )
    return None


def _drop_spoilt_masters(optimizer: torch.optim.Optimizer) -> None:
    """Remove masters that torch's class kept, and cast, while it stepped on the weights themselves."""
    for state in entries(optimizer.state).values():
        for name, dtype in _MASTERS.items():
            if name in state and state[name].dtype is not dtype:
                del state[name]


def _take_master(param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor | None:
    """Remove the master of a parameter from its state, and return it."""
    found = any(name in state for name in _MASTERS) and param.dtype in HALF_DTYPES
    master = master_value(param, state) if found else None
    for name in _MASTERS:
        state.pop(name, None)
    return master


def _restore(param: torch.Tensor, state: dict[str, Any], group: Hyper, dtype: torch.dtype, counts: bool) -> None:
    """Convert the state of a parameter from the fused form to torch's form."""
    step = state.pop("step", None)
    if not counts and isinstance(step, torch.Tensor) and not step.item():
        state.clear()  # every step was skipped, and torch considers any buffer as initialized
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = value.to(dtype)
    if counts and state and isinstance(step, torch.Tensor):
        on_device = group.get("capturable") or group.get("fused")
        state["step"] = step.to(param.device if on_device else "cpu", copy=True)
