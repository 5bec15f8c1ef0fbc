"""What halfstep keeps about one torch optimizer, and how its step is taken or skipped.

``attach`` gives the optimizer a class of its own, made on the fly below the one it has, whose ``step``, ``zero_grad``,
``add_param_group`` and ``load_state_dict`` come here. The instance gets ``_amp_stash``, and the few attributes that
schedulers and steps look for, which docs/side-effects.md lists. Other code meets an ordinary optimizer: its groups hold
the model's parameters, and its state is keyed by them.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from ..casting.current import thread
from ..casting.scope import NO_CASTING, active_casting
from ..core.errors import UsageError
from ..core.inner_optimizers import bare
from ..core.torch_compat import dispatch_mode_count, has_step_hooks
from ..gradients.table import REDUCTIONS
from ..masters.keeper import MasterKeeper
from ..optimizers.base import FusedOptimizer
from ..optimizers.class_swap import rebase
from ..optimizers.fuse import OfTorch, fused_base, unfuse
from ..optimizers.param_rows import SparseGradient
from .backward import UNSAFE, WINDOWS, Window, WindowState, any_overflow
from .dynamic_class import add_names_of_apex, class_over
from .replaced import ReplacedParameters
from .step import ClosureOverflowed, Stepping, guarded

__all__ = [
    "AttachedOptimizer",
    "Observer",
    "attach",
    "attached_to",
    "creation_callbacks",
    "observers",
    "share_overflows",
]

logger = logging.getLogger("halfstep")


def attached_to(optimizer: object) -> AttachedOptimizer | None:
    """What is kept about an optimizer, or about the one behind a wrapper; None if it is not attached.

    It is the attribute ``_amp_stash``, as Apex's was: scripts ask for that name to learn whether amp is on.
    """
    found = getattr(optimizer, "_amp_stash", None) or getattr(bare(optimizer), "_amp_stash", None)
    return found if isinstance(found, AttachedOptimizer) else None


def attach(optimizer: torch.optim.Optimizer, *, fused: bool = False, **options: Any) -> AttachedOptimizer:
    """Take over the step of an optimizer.

    Args:
        optimizer: any that is not attached.
        fused: make it a fused one of the same arithmetic, too, which ``can_fuse`` says is possible.
        **options: those of ``AttachedOptimizer``.

    Raises:
        UsageError: if it is attached already.
    """
    if attached_to(optimizer) is not None:
        raise UsageError(
            f"This {type(optimizer).__name__} has been through amp.initialize, amp.decorate, FP16_Optimizer or "
            "amp.init once and can go only once; make a new optimizer to start over."
        )
    attached = AttachedOptimizer(optimizer, base=fused_base(optimizer) if fused else type(optimizer), **options)
    WINDOWS[attached.window] = None
    return attached


def share_overflows(attached: Sequence[AttachedOptimizer]) -> None:
    """Let those of some optimizers that share a parameter hear of each other's backward passes."""
    params = [set(map(id, one.window.params())) for one in attached]
    for one, mine in zip(attached, params, strict=True):
        others = [other for other, its in zip(attached, params, strict=True) if other is not one and mine & its]
        one.window.sharing = tuple(weakref.ref(other.window) for other in others)
        if others:
            one.window.state = WindowState.DIRTY  # it has not heard of passes before


class Observer(Protocol):
    """Watches the steps of attached optimizers: a report, a monitor, a callback."""

    def before_step(self, attached: AttachedOptimizer) -> None:
        """Called before a step is taken or skipped."""

    def after_step(self, attached: AttachedOptimizer) -> None:
        """Called after a step was taken or skipped."""


observers: list[Observer] = []
"""Called for every step of every attached optimizer. An observer adds itself, and removes itself when it is done."""

creation_callbacks: list[Callable[[AttachedOptimizer], None]] = []
"""Called with each ``AttachedOptimizer`` that is made. Unlike observers they keep no step from being recorded."""


@torch.optim.Optimizer.profile_hook_step
def _run_hooked(optimizer: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """Take the step of an attached optimizer with torch's hooks around it: none runs for a step that the host skips."""
    attached = optimizer._amp_stash
    return attached.stepping.take(closure, args, kwargs, attached.keeper)


class AttachedOptimizer:
    """The masters, the backward passes and the step of one optimizer.

    Args:
        optimizer: any; this must not outlive it.
        base: the class before whose methods the optimizer gets ours. With None it keeps its class and its methods, and
            whoever makes this calls its ``step`` instead of the optimizer's.
        masters, originals, own: see ``MasterKeeper``.
        models: those that it trains, if they are known.
        verbose: whether to log what is skipped.

    Attributes:
        keeper: its masters, whoever keeps them.
        window: its backward passes since the last step.
        stepping: how it steps.
        session: whoever attached it may leave its own state here.
    """

    class_over = staticmethod(class_over)
    # Flags that scripts for Apex read and set. Masters are made at once, and gradients unscaled after each block.
    lazy_init_called, params_have_scaled_gradients, process_zero_grad = True, False, True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        base: type[torch.optim.Optimizer] | None = None,
        masters: bool | Literal["elsewhere"] = False,
        originals: dict[int, torch.Tensor] | None = None,
        own: bool = True,
        models: Iterable[torch.nn.Module] = (),
        verbose: bool = True,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.stepping = Stepping(optimizer)
        if base is not None:
            rebase(optimizer, base, self)
        self.keeper = MasterKeeper(optimizer, masters, originals, own=own)
        self.window = Window(self.keeper)
        self.window.replaced = ReplacedParameters(tuple(map(weakref.ref, models)))
        self.session: Any = None
        self.verbose = verbose
        for callback in creation_callbacks:
            callback(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, which this must not outlive."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def unscale_late(self, scale: torch.Tensor, found_inf: torch.Tensor) -> None:
        """Leave it to a fused step to unscale gradients where that loses less: where they have 16 bits.

        Args:
            scale: 0-dim tensor that the gradients are multiplied by.
            found_inf: 0-dim float32 tensor, set to 1.0 if one holds inf or NaN, unless the step sees that in time.
        """
        if self.window.gradients.unscale_or_check(scale, found_inf, step_checks=self._step_checks()):
            self.stepping.grad_scale = scale

    def _step_checks(self) -> bool:
        """Whether the next step finds inf and NaN early enough: nobody asks before it.

        Other processes would. So may torch's own optimizers, which can go on without their fused step.
        """
        optimizer = self.optimizer
        if not isinstance(optimizer, FusedOptimizer) or isinstance(optimizer, OfTorch):
            return False
        asked = self.window.records or observers or (dist.is_available() and dist.is_initialized())
        return optimizer.checks_gradients and not asked

    # ---- the step

    def step(self, closure: Callable[[], Any] | None, args: Any, kwargs: Any, *, skips: bool = False) -> Any:
        """The optimizer's step on unscaled gradients. It is skipped, and changes nothing, if a pass overflowed.

        Args:
            closure: for the step, or None.
            args: further arguments of the step.
            kwargs: further keyword arguments of the step.
            skips: True if it is known that the step is skipped.
        """
        window, scaling = self.window, self.window.scaling
        if window.state in UNSAFE and window.is_open():
            raise UsageError(
                f"{type(self.optimizer).__name__}.step() was called inside of a scale_loss block, where gradients are "
                "still multiplied by the loss scale. Dedent it: they are unscaled when the block is left. In hooks "
                "of a backward pass use attach(model, release=True) instead; in bfloat16 leave out the block."
            )
        scales = not all(scaler.neutral for scaler in scaling.expected)
        if scales and closure is None and not skips and scaling.judged is not scaling.scaled:
            window.check_scaling()
        for observer in observers:
            observer.before_step(self)
        result = self._skip() if skips else self._step(closure, args, kwargs)
        self.stepping.calls += 1
        for observer in observers:
            observer.after_step(self)
        window.scales.clear()
        if scales and closure is not None and scaling.judged is not scaling.scaled:
            window.check_scaling()
        return result

    def call(self, optimizer: Any, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Call a ``step`` as a scaler does: not at all if the host can know that it will be skipped.

        Args:
            optimizer: the one this belongs to, or a wrapper of it, which does more in its ``step``.
            closure: for the step, or None.
            *args: further arguments of the step.
            **kwargs: further keyword arguments of the step.
        """
        window = self.window
        if closure is None and window.records and not self.stepping.takes_flags:
            if any_overflow(window.take_records()).item():
                return self.step(None, args, kwargs, skips=True)
            window.state = WindowState.IDLE
        if getattr(self._optimizer(), "_amp_stash", None) is not self:
            return self.step(closure, args, kwargs)
        step = optimizer.step
        return step(*args, **kwargs) if closure is None else step(closure, *args, **kwargs)

    def _step(self, closure: Callable[[], Any] | None, args: Any, kwargs: Any) -> Any:
        window, keeper, optimizer = self.window, self.keeper, self._optimizer()
        assert optimizer is not None
        if window.replaced.models:
            window.replaced.refuse(optimizer)
        if window.known is not None:
            window.drop_brought()
        records = window.take_records(agreed=closure is None) if window.records or REDUCTIONS else []
        casting = active_casting() if thread.key else None
        with NO_CASTING if casting is not None else nullcontext():
            found_inf = any_overflow(records) if records else None
            if found_inf is None and closure is None and window.state is WindowState.DIRTY:
                found_inf = window.settle()
            # A hook must not run for a step that is skipped. On a CPU the host looks, which costs nothing; on another
            # device it would wait, and a hook asks ``optimizer.step_was_skipped``.
            tells = self.stepping.hooked and found_inf is not None and found_inf.is_cpu and has_step_hooks(optimizer)
            tells = tells and not dispatch_mode_count()
            if found_inf is not None and (closure is not None or tells or not self.stepping.takes_flags):
                if found_inf.item():
                    return self._skip()
                found_inf, window.state = None, WindowState.IDLE
            if closure is not None:
                name = type(optimizer).__name__
                closure = guarded(closure, keeper, casting, window.take_records, name, self.verbose)
            self.stepping.found_inf = found_inf
            try:
                if self.stepping.hooked:
                    return _run_hooked(optimizer, *([] if closure is None else [closure]), *args, **kwargs)
                return self.stepping.take(closure, args, kwargs, keeper)
            except ClosureOverflowed:
                return self.stepping.skip()
            except SparseGradient:
                if not (keeper.any and isinstance(optimizer, OfTorch)):
                    raise
                returned = self._step_unfused(found_inf, args, kwargs)
                return returned if closure is None else vars(closure)["loss"]

    def _skip(self) -> Any:
        release = self.window.release
        if release is not None:
            release.end_step()
        return self.stepping.skip()

    def _step_unfused(self, found_inf: torch.Tensor | None, args: Any, kwargs: Any) -> Any:
        """Go on with torch's own step, which takes sparse gradients, on plain masters."""
        optimizer: Any = self.optimizer
        logger.info("%s goes on without its fused step, which takes no sparse gradients", type(optimizer).__name__)
        started = [*self.keeper.started(), *unfuse(optimizer).items()]
        self.keeper.keep_plain({id(param): value for param, value in started})
        # Unlike the fused step, torch's own does not read flags on the device.
        if found_inf is not None and found_inf.item():
            return self.stepping.skip()
        with self.stepping.flags_taken() as (scale, overflowed):
            if overflowed is not None and overflowed.item():
                return self.stepping.skip()
            if scale is not None:
                found = torch.zeros((), dtype=torch.float32, device=self.window.device)
                self.window.gradients.finish(scale, found)
            return self._step(None, args, kwargs)

    # ---- copies

    def reduced(self, base: type, state: Any) -> tuple[Any, ...]:
        """What a copy or pickle of the optimizer is made from.

        Args:
            base: the class that the optimizer had before it was attached.
            state: what its ``__getstate__`` returns.
        """
        return _rebuild, (base, state, self.keeper.any, self.keeper.started(), self.verbose, self.session)


add_names_of_apex(
    AttachedOptimizer,
    "Stash",
    "all_fp16_params all_fp32_from_fp16_params all_fp32_from_fp32_params all_fp32_params fp16_groups already_patched"
    " fp32_from_fp16_groups fp32_from_fp32_groups all_fp16_grad_stash all_fp32_grad_stash dummy_overflow_buf"
    " all_fp32_from_fp32_grad_stash multi_tensor_scale multi_tensor_l2norm",
)


def _rebuild(base: Any, state: Any, masters: bool, started: Any, verbose: bool, session: Any) -> Any:
    """A copy of an attached optimizer."""
    optimizer: Any = base.__new__(base)
    optimizer.__setstate__(state)
    originals = {id(param): master.detach() for param, master in started}
    attach(optimizer, masters=masters, originals=originals, verbose=verbose).session = session
    return optimizer
