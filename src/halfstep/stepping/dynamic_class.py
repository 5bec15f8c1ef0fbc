"""The class of an attached optimizer: a generated subclass of its original class, with halfstep's methods.

A subclass keeps ``isinstance``, ``type(optimizer).zero_grad(optimizer)``, copies and pickles working.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..casting.containers import map_tensors, tensors_in
from ..casting.dynamo import eager
from ..core.checks import check_optimizer_state
from ..core.errors import UsageError
from ..core.names_above import NAMES_ABOVE
from ..optimizers.base import FusedOptimizer
from ..parameters.masters import in_place
from ..parameters.plain import without_masters
from ..torch_internals.subclasses import Mixin, subclass_with, superclass_of
from ..torch_internals.torch_compat import DisableTorchFunction

__all__ = ["add_names_of_apex", "base_of", "class_over"]


class _Attached(Mixin):
    """The methods that override methods of the optimizer's own class."""

    _amp_stash: Any  # the AttachedOptimizer, whose module imports this module

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            f"type(optimizer) of a {type(self).__name__} that amp has prepared cannot create another optimizer. Create "
            "it, or let Horovod create it, before amp.initialize."
        )

    @eager
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Run one step, unless a scaled backward pass overflowed."""
        frame = sys._getframe(1)
        # In a user's step, super(type(self), self).step() finds this method instead of the parent class of the user's.
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is self:
            for cls in base_of(self).__mro__:
                if getattr(inspect.unwrap(vars(cls).get("step")), "__code__", None) is frame.f_code:  # type: ignore[arg-type]
                    above: Any = super(cls, self)
                    return above.step(*([] if closure is None else [closure]), *args, **kwargs)
        self._opt_called = True  # torch's schedulers warn if no step set this
        return self._amp_stash.step(closure, args, kwargs)

    # Without these marks torch wraps the step in its hooks, and schedulers set a counting step on the instance.
    vars(step).update(hooked=True, _wrapped_by_lr_sched=True)

    @eager
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients and the records of their overflows. They become None or zero as without ``amp``."""
        with DisableTorchFunction():  # otherwise modes, such as the casts of O1, see each access of an attribute
            super().zero_grad(*([] if set_to_none is None else [set_to_none]))  # type: ignore[misc]
            self._amp_stash.window.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with masters if the other parameters have masters; drop gradients that may be scaled."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._amp_stash.window.drop_foreign_grads()
        self._amp_stash.window.gradients.expect()

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict, with the masters that no model's state dict contains."""
        saved, plain = super().state_dict(), self._amp_stash.window.plain  # type: ignore[misc]
        return saved if plain is None else plain.save(self, saved)  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict and its masters, with the state of 16-bit parameters in the dtype of their masters."""
        check_optimizer_state(self, state_dict)
        plain = self._amp_stash.window.plain
        with in_place(plain):
            super().load_state_dict(state_dict if plain is None else without_masters(state_dict))  # type: ignore[misc]
        if plain is not None:
            plain.load(self, state_dict)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients that the next step uses; see ``Window.clip``."""
        norm: torch.Tensor = self._amp_stash.window.clip(max_norm, norm_type)
        return norm

    @property
    def step_was_skipped(self) -> torch.Tensor:
        """A 0-dim bool tensor, True if the latest step was skipped. Only reading its value waits for the device."""
        skipped: torch.Tensor = self._amp_stash.was_skipped
        return skipped

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if torch's ``GradScaler`` may pass the overflow flag to the step, which skips itself on the device.

        False if user code replaced ``step`` on the instance to see if it is called, as Accelerate does. The scaler then
        reads the flag, and does not call a step that is skipped.
        """
        step = vars(self).get("step")
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):  # a mark of torch's schedulers
            return False
        return bool(vars(self).get("_step_supports_amp_scaling", getattr(super(), "_step_supports_amp_scaling", False)))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._amp_stash.reduce_ex(base_of(self), self.__getstate__())  # type: ignore[attr-defined]


def add_names_of_apex(cls: type, source: str, names: str) -> None:
    """Add properties with Apex's names to a class. A class of a higher room computes them, imported on first use.

    Args:
        cls: the class.
        source: the key in ``NAMES_ABOVE`` of the class that has the names; its argument is an instance of ``cls``.
        names: the names, separated by spaces.
    """

    def get(name: str, instance: Any) -> Any:
        return getattr(NAMES_ABOVE[source]()(instance), name)

    for name in names.split():
        setattr(cls, name, property(functools.partial(get, name)))


add_names_of_apex(
    _Attached,
    "Methods",
    "_amp_lazy_init _lazy_init_maybe_master_weights _master_params_to_model_params _prepare_amp_backward"
    " _post_amp_backward",
)


def class_over(base: type) -> type:
    """Return a subclass of an optimizer class with halfstep's methods."""
    return subclass_with(_Attached, base, _with_masters(base))


def _with_masters(base: type) -> dict[str, Any]:
    """Wrap the public methods of an optimizer class that torch's do not have: they may write to weights like ``step``.

    Examples are ``train`` and ``eval`` of ScheduleFree, and ``first_step`` of SAM. The wrappers put masters into the
    groups. Methods of halfstep's optimizers are not wrapped, because they update masters themselves.
    """
    names = (name for name in dir(base) if not name.startswith("_") and not hasattr(FusedOptimizer, name))
    methods = ((name, inspect.getattr_static(base, name)) for name in names)
    return {name: _in_place(method) for name, method in methods if inspect.isfunction(method)}


def _in_place(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def on_masters(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = self._amp_stash.window.plain
        with in_place(plain):
            result = method(self, *args, **kwargs)
        return result if plain is None or plain.places else _params_for(plain.pairs(), result)

    return on_masters


def _params_for(pairs: list[tuple[torch.Tensor, torch.Tensor]], result: Any) -> Any:
    """Replace masters in the result of a method, which found them in the groups, by their parameters."""
    params = {id(master): param for param, master in pairs}
    if params.keys().isdisjoint(map(id, tensors_in(result))):
        return result
    return map_tensors(lambda tensor: params.get(id(tensor), tensor), result)


def base_of(optimizer: object) -> type:
    """Return the class that an optimizer had before it was attached; its class if it is not attached."""
    return superclass_of(type(optimizer), _Attached)
