"""Whole modules in another dtype: their parameters and buffers, what goes in and out, and what they save.

Everything attached to a module is a hook that pickles and copies by value, so that ``copy.deepcopy``, ``torch.save``
and ``DataParallel`` replicas of a converted model are converted models of their own.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

from ..core.dtypes import dtype_name, parse_dtype
from ..core.errors import UsageError
from ..gradients.master_registry import master_of, write_master
from ..kernels.shards import is_sharded
from . import scopes as ops
from . import sessions
from .compiled import not_by_itself
from .containers import cast_tree

__all__ = [
    "PARALLEL",
    "AtLevel",
    "BatchNorm",
    "CastInputs",
    "CastOutputs",
    "SaveAs",
    "attach",
    "cast_module",
    "device_types",
    "is_attached",
    "join_casting",
    "refuse_sharded",
    "strip",
]

PARALLEL = (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)
"""Wrappers that must come after a model was cast: they have looked at its parameters already."""

ModuleFilter = Callable[[nn.Module, str], "torch.dtype | str | None"]


@dataclasses.dataclass(frozen=True)
class CastInputs:
    """A forward pre-hook: floating tensors among the arguments become ``dtype``."""

    dtype: torch.dtype

    @not_by_itself
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast positional and keyword arguments."""
        return cast_tree(args, self.dtype), cast_tree(kwargs, self.dtype)


@dataclasses.dataclass(frozen=True)
class ExpectWeights:
    """A forward pre-hook: a model that was cast and is no longer what it was cast to is refused.

    Args:
        name: of a parameter that was cast.
        dtype: to what.
    """

    name: str
    dtype: torch.dtype

    @not_by_itself
    def __call__(self, module: nn.Module, args: Any) -> None:
        """Look at the parameter, if it still has its place.

        Raises:
            UsageError: if it has another dtype.
        """
        weight: Any = module
        for part in self.name.split("."):
            weight = getattr(weight, part, None)
        if isinstance(weight, torch.Tensor) and weight.dtype is not self.dtype:
            raise UsageError(
                f"The weight {self.name} was cast to {dtype_name(self.dtype)} and is {dtype_name(weight.dtype)} now: "
                "model.float(), half() or to(dtype) was called after amp.initialize or amp.decorate. Leave the dtypes "
                "to the level: model.state_dict() is fp32 as it is, and amp.master_model(model) is an fp32 copy."
            )


@dataclasses.dataclass(frozen=True)
class CastOutputs:
    """A forward hook: floating tensors in what the module returns become ``dtype``."""

    dtype: torch.dtype

    @not_by_itself
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Cast the output."""
        return cast_tree(output, self.dtype)


class AtLevel:
    """Two forward hooks: while the model runs, its own casts are in force and no other's.

    Args:
        casting: what is done to ops.
        explicit: whether that also has its way over the user's scopes around the call.
    """

    def __init__(self, casting: ops.OpCasting, *, explicit: bool = False) -> None:
        self.casting = casting
        self.explicit = explicit

    def attach_to(self, model: nn.Module) -> None:
        """Put the hooks on a model."""
        model.register_forward_pre_hook(self.enter)
        model.register_forward_hook(self.leave, always_call=True)

    @not_by_itself
    def enter(self, module: nn.Module, args: Any) -> None:
        """Before the forward."""
        if torch.compiler.is_dynamo_compiling():
            ops.enter_traced_model(self.casting, explicit=self.explicit)
            return
        if args and isinstance(args[0], torch.Tensor) and args[0].device.type not in self.casting.devices:
            self._follow(module)
        ops.enter_model(self.casting, self, sys._getframe(1), explicit=self.explicit)

    @not_by_itself
    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After it, also if it failed."""
        if torch.compiler.is_dynamo_compiling():
            ops.leave_traced_model()
        else:
            ops.leave_model(self)

    def _follow(self, module: nn.Module) -> None:
        """The model may have moved since it was brought up."""
        first = next(module.parameters(), None)
        if first is not None and first.device.type not in self.casting.devices:
            self.casting = sessions.moved(self.casting, first.device.type)


def join_casting(module: nn.Module, args: Any) -> None:
    """A forward pre-hook: the thread that runs this module takes part in the process-wide op casting."""
    ops.ensure_thread()


class SaveAs:
    """A state-dict hook of one module: its floating parameters and buffers are saved in ``dtype``.

    A parameter with an fp32 master is saved from the master, so that a checkpoint loses nothing. A deep copy of the
    module has no masters; what its ``state_dict()`` holds are its own tensors, so that an average can be kept in it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._copied = False

    def __deepcopy__(self, memo: Any) -> SaveAs:
        made: Any = SaveAs(self.dtype)
        made._copied = made._from_public_api = True
        return made  # type: ignore[no-any-return]

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Replace the module's own entries."""
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            key = prefix + name
            if tensor is None or key not in state_dict or not tensor.is_floating_point():
                continue
            master = master_of(tensor)
            if master is not None or not self._copied:
                state_dict[key] = (state_dict[key] if master is None else master.detach()).to(self.dtype)


def load_masters(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any) -> None:
    """A load-state-dict pre-hook of one module: what is loaded reaches the masters unrounded, not only the weights."""
    for name, param in module._parameters.items():
        value = state_dict.get(prefix + name)
        if param is not None and isinstance(value, torch.Tensor) and value.shape == param.shape:
            rounded = write_master(param, value)
            if rounded is not None:
                state_dict[prefix + name] = rounded


def cast_module(
    model: nn.Module,
    dtype: torch.dtype,
    *,
    keep: Callable[[nn.Module], bool] = lambda module: False,
    module_filter: ModuleFilter | None = None,
) -> None:
    """Cast the floating parameters, their gradients and the buffers of a model in place; parameters keep identity.

    Args:
        model: any module; shared parameters stay shared.
        dtype: a floating dtype.
        keep: tells which submodules to leave as they are, also where they share a parameter with others; torch's
            BatchNorm and other norms take 16-bit input with fp32 parameters, so nothing else is needed for those.
        module_filter: asked for each submodule with its qualified name ("" for the model); a dtype it returns is
            used for that module's own parameters and buffers instead, and its inputs and outputs are cast at its
            borders. None leaves the choice to the other arguments.
    """
    # All is asked before anything changes: a filter may raise.
    targets: list[tuple[nn.Module, torch.dtype]] = []
    kept: set[int] = set()
    for name, module in model.named_modules():
        chosen = None if module_filter is None else module_filter(module, name)
        if chosen is None and keep(module):
            kept.update(id(tensor) for tensor in _own_tensors(module))
        else:
            targets.append((module, dtype if chosen is None else parse_dtype(chosen)))
    cast = {id(p) for module, target in targets if target == dtype for p in module.parameters(recurse=False)}
    probe = next((name for name, p in model.named_parameters() if id(p) in cast and p.is_floating_point()), None)
    if probe is not None and dtype.itemsize == 2:
        model.register_forward_pre_hook(ExpectWeights(probe, dtype), prepend=True)
    for module, target in targets:
        if target != dtype:
            module.register_forward_pre_hook(CastInputs(target), with_kwargs=True)
            module.register_forward_hook(CastOutputs(dtype), prepend=True)
        for tensor in _own_tensors(module):
            if tensor.is_floating_point() and tensor.dtype != target and id(tensor) not in kept:
                tensor.data = tensor.data.to(target)
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.to(target)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def refuse_sharded(models: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
    """Refuse to cast what FSDP2 has cut into shards already: it would go on with the parameters it knows.

    Raises:
        UsageError: if a sharded parameter has another dtype than ``dtype``.
    """
    for model in models:
        for name, param in model.named_parameters():
            if dtype is not None and param.dtype is not dtype and is_sharded(param):
                raise UsageError(
                    f"The parameter {name} is sharded already (fully_shard), and this level would cast it. Let "
                    "fully_shard cast instead: MixedPrecisionPolicy(param_dtype=torch.bfloat16) computes in 16 bits, "
                    "and the fp32 shards are the masters. For 16-bit shards cast the model before fully_shard and use "
                    "an optimizer of halfstep.optimizers with master_weights=True."
                )


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def attach(
    model: nn.Module,
    *,
    inputs: torch.dtype | None = None,
    outputs: torch.dtype | None = None,
    saved: torch.dtype | None = None,
    casting: ops.OpCasting | None = None,
) -> None:
    """Put the hooks on a model.

    Args:
        model: the module whose calls are to be cast.
        inputs: dtype of floating arguments; None leaves them.
        outputs: dtype of floating results; None leaves them. User hooks see the cast output.
        saved: dtype of floating entries in ``state_dict()`` of the model and of each of its submodules.
        casting: what is done to ops while the model runs; None leaves that to others.
    """
    if casting is not None:
        AtLevel(casting).attach_to(model)
    if inputs is not None:
        model.register_forward_pre_hook(CastInputs(inputs), with_kwargs=True)
    if outputs is not None:
        model.register_forward_hook(CastOutputs(outputs), prepend=True)
    if saved is not None:
        for module in model.modules():
            module.register_state_dict_post_hook(SaveAs(saved))
            module.register_load_state_dict_pre_hook(load_masters)


def strip(model: nn.Module) -> None:
    """Take off a model what ``attach`` and ``cast_module`` put on: its hooks, not its dtypes."""
    for module in model.modules():
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._state_dict_hooks,
            module._load_state_dict_pre_hooks,
        ):
            for key, hook in list(hooks.items()):
                if _is_ours(hook):
                    del hooks[key]


def _is_ours(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch keeps some in a wrapper
    owner = getattr(hook, "__self__", hook)
    return isinstance(owner, (AtLevel, CastInputs, CastOutputs, ExpectWeights, SaveAs)) or hook is load_masters


def device_types(models: Iterable[nn.Module]) -> set[str] | None:
    """The types of the devices that hold the parameters of some models; None if they have none."""
    return {param.device.type for model in models for param in model.parameters()} or None


def is_attached(model: nn.Module, *, explicit: bool = False) -> bool:
    """Whether a model has hooks that put casts of its own in force; ``explicit`` as of ``AtLevel``."""
    owners = [getattr(hook, "__self__", None) for hook in model._forward_pre_hooks.values()]
    return any(isinstance(owner, AtLevel) and owner.explicit == explicit for owner in owners)
