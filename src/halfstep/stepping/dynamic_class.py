"""The class of an attached optimizer: a subclass of the class it had, made on the fly, with our methods.

So ``isinstance``, ``type(optimizer).zero_grad(optimizer)``, copies and pickles work as for any optimizer.
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
from ..parameters.plain import without_masters
from ..torch_internals.subclasses import Mixin, subclass_with, superclass_of

__all__ = ["add_names_of_apex", "base_of", "class_over"]


class _Attached(Mixin):
    """The methods that go before the methods of the optimizer's own class."""

    _amp_stash: Any  # the AttachedOptimizer, which is made from what is here

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            f"A new {type(self).__name__} cannot be made of the class of one that amp has prepared. Make it, or let "
            "Horovod make it, before amp.initialize."
        )

    @eager
    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """One step, unless a scaled backward pass overflowed."""
        frame = sys._getframe(1)
        # A user's step that calls super(type(self), self).step() comes here, and means the class above its own.
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is self:
            for cls in base_of(self).__mro__:
                if getattr(inspect.unwrap(vars(cls).get("step")), "__code__", None) is frame.f_code:  # type: ignore[arg-type]
                    above: Any = super(cls, self)
                    return above.step(*([] if closure is None else [closure]), *args, **kwargs)
        self._opt_called = True  # for schedulers, which warn of a forgotten step
        return self._amp_stash.step(closure, args, kwargs)

    # Torch puts its hooks around a step that does not say so, and schedulers a counter on the instance.
    vars(step).update(hooked=True, _wrapped_by_lr_sched=True)

    @eager
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, and what was found in them. Whether they become None or zero is as without ``amp``."""
        super().zero_grad(*([] if set_to_none is None else [set_to_none]))  # type: ignore[misc]
        self._amp_stash.window.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its 16-bit parameters get masters if the rest have them, and scaled gradients are dropped."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self._amp_stash.window.drop_foreign_grads()
        self._amp_stash.keeper.adopt()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, with the masters that no model saves."""
        saved, plain = super().state_dict(), self._amp_stash.keeper.plain  # type: ignore[misc]
        return saved if plain is None else plain.save(self, saved)  # type: ignore[no-any-return]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's own, with state of 16-bit parameters in the dtype of their masters, and these."""
        check_optimizer_state(self, state_dict)
        keeper = self._amp_stash.keeper
        with keeper.in_place():
            super().load_state_dict(state_dict if keeper.plain is None else without_masters(state_dict))  # type: ignore[misc]
        if keeper.plain is not None:
            keeper.plain.load(self, state_dict)

    def clip_master_grads(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients that the next step uses; see ``Window.clip``."""
        norm: torch.Tensor = self._amp_stash.window.clip(max_norm, norm_type)
        return norm

    @property
    def step_was_skipped(self) -> torch.Tensor:
        """Return whether the latest step was skipped, as a 0-dim bool tensor; only reading its value waits."""
        skipped: torch.Tensor = self._amp_stash.was_skipped
        return skipped

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Torch's contract for scalers: whether the step skips itself, on the device.

        If a user put a ``step`` on the instance to see whether it is called, as Accelerate does, the answer is no:
        then the scaler reads the flag and leaves the call out.
        """
        step = vars(self).get("step")
        if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):  # which torch's schedulers put there
            return False
        return bool(vars(self).get("_step_supports_amp_scaling", getattr(super(), "_step_supports_amp_scaling", False)))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._amp_stash.reduced(base_of(self), self.__getstate__())  # type: ignore[attr-defined]


def add_names_of_apex(cls: type, source: str, names: str) -> None:
    """Give a class names that Apex had. A class of a higher room has them, and is imported when a script asks for one.

    Args:
        cls: the class.
        source: the name of the class in ``NAMES_ABOVE``, which is made from an instance of ``cls``.
        names: with spaces between.
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
    """A subclass of an optimizer class that has our methods."""
    return subclass_with(_Attached, base, _with_masters(base))


def _with_masters(base: type) -> dict[str, Any]:
    """The public methods that an optimizer class has beside torch's: they may write to weights, as ``step`` does.

    ScheduleFree has ``train`` and ``eval``, SAM ``first_step``. Optimizers of halfstep know their masters.
    """
    names = (name for name in dir(base) if not name.startswith("_") and not hasattr(FusedOptimizer, name))
    methods = ((name, inspect.getattr_static(base, name)) for name in names)
    return {name: _in_place(method) for name, method in methods if inspect.isfunction(method)}


def _in_place(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def on_masters(self: Any, *args: Any, **kwargs: Any) -> Any:
        keeper = self._amp_stash.keeper
        with keeper.in_place():
            result = method(self, *args, **kwargs)
        return result if keeper.plain is None or keeper.plain.places else _params_for(keeper.plain.pairs(), result)

    return on_masters


def _params_for(pairs: list[tuple[torch.Tensor, torch.Tensor]], result: Any) -> Any:
    """Return the result of a method, with parameters in the places of the masters that it found in the groups."""
    params = {id(master): param for param, master in pairs}
    if params.keys().isdisjoint(map(id, tensors_in(result))):
        return result
    return map_tensors(lambda tensor: params.get(id(tensor), tensor), result)


def base_of(optimizer: object) -> type:
    """The class that an optimizer had before it was attached; its class if it is not."""
    return superclass_of(type(optimizer), _Attached)
