"""Hooks that run a module in another dtype: they cast its parameters and buffers, its inputs and outputs and its state
dict, and set the casting of its ops.

Hooks pickle and copy by value, and nothing else is attached to a module. So a ``copy.deepcopy``, a pickle or a
``DataParallel`` replica of a cast model is an independent cast model.
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
from ..torch_internals.compiler_compat import not_by_itself
from ..torch_internals.torch_compat import BatchNorm, forward_hooks, hook_tables, jit_tracing_state
from . import dynamo
from .buffers import UpdatedBuffers, buffers_to_keep
from .config import dtype_of
from .containers import Made, cast_tree
from .current import OpScope, clear_cache, leave_traced, thread
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
"""Wrappers that must wrap a model after the cast, because they record facts about its parameters when they are
created."""

logger = logging.getLogger("halfstep")

M = TypeVar("M", bound=nn.Module)
Chosen = Mapping[nn.Module, torch.dtype]

_copies: weakref.WeakKeyDictionary[ModuleHooks, Any] = weakref.WeakKeyDictionary()
"""For the hooks of a copied 16-bit model: the hooks of the original, and the modules that ``copy.deepcopy`` made with
the copy."""


class ModuleHooks:
    """The two forward hooks of a cast module, which run before and after its ``forward``.

    The first hook checks the weights, casts the inputs and enters the casting, in this order. The second hook, which
    torch also calls if ``forward`` raised, leaves the casting and casts the outputs.

    A module in a dtype that differs from its model's, an island, has explicit hooks. Only the outermost call of an
    island casts arguments: hooks of modules within it find its casting current and do nothing. So a submodule of an
    island may be called both from within the island and from outside.

    If ops are retried when their dtypes differ (``meeting``), an fp32 island returns its fp32 result uncast: the next
    op casts it like any fp32 tensor, and a result that the model returns is never rounded. There is only one tensor,
    so that writes, hooks, checkpoints and autograd functions all see the same one.

    Args:
        casting: the casting of ops while the module runs; None keeps the current casting.
        explicit: True if the casting also overrides the user's scopes around the call.

    Attributes:
        weight: the name of a parameter to check and the dtype to which it was cast; None checks nothing.
        inputs: the cast of floating tensors among the arguments; None leaves them.
        outputs: the dtype of floating tensors in the output; None leaves them. See ``_result_dtype``.
        passes: the record of the first passes; None if ops are never retried.
        updated: the search for buffers that the model updates itself; None after its first training passes.
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
        """Refuse ``torch.jit.script``, which reads this name before anything else; no other code reads it."""
        raise NotScriptableError(
            "torch.jit.script cannot compile a model that amp.initialize or amp.decorate has cast, because TorchScript "
            "cannot compile its hooks. Script the model before you cast it, or use torch.jit.trace or torch.export, "
            "which record the ops of hooks."
        )

    def __deepcopy__(self, memo: Any) -> ModuleHooks:
        """Copy the hooks for a deep-copied module; the session of the original lasts as long as its copies."""
        copied = copy.copy(self)
        copied.updated = copy.deepcopy(self.updated, memo)  # not registered as masters: a copy's state_dict is 16-bit
        if self.casting is not None:
            keep_session(self.casting, copied)
        if self.weight is not None:  # of a whole model; `amp.master_model` makes copies without these hooks
            _copies[copied] = weakref.ref(self), [weakref.ref(m) for m in memo.values() if isinstance(m, nn.Module)]
            logger.info("The copy of a 16-bit model is 16-bit. For an EMA in fp32, use amp.master_model(model).")
        return copied

    def attach_to(self, module: nn.Module) -> ModuleHooks:
        """Register the hooks on a module once, around the user's hooks, which thus see cast inputs and outputs."""
        hooks = forward_hooks(module)
        if self in hooks.values():
            return self
        module.register_forward_pre_hook(self.before, with_kwargs=True)
        module.register_forward_hook(self, prepend=True, always_call=True)
        ordered = list(hooks.items())
        hooks.clear()
        hooks.update(ordered)  # Dynamo of torch 2.11 ignores `prepend` and runs hooks in the order of the dictionary
        return self

    @not_by_itself
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Check the weights, cast the inputs and enter the casting, before ``forward``."""
        compiling = torch.compiler.is_dynamo_compiling()
        if self.explicit and self.casting is not None and thread.key == self.casting.key:
            thread.traced.append(None) if compiling else thread.open.append(OpScope(self, sys._getframe(1)))
            return None
        if compiling:
            return self._before_compiled(module, args, kwargs)
        if self.casting is not None:
            self._follow(module, args, self.casting)
        foreign = self.weight is not None and _check_weight(module, *self.weight, retries=self.passes is not None)
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
        """Do the same while Dynamo traces, without watching the pass or writing casts back to inputs."""
        if self.weight is not None:
            _check_weight(module, *self.weight, retries=False)
        if self.inputs is not None:
            args, kwargs = self.inputs.cast(args, kwargs, None, None)
        if (casting := self.casting if self.passes is None else self.passes.recorded()) is not None:
            (dynamo.enter_scope if self.explicit else dynamo.enter_model)(casting)
        return None if self.inputs is None else (args, kwargs)

    @not_by_itself
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Leave the casting and cast the outputs, after ``forward`` has returned or raised."""
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
        """Return the dtype of an island's output, after the island has ended; None leaves the output.

        If no mode retries ops (a call from outside the model, or ``cast_ops=False``), the next layer would refuse an
        fp32 output, so it is cast. In a user's block without casts, an island that was given fp32 returns fp32.
        """
        around = dtype_of(thread.key)
        if around is None:
            return self.outputs if widened or not thread.explicit else None
        return None if self.casting is None or self.casting.dtype is torch.float32 else around

    def _learn(self, module: nn.Module, scope: OpScope, output: Any) -> None:
        """Record a watched pass, and copy in-place writes on cast inputs back to the caller's tensors."""
        if self.passes is not None and (scope.watched is not None or output is None):
            self.passes.end(scope, sys.exc_info()[1] if output is None else None)
        if any(items is not None or cast._version for _, cast, items in scope.casts):
            write_back(scope.casts)
        if self.updated is not None and module.training and output is not None:
            self.updated.end(module)

    def _follow(self, module: nn.Module, args: Any, casting: OpCasting) -> None:
        """Adapt to changes of the module: FSDP2 has sharded it, or user code moved it to another device type."""
        if hasattr(type(module), "unshard"):
            # FSDP2 frees the unsharded weights after each forward pass, and reduces their gradients when the backward
            # pass leaves the module. The gradient of a cast from an earlier forward pass would arrive after that.
            clear_cache()
        if args and isinstance(args[0], torch.Tensor) and args[0].device.type not in casting.devices:
            first = next(module.parameters(), None)
            if first is not None and first.device.type not in casting.devices:
                self.casting = moved_to(first.device.type, casting)
                if self.passes is not None:
                    self.passes.follow(self.casting)


def _check_weight(module: Any, name: str, dtype: torch.dtype, *, retries: bool) -> bool:
    """Check that a parameter, if it still exists, has the dtype to which it was cast.

    With ``retries``, ``torch.func.functional_call`` may substitute weights of another dtype, as MAML does with fp32
    weights. The result is True in this case only.

    Raises:
        UsageError: if the parameter has another dtype.
    """
    if not torch.compiler.is_compiling() and MATERIALIZED:
        sync_held_masters(refresh=False)
    weight = module
    for part in name.split("."):
        weight = getattr(weight, part, None)
    if not isinstance(weight, torch.Tensor) or weight.dtype is dtype:
        return False
    if caller_in("torch.nn.utils.stateless") is not None:
        if retries:
            return True
        raise UsageError(
            f"torch.func.functional_call got {name} in {dtype_name(weight.dtype)}, but this model computes with "
            f"{dtype_name(dtype)} weights. Pass weights in the dtype of the model's own: "
            "{name: w.to(model.get_parameter(name).dtype) for name, w in weights.items()}. Gradients flow through this "
            "cast, so the weights that you update may stay fp32. Or use a model with fp32 weights: "
            "amp.master_model(model), or O1."
        )
    raise cast_error(name, dtype, weight.dtype)


def exempt(model: M) -> M:
    """Exempt a model from O1: its forward passes run without op casting.

    ::

        student, optimizer = amp.initialize(student, optimizer, opt_level="O1")
        teacher = amp.exempt(teacher)  # computes as if there were no amp

    Ops outside ``forward``, such as the ops of a loss, are still cast; to exempt them as well, put them in an
    ``amp.disable_casts`` block.

    Args:
        model: any module; a second call for the same model does nothing.

    Returns:
        The model.

    Raises:
        ArgumentTypeError: if ``model`` is not a module.
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
    """Cast the floating parameters, gradients and buffers of a model in place; parameter objects stay the same.

    Sharded parameters are cast as well; an FSDP2 model must not have run yet. If some parameters of the model are not
    float64, a module in float64 stays float64: its inputs are float64, because the model casts them.

    Args:
        model: any module; shared parameters stay shared.
        dtype: a floating dtype.
        keep: a function that returns True for submodules to leave as they are, which also exempts parameters that they
            share with other modules. Torch's norms accept 16-bit inputs with fp32 parameters and need nothing else.
        chosen: the dtypes that the user chose for modules and their submodules; see ``add_borders``. A parameter that
            such a module shares with other modules gets its dtype.
        spare_buffers: leave ``buffers_to_keep`` as they are, and later restore fp32 for buffers that the model updates.

    Returns:
        The qualified names of the buffers that ``spare_buffers`` left as they are.
    """
    islands = _islands(chosen, dtype)
    mixed = any(p.dtype is not torch.float64 for p in model.parameters() if p.is_floating_point())
    targets: list[tuple[str, nn.Module, torch.dtype | None]] = []
    for name, module in model.named_modules():
        target = islands.get(module, dtype)
        wide = mixed and any(p.dtype is torch.float64 for p in module.parameters(recurse=False))
        keeps_dtype = module not in chosen and (wide or (target == dtype and keep(module)))
        targets.append((f"{name}." if name else "", module, None if keeps_dtype else target))
    # For a shared tensor the last module in the list decides: modules that keep their dtype come last, after islands.
    targets.sort(key=lambda item: (item[2] != dtype) + (item[2] is None))
    goals = {id(t): target for _, module, target in targets for t in _own_tensors(module) if t.is_floating_point()}
    shards = {id(p): goal for p in model.parameters() if is_sharded(p) and (goal := goals.get(id(p))) is not None}
    if shards:
        check_groups(model, shards)
    add_borders(model, chosen, dtype)
    fp32_buffers: list[str] = []
    values: dict[torch.Tensor, torch.Tensor] = {}
    for prefix, module, own in targets:
        if own is None:
            continue
        for name, buffer in buffers_to_keep(module, own).items() if spare_buffers else ():
            fp32_buffers += [prefix + name] if goals[id(buffer)] is not None else []
            goals[id(buffer)] = None
        # The level or keep_batchnorm_fp32 decides on the dtype of BatchNorm's statistics.
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
            if own.itemsize == 2:  # RNNBase refuses inputs in another dtype than its weights
                hooks_of(module).attach_to(module).inputs = ModuleInputs(own)
    if shards:
        cast_shards(model, shards)
    # A frozen int8 weight of torchao keeps its dtype in every cast, so it cannot be the probe.
    probe = next((name for name, p in model.named_parameters() if goals.get(id(p)) is p.dtype is dtype), None)
    if probe is not None and dtype.itemsize == 2:
        hooks_of(model).attach_to(model).weight = probe, dtype
    if values:
        hooks_of(model).attach_to(model).updated = UpdatedBuffers(values)
    return fp32_buffers


def _islands(chosen: Chosen, dtype: torch.dtype | None) -> dict[nn.Module, torch.dtype]:
    """Return the dtype of each island and of every module within it; ``chosen`` lists outer modules first."""
    found: dict[nn.Module, torch.dtype] = {}
    for module, target in chosen.items():
        if target != dtype or module in found:
            found.update((inner, chosen.get(inner, target)) for inner in module.modules())
    return found


def add_borders(model: nn.Module, chosen: Chosen, dtype: torch.dtype | None, *, retries: bool = True) -> None:
    """Add hooks to islands: to modules for which the user chose a dtype, and to their submodules that own tensors.

    Args:
        model: the model that contains the islands. If it is an island itself, its output is not cast.
        chosen: the dtypes that the user chose for modules.
        dtype: the dtype of the model; None leaves the outputs of islands.
        retries: False at O0, where no 16-bit tensor can meet an fp32 one: an island then needs no function mode, which
            would turn off the fast path of attention.
    """
    found, devices = _islands(chosen, dtype), device_types([model])
    settings: dict[str, Any] = {"enabled": False, "devices": devices, "retries": retries}
    # In an fp32 island every op computes in fp32, even if an argument is 16-bit.
    lists = {torch.float32: OpLists("OD", black=tuple(op.name for op in OPS.values() if op.reason == "matrix-unit"))}
    castings = {target: OpCasting(target, lists.get(target), **settings) for target in set(found.values())}
    for name, module in model.named_modules():
        owns = module in chosen or any(map(_own_tensors, module.modules()))
        # A parametrization computes a weight that code outside the island also reads.
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
    always_retries: bool = False,
    fp32_buffers: Iterable[str] = (),
) -> None:
    """Add the hooks to a model.

    Args:
        model: the module whose calls the hooks cast.
        inputs: the dtype of floating arguments; None leaves them.
        outputs: the dtype of floating outputs; None leaves them. User hooks see the cast output.
        saved: the dtype of floating entries in ``state_dict()`` of the model and of each submodule.
        casting: the casting of ops while the model runs; None leaves ops alone.
        always_retries: True to keep the function mode on in every pass, even if the first passes do not need it.
        fp32_buffers: names of buffers that stayed fp32.
    """
    if casting is not None or inputs is not None or outputs is not None:
        hooks = hooks_of(model).attach_to(model)
        hooks.casting = casting or hooks.casting
        if inputs is not None and hooks_of(model, explicit=True).inputs is None:  # unless the whole model is an island
            hooks.inputs = ModelInputs(inputs)
        hooks.outputs = outputs or hooks.outputs
        if casting is not None and casting.retries and not casting.enabled:
            hooks.passes = FirstPasses(casting, always=always_retries, fp32_buffers=fp32_buffers)
            watch_methods(model)
    if saved is not None:
        for module in model.modules():
            module.register_state_dict_post_hook(SaveAs(saved))
            module.register_load_state_dict_pre_hook(load_masters)


def hooks_of(module: nn.Module, *, explicit: bool = False) -> ModuleHooks:
    """Return halfstep's hooks on a module, or new ones; a module has at most one ``explicit`` pair and one other."""
    ours = (hooks for hooks in forward_hooks(module).values() if isinstance(hooks, ModuleHooks))
    return next((hooks for hooks in ours if hooks.explicit == explicit), ModuleHooks(explicit=explicit))


def copies_of(model: nn.Module) -> list[nn.Module]:
    """Return the deep copies of a 16-bit model that still exist."""
    own = hooks_of(model)
    made = [(hooks, module()) for hooks, (of, modules) in _copies.items() if of() is own for module in modules]
    return [module for hooks, module in made if module is not None and hooks is hooks_of(module)]


def remove_hooks(model: nn.Module) -> None:
    """Remove the hooks that ``add_hooks`` and ``cast_module`` added to a model; its tensors keep their dtypes."""
    for module in model.modules():
        for hooks in hook_tables(module):
            for key, hook in list(hooks.items()):
                if _is_ours(hook):
                    del hooks[key]
        unwatch_methods(module)


def _is_ours(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps state dict hooks
    return isinstance(getattr(hook, "__self__", hook), (ModuleHooks, SaveAs)) or hook is load_masters


def device_types(models: Iterable[nn.Module]) -> set[str] | None:
    """Return the device types of the parameters of some models; None if the models have no parameters."""
    return {param.device.type for model in models for param in model.parameters()} or None


def has_casting(model: nn.Module, *, explicit: bool = False) -> bool:
    """True if a model has hooks that enter a casting while it runs; ``explicit`` selects an island's hooks."""
    return hooks_of(model, explicit=explicit).casting is not None
