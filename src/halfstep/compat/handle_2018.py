"""Apex's interface of 2018: ``amp.init()`` casts ops in the whole process, and the handle it returns scales losses."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ..casting.emulation import Emulate, check_emulate
from ..casting.scope import OpCasting, begin_session, end_session, join_session
from ..core.checks import check_count, check_flag
from ..core.dtypes import default_half, parse_half
from ..core.errors import ArgumentTypeError, UsageError
from ..core.hardware import accelerator, warn_if_slow
from ..core.loss_scale import LossScale, LossScaleSpec, StaticLossScale, make_loss_scale
from ..core.oplists import OpLists
from ..core.text import show_log
from ..optimizers.class_swap import rebase
from ..parameters.loss_scaler import DeviceLossScaler
from ..stepping.attached import AttachedOptimizer, attach, attached_to, share_overflows
from ..stepping.dynamic_class import base_of
from ..stepping.scaled_backward import ScaledBackward, check_loss
from .casting_switch import CastingSwitch
from .optimizer_wrapper import ForwardingOptimizer

__all__ = ["AmpHandle", "NoOpHandle", "OptimWrapper", "init"]


def init(
    enabled: bool = True,
    loss_scale: LossScaleSpec = "dynamic",
    enable_caching: bool = True,
    verbose: bool = False,
    allow_banned: bool = False,
    *,
    dtype: torch.dtype | str | None = None,
    emulate: Emulate = "auto",
    enable: bool | None = None,
    op_lists: OpLists | None = None,
) -> NoOpHandle:
    """Cast ops in the whole process from now on, and get a handle for loss scaling.

    ::

        amp_handle = amp.init()
        ...
        with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    Weights stay fp32. A thread takes part from its first call of a module.

    Args:
        enabled: False returns a handle that does nothing, so that one script serves both.
        loss_scale: "dynamic" (from 2**16, doubled after 2,000 good passes, 2**24 at most), a number above zero, or
            a ``halfstep.DynamicLossScale`` or ``StaticLossScale``.
        enable_caching: cast each weight at most once in an ``auto_cast`` block. Outside blocks user code may write to
            weights at any time, so each op casts them.
        verbose: log each cast, as ``Float->Half (conv2d)``, at level INFO of the logger "halfstep". It writes to stderr
            if the program has not set up logging.
        allow_banned: run ops that refuse 16-bit input in fp32.
        dtype: the 16-bit dtype; None means float16 if CUDA is available and bfloat16 otherwise.
        emulate: the argument of ``amp.auto_cast``.
        enable: another name of ``enabled``, because the article below has both.
        op_lists: the op lists; None means the lists of O1.

    Returns:
        The handle. If several handles are active, the latest handle decides about casts.

    Raises:
        ArgumentTypeError: for a switch that is neither True nor False.
        ArgumentValueError: for an invalid loss scale, dtype or ``emulate``. Nothing is changed.

    Warns:
        PrecisionWarning: once, if the hardware has no units for the dtype and ``emulate=False``.

    Source: "Mixed precision training with APEX, part 1" (in Chinese), 2018, https://kuaibao.qq.com/s/20180624G0UZD400.
    """
    switches = {"enable_caching": enable_caching, "verbose": verbose, "allow_banned": allow_banned}
    for name, value in switches.items():
        check_flag(name, value)
    if not (check_flag("enabled", enabled) if enable is None else check_flag("enable", enable)):
        return NoOpHandle()
    check_emulate(emulate)
    half = parse_half(dtype) if dtype is not None else default_half("cuda" if torch.cuda.is_available() else "cpu")
    rule = make_loss_scale(loss_scale)
    if verbose:
        show_log()
    if emulate is False:
        warn_if_slow(torch.device(accelerator() or "cpu"), half)
    casting = OpCasting(
        half,
        op_lists or OpLists.default(),
        cache=enable_caching,
        verbose=verbose,
        allow_banned=allow_banned,
        emulate=emulate,
    )
    return AmpHandle(casting, rule, has_cache=enable_caching, verbose=verbose)


class NoOpHandle:
    """The handle of ``amp.init(enabled=False)``, whose methods have no effect."""

    has_cache = False
    """True if casts of weights are kept for a second use."""
    verbose = False
    """True if each cast is logged."""
    _alive = False
    _is_active = False
    _rule: LossScale = StaticLossScale(1.0)

    def is_active(self) -> bool:
        """True if ops are cast."""
        return False

    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> AbstractContextManager[torch.Tensor]:
        """Return a block whose value is the unscaled loss."""
        return nullcontext(loss)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Wrap an optimizer in an object that has a method ``scale_loss``.

        Args:
            optimizer: any optimizer.
            num_loss: the count of losses between two steps; each loss gets its own scale.

        Raises:
            ArgumentTypeError: if ``optimizer`` is not an optimizer.
            ArgumentValueError: if ``num_loss`` is not a whole number above zero.
        """
        if isinstance(optimizer, OptimWrapper) or not isinstance(optimizer, torch.optim.Optimizer):
            raise ArgumentTypeError(f"wrap_optimizer needs a torch.optim.Optimizer, not {type(optimizer).__name__}.")
        check_count("num_loss", num_loss)
        return OptimWrapper(optimizer, self, num_loss)

    def new_scaler(self, name: str) -> DeviceLossScaler:
        """Make a loss scaler with the rule of this handle."""
        return DeviceLossScaler(self._rule, name=name)

    def _disable_casts(self) -> AbstractContextManager[Any]:
        """Return a block without op casts."""
        return nullcontext()

    def _clear_cache(self) -> None:
        """Forget the casts of weights."""

    def remove_cache(self, param: torch.Tensor) -> None:
        """Forget the cast of a weight. The current implementation forgets all casts."""
        self._clear_cache()

    def _deactivate(self) -> None:
        """Undo all changes of this handle."""


class AmpHandle(CastingSwitch, NoOpHandle):
    """Op casting in the whole process, and a loss scale.

    Args:
        casting: the op casts of the process.
        rule: the rule of the loss scales.
        has_cache: True if ``casting`` caches casts of weights.
        verbose: True if ``casting`` logs casts.
    """

    def __init__(self, casting: OpCasting, rule: LossScale, *, has_cache: bool, verbose: bool) -> None:
        self.has_cache = has_cache
        self.verbose = verbose
        self._casting = casting
        self._rule = rule
        self._scaler = self.new_scaler("the loss scaler")
        self._attached: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._alive = True
        self._hook = register_module_forward_pre_hook(_join_session_casting)
        begin_session(casting)

    def is_active(self) -> bool:
        """True if this thread casts ops and the handle is not deactivated."""
        return self._alive and super().is_active()

    def scale_loss(self, loss: torch.Tensor, optimizer: Any) -> AbstractContextManager[torch.Tensor]:
        """Scale a loss for its backward pass, and unscale the new gradients after the block.

        If a new gradient is inf or NaN, the next ``optimizer.step()`` does nothing and a dynamic scale shrinks. The new
        gradients are added to earlier gradients, as without scaling.

        Args:
            loss: a floating tensor; a 16-bit loss is scaled in fp32.
            optimizer: the optimizer whose parameters get gradients, or a list of optimizers.

        Returns:
            A block whose value is the scaled loss, or the unscaled loss if the handle is deactivated.

        Raises:
            ArgumentTypeError: if the loss is not a floating tensor, or ``optimizer`` is not an optimizer.
        """
        if isinstance(optimizer, OptimWrapper):
            return optimizer.scale_loss(loss)
        given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for item in given:
            if not isinstance(item, torch.optim.Optimizer):
                raise ArgumentTypeError(
                    f"scale_loss needs the optimizer as second argument, not {type(item).__name__}."
                )
        if not self._alive:
            return nullcontext(loss)
        if not given:
            raise ArgumentTypeError("scale_loss needs the optimizer as second argument, not an empty list.")
        check_loss("scale_loss", loss)
        windows = [self.attach(item).window for item in given]
        return ScaledBackward(loss, windows, self._scaler)

    def attach(self, optimizer: torch.optim.Optimizer) -> AttachedOptimizer:
        """Attach an optimizer unless it is attached."""
        found = attached_to(optimizer)
        if found is None:
            found = attach(optimizer)
            self._attached.add(optimizer)
            share_overflows([one for each in self._attached if (one := attached_to(each)) is not None])
        return found

    def _deactivate(self) -> None:
        """Restore the casting from before this handle and the optimizers' methods.

        Handles may be deactivated in any order. A second call does nothing.
        """
        if not self._alive:
            return
        self._alive = False
        self._hook.remove()
        for optimizer in list(self._attached):
            attached = attached_to(optimizer)
            if attached is not None and not attached.window.table.has_masters:
                rebase(optimizer, base_of(optimizer))
        end_session(self._casting)


class OptimWrapper(ForwardingOptimizer):
    """An optimizer with up to ``num_loss`` losses between two steps, each with its own loss scale.

    ::

        optimizer = amp_handle.wrap_optimizer(optimizer, num_loss=2)
        ...
        with optimizer.scale_loss(loss1) as scaled_loss:
            scaled_loss.backward()
        with optimizer.scale_loss(loss2) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()

    All other methods and attributes are the wrapped optimizer's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, handle: NoOpHandle, num_loss: int) -> None:
        super().__init__(optimizer)
        self._handle = handle
        self._scalers = [handle.new_scaler(f"loss scaler {i}") for i in range(num_loss)]
        self._next = 0

    def scale_loss(self, loss: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """Scale the next loss of this step for its backward pass.

        The k-th block since the last step uses the k-th scale. If any block overflows, the step is skipped.

        Args:
            loss: a floating tensor; a 16-bit loss is scaled in fp32.

        Returns:
            A block whose value is the scaled loss.

        Raises:
            UsageError: for more losses than ``num_loss``.
            ArgumentTypeError: if the loss is not a floating tensor.
        """
        handle = self._handle
        if not isinstance(handle, AmpHandle) or not handle._alive:
            return nullcontext(loss)
        check_loss("scale_loss", loss)
        window = handle.attach(self.optimizer).window
        if self._next == len(self._scalers):
            raise UsageError(
                f"This is loss number {self._next + 1} since the last step, and wrap_optimizer was called with "
                f"num_loss={len(self._scalers)}; pass as many as there are losses (micro-batches counted) in a step."
            )
        scaler = self._scalers[self._next]
        self._next += 1
        return ScaledBackward(loss, [window], scaler)

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Run a step of the optimizer, or skip it if a loss overflowed; the next loss uses the first scale."""
        self._next = 0
        return super().step(closure, **kwargs)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients; the next loss uses the first scale."""
        self._next = 0
        super().zero_grad(set_to_none)


def _join_session_casting(module: torch.nn.Module, args: Any) -> None:
    """Let the thread that runs this module take part in the casting of the process: a forward pre-hook."""
    join_session()
