"""The state that halfstep keeps for one torch optimizer, and the code that runs or skips its step.

``attach`` changes the class of the optimizer to a generated subclass, whose ``step``, ``zero_grad``,
``add_param_group`` and ``load_state_dict`` call this module. It sets the attribute ``_amp_stash``, and the few
attributes that schedulers and steps read; docs/side-effects.md lists them. For all other code the optimizer is
unchanged: its groups hold the model's parameters, which are the keys of its state.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from ..casting.current import thread
from ..casting.scope import NO_CASTING, active_casting
from ..core.errors import UsageError
from ..core.inner_optimizers import unwrap
from ..optimizers.base import FusedOptimizer
from ..optimizers.class_swap import rebase
from ..optimizers.fuse import FusedTorchOptimizer, fused_base, unfuse
from ..optimizers.param_rows import SparseGradient
from ..parameters.held_masters import MATERIALIZED, sync_held_masters
from ..parameters.masters import in_place, master_params, move_outside, table_of, unsaved
from ..parameters.table import REDUCTIONS
from ..torch_internals.torch_compat import dispatch_mode_count, has_step_hooks
from .backward import UNSAFE, WINDOWS, Window, WindowState, any_overflow
from .closure import ClosureOverflowed, guard
from .dynamic_class import add_names_of_apex, class_over
from .replaced import ReplacedParameters, registrations

__all__ = [
    "AttachedOptimizer",
    "Observer",
    "attach",
    "attached_to",
    "creation_callbacks",
    "observers",
    "refuse_attached",
    "share_overflows",
    "skipped_steps",
]

logger = logging.getLogger("halfstep")


_FIRST_STEPS = 3  # the first steps, which always search the models for replaced parameters


def attached_to(optimizer: object) -> AttachedOptimizer | None:
    """Return the state of an optimizer, or of the optimizer in a wrapper; None if it is not attached.

    The attribute has Apex's name ``_amp_stash``, because scripts check for it to know if amp is on.
    """
    found = getattr(optimizer, "_amp_stash", None) or getattr(unwrap(optimizer), "_amp_stash", None)
    return found if isinstance(found, AttachedOptimizer) else None


def attach(optimizer: torch.optim.Optimizer, *, fused: bool = False, **options: Any) -> AttachedOptimizer:
    """Take over the step of an optimizer.

    Args:
        optimizer: an optimizer that is not attached.
        fused: True to also make it a fused optimizer with the same arithmetic; requires ``can_fuse``.
        **options: options of ``AttachedOptimizer``.

    Raises:
        UsageError: if the optimizer is already attached.
    """
    refuse_attached(optimizer)
    attached = AttachedOptimizer(optimizer, base=fused_base(optimizer) if fused else type(optimizer), **options)
    WINDOWS[attached.window] = None
    return attached


def refuse_attached(optimizer: object) -> None:
    """Refuse an optimizer that is already attached.

    Raises:
        UsageError: if the optimizer is already attached.
    """
    if attached_to(optimizer) is not None:
        raise UsageError(
            f"This {type(optimizer).__name__} was already prepared by amp.initialize, amp.decorate, FP16_Optimizer or "
            "amp.init, and an optimizer can be prepared only once; make a new optimizer to start over."
        )


def skipped_steps(counts: dict[str, Any]) -> int:
    """Return the number of skipped steps in the ``counts`` of an ``AttachedOptimizer``. Reads the device."""
    return int(counts["skipped"]) + int(counts.get("on device", 0))


@lru_cache(64)
def _wants_scaler(step: Callable[..., Any]) -> bool:
    return "grad_scaler" in inspect.signature(step).parameters


def share_overflows(attached: Sequence[AttachedOptimizer]) -> None:
    """Register optimizers that share a parameter as peers: if a pass overflows, all of them skip their steps."""
    params = [set(map(id, one.window.params())) for one in attached]
    for one, mine in zip(attached, params, strict=True):
        others = [other for other, its in zip(attached, params, strict=True) if other is not one and mine & its]
        one.window.peers = tuple(weakref.ref(other.window) for other in others)
        if others:
            one.window.state = WindowState.DIRTY  # earlier passes were not recorded for it


class Observer(Protocol):
    """Interface of reports, monitors and callbacks that watch the steps of all attached optimizers."""

    def before_step(self, attached: AttachedOptimizer) -> None:
        """Run before an optimizer runs or skips its step."""

    def after_step(self, attached: AttachedOptimizer) -> None:
        """Run after an optimizer ran or skipped its step."""


observers: list[Observer] = []
"""The observers of every step of every attached optimizer. Observers add and remove themselves."""

creation_callbacks: list[Callable[[AttachedOptimizer], None]] = []
"""Functions that are called with each new ``AttachedOptimizer``. Unlike observers they do not prevent the recording of
a step as a graph."""


@torch.optim.Optimizer.profile_hook_step
def _run_hooked(optimizer: Any, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
    """Run the step of an attached optimizer with torch's step hooks. A step that the host skips runs no hooks."""
    return optimizer._amp_stash._run(closure, args, kwargs)


class AttachedOptimizer:
    """The masters, the backward passes and the step of one optimizer.

    Args:
        optimizer: a torch optimizer, which must outlive this object.
        base: the class to subclass with halfstep's methods. With None the optimizer keeps its class and methods, and
            the code that creates this object calls its ``step`` instead of the optimizer's.
        masters, originals, own: see ``table_of``.
        models: the models that the optimizer trains, if they are known.
        verbose: True to log skipped steps.
        delegates_to_outer: True if another attached optimizer contains this optimizer and sends the messages to ranks.

    Attributes:
        window: the backward passes since the last step, with the table of the parameters and their masters.
        replaced: the check for parameters that user code replaced in the models.
        session: state of the code that attached the optimizer.
        original_step: the ``step`` of the class that the optimizer had before it was attached, without torch's hooks;
            None if it is not attached. The function is unbound, because a bound method would keep the optimizer alive
            until the garbage collector runs.
        instance_step: a ``step`` that user code had set on the instance; it replaces ``original_step``.
        hooked: True if torch's hooks run around a step.
        counts: the number of steps that ran or were skipped ("calls"), that the host skipped ("skipped") and that
            skipped themselves on the device ("on device", a 0-dim tensor). It holds no reference to the optimizer.
        grad_scale: the factor by which a step that reads ``found_inf`` divides its gradients; None if they are already
            unscaled.
    """

    class_over = staticmethod(class_over)
    # Flags that Apex scripts read and set. halfstep creates masters at once, and unscales gradients after each block.
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
        self._found_inf: torch.Tensor | None = None  # an argument of `_run`: if it is not 0, the step changes nothing
        self._latest: torch.Tensor | bool = False  # True, or a nonzero tensor, if the latest step was skipped
        if base is not None:
            rebase(optimizer, base, self)
        table, plain = table_of(optimizer, masters, originals, own=own)
        table.replicated = masters is True and not delegates_to_outer
        self.window = Window(table, plain, delegates_to_outer=delegates_to_outer)
        self.replaced = ReplacedParameters(tuple(map(weakref.ref, models)))
        self.window.subscribers += [self.replaced] if self.replaced.models else []
        self.session: Any = None
        self.verbose = verbose
        for callback in creation_callbacks:
            callback(self)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, which must outlive this object."""
        return self.window.table.optimizer()  # type: ignore[no-any-return]

    def master_params(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that the step updates: the ``MasterParameter`` of each parameter, or the parameter.

        Raises:
            UsageError: if user code cast a weight after its master was created.
        """
        if self.window.plain is not None:
            self.window.plain.adopt()
        return master_params(self.window.table)

    @property
    def supports_found_inf(self) -> bool:
        """True if the step reads ``optimizer.found_inf`` on the device, as torch's ``GradScaler`` expects.

        In an older protocol of torch, ``step`` takes the scaler as an argument; such a step does not read the flag.
        """
        optimizer = self.window.table.optimizer()
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        return not _wants_scaler(self.original_step or type(optimizer).step)

    @property
    def was_skipped(self) -> torch.Tensor:
        """A 0-dim bool tensor, True if the latest step was skipped. Only reading its value waits for the device."""
        latest = self._latest
        return latest != 0 if isinstance(latest, torch.Tensor) else torch.tensor(latest, dtype=torch.bool, device="cpu")

    def unscale_late(self, scale: torch.Tensor, found_inf: torch.Tensor) -> None:
        """Unscale gradients, or leave 16-bit gradients to a fused step, which unscales them in fp32 and loses less.

        Args:
            scale: the loss scale of the gradients, a 0-dim tensor.
            found_inf: 0-dim float32 tensor, set to 1.0 if a gradient holds inf or NaN, unless the step itself checks.
        """
        optimizer: Any = self.optimizer
        # True if the step's own check is early enough, because no observer or rank needs the result before. A fused
        # torch optimizer is excluded, because it may fall back to torch's step, which does not check.
        checks = isinstance(optimizer, FusedOptimizer) and not isinstance(optimizer, FusedTorchOptimizer)
        checks = checks and not (self.window.records or observers or (dist.is_available() and dist.is_initialized()))
        checks = checks and optimizer.options.max_grad_norm is not None  # a step that clips checks the norm
        if self.window.gradients.unscale_or_check(scale, found_inf, step_checks=checks):
            self.grad_scale = scale

    # ---- the step

    def step(self, closure: Callable[[], Any] | None, args: Any, kwargs: Any, *, skips: bool = False) -> Any:
        """Run the optimizer's step on unscaled gradients, or skip it if a pass overflowed.

        Args:
            closure: the closure of the step, or None.
            args: further arguments of the step.
            kwargs: further keyword arguments of the step.
            skips: True to skip the step without a check.
        """
        window = self.window
        if window.state in UNSAFE and window.is_open():
            raise UsageError(
                f"{type(self.optimizer).__name__}.step() was called inside a scale_loss block, where gradients are "
                "still multiplied by the loss scale. Call it after the block, whose exit unscales them. To step in "
                "hooks of a backward pass, use attach(model, release=True); in bfloat16 you can leave out the block."
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

    def step_unless_overflow(self, optimizer: Any, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step`` as a ``GradScaler`` does, unless the host finds that a pass overflowed.

        Args:
            optimizer: the attached optimizer, or a wrapper whose ``step`` does more.
            closure: the closure of the step, or None.
            *args: further arguments of the step.
            **kwargs: further keyword arguments of the step.
        """
        window = self.window
        # In an open block `step` raises the error.
        if closure is None and window.records and not self.supports_found_inf and window.state not in UNSAFE:
            if any_overflow(window.take_records()).item():
                return self.step(None, args, kwargs, skips=True)
            window.state = WindowState.IDLE
        if getattr(window.table.optimizer(), "_amp_stash", None) is not self:
            return self.step(closure, args, kwargs)
        return optimizer.step(*([] if closure is None else [closure]), *args, **kwargs)

    def _step(self, closure: Callable[[], Any] | None, args: Any, kwargs: Any) -> Any:
        window = self.window
        optimizer = window.table.optimizer()
        # Checks that prevent a silently wrong step are called here by name. They must not be subscribers, because
        # subscribers can be removed.
        replaced = self.replaced
        if replaced.models:
            grads = [id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            key = min(self.counts["calls"], _FIRST_STEPS - 1), registrations[0], grads
            if key != replaced.latest_key or replaced.new:
                replaced.refuse(optimizer, key)
        if window.checked_generation is not None:
            window.drop_foreign_grads()
        records = window.take_records(agreed=closure is None) if window.records or REDUCTIONS else []
        casting = active_casting() if thread.key else None
        with NO_CASTING if casting is not None else nullcontext():
            found_inf = any_overflow(records) if records else None
            if closure is None and (window.forgot_records or (not records and window.state is WindowState.DIRTY)):
                window.forgot_records, stale = False, window.clear_stale_overflow()
                if stale is not None:
                    found_inf = stale if found_inf is None else torch.maximum(found_inf, stale.to(found_inf.device))
            # Step hooks must not run for a skipped step. On a CPU the host reads the flag, which costs nothing. On
            # other devices the host would wait, so hooks run, and can read ``optimizer.step_was_skipped``.
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
                return self._run(closure, args, kwargs)
            except ClosureOverflowed:
                return self._skip()
            except SparseGradient:
                if not (window.table.has_masters and isinstance(optimizer, FusedTorchOptimizer)):
                    raise
                returned = self._step_unfused(found_inf, args, kwargs)
                return returned if closure is None else vars(closure)["loss"]

    def _run(self, closure: Callable[[], Any] | None, args: Any, kwargs: Any) -> Any:
        """Run a step that the host does not skip, while the optimizer's groups hold masters."""
        optimizer: Any = self.window.table.optimizer()
        found_inf, self._found_inf = self._found_inf, None
        step: Any = self.instance_step
        if step is None:
            step = optimizer.step if self.original_step is None else partial(self.original_step, optimizer)
        self._latest = False
        flag = getattr(optimizer, "found_inf", None) if found_inf is None else found_inf
        torch_sgd = isinstance(optimizer, torch.optim.SGD) and not isinstance(optimizer, FusedOptimizer)
        plain = self.window.plain
        held = plain is not None or closure is not None or bool(MATERIALIZED)
        with in_place(plain) if held else nullcontext():
            if flag is not None and torch_sgd and not _start_momentum(optimizer) and flag.item():
                return self._skip()
            scale, self.grad_scale = self.grad_scale, None
            others: dict[str, Any] = {}
            if found_inf is not None:
                # Another scaler around the block deletes its own flags after the step, so they must be restored.
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
        if MATERIALIZED and not held:
            sync_held_masters()  # the step may have read masters with ``master_params``
        flag = getattr(optimizer, "found_inf", None) if found_inf is None else found_inf  # the step may have set it
        if flag is not None:
            self._latest = flag
            if "on device" not in self.counts:
                self.counts["on device"] = torch.zeros_like(flag)
            self.counts["on device"].add_(flag)  # in place, so that replays of a captured step also count
        return returned

    def _skip(self) -> Any:
        """Skip the step on the host."""
        release = self.window.release
        if release is not None:
            release.end_step()
        self.counts["skipped"] += 1
        self._latest, self.grad_scale = True, None

    def _step_unfused(self, found_inf: torch.Tensor | None, args: Any, kwargs: Any) -> Any:
        """Switch to torch's own step, which supports sparse gradients, with plain masters."""
        optimizer: Any = self.optimizer
        logger.info("%s continues without its fused step, which has no sparse gradients", type(optimizer).__name__)
        started = [*unsaved(self.window.table), *unfuse(optimizer).items()]
        self.window.plain = move_outside(self.window.table, {id(param): value for param, value in started})
        # Unlike the fused step, torch's own step does not read flags on the device, so the host does.
        if found_inf is not None and found_inf.item():
            return self._skip()
        here = vars(optimizer)  # another scaler may have set its flags
        given = {name: here.pop(name) for name in ("grad_scale", "found_inf") if name in here}
        try:
            if given.get("found_inf") is not None and given["found_inf"].item():
                return self._skip()
            if given.get("grad_scale") is not None:
                found = torch.zeros((), dtype=torch.float32, device=self.window.device)
                self.window.gradients.finish(given["grad_scale"], found)
            return self._step(None, args, kwargs)
        finally:
            here.update(given)

    # ---- copies

    def reduce_ex(self, base: type, state: Any) -> tuple[Any, ...]:
        """Return the ``__reduce_ex__`` tuple for copying and pickling the optimizer.

        Args:
            base: the class that the optimizer had before it was attached.
            state: the result of the optimizer's ``__getstate__``.
        """
        table = self.window.table
        return _rebuild, (base, state, table.has_masters, unsaved(table), self.verbose, self.session)


def _start_momentum(optimizer: torch.optim.SGD) -> bool:
    """Initialize the momentum of torch's fused SGD; return False if the host must read the flag of the first step.

    The first step of torch's fused SGD allocates uninitialized momentum buffers. If it skips itself on the device, the
    buffers stay uninitialized, and later steps use them (torch 2.13). Zeros give the same first step, except with
    dampening, which the first step does not apply.
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
    """Create the copy of an attached optimizer."""
    optimizer: Any = base.__new__(base)
    optimizer.__setstate__(state)
    originals = {id(param): master.detach() for param, master in started}
    attach(optimizer, masters=masters, originals=originals, verbose=verbose).session = session
    return optimizer
