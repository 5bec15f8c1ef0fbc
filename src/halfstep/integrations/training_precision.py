"""The common part of the adapters: a precision as one value, applied to a model, its optimizers and its steps.

A trainer casts the model, creates optimizers and steps them at different times, so each has its own method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType, NoneType
from typing import Any, Union
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .. import amp
from ..amp.arguments import RecipeChoice
from ..core.checks import check_kind
from ..core.dtypes import default_half, is_half, parse_half
from ..core.errors import ArgumentValueError, UsageError
from ..core.oplists.tables import OPS
from ..core.policy import Policy

__all__ = ["LOSSES", "Level", "TrainingPrecision"]

LOSSES = frozenset(op.name for op in OPS.values() if op.reason == "loss")
"""Ops that run in fp32 at O2, because trainers compute losses in their steps and not inside the model."""

Level = Union["TrainingPrecision", str]
"""The level argument of an adapter: "O0", "O1", "O2" or a ``TrainingPrecision``."""


class TrainingPrecision:
    """A level or a policy, with a loss scale.

    A trainer calls ``cast`` and ``give_masters`` once, and ``scope``, ``scaler.scale`` and ``step`` for each batch. All
    five do nothing in ``TrainingPrecision("O0")``. Subclasses override some of them, and adapters take an instance as
    their level.

    Args:
        level: "O0", "O1" or "O2", as in ``amp.auto_cast`` and ``amp.decorate``.
        dtype: torch.float16, torch.bfloat16 or their names; None means float16 if CUDA is available, else bfloat16.
        custom_white_list: ops to run in 16 bits; see ``amp.auto_cast``.
        custom_black_list: ops to run in fp32; see ``amp.auto_cast``.
        custom_wide_list: matrix products of 16-bit operands with an fp32 result; see ``amp.auto_cast``.
        excluded_layers: modules that compute in fp32 at O1 and O2, or with a policy; see ``amp.initialize``. Buffers
            that a cast would destroy, such as the frequencies of rotary embeddings, always stay fp32.
        module_filter: their long form; see ``amp.initialize``.
        scaler: the loss scaler. None means an ``amp.GradScaler`` in float16, and no scaling in bfloat16.
        policy: a ``halfstep.Policy`` that replaces ``level``, ``dtype`` and op lists, as for ``amp.initialize``. At O1
            it casts in the whole process.
        products: the formats of the operands of linear layers; see ``amp.set_products``.
        opt_level: Apex's name of ``level``.

    Attributes:
        half: the 16-bit dtype.
        scaler: the loss scaler, which may be disabled.
        name: a short name, such as "bf16-halfstep-O2".

    Raises:
        ArgumentValueError: for a level, dtype or op that is not allowed.
        ArgumentTypeError: for a scaler or policy of another type.
        UsageError: for a policy together with an argument that it replaces.
    """

    def __init__(
        self,
        level: str = "O1",
        dtype: torch.dtype | str | None = None,
        *,
        custom_white_list: Iterable[object] | None = None,
        custom_black_list: Iterable[object] | None = None,
        custom_wide_list: Iterable[object] | None = None,
        excluded_layers: Any = None,
        module_filter: Any = None,
        scaler: amp.GradScaler | None = None,
        policy: Policy | None = None,
        products: RecipeChoice = None,
        opt_level: str | None = None,
    ) -> None:
        if (level := opt_level or level) not in ("O0", "O1", "O2"):
            raise ArgumentValueError(f"level={level!r} must be O0, O1 or O2. For any other precision, pass policy=.")
        check_kind("scaler", scaler, (amp.GradScaler, NoneType), "a halfstep.amp.GradScaler")
        check_kind("policy", policy, (Policy, NoneType), "a halfstep.Policy")
        if policy is not None:
            if level != "O1" or (dtype, custom_white_list, custom_black_list, custom_wide_list) != (None,) * 4:
                raise UsageError(
                    "policy= says what level, dtype and the op lists say, and one of them was given too. Leave it out."
                )
            dtype = policy.compute_dtype if policy.compute_dtype in (torch.float16, torch.bfloat16) else None
            scaler = scaler or amp.GradScaler.from_loss_scale(policy.loss_scale)
        self._level, self._policy, self._products = level, policy, products
        self.half = default_half("cuda" if torch.cuda.is_available() else "cpu") if dtype is None else parse_half(dtype)
        self.scaler = scaler or amp.GradScaler(self.half is torch.float16 and level != "O0", decr_every_n_nan_or_inf=1)
        self.name = f"{'16' if self.half is torch.float16 else 'bf16'}-halfstep-{level if policy is None else 'policy'}"
        self._layers = {"excluded_layers": excluded_layers, "module_filter": module_filter}
        self._scope: AbstractContextManager[Any] = nullcontext()  # with a policy, the hooks of the model cast
        if policy is None:
            if level == "O2":
                custom_black_list = {*(custom_black_list or ()), *(LOSSES - set(custom_white_list or ()))}
            self._scope = amp.auto_cast(
                True, custom_white_list, custom_black_list, level, self.half, custom_wide_list=custom_wide_list
            )
        self.__setstate__({})

    @classmethod
    def of(cls, level: Level = "O1", dtype: torch.dtype | str | None = None, **options: Any) -> TrainingPrecision:
        """Return ``level`` if it is a ``TrainingPrecision``, else build one from the arguments.

        Raises:
            UsageError: for a ``TrainingPrecision`` together with other arguments.
        """
        if isinstance(level, TrainingPrecision) and (dtype is not None or options):
            raise UsageError(f"Give dtype={dtype} and {options} to the {type(level).__name__}, not beside it.")
        return level if isinstance(level, TrainingPrecision) else cls(level, dtype, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out models and weights, which belong to this process: pickled optimizers refer to this object."""
        return {name: value for name, value in vars(self).items() if name not in ("_models", "_weights")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._models: WeakSet[nn.Module] = WeakSet()
        self._weights: MutableMapping[torch.Tensor, torch.Tensor] = WeakIdKeyDictionary()

    @property
    def casts_weights(self) -> bool:
        """True if the precision casts weights to 16 bits."""
        return self._level == "O2" if self._policy is None else self._policy.param_dtype is self.half

    def scope(self) -> AbstractContextManager[Any]:
        """Return the casting scope for models and losses."""
        return self._scope

    def scoped(self, method: Any, wrapper: Callable[[Any], Any]) -> Any:
        """Wrap a method to run in the scope and in ``wrapper``; a copy of its object runs the copy's method."""
        function = getattr(method, "__func__", method)

        @functools.wraps(function)
        def in_scope(*args: Any, **kwargs: Any) -> Any:
            with self.scope():
                return function(*args, **kwargs)

        return MethodType(wrapper(in_scope), method.__self__) if function is not method else wrapper(in_scope)

    def shard_policy(self) -> Any:
        """The ``mp_policy`` of ``fully_shard`` at O2: FSDP2 casts by itself, and its fp32 shards are the masters."""
        from torch.distributed.fsdp import MixedPrecisionPolicy  # imported when asked for

        if any(self._layers.values()):
            raise UsageError(
                "FSDP2 casts whole groups of parameters, where excluded_layers and module_filter have no effect. Leave "
                "them out, and call fully_shard on each of these modules, with a MixedPrecisionPolicy() of its own."
            )
        return MixedPrecisionPolicy(self.half, reduce_dtype=torch.float32, output_dtype=torch.float32)

    def cast(self, model: nn.Module, parts: Sequence[nn.Module] = ()) -> nn.Module:
        """Cast the weights of a model in place, once. The fp32 weights are kept so that masters start from them.

        Args:
            model: the model; changed in place.
            parts: with a policy, the submodules that the trainer calls instead of the model itself.

        Returns:
            The model.
        """
        if model in self._models:
            return model
        if self._products is not None:
            amp.set_products(model, self._products)
        before = [(param, param.detach()) for param in model.parameters() if param.requires_grad and not is_half(param)]
        if self._policy is not None:
            unscaled = self._policy.replace(loss_scale=1.0)
            amp.initialize(list(parts) or [model], policy=unscaled, verbosity=0, **self._layers)
        elif self._level == "O2" or (self._level == "O1" and any(self._layers.values())):
            saved = "float32" if self._level == "O2" else None
            amp.decorate(model, None, self._level, self.half, None, saved, **self._layers)
        self._weights.update((param, weight) for param, weight in before if is_half(param))
        self._models.add(model)
        return model

    def give_masters(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer masters, once, if it trains 16-bit weights: cast weights, or weights loaded in 16 bits."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        wanted = self._level != "O0" if self._policy is None else self._policy.master_weights
        if wanted and not amp.has_masters(optimizer) and any(is_half(p) and p.requires_grad for p in params):
            amp.give_masters(optimizer, self._weights)
        for param in params:
            self._weights.pop(param, None)

    @staticmethod
    def has_masters_of(optimizer: torch.optim.Optimizer, params: Iterable[torch.Tensor]) -> bool:
        """True if an optimizer has masters and trains exactly these parameters, not counting frozen ones."""
        own = [param for group in optimizer.param_groups for param in group["params"]]
        mine, given = ({id(param) for param in each if param.requires_grad} for each in (own, params))
        return amp.has_masters(optimizer) and mine == given

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer, unless its gradients overflowed, and update the loss scale.

        Returns:
            The result of ``GradScaler.step``, which is true if the step was taken.
        """
        result = self.scaler.step(optimizer, *args, **kwargs)
        self.scaler.update()
        return result
