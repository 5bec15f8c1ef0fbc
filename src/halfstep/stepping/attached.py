"""The state that halfstep keeps for one torch optimizer, and the code that takes or skips its step.

``attach`` gives the optimizer a class of its own, made on the fly below the one it has, whose ``step``, ``zero_grad``,
``add_param_group`` and ``load_state_dict`` come here. The instance gets ``_amp_stash``, and the few attributes that
schedulers and steps look for, which docs/side-effects.md lists. Other code meets an ordinary optimizer: its groups hold
the model's parameters, and its state is keyed by them.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from ..casting.current import thread
from ..casting.scope import NO_CASTING, active_casting
from ..core.errors import UsageError
from ..core.inner_optimizers import bare
from ..optimizers.base import FusedOptimizer
from ..optimizers.class_swap import rebase
from ..optimizers.fuse import FusedTorchOptimizer, fused_base, unfuse
from ..optimizers.param_rows import SparseGradient
from ..parameters.held_masters import WITH_MEMORY, settle
from ..parameters.keeper import MasterKeeper
from ..parameters.table import REDUCTIONS
from ..torch_internals.torch_compat import dispatch_mode_count, has_step_hooks
from .backward import UNSAFE, WINDOWS, Window, WindowState, any_overflow
from .closure import ClosureOverflowed, guard
from .dynamic_class import add_names_of_apex, class_over
from .replaced import ReplacedParameters, registered

__all__ = [
    "AttachedOptimizer",
    "Observer",
    "attach",
    "attached_to",
    "creation_callbacks",
    "observers",
    "share_overflows",
    "skipped_steps",
]

logger = logging.getLogger("halfstep")


_LOOKS = 3  # the steps in which the models are looked at in any case


def attached_to(optimizer: object) -> AttachedOptimizer | None:
    """Return the state of an optimizer, or of the optimizer in a wrapper; None if it is not attached.

    It is the attribute ``_amp_stash``, as Apex's was: scripts ask for that name to learn whether amp is on.
    """
    found = getattr(optimizer, "_amp_stash", None) or getattr(bare(optimizer), "_amp_stash", None)
    return found if isinstance(found, AttachedOptimizer) else None


def attach(optimizer: torch.optim.Optimizer, *, fused: bool = False, **options: Any) -> AttachedOptimizer:
    """Take over the step of an optimizer.

    Args:
        optimizer: any that is not attached.
        fused: make it a fused one of the same arithmetic, too, which ``can_fuse`` says is possible.
        **options: options of ``AttachedOptimizer``.

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


def skipped_steps(counts: dict[str, Any]) -> int:
    """Return the number of skipped steps in the ``counts`` of an ``AttachedOptimizer``. Reads the device."""
    return int(counts["skipped"]) + int(counts.get("on device", 0))


@lru_cache(64)
def _wants_scaler(step: Callable[..., Any]) -> bool:
    return "grad_scaler" in inspect.signature(step).parameters


def share_overflows(attached: Sequence[AttachedOptimizer]) -> None:
    """Let optimizers that share a parameter hear of each other's backward passes."""
    params = [set(map(id, one.window.params())) for one in attached]
    for one, mine in zip(attached, params, strict=True):
        others = [other for other, its in zip(attached, params, strict=True) if other is not one and mine & its]
        one.window.peers = tuple(weakref.ref(other.window) for other in others)
        if others:
            one.window.state = WindowState.DIRTY  # it has not heard of passes before


class Observer(Protocol):
    """Watches the steps of attached optimizers: a report, a monitor, a callback."""

    def before_step(self, attached: AttachedOptimizer) -> None:
        """Run before a step is taken or skipped."""

    def after_step(self, attached: AttachedOptimizer) -> None:
        """Run after a step was taken or skipped."""


observers: list[Observer] = []
"""The observers of every step of every attached optimizer. An observer adds itself, and removes itself when it is
done."""

creation_callbacks: list[Callable[[AttachedOptimizer], None]] = []
"""Functions that are called with each new ``AttachedOptimizer``. Unlike observers they keep no step from being
recorded."""


@torch.optim.Optimizer.profile_hook_step
def _run_hooked(optimizer: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """Take the step of an attached optimizer with torch's hooks around it: none runs for a step that the host skips."""
    return optimizer._amp_stash._take(closure, args, kwargs)


class AttachedOptimizer:
    """The masters, the backward passes and the step of one optimizer.

    Args:
        optimizer: any; this must not outlive it.
        base: the class before whose methods the optimizer gets ours. With None it keeps its class and its methods, and
            the code that makes this object calls the ``step`` of this object instead of the optimizer's.
        masters, originals, own: see ``MasterKeeper``.
        models: the models that it trains, if they are known.
        verbose: True to log skipped steps.
        delegates_to_outer: True if another attached optimizer contains this optimizer and sends the messages to ranks.

    Attributes:
        window: the backward passes since the last step; its ``keeper`` has the masters.
        replaced: the parameters that were replaced in the models.
        session: state of the code that attached it.
        original_step: the step of the class that the optimizer had before it was attached, without torch's hooks; None
            if it was not. Bound to the optimizer, this would keep it alive until the garbage collector runs.
        instance_step: a ``step`` that was put on the instance before; it is taken instead.
        hooked: True if torch's hooks run around a step.
        counts: the number of steps that were taken or skipped ("calls"), and of steps skipped by the host ("skipped")
            and on the device ("on device", a 0-dim tensor). It holds nothing else of the optimizer.
        grad_scale: by what a step that takes flags divides its gradients; None if they are unscaled.
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
        delegates_to_outer: bool = False,
    ) -> None:
        self.original_step: Callable[..., Any] | None = None
        self.instance_step: Callable[..., Any] | None = None
        self.hooked = False
        self.counts: dict[str, Any] = {"calls": 0, "skipped": 0}
        self.grad_scale: torch.Tensor | None = None
        self._found_inf: torch.Tensor | None = None  # for the step that begins: if it is not 0, nothing changes
        self._latest: torch.Tensor | bool = False  # whether the latest step was skipped
        if base is not None:
            rebase(optimizer, base, self)
        self.window = Window(
            MasterKeeper(optimizer, masters, originals, own=own), delegates_to_outer=delegates_to_outer
        )
        self.replaced = ReplacedParameters(tuple(map(weakref.ref, models)))
        self.window.subscribers += [self.replaced] if self.replaced.models else []
        self.session: Any = None
        self.verbose = verbose
        for callback in creation_callbacks:
            callback(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, which this must not outlive."""
        return self.window.keeper.table.optimizer()  # type: ignore[no-any-return]

    @property
    def keeper(self) -> MasterKeeper:
        """The masters."""
        return self.window.keeper

    @property
    def supports_found_inf(self) -> bool:
        """True if the step reads ``optimizer.found_inf`` on the device, by torch's contract for scalers.

        In torch's older contract ``step`` gets the scaler itself; such an optimizer reads no flags.
        """
        optimizer = self.window.keeper.table.optimizer()
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        return not _wants_scaler(self.original_step or type(optimizer).step)

    @property
    def was_skipped(self) -> torch.Tensor:
        """Return whether the latest step was skipped, as a 0-dim bool tensor; only reading its value waits."""
        latest = self._latest
        return latest != 0 if isinstance(latest, torch.Tensor) else torch.tensor(latest, dtype=torch.bool, device="cpu")

    def unscale_late(self, scale: torch.Tensor, found_inf: torch.Tensor) -> None:
        """Leave it to a fused step to unscale gradients where that loses less: where they have 16 bits.

        Args:
            scale: 0-dim tensor that the gradients are multiplied by.
            found_inf: 0-dim float32 tensor, set to 1.0 if one holds inf or NaN, unless the step sees that in time.
        """
        optimizer: Any = self.optimizer
        # Whether the step looks early enough: nothing asks before it. Other processes would, and so may torch's own
        # optimizers, which can go on without their fused step.
        checks = isinstance(optimizer, FusedOptimizer) and not isinstance(optimizer, FusedTorchOptimizer)
        checks = checks and not (self.window.records or observers or (dist.is_available() and dist.is_initialized()))
        checks = checks and optimizer.options.max_grad_norm is not None  # it looks at them where it takes their norm
        if self.window.keeper.gradients.unscale_or_check(scale, found_inf, step_checks=checks):
            self.grad_scale = scale

    # ---- the step

    def step(self, closure: Callable[[], Any] | None, args: Any, kwargs: Any, *, skips: bool = False) -> Any:
        """The optimizer's step on unscaled gradients. It is skipped, and changes nothing, if a pass overflowed.

        Args:
            closure: for the step, or None.
            args: further arguments of the step.
            kwargs: further keyword arguments of the step.
            skips: True if it is known that the step is skipped.
        """
        window = self.window
        if window.state in UNSAFE and window.is_open():
            raise UsageError(
                f"{type(self.optimizer).__name__}.step() was called inside of a scale_loss block, where gradients are "
                "still multiplied by the loss scale. Dedent it: they are unscaled when the block is left. In hooks "
                "of a backward pass use attach(model, release=True) instead; in bfloat16 leave out the block."
            )
        for subscriber in [] if skips or closure is not None else list(window.subscribers):
            subscriber.stepping(window)
        for observer in observers:
            observer.before_step(self)
        result = self._skip() if skips else self._step(closure, args, kwargs)
        self.counts["calls"] += 1
        for observer in observers:
            observer.after_step(self)
        for subscriber in [] if skips else list(window.subscribers):
            subscriber.stepped(window)
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
        # In an open block `step` refuses.
        if closure is None and window.records and not self.supports_found_inf and window.state not in UNSAFE:
            if any_overflow(window.take_records()).item():
                return self.step(None, args, kwargs, skips=True)
            window.state = WindowState.IDLE
        if getattr(window.keeper.table.optimizer(), "_amp_stash", None) is not self:
            return self.step(closure, args, kwargs)
        step = optimizer.step
        return step(*args, **kwargs) if closure is None else step(closure, *args, **kwargs)

    def _step(self, closure: Callable[[], Any] | None, args: Any, kwargs: Any) -> Any:
        window, keeper = self.window, self.window.keeper
        optimizer = keeper.table.optimizer()
        # What prevents a silently wrong step is called here, by name: no subscriber, because it must not be left out.
        replaced = self.replaced
        if replaced.models:
            grads = [id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            seen = min(self.counts["calls"], _LOOKS - 1), registered[0], grads
            if seen != replaced.seen or replaced.new:
                replaced.refuse(optimizer, seen)
        if window.checked_generation is not None:
            window.drop_foreign_grads()
        records = window.take_records(agreed=closure is None) if window.records or REDUCTIONS else []
        casting = active_casting() if thread.key else None
        with NO_CASTING if casting is not None else nullcontext():
            found_inf = any_overflow(records) if records else None
            if found_inf is None and closure is None and window.state is WindowState.DIRTY:
                found_inf = window.clear_stale_overflow()
            # A hook must not run for a step that is skipped. On a CPU the host looks, which costs nothing; on another
            # device it would wait, and a hook asks ``optimizer.step_was_skipped``.
            tells = self.hooked and found_inf is not None and found_inf.is_cpu and has_step_hooks(optimizer)
            tells = tells and not dispatch_mode_count()
            if found_inf is not None and (closure is not None or tells or not self.supports_found_inf):
                if found_inf.item():
                    return self._skip()
                found_inf, window.state = None, WindowState.IDLE
            if closure is not None:
                closure = guard(closure, window, casting, self.verbose)
            self._found_inf = found_inf
            try:
                if self.hooked:
                    return _run_hooked(optimizer, *([] if closure is None else [closure]), *args, **kwargs)
                return self._take(closure, args, kwargs)
            except ClosureOverflowed:
                return self._skip()
            except SparseGradient:
                if not (keeper.any and isinstance(optimizer, FusedTorchOptimizer)):
                    raise
                returned = self._step_unfused(found_inf, args, kwargs)
                return returned if closure is None else vars(closure)["loss"]

    def _take(self, closure: Callable[[], Any] | None, args: Any, kwargs: Any) -> Any:
        """Take the step, once it is decided that it is not skipped, with masters in their places."""
        keeper = self.window.keeper
        optimizer: Any = keeper.table.optimizer()
        found_inf, self._found_inf = self._found_inf, None
        step: Any = self.instance_step
        if step is None:
            step = optimizer.step if self.original_step is None else partial(self.original_step, optimizer)
        self._latest = False
        flag = getattr(optimizer, "found_inf", None) if found_inf is None else found_inf
        torch_sgd = isinstance(optimizer, torch.optim.SGD) and not isinstance(optimizer, FusedOptimizer)
        plain = keeper.plain
        held = plain is not None or closure is not None or bool(WITH_MEMORY)
        with keeper.in_place() if held else nullcontext():
            if flag is not None and torch_sgd and not _start_momentum(optimizer) and flag.item():
                return self._skip()
            scale, self.grad_scale = self.grad_scale, None
            others: dict[str, Any] = {}
            if found_inf is not None:
                # Another scaler, around a block, deletes its own after the step.
                given = getattr(optimizer, "grad_scale", None)
                names = ("grad_scale", "found_inf")
                others = {name: vars(optimizer)[name] for name in names if name in vars(optimizer)}
                optimizer.grad_scale = given if scale is None else scale if given is None else scale * given
                optimizer.found_inf = found_inf
            try:
                returned = step(*args, **kwargs) if closure is None else step(closure, *args, **kwargs)
                if closure is None and plain is not None:
                    defined = self.original_step or type(optimizer).step
                    if defined.__module__.partition(".")[0] not in ("torch", "halfstep"):
                        plain.step_writes.check(optimizer)
            finally:
                if found_inf is not None:
                    del optimizer.grad_scale, optimizer.found_inf
                    vars(optimizer).update(others)
        if WITH_MEMORY and not held:
            settle()  # the step itself has read some
        flag = getattr(optimizer, "found_inf", None) if found_inf is None else found_inf  # a scaler sets it in the step
        if flag is not None:
            self._latest = flag
            if "on device" not in self.counts:
                self.counts["on device"] = torch.zeros_like(flag)
            self.counts["on device"].add_(flag)  # in place, so that a captured step goes on counting
        return returned

    def _skip(self) -> Any:
        """Do not step."""
        release = self.window.release
        if release is not None:
            release.end_step()
        self.counts["skipped"] += 1
        self._latest, self.grad_scale = True, None

    def _step_unfused(self, found_inf: torch.Tensor | None, args: Any, kwargs: Any) -> Any:
        """Go on with torch's own step, which takes sparse gradients, on plain masters."""
        optimizer: Any = self.optimizer
        logger.info("%s goes on without its fused step, which takes no sparse gradients", type(optimizer).__name__)
        started = [*self.keeper.started(), *unfuse(optimizer).items()]
        self.keeper.keep_plain({id(param): value for param, value in started})
        # Unlike the fused step, torch's own does not read flags on the device.
        if found_inf is not None and found_inf.item():
            return self._skip()
        here = vars(optimizer)  # another scaler may have left its flags
        given = {name: here.pop(name) for name in ("grad_scale", "found_inf") if name in here}
        try:
            if given.get("found_inf") is not None and given["found_inf"].item():
                return self._skip()
            if given.get("grad_scale") is not None:
                found = torch.zeros((), dtype=torch.float32, device=self.window.device)
                self.window.keeper.gradients.finish(given["grad_scale"], found)
            return self._step(None, args, kwargs)
        finally:
            here.update(given)

    # ---- copies

    def reduced(self, base: type, state: Any) -> tuple[Any, ...]:
        """Return the value from which a copy or pickle of the optimizer is made.

        Args:
            base: the class that the optimizer had before it was attached.
            state: the result of its ``__getstate__``.
        """
        return _rebuild, (base, state, self.keeper.any, self.keeper.started(), self.verbose, self.session)


def _start_momentum(optimizer: torch.optim.SGD) -> bool:
    """Give torch's fused SGD momentum of zeros; False if it must not see a flag before its first step is taken.

    Its first step allocates momentum without values, and leaves it so where the flag says to skip: later steps go on
    from uninitialised memory (as of torch 2.13). Zeros are what its first step starts from, but for dampening, which
    the first step leaves out.
    """
    for group in optimizer.param_groups:
        if group["fused"] and group["momentum"] != 0:
            unset = [
                p
                for p in group["params"]
                if p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
            ]
            if unset and group["dampening"] != 0:
                return False
            for param in unset:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param.grad)
    return True


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
