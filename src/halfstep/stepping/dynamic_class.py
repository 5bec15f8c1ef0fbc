"""A class of its own for an attached optimizer: below the one it has, so that class lookup finds our methods.

Whoever calls ``type(optimizer).zero_grad(optimizer)``, asks ``isinstance``, or copies and pickles it meets an
optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..casting.compiled import eager
from ..optimizers._schedulers import count_steps, counts_steps

if TYPE_CHECKING:
    from .attached import AttachedOptimizer

__all__ = ["base_of", "dress", "undress"]

_hooking = torch.optim.Optimizer.profile_hook_step
_HOOKED: Any = _hooking(torch.optim.Optimizer.step)


class _Attached:
    """What the class made on the fly has in front of the optimizer's own."""

    _amp_stash: AttachedOptimizer

    @eager
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """One step, unless a scaled backward pass overflowed."""
        self._opt_called = True  # for schedulers, which warn of a forgotten step
        return self._amp_stash.step(closure, *args, **kwargs)

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and what was found in them."""
        super().zero_grad(set_to_none)  # type: ignore[misc]
        self._amp_stash.cleared()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The optimizer's own; 16-bit parameters get masters where the others have them."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._amp_stash.keeper.adopt()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's own, with state of 16-bit parameters in the dtype of their masters."""
        with self._amp_stash.keeper.in_place():
            super().load_state_dict(state_dict)  # type: ignore[misc]

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients that the next step uses; see ``AttachedOptimizer.clip``."""
        return self._amp_stash.clip(max_norm, norm_type)

    @property
    def step_was_skipped(self) -> torch.Tensor:
        """Whether the latest step was skipped, as a 0-dim bool tensor; only looking at its value reads the device."""
        return self._amp_stash.stepping.was_skipped

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Torch's contract for scalers: whether the step skips itself, on the device.

        Where somebody has put a step of his own on the instance, to see whether it is called (Accelerate), the scaler
        is to decide and to leave the call out.
        """
        return not counts_calls(self) and bool(
            vars(self).get("_step_supports_amp_scaling", getattr(super(), "_step_supports_amp_scaling", False))
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        attached = self._amp_stash
        kept = attached.keeper.any, attached.keeper.started(), attached.verbose, attached.session
        return _rebuild, (base_of(self), self.__getstate__(), *kept)  # type: ignore[attr-defined]


def _rebuild(base: Any, state: Any, masters: bool, started: Any, verbose: bool, session: Any) -> Any:
    """A copy of an attached optimizer."""
    from .attached import attach

    optimizer: Any = base.__new__(base)
    optimizer.__setstate__(state)
    originals = {id(param): master.detach() for param, master in started}
    attach(optimizer, masters=masters, originals=originals, verbose=verbose).session = session
    return optimizer


_CLASSES: weakref.WeakKeyDictionary[type, dict[bool, type]] = weakref.WeakKeyDictionary()


def _class_below(base: type, hooked: bool) -> type:
    """A subclass of an optimizer class that has our methods, with torch's hooks around ``step`` or without."""
    made = _CLASSES.setdefault(base, {})
    if hooked not in made:
        step: Any = _hooking(_Attached.step) if hooked else _wrapped(_Attached.step)
        step.hooked = True  # torch puts its hooks around a step that does not say so
        step._wrapped_by_lr_sched = True  # and schedulers a counter on the instance
        names: dict[str, Any] = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
        bases: tuple[type, ...] = (_Attached, base)
        made[hooked] = type(base.__name__, bases, {**names, "step": step})
    return made[hooked]


def _wrapped(step: Callable[..., Any]) -> Callable[..., Any]:
    def unhooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        return step(self, *args, **kwargs)

    return unhooked


def dress(optimizer: Any, attached: AttachedOptimizer) -> None:
    """Give an optimizer our methods. Torch's step hooks run around them, once, and see the model's parameters."""
    base: Any = type(optimizer)
    counts_only = counts_steps(optimizer)
    attached.stepping.replaced = on_instance = vars(optimizer).pop("step", None)
    hooked = getattr(base.step, "__code__", None) is _HOOKED.__code__
    plain = base.step.__wrapped__ if hooked else base.step
    if on_instance is None or counts_only:
        attached.stepping.own = plain.__get__(optimizer)
    else:
        attached.stepping.own, hooked = on_instance, False  # it runs the hooks itself
    optimizer.__class__ = _class_below(base, hooked)
    optimizer._amp_stash = attached


def undress(optimizer: Any, attached: AttachedOptimizer) -> None:
    """Give it its own class back."""
    optimizer.__class__ = base_of(optimizer)
    if attached.stepping.replaced is not None:
        optimizer.step = attached.stepping.replaced
    elif any("initial_lr" in group for group in optimizer.param_groups):
        count_steps(optimizer)  # for a scheduler that was made meanwhile
    del optimizer._amp_stash


def counts_calls(optimizer: object) -> bool:
    """Whether there is a step on the instance that is not a scheduler's."""
    step = vars(optimizer).get("step")
    return step is not None and not hasattr(step, "_wrapped_by_lr_sched")


def base_of(optimizer: object) -> type:
    """The class that an optimizer had before it was attached; its class if it is not."""
    cls = type(optimizer)
    return cls.__mro__[2] if issubclass(cls, _Attached) else cls
