"""Modules in another dtype: their parameters and buffers, inputs and outputs, what they save, and how their ops run.

Everything put on a module is a hook that pickles and copies by value. So a ``copy.deepcopy``, a pickle or a
``DataParallel`` replica of a converted model is a converted model of its own.
"""

from __future__ import annotations

import copy
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from ..core.checks import check_kind
from ..core.dtypes import HALF_DTYPES, cast_error, dtype_name
from ..core.errors import NotScriptableError, UsageError
from ..core.oplists import OpLists
from ..core.oplists.tables import OPS
from ..kernels.shards import is_sharded
from ..parameters.held_masters import MATERIALIZED, sync_held_masters
from ..torch_internals.callers import caller_in
from ..torch_internals.torch_compat import BatchNorm, forward_hooks, hook_tables, jit_tracing_state
from . import dynamo
from .buffers import UpdatedBuffers, buffers_to_keep
from .config import dtype_of
from .containers import Made, cast_tree
from .current import Scope, clear_cache, leave_traced, thread
from .dynamo import not_by_itself
from .first_passes import FirstPasses
from .inputs import ModelInputs, ModuleInputs, write_back
from .methods import unwatch_methods, watch_methods
from .saved import SaveAs, load_masters
from .scope import OpCasting, enter, keep_session, leave, moved_to
from .sharded import cast_shards, check_groups

__all__ = [
    "PARALLEL",
    "BatchNorm",
    "ModuleHooks",
    "SaveAs",
    "add_borders",
    "add_hooks",
    "cast_module",
    "copies_of",
    "device_types",
    "exempt",
    "has_casting",
    "hooks_of",
    "remove_hooks",
]

PARALLEL = (nn.parallel.DistributedDataParallel, nn.parallel.DataParallel)
"""Wrappers that a model must get after it was cast: they keep what they know of its parameters."""

logger = logging.getLogger("halfstep")

M = TypeVar("M", bound=nn.Module)
Chosen = Mapping[nn.Module, torch.dtype]

_copies: weakref.WeakKeyDictionary[ModuleHooks, Any] = weakref.WeakKeyDictionary()
"""For the hooks of a copy of a 16-bit model: the hooks of the model, and modules that ``copy.deepcopy`` was making."""


class ModuleHooks:
    """The two forward hooks of a cast module, before and after its ``forward``, and what they do.

    Before, in this order: the weights are checked, the inputs are cast, the casting is put in force. After, also where
    ``forward`` raised: the casting ends, the outputs are cast.

    A module with a dtype of its own, an island, has explicit hooks. The outermost call on the stack casts arguments.
    Modules inside of it find its casting in force, and do nothing. So a submodule may be called inside and outside.

    An fp32 island gives its result as it is to ops that meet: they cast it as they cast any fp32 tensor, and what the
    model returns has never been rounded. Nothing remembers the result, so anything done with it (writes, hooks,
    checkpoints, autograd functions) is done to the one tensor that there is.

    Args:
        casting: the casting of ops meanwhile, in place of any other; None keeps the casting in force.
        explicit: True if it also wins over the user's scopes around the call.

    Attributes:
        weight: the name of a parameter and the dtype it was cast to; None where there is nothing to check.
        inputs: casts floating tensors among the arguments; None leaves them.
        outputs: dtype of floating tensors in what the module returns; None leaves them. See ``_result_dtype``.
        passes: the record of the first passes; None if ops do not meet.
        updated: finds the buffers that the model updates itself; None after its first training passes.
    """

    def __init__(self, casting: OpCasting | None = None, *, explicit: bool = False) -> None:
        self.casting = casting
        self.explicit = explicit
        self.weight: tuple[str, torch.dtype] | None = None
        self.inputs: ModuleInputs | None = None
        self.outputs: torch.dtype | None = None
        self.passes: FirstPasses | None = None
        self.updated: UpdatedBuffers | None = None

    @property
    def __name__(self) -> str:
        """Refuse ``torch.jit.script``, which reads this name first; nothing else needs it."""
        raise NotScriptableError(
            "torch.jit.script cannot compile a model that amp.initialize or amp.decorate has cast: TorchScript cannot "
            "read its hooks. Script the model before it is cast, or use torch.jit.trace or torch.export, which record "
            "what hooks do."
        )

    def __deepcopy__(self, memo: Any) -> ModuleHooks:
        """Return the hooks of a copied module. The session of the original lasts as long as its copies."""
        copied = copy.copy(self)
        copied.updated = copy.deepcopy(self.updated, memo)  # nobody asks it for masters: a copy has none
        if self.casting is not None:
            keep_session(self.casting, copied)
        if self.weight is not None:  # of a whole model; `amp.master_model` makes copies without these hooks
            _copies[copied] = weakref.ref(self), [weakref.ref(m) for m in memo.values() if isinstance(m, nn.Module)]
            logger.info("The copy of a 16-bit model is 16-bit. For an EMA average amp.master_model(model), in fp32.")
        return copied

    def attach_to(self, module: nn.Module) -> ModuleHooks:
        """Put them on a module, unless they are there: outside of the user's hooks, which see what was cast."""
        hooks = forward_hooks(module)
        if self in hooks.values():
            return self
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self, prepend=True, always_call=True)
        ordered = list(hooks.items())
        hooks.clear()
        hooks.update(ordered)  # Dynamo of torch 2.11 runs them in the order in which they came
        return self

    @not_by_itself
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Before the forward."""
        compiling = torch.compiler.is_dynamo_compiling()
        if self.explicit and self.casting is not None and thread.key == self.casting.key:
            thread.traced.append(None) if compiling else thread.open.append(Scope(self, sys._getframe(1)))
            return None
        if compiling:
            return self._before_compiled(module, args, kwargs)
        if self.casting is not None:
            self._follow(module, args, self.casting)
        foreign = self.weight is not None and _check_weight(module, *self.weight, meets=self.passes is not None)
        casting, passes = self.casting, self.passes
        if passes is not None and jit_tracing_state() is not None:
            casting, passes = passes.recorded(), None
        if passes is not None and self.updated is not None and module.training and self.updated.begin(module, passes):
            self.updated = None
        casts: Made = []
        if self.inputs is not None:
            args, kwargs = self.inputs.cast(args, kwargs, None if passes is None else module.training, casts)
        if passes is not None:
            passes.begin("forward", module, args, kwargs, self, sys._getframe(1), foreign=foreign).casts = casts
        elif casting is not None:
            enter(casting, self, sys._getframe(1), explicit=self.explicit).casts = casts
        return None if self.inputs is None else (args, kwargs)

    def _before_compiled(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The same where Dynamo traces: no pass is watched, and nothing is written back to inputs."""
        if self.weight is not None:
            _check_weight(module, *self.weight, meets=False)
        if self.inputs is not None:
            args, kwargs = self.inputs.cast(args, kwargs, None, None)
        if (casting := self.casting if self.passes is None else self.passes.recorded()) is not None:
            (dynamo.enter_scope if self.explicit else dynamo.enter_model)(casting)
        return None if self.inputs is None else (args, kwargs)

    @not_by_itself
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the forward, also if it failed."""
        widened = True
        if self.casting is not None and torch.compiler.is_dynamo_compiling():
            leave_traced()
        elif self.casting is not None:
            latest = thread.open[-1] if thread.open else None
            leave(self)
            if latest is not None and latest.owner is self:
                widened = bool(latest.casts)
                self._learn(module, latest, output)
        dtype = self._result_dtype(widened) if self.explicit and self.outputs is not None else self.outputs
        return None if dtype is None else cast_tree(output, dtype)

    def _result_dtype(self, widened: bool) -> torch.dtype | None:
        """The dtype of what an island returns, once it has ended; None leaves it.

        Where no ops meet (a call from outside of the model, or ``cast_ops=False``), a layer that follows would refuse
        fp32. A block without casts, of a user who has given fp32, gets fp32.
        """
        around = dtype_of(thread.key)
        if around is None:
            return self.outputs if widened or not thread.explicit else None
        return None if self.casting is None or self.casting.dtype is torch.float32 else around

    def _learn(self, module: nn.Module, scope: Scope, output: Any) -> None:
        """Note what a pass has shown, and write back what it has written to its inputs."""
        if self.passes is not None and (scope.watched is not None or output is None):
            self.passes.end(scope, sys.exc_info()[1] if output is None else None)
        if any(items is not None or cast._version for _, cast, items in scope.casts):
            write_back(scope.casts)
        if self.updated is not None and module.training and output is not None:
            self.updated.end(module)

    def _follow(self, module: nn.Module, args: Any, casting: OpCasting) -> None:
        """Follow what others did to the module: FSDP2 has sharded it, or it has moved to a device of another type."""
        if hasattr(type(module), "unshard"):
            # FSDP2 frees the whole weights after each forward pass, and reduces their gradients when the backward pass
            # leaves a module. The gradient of a cast from an earlier forward pass would come after that.
            clear_cache()
        if args and isinstance(args[0], torch.Tensor) and args[0].device.type not in casting.devices:
            first = next(module.parameters(), None)
            if first is not None and first.device.type not in casting.devices:
                self.casting = moved_to(first.device.type, casting)
                if self.passes is not None:
                    self.passes.follow(self.casting)


def _check_weight(module: Any, name: str, dtype: torch.dtype, *, meets: bool) -> bool:
    """Look at a parameter, if it is still there. True if it has another dtype than it was cast to.

    ``torch.func.functional_call`` may put others there where ops ``meets``, as MAML does with fp32 weights.

    Raises:
        UsageError: if it has another dtype than it was cast to.
    """
    if not torch.compiler.is_compiling() and MATERIALIZED:
        sync_held_masters(refresh=False)
    weight = module
    for part in name.split("."):
        weight = getattr(weight, part, None)
    if not isinstance(weight, torch.Tensor) or weight.dtype is dtype:
        return False
    if caller_in("torch.nn.utils.stateless") is not None:
        if meets:
            return True
        raise UsageError(
            f"torch.func.functional_call was given {name} in {dtype_name(weight.dtype)}, and this model computes with "
            f"weights of {dtype_name(dtype)}. Give it weights in the dtype of those that they stand for: "
            "{name: w.to(model.get_parameter(name).dtype) for name, w in weights.items()}. Gradients go through this "
            "cast, so the weights that you update may stay fp32. Or call it on a model in fp32: "
            "amp.master_model(model), or O1, whose weights are fp32."
        )
    raise cast_error(name, dtype, weight.dtype)


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
    check_kind("model of amp.exempt", model, nn.Module, "a torch.nn.Module")
    if not has_casting(model, explicit=True):
        ModuleHooks(OpCasting(None, enabled=False), explicit=True).attach_to(model)
    return model


def cast_module(
    model: nn.Module,
    dtype: torch.dtype,
    *,
    keep: Callable[[nn.Module], bool] = lambda module: False,
    chosen: Chosen = MappingProxyType({}),
    spare_buffers: bool = False,
) -> list[str]:
    """Cast the floating parameters, their gradients and the buffers of a model in place; parameters keep identity.

    Parameters that are cut into shards are cast, too. A model of FSDP2 must not have run yet. In a model that is not in
    float64, a module in float64 stays so: its inputs are in float64, because the model casts them.

    Args:
        model: any module; shared parameters stay shared.
        dtype: a floating dtype.
        keep: tells which submodules to leave as they are, also where they share a parameter with others. torch's
            norms accept 16-bit input with fp32 parameters, so they need nothing else.
        chosen: the dtypes that the user has chosen for modules, which hold for all in them; see ``add_borders``. A
            parameter that such a module shares with others has its dtype.
        spare_buffers: leave ``buffers_to_keep`` as they are, and make those fp32 later that the model updates.

    Returns:
        The qualified names of those.
    """
    islands = _islands(chosen, dtype)
    mixed = any(p.dtype is not torch.float64 for p in model.parameters() if p.is_floating_point())
    targets: list[tuple[str, nn.Module, torch.dtype | None]] = []
    for name, module in model.named_modules():
        target = islands.get(module, dtype)
        wide = mixed and any(p.dtype is torch.float64 for p in module.parameters(recurse=False))
        stays = module not in chosen and (wide or (target == dtype and keep(module)))
        targets.append((f"{name}." if name else "", module, None if stays else target))
    # The later decides on what modules share: one that stays, then an island.
    targets.sort(key=lambda one: (one[2] != dtype) + (one[2] is None))
    goals = {id(t): target for _, module, target in targets for t in _own_tensors(module) if t.is_floating_point()}
    shards = {id(p): goal for p in model.parameters() if is_sharded(p) and (goal := goals.get(id(p))) is not None}
    if shards:
        check_groups(model, shards)
    add_borders(model, chosen, dtype)
    spared: list[str] = []
    values: dict[torch.Tensor, torch.Tensor] = {}
    for prefix, module, own in targets:
        if own is None:
            continue
        for name, buffer in buffers_to_keep(module, own).items() if spare_buffers else ():
            spared += [prefix + name] if goals[id(buffer)] is not None else []
            goals[id(buffer)] = None
        # Whether BatchNorm has its statistics in 16 bits is what the level says, or keep_batchnorm_fp32.
        keeps_updated = spare_buffers and not isinstance(module, BatchNorm)
        for tensor in _own_tensors(module):
            if (goal := goals.get(id(tensor))) not in (None, tensor.dtype) and id(tensor) not in shards:
                if keeps_updated and type(tensor) is torch.Tensor and tensor.dtype is torch.float32:
                    values[tensor] = tensor.data
                tensor.data = tensor.data.to(goal)
                if tensor.grad is not None:
                    tensor.grad = tensor.grad.to(goal)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
            if own.itemsize == 2:  # its code refuses inputs of another dtype than its weights
                hooks_of(module).attach_to(module).inputs = ModuleInputs(own)
    if shards:
        cast_shards(model, shards)
    # A frozen int8 weight of torchao's keeps its dtype in any cast.
    probe = next((name for name, p in model.named_parameters() if goals.get(id(p)) is p.dtype is dtype), None)
    if probe is not None and dtype.itemsize == 2:
        hooks_of(model).attach_to(model).weight = probe, dtype
    if values:
        hooks_of(model).attach_to(model).updated = UpdatedBuffers(values)
    return spared


def _islands(chosen: Chosen, dtype: torch.dtype | None) -> dict[nn.Module, torch.dtype]:
    """The dtypes of islands in a model with a dtype, and of all modules in them; chosen ones come from outside in."""
    found: dict[nn.Module, torch.dtype] = {}
    for module, target in chosen.items():
        if target != dtype or module in found:
            found.update((inner, chosen.get(inner, target)) for inner in module.modules())
    return found


def add_borders(model: nn.Module, chosen: Chosen, dtype: torch.dtype | None, *, meets: bool = True) -> None:
    """Put hooks on islands: modules with a dtype of their own, and all modules in them that have parameters or buffers.

    Args:
        model: the model that has them. Where it is an island itself, it returns what it computes.
        chosen: the dtypes that the user has chosen for modules.
        dtype: the dtype of the model; None leaves what islands return.
        meets: False at O0, where there are no 16 bits to meet: an island then needs no function mode, which would turn
            off the fast path of attention.
    """
    found, devices = _islands(chosen, dtype), device_types([model])
    settings: dict[str, Any] = {"enabled": False, "devices": devices, "meets": meets}
    # In fp32 all ops compute in fp32, also if they meet a 16-bit tensor.
    lists = {torch.float32: OpLists("OD", black=tuple(op.name for op in OPS.values() if op.reason == "matrix-unit"))}
    castings = {target: OpCasting(target, lists.get(target), **settings) for target in set(found.values())}
    for name, module in model.named_modules():
        owns = module in chosen or any(map(_own_tensors, module.modules()))
        # A parametrization computes a weight, also for code outside that reads it.
        if owns and module in found and "parametrizations" not in name.split("."):
            target, hooks = found[module], hooks_of(module, explicit=True).attach_to(module)
            hooks.casting, hooks.outputs = castings[target], None if module is model else dtype
            hooks.inputs = (ModuleInputs if target in HALF_DTYPES else ModelInputs)(target)


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def add_hooks(
    model: nn.Module,
    *,
    inputs: torch.dtype | None = None,
    outputs: torch.dtype | None = None,
    saved: torch.dtype | None = None,
    casting: OpCasting | None = None,
    always_meets: bool = False,
    spared: Iterable[str] = (),
) -> None:
    """Put the hooks on a model.

    Args:
        model: the module whose calls are to be cast.
        inputs: dtype of floating arguments; None leaves them.
        outputs: dtype of floating results; None leaves them. User hooks see the cast output.
        saved: dtype of floating entries in ``state_dict()`` of the model and of each of its submodules.
        casting: the casting of ops while the model runs; None adds no such hook.
        always_meets: True if ops meet in every pass, no matter what the first passes show.
        spared: names of buffers that have stayed fp32.
    """
    if casting is not None or inputs is not None or outputs is not None:
        hooks = hooks_of(model).attach_to(model)
        hooks.casting = casting or hooks.casting
        if inputs is not None and hooks_of(model, explicit=True).inputs is None:  # unless all of it is an island
            hooks.inputs = ModelInputs(inputs)
        hooks.outputs = outputs or hooks.outputs
        if casting is not None and casting.meets and not casting.enabled:
            hooks.passes = FirstPasses(casting, always=always_meets, spared=spared)
            watch_methods(model)
    if saved is not None:
        for module in model.modules():
            module.register_state_dict_post_hook(SaveAs(saved))
            module.register_load_state_dict_pre_hook(load_masters)


def hooks_of(module: nn.Module, *, explicit: bool = False) -> ModuleHooks:
    """The hooks of ours on a module, of which it has at most one that is explicit and one other, or new ones."""
    ours = (hooks for hooks in forward_hooks(module).values() if isinstance(hooks, ModuleHooks))
    return next((hooks for hooks in ours if hooks.explicit == explicit), ModuleHooks(explicit=explicit))


def copies_of(model: nn.Module) -> list[nn.Module]:
    """The deep copies of a 16-bit model that still exist."""
    own = hooks_of(model)
    made = [(hooks, module()) for hooks, (of, modules) in _copies.items() if of() is own for module in modules]
    return [module for hooks, module in made if module is not None and hooks is hooks_of(module)]


def remove_hooks(model: nn.Module) -> None:
    """Remove the hooks that ``add_hooks`` and ``cast_module`` put on a model; its dtypes stay."""
    for module in model.modules():
        for hooks in hook_tables(module):
            for key, hook in list(hooks.items()):
                if _is_ours(hook):
                    del hooks[key]
        unwatch_methods(module)


def _is_ours(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch keeps some in a wrapper
    owner = getattr(hook, "__self__", hook)
    return isinstance(owner, (ModuleHooks, SaveAs)) or hook is load_masters


def device_types(models: Iterable[nn.Module]) -> set[str] | None:
    """The types of the devices that hold the parameters of some models; None if they have none."""
    return {param.device.type for model in models for param in model.parameters()} or None


def has_casting(model: nn.Module, *, explicit: bool = False) -> bool:
    """True if a casting of its own is in force while a model runs, ``explicit`` or not."""
    return hooks_of(model, explicit=explicit).casting is not None
