"""Modules in another dtype: their parameters and buffers, inputs and outputs, what they save, and how their ops run.

Whatever hangs on a module is a hook that pickles and copies by value. So a ``copy.deepcopy``, a pickle or a
``DataParallel`` replica of a converted model is a converted model of its own.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from ..core.callers import caller_in
from ..core.dtypes import dtype_name, parse_dtype
from ..core.errors import ArgumentTypeError, NotScriptableError, UsageError
from ..core.torch_compat import (
    BatchNorm,
    buffers_of,
    forward_hooks,
    hook_tables,
    parameters_of,
    public_hook,
)
from ..gradients.held_masters import settle
from ..gradients.master_registry import master_of, write_master
from ..kernels.shards import is_sharded
from . import dynamo
from .containers import cast_tree
from .current import leave_traced
from .dynamo import not_by_itself
from .scope import OpCasting, enter, join_session, keep_session, leave, moved_to

__all__ = [
    "PARALLEL",
    "BatchNorm",
    "ModuleHooks",
    "SaveAs",
    "add_hooks",
    "cast_module",
    "casting_of",
    "device_types",
    "exempt",
    "has_casting",
    "join_session_casting",
    "refuse_sharded",
    "remove_hooks",
]

PARALLEL = (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)
"""Wrappers that a model must get after it was cast: they keep what they know of its parameters."""

M = TypeVar("M", bound=nn.Module)

ModuleFilter = Callable[[nn.Module, str], "torch.dtype | str | None"]


class ModuleHooks:
    """The two forward hooks of a cast module, before and after its ``forward``, and what they do.

    Before, in this order: the weights are checked, the inputs are cast, the casting is put in force. After, also where
    ``forward`` raised: the casting ends, the outputs are cast.

    Args:
        casting: what is done to ops meanwhile, and no other casting; None leaves that to what is in force.
        explicit: whether it also wins over the user's scopes around the call.

    Attributes:
        weight: the name of a parameter and the dtype it was cast to; None where there is nothing to check.
        inputs: dtype of floating tensors among the arguments; None leaves them.
        outputs: dtype of floating tensors in what the module returns; None leaves them.
    """

    def __init__(self, casting: OpCasting | None = None, *, explicit: bool = False) -> None:
        self.casting = casting
        self.explicit = explicit
        self.weight: tuple[str, torch.dtype] | None = None
        self.inputs: torch.dtype | None = None
        self.outputs: torch.dtype | None = None

    @property
    def __name__(self) -> str:
        """What ``torch.jit.script`` asks for first, and nothing else needs."""
        raise NotScriptableError(
            "torch.jit.script cannot compile a model that amp.initialize or amp.decorate has cast: TorchScript cannot "
            "read its hooks. Script the model before it is cast, or use torch.jit.trace or torch.export, which record "
            "what hooks do."
        )

    def __deepcopy__(self, memo: Any) -> ModuleHooks:
        """Those of a copied module. The session of the original lasts as long as its copies."""
        copied = copy.copy(self)
        if self.casting is not None:
            keep_session(self.casting, copied)
        return copied

    def attach_to(self, module: nn.Module) -> ModuleHooks:
        """Put them on a module: outside of the user's hooks after ``forward``, which see what was cast."""
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self, prepend=True, always_call=True)
        hooks = forward_hooks(module)
        ordered = list(hooks.items())
        hooks.clear()
        hooks.update(ordered)  # Dynamo of torch 2.11 runs them in the order in which they came
        return self

    @not_by_itself
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Before the forward."""
        compiling = torch.compiler.is_dynamo_compiling()
        if self.weight is not None:
            if not torch.compiler.is_compiling():
                settle(refresh=False)
            _check_weight(module, *self.weight)
        if self.inputs is not None:
            args = tuple([cast_tree(arg, self.inputs) for arg in args])
            kwargs = cast_tree(kwargs, self.inputs) if kwargs else kwargs
        if self.casting is not None and compiling:
            (dynamo.enter_scope if self.explicit else dynamo.enter_model)(self.casting)
        elif self.casting is not None:
            if args and isinstance(args[0], torch.Tensor) and args[0].device.type not in self.casting.devices:
                self._move(module)
            enter(self.casting, self, sys._getframe(1), explicit=self.explicit)
        return None if self.inputs is None else (args, kwargs)

    @not_by_itself
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the forward, also if it failed."""
        if self.casting is not None:
            if torch.compiler.is_dynamo_compiling():
                leave_traced()
            else:
                leave(self)
        return None if self.outputs is None else cast_tree(output, self.outputs)

    def _move(self, module: nn.Module) -> None:
        """Cast on the device of the model too, if it has moved to one of another type."""
        first = next(module.parameters(), None)
        if self.casting is not None and first is not None and first.device.type not in self.casting.devices:
            self.casting = moved_to(first.device.type, self.casting)


def _check_weight(module: Any, name: str, dtype: torch.dtype) -> None:
    """Look at a parameter, if it is still there.

    Raises:
        UsageError: if it has another dtype than it was cast to.
    """
    weight = module
    for part in name.split("."):
        weight = getattr(weight, part, None)
    if not isinstance(weight, torch.Tensor) or weight.dtype is dtype:
        return
    if caller_in("torch.nn.utils.stateless") is not None:
        raise UsageError(
            f"torch.func.functional_call was given {name} in {dtype_name(weight.dtype)}, and this model computes with "
            f"weights of {dtype_name(dtype)}. Give it weights in the dtype of those that they stand for: "
            "{name: w.to(model.get_parameter(name).dtype) for name, w in weights.items()}. Gradients go through this "
            "cast, so the weights that you update may stay fp32. Or call it on a model in fp32: "
            "amp.master_model(model), or O1, whose weights are fp32."
        )
    raise UsageError(
        f"The weight {name} was cast to {dtype_name(dtype)} and is {dtype_name(weight.dtype)} now: model.float(), "
        "half() or to(dtype) was called after amp.initialize or amp.decorate, or another weight was put in its place, "
        "as load_state_dict(assign=True) does. Leave the dtypes to the level, and leave out assign=True: "
        "model.state_dict() is fp32 as it is, and amp.master_model(model) is an fp32 copy."
    )


def exempt(model: M) -> M:
    """Leave a model as it is while O1 is on in the process: its forward passes run without op casting.

    ::

        student, optimizer = amp.initialize(student, optimizer, opt_level="O1")
        teacher = amp.exempt(teacher)  # computes as if there were no amp

    What it computes outside of ``forward`` (a loss, say) is cast like everything else; ``amp.disable_casts`` is a block
    without it.

    Args:
        model: any module; calling this twice is calling it once.

    Returns:
        The model.

    Raises:
        ArgumentTypeError: for something else than a module.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"amp.exempt takes a torch.nn.Module, not {type(model).__name__}.")
    if not has_casting(model, explicit=True):
        ModuleHooks(OpCasting(None, enabled=False), explicit=True).attach_to(model)
    return model


def join_session_casting(module: nn.Module, args: Any) -> None:
    """A forward pre-hook: the thread that runs this module takes part in the casting of the process."""
    join_session()


class SaveAs:
    """A state-dict hook of one module: its floating parameters and buffers are saved in ``dtype``.

    A parameter with an fp32 master is saved from the master, so that a checkpoint loses nothing. Most entries are
    copies, and what a user writes into those reaches no weight. A deep copy of the module has no masters. Its
    ``state_dict()`` holds its own tensors, so that it can keep an average of weights.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._copied = False

    def __deepcopy__(self, memo: Any) -> SaveAs:
        made = SaveAs(self.dtype)
        made._copied = True
        return public_hook(made)

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Replace the module's own entries."""
        for name, tensor in [*parameters_of(module).items(), *buffers_of(module).items()]:
            key = prefix + name
            if tensor is None or key not in state_dict or not tensor.is_floating_point():
                continue
            master = master_of(tensor)
            if master is not None or not self._copied:
                state_dict[key] = (state_dict[key] if master is None else master.detach()).to(self.dtype)


def load_masters(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any, *_: Any) -> None:
    """A load-state-dict pre-hook of one module: masters are loaded too, with the values before they are rounded.

    Raises:
        UsageError: if torch is set to swap parameters, which it refuses for those with masters.
    """
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    if swaps and any(master_of(param) is not None for param in module.parameters()):
        raise UsageError(
            "load_state_dict() cannot swap parameters that have fp32 masters, and "
            "torch.__future__.set_swap_module_params_on_conversion(True) asks for that. Set it to False before "
            "load_state_dict(): then the values are copied into the parameters and their masters. Nothing was loaded."
        )
    for name, param in parameters_of(module).items():
        value = state_dict.get(prefix + name)
        if param is None or param.is_meta:  # a master on the meta device has no value either
            continue
        if isinstance(value, torch.Tensor) and value.shape == param.shape:
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
        keep: tells which submodules to leave as they are, also where they share a parameter with others. torch's
            norms accept 16-bit input with fp32 parameters, so they need nothing else.
        module_filter: asked for each submodule with its qualified name ("" for the model); a dtype it returns is
            used for that module's own parameters and buffers instead, and its inputs and outputs are cast. None
            leaves the choice to the other arguments.
    """
    # Nothing changes before every module was asked about: a filter may raise.
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
        _hooks_of(model).weight = probe, dtype
    for module, target in targets:
        if target != dtype:
            hooks = _hooks_of(module)
            hooks.inputs, hooks.outputs = target, dtype
        for tensor in _own_tensors(module):
            if tensor.is_floating_point() and tensor.dtype != target and id(tensor) not in kept:
                tensor.data = tensor.data.to(target)
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.to(target)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()


def refuse_sharded(models: Iterable[nn.Module], dtype: torch.dtype | None) -> None:
    """Refuse to cast what FSDP2 has cut into shards already: it would still use the parameters that it knows.

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


def add_hooks(
    model: nn.Module,
    *,
    inputs: torch.dtype | None = None,
    outputs: torch.dtype | None = None,
    saved: torch.dtype | None = None,
    casting: OpCasting | None = None,
) -> None:
    """Put the hooks on a model.

    Args:
        model: the module whose calls are to be cast.
        inputs: dtype of floating arguments; None leaves them.
        outputs: dtype of floating results; None leaves them. User hooks see the cast output.
        saved: dtype of floating entries in ``state_dict()`` of the model and of each of its submodules.
        casting: what is done to ops while the model runs; None adds no such hook.
    """
    if casting is not None or inputs is not None or outputs is not None:
        hooks = _hooks_of(model)
        hooks.casting = casting or hooks.casting
        hooks.inputs = inputs or hooks.inputs
        hooks.outputs = outputs or hooks.outputs
    if saved is not None:
        for module in model.modules():
            module.register_state_dict_post_hook(SaveAs(saved))
            module.register_load_state_dict_pre_hook(load_masters)


def _ours(module: nn.Module) -> list[ModuleHooks]:
    """The hooks of ours on a module: at most one that is explicit, and one other."""
    return [hook for hook in forward_hooks(module).values() if isinstance(hook, ModuleHooks)]


def _hooks_of(module: nn.Module) -> ModuleHooks:
    """The hooks of a module that are not explicit; they are put on if they are not there."""
    found = next((hooks for hooks in _ours(module) if not hooks.explicit), None)
    return found or ModuleHooks().attach_to(module)


def remove_hooks(model: nn.Module) -> None:
    """Remove the hooks that ``add_hooks`` and ``cast_module`` put on a model; its dtypes stay."""
    for module in model.modules():
        for hooks in hook_tables(module):
            for key, hook in list(hooks.items()):
                if _is_ours(hook):
                    del hooks[key]


def _is_ours(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch keeps some in a wrapper
    owner = getattr(hook, "__self__", hook)
    return isinstance(owner, (ModuleHooks, SaveAs)) or hook is load_masters


def device_types(models: Iterable[nn.Module]) -> set[str] | None:
    """The types of the devices that hold the parameters of some models; None if they have none."""
    return {param.device.type for model in models for param in model.parameters()} or None


def has_casting(model: nn.Module, *, explicit: bool = False) -> bool:
    """Whether a casting of its own is in force while a model runs, ``explicit`` or not."""
    return any(hooks.casting is not None and hooks.explicit == explicit for hooks in _ours(model))


def casting_of(model: nn.Module) -> OpCasting | None:
    """What is done to ops while a model runs; None if nobody has put a casting on it."""
    return next((hooks.casting for hooks in _ours(model) if hooks.casting is not None), None)
